"""EpiNet: a base network whose uncertainty is a small network that takes the index as an input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ensemblepp.agents.sgd_model import Optimiser, Steps, select_prior
from ensemblepp.calibration import Calibration, PriorScale
from ensemblepp.errors import ParameterError, check_int
from ensemblepp.heads import EnsembleNetwork, PriorEnsemble
from ensemblepp.losses import squared_loss
from ensemblepp.types import StateDict


class EpiNetModel:
    """f(x, zeta) = base(x) + <e(x, sg(h), zeta), zeta> + prior_scale sum_m zeta_m p_m(x).

    h are the base network's features, e is a small MLP with M outputs, and p_m are M fixed small MLPs. Because e takes
    the index as an input, f is not linear in it: every posterior sample is a forward pass of e, and the loss is an
    average over sampled indices.

    Args:
        in_dim: Length of x.
        hidden_dims: Widths of the base network.
        index_dim: M.
        num_outputs: Outputs per input.
        num_replicas: R.
        calibration: Units of reward and noise.
        owner: Whose options these are, for error messages.
        epinet_hidden_dims: Widths of e.
        prior_hidden_dims: Widths of every p_m.
        prior_scale: Standard deviation of the prior over the inputs at hand, in standard deviations of the reward.
        num_update_indices: Indices per datum in the loss.
        learning_rate: See `Optimiser`.
        weight_decay: See `Optimiser`.
        init_generator: Source of the initial weights.
        generator: Source of the update indices.

    Source: Osband et al. (2023), Epistemic neural networks (arXiv 2107.08924), section 4.
    """

    def __init__(
        self,
        in_dim: int,
        hidden_dims: Sequence[int],
        index_dim: int,
        *,
        num_outputs: int,
        num_replicas: int,
        calibration: Calibration,
        owner: str,
        epinet_hidden_dims: Sequence[int] = (15, 15),
        prior_hidden_dims: Sequence[int] = (5, 5),
        prior_scale: float = 0.35,
        num_update_indices: int = 8,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        init_generator: torch.Generator,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.calibration, self._generator = calibration, generator
        self.prior_scale = PriorScale(num_replicas, prior_scale, owner=owner, device=init_generator.device)
        self.num_update_indices = check_int("num_update_indices", owner, num_update_indices)
        shared: dict[str, Any] = {
            "num_outputs": num_outputs,
            "num_replicas": num_replicas,
            "generator": init_generator,
            "dtype": dtype,
        }
        self.base = EnsembleNetwork(in_dim, hidden_dims, 0, **shared)
        epinet_in = in_dim + self.base.torso.out_dim + index_dim
        self.epinet = EnsembleNetwork(
            epinet_in, epinet_hidden_dims, index_dim, prior="none", stop_gradient=False, **shared
        )
        self._priors = PriorEnsemble(in_dim, prior_hidden_dims, index_dim, **shared)
        self.num_outputs, self.index_dim = num_outputs, index_dim
        self.optimiser: Steps = Optimiser(self, owner=owner, learning_rate=learning_rate, weight_decay=weight_decay)

    @property
    def blocks(self) -> list[Any]:
        """The trainable blocks."""
        return self.base.blocks + self.epinet.blocks

    @property
    def columns(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The prior networks' outputs at the datum's own output."""
        return {"prior": ((1, self.index_dim), self.base.head.flat.dtype)}

    def observe(self, x: Tensor, arm: Tensor | None, weight: Tensor) -> dict[str, Tensor]:
        """Measure the prior at new inputs and return the values of `columns`."""
        prior = self._priors(x)
        self.prior_scale.observe(prior, weight)
        return {"prior": select_prior(prior, arm)}

    def _rows(self, x: Tensor, features: Tensor, index: Tensor) -> Tensor:
        """Return the epinet's inputs [x, h, zeta], one row per index of each input: (replicas, batch * indices, .)."""
        samples = index.shape[2]
        pair = torch.cat([x, features], dim=-1).unsqueeze(2).expand(-1, -1, samples, -1)
        return torch.cat([pair, index], dim=-1).flatten(1, 2)

    def _predict(
        self, x: Tensor, index: Float[Tensor, "replicas batch samples index_dim"]
    ) -> Float[Tensor, "replicas batch samples out"]:
        """Return f(x, zeta) for every index of each input, standardised units."""
        base, (activations, _) = self.base.forward(x)
        samples = index.shape[2]
        epinet, _ = self.epinet.forward(self._rows(x, activations[-1], index))
        prior = self._priors(x)
        learned = epinet.members.view(*x.shape[:2], samples, *epinet.members.shape[2:])
        members = learned + (self.prior_scale.factor(prior) * prior).unsqueeze(2)
        predicted: Tensor = base.mean.unsqueeze(2) + (members @ index.unsqueeze(-1)).squeeze(-1)
        return predicted

    def sample(self, contexts: Tensor, index: Tensor, scale: float) -> Float[Tensor, "replicas batch arms"]:
        """Return posterior samples in reward units; a scale other than 1 shrinks them towards the base network."""
        if contexts.ndim == 3:
            x, indices = contexts, index.unsqueeze(2)
        else:
            x = contexts.flatten(1, 2)
            indices = index.unsqueeze(2).expand(-1, -1, contexts.shape[2], -1).flatten(1, 2).unsqueeze(2)
        sampled = self._predict(x, indices).squeeze(2)
        if scale != 1.0:
            sampled = self.base(x).mean.lerp(sampled, scale)
        return self.calibration.restore(sampled.view(*contexts.shape[:2], -1))

    def mean(self, contexts: Tensor) -> Float[Tensor, "replicas batch arms"]:
        """Return the base network's output, in reward units."""
        x = contexts if contexts.ndim == 3 else contexts.flatten(1, 2)
        return self.calibration.restore(self.base(x).mean.view(*contexts.shape[:2], -1))

    def bound(self, contexts: Tensor, width: float) -> Tensor:
        """Refuse: the spread over the index has no closed form.

        Raises:
            ParameterError: Always.
        """
        raise ParameterError("acquisition", "EpiNet", 'be "thompson" or "greedy"', "'ucb'")

    def joint(self, x: Tensor, arm: Tensor | None, index: Tensor) -> Float[Tensor, "replicas samples points"]:
        """Return one posterior sample of all points (replicas, points, in_dim) per index (replicas, samples, M)."""
        sampled = self._predict(x, index.unsqueeze(1).expand(-1, x.shape[1], -1, -1))
        place = torch.zeros_like(x[..., 0], dtype=torch.int64) if arm is None else arm
        chosen = torch.take_along_dim(sampled, place[..., None, None], dim=-1).squeeze(-1)
        return self.calibration.restore(chosen.mT)

    def draw_index(self, batch_size: int) -> Tensor:
        """Draw the update indices of one minibatch, (replicas, batch, samples, M)."""
        size = (self.base.num_replicas, batch_size, self.num_update_indices, self.index_dim)
        generator = self._generator
        return torch.randn(size, generator=generator, device=generator.device, dtype=self.base.head.flat.dtype)

    def train(self, batch: Mapping[str, Tensor], index: Tensor | None, num_data: int) -> Float[Tensor, " replicas"]:
        """Take one optimiser step on a minibatch and return its mean loss per replica (denominator: batch size)."""
        x, weight, z = batch["features"], batch["weight"], batch["perturbation"]
        if index is None:
            raise ParameterError("index", "EpiNet", "be given", None)
        lead, samples = x.shape[:2], index.shape[2]
        base, base_cache = self.base.forward(x)
        epinet, cache = self.epinet.forward(self._rows(x, base_cache[0][-1], index))
        place = batch["arm"][..., None] if self.num_outputs > 1 else torch.zeros_like(batch["arm"])[..., None]
        mean = torch.take_along_dim(base.mean, place, dim=-1)
        learned = epinet.members.view(*lead, samples, *epinet.members.shape[2:])
        everywhere = place[..., None, None].expand(-1, -1, samples, 1, self.index_dim)
        members = learned.gather(3, everywhere).squeeze(3) + self.prior_scale.factor(batch["prior"]) * batch["prior"]
        noise = self.calibration.noise.unsqueeze(-1)
        target = self.calibration.standardise(batch["reward"]).unsqueeze(-1)
        prediction = mean + (members * index).sum(-1) - noise * (index @ z.unsqueeze(-1)).squeeze(-1)
        loss, slope = squared_loss(prediction, target)
        self.calibration.track_noise((mean - target).squeeze(-1).square().mean(-1))
        slope = slope * (weight / (lead[1] * samples)).unsqueeze(-1)
        base_grad = torch.zeros_like(base.mean).scatter_(2, place, slope.sum(-1, keepdim=True))
        grad = torch.zeros(*learned.shape[:-1], 1 + self.index_dim, dtype=x.dtype, device=x.device)
        grad[..., 1:].scatter_(3, everywhere, (slope.unsqueeze(-1) * index).unsqueeze(3))
        self.base.backward(base_cache, base_grad.unsqueeze(-1))
        self.epinet.backward(cache, grad.flatten(1, 2))
        self.optimiser.step(num_data)
        return (loss.mean(-1) * weight).mean(-1)

    def state_dict(self) -> StateDict:
        return {
            "base": self.base.state_dict(),
            "epinet": self.epinet.state_dict(),
            "priors": self._priors.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "prior_scale": self.prior_scale.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.base.load_state_dict(state["base"])
        self.epinet.load_state_dict(state["epinet"])
        self._priors.load_state_dict(state["priors"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.prior_scale.load_state_dict(state["prior_scale"])
