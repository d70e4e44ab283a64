"""Linear Ensemble++, and the frame that every agent with a linear posterior shares."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import Unpack

from ensemblepp.acquisition import choose
from ensemblepp.errors import ParameterError, check_all, check_int, check_real, check_shape
from ensemblepp.indices import IndexDistribution
from ensemblepp.linear import LinearPosterior
from ensemblepp.seeding import Streams
from ensemblepp.types import Contexts, Decision, Environment, StateDict, Transition, UnitSphere


class LinearOptions(TypedDict, total=False):
    """Options that every agent with a linear posterior takes; see `LinearAgent`."""

    num_arms: int | None
    num_replicas: int
    noise_scale: float
    prior_mean: float | Tensor
    prior_covariance: float | Tensor
    seed: int
    dtype: torch.dtype
    device: torch.device | str


class LinearAgent:
    """Acts greedily on scores computed from a `LinearPosterior`; subclasses say which scores.

    Args:
        feature_dim: d, number of features of an arm or context.
        index: Law of the index and number of members; None for agents without an ensemble.
        perturbation: Law of the perturbations and of the prior directions; None without an ensemble.
        num_arms: K for one posterior per arm on a shared context; None for one posterior on arm features.
        num_replicas: R, independent learners batched in one set of tensors.
        noise_scale: Standard deviation of the reward noise, in reward units. Raising it slows learning down.
        prior_mean: Prior mean of theta, a number or (feature_dim,).
        prior_covariance: Prior variance (number), diagonal or matrix. Raising it explores more at the start.
        seed: Root of the agent's random streams "init", "act" and "perturb".
        dtype: float32 or float64 for posterior and scores; contexts and rewards of any dtype are cast to it.
        device: Where posterior and generators live.

    Raises:
        ParameterError: A value that breaks a rule, by name.
    """

    def __init__(
        self,
        feature_dim: int,
        index: IndexDistribution | None = None,
        perturbation: IndexDistribution | None = None,
        *,
        num_arms: int | None = None,
        num_replicas: int = 1,
        noise_scale: float = 1.0,
        prior_mean: float | Tensor = 0.0,
        prior_covariance: float | Tensor = 1.0,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self._owner = type(self).__name__
        self.feature_dim = check_int("feature_dim", self._owner, feature_dim)
        self.num_arms = None if num_arms is None else check_int("num_arms", self._owner, num_arms)
        self.num_replicas = check_int("num_replicas", self._owner, num_replicas)
        self.streams = Streams(seed, "init", "act", "perturb", device=device)
        self.dtype = dtype
        self._index, self._perturbation = index, perturbation
        self.posterior = LinearPosterior(
            feature_dim,
            self._draw_directions(*([] if num_arms is None else [num_arms])),
            num_replicas=num_replicas,
            num_arms=num_arms,
            noise_scale=noise_scale,
            prior_mean=prior_mean,
            prior_covariance=prior_covariance,
            dtype=dtype,
            device=device,
        )

    @property
    def index_dim(self) -> int:
        """M, number of ensemble members; 0 for agents without an ensemble."""
        return self.posterior.index_dim

    def _draw_directions(self, *arms: int) -> Tensor | None:
        """Draw prior directions B for all features (of `arms` blocks)."""
        if self._perturbation is None:
            return None
        size = (self.num_replicas, *arms, self.feature_dim)
        return self._perturbation.perturbation(*size, generator=self.streams["init"], dtype=self.dtype)

    def draw_index(self, batch: int) -> Tensor | None:
        """Draw what one decision is random in, for `batch` decisions of every replica; None if nothing."""
        if self._index is None:
            return None
        return self._index.reference(self.num_replicas, batch, generator=self.streams["act"], dtype=self.dtype)

    def draw_perturbation(self, batch: int) -> Float[Tensor, "replicas batch index_dim"] | None:
        """Draw the perturbations of `batch` data of every replica; None without an ensemble."""
        if self._perturbation is None:
            return None
        return self._perturbation.perturbation(
            self.num_replicas, batch, generator=self.streams["perturb"], dtype=self.dtype
        )

    def parameter(self, index: Tensor | None) -> Float[Tensor, "replicas batch *arms feature_dim"]:
        """Return the parameter vector to act on; the posterior mean unless a subclass samples one."""
        return self.posterior.mean.unsqueeze(1)

    def scores(self, contexts: Tensor, index: Tensor | None) -> Float[Tensor, "replicas batch arms"]:
        """Return the scores to maximise."""
        return self.posterior.score(contexts, self.parameter(index))

    def act(
        self,
        contexts: Contexts,
        mask: Bool[Tensor, "replicas batch arms"] | None = None,
        *,
        index: Tensor | None = None,
    ) -> Decision:
        """Choose one action per replica and batch slot.

        Args:
            contexts: Arm features (replicas, batch, arms, feature_dim); with per-arm posteriors one context
                (replicas, batch, feature_dim); or a compact action set.
            mask: True where an arm may be chosen. Features of other arms may be anything, NaN included.
            index: What `draw_index` returns, to repeat a decision exactly; drawn from the stream "act" when None.

        Raises:
            ParameterError: Shapes that do not fit, a non-finite context, a row without an allowed arm. Posterior and
                random streams are as before the call.
        """
        with self.streams.rollback():
            if isinstance(contexts, UnitSphere):
                if contexts.feature_dim != self.feature_dim or mask is not None:
                    raise ParameterError(
                        "contexts", self._owner, f"be a UnitSphere({self.feature_dim}) without mask", contexts
                    )
                index = self.draw_index(1) if index is None else index
                return Decision(None, contexts.argmax(self._direction(self.parameter(index))))
            contexts = self._check_contexts(contexts)
            index = self.draw_index(contexts.shape[1]) if index is None else index
            scores = self.scores(contexts, index)
            usable = torch.isfinite(scores)
            if mask is not None:
                check_shape("mask", self._owner, mask, "replicas batch arms", scores.shape)
                usable |= ~mask
            # A non-finite context makes its score non-finite; the scores are feature_dim times cheaper to check.
            check_all("contexts", self._owner, "be finite and give finite scores", usable, scores)
            arm = self._choose(scores, mask)
        if self.num_arms is None:
            contexts = torch.take_along_dim(contexts, arm[..., None, None], dim=2).squeeze(2)
        return Decision(arm, contexts, scores)

    def _choose(self, scores: Tensor, mask: Tensor | None) -> Int[Tensor, "replicas batch"]:
        return choose(scores, mask, generator=self.streams["act"], owner=self._owner)

    def _direction(self, parameter: Tensor) -> Tensor:
        """Return the direction to maximise on a compact action set: a random one where the parameter is zero."""
        # All directions of a zero parameter tie.
        generator = self.streams["act"]
        draw = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=parameter.dtype)
        return torch.where((parameter == 0).all(-1, keepdim=True), draw, parameter)

    def _check_contexts(self, contexts: Tensor) -> Tensor:
        axes, sizes = "replicas batch arms feature_dim", [self.num_replicas, None, None, self.feature_dim]
        if self.num_arms is not None:
            axes, sizes = "replicas batch feature_dim", [self.num_replicas, None, self.feature_dim]
        return check_shape("contexts", self._owner, contexts, axes, sizes).to(self.dtype)

    def update(self, transition: Transition) -> dict[str, Tensor]:
        """Condition the posterior on the data.

        Returns:
            "train/prediction_error": y - x^T mu before the update, (replicas, batch), in reward units; zero where
            nothing was observed.

        Raises:
            ParameterError: Shapes that do not fit, or a non-finite value; posterior and random streams are as before.
        """
        features, reward = transition.features.to(self.dtype), transition.reward.to(self.dtype)
        if transition.observed is not None:
            check_shape("observed", self._owner, transition.observed, "replicas batch", reward.shape)
            features = torch.where(transition.observed.unsqueeze(-1), features, 0.0)
            reward = torch.where(transition.observed, reward, 0.0)
        arm = None if self.num_arms is None else transition.arm
        with self.streams.rollback():
            perturbation = transition.perturbation
            if perturbation is None:
                perturbation = self.draw_perturbation(reward.shape[-1])
            error = self.posterior.update(features, reward, perturbation, arm)
        return {"train/prediction_error": error}

    def discount(self, factor: float, *, keep_prior: bool = False) -> None:
        """Weigh all data so far by `factor`; with `keep_prior` the forgotten share of the prior is put back.

        Raises:
            ParameterError: A factor outside (0, 1].
        """
        with self.streams.rollback():
            directions = None
            if keep_prior:
                directions = self._draw_directions(*self.posterior.factor.shape[1:-2])
                directions = self.posterior.factor if directions is None else directions
            self.posterior.discount(factor, directions)

    def add_arms(self, count: int = 1) -> None:
        """Append `count` arms that start from the prior (per-arm posteriors only).

        Raises:
            ParameterError: One posterior is shared by all arms, so that new arms need no adding.
        """
        check_int("count", self._owner, count)
        if self.num_arms is None:
            raise ParameterError("num_arms", self._owner, "be set to add arms", None, "Pass the new arm's features.")
        directions = self._draw_directions(count)
        if directions is None:
            directions = self.posterior.factor[:, :1].expand(-1, count, -1, -1)
        self.posterior.add_arms(directions)
        self.num_arms += count

    def check_environment(self, environment: Environment) -> None:
        """Raise unless the environment's sizes are the agent's.

        Raises:
            ParameterError: feature_dim, num_replicas or num_arms differ.
        """
        wanted = {
            "feature_dim": environment.feature_dim,
            "num_replicas": environment.num_replicas,
            "num_arms": environment.num_arms if environment.per_arm else None,
        }
        for name, value in wanted.items():
            if getattr(self, name) != value:
                raise ParameterError(name, self._owner, f"equal the environment's {value}", getattr(self, name))

    def state_dict(self) -> StateDict:
        return {"posterior": self.posterior.state_dict(), "streams": self.streams.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore posterior and random streams.

        Raises:
            ParameterError: The saved posterior has other sizes.
        """
        self.posterior.load_state_dict(state["posterior"])
        self.streams.load_state_dict(state["streams"])


