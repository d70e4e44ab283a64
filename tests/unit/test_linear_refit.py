"""The batch formula: one refit equals all updates, and its statistics are those of textbook regression."""

import pytest
import torch
from torch import Tensor

from ensemblepp.errors import ParameterError
from ensemblepp.linear import LinearPosterior
from ensemblepp.seeding import make_generator

REPLICAS, DIM, MEMBERS = 3, 5, 4


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=make_generator(seed, "data"), dtype=torch.float64)


def posterior(arms: int | None, dtype: torch.dtype = torch.float64) -> tuple[LinearPosterior, Tensor]:
    lead = (REPLICAS,) if arms is None else (REPLICAS, arms)
    directions = draw(*lead, DIM, MEMBERS, seed=1).to(dtype)
    root = draw(DIM, DIM, seed=2)
    options = {"noise_scale": 0.3, "prior_mean": draw(DIM, seed=3), "prior_covariance": root @ root.T + torch.eye(DIM)}
    return LinearPosterior(DIM, directions, num_replicas=REPLICAS, num_arms=arms, dtype=dtype, **options), directions


def data(count: int, arms: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    features = draw(REPLICAS, count, DIM, seed=4)
    features[:, ::5] = 0.0
    reward = torch.where((features == 0).all(-1), 0.0, draw(REPLICAS, count, seed=5))
    arm = None
    if arms is not None:  # the last arm gets no data
        arm = torch.randint(arms - 1, (REPLICAS, count), generator=make_generator(6, "arm"))
    return features, reward, draw(REPLICAS, count, MEMBERS, seed=7), arm


@pytest.mark.parametrize("arms", [None, 4])
@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 700])
def test_a_refit_equals_all_updates(arms: int | None, count: int) -> None:
    (step, _), (batch, directions) = posterior(arms), posterior(arms)
    batch.update(*data(9, arms))  # a refit forgets what was there
    step.update(*data(count, arms))
    batch.refit(*data(count, arms), directions=directions)
    for name in ("mean", "factor", "covariance"):
        torch.testing.assert_close(getattr(batch, name), getattr(step, name), rtol=1e-9, atol=1e-10)
    for each in (step, batch):
        each.update(*data(3, arms))
    torch.testing.assert_close(batch.mean, step.mean, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("arms", [None, 4])
def test_statistics_are_those_of_regression(arms: int | None) -> None:
    model, directions = posterior(arms)
    features, reward, perturbation, arm = data(50, arms)
    fit = model.refit(features, reward, perturbation, arm, directions=directions)
    prior = model.prior_root @ model.prior_root.mT
    for replica in range(REPLICAS):
        for block in [None] if arms is None else range(arms):
            own = torch.ones(50, dtype=torch.bool) if arm is None or block is None else arm[replica] == block
            place = (replica,) if block is None else (replica, block)
            error = reward[replica, own] - features[replica, own] @ model.mean[place]
            gamma = DIM - torch.linalg.solve(prior, model.covariance[place]).trace()
            torch.testing.assert_close(fit.residual_sum_squares[place], error.square().sum(), rtol=1e-8, atol=1e-8)
            torch.testing.assert_close(fit.effective_dim[place], gamma, rtol=1e-8, atol=1e-8)


def test_a_float32_refit_is_solved_in_float64() -> None:
    single, directions = posterior(None, torch.float32)
    double, _ = posterior(None)
    features, reward, perturbation, arm = data(700, None)
    single.refit(features.float(), reward.float(), perturbation.float(), arm, directions=directions)
    double.refit(features, reward, perturbation, arm, directions=directions.double())
    torch.testing.assert_close(single.mean.double(), double.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(single.covariance.double(), double.covariance, rtol=1e-4, atol=1e-7)


def test_a_refused_refit_changes_nothing() -> None:
    model, directions = posterior(None)
    features, reward, perturbation, _ = data(9, None)
    before = model.state.clone()
    bad = reward.clone()
    bad[1, 2] = torch.nan
    with pytest.raises(ParameterError, match="reward"):
        model.refit(features, bad, perturbation, directions=directions)
    with pytest.raises(ParameterError, match="directions of LinearPosterior must have shape"):
        model.refit(features, reward, perturbation)
    assert torch.equal(model.state, before)
