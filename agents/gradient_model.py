"""The network's own gradient as features: what NeuralUCB and NeuralThompson know of their uncertainty."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ensemblepp.agents.sgd_model import SgdModel
from ensemblepp.calibration import Calibration
from ensemblepp.errors import check_real
from ensemblepp.heads import EnsembleNetwork
from ensemblepp.networks import ParameterBlock
from ensemblepp.types import StateDict

LayerValues = list[tuple[Tensor, Tensor]]
"""One number per parameter: of each layer, head last, weights (..., in, out) and biases (..., 1, out)."""


@dataclass(frozen=True)
class OutputGradients:
    """d f / d theta of many outputs f, factorised: weight (i, j) of a layer has inputs_i deltas_j, bias j deltas_j.

    Sums over all parameters factorise with it, so nothing as long as theta is ever kept per output: a weighted sum is
    a pass through the layers with the weights in place of the parameters. `squared` factorises in the same way.

    Attributes:
        inputs: Of each layer, (..., rows, in).
        deltas: Gradient with respect to each layer's result before normalisation and ReLU, (..., rows, out).
    """

    inputs: list[Tensor]
    deltas: list[Tensor]

    @classmethod
    def at(
        cls, network: EnsembleNetwork, cache: tuple[list[Tensor], list[Tensor]], arm: Tensor | None = None
    ) -> OutputGradients:
        """Return the gradients of a point network's outputs.

        Args:
            network: Has M = 0.
            cache: What `network.forward` returned for its backward pass, at inputs (replicas, batch, in_dim).
            arm: The output wanted of each input, (replicas, batch): one row per input. None: a row for every output,
                output by output within an input.
        """
        activations, norms = cache
        lead, outputs = activations[0].shape[:2], torch.arange(network.num_outputs, device=activations[0].device)
        if arm is None:
            hot = (outputs == outputs.unsqueeze(-1)).repeat(lead[0], lead[1], 1)
            activations, norms = (
                [each.repeat_interleave(network.num_outputs, dim=1) for each in part] for part in (activations, norms)
            )
        else:
            hot = outputs == arm.unsqueeze(-1)
        deltas = [hot.to(activations[0].dtype)]
        torso = network.torso.deltas(activations, norms, deltas[0] @ network.head["weight"])
        deltas += [delta for _, delta in torso]
        return cls(activations, deltas[::-1])

    def squared(self) -> OutputGradients:
        """Return the squares of all derivatives."""
        return OutputGradients([each.square() for each in self.inputs], [each.square() for each in self.deltas])

    def split(self, replicas: int, groups: int) -> OutputGradients:
        """Return rows (replicas, groups * rows, .) as (replicas, groups, rows, .)."""
        parts = (
            [each.reshape(replicas, groups, -1, each.shape[-1]) for each in part] for part in (self.inputs, self.deltas)
        )
        return OutputGradients(*parts)

    def weighted_sum(self, values: LayerValues) -> Float[Tensor, "*lead rows"]:
        """Return sum_p values_p df/dtheta_p of every row."""
        terms = [
            ((inputs @ weight + bias) * deltas).sum(-1)
            for inputs, deltas, (weight, bias) in zip(self.inputs, self.deltas, values, strict=True)
        ]
        return torch.stack(terms).sum(0)

    def total(self, row_weight: Float[Tensor, "replicas rows"]) -> LayerValues:
        """Return sum over rows of row_weight df/dtheta_p for every parameter."""
        scaled = [deltas * row_weight.unsqueeze(-1) for deltas in self.deltas]
        return [
            (inputs.mT @ deltas, deltas.sum(1, keepdim=True))
            for inputs, deltas in zip(self.inputs, scaled, strict=True)
        ]


class GradientModel(SgdModel):
    """A trained network, and U = lambda I + sum_s g_s g_s^T / m of its gradients g at what was chosen, diagonal only.

    The variance of an output is lambda g^T U^-1 g / m in standardised units. Every g_s is the gradient at the
    parameters of its time, before training on the datum; m is the width of the last hidden layer.

    Args:
        network: Has a point head.
        calibration: Units of reward.
        owner: Whose options these are, for error messages.
        regularisation: lambda, of U and of the network's weight decay lambda / n.
        **options: See `SgdModel`.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: Zhou et al. (2020, arXiv 1911.04462), algorithm 1.
    """

    def __init__(
        self, network: EnsembleNetwork, calibration: Calibration, *, owner: str, regularisation: float, **options: Any
    ) -> None:
        self.regularisation = check_real("regularisation", owner, regularisation, above=0.0)
        super().__init__(network, calibration, owner=owner, weight_decay=regularisation, **options)
        self._point = network
        # U - lambda I, one number per parameter.
        self._information = [block.clone() for block in network.blocks]
        self.forget(0.0)
        self.num_parameters = sum(block.flat.numel() for block in network.blocks) // network.num_replicas

    def _layers(self, blocks: Iterable[ParameterBlock]) -> LayerValues:
        torso, head = blocks
        layers = range(len(self._point.torso.hidden_dims))
        hidden = [(torso[f"weight_{layer}"], torso[f"bias_{layer}"]) for layer in layers]
        return [*hidden, (head["weight"].mT, head["bias"].mT)]

    def diagonal(self) -> LayerValues:
        """Return the diagonal of U."""
        layers = self._layers(self._information)
        return [(weight + self.regularisation, bias + self.regularisation) for weight, bias in layers]

    def observe(self, x: Tensor, arm: Tensor | None, weight: Tensor) -> dict[str, Tensor]:
        """Add the squared gradients at new data to U; weight zero marks data that do not count."""
        _, cache = self._point.forward(x)
        place = torch.zeros_like(weight, dtype=torch.int64) if arm is None else arm
        added = OutputGradients.at(self._point, cache, place).squared().total(weight / self._point.torso.out_dim)
        for mine, new in zip(self._layers(self._information), added, strict=True):
            for block, part in zip(mine, new, strict=True):
                block += part
        return {}

    def forget(self, factor: float) -> None:
        """Weigh all data so far by `factor` in U."""
        for block in self._information:
            block.flat *= factor

    def _at(self, contexts: Tensor) -> tuple[Tensor, OutputGradients]:
        """Return standardised means (replicas, batch, arms) and the gradients, (replicas, batch * arms, .)."""
        output, cache = self._point.forward(contexts if contexts.ndim == 3 else contexts.flatten(1, 2))
        mean = output.mean if contexts.ndim == 3 else output.mean.view(contexts.shape[:3])
        return mean, OutputGradients.at(self._point, cache)

    def bound(self, contexts: Tensor, width: float) -> Float[Tensor, "replicas batch arms"]:
        """Return mean + width * standard deviation, in reward units."""
        mean, gradients = self._at(contexts)
        inverse = [(weight.reciprocal(), bias.reciprocal()) for weight, bias in self.diagonal()]
        form = gradients.squared().weighted_sum(inverse).view_as(mean)
        return self._restore(mean + width * (self.regularisation / self._point.torso.out_dim * form).sqrt())

    def sample(self, contexts: Tensor, index: Tensor, scale: float) -> Float[Tensor, "replicas batch arms"]:
        """Return mean + scale sqrt(lambda / m) g^T U^(-1/2) index, in reward units.

        Args:
            contexts: See `SgdModel.output`.
            index: One standard normal number per parameter and decision, (replicas, batch, parameters).
            scale: nu; every sample is N(mean, nu^2 variance), jointly so over all arms of a decision.
        """
        mean, gradients = self._at(contexts)
        groups = gradients.split(*index.shape[:2])
        return self._restore(mean + scale * groups.weighted_sum(self._draw(index)).view_as(mean))

    def joint(self, x: Tensor, arm: Tensor | None, index: Tensor) -> Float[Tensor, "replicas samples points"]:
        """Return one posterior sample of all points (replicas, points, in_dim) per index (replicas, samples, .)."""
        output, cache = self._point.forward(x)
        mean = (output if arm is None else output.select(arm)).mean.mT
        gradients = OutputGradients.at(self._point, cache, arm).split(len(x), 1)
        return self._restore(mean + gradients.weighted_sum(self._draw(index)))

    def _draw(self, index: Tensor) -> LayerValues:
        """Return sqrt(lambda / (m U)) index, laid out as the parameters: (replicas, batch, in, out)."""
        parts, start, root = [], 0, (self.regularisation / self._point.torso.out_dim) ** 0.5
        for layer in self.diagonal():
            pair = []
            for values in layer:
                size = values[0].numel()
                own = index[..., start : start + size].reshape(*index.shape[:2], *values.shape[1:])
                pair.append(root * own * values.rsqrt().unsqueeze(1))
                start += size
            parts.append((pair[0], pair[1]))
        return parts

    def state_dict(self) -> StateDict:
        torso, head = self._information
        return {**super().state_dict(), "information": {"torso": torso.state_dict(), "head": head.state_dict()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for name, block in zip(("torso", "head"), self._information, strict=True):
            block.load_state_dict(state["information"][name])
