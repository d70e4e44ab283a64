"""The wheel: a context at the rim makes one arm worth far more than the safe one, and only exploring shows which."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ensemblepp.envs.common import add_noise, check_arm, check_setup, check_state
from ensemblepp.errors import check_int, check_real
from ensemblepp.seeding import Streams
from ensemblepp.types import Contexts, Decision, Feedback, StateDict, TestPoints

SAFE_MEAN, OTHER_MEAN, RIM_MEAN = 1.2, 1.0, 50.0


class WheelBandit:
    """Five arms on a context x that is uniform on the unit disc.

    Arm 0 has mean 1.2 and the others 1.0, except where |x| > delta: there the arm of x's quadrant has mean 50, that is
    arm 1 for x = (+, +), 2 for (+, -), 3 for (-, +) and 4 for (-, -), zero counted as +. Rewards are
    mean + N(0, noise_scale^2) and the regret is the best mean minus that of the arm, in reward units.

    Args:
        delta: Radius inside which arm 0 is best. Raising it makes the rewards of 50 rarer (a share 1 - delta^2 of the
            contexts) and the exploration harder.
        noise_scale: Standard deviation of the reward noise, in reward units.
        num_replicas: Independent copies with contexts and noise of their own.
        seed: Root seed of contexts, noise and test points.
        device: Where all tensors live.
        dtype: float32 or float64.

    Raises:
        ParameterError: An argument breaks its rule.

    Source: Riquelme et al. (arXiv 1802.09127), section 5.4.
    """

    feature_dim = 2
    num_arms: int | None = 5
    action_set: Literal["finite", "compact"] = "finite"
    per_arm = True
    feature_bounds: tuple[float, float] = (-1.0, 1.0)

    def __init__(
        self,
        delta: float = 0.95,
        *,
        noise_scale: float = 0.01,
        num_replicas: int = 1,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        owner = type(self).__name__
        self.device = check_setup(owner, num_replicas, seed, device, dtype)
        self.dtype = dtype
        self.num_replicas = int(num_replicas)
        self.delta = check_real("delta", owner, delta, at_least=0.0, at_most=1.0)
        self.noise_scale = check_real("noise_scale", owner, noise_scale, at_least=0.0)
        self._streams = Streams(seed, "contexts", "noise", "eval", device=self.device)
        self._next_context()

    def mean_rewards(self, contexts: Float[Tensor, "*batch 2"]) -> Float[Tensor, "*batch 5"]:
        """Return the mean reward of every arm, in reward units."""
        means = torch.full((*contexts.shape[:-1], 5), OTHER_MEAN, dtype=contexts.dtype, device=contexts.device)
        means[..., 0].fill_(SAFE_MEAN)
        low = (contexts < 0).long()
        quadrant_arm = 1 + 2 * low[..., 0] + low[..., 1]
        arms = torch.arange(5, device=contexts.device)
        on_rim = torch.linalg.vector_norm(contexts, dim=-1, keepdim=True) > self.delta
        return means.masked_fill_(on_rim & (arms == quadrant_arm.unsqueeze(-1)), RIM_MEAN)

    def observe(self) -> tuple[Contexts, None]:
        """Return the context of each replica, (replicas, 1, 2); every arm is allowed."""
        return self._context, None

    def step(self, decision: Decision) -> Feedback:
        """Pay for the arm of `decision`, (replicas, 1), and move to the next context.

        Raises:
            ParameterError: The arm is missing, misshapen or out of range; nothing has moved.
        """
        arm = check_arm(type(self).__name__, decision, self.num_replicas, 5)
        mean = self._means.gather(-1, arm.unsqueeze(-1)).squeeze(-1)
        reward = add_noise(mean, self.noise_scale, self._streams["noise"])
        regret = self._means.amax(dim=-1) - mean
        self._next_context()
        return Feedback(reward=reward, regret=regret)

    def draw_test_points(self, count: int) -> TestPoints:
        """Draw `count` contexts per replica with a random arm, its mean and one reward, from a stream of their own.

        Raises:
            ParameterError: `count` < 1.
        """
        generator = self._streams["eval"]
        features = self._draw_contexts(check_int("count", type(self).__name__, count), generator)
        arm = torch.randint(5, features.shape[:2], generator=generator, device=self.device)
        mean = self.mean_rewards(features).gather(-1, arm.unsqueeze(-1)).squeeze(-1)
        return TestPoints(features, arm, mean, add_noise(mean, self.noise_scale, generator))

    def state_dict(self) -> StateDict:
        """Return the place in the run; the context is drawn again on loading, not stored."""
        return {"problem": self._problem(), "streams": self._streams.state_dict() | {"contexts": self._context_origin}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was saved.

        Raises:
            CheckpointError: The state comes from a wheel with other arguments.
        """
        check_state(type(self).__name__, state, self._problem(), self._streams)
        self._streams.load_state_dict(state["streams"])
        self._next_context()

    def _draw_contexts(self, count: int, generator: torch.Generator) -> Float[Tensor, "replicas count 2"]:
        shape = (self.num_replicas, count, 2)
        draw = torch.rand(shape, generator=generator, device=self.device, dtype=self.dtype)
        # The disc within radius r has a share r^2 of the area.
        radius, angle = draw[..., 0].sqrt(), 2 * math.pi * draw[..., 1]
        return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)

    def _next_context(self) -> None:
        generator = self._streams["contexts"]
        self._context_origin = generator.get_state()
        self._context = self._draw_contexts(1, generator)
        self._means = self.mean_rewards(self._context)

    def _problem(self) -> dict[str, Any]:
        return {
            "delta": self.delta,
            "noise_scale": self.noise_scale,
            "num_replicas": self.num_replicas,
            "dtype": str(self.dtype),
        }
