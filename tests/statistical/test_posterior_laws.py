"""Ensemble++ samples follow the exact posterior: in second moments, in distribution and in what is chosen."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp, kstest
from torch import Tensor

from ensemblepp.agents import Greedy, LinearAgent, LinearEnsemblePP, LinearEnsembleSampling, LinearThompsonSampling
from ensemblepp.envs import LinearBandit
from ensemblepp.indices import IndexDistribution
from ensemblepp.linear import LinearPosterior
from ensemblepp.runs import run_bandit
from ensemblepp.seeding import make_generator
from ensemblepp.types import Transition

pytestmark = pytest.mark.statistical

NUM_SAMPLES = 20_000
SMALLEST_P = 0.001
STANDARD_ERRORS = 4.5  # of the largest among a handful of entries
DIM = 3
PRIOR: dict[str, Any] = {
    "prior_covariance": torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, 0.3], [0.0, 0.3, 1.5]]),
    "prior_mean": torch.tensor([0.5, -1.0, 0.0]),
    "noise_scale": 0.8,
}
DIRECTIONS = torch.nn.functional.normalize(
    torch.tensor([[1.0, 0.0, 0.0], [1.0, -1.0, 2.0], [0.0, 1.0, 1.0]], dtype=torch.float64), dim=-1
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=make_generator(seed, "data"), dtype=torch.float64)


def teach(agent: LinearAgent, count: int = 15) -> LinearAgent:
    """Let every replica see the same fixed data, each with perturbations of its own."""
    features = normal(1, count, DIM).expand(agent.num_replicas, -1, -1)
    reward = normal(1, count, seed=1).expand(agent.num_replicas, -1)
    for half in (slice(0, count // 2), slice(count // 2, count)):
        agent.update(Transition(features[:, half], reward[:, half]))
    return agent


def exact() -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the posterior by the textbook formula."""
    precision = torch.linalg.inv(PRIOR["prior_covariance"].double())
    x, y = normal(1, 15, DIM)[0], normal(1, 15, seed=1)[0]
    covariance = torch.linalg.inv(precision + x.T @ x / PRIOR["noise_scale"] ** 2)
    mean = covariance @ (precision @ PRIOR["prior_mean"].double() + x.T @ y / PRIOR["noise_scale"] ** 2)
    return mean, covariance


def p_values(samples: Tensor) -> list[float]:
    """Return Kolmogorov-Smirnov p-values of three projections of (samples, DIM) against the exact posterior."""
    mean, covariance = exact()
    centre, spread = DIRECTIONS @ mean, torch.einsum("pd,de,pe->p", DIRECTIONS, covariance, DIRECTIONS).sqrt()
    standard = ((samples.double() @ DIRECTIONS.T - centre) / spread).numpy()
    return [float(kstest(column, "norm").pvalue) for column in standard.T]


def one_sample_per_replica(agent: LinearAgent) -> Tensor:
    return agent.parameter(agent.draw_index(1))[:, 0]


@pytest.mark.parametrize("perturbation", ["gaussian", "sphere", "cube", "coordinate"])
@pytest.mark.parametrize("members", [1, 4])
def test_the_factors_second_moment_is_the_covariance_on_average(perturbation: str, members: int) -> None:
    options: dict[str, Any] = PRIOR | {"num_replicas": NUM_SAMPLES, "dtype": torch.float64}
    agent = teach(LinearEnsemblePP(DIM, index_dim=members, perturbation=perturbation, **options))
    products = agent.posterior.factor @ agent.posterior.factor.mT
    standard_error = products.std(0) / math.sqrt(NUM_SAMPLES)
    off = (products.mean(0) - exact()[1]).abs() / standard_error
    assert float(off.max()) < STANDARD_ERRORS
    mean_factor = agent.posterior.factor.mean(0) / (agent.posterior.factor.std(0) / math.sqrt(NUM_SAMPLES))
    assert float(mean_factor.abs().max()) < STANDARD_ERRORS


def test_a_discounted_factor_still_matches_on_average() -> None:
    agent = teach(LinearEnsemblePP(DIM, index_dim=4, num_replicas=NUM_SAMPLES, dtype=torch.float64, **PRIOR))
    agent.discount(0.7)
    agent.discount(0.7, keep_prior=True)
    products = agent.posterior.factor @ agent.posterior.factor.mT
    off = (products.mean(0) - agent.posterior.covariance[0]).abs() / (products.std(0) / math.sqrt(NUM_SAMPLES))
    assert float(off.max()) < STANDARD_ERRORS


def test_samples_of_ensemble_pp_follow_the_exact_posterior() -> None:
    agent = teach(LinearEnsemblePP(DIM, index_dim=64, num_replicas=NUM_SAMPLES, **PRIOR))
    assert min(p_values(one_sample_per_replica(agent))) > SMALLEST_P


def test_samples_of_exact_thompson_sampling_follow_the_exact_posterior() -> None:
    agent = teach(LinearThompsonSampling(DIM, **PRIOR))
    index = agent.draw_index(NUM_SAMPLES)
    assert min(p_values(agent.parameter(index)[0])) > SMALLEST_P


