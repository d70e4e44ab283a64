"""Every agent, environment and index law through the public checkers."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ensemblepp.agents import (
    EnsemblePlus,
    EpiNet,
    EpsilonGreedy,
    Greedy,
    LangevinTS,
    LinearAgent,
    LinearEnsemblePP,
    LinearEnsembleSampling,
    LinearThompsonSampling,
    LinUCB,
    NeuralDropout,
    NeuralEnsemblePP,
    NeuralEpsilonGreedy,
    NeuralGreedy,
    NeuralLinear,
    NeuralThompson,
    NeuralUCB,
    RandomFeatureEnsemblePP,
    Uniform,
)
from ensemblepp.agents.gaussian_process import GaussianProcessOracle
from ensemblepp.envs import (
    ClassificationBandit,
    ClassificationData,
    LinearBandit,
    ModerationBandit,
    MushroomLottery,
    NeuralClassificationBandit,
    NeuralRegressionBandit,
    PoolBandit,
    QuadraticBandit,
    VectorQuadraticBandit,
    WheelBandit,
)
from ensemblepp.indices import KINDS, IndexDistribution
from ensemblepp.testing import check_agent, check_environment, check_index_distribution

AGENTS: dict[str, Any] = {
    "ensemble_pp": LinearEnsemblePP,
    "ensemble_pp_cube": partial(LinearEnsemblePP, index="cube", perturbation="cube", index_dim=16),
    "ensemble_pp_coordinate": partial(LinearEnsemblePP, index="coordinate", perturbation="coordinate", index_dim=16),
    "ensemble_sampling": LinearEnsembleSampling,
    "thompson_sampling": LinearThompsonSampling,
    "lin_ucb": LinUCB,
    "greedy": Greedy,
    "epsilon_greedy": EpsilonGreedy,
    "uniform": Uniform,
    "frame": LinearAgent,
}
SMALL: dict[str, Any] = {"hidden_dims": (6, 5), "batch_size": 4, "updates_per_step": 2, "min_data": 2}
SMALL_PP = partial(NeuralEnsemblePP, index_dim=3, **SMALL)
NEURAL_AGENTS: dict[str, Any] = {
    "neural_ensemble_pp": partial(SMALL_PP, refit_period=3),
    "neural_ensemble_pp_ucb": partial(SMALL_PP, refit_period=3, acquisition="ucb", layer_norm=True),
    "neural_ensemble_pp_sgd": partial(SMALL_PP, head="sgd"),
    "neural_ensemble_pp_sgd_ucb": partial(SMALL_PP, head="sgd", acquisition="ucb", update_period=2),
    "neural_ensemble_pp_sgd_features": partial(SMALL_PP, head="sgd", prior="features", layer_norm=True),
    "random_feature_ensemble_pp": partial(RandomFeatureEnsemblePP, num_features=5, calibration_data=6, index_dim=3),
    "ensemble_plus": partial(EnsemblePlus, index_dim=3, **SMALL),
    "ensemble_plus_greedy": partial(EnsemblePlus, index_dim=3, acquisition="greedy", **SMALL),
    "epi_net": partial(EpiNet, index_dim=3, **SMALL),
    "neural_linear": partial(NeuralLinear, refit_period=3, **SMALL),
    "neural_greedy": partial(NeuralGreedy, **SMALL),
    "neural_epsilon_greedy": partial(NeuralEpsilonGreedy, epsilon=0.3, **SMALL),
    "neural_ucb": partial(NeuralUCB, **SMALL),
    "neural_thompson": partial(NeuralThompson, **SMALL),
    "langevin_ts": partial(LangevinTS, **SMALL),
    "neural_dropout": partial(NeuralDropout, **SMALL),
}
FINITE_AGENTS = AGENTS | NEURAL_AGENTS
# Enough where agents of one family run the same code.
ONE_PER_HEAD = AGENTS | {
    name: NEURAL_AGENTS[name] for name in ("neural_ensemble_pp", "neural_ensemble_pp_sgd_features")
}
SAME_AS_ANOTHER = ("neural_ensemble_pp_sgd_ucb", "random_feature_ensemble_pp", "neural_greedy", "neural_epsilon_greedy")
FEATURES = np.random.default_rng(0).normal(size=(11, 4)).astype(np.float32)
ROWS = ClassificationData(FEATURES, np.arange(11, dtype=np.int64) % 3, 3)
TWO_CLASSES = ClassificationData(FEATURES, np.arange(11, dtype=np.int64) % 2, 2)

ENVIRONMENTS: dict[str, Any] = {
    "linear": partial(LinearBandit, 3, 5),
    "linear_changing": partial(LinearBandit, 3, 5, arms="changing"),
    "linear_shared": partial(LinearBandit, 3, 5, bayesian=False),
    "linear_noiseless": partial(LinearBandit, 3, 5, noise_scale=0.0),
    "linear_one_arm": partial(LinearBandit, 1, 1),
    "compact": partial(LinearBandit, 3, action_set="compact"),
    "compact_one_feature": partial(LinearBandit, 1, action_set="compact"),
    "classification_shared": partial(ClassificationBandit, ROWS),
    "classification_disjoint": partial(ClassificationBandit, ROWS, encoding="disjoint", noise_scale=0.5),
    "digits": ClassificationBandit,
    "moderation": partial(ModerationBandit, TWO_CLASSES),
    "moderation_noisy": partial(ModerationBandit, TWO_CLASSES, noise_scale=0.5, intercept=False),
    "mushroom_lottery": partial(MushroomLottery, TWO_CLASSES),
    "mushroom_lottery_disjoint": partial(MushroomLottery, TWO_CLASSES, encoding="disjoint", noise_scale=0.5),
    "quadratic": partial(QuadraticBandit, 3, 5, pool_size=9),
    "quadratic_fixed": partial(QuadraticBandit, 3, 5, pool_size=9, arms="fixed"),
    "quadratic_noiseless_whole_pool": partial(QuadraticBandit, 2, 4, pool_size=4, noise_scale=0.0),
    "quadratic_one_arm": partial(QuadraticBandit, 1, 1, pool_size=2),
    "vector_quadratic": partial(VectorQuadraticBandit, 3, 5, pool_size=9),
    "neural_regression": partial(NeuralRegressionBandit, 3, 5, pool_size=9),
    "neural_classification": partial(NeuralClassificationBandit, 3, 5, pool_size=9),
    "wheel": partial(WheelBandit, 0.5),
    "wheel_noiseless": partial(WheelBandit, noise_scale=0.0),
}


class CountingBandit(PoolBandit):
    """Its pool is 0, 1, 2, 3, which whole-number contexts and all of their casts stay in."""

    feature_bounds = (0.0, 3.0)

    def _draw_function(self, generator: torch.Generator) -> None:
        self._values = self._normal(self.pool_size, generator=generator)

    def _draw_features(self, count: int, generator: torch.Generator) -> Tensor:
        return (
            torch.arange(count, dtype=self.dtype, device=self.device).view(1, count, 1).repeat(self.num_replicas, 1, 1)
        )

    def _mean(self, features: Tensor) -> Tensor:
        return self._values.gather(1, features[..., 0].long())


def make_oracle(num_replicas: int, **options: Any) -> GaussianProcessOracle:
    pool = torch.arange(4.0).view(1, 4, 1).repeat(num_replicas, 1, 1)
    return GaussianProcessOracle(pool, lambda x, y: (-((x - y.mT) ** 2)).exp(), noise_scale=0.1, **options)


@pytest.mark.parametrize("name", FINITE_AGENTS)
def test_agents_on_fixed_arms(name: str) -> None:
    check_agent(partial(FINITE_AGENTS[name], 3), ENVIRONMENTS["linear"])


@pytest.mark.parametrize("name", ONE_PER_HEAD)
def test_agents_on_changing_arms_with_one_feature(name: str) -> None:
    check_agent(partial(ONE_PER_HEAD[name], 1), partial(LinearBandit, 1, 3, arms="changing"))


@pytest.mark.parametrize("name", [name for name in FINITE_AGENTS if name not in SAME_AS_ANOTHER])
def test_agents_with_per_arm_posteriors(name: str) -> None:
    check_agent(partial(FINITE_AGENTS[name], 5, num_arms=3), ENVIRONMENTS["classification_shared"])


@pytest.mark.parametrize("name", AGENTS)
def test_agents_on_the_disjoint_encoding(name: str) -> None:
    # 15 features call for 20 members only on a compact action set.
    check_agent(partial(AGENTS[name], 15), ENVIRONMENTS["classification_disjoint"])


@pytest.mark.parametrize("name", [name for name in AGENTS if name != "lin_ucb"])
def test_agents_on_a_compact_action_set(name: str) -> None:
    check_agent(partial(AGENTS[name], 3), ENVIRONMENTS["compact"])


@pytest.mark.parametrize("acquisition", ["thompson", "ucb", "greedy"])
def test_the_gaussian_process_oracle_on_its_pool(acquisition: str) -> None:
    check_agent(partial(make_oracle, acquisition=acquisition), partial(CountingBandit, 1, 3, pool_size=4))


@pytest.mark.parametrize("name", ["neural_classification", "classification_shared"])
def test_the_logistic_loss_on_rewards_that_are_zero_or_one(name: str) -> None:
    sizes: dict[str, Any] = {"feature_dim": 5, "num_arms": 3} if name == "classification_shared" else {"feature_dim": 3}
    check_agent(partial(SMALL_PP, head="sgd", loss="logistic", **sizes), ENVIRONMENTS[name])


@pytest.mark.parametrize("name", ["ensemble_pp", "thompson_sampling"])
@pytest.mark.parametrize("environment", ["quadratic", "neural_classification"])
def test_agents_on_pools(name: str, environment: str) -> None:
    check_agent(partial(AGENTS[name], 3), ENVIRONMENTS[environment])


@pytest.mark.parametrize("name", ["ensemble_pp", "lin_ucb"])
def test_agents_on_the_wheel(name: str) -> None:
    check_agent(partial(AGENTS[name], 2, num_arms=5), ENVIRONMENTS["wheel"])


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environments(name: str) -> None:
    check_environment(ENVIRONMENTS[name])


@pytest.mark.parametrize("kind", KINDS)
def test_index_distributions(kind: str) -> None:
    check_index_distribution(IndexDistribution(kind, 5, 2 if kind == "sparse" else None))
