"""Models trained by stochastic gradients: what a neural agent knows, in units of standardised reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ensemblepp.calibration import Calibration, PriorScale
from ensemblepp.errors import ParameterError, check_choice, check_int, check_real
from ensemblepp.heads import EnsembleNetwork, IndependentEnsemble, IndexedOutput
from ensemblepp.losses import ensemble_loss, expected_index_loss, logistic_loss, sampled_index_loss
from ensemblepp.networks import ParameterBlock
from ensemblepp.types import StateDict

_MOMENTS = ("exp_avg", "exp_avg_sq")

Cache = tuple[list[Tensor], list[Tensor]]
"""What a network's backward pass needs of its forward pass."""


class Steps:
    """What every rule to move a network's parameters has: their blocks, a step size and a fading weight decay.

    Args:
        network: Has `blocks`, each with `flat` and its gradient.
        owner: Whose options these are, for error messages.
        learning_rate: Step size. Raising it learns faster and less stably.
        weight_decay: lambda of a decay lambda / n.

    Raises:
        ParameterError: A value that breaks a rule, by name.
    """

    def __init__(self, network: Any, *, owner: str, learning_rate: float, weight_decay: float) -> None:
        self._blocks: list[ParameterBlock] = network.blocks
        self._weight_decay = check_real("weight_decay", owner, weight_decay, at_least=0.0)
        self._rate = check_real("learning_rate", owner, learning_rate, above=0.0)

    def step(self, num_data: int, noise: Tensor | None = None) -> None:
        """Move the parameters along their gradients, plus `noise` where the rule has any."""
        raise NotImplementedError

    def sound(self, num_replicas: int) -> Bool[Tensor, " replicas"]:
        """Return, per replica, whether every parameter is finite and small enough to act on."""
        return torch.stack([block.sound(num_replicas) for block in self._blocks]).all(0)

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what the rule remembers: nothing."""


class Optimiser(Steps):
    """Adam on every parameter block of a network at once, with a weight decay that fades as data arrive.

    Decay lambda / n is the gradient of a prior against n data: the more data, the less the prior counts.

    Args:
        network: Has `blocks`, each with `flat` and its gradient.
        learning_rate: Adam's step size. Raising it learns faster and less stably.
        weight_decay: lambda.
        epsilon: Adam's epsilon. Raising it shortens the steps of parameters with small gradients.

    Raises:
        ParameterError: A value that breaks a rule, by name.
    """

    def __init__(
        self, network: Any, *, owner: str, learning_rate: float, weight_decay: float, epsilon: float = 1e-8
    ) -> None:
        super().__init__(network, owner=owner, learning_rate=learning_rate, weight_decay=weight_decay)
        blocks = [block.flat for block in self._blocks]
        self._adam = torch.optim.Adam(blocks, lr=self._rate, eps=epsilon, fused=True)
        for block in self._blocks:  # as Adam itself would before its first step, so that a state is always whole
            zeros = {name: torch.zeros_like(block.flat) for name in _MOMENTS}
            self._adam.state[block.flat] = {"step": torch.zeros((), device=block.flat.device), **zeros}

    def step(self, num_data: int, noise: Tensor | None = None) -> None:
        """Move the parameters along their gradients."""
        self._adam.param_groups[0]["weight_decay"] = self._weight_decay / max(num_data, 1)
        self._adam.step()

    def state_dict(self) -> StateDict:
        state: StateDict = {}
        for position, block in enumerate(self._blocks):
            saved = self._adam.state[block.flat]
            moments = {name: {key: part.clone() for key, part in block.split(saved[name]).items()} for name in _MOMENTS}
            state[str(position)] = {"step": saved["step"].clone(), **moments}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for position, block in enumerate(self._blocks):
            saved, own = state[str(position)], self._adam.state[block.flat]
            own["step"].copy_(saved["step"])
            for name in _MOMENTS:
                for key, part in block.split(own[name]).items():
                    part.copy_(saved[name][key])


class SgdModel:
    """An `EnsembleNetwork` trained on minibatches: the published form of neural Ensemble++.

    Args:
        network: Torso and head; M = 0 makes a point estimate.
        calibration: Units of reward and noise.
        owner: Whose options these are, for error messages.
        loss: "squared" (closed-form expectation over the update index), "ensemble" (separate members), or "logistic"
            for rewards in [0, 1] (average over sampled update indices; the network's output is a logit).
        prior_scale: Standard deviation of the prior functions over the inputs at hand, in standard deviations of the
            reward (in logits with the logistic loss). Raising it explores more.
        index_weight: c of `expected_index_loss`.
        num_update_indices: Update indices per datum of the logistic loss.
        learning_rate: See `Optimiser`.
        weight_decay: See `Optimiser`.
        track_noise: Estimate an unknown noise level from training residuals; False leaves that to a closed-form head.
        generator: Source of the update indices.

    Raises:
        ParameterError: A value that breaks a rule, by name.
    """

    def __init__(
        self,
        network: EnsembleNetwork | IndependentEnsemble,
        calibration: Calibration,
        *,
        owner: str,
        loss: str = "squared",
        prior_scale: float = 0.35,
        index_weight: float = 1.0,
        num_update_indices: int = 8,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        track_noise: bool = True,
        generator: torch.Generator,
    ) -> None:
        self.network, self.calibration, self._track_noise = network, calibration, track_noise
        self.loss = check_choice("loss", owner, loss, ("squared", "ensemble", "logistic"))
        self.prior_scale = PriorScale(network.num_replicas, prior_scale, owner=owner, device=generator.device)
        self.index_weight = check_real("index_weight", owner, index_weight, above=0.0)
        self.num_update_indices = check_int("num_update_indices", owner, num_update_indices)
        self.optimiser = self._build_steps(owner=owner, learning_rate=learning_rate, weight_decay=weight_decay)
        self._generator = generator

    def _build_steps(self, **options: Any) -> Steps:
        """Return the rule that moves the parameters."""
        return Optimiser(self.network, **options)

    @property
    def columns(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """What the model wants stored with a datum: the frozen prior's value, which never changes."""
        if self.network.prior_kind != "frozen":
            return {}
        return {"prior": ((1, self.network.index_dim), self.network.head.flat.dtype)}

    def observe(self, x: Tensor, arm: Tensor | None, weight: Tensor) -> dict[str, Tensor]:
        """Measure the prior at new inputs (replicas, batch, in_dim) and return the values of `columns`."""
        if self.network.prior_kind == "none":
            return {}
        prior = self.network.prior(x)
        assert prior is not None
        self.prior_scale.observe(prior, weight)
        if self.network.prior_kind == "features":
            return {}
        return {"prior": select_prior(prior, arm)}

    def output(self, contexts: Tensor) -> IndexedOutput:
        """Return mean (replicas, batch, arms) and members (replicas, batch, arms, M) at contexts.

        Contexts are (replicas, batch, arms, in_dim) for one output, (replicas, batch, in_dim) for one output per arm.
        """
        x = contexts if contexts.ndim == 3 else contexts.flatten(1, 2)
        output, (activations, _) = self.network.forward(x)
        prior = self.network.prior(x, activations[-1])
        if prior is not None:
            output = output.with_prior(prior, self.prior_scale.factor(prior))
        if contexts.ndim == 3:
            return output
        lead = contexts.shape[:3]
        return IndexedOutput(output.mean.reshape(lead), output.members.reshape(*lead, -1))

    def sample(self, contexts: Tensor, index: Tensor, scale: float) -> Float[Tensor, "replicas batch arms"]:
        """Return the posterior samples mean + scale * members . index, in reward units."""
        return self._restore(self.output(contexts).sample(scale * index))

    def mean(self, contexts: Tensor) -> Float[Tensor, "replicas batch arms"]:
        """Return the mean, in reward units."""
        return self._restore(self.output(contexts).mean)

    def bound(self, contexts: Tensor, width: float) -> Float[Tensor, "replicas batch arms"]:
        """Return mean + width * standard deviation over the index, in reward units."""
        output = self.output(contexts)
        return self._restore(output.mean + width * output.standard_deviation())

    def joint(self, x: Tensor, arm: Tensor | None, index: Tensor) -> Float[Tensor, "replicas samples points"]:
        """Return one posterior sample of all points (replicas, points, in_dim) per index (replicas, samples, M)."""
        output = self.output(x) if arm is None else self.output(x).select(arm)
        members = output.members.squeeze(2)
        return self._restore(output.mean.mT + index @ members.mT)

    def _restore(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores) if self.loss == "logistic" else self.calibration.restore(scores)

    def draw_index(self, batch_size: int) -> Tensor | None:
        """Draw the update indices of one minibatch, (replicas, batch, samples, M); None where the loss samples none."""
        if self.loss != "logistic":
            return None
        size = (self.network.num_replicas, batch_size, self.num_update_indices, self.network.index_dim)
        generator = self._generator
        return torch.randn(size, generator=generator, device=generator.device, dtype=self.network.head.flat.dtype)

    def train(self, batch: Mapping[str, Tensor], index: Tensor | None, num_data: int) -> Float[Tensor, " replicas"]:
        """Take one optimiser step on a minibatch and return its mean loss per replica (denominator: batch size)."""
        x, weight = batch["features"], batch["weight"]
        arm = batch["arm"] if self.network.num_outputs > 1 else None
        output, cache = self._forward(x, index)
        chosen = output if arm is None else output.select(arm)
        if self.network.prior_kind != "none":
            prior = batch.get("prior")
            if prior is None:
                prior = self.network.prior(x, cache[0][-1])
                assert prior is not None
                prior = select_prior(prior, arm)
            chosen = chosen.with_prior(prior, self.prior_scale.factor(prior))
        loss, gradient = self._loss(chosen, batch, index)
        gradient = (gradient * (weight / weight.shape[1]).unsqueeze(-1)).unsqueeze(2)
        if arm is not None:
            everywhere = gradient.new_zeros(*output.mean.shape, gradient.shape[-1])
            place = arm[..., None, None].expand(-1, -1, 1, gradient.shape[-1])
            gradient = everywhere.scatter_(2, place, gradient)
        self._backward(cache, gradient, index)
        self.optimiser.step(num_data, index)
        return (loss * weight).mean(-1)

    def _forward(self, x: Tensor, index: Tensor | None) -> tuple[IndexedOutput, Cache]:
        """Return the output that is trained, of which `index` is what one minibatch is random in."""
        return self.network.forward(x)

    def _backward(self, cache: Cache, gradient: Tensor, index: Tensor | None) -> None:
        """Write the gradients of what `_forward` returned."""
        self.network.backward(cache, gradient)

    def _loss(self, chosen: IndexedOutput, batch: Mapping[str, Tensor], index: Tensor | None) -> tuple[Tensor, Tensor]:
        perturbation = batch["perturbation"][..., : self.network.index_dim]
        noise = self.calibration.noise.unsqueeze(-1)
        if self.loss == "logistic":
            if index is None:
                raise ParameterError("index", type(self).__name__, "be given with the logistic loss", None)
            return sampled_index_loss(chosen, batch["reward"], perturbation, index, noise, logistic_loss)
        target = self.calibration.standardise(batch["reward"])
        if self.loss == "ensemble":
            residual = chosen.members.mean(-1).squeeze(-1) - target
            loss, gradient = ensemble_loss(chosen, target, perturbation, noise)
        else:
            residual = chosen.mean.squeeze(-1) - target
            loss, gradient = expected_index_loss(chosen, target, perturbation, noise, self.index_weight)
        if self._track_noise:
            self.calibration.track_noise(residual.square().mean(-1))
        return loss, gradient

    def state_dict(self) -> StateDict:
        return {
            "network": self.network.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "prior_scale": self.prior_scale.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.prior_scale.load_state_dict(state["prior_scale"])


def select_prior(prior: Float[Tensor, "replicas batch out index_dim"], arm: Tensor | None) -> Tensor:
    """Return the prior of the datum's own output, (replicas, batch, 1, index_dim)."""
    return prior if arm is None else torch.take_along_dim(prior, arm[..., None, None], dim=2)
