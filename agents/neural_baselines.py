"""The rivals of neural Ensemble++ on the same networks, buffer and calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import Unpack

from ensemblepp.acquisition import choose
from ensemblepp.agents.epinet_model import EpiNetModel
from ensemblepp.agents.neural_frame import NeuralAgent, NeuralOptions
from ensemblepp.agents.point_network import PointNetworkAgent
from ensemblepp.agents.sgd_model import SgdModel
from ensemblepp.errors import check_choice, check_real, refuse_fixed
from ensemblepp.heads import IndependentEnsemble
from ensemblepp.indices import IndexDistribution


class NeuralGreedy(PointNetworkAgent):
    """Act on a network's output, without exploration; ties are broken at random.

    Args:
        feature_dim: d, number of features of an arm or context.
        hidden_dims: Widths of the ReLU layers.
        layer_norm: Normalise each layer's pre-activations.
        learning_rate: Adam's step size.
        weight_decay: lambda of a decaying prior lambda / n on all weights.
        **options: See `NeuralAgent`.
    """

    _track_noise = True

    def __init__(
        self,
        feature_dim: int,
        *,
        hidden_dims: Sequence[int] = (64, 64),
        layer_norm: bool = False,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        **options: Unpack[NeuralOptions],
    ) -> None:
        refuse_fixed(type(self).__name__, options, "acquisition")
        super().__init__(feature_dim, acquisition="greedy", **options)
        self._learn_with(
            SgdModel,
            hidden_dims=hidden_dims,
            layer_norm=layer_norm,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            track_noise=self._track_noise,
        )


class NeuralEpsilonGreedy(NeuralGreedy):
    """Act on a network's output, and with probability epsilon uniformly at random among the allowed arms.

    Args:
        feature_dim: d, number of features of an arm or context.
        epsilon: Share of uniform actions in [0, 1]; constant over time.
        hidden_dims: Widths of the ReLU layers.
        layer_norm: Normalise each layer's pre-activations.
        learning_rate: Adam's step size.
        weight_decay: lambda of a decaying prior lambda / n on all weights.
        **options: See `NeuralAgent`.
    """

    def __init__(
        self,
        feature_dim: int,
        *,
        epsilon: float = 0.05,
        hidden_dims: Sequence[int] = (64, 64),
        layer_norm: bool = False,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        **options: Unpack[NeuralOptions],
    ) -> None:
        super().__init__(
            feature_dim,
            hidden_dims=hidden_dims,
            layer_norm=layer_norm,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            **options,
        )
        self.epsilon = check_real("epsilon", self._owner, epsilon, at_least=0.0, at_most=1.0)

    def _choose(self, scores: Tensor, mask: Tensor | None) -> Int[Tensor, "replicas batch"]:
        # Equal scores tie, and ties are broken uniformly among the allowed arms.
        generator = self.streams["act"]
        explore = torch.rand((*scores.shape[:2], 1), generator=generator, device=scores.device) < self.epsilon
        return choose(torch.where(explore, 0.0, scores), mask, generator=generator, owner=self._owner)


class EnsemblePlus(NeuralAgent):
    """Ensemble+: M separate networks on separately perturbed rewards, each with its own fixed prior network.

    Every decision follows one member at random (a one-hot index).

    Args:
        feature_dim: d, number of features of an arm or context.
        index_dim: M, number of networks; cost is proportional to it.
        acquisition: "thompson" follows a member, "greedy" the members' average.
        hidden_dims: Widths of every network's ReLU layers, the prior networks' too.
        prior_scale: Standard deviation of the prior networks' output over the inputs at hand, in standard deviations
            of the reward. Raising it explores more.
        learning_rate: Adam's step size.
        weight_decay: lambda of a decaying prior lambda / n on all weights.
        **options: See `NeuralAgent`.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: Osband et al. (2018), Randomized prior functions (arXiv 1806.03335); named ensemble+ in Osband et al. (2023,
    arXiv 2107.08924).
    """

    def __init__(
        self,
        feature_dim: int,
        *,
        index_dim: int = 8,
        acquisition: str = "thompson",
        hidden_dims: Sequence[int] = (64, 64),
        prior_scale: float = 0.35,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        **options: Unpack[NeuralOptions],
    ) -> None:
        laws = [IndexDistribution(law, index_dim) for law in ("one_hot", "gaussian")]
        super().__init__(feature_dim, *laws, **options)
        self.acquisition = check_choice("acquisition", self._owner, acquisition, ("thompson", "greedy"))
        network = IndependentEnsemble(
            feature_dim,
            hidden_dims,
            index_dim,
            num_outputs=self.num_arms or 1,
            num_replicas=self.num_replicas,
            generator=self.streams["init"],
            dtype=self.dtype,
        )
        # A one-hot index sees one prior network, not the root of the sum of squares over all M.
        scale = math.sqrt(index_dim) * check_real("prior_scale", self._owner, prior_scale, at_least=0.0)
        self.trainer = self.scorer = SgdModel(
            network,
            self.calibration,
            owner=self._owner,
            loss="ensemble",
            prior_scale=scale,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            generator=self.streams["replay"],
        )
        self.replay = self._build_replay()

    def draw_index(self, batch: int) -> Tensor | None:
        """Draw one member per decision; a greedy decision weighs all members alike."""
        if self.acquisition == "greedy":
            size = (self.num_replicas, batch, self.index_dim)
            return torch.full(size, 1 / self.index_dim, dtype=self.dtype, device=self.device)
        return super().draw_index(batch)


class EpiNet(NeuralAgent):
    """EpiNet: a base network plus a small network of features and index, and small fixed prior networks.

    Args:
        feature_dim: d, number of features of an arm or context.
        index_dim: M, dimension of the Gaussian index.
        acquisition: "thompson" draws an index, "greedy" acts on the base network.
        hidden_dims: Widths of the base network's ReLU layers.
        epinet_hidden_dims: Widths of the epinet.
        prior_hidden_dims: Widths of each of the M prior networks.
        prior_scale: Standard deviation of the prior over the inputs at hand, in standard deviations of the reward.
        num_update_indices: Indices per datum in the loss.
        learning_rate: Adam's step size.
        weight_decay: lambda of a decaying prior lambda / n on all weights.
        **options: See `NeuralAgent`.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: Osband et al. (2023), Epistemic neural networks (arXiv 2107.08924).
    """

    def __init__(
        self,
        feature_dim: int,
        *,
        index_dim: int = 8,
        acquisition: str = "thompson",
        hidden_dims: Sequence[int] = (64, 64),
        epinet_hidden_dims: Sequence[int] = (15, 15),
        prior_hidden_dims: Sequence[int] = (5, 5),
        prior_scale: float = 0.35,
        num_update_indices: int = 8,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        **options: Unpack[NeuralOptions],
    ) -> None:
        laws = [IndexDistribution(law, index_dim) for law in ("gaussian", "sphere")]
        super().__init__(feature_dim, *laws, **options)
        self.acquisition = check_choice("acquisition", self._owner, acquisition, ("thompson", "greedy"))
        self.trainer = self.scorer = EpiNetModel(
            feature_dim,
            hidden_dims,
            index_dim,
            num_outputs=self.num_arms or 1,
            num_replicas=self.num_replicas,
            calibration=self.calibration,
            owner=self._owner,
            epinet_hidden_dims=epinet_hidden_dims,
            prior_hidden_dims=prior_hidden_dims,
            prior_scale=prior_scale,
            num_update_indices=num_update_indices,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            init_generator=self.streams["init"],
            generator=self.streams["replay"],
            dtype=self.dtype,
        )
        self.replay = self._build_replay()


class NeuralLinear(NeuralGreedy):
    """Bayesian linear regression on the last layer's features of a network trained on the mean, with Thompson sampling.

    The exact posterior of the weights of [features, 1] is rebuilt every `refit_period` data and moved by every datum;
    noise and prior size are calibrated as for `NeuralEnsemblePP`.

    Args:
        feature_dim: d, number of features of an arm or context.
        exploration_scale: 1 is Thompson sampling; smaller values act closer to the mean.
        prior_scale: Prior standard deviation of the mean reward in standard deviations of the reward.
        refit_period: Data between two rebuilds.
        hidden_dims: Widths of the ReLU layers.
        layer_norm: Normalise each layer's pre-activations.
        learning_rate: Adam's step size.
        weight_decay: lambda of a decaying prior lambda / n on all weights.
        **options: See `NeuralAgent`.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: Snoek et al. (2015, arXiv 1502.05700); as a bandit Riquelme et al. (2018, arXiv 1802.09127), whose draw of
    the noise variance is replaced by its evidence estimate.
    """

    _track_noise = False

    def __init__(
        self,
        feature_dim: int,
        *,
        exploration_scale: float = 1.0,
        prior_scale: float = 1.0,
        refit_period: int = 20,
        hidden_dims: Sequence[int] = (64, 64),
        layer_norm: bool = False,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        **options: Unpack[NeuralOptions],
    ) -> None:
        super().__init__(
            feature_dim,
            hidden_dims=hidden_dims,
            layer_norm=layer_norm,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            **options,
        )
        self.acquisition = "thompson"
        self.exploration_scale = check_real("exploration_scale", self._owner, exploration_scale, at_least=0.0)
        self._add_closed_form(self.network.torso, {"features": 1.0, "constant": 1.0}, prior_scale, refit_period)

    def draw_index(self, batch: int) -> Float[Tensor, "replicas batch *arms dim"]:
        """Draw the standard normal vector of an exact posterior sample, one per arm with one posterior per arm."""
        return self._draw_normal(batch, self.streams["act"])

    def posterior_samples(
        self,
        features: Float[Tensor, "replicas points feature_dim"],
        arm: Tensor | None,
        num_samples: int,
        generator: torch.Generator,
    ) -> Float[Tensor, "replicas samples points"]:
        """Return joint exact posterior samples of the mean rewards, in reward units; the agent's streams stay put."""
        normal = self._draw_normal(num_samples, generator)
        return self.scorer.joint(features.to(self.dtype), arm if self.num_arms else None, normal)

    def _draw_normal(self, batch: int, generator: torch.Generator) -> Tensor:
        assert self.closed_form is not None
        arms = () if self.num_arms is None else (self.num_arms,)
        size = (self.num_replicas, batch, *arms, self.closed_form.posterior.feature_dim)
        return torch.randn(size, generator=generator, device=generator.device, dtype=self.dtype)
