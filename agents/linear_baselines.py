"""The rivals on the same posterior: Thompson sampling, LinUCB, ensemble sampling, (epsilon-)greedy and uniform."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import Unpack

from ensemblepp.acquisition import choose
from ensemblepp.agents.linear import LinearAgent, LinearEnsemble, LinearOptions
from ensemblepp.errors import ParameterError, check_real
from ensemblepp.types import Environment


class LinearThompsonSampling(LinearAgent):
    """Exact linear Thompson sampling: theta = mu + exploration_scale * S xi with xi ~ N(0, I) and Sigma = S S^T.

    Per-arm posteriors draw one independent xi per arm, since their joint posterior is a product.

    Args:
        feature_dim: d, number of features.
        exploration_scale: 1 is Thompson sampling; smaller values act closer to the mean.
        **options: See `LinearAgent`.

    Source: Agrawal and Goyal (2013), Thompson sampling for contextual bandits with linear payoffs (arXiv 1209.3352).
    """

    def __init__(self, feature_dim: int, *, exploration_scale: float = 1.0, **options: Unpack[LinearOptions]) -> None:
        super().__init__(feature_dim, **options)
        self.exploration_scale = check_real("exploration_scale", self._owner, exploration_scale, at_least=0.0)

    def draw_index(self, batch: int) -> Tensor:
        """Draw the standard normal xi, (replicas, batch, [arms,] feature_dim)."""
        return self._draw_normal(batch, self.streams["act"])

    def _draw_normal(self, batch: int, generator: torch.Generator) -> Tensor:
        arms = () if self.num_arms is None else (self.num_arms,)
        size = (self.num_replicas, batch, *arms, self.feature_dim)
        return torch.randn(size, generator=generator, device=generator.device, dtype=self.dtype)

    def parameter(self, index: Tensor | None) -> Tensor:
        """Return exact posterior samples."""
        if index is None:
            raise ParameterError("index", self._owner, "be given", None)
        return self.posterior.sample_exact(index, self.exploration_scale)

    def _sample_posterior(self, num_samples: int, generator: torch.Generator) -> Tensor:
        return self.posterior.sample_exact(self._draw_normal(num_samples, generator))


class LinUCB(LinearAgent):
    """Optimism: arm = argmax_x <x, mu> + exploration_scale * sqrt(x^T Sigma x). Finite action sets only.

    Args:
        feature_dim: d, number of features.
        exploration_scale: Width of the confidence bound in posterior standard deviations; raising it explores more.
        **options: See `LinearAgent`.

    Source: Li et al. (2010), A contextual-bandit approach to personalized news article recommendation
    (arXiv 1003.0146), algorithm 1 with posterior in place of ridge covariance.
    """

    def __init__(self, feature_dim: int, *, exploration_scale: float = 1.0, **options: Unpack[LinearOptions]) -> None:
        super().__init__(feature_dim, **options)
        self.exploration_scale = check_real("exploration_scale", self._owner, exploration_scale, at_least=0.0)

    def scores(self, contexts: Tensor, index: Tensor | None) -> Float[Tensor, "replicas batch arms"]:
        """Return the upper confidence bounds."""
        mean = super().scores(contexts, index)
        return mean + self.exploration_scale * self.posterior.standard_deviation(contexts)

    def check_environment(self, environment: Environment) -> None:
        """Raise unless the sizes fit and the action set is finite."""
        super().check_environment(environment)
        self._refuse(environment.action_set)

    def _direction(self, parameter: Tensor) -> Tensor:
        self._refuse("compact")
        return parameter

    def _refuse(self, action_set: str) -> None:
        if action_set != "finite":
            raise ParameterError(
                "action_set", self._owner, 'be "finite"', repr(action_set), "Use LinearThompsonSampling there."
            )


class LinearEnsembleSampling(LinearEnsemble):
    """Ensemble sampling: M models trained on the prior and rewards perturbed by N(0, eta^2); act on one at random.

    Model m is mu + sqrt(M) A e_m with Gaussian prior directions and perturbations, so every model is marginally a
    draw from the posterior, but only M different draws exist.

    Args:
        feature_dim: d, number of features.
        index_dim: M, number of models; None means max(16, ceil(1.3 d)).
        exploration_scale: 1 is ensemble sampling; smaller values act closer to the mean.
        **options: See `LinearAgent`.

    Source: Lu and Van Roy (2017), Ensemble sampling (arXiv 1705.07347), section 3 for the linear case.
    """

    def __init__(
        self,
        feature_dim: int,
        *,
        index_dim: int | None = None,
        exploration_scale: float = 1.0,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__(feature_dim, index_dim=index_dim, index="one_hot", perturbation="gaussian", **options)
        scale = check_real("exploration_scale", self._owner, exploration_scale, at_least=0.0)
        self.spread = scale * math.sqrt(self.index_dim)


class Greedy(LinearAgent):
    """Act on the posterior mean, without exploration; ties are broken at random.

    Args:
        feature_dim: d, number of features.
        **options: See `LinearAgent`.
    """

    def __init__(self, feature_dim: int, **options: Unpack[LinearOptions]) -> None:
        super().__init__(feature_dim, **options)


class EpsilonGreedy(LinearAgent):
    """Act on the posterior mean, and with probability epsilon uniformly at random among the allowed actions.

    Args:
        feature_dim: d, number of features.
        epsilon: Share of uniform actions in [0, 1]; constant over time.
        **options: See `LinearAgent`.
    """

    def __init__(self, feature_dim: int, *, epsilon: float = 0.05, **options: Unpack[LinearOptions]) -> None:
        super().__init__(feature_dim, **options)
        self.epsilon = check_real("epsilon", self._owner, epsilon, at_least=0.0, at_most=1.0)

    def _choose(self, scores: Tensor, mask: Tensor | None) -> Int[Tensor, "replicas batch"]:
        # Equal scores tie, and ties are broken uniformly among the allowed arms.
        scores = torch.where(self._explore(scores), 0.0, scores)
        return choose(scores, mask, generator=self.streams["act"], owner=self._owner)

    def _direction(self, parameter: Tensor) -> Tensor:
        return super()._direction(torch.where(self._explore(parameter), 0.0, parameter))

    def _explore(self, like: Tensor) -> Tensor:
        draw = torch.rand((*like.shape[:2], 1), generator=self.streams["act"], device=like.device)
        return draw < self.epsilon


class Uniform(LinearAgent):
    """Choose uniformly at random among the allowed actions: the yardstick that every regret curve should beat.

    The posterior still learns from what is played, so the agent can collect unbiased data for another.

    Args:
        feature_dim: d, number of features.
        **options: See `LinearAgent`.
    """

    def __init__(self, feature_dim: int, **options: Unpack[LinearOptions]) -> None:
        super().__init__(feature_dim, **options)

    def scores(self, contexts: Tensor, index: Tensor | None) -> Float[Tensor, "replicas batch arms"]:
        """Return equal scores, so that the tie is broken uniformly; NaN for contexts that are not finite."""
        # Zero times NaN or infinity is NaN: one product finds them, at a tenth of the cost of looking at each feature.
        equal = contexts @ contexts.new_zeros(self.feature_dim)
        return equal if self.num_arms is None else equal.unsqueeze(-1).expand(-1, -1, self.num_arms)

    def _direction(self, parameter: Tensor) -> Tensor:
        return super()._direction(torch.zeros_like(parameter))
