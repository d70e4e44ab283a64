"""Linear bandits: finite arm sets with random features, and the unit sphere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ensemblepp.envs.common import NUMPY_DTYPES, add_noise, check_arm, check_setup, check_state
from ensemblepp.errors import (
    CheckpointError,
    ParameterError,
    check_all,
    check_choice,
    check_finite,
    check_int,
    check_real,
    check_shape,
)
from ensemblepp.seeding import Streams
from ensemblepp.types import Contexts, Decision, Feedback, StateDict, TestPoints, UnitSphere

NORM_TOLERANCE = 1e-4
"""How far a direction on the unit sphere may be off norm 1: beyond rounding, short of a forgotten normalisation."""


class LinearBandit:
    """A bandit with mean reward <x, theta> and reward noise N(0, noise_scale^2).

    On a finite action set each arm has features x ~ U[-1/sqrt(5), 1/sqrt(5)]^d, which has variance 1/15 per feature,
    and the regret of arm a is max_k <x_k, theta> - <x_a, theta>. On the compact one every x with |x| = 1 is an action
    and the regret is |theta| - <x, theta>. Regret is in reward units.

    Args:
        feature_dim: Length d of theta and of each feature vector.
        num_arms: Number of arms K of a finite action set; None on the compact one.
        action_set: "finite", or "compact" for the unit sphere.
        arms: "fixed" for the whole run, or "changing": drawn anew each step.
        bayesian: True draws theta (and a fixed arm set) for each replica, so that the mean over replicas is Bayesian
            regret. False draws one theta, and for fixed arms one arm set, that all replicas share: frequentist regret
            on one problem.
        theta_variance: Variance of each coordinate of theta ~ N(0, theta_variance I), in squared reward units per
            squared feature unit. Raising it makes rewards stand out against the noise.
        noise_scale: Standard deviation of the reward noise, in reward units.
        parameter: theta itself, (feature_dim) for all replicas or (replicas, feature_dim), instead of a draw.
        num_replicas: Independent copies.
        seed: Root seed of theta, arms, noise and test points.
        device: Where all tensors live.
        dtype: float32 or float64.

    Attributes:
        parameter: theta, (replicas, feature_dim).
        feature_bounds: Smallest and largest value that a feature can take.

    Raises:
        ParameterError: An argument breaks its rule.

    Source: Ensemble++ (arXiv 2407.13195), linear bandit experiments.
    """

    action_set: Literal["finite", "compact"]
    per_arm = False

    def __init__(
        self,
        feature_dim: int,
        num_arms: int | None = None,
        *,
        action_set: Literal["finite", "compact"] = "finite",
        arms: Literal["fixed", "changing"] = "fixed",
        bayesian: bool = True,
        theta_variance: float = 10.0,
        noise_scale: float = 1.0,
        parameter: Float[Tensor, "*shape"] | None = None,
        num_replicas: int = 1,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        owner = type(self).__name__
        self.device = check_setup(owner, num_replicas, seed, device, dtype)
        self.dtype = dtype
        self.num_replicas = int(num_replicas)
        self.feature_dim = check_int("feature_dim", owner, feature_dim)
        check_choice("action_set", owner, action_set, ("finite", "compact"))
        check_choice("arms", owner, arms, ("fixed", "changing"))
        self.action_set = action_set
        self.changing = arms == "changing"
        self.num_arms: int | None = None
        if action_set == "finite":
            self.num_arms = check_int("num_arms", owner, num_arms)
        elif num_arms is not None or self.changing:
            name, got = ("num_arms", num_arms) if num_arms is not None else ("arms", arms)
            wanted = "None" if num_arms is not None else "'fixed'"
            raise ParameterError(name, owner, f"be {wanted} on the compact action set", repr(got))
        self.bayesian = bool(bayesian)
        self.noise_scale = check_real("noise_scale", owner, noise_scale, at_least=0.0)
        variance = check_real("theta_variance", owner, theta_variance, above=0.0)
        bound = 1.0 if action_set == "compact" else float(NUMPY_DTYPES[dtype](1 / math.sqrt(5)))
        self.feature_bounds: tuple[float, float] = (-bound, bound)

        self._streams = Streams(seed, "theta", "arms", "noise", "eval", device=self.device)
        self._arms: Tensor | None = None
        # The leading axis of theta, arms and means is 1 where all replicas share them; only views are expanded.
        self._theta = self._draw_theta(variance) if parameter is None else self._check_parameter(parameter)
        self._set_optimum()

    @property
    def parameter(self) -> Float[Tensor, "replicas feature_dim"]:
        """The theta of each replica."""
        return self._theta[:, 0].expand(self.num_replicas, -1)

    def observe(self) -> tuple[Contexts, None]:
        """Return the arm features (replicas, 1, arms, feature_dim) or the unit sphere; every arm is allowed."""
        if self._arms is None:
            return UnitSphere(self.feature_dim), None
        return self._arms.expand(self.num_replicas, -1, -1, -1), None

    def step(self, decision: Decision) -> Feedback:
        """Pay <x, theta> plus noise for the arm (finite) or the features (compact) of `decision`.

        Raises:
            ParameterError: The arm is missing, misshapen or out of range, or the features are misshapen or off the
                unit sphere; nothing has moved.
        """
        owner = type(self).__name__
        if self._arms is None or self.num_arms is None:
            x = check_shape(
                "features",
                owner,
                decision.features,
                "replicas, batch, feature_dim",
                (self.num_replicas, 1, self.feature_dim),
            ).to(self.dtype)
            norm = torch.linalg.vector_norm(x, dim=-1)
            check_all("features", owner, "have norm 1", (norm - 1).abs() <= NORM_TOLERANCE, norm)
            mean = torch.einsum("rbd,rbd->rb", x, self._theta.expand(self.num_replicas, -1, -1))
            best = torch.maximum(self._best, mean)  # rounding can put the mean of the best action above |theta|
        else:
            arm = check_arm(owner, decision, self.num_replicas, self.num_arms)
            mean = self._means.expand(self.num_replicas, -1, -1).gather(-1, arm.unsqueeze(-1)).squeeze(-1)
            best = self._best
        regret = best - mean
        reward = add_noise(mean, self.noise_scale, self._streams["noise"])
        if self.changing:
            self._set_optimum()
        return Feedback(reward=reward, regret=regret)

    def draw_test_points(self, count: int) -> TestPoints:
        """Draw `count` fresh feature vectors per replica with their mean and one reward, from a stream of their own.

        They have the law of the arms, or are uniform on the unit sphere.

        Raises:
            ParameterError: `count` < 1.
        """
        generator = self._streams["eval"]
        size = (self.num_replicas, check_int("count", type(self).__name__, count), self.feature_dim)
        if self.num_arms is None:
            draw = torch.randn(size, dtype=self.dtype, device=self.device, generator=generator)
            features = torch.nn.functional.normalize(draw, dim=-1)
        else:
            features = torch.empty(size, dtype=self.dtype, device=self.device)
            features.uniform_(*self.feature_bounds, generator=generator)
        mean = (features * self._theta).sum(-1)
        return TestPoints(features, None, mean, add_noise(mean, self.noise_scale, generator))

    def state_dict(self) -> StateDict:
        """Return theta and the place in the run; arm sets are drawn again on loading, not stored."""
        streams = self._streams.state_dict() | {"arms": self._arms_origin}
        return {"problem": self._problem(), "streams": streams, "theta": self._theta.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was saved, with its theta and arms.

        Raises:
            CheckpointError: The state comes from a bandit of other sizes or another kind.
        """
        check_state(type(self).__name__, state, self._problem(), self._streams)
        theta = state.get("theta")
        if not isinstance(theta, Tensor) or theta.shape != self._theta.shape:
            got = tuple(theta.shape) if isinstance(theta, Tensor) else type(theta).__name__
            raise CheckpointError(f"theta in the state of LinearBandit is {got}, not {tuple(self._theta.shape)}")
        self._streams.load_state_dict(state["streams"])
        self._theta = theta.to(dtype=self.dtype, device=self.device, copy=True)
        self._arms = None  # frees the old arms before the new ones are drawn: they can fill the memory
        self._set_optimum()

    def _draw_theta(self, variance: float) -> Float[Tensor, "shared_or_replicas 1 feature_dim"]:
        shape = (self.num_replicas if self.bayesian else 1, 1, self.feature_dim)
        draw = torch.randn(shape, dtype=self.dtype, device=self.device, generator=self._streams["theta"])
        return math.sqrt(variance) * draw

    def _check_parameter(self, parameter: Float[Tensor, "*shape"]) -> Float[Tensor, "shared_or_replicas 1 feature_dim"]:
        owner = type(self).__name__
        if isinstance(parameter, Tensor) and parameter.ndim == 1:
            check_shape("parameter", owner, parameter, "feature_dim", (self.feature_dim,))
        else:
            sizes = (self.num_replicas, self.feature_dim)
            check_shape("parameter", owner, parameter, "replicas, feature_dim", sizes)
        check_finite("parameter", owner, parameter)
        return parameter.detach().to(dtype=self.dtype, device=self.device, copy=True).reshape(-1, 1, self.feature_dim)

    def _set_optimum(self) -> None:
        """Draw the arms, if any, and find the best mean, (shared or replicas, 1)."""
        generator = self._streams["arms"]
        self._arms_origin = generator.get_state()
        if self.num_arms is None:
            self._best = torch.linalg.vector_norm(self._theta, dim=-1)
            return
        shared = not self.bayesian and not self.changing
        shape = (1 if shared else self.num_replicas, 1, self.num_arms, self.feature_dim)
        # A new tensor, not the old one filled again: callers may keep the contexts of earlier steps.
        arms = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._arms = arms.uniform_(*self.feature_bounds, generator=generator)
        self._means = torch.einsum("rbkd,rbd->rbk", self._arms, self._theta)
        self._best = self._means.amax(dim=-1)

    def _problem(self) -> dict[str, Any]:
        return {
            "action_set": self.action_set,
            "changing": self.changing,
            "bayesian": self.bayesian,
            "feature_dim": self.feature_dim,
            "num_arms": self.num_arms,
            "num_replicas": self.num_replicas,
            "noise_scale": self.noise_scale,
            "dtype": str(self.dtype),
        }