def default_index_dim(feature_dim: int) -> int:
    """Return max(16, ceil(1.3 d)) members: measured safe on finite and compact action sets alike.

    With M < d every sample stays, up to rounding, in the span of the M prior directions, and on a compact action set
    regret grows linearly; on a finite set of random arms 8 to 16 members are enough.
    """
    return max(16, math.ceil(1.3 * feature_dim))


class LinearEnsemble(LinearAgent):
    """An agent that samples theta = mu + spread * A zeta from an ensemble of `index_dim` members."""

    def __init__(
        self,
        feature_dim: int,
        *,
        index_dim: int | None,
        index: str | IndexDistribution,
        perturbation: str | IndexDistribution,
        **options: Unpack[LinearOptions],
    ) -> None:
        owner = type(self).__name__
        dim = default_index_dim(check_int("feature_dim", owner, feature_dim)) if index_dim is None else index_dim
        check_int("index_dim", owner, dim)
        laws = []
        for name, law in (("index", index), ("perturbation", perturbation)):
            law = IndexDistribution(law, dim) if isinstance(law, str) else law
            if law.index_dim != dim:
                raise ParameterError(name, owner, f"have index_dim = {dim}", law)
            laws.append(law)
        super().__init__(feature_dim, *laws, **options)
        self.spread = 1.0

    def parameter(self, index: Tensor | None) -> Tensor:
        """Return the posterior samples mu + spread * A zeta."""
        if index is None:
            raise ParameterError("index", self._owner, "be given", None)
        return self.posterior.sample(index, self.spread)

    def check_environment(self, environment: Environment) -> None:
        """Raise unless the sizes fit; warn when the ensemble is too small for a compact action set."""
        super().check_environment(environment)
        needed = default_index_dim(self.feature_dim)
        if environment.action_set == "compact" and self.index_dim < needed:
            warnings.warn(
                f"index_dim of {self._owner} should be >= {needed} on a compact action set; got {self.index_dim}. "
                "Samples stay in the span of the members, so regret may grow linearly. Leave index_dim=None.",
                stacklevel=2,
            )


