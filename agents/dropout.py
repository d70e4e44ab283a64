"""Thompson sampling by dropout: the mask is the posterior sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import Unpack

from ensemblepp.agents.neural_frame import ScoringOptions
from ensemblepp.agents.point_network import PointNetworkAgent
from ensemblepp.agents.sgd_model import Cache, SgdModel
from ensemblepp.calibration import Calibration
from ensemblepp.errors import ParameterError, check_real
from ensemblepp.heads import EnsembleNetwork, IndexedOutput

_SAMPLES_AT_ONCE = 64


class DropoutModel(SgdModel):
    """A network whose hidden units are dropped at random, in training and when a posterior sample is drawn.

    A mask holds what every hidden unit is multiplied by: 0 with probability p, else 1 / (1 - p), so that its mean is 1.

    Args:
        network: Has a point head and a hidden layer.
        calibration: Units of reward and noise.
        owner: Whose options these are, for error messages.
        dropout_rate: p.
        **options: See `SgdModel`.

    Raises:
        ParameterError: A value that breaks a rule, by name.
    """

    def __init__(
        self, network: EnsembleNetwork, calibration: Calibration, *, owner: str, dropout_rate: float, **options: Any
    ) -> None:
        self.dropout_rate = check_real("dropout_rate", owner, dropout_rate, at_least=0.0, at_most=0.99)
        if not network.torso.hidden_dims:
            raise ParameterError("hidden_dims", owner, "have a layer whose units can be dropped", ())
        super().__init__(network, calibration, owner=owner, **options)
        self._point = network

    def draw_masks(self, count: int, generator: torch.Generator) -> Float[Tensor, "replicas count units"]:
        """Draw `count` masks of all hidden units for every replica."""
        size = (self._point.num_replicas, count, sum(self._point.torso.hidden_dims))
        kind: dict[str, Any] = {"device": generator.device, "dtype": self._point.head.flat.dtype}
        keep = torch.rand(size, generator=generator, **kind) >= self.dropout_rate
        return keep.to(kind["dtype"]) / (1 - self.dropout_rate)

    def draw_index(self, batch_size: int) -> Float[Tensor, "replicas batch units"]:
        """Draw the masks of one minibatch, one per datum."""
        return self.draw_masks(batch_size, self._generator)

    def _forward(self, x: Tensor, index: Tensor | None) -> tuple[IndexedOutput, Cache]:
        return self._point.forward(x, index)

    def _backward(self, cache: Cache, gradient: Tensor, index: Tensor | None) -> None:
        self._point.backward(cache, gradient, index)

    def sample(self, contexts: Tensor, index: Tensor, scale: float) -> Float[Tensor, "replicas batch arms"]:
        """Return the output under each decision's mask, in reward units; a scale other than 1 moves it to the mean."""
        x, masks = contexts, index
        if contexts.ndim == 4:
            x = contexts.flatten(1, 2)
            # With one decision the mask broadcasts over the arms without a copy.
            masks = index if index.shape[1] == 1 else index.repeat_interleave(contexts.shape[2], dim=1)
        sampled = self._point.forward(x, masks)[0].mean
        if scale != 1.0:
            sampled = self._point(x).mean.lerp(sampled, scale)
        return self._restore(sampled.view(*contexts.shape[:2], -1))

    def bound(self, contexts: Tensor, width: float) -> Tensor:
        """Refuse: the spread over masks has no closed form.

        Raises:
            ParameterError: Always.
        """
        raise ParameterError("acquisition", "NeuralDropout", 'be "thompson" or "greedy"', "'ucb'")

    def joint(self, x: Tensor, arm: Tensor | None, index: Tensor) -> Float[Tensor, "replicas samples points"]:
        """Return one posterior sample of all points (replicas, points, in_dim) per mask (replicas, samples, units)."""
        samples, points = index.shape[1], x.shape[1]
        rows = x.repeat(1, samples, 1)
        output = self._point.forward(rows, index.repeat_interleave(points, dim=1))[0]
        chosen = output if arm is None else output.select(arm.repeat(1, samples))
        return self._restore(chosen.mean.view(len(x), samples, points))


class NeuralDropout(PointNetworkAgent):
    """Monte-Carlo dropout: every decision maximises the network's output under one random mask of its hidden units.

    A mask is drawn per decision and shared by all of its arms: one approximate posterior sample. Training drops units
    too, with a mask of its own for every datum of every minibatch. The mean is the output without dropout.

    Args:
        feature_dim: d, number of features of an arm or context.
        dropout_rate: p, probability that a hidden unit is dropped, in [0, 0.99]. Raising it explores more and learns
            more slowly. The spread does not shrink with data as a posterior's does.
        hidden_dims: Widths of the ReLU layers, at least one.
        layer_norm: Normalise each layer's pre-activations.
        learning_rate: Adam's step size.
        weight_decay: lambda of a decaying prior lambda / n on all weights.
        **options: See `NeuralAgent`; `acquisition` is "thompson" or "greedy".

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: Gal and Ghahramani (2016), Dropout as a Bayesian approximation (arXiv 1506.02142); as a bandit Riquelme et
    al. (2018, arXiv 1802.09127).
    """

    def __init__(
        self,
        feature_dim: int,
        *,
        dropout_rate: float = 0.1,
        hidden_dims: Sequence[int] = (64, 64),
        layer_norm: bool = False,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        **options: Unpack[ScoringOptions],
    ) -> None:
        super().__init__(feature_dim, **options)
        if self.acquisition == "ucb":
            raise ParameterError("acquisition", self._owner, 'be "thompson" or "greedy"', "'ucb'")
        self.model = self._learn_with(
            DropoutModel,
            hidden_dims=hidden_dims,
            layer_norm=layer_norm,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            dropout_rate=dropout_rate,
        )

    def draw_index(self, batch: int) -> Float[Tensor, "replicas batch units"] | None:
        """Draw the masks of `batch` decisions of every replica; None where the agent acts greedily."""
        return self.model.draw_masks(batch, self.streams["act"]) if self.acquisition == "thompson" else None

    def posterior_samples(
        self,
        features: Float[Tensor, "replicas points feature_dim"],
        arm: Tensor | None,
        num_samples: int,
        generator: torch.Generator,
    ) -> Float[Tensor, "replicas samples points"]:
        """Return the outputs under `num_samples` masks, in reward units; the agent's streams stay put."""
        x, place = features.to(self.dtype), arm if self.num_arms else None
        # Every mask is a forward pass of all points.
        sizes = [min(_SAMPLES_AT_ONCE, num_samples - start) for start in range(0, num_samples, _SAMPLES_AT_ONCE)]
        return torch.cat([self.model.joint(x, place, self.model.draw_masks(size, generator)) for size in sizes], dim=1)
