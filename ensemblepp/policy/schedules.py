"""When to take smaller steps, and how step size and queue follow the batch on a clock counted in rollouts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ensemblepp.errors import ParameterError, check_choice, check_int, check_real

BATCH_EXPONENTS = {"sgd": 1.0, "adam": 0.5}
"""Power of the batch size that the step size follows."""


class LengthTriggeredDecay(LRScheduler):
    """Halve the learning rate periodically once responses have become much longer than they were at first.

    ::

        lr(t) = lr0 max(floor, factor^floor((t - t_s) / P)),     P = period_scale t_s

    t_s is the surge step: the first step after the baseline and the cooldown whose mean length reaches `surge_ratio`
    times the baseline. Before it the rate is lr0. The surge happens once; the rate never rises again.

    Report every update's mean response length with `observe`, then call `step()` as with any scheduler. The whole
    state is in `state_dict()`.

    Args:
        optimizer: Whose learning rates to move.
        surge_ratio: Length, in baselines, that starts the decay; raising it waits for longer responses.
        skip_steps: First observations that the baseline leaves out.
        baseline_steps: The baseline is the mean length up to this observation.
        cooldown_steps: Observations after the baseline that cannot be a surge; raising it trusts the start longer.
        period_scale: P in surge steps; raising it keeps high rates for longer.
        factor: What each period multiplies the rate by.
        floor: Smallest multiple of lr0.

    Raises:
        ParameterError: If an option is out of range.

    Source: Beyond Precision, length-triggered decay; constants of the detector from a public reproduction.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        surge_ratio: float = 3.0,
        skip_steps: int = 10,
        baseline_steps: int = 50,
        cooldown_steps: int = 50,
        period_scale: float = 1.8,
        factor: float = 0.5,
        floor: float = 0.1,
    ) -> None:
        owner = "LengthTriggeredDecay"
        self.surge_ratio = check_real("surge_ratio", owner, surge_ratio, above=1.0)
        self.skip_steps = check_int("skip_steps", owner, skip_steps, minimum=0)
        self.baseline_steps = check_int("baseline_steps", owner, baseline_steps)
        if skip_steps >= baseline_steps:
            raise ParameterError("skip_steps", owner, f"be below baseline_steps ({baseline_steps})", skip_steps)
        self.cooldown_steps = check_int("cooldown_steps", owner, cooldown_steps, minimum=0)
        self.period_scale = check_real("period_scale", owner, period_scale, above=0.0)
        self.factor = check_real("factor", owner, factor, above=0.0, at_most=1.0)
        self.floor = check_real("floor", owner, floor, at_least=0.0, at_most=1.0)
        self.observed = 0
        self.baseline_sum = 0.0
        self.surge_step: int | None = None
        super().__init__(optimizer)

    def observe(self, mean_length: float) -> None:
        """Take note of one update's mean response length, in tokens.

        Raises:
            ParameterError: If the length is negative or not finite.
        """
        mean_length = check_real("mean_length", "LengthTriggeredDecay.observe", mean_length, at_least=0.0)
        self.observed += 1
        if self.observed <= self.baseline_steps:
            if self.observed > self.skip_steps:
                self.baseline_sum += mean_length
            return
        ready = self.surge_step is None and self.observed > self.baseline_steps + self.cooldown_steps
        baseline = self.baseline_sum / (self.baseline_steps - self.skip_steps)
        if ready and mean_length >= self.surge_ratio * baseline > 0:
            self.surge_step = self.observed

    def multiplier(self) -> float:
        """Return the present learning rate as a multiple of lr0."""
        if self.surge_step is None:
            return 1.0
        # Rounded down from a value that rounding may have put just below a whole number.
        periods = math.floor((self.observed - self.surge_step) / (self.period_scale * self.surge_step) + 1e-9)
        return max(self.floor, self.factor**periods)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of every parameter group."""
        return [base * self.multiplier() for base in self.base_lrs]


def data_clock_learning_rate(base_rate: float, base_batch: int, batch: int, *, optimizer: str) -> float:
    """Return the step size that keeps drift and diffusion per rollout as they were when the batch size changes.

    ::

        sgd:   eta proportional to B            adam:  eta proportional to sqrt(B)

    The square root holds while noise dominates each step, B << (noise / gradient)^2.

    Args:
        base_rate: Step size that works at `base_batch`.
        base_batch: Rollouts per update it was found with.
        batch: Rollouts per update to use.
        optimizer: "sgd", or "adam" for any optimiser that divides by the gradient's size.

    Raises:
        ParameterError: If an input is out of range.

    Source: asynchronous RL on a data clock.
    """
    owner = "data_clock_learning_rate"
    exponent = BATCH_EXPONENTS[check_choice("optimizer", owner, optimizer, BATCH_EXPONENTS)]
    ratio = check_int("batch", owner, batch) / check_int("base_batch", owner, base_batch)
    return check_real("base_rate", owner, base_rate, above=0.0) * math.pow(ratio, exponent)


def version_lag(in_system: int, batch: int) -> float:
    """Return N / B - 1, the updates between a rollout's sampler and its trainer in a FIFO system of N rollouts.

    Staleness on the data clock is lag times B, N - B rollouts; the lag alone misleads when B changes.

    Raises:
        ParameterError: If either is not an int >= 1.

    Source: Little's law; asynchronous RL on a data clock.
    """
    owner = "version_lag"
    return check_int("in_system", owner, in_system) / check_int("batch", owner, batch) - 1.0


@dataclass(frozen=True)
class StalenessModel:
    """The gap between sampler and trainer as a function of staleness s in rollouts: D0 + a s + b s^2, in nats.

    Attributes:
        floor: D0, what the engines' mismatch costs at equal weights.
        diffusion: a = tr(F Sigma) / 2 with Sigma the parameters' noise covariance per rollout.
        drift: b = v^T F v / 2 with v the parameters' drift per rollout.
    """

    floor: float
    diffusion: float
    drift: float

    def __post_init__(self) -> None:
        for name in ("floor", "diffusion", "drift"):
            check_real(name, "StalenessModel", getattr(self, name), at_least=0.0)

    def gap(self, staleness: int | float) -> float:
        """Return the expected KL divergence in nats after `staleness` rollouts."""
        staleness = check_real("staleness", "StalenessModel.gap", staleness, at_least=0.0)
        return self.floor + self.diffusion * staleness + self.drift * staleness**2

    def max_staleness(self, budget: float) -> float:
        """Return the largest s >= 0 with gap(s) <= budget: 0 if the floor exceeds it, infinite if nothing grows."""
        spare = check_real("budget", "StalenessModel.max_staleness", budget, at_least=0.0) - self.floor
        if spare <= 0:
            return 0.0
        # The root in the form that does not cancel for small b.
        slope = self.diffusion + math.sqrt(self.diffusion**2 + 4 * self.drift * spare)
        return 2 * spare / slope if slope > 0 else math.inf

    def max_in_system(self, budget: float, batch: int) -> int | None:
        """Return how many rollouts may be in flight, queued or in the present batch; None means any number.

        A rollout starts only while fewer than this are in the system, so its staleness N - B stays within budget. The
        count is in rollouts: a queue sized in batches would grow stale in proportion to the batch. It never falls
        below one batch, without which no update would happen.
        """
        batch = check_int("batch", "StalenessModel.max_in_system", batch)
        most = self.max_staleness(budget)
        return None if math.isinf(most) else batch + math.floor(most)
