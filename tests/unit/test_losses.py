"""Losses against enumeration, sampling and autograd."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ensemblepp.heads import IndexedOutput
from ensemblepp.losses import (
    bradley_terry_loss,
    ensemble_loss,
    expected_index_loss,
    logistic_loss,
    sampled_index_loss,
    squared_loss,
)
from ensemblepp.seeding import make_generator

LEAD, MEMBERS, SIGMA = (2, 5), 4, 0.7


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=make_generator(seed, "data"), dtype=torch.float64)


COLUMNS = normal(*LEAD, 1 + MEMBERS, seed=1)
TARGET, PERTURBATION = normal(*LEAD, seed=2), normal(*LEAD, MEMBERS, seed=3)
SOFT_LABELS = torch.sigmoid(normal(*LEAD, seed=4))
INDEX = normal(*LEAD, 6, MEMBERS, seed=5)


def output(columns: Tensor = COLUMNS) -> IndexedOutput:
    return IndexedOutput(columns[..., :1], columns[..., 1:].unsqueeze(-2))


def coordinates(weight: float) -> Tensor:
    """The 2M indices +-sqrt(c M) e_m for every datum."""
    eye = (weight * MEMBERS) ** 0.5 * torch.eye(MEMBERS, dtype=torch.float64)
    return torch.cat([eye, -eye]).expand(*LEAD, -1, -1)


@pytest.mark.parametrize("weight", [1.0, 1 / MEMBERS])
def test_the_expected_loss_is_the_average_over_the_2m_scaled_coordinate_indices(weight: float) -> None:
    exact, gradient = expected_index_loss(output(), TARGET, PERTURBATION, SIGMA, weight)
    averaged, slope = sampled_index_loss(output(), TARGET, PERTURBATION, coordinates(weight), SIGMA, squared_loss)
    torch.testing.assert_close(exact, averaged, rtol=0, atol=1e-10)
    torch.testing.assert_close(gradient, slope, rtol=0, atol=1e-10)
    other = expected_index_loss(output(), TARGET, PERTURBATION, SIGMA, 2 * weight)[0]
    assert (other - averaged).abs().min() > 0.01


@pytest.mark.statistical
@pytest.mark.parametrize("weight", [1.0, 1 / MEMBERS])
def test_the_expected_loss_is_the_mean_over_gaussian_indices(weight: float) -> None:
    n = 200_000
    index = weight**0.5 * normal(n, MEMBERS, seed=6)
    exact, gradient = expected_index_loss(output(), TARGET, PERTURBATION, SIGMA, weight)
    for place in ((0, 0), (1, 3)):
        mean, members = COLUMNS[place][0], COLUMNS[place][1:]
        # Written out with the perturbation on the target, independent of the library's own sampled loss.
        error = mean + index @ members - (TARGET[place] + SIGMA * (index @ PERTURBATION[place]))
        losses, slopes = error.square(), 2 * error.unsqueeze(-1) * torch.cat([torch.ones(n, 1), index], dim=-1)
        assert abs(float(losses.mean() - exact[place])) < 4 * float(losses.std()) / n**0.5
        distance = (slopes.mean(0) - gradient[place]).abs()
        assert (distance < 4 * slopes.std(0) / n**0.5).all()


@pytest.mark.parametrize("noise", [SIGMA, torch.tensor([[0.5], [1.5]], dtype=torch.float64)])
def test_a_perturbation_off_the_prediction_is_one_on_the_target(noise: float | Tensor) -> None:
    per_datum = noise.unsqueeze(-1) if isinstance(noise, Tensor) else noise
    loss, _ = sampled_index_loss(output(), TARGET, PERTURBATION, INDEX, per_datum, squared_loss)
    wanted = torch.zeros(LEAD, dtype=torch.float64)
    wrong = torch.zeros(LEAD, dtype=torch.float64)
    for s in range(INDEX.shape[2]):
        zeta = INDEX[:, :, s]
        prediction = COLUMNS[..., 0] + (COLUMNS[..., 1:] * zeta).sum(-1)
        extra = noise * (zeta * PERTURBATION).sum(-1)
        wanted += (prediction - (TARGET + extra)).square() / INDEX.shape[2]
        wrong += (prediction - (TARGET - extra)).square() / INDEX.shape[2]
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-10)
    assert (loss - wrong).abs().min() > 1e-3


def test_members_at_sigma_times_the_perturbation_and_mean_at_the_target_minimise_the_expected_loss() -> None:
    columns = torch.cat([TARGET.unsqueeze(-1), SIGMA * PERTURBATION], dim=-1)
    loss, gradient = expected_index_loss(output(columns), TARGET, PERTURBATION, SIGMA)
    assert not loss.any()
    assert not gradient.any()
    flipped = torch.cat([TARGET.unsqueeze(-1), -SIGMA * PERTURBATION], dim=-1)
    loss, _ = expected_index_loss(output(flipped), TARGET, PERTURBATION, SIGMA)
    torch.testing.assert_close(loss, 4 * SIGMA**2 * PERTURBATION.square().sum(-1), rtol=0, atol=1e-12)


def test_ensemble_members_regress_on_their_own_perturbed_reward() -> None:
    loss, _ = ensemble_loss(output(), TARGET, PERTURBATION, SIGMA)
    wanted = sum(
        (TARGET + SIGMA * MEMBERS**0.5 * PERTURBATION[..., m] - COLUMNS[..., 1 + m]).square() for m in range(MEMBERS)
    )
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-10)


Call = Callable[[IndexedOutput], tuple[Tensor, Tensor]]
CALLS: dict[str, Call] = {
    "expected": lambda made: expected_index_loss(made, TARGET, PERTURBATION, SIGMA),
    "expected_unit": lambda made: expected_index_loss(made, TARGET, PERTURBATION, SIGMA, 1 / MEMBERS),
    "squared": lambda made: sampled_index_loss(made, TARGET, PERTURBATION, INDEX, SIGMA, squared_loss),
    "logistic": lambda made: sampled_index_loss(made, SOFT_LABELS, PERTURBATION, INDEX, SIGMA, logistic_loss),
    "ensemble": lambda made: ensemble_loss(made, TARGET, PERTURBATION, SIGMA),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_equal_autograd(name: str) -> None:
    columns = COLUMNS.clone().requires_grad_()
    loss, gradient = CALLS[name](output(columns))
    assert loss.shape == LEAD
    weight = normal(*LEAD, seed=8)
    (wanted,) = torch.autograd.grad((loss * weight).sum(), columns)
    torch.testing.assert_close(gradient * weight.unsqueeze(-1), wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", CALLS)
def test_a_datum_has_its_own_loss(name: str) -> None:
    changed = COLUMNS.clone()
    changed[1, 3] += 1
    before, after = (CALLS[name](output(columns)) for columns in (COLUMNS, changed))
    for first, second in zip(before, after, strict=True):
        differs = (first != second).view(*LEAD, -1).any(-1)
        assert differs.nonzero().tolist() == [[1, 3]]


def test_the_logistic_loss_is_the_cross_entropy_of_soft_labels() -> None:
    logits, labels = normal(50, seed=9) * 3, torch.sigmoid(normal(50, seed=10))
    share = torch.sigmoid(logits)
    loss, slope = logistic_loss(logits, labels)
    wanted = -labels * share.log() - (1 - labels) * (1 - share).log()
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(slope, share - labels, rtol=0, atol=1e-12)
    best = torch.logit(labels)
    assert logistic_loss(best, labels)[1].abs().max() < 1e-12


def test_the_logistic_loss_stays_finite_at_extreme_logits() -> None:
    logits = torch.tensor([800.0, -800.0, 800.0, -800.0], dtype=torch.float64)
    loss, slope = logistic_loss(logits, torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64))
    assert loss.tolist() == [0.0, 0.0, 800.0, 800.0]
    assert slope.tolist() == [0.0, 0.0, 1.0, -1.0]


def test_the_squared_loss_and_its_slope_by_hand() -> None:
    loss, slope = squared_loss(torch.tensor([3.0, -1.0]), torch.tensor([1.0, 1.0]))
    assert loss.tolist() == [4.0, 4.0]
    assert slope.tolist() == [4.0, -4.0]


def test_without_members_the_expected_loss_is_the_squared_error_of_the_mean() -> None:
    point = IndexedOutput(COLUMNS[..., :1], COLUMNS[..., :0].unsqueeze(-2))
    empty: Any = PERTURBATION[..., :0]
    loss, gradient = expected_index_loss(point, TARGET, empty, SIGMA)
    error = COLUMNS[..., 0] - TARGET
    torch.testing.assert_close(loss, error.square(), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, 2 * error.unsqueeze(-1), rtol=0, atol=1e-12)


def test_the_preference_loss_is_the_average_cross_entropy_of_differences_under_shared_indices() -> None:
    columns = [normal(*LEAD, 1 + MEMBERS, seed=seed).requires_grad_() for seed in (11, 12)]
    first, second = (output(each) for each in columns)
    loss, gradient = bradley_terry_loss(first, second, SOFT_LABELS, PERTURBATION, INDEX, SIGMA, margin=0.4)
    wanted = torch.zeros(LEAD, dtype=torch.float64)
    for zeta in INDEX.unbind(-2):
        logits = [mean + (each[..., 1:] * zeta).sum(-1) for mean, each in ((each[..., 0], each) for each in columns)]
        logit = logits[0] - logits[1] - 0.4 - SIGMA * (PERTURBATION * zeta).sum(-1)
        share = torch.sigmoid(logit)
        wanted = wanted - (SOFT_LABELS * share.log() + (1 - SOFT_LABELS) * (1 - share).log()) / INDEX.shape[-2]
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-12)
    slopes = torch.autograd.grad(wanted.sum(), columns)
    torch.testing.assert_close(gradient, slopes[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(-gradient, slopes[1], rtol=0, atol=1e-12)


def test_swapped_responses_turn_the_preference_gradient() -> None:
    first, second = output(normal(*LEAD, 1 + MEMBERS, seed=11)), output(normal(*LEAD, 1 + MEMBERS, seed=12))
    loss, gradient = bradley_terry_loss(first, second, SOFT_LABELS, PERTURBATION, INDEX, SIGMA)
    swapped, turned = bradley_terry_loss(second, first, 1 - SOFT_LABELS, -PERTURBATION, INDEX, SIGMA)
    torch.testing.assert_close(loss, swapped, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, -turned, rtol=0, atol=1e-12)
