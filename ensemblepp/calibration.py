"""Calibration: rewards in units of their own standard deviation, a prior of stated size, a noise level from the data.

A neural posterior sample is only as good as its prior's size against the rewards' spread and its noise level. Both are
unknown in a new problem, so they are measured while learning, for every replica on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ensemblepp.errors import check_int, check_real, check_shape
from ensemblepp.types import StateDict

_OWNER = "Calibration"


class RunningMoments:
    """Weighted mean and variance of a stream, per replica, by the pairwise update of Chan, Golub and LeVeque (1983).

    Args:
        num_replicas: R.
        device: Where the sums live; they are kept in float64.
    """

    def __init__(self, num_replicas: int, *, device: torch.device | str = "cpu") -> None:
        self._moments = torch.zeros(num_replicas, 3, dtype=torch.float64, device=device)

    def add(self, values: Float[Tensor, "replicas batch"], weight: Float[Tensor, "replicas batch"]) -> None:
        """Take in a batch; values of weight zero change nothing."""
        values, weight = values.double(), weight.double()
        added = weight.sum(-1)
        safe = added.clamp_min(torch.finfo(torch.float64).tiny)
        center = (weight * values).sum(-1) / safe
        spread = (weight * (values - center.unsqueeze(-1)).square()).sum(-1)
        count, mean, squares = self._moments.unbind(-1)
        total = (count + added).clamp_min(torch.finfo(torch.float64).tiny)
        delta = center - mean
        self._moments = torch.stack(
            [
                count + added,
                mean + delta * added / total,
                squares + spread + delta.square() * count * added / total,
            ],
            dim=-1,
        )

    @property
    def count(self) -> Float[Tensor, " replicas"]:
        """Sum of the weights."""
        return self._moments[:, 0]

    @property
    def mean(self) -> Float[Tensor, " replicas"]:
        """Weighted mean; zero before any value."""
        return self._moments[:, 1]

    @property
    def variance(self) -> Float[Tensor, " replicas"]:
        """Weighted variance with denominator sum of weights; zero before any value."""
        return self._moments[:, 2] / self.count.clamp_min(torch.finfo(torch.float64).tiny)

    def forget(self, factor: float) -> None:
        """Weigh all values so far by `factor`."""
        self._moments[:, 0] *= factor
        self._moments[:, 2] *= factor

    def state_dict(self) -> StateDict:
        return {"moments": self._moments.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums.

        Raises:
            ParameterError: Another number of replicas.
        """
        check_shape("moments", "RunningMoments", state["moments"], "replicas moments", self._moments.shape)
        self._moments = state["moments"].to(self._moments, copy=True)


