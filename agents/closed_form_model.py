"""The closed-form head: exact linear Ensemble++ on a network's features, rebuilt on the stored data as they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ensemblepp.calibration import Calibration
from ensemblepp.errors import check_real
from ensemblepp.linear import LinearPosterior
from ensemblepp.networks import MLP
from ensemblepp.types import StateDict

_TINY = 1e-30


class ClosedFormModel:
    """`LinearPosterior` on phi(x) = [c_h h(x) | c_x x | c_1], in units of standardised reward.

    h are the activations of a torso. Every part is scaled to a stated share of the prior variance: over the inputs at
    hand the mean of |phi(x)|^2 is prior_scale^2, and theta ~ N(0, I), so prior_scale is the prior's standard deviation
    in standard deviations of the reward. Data are whitened by their noise level, so each replica has its own.

    Between two refits a datum moves the posterior by the exact rank-1 update; a refit recomputes features, scales,
    reward units and noise level and conditions the prior on all stored data by the batch formula, with each datum's own
    perturbation, so the ensemble keeps its random directions.

    Args:
        torso: h; its parameters are a copy that only `refit` renews.
        parts: Which of "features", "input" and "constant" phi has, and each part's share of the prior variance.
        directions: Prior directions B, (replicas, [arms,] dim of phi, M); None without an ensemble.
        calibration: Units of reward and noise.
        owner: Whose options these are, for error messages.
        prior_scale: Raising it explores more.
        num_arms: K posteriors on one shared phi; None for one.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: neural Ensemble++ (arXiv 2407.13195), section 4, with the closed form of section 3 as head; Bayesian
    regression on network features as in Snoek et al. (arXiv 1502.05700).
    """

    def __init__(
        self,
        torso: MLP,
        parts: Mapping[str, float],
        directions: Tensor | None,
        calibration: Calibration,
        *,
        owner: str,
        prior_scale: float = 1.0,
        num_arms: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.torso, self.parts, self.calibration = torso, dict(parts), calibration
        self.prior_scale = check_real("prior_scale", owner, prior_scale, above=0.0)
        self.posterior = LinearPosterior(
            self.feature_dim(torso, parts),
            directions,
            num_replicas=torso.num_replicas,
            num_arms=num_arms,
            dtype=dtype,
            device=device,
        )
        self._directions = directions
        replicas = torso.num_replicas
        # Per replica: c of each part, then reward offset, reward scale and noise level of the last refit.
        self._levels = torch.ones(replicas, len(self.parts) + 3, dtype=dtype, device=device)
        self._fitted = False

    @property
    def fitted(self) -> bool:
        """Whether there was a refit; before it, phi is scaled by the inputs at hand."""
        return self._fitted

    @staticmethod
    def feature_dim(torso: MLP, parts: Mapping[str, float]) -> int:
        """Return the length of phi."""
        return sum({"features": torso.out_dim, "input": torso.in_dim, "constant": 1}[part] for part in parts)

    def _raw(self, x: Float[Tensor, "replicas batch in_dim"]) -> list[Tensor]:
        """Return the unscaled parts of phi."""
        make = {"features": lambda: self.torso(x), "input": lambda: x, "constant": lambda: torch.ones_like(x[..., :1])}
        return [make[part]() for part in self.parts]

    def _measure(self, raw: Sequence[Tensor], weight: Tensor | None) -> Tensor:
        """Return each part's factor c per replica, (replicas, parts), from the inputs at hand."""
        total = sum(self.parts.values())
        factors = []
        for part, share in zip(raw, self.parts.values(), strict=True):
            square = part.square().sum(-1)
            mean = square.mean(-1) if weight is None else (square * weight).sum(-1) / weight.sum(-1).clamp_min(_TINY)
            factors.append((share / total / torch.where(mean > _TINY, mean, 1.0)).sqrt())
        return self.prior_scale * torch.stack(factors, dim=-1)

    def phi(self, contexts: Tensor) -> Tensor:
        """Return phi at (replicas, batch, [arms,] in_dim), scaled as at the last refit."""
        phi = self._scaled(self._raw(contexts if contexts.ndim == 3 else contexts.flatten(1, 2)))
        return phi.view(*contexts.shape[:-1], -1)

    def _scaled(self, raw: Sequence[Tensor]) -> Tensor:
        factors = self._levels[:, : len(raw)] if self._fitted else self._measure(raw, None)
        return torch.cat([part * c.view(-1, 1, 1) for part, c in zip(raw, factors.unbind(-1), strict=True)], dim=-1)

    def sample(self, contexts: Tensor, index: Tensor, scale: float) -> Float[Tensor, "replicas batch arms"]:
        """Return posterior samples in reward units, from the ensemble if there is one and exact ones otherwise."""
        draw = self.posterior.sample if self.posterior.index_dim else self.posterior.sample_exact
        return self._restore(self.posterior.score(self.phi(contexts), draw(index, scale)))

    def mean(self, contexts: Tensor) -> Float[Tensor, "replicas batch arms"]:
        """Return the posterior mean."""
        return self._restore(self.posterior.score(self.phi(contexts), self.posterior.mean.unsqueeze(1)))

    def bound(self, contexts: Tensor, width: float) -> Float[Tensor, "replicas batch arms"]:
        """Return mean + width * posterior standard deviation."""
        phi = self.phi(contexts)
        mean = self.posterior.score(phi, self.posterior.mean.unsqueeze(1))
        return self._restore(mean + width * self.posterior.standard_deviation(phi))

    def joint(self, x: Tensor, arm: Tensor | None, index: Tensor) -> Float[Tensor, "replicas samples points"]:
        """Return one posterior sample of all points (replicas, points, in_dim) per index (replicas, samples, M)."""
        draw = self.posterior.sample if self.posterior.index_dim else self.posterior.sample_exact
        parameter = draw(index)
        if arm is not None:
            place = arm[:, None, :, None].expand(-1, index.shape[1], -1, parameter.shape[-1])
            return self._restore((self.phi(x).unsqueeze(1) * parameter.gather(2, place)).sum(-1))
        return self._restore(parameter @ self.phi(x).mT)

    def _restore(self, scores: Tensor) -> Tensor:
        """Return scores in reward units: the posterior lives in the units of the last refit."""
        offset, scale, _ = self._units()
        return offset.unsqueeze(-1) + scale.unsqueeze(-1) * scores

    def _units(self) -> tuple[Tensor, Tensor, Tensor]:
        if not self._fitted:
            return self.calibration.offset, self.calibration.scale, self.calibration.noise
        return self._levels[:, -3:-2], self._levels[:, -2:-1], self._levels[:, -1:]

    def update(self, data: Mapping[str, Tensor]) -> None:
        """Condition on new data: one rank-k update."""
        self.posterior.update(*self._rows(data, self._raw(data["features"])))

    def refit(self, data: Mapping[str, Tensor], torso: MLP | None = None) -> None:
        """Rebuild the posterior on all stored data, with `torso`'s present features; then estimate the noise level."""
        if torso is not None:
            self.torso.parameters.copy_sound_(torso.parameters)
        now = self.calibration
        raw = self._raw(data["features"])
        factors = self._measure(raw, data["weight"])
        self._levels = torch.cat([factors, now.offset, now.scale, now.noise], dim=-1)
        self._fitted = True
        fit = self.posterior.refit(*self._rows(data, raw), directions=self._directions)
        residual, determined = fit.residual_sum_squares, fit.effective_dim
        if residual.ndim > 1:
            residual, determined = residual.sum(-1), determined.sum(-1)
        noise = self._levels[:, -1]
        now.estimate_noise(residual * noise.square(), data["weight"].sum(-1) - determined)

    def _rows(
        self, data: Mapping[str, Tensor], raw: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the data, whose unscaled features are `raw`, as whitened rows: phi, target, perturbation, arm."""
        offset, scale, noise = self._units()
        root = data["weight"].sqrt() / noise
        phi = self._scaled(raw) * root.unsqueeze(-1)
        target = (data["reward"] - offset) / scale * root
        perturbation = data["perturbation"] if self.posterior.index_dim else None
        return phi, target, perturbation, data["arm"] if self.posterior.num_arms else None

    def state_dict(self) -> StateDict:
        state = {
            "torso": self.torso.parameters.state_dict(),
            "posterior": self.posterior.state_dict(),
            "levels": self._levels.clone(),
            "fitted": self._fitted,
        }
        if self._directions is not None:
            state["directions"] = self._directions
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.torso.parameters.load_state_dict(state["torso"])
        self.posterior.load_state_dict(state["posterior"])
        self._levels = state["levels"].to(self._levels, copy=True)
        self._fitted = bool(state["fitted"])
        if self._directions is not None:
            self._directions = state["directions"].to(self._directions)