class LinearEnsemblePP(LinearEnsemble):
    """Linear Ensemble++: Thompson sampling from M incrementally updated ensemble directions.

    One index zeta per decision turns mean and factor into one posterior sample::

        theta(zeta) = mu + exploration_scale * A zeta,   arm = argmax_x <x, theta(zeta)>

    and one datum moves mean, factor and covariance by one gain (see `LinearPosterior`).

    Args:
        feature_dim: d, number of features.
        index_dim: M, number of members. Raising it tracks the posterior more closely at cost O(d M) per step;
            None means max(16, ceil(1.3 d)), safe on any action set.
        index: Reference law of zeta; "gaussian" is the most robust at small M.
        perturbation: Law of the data's perturbations and of the prior directions.
        exploration_scale: 1 is Thompson sampling; smaller values act closer to the mean, 0 is greedy.
        **options: See `LinearAgent`.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: Ensemble++ (arXiv 2407.13195), algorithm 1.
    """

    def __init__(
        self,
        feature_dim: int,
        *,
        index_dim: int | None = None,
        index: str | IndexDistribution = "gaussian",
        perturbation: str | IndexDistribution = "sphere",
        exploration_scale: float = 1.0,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__(feature_dim, index_dim=index_dim, index=index, perturbation=perturbation, **options)
        if "one_hot" in (index, getattr(index, "kind", None)):
            raise ParameterError("index", self._owner, "have mean zero", "'one_hot'", "Use LinearEnsembleSampling.")
        self.spread = check_real("exploration_scale", self._owner, exploration_scale, at_least=0.0)
