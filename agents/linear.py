"""Linear Ensemble++, and the frame that every agent with a linear posterior shares."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import Unpack

from ensemblepp.agents.frame import BanditAgent
from ensemblepp.errors import ParameterError, check_all, check_choice, check_int, check_real, check_shape
from ensemblepp.indices import KINDS, IndexDistribution
from ensemblepp.linear import LinearPosterior
from ensemblepp.types import Decision, Environment, StateDict, Transition, UnitSphere


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


class LinearAgent(BanditAgent):
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
        super().__init__(
            feature_dim,
            index,
            perturbation,
            num_arms=num_arms,
            num_replicas=num_replicas,
            seed=seed,
            dtype=dtype,
            device=device,
        )
        self.posterior = LinearPosterior(
            feature_dim,
            self._draw_directions(self.feature_dim, *([] if num_arms is None else [num_arms])),
            num_replicas=num_replicas,
            num_arms=num_arms,
            noise_scale=noise_scale,
            prior_mean=prior_mean,
            prior_covariance=prior_covariance,
            dtype=dtype,
            device=device,
        )

    def parameter(self, index: Tensor | None) -> Float[Tensor, "replicas batch *arms feature_dim"]:
        """Return the parameter vector to act on; the posterior mean unless a subclass samples one."""
        return self.posterior.mean.unsqueeze(1)

    def scores(self, contexts: Tensor, index: Tensor | None) -> Float[Tensor, "replicas batch arms"]:
        """Return the scores to maximise."""
        return self.posterior.score(contexts, self.parameter(index))

    def _act_compact(self, contexts: UnitSphere, mask: Tensor | None, index: Tensor | None) -> Decision:
        if contexts.feature_dim != self.feature_dim or mask is not None:
            raise ParameterError("contexts", self._owner, f"be a UnitSphere({self.feature_dim}) without mask", contexts)
        index = self.draw_index(1) if index is None else index
        return Decision(None, contexts.argmax(self._direction(self.parameter(index))))

    def _direction(self, parameter: Tensor) -> Tensor:
        """Return the direction to maximise on a compact action set: a random one where the parameter is zero."""
        # All directions of a zero parameter tie.
        generator = self.streams["act"]
        draw = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=parameter.dtype)
        return torch.where((parameter == 0).all(-1, keepdim=True), draw, parameter)

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

    def posterior_samples(
        self,
        features: Float[Tensor, "replicas points feature_dim"],
        arm: Int[Tensor, "replicas points"] | None,
        num_samples: int,
        generator: torch.Generator,
    ) -> Float[Tensor, "replicas samples points"]:
        """Return joint samples of the posterior over mean rewards, one parameter theta_s per sample for all points.

            f_s(x) = <x, theta_s>,   theta_s = mu + A zeta_s with an ensemble, mu + S xi_s exactly

        The posterior itself: an agent's `exploration_scale` has no part in it.

        Args:
            features: Points to predict at.
            arm: Arm of each point; required with per-arm posteriors, without meaning otherwise.
            num_samples: S, samples per replica.
            generator: Where every draw comes from; the agent's own streams stay put.

        Returns:
            Mean rewards, in reward units.

        Raises:
            ParameterError: The agent does not sample from its posterior, shapes do not fit, or an arm is out of range.
        """
        sizes = (self.num_replicas, None, self.feature_dim)
        check_shape("features", self._owner, features, "replicas points feature_dim", sizes)
        check_int("num_samples", self._owner, num_samples)
        points = features.to(self.dtype).mT
        if self.num_arms is None:
            return self._sample_posterior(num_samples, generator) @ points
        check_shape("arm", self._owner, arm, "replicas points", features.shape[:2])
        assert arm is not None
        check_all("arm", self._owner, f"be in [0, {self.num_arms})", (arm >= 0) & (arm < self.num_arms), arm)
        parameter = self._sample_posterior(num_samples, generator)
        samples = torch.zeros_like(points[:, :1]).expand(-1, num_samples, -1)
        # Arm by arm: all arms at once would need num_arms times the memory for the same products.
        for k in range(self.num_arms):
            samples = torch.where(arm.unsqueeze(1) == k, parameter[:, :, k] @ points, samples)
        return samples

    def _sample_posterior(
        self, num_samples: int, generator: torch.Generator
    ) -> Float[Tensor, "replicas samples *arms feature_dim"]:
        """Draw parameters from the posterior; agents that never sample it refuse."""
        remedy = "Use LinearEnsemblePP or LinearThompsonSampling."
        raise ParameterError("agent", "posterior_samples", "sample from its posterior", self._owner, remedy)

    def discount(self, factor: float, *, keep_prior: bool = False) -> None:
        """Weigh all data so far by `factor`; with `keep_prior` the forgotten share of the prior is put back.

        Raises:
            ParameterError: A factor outside (0, 1].
        """
        with self.streams.rollback():
            directions = None
            if keep_prior:
                directions = self._draw_directions(self.feature_dim, *self.posterior.factor.shape[1:-2])
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
        directions = self._draw_directions(self.feature_dim, count)
        if directions is None:
            directions = self.posterior.factor[:, :1].expand(-1, count, -1, -1)
        self.posterior.add_arms(directions)
        self.num_arms += count

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
            if isinstance(law, str):
                law = IndexDistribution(check_choice(name, owner, law, KINDS), dim)
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

    def _sample_posterior(self, num_samples: int, generator: torch.Generator) -> Tensor:
        assert self._index is not None
        index = self._index.reference(self.num_replicas, num_samples, generator=generator, dtype=self.dtype)
        # A one-hot index picks one member, which deviates from the mean by sqrt(M) times its column.
        return self.posterior.sample(index, math.sqrt(self.index_dim) if self._index.kind == "one_hot" else 1.0)

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