class Calibration:
    """Maps rewards to standardised units and back, and holds the noise level in those units, per replica.

    - standardised reward = (y - offset) / scale, with the running mean and standard deviation of all rewards;
      `standardise=False` keeps offset 0 and scale 1. A given `reward_scale` is the scale from the start: rewards far
      larger than any seen so far are then still thought possible.
    - noise sd in standardised units: `noise_scale / scale` when it is given in reward units; otherwise estimated by
      the evidence approximation: eta^2 = (residual sum of squares) / (n - gamma), where gamma is the number of
      parameters that the data determine, and at first `initial_noise`.

    Rewards that are all equal have no spread; their scale is 1.

    Args:
        num_replicas: R.
        standardise: Switch of the running standardisation.
        reward_scale: Standard deviation of the rewards, in reward units; None measures it.
        noise_scale: Noise standard deviation in reward units; None estimates it.
        initial_noise: Noise sd in standardised units until there is an estimate.
        noise_floor: Smallest noise sd, in standardised units: data without noise would otherwise leave no posterior.
        device: Where the sums live.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: D. J. C. MacKay (1992), Bayesian interpolation, Neural Computation 4(3), equations 4.3 to 4.5 for the
    noise estimate.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        standardise: bool = True,
        reward_scale: float | None = None,
        noise_scale: float | None = None,
        initial_noise: float = 0.5,
        noise_floor: float = 0.01,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        check_int("num_replicas", _OWNER, num_replicas)
        self.standardise_rewards = bool(standardise)
        self.reward_scale = (
            None if reward_scale is None else check_real("reward_scale", _OWNER, reward_scale, above=0.0)
        )
        self.noise_scale = None if noise_scale is None else check_real("noise_scale", _OWNER, noise_scale, above=0.0)
        self.noise_floor = check_real("noise_floor", _OWNER, noise_floor, above=0.0)
        first = check_real("initial_noise", _OWNER, initial_noise, at_least=self.noise_floor)
        self.rewards = RunningMoments(num_replicas, device=device)
        self.dtype = dtype
        # Rows: offset and scale of rewards, estimated noise sd in standardised units.
        self._offset = torch.zeros(num_replicas, 1, dtype=dtype, device=device)
        self._scale = torch.full_like(self._offset, self.reward_scale or 1.0)
        self._noise = torch.full_like(self._offset, first)

    def observe(self, reward: Float[Tensor, "replicas batch"], weight: Float[Tensor, "replicas batch"]) -> None:
        """Take rewards into the running moments; weight zero marks an unobserved one."""
        if not self.standardise_rewards:
            return
        self.rewards.add(reward, weight)
        self._offset = self.rewards.mean.unsqueeze(-1).to(self.dtype)
        if self.reward_scale is not None:
            return
        spread = self.rewards.variance.sqrt()
        # One reward has no spread, and rounding must not blow up equal ones.
        usable = spread > 1e-6 * self.rewards.mean.abs().clamp_min(1e-30)
        self._scale = torch.where(usable, spread, 1.0).unsqueeze(-1).to(self.dtype)

    @property
    def offset(self) -> Float[Tensor, "replicas 1"]:
        """Running mean of the rewards, in reward units."""
        return self._offset

    @property
    def scale(self) -> Float[Tensor, "replicas 1"]:
        """Running standard deviation of the rewards, in reward units."""
        return self._scale

    @property
    def noise(self) -> Float[Tensor, "replicas 1"]:
        """Noise standard deviation in standardised units."""
        if self.noise_scale is None:
            return self._noise
        return (self.noise_scale / self._scale).clamp_min(self.noise_floor)

    def standardise(self, reward: Float[Tensor, "replicas batch"]) -> Float[Tensor, "replicas batch"]:
        """Return (reward - offset) / scale."""
        return (reward - self._offset) / self._scale

    def restore(self, score: Float[Tensor, "replicas *rest"]) -> Float[Tensor, "replicas *rest"]:
        """Return offset + scale * score: back to reward units."""
        shape = (-1, *[1] * (score.ndim - 1))
        return self._offset.view(shape) + self._scale.view(shape) * score

    def track_noise(self, mean_square: Float[Tensor, " replicas"], rate: float = 0.01) -> None:
        """Move the squared noise level a step of `rate` towards a minibatch's mean squared residual.

        The cheap estimate for models that have no evidence: training residuals, so a little low when n is small.
        Nothing happens where the noise is known.
        """
        if self.noise_scale is None:
            square = self._noise.square().lerp(mean_square.unsqueeze(-1).to(self.dtype), rate)
            self._noise = square.sqrt().clamp_min(self.noise_floor)

    def estimate_noise(self, residual_sum_squares: Tensor, degrees_of_freedom: Tensor) -> None:
        """Set the noise sd of each replica to sqrt(RSS / degrees of freedom), in standardised units.

        Replicas with less than two degrees of freedom, or whose residuals are not finite, keep their level; nothing
        happens where the noise is known.

        Args:
            residual_sum_squares: (replicas,), of standardised rewards around the posterior mean.
            degrees_of_freedom: (replicas,), n - gamma.
        """
        if self.noise_scale is not None:
            return
        estimate = (residual_sum_squares / degrees_of_freedom.clamp_min(2.0)).sqrt().clamp_min(self.noise_floor)
        usable = (degrees_of_freedom >= 2) & torch.isfinite(estimate)
        self._noise = torch.where(usable.unsqueeze(-1), estimate.unsqueeze(-1).to(self.dtype), self._noise)

    def forget(self, factor: float) -> None:
        """Weigh all rewards so far by `factor`."""
        self.rewards.forget(factor)

    def state_dict(self) -> StateDict:
        return {
            "rewards": self.rewards.state_dict(),
            "levels": torch.cat([self._offset, self._scale, self._noise], dim=-1),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore moments and levels.

        Raises:
            ParameterError: Another number of replicas.
        """
        levels = state["levels"]
        check_shape("levels", _OWNER, levels, "replicas levels", (len(self._offset), 3))
        self.rewards.load_state_dict(state["rewards"])
        self._offset, self._scale, self._noise = levels.to(self._offset).clone().split(1, dim=-1)


class PriorScale:
    """Gives prior functions a stated size: the factor that makes their standard deviation over the inputs `scale`.

    The variance of sum_m zeta_m p_m(x) over a reference index is sum_m p_m(x)^2; its mean over the inputs learned from
    is measured as they come. Before any, the inputs at hand stand in.

    Args:
        num_replicas: R.
        scale: Standard deviation wanted, in standard deviations of the reward.
        owner: Whose option it is, for error messages.
        device: Where the sums live.

    Raises:
        ParameterError: A negative scale.
    """

    def __init__(self, num_replicas: int, scale: float, *, owner: str, device: torch.device | str = "cpu") -> None:
        self.scale = check_real("prior_scale", owner, scale, at_least=0.0)
        self._variance = RunningMoments(num_replicas, device=device)
        self._measured = False

    def observe(
        self, prior: Float[Tensor, "replicas batch out index_dim"], weight: Float[Tensor, "replicas batch"]
    ) -> None:
        """Measure the unscaled prior functions at new inputs; weight zero marks inputs that do not count."""
        self._variance.add(prior.square().sum(-1).mean(-1), weight)
        self._measured = True

    def factor(self, prior: Float[Tensor, "replicas batch out index_dim"]) -> Float[Tensor, "replicas 1 1 1"]:
        """Return what to multiply prior functions by; `prior` are their values at the inputs at hand."""
        here = prior.square().sum(-1).flatten(1).mean(-1)
        variance = self._variance.mean.to(prior.dtype) if self._measured else here
        usable = variance > torch.finfo(prior.dtype).tiny
        return (self.scale * torch.where(usable, variance, 1.0).rsqrt()).view(-1, 1, 1, 1)

    def state_dict(self) -> StateDict:
        return {"variance": self._variance.state_dict(), "measured": self._measured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what was measured.

        Raises:
            ParameterError: Another number of replicas.
        """
        self._variance.load_state_dict(state["variance"])
        self._measured = bool(state["measured"])