def test_models_of_ensemble_sampling_are_marginally_posterior_draws() -> None:
    agent = teach(LinearEnsembleSampling(DIM, index_dim=4, num_replicas=NUM_SAMPLES, **PRIOR))
    assert min(p_values(one_sample_per_replica(agent))) > SMALLEST_P
    # And two models of one ensemble are independent given the data.
    members = agent.posterior.factor @ torch.eye(4)[:, :2]
    correlation = torch.einsum("rdi,rei->ide", members, members.flip(-1)) / NUM_SAMPLES
    spread = members.double().std(0)[:, 0]
    assert float((correlation[0] / spread.outer(spread)).abs().max()) < STANDARD_ERRORS / math.sqrt(NUM_SAMPLES)


def test_one_fixed_small_ensemble_does_not_follow_the_posterior() -> None:
    """The same test must be able to fail: two fixed members span a plane, whatever the index."""
    agent = teach(LinearEnsemblePP(DIM, index_dim=2, **PRIOR))
    assert max(p_values(agent.parameter(agent.draw_index(NUM_SAMPLES))[0])) < SMALLEST_P


def test_one_fixed_large_ensemble_chooses_as_exact_thompson_sampling() -> None:
    arms = normal(1, 1, 5, DIM, seed=3).float().expand(1, 500, 5, DIM)
    shares = []
    for agent in (LinearThompsonSampling(DIM, **PRIOR), LinearEnsemblePP(DIM, index_dim=20_000, **PRIOR)):
        teach(agent)
        counts = torch.zeros(5, dtype=torch.float64)
        for _ in range(10):  # 500 decisions at a time: an index has 20,000 entries
            arm = agent.act(arms).arm
            assert arm is not None
            counts += torch.bincount(arm.flatten(), minlength=5)
        shares.append(counts / 5000)
    pooled = (shares[0] + shares[1]) / 2
    standard_error = (2 * pooled * (1 - pooled) / 5000).sqrt()
    # The factor itself is off by about 1 / sqrt(M) = 0.7 % of a standard deviation.
    assert float(((shares[0] - shares[1]).abs() - 0.005 - STANDARD_ERRORS * standard_error).max()) < 0


def regrets(agent: LinearAgent, seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    bandit = LinearBandit(DIM, 6, num_replicas=agent.num_replicas, seed=seed)
    return run_bandit(agent, bandit, 40).cumulative_regret[:, -1]


def test_regret_of_a_large_ensemble_is_distributed_as_that_of_exact_thompson_sampling() -> None:
    options: dict[str, Any] = {"num_replicas": 2000, "prior_covariance": 10.0}
    thompson = regrets(LinearThompsonSampling(DIM, **options), seed=1)
    ensemble = regrets(LinearEnsemblePP(DIM, index_dim=256, **options), seed=2)
    greedy = regrets(Greedy(DIM, **options), seed=3)
    assert ks_2samp(thompson, ensemble).pvalue > SMALLEST_P
    assert ks_2samp(thompson, greedy).pvalue < SMALLEST_P  # the test can tell agents apart


@pytest.mark.parametrize("count", [1, 10, 100])
def test_sample_variance_falls_as_one_over_n(count: int) -> None:
    """One feature seen n times has variance 1 / (1 + n); the relative standard error is about sqrt(2 / 10,000)."""
    num, wanted = 10_000, 1 / (1 + count)
    for agent in (LinearThompsonSampling(1, num_replicas=num), LinearEnsemblePP(1, index_dim=16, num_replicas=num)):
        for start in range(0, count, 10):
            size = (num, min(10, count - start))
            agent.update(Transition(torch.ones(*size, 1), torch.full(size, 2.0)))
        samples = one_sample_per_replica(agent).double().flatten()
        deviations = (samples - samples.mean()).square()
        standard_error = float(deviations.std()) / math.sqrt(num)
        assert abs(float(deviations.mean()) - wanted) < STANDARD_ERRORS * standard_error
        assert float(samples.mean()) == pytest.approx(
            2 * count / (1 + count), abs=STANDARD_ERRORS * (wanted / num) ** 0.5
        )


def test_exact_samples_have_the_posterior_covariance() -> None:
    posterior = LinearPosterior(DIM, dtype=torch.float64, **PRIOR)
    posterior.update(normal(1, 15, DIM), normal(1, 15, seed=1))
    samples = posterior.sample_exact(normal(1, NUM_SAMPLES, DIM, seed=4))[0] - exact()[0]
    products = samples.unsqueeze(-1) * samples.unsqueeze(-2)
    off = (products.mean(0) - exact()[1]).abs() / (products.std(0) / math.sqrt(NUM_SAMPLES))
    assert float(off.max()) < STANDARD_ERRORS


@pytest.mark.parametrize("kind", ["sphere", "cube"])
def test_a_large_ensemble_tracks_the_covariance_in_every_direction(kind: str) -> None:
    dim, steps = 5, 500
    agent = LinearEnsemblePP(dim, index_dim=256, index=IndexDistribution(kind, 256), perturbation=kind, num_replicas=20)
    bandit = LinearBandit(dim, 20, num_replicas=20)
    for _ in range(5):
        run_bandit(agent, bandit, steps // 5)
        spectrum = agent.posterior.tracking_spectrum()
        assert float(spectrum.min()) > 0.5
        assert float(spectrum.max()) < 1.5
