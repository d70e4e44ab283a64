"""Thompson sampling by Langevin Monte Carlo: noisy gradient steps whose endpoint is the posterior sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import Unpack

from ensemblepp.agents.neural_frame import NeuralOptions
from ensemblepp.agents.point_network import PointNetworkAgent
from ensemblepp.agents.sgd_model import SgdModel, Steps
from ensemblepp.calibration import Calibration
from ensemblepp.errors import ParameterError, check_real, refuse_fixed
from ensemblepp.heads import EnsembleNetwork


class LangevinSteps(Steps):
    """theta <- theta - eta grad L + sqrt(2 eta T) noise, on L = sum over n data of the loss + lambda |theta|^2 / 2.

    The step size is eta = learning_rate / n, so the drift is learning_rate times the gradient of L / n, which is the
    mean loss plus the fading decay lambda / n that the other rules have.

    Args:
        network: Has `blocks` and `num_replicas`.
        calibration: Knows the noise level.
        owner: Whose options these are, for error messages.
        learning_rate: eta n. Raising it learns and mixes faster and less stably.
        weight_decay: lambda.
        temperature: T in squared standardised units; None takes 2 noise^2 of each replica.

    Raises:
        ParameterError: A value that breaks a rule, by name.
    """

    def __init__(
        self,
        network: EnsembleNetwork,
        calibration: Calibration,
        *,
        owner: str,
        learning_rate: float,
        weight_decay: float,
        temperature: float | None,
    ) -> None:
        super().__init__(network, owner=owner, learning_rate=learning_rate, weight_decay=weight_decay)
        self._calibration, self._temperature = calibration, temperature
        if temperature is not None:
            self._temperature = check_real("temperature", owner, temperature, at_least=0.0)
        self.num_parameters = sum(block.flat.numel() for block in self._blocks) // network.num_replicas

    def step(self, num_data: int, noise: Float[Tensor, "replicas parameters"] | None = None) -> None:
        """Take one step; `noise` is standard normal.

        Raises:
            ParameterError: No noise.
        """
        if noise is None:
            raise ParameterError("noise", type(self).__name__, "be given", None)
        count = max(num_data, 1)
        temperature = self._temperature
        spread = 2 * self._calibration.noise.square() if temperature is None else temperature
        noise = (2 * self._rate / count * spread) ** 0.5 * noise
        start = 0
        for block in self._blocks:
            gradient = block.flat.grad
            assert gradient is not None
            block.flat.mul_(1 - self._rate * self._weight_decay / count).sub_(gradient, alpha=self._rate)
            for view in block.split(block.flat).values():
                size = view[0].numel()
                view += noise[:, start : start + size].view_as(view)
                start += size


class LangevinModel(SgdModel):
    """A network trained by `LangevinSteps`: theta itself is random.

    Args:
        network: Has a point head.
        calibration: Units of reward and noise.
        temperature: See `LangevinSteps`.
        **options: See `SgdModel`.

    Raises:
        ParameterError: A value that breaks a rule, by name.
    """

    optimiser: LangevinSteps

    def __init__(
        self, network: EnsembleNetwork, calibration: Calibration, *, temperature: float | None, **options: Any
    ) -> None:
        self._temperature = temperature
        super().__init__(network, calibration, **options)

    def _build_steps(self, **options: Any) -> LangevinSteps:
        assert isinstance(self.network, EnsembleNetwork)
        return LangevinSteps(self.network, self.calibration, temperature=self._temperature, **options)

    def draw_index(self, batch_size: int) -> Float[Tensor, "replicas parameters"]:
        """Draw one update's noise, a standard normal number per weight."""
        size, generator = (self.network.num_replicas, self.optimiser.num_parameters), self._generator
        return torch.randn(size, generator=generator, device=generator.device, dtype=self.network.head.flat.dtype)


class LangevinTS(PointNetworkAgent):
    """LMC-TS: Langevin steps on the regularised loss between decisions, then act greedily on the weights reached.

    Each call of `update` takes K = `updates_per_step` steps::

        theta <- theta - eta_t grad L_t(theta) + sqrt(2 eta_t T) N(0, I)
        L_t    = sum over the n stored data of (f(x) - y)^2 + lambda |theta|^2 / 2,  y standardised
        eta_t  = learning_rate / n

    whose stationary law is exp(-L_t / T): T = 1 / beta is the paper's temperature, and eta_t its step size that decays
    as 1 / t. The weights start where the last decision left them. The gradient is the unbiased estimate from a
    minibatch, by plain steps: no momentum, no preconditioner. With `temperature=None`, T = 2 noise^2, the temperature
    at which exp(-L_t / T) is the posterior under Gaussian noise of that level and weights N(0, T / lambda).

    With few steps per decision the weights forget slowly, so successive decisions follow nearly the same sample. One
    set of weights is one sample, so there are no `posterior_samples`.

    Args:
        feature_dim: d, number of features of an arm or context.
        temperature: T = 1 / beta, in squared standardised units. Raising it explores more; 0 is greedy gradient
            descent. None follows the estimated noise.
        hidden_dims: Widths of the ReLU layers.
        layer_norm: Normalise each layer's pre-activations. On by default, unlike elsewhere: plain steps have no
            preconditioner, and without it a step size that suits features of norm 1 diverges on longer ones.
        learning_rate: eta_t n. Raising it mixes faster and less stably.
        weight_decay: lambda.
        **options: See `NeuralAgent`.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: Xu et al. (2022), Langevin Monte Carlo for contextual bandits (arXiv 2206.11254), algorithm 1 with a
    network as reward model.
    """

    def __init__(
        self,
        feature_dim: int,
        *,
        temperature: float | None = 0.01,
        hidden_dims: Sequence[int] = (64, 64),
        layer_norm: bool = True,
        learning_rate: float = 0.03,
        weight_decay: float = 1.0,
        **options: Unpack[NeuralOptions],
    ) -> None:
        refuse_fixed(type(self).__name__, options, "acquisition")
        super().__init__(feature_dim, acquisition="greedy", **options)
        self._learn_with(
            LangevinModel,
            hidden_dims=hidden_dims,
            layer_norm=layer_norm,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            temperature=temperature,
        )
