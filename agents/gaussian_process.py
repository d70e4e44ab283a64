"""The ceiling: Gaussian-process regression with the true prior, on the finite pool that the arms come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ensemblepp.agents.frame import ACQUISITIONS, BanditAgent
from ensemblepp.errors import (
    CheckpointError,
    ParameterError,
    check_all,
    check_choice,
    check_finite,
    check_real,
    check_shape,
)
from ensemblepp.linear import LinearPosterior
from ensemblepp.types import Contexts, Decision, Environment, StateDict, Transition, UnitSphere

POOL_TOLERANCE = 1e-4
"""How far, in Euclidean distance, a context may be from its pool entry: beyond rounding, short of another entry."""


@runtime_checkable
class Pool(Protocol):
    """What the oracle reads of a bandit whose arms come from a pool."""

    num_replicas: int
    noise_scale: float
    pool: Float[Tensor, "replicas pool feature_dim"]


class GaussianProcessOracle(BanditAgent):
    """Acts on the exact posterior over the mean rewards f of a pool, given the law that f was drawn from.

    The prior over the values of f on a replica's pool is N(m, K), so the posterior is a `LinearPosterior` with one
    feature per pool entry, one-hot features and K in place of the prior covariance. With data y at the entries D::

        mean       = m + K_D^T (K_DD + eta^2 I)^-1 (y - m_D)
        covariance = K - K_D^T (K_DD + eta^2 I)^-1 K_D = S S^T

    Arm k of a context is the pool entry p_k that it equals, and its score is, with c = `exploration_scale`::

        "thompson": mean_k + c (S xi)_k with one xi ~ N(0, I) for all arms
        "ucb":      mean_k + c sd_k
        "greedy":   mean_k

    No agent knows the true prior, which makes this a yardstick and not a method. A decision costs
    O(arms (pool + feature_dim)), a datum O(pool^2), memory O(pool^2), each per replica.

    Args:
        pool: Feature vectors that contexts are made of, (replicas, pool, feature_dim).
        prior_covariance: K, (replicas, pool, pool), or a kernel that maps two sets of points,
            (replicas, n, feature_dim) and (replicas, m, feature_dim), to (replicas, n, m); squared reward units. It is
            called in float64.
        prior_mean: m, one number or (replicas, pool), in reward units.
        noise_scale: eta, standard deviation of the reward noise, in reward units. Raising it slows learning.
        acquisition: "thompson", "ucb" or "greedy".
        exploration_scale: Posterior standard deviations to explore by; raising it explores more.
        jitter: This times the mean variance is added to the diagonal of K, which rounding can leave indefinite.
        seed: Root of the agent's random streams.
        dtype: float32 or float64 for posterior and scores.
        device: Where everything lives.

    Attributes:
        posterior: Over the pool's mean rewards.

    Raises:
        ParameterError: A value that breaks a rule, by name; among them a K that is not symmetric positive
            semi-definite.

    Source: Rasmussen and Williams (2006), Gaussian Processes for Machine Learning, equations 2.22 to 2.24; "ucb" as in
        Srinivas et al. (arXiv 0912.3995) with a constant width.
    """

    def __init__(
        self,
        pool: Float[Tensor, "replicas pool feature_dim"],
        prior_covariance: Float[Tensor, "replicas pool pool"] | Callable[[Tensor, Tensor], Tensor],
        prior_mean: float | Float[Tensor, "replicas pool"] = 0.0,
        *,
        noise_scale: float = 1.0,
        acquisition: str = "thompson",
        exploration_scale: float = 1.0,
        jitter: float = 1e-6,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        owner = type(self).__name__
        replicas, size, feature_dim = check_shape(
            "pool", owner, pool, "replicas, pool, feature_dim", (None, None, None)
        ).shape
        super().__init__(feature_dim, num_replicas=replicas, seed=seed, dtype=dtype, device=device)
        check_finite("pool", owner, pool)
        self.acquisition = check_choice("acquisition", owner, acquisition, ACQUISITIONS)
        self.exploration_scale = check_real("exploration_scale", owner, exploration_scale, at_least=0.0)
        self.pool = pool.to(dtype=dtype, device=device, copy=True)
        wide = pool.to(dtype=torch.float64, device=device)
        covariance = prior_covariance if isinstance(prior_covariance, Tensor) else prior_covariance(wide, wide)
        check_shape("prior_covariance", owner, covariance, "replicas, pool, pool", (replicas, size, size))
        root = _square_root(covariance.to(wide), check_real("jitter", owner, jitter, at_least=0.0), owner)
        if not isinstance(prior_mean, Tensor):
            prior_mean = torch.full_like(wide[..., 0], check_real("prior_mean", owner, prior_mean))
        check_shape("prior_mean", owner, prior_mean, "replicas, pool", (replicas, size))
        check_finite("prior_mean", owner, prior_mean)
        self.posterior = LinearPosterior(
            size, num_replicas=replicas, noise_scale=noise_scale, dtype=dtype, device=device
        )
        # The posterior takes one prior for all replicas; here each has its own.
        self.posterior.mean.copy_(prior_mean)
        self.posterior.root.copy_(root)

    @classmethod
    def for_quadratic(cls, environment: Pool, **options: Any) -> GaussianProcessOracle:
        """Build the oracle of mean rewards 0.01 |W^T x|^2 with W of shape (d, d) and W_ij ~ N(0, 1).

        Each of the d columns w of W adds 0.01 (w . x)^2, and E (w . x)^2 = |x|^2 while
        Cov((w . x)^2, (w . x')^2) = 2 (x . x')^2, hence m(x) = 0.01 d |x|^2 and K(x, x') = 0.0002 d (x . x')^2. Over
        W this is the law's mean and covariance; the law itself is close to normal for large d.

        Args:
            environment: A quadratic bandit; its pool and noise are read, its means are not.
            **options: See the class.

        Raises:
            ParameterError: The environment has no pool, or an option breaks its rule.
        """
        if not isinstance(environment, Pool):
            raise ParameterError("environment", cls.__name__, "have a pool", type(environment).__name__)
        pool, dim = environment.pool, environment.pool.shape[-1]
        mean = 0.01 * dim * pool.double().square().sum(-1)

        def kernel(first: Tensor, second: Tensor) -> Tensor:
            return 2e-4 * dim * (first @ second.mT).square()

        # A noise-free bandit still needs some noise here: the posterior of repeated plays divides by it.
        defaults: dict[str, Any] = {
            "noise_scale": environment.noise_scale or 1e-3,
            "dtype": pool.dtype,
            "device": pool.device,
        }
        return cls(pool, kernel, mean, **(defaults | options))

    def draw_index(self, batch: int) -> Float[Tensor, "replicas batch pool"] | None:
        """Draw the standard normal xi of a posterior sample; None where no sample is drawn."""
        if self.acquisition != "thompson":
            return None
        generator = self.streams["act"]
        size = (self.num_replicas, batch, self.posterior.feature_dim)
        return torch.randn(size, generator=generator, device=generator.device, dtype=self.dtype)

    def locate(
        self, features: Float[Tensor, "replicas count feature_dim"]
    ) -> tuple[Int[Tensor, "replicas count"], Float[Tensor, "replicas count"]]:
        """Return the nearest pool entry of each feature vector and its Euclidean distance, NaN for non-finite input."""
        # |x - p|^2 is least where <x, p> - |p|^2 / 2 is largest.
        half_norm = self.pool.square().sum(-1, keepdim=True).mT / 2
        place = (features @ self.pool.mT - half_norm).argmax(-1)
        nearest = torch.take_along_dim(self.pool, place.unsqueeze(-1), dim=1)
        return place, torch.linalg.vector_norm(features - nearest, dim=-1)

    def scores(self, contexts: Tensor, index: Tensor | None) -> Float[Tensor, "replicas batch arms"]:
        """Return the acquisition at the pool entries nearest to the contexts, in reward units."""
        place, _ = self.locate(contexts.flatten(1, 2))
        return self._scores_at(place.view(contexts.shape[:-1]), index)

    def _scores_at(self, place: Int[Tensor, "replicas batch arms"], index: Tensor | None) -> Tensor:
        flat = place.flatten(1)
        mean = self.posterior.mean.gather(1, flat).view(place.shape)
        if self.acquisition == "greedy" or self.exploration_scale == 0:
            return mean
        rows = torch.take_along_dim(self.posterior.root, flat.unsqueeze(-1), dim=1).view(*place.shape, -1)
        if self.acquisition == "ucb":
            deviation: Tensor = torch.linalg.vector_norm(rows, dim=-1)
        elif index is None:
            raise ParameterError("index", self._owner, "be given", None)
        else:
            deviation = torch.einsum("rbkp,rbp->rbk", rows, index)
        return mean + self.exploration_scale * deviation

    def act(
        self,
        contexts: Contexts,
        mask: Bool[Tensor, "replicas batch arms"] | None = None,
        *,
        index: Tensor | None = None,
    ) -> Decision:
        """Choose one arm per replica and batch slot.

        Args:
            contexts: Arm features from the pool, (replicas, batch, arms, feature_dim).
            mask: True where an arm may be chosen. Features of other arms may be anything, NaN included.
            index: What `draw_index` returns, to repeat a decision exactly; drawn from the stream "act" when None.

        Raises:
            ParameterError: Shapes that do not fit, a context that is not in the pool, a row without an allowed arm.
                Posterior and random streams are as before the call.
        """
        with self.streams.rollback():
            if isinstance(contexts, UnitSphere):
                return self._act_compact(contexts, mask, index)
            contexts = self._check_contexts(contexts)
            index = self.draw_index(contexts.shape[1]) if index is None else index
            place, distance = (each.view(contexts.shape[:-1]) for each in self.locate(contexts.flatten(1, 2)))
            scores = self._scores_at(place, index)
            usable = distance <= POOL_TOLERANCE
            if mask is not None:
                check_shape("mask", self._owner, mask, "replicas batch arms", scores.shape)
                usable |= ~mask
            self._check_in_pool("contexts", usable, distance)
            arm = self._choose(scores, mask)
        return Decision(arm, torch.take_along_dim(contexts, arm[..., None, None], dim=2).squeeze(2), scores)

    def _check_in_pool(self, name: str, near: Tensor, distance: Tensor) -> None:
        check_all(name, self._owner, f"be in the pool, at a distance of at most {POOL_TOLERANCE:g}", near, distance)

    def update(self, transition: Transition) -> dict[str, Tensor]:
        """Condition the posterior on the data; perturbations have no part in it.

        Returns:
            "train/prediction_error": y - mean before the update, (replicas, batch), in reward units; zero where
            nothing was observed.

        Raises:
            ParameterError: Shapes that do not fit, features that are not in the pool, or a non-finite reward; the
                posterior is as before.
        """
        features, reward = transition.features.to(self.dtype), transition.reward.to(self.dtype)
        sizes = (self.num_replicas, None, self.feature_dim)
        check_shape("features", self._owner, features, "replicas batch feature_dim", sizes)
        check_shape("reward", self._owner, reward, "replicas batch", features.shape[:2])
        place, distance = self.locate(features)
        near = distance <= POOL_TOLERANCE
        entries = torch.arange(self.posterior.feature_dim, device=place.device)
        one_hot = place.unsqueeze(-1) == entries
        if transition.observed is not None:
            check_shape("observed", self._owner, transition.observed, "replicas batch", reward.shape)
            near |= ~transition.observed
            one_hot &= transition.observed.unsqueeze(-1)
            reward = torch.where(transition.observed, reward, 0.0)
        self._check_in_pool("features", near, distance)
        return {"train/prediction_error": self.posterior.update(one_hot.to(self.dtype), reward)}

    def check_environment(self, environment: Environment) -> None:
        """Raise unless the sizes are the agent's and the arms come from its pool.

        Raises:
            ParameterError: feature_dim or num_replicas differ, contexts are shared by all arms, or the pool is another.
        """
        super().check_environment(environment)
        pool = getattr(environment, "pool", None)
        known = isinstance(pool, Tensor) and pool.shape == self.pool.shape
        if not known or not torch.allclose(pool.to(self.pool), self.pool, rtol=0.0, atol=POOL_TOLERANCE):  # type: ignore[union-attr]
            raise ParameterError("pool", self._owner, "be the environment's pool", type(environment).__name__)

    def state_dict(self) -> StateDict:
        state = {"block": self.posterior.state.clone(), "pool": self.pool.clone()}
        return {"posterior": state, "streams": self.streams.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore posterior, pool and random streams.

        Raises:
            CheckpointError: The saved posterior has other sizes.
        """
        saved = state["posterior"]
        for name, own in (("block", self.posterior.state), ("pool", self.pool)):
            if saved[name].shape != own.shape:
                got, wanted = tuple(saved[name].shape), tuple(own.shape)
                raise CheckpointError(f"{name} in the state of {self._owner} is {got}, not {wanted}")
        self.posterior.state = saved["block"].to(self.posterior.state, copy=True)
        self.pool = saved["pool"].to(self.pool, copy=True)
        self.streams.load_state_dict(state["streams"])


def _square_root(
    covariance: Float[Tensor, "replicas pool pool"], jitter: float, owner: str
) -> Float[Tensor, "replicas pool pool"]:
    """Return the lower-triangular square root of covariance + jitter * (mean variance) * I, in float64."""
    name, rule = "prior_covariance", "be symmetric positive semi-definite"
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    scale = variance.mean(-1, keepdim=True)
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(covariance + torch.diag_embed((jitter * scale).expand_as(variance)))
    # Cholesky reads the lower triangle only, so symmetry is a rule of its own.
    error = (covariance - covariance.mT).abs().amax((-2, -1))
    # A comparison with NaN is False, so what is not finite is refused too.
    valid = (failed == 0) & (error <= 1e-6 * scale.squeeze(-1)) & torch.isfinite(root).all(-1).all(-1)
    check_all(name, owner, rule, valid, scale.squeeze(-1))
    return root
