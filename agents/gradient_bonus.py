"""NeuralUCB and NeuralThompson: uncertainty from the network's own gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import Unpack

from ensemblepp.agents.gradient_model import GradientModel
from ensemblepp.agents.neural_frame import NeuralOptions
from ensemblepp.agents.point_network import PointNetworkAgent
from ensemblepp.errors import refuse_fixed

_SAMPLES_AT_ONCE = 64


class GradientBonusAgent(PointNetworkAgent):
    """What NeuralUCB and NeuralThompson share; see there."""

    _acquisition: str

    def __init__(
        self,
        feature_dim: int,
        *,
        exploration_scale: float = 0.1,
        regularisation: float = 1.0,
        hidden_dims: Sequence[int] = (64, 64),
        layer_norm: bool = False,
        learning_rate: float = 1e-3,
        **options: Unpack[NeuralOptions],
    ) -> None:
        refuse_fixed(type(self).__name__, options, "acquisition")
        super().__init__(feature_dim, acquisition=self._acquisition, exploration_scale=exploration_scale, **options)
        self.model = self._learn_with(
            GradientModel,
            hidden_dims=hidden_dims,
            layer_norm=layer_norm,
            learning_rate=learning_rate,
            regularisation=regularisation,
        )

    def discount(self, factor: float, *, keep_prior: bool = True) -> None:
        """Forget: weigh all data so far by `factor` from now on, in the buffer and in U; lambda stays.

        Raises:
            ParameterError: As `NeuralAgent.discount`.
        """
        super().discount(factor, keep_prior=keep_prior)
        self.model.forget(factor)


class NeuralUCB(GradientBonusAgent):
    """NeuralUCB: act on f(x) + gamma sqrt(lambda g^T U^-1 g / m), with g the gradient of f at x.

    U = lambda I + sum_s g_s g_s^T / m over what was chosen so far. Of U only the diagonal is kept, as in the authors'
    own code: the full matrix has as many rows as the network has weights. Where the paper trains from its initial
    weights to convergence, decaying towards them, and scales the network by sqrt(m), this agent trains as the other
    neural agents do, with weight decay lambda / n.

    Args:
        feature_dim: d, number of features of an arm or context.
        exploration_scale: gamma, in standard deviations of the reward. Raising it explores more; 0 is greedy.
        regularisation: lambda. Raising it makes the bonus shrink more slowly with data, and the weights smaller.
        hidden_dims: Widths of the ReLU layers; m is the last one.
        layer_norm: Normalise each layer's pre-activations.
        learning_rate: Adam's step size.
        **options: See `NeuralAgent`.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: Zhou et al. (2020), Neural contextual bandits with UCB-based exploration (arXiv 1911.04462), algorithm 1.
    """

    _acquisition = "ucb"


class NeuralThompson(GradientBonusAgent):
    """NeuralTS: act on a sample of N(f(x), nu^2 lambda g^T U^-1 g / m), with g the gradient of f at x.

    U and training are those of `NeuralUCB`, with the same diagonal approximation. Every arm's sample has the paper's
    law. The paper draws the arms of a decision independently; here they share one draw of the weights,
    f(x) + nu sqrt(lambda / m) g^T U^(-1/2) xi with xi ~ N(0, I), so that a decision is one joint posterior sample and
    arms with the same features stay equal.

    Args:
        feature_dim: d, number of features of an arm or context.
        exploration_scale: nu, in standard deviations of the reward. Raising it explores more; 0 is greedy.
        regularisation: lambda. Raising it makes the spread shrink more slowly with data, and the weights smaller.
        hidden_dims: Widths of the ReLU layers; m is the last one.
        layer_norm: Normalise each layer's pre-activations.
        learning_rate: Adam's step size.
        **options: See `NeuralAgent`.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: Zhang et al. (2021), Neural Thompson sampling (arXiv 2010.00827), algorithm 1.
    """

    _acquisition = "thompson"

    def draw_index(self, batch: int) -> Float[Tensor, "replicas batch parameters"]:
        """Draw xi, one standard normal number per weight of the network, for `batch` decisions of every replica."""
        return self._draw_normal(batch, self.streams["act"])

    def posterior_samples(
        self,
        features: Float[Tensor, "replicas points feature_dim"],
        arm: Tensor | None,
        num_samples: int,
        generator: torch.Generator,
    ) -> Float[Tensor, "replicas samples points"]:
        """Return joint samples of what the agent acts on, nu included, in reward units; its streams stay put."""
        x, place = features.to(self.dtype), arm if self.num_arms else None
        # One number per weight and sample is too much to keep for all samples at once.
        sizes = [min(_SAMPLES_AT_ONCE, num_samples - start) for start in range(0, num_samples, _SAMPLES_AT_ONCE)]
        scale = self.exploration_scale
        parts = [self.model.joint(x, place, scale * self._draw_normal(size, generator)) for size in sizes]
        return torch.cat(parts, dim=1)

    def _draw_normal(self, batch: int, generator: torch.Generator) -> Tensor:
        size = (self.num_replicas, batch, self.model.num_parameters)
        return torch.randn(size, generator=generator, device=generator.device, dtype=self.dtype)
