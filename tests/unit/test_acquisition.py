"""The masked maximum with uniform tie-break, and choice shares."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from ensemblepp.acquisition import candidates, choice_shares, choose
from ensemblepp.errors import ParameterError
from ensemblepp.seeding import make_generator

SMALLEST_P = 1e-4


def pick(scores: Tensor, mask: Tensor | None = None, seed: int = 0) -> Tensor:
    return choose(scores, mask, generator=make_generator(seed, "act"))


def test_the_largest_allowed_score_is_chosen() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0], [5.0, -1.0, 4.0]])
    assert pick(scores).tolist() == [1, 0]
    mask = torch.tensor([[True, False, True], [False, True, False]])
    assert pick(scores, mask).tolist() == [2, 1]
    assert int(pick(scores[0])) == 1


def test_one_arm_and_one_allowed_arm_are_certain() -> None:
    assert pick(torch.zeros(5, 1)).tolist() == [0] * 5
    only = torch.zeros(1000, 7, dtype=torch.bool)
    only[:, 4] = True
    assert pick(torch.randn(1000, 7, generator=make_generator(0, "scores")), only).tolist() == [4] * 1000


@pytest.mark.parametrize("value", [0.0, -torch.inf, -3.4e38])
def test_a_million_masked_draws_never_choose_a_masked_arm(value: float) -> None:
    mask = torch.rand(1_000_000, 5, generator=make_generator(0, "mask")) < 0.4
    mask[:, 2] |= ~mask.any(-1)
    chosen = pick(torch.full((1_000_000, 5), value), mask)
    assert bool(mask.gather(-1, chosen.unsqueeze(-1)).all())
    for arm in range(5):  # among those allowed, equal scores tie
        full = (mask.sum(-1) == 5).nonzero().squeeze(-1)
        share = float((chosen[full] == arm).double().mean())
        assert share == pytest.approx(0.2, abs=4 * (0.16 / len(full)) ** 0.5)


def test_a_masked_arm_with_infinite_or_nan_score_is_never_chosen() -> None:
    scores = torch.tensor([[torch.inf, 0.0, torch.nan, -torch.inf]]).expand(1000, -1)
    mask = torch.tensor([[False, True, False, True]]).expand(1000, -1)
    assert pick(scores, mask).tolist() == [1] * 1000


@pytest.mark.parametrize("num_arms", [2, 3, 10, 1000])
def test_ties_are_broken_uniformly(num_arms: int) -> None:
    counts = torch.bincount(pick(torch.zeros(100_000, num_arms)), minlength=num_arms)
    assert chisquare(counts.numpy()).pvalue > SMALLEST_P


def test_ties_among_the_best_allowed_arms_are_broken_uniformly() -> None:
    scores = torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0]).expand(30_000, -1)
    mask = torch.tensor([True, True, True, False, True]).expand(30_000, -1)
    counts = torch.bincount(pick(scores, mask), minlength=5)
    assert counts[[1, 3]].tolist() == [0, 0]
    assert chisquare(counts[[0, 2, 4]].numpy()).pvalue > SMALLEST_P


def test_an_all_true_mask_draws_as_no_mask() -> None:
    scores = torch.randint(3, (500, 6), generator=make_generator(1, "scores")).float()
    assert torch.equal(pick(scores), pick(scores, torch.ones(500, 6, dtype=torch.bool)))


def test_candidates_mark_every_best_arm() -> None:
    scores = torch.tensor([[1.0, 1.0, 0.0], [-torch.inf, -torch.inf, -torch.inf]])
    assert candidates(scores).tolist() == [[True, True, False], [True, True, True]]
    mask = torch.tensor([[False, True, True], [True, False, True]])
    assert candidates(scores, mask).tolist() == [[False, True, False], [True, False, True]]


def test_choice_shares_by_hand() -> None:
    samples = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [2.0, 2.0, 0.0], [0.0, 0.0, 9.0]])
    np.testing.assert_allclose(choice_shares(samples), [1.5 / 4, 1.5 / 4, 1 / 4])
    mask = torch.tensor([True, False, True])
    # Rows: arm 0; arms 0 and 2 tie; arm 0; arm 2.
    np.testing.assert_allclose(choice_shares(samples, mask), [2.5 / 4, 0, 1.5 / 4])
    np.testing.assert_allclose(choice_shares(samples, torch.tensor([False, True, False])), [0, 1, 0])


def test_a_row_without_an_allowed_arm_is_named() -> None:
    mask = torch.ones(2, 3, 4, dtype=torch.bool)
    mask[1, 2] = False
    message = r"mask of choose must allow at least one arm in every row; got False at index \(1, 2\)"
    with pytest.raises(ParameterError, match=message):
        pick(torch.zeros(2, 3, 4), mask)


def test_a_nan_score_is_named() -> None:
    scores = torch.zeros(2, 3)
    scores[1, 2] = torch.nan
    with pytest.raises(ParameterError, match=r"scores of choose must not be NaN; got nan at index \(1, 2\)"):
        pick(scores)
    with pytest.raises(ParameterError, match=r"scores of choose must not be NaN; got nan at index \(1, 2\)"):
        pick(scores, torch.ones(2, 3, dtype=torch.bool))


def test_no_arm_at_all_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"scores of choose must have at least one arm; got shape \(2, 0\)"):
        pick(torch.zeros(2, 0))


def test_a_mask_of_another_shape_is_refused(without_shape_checks: None) -> None:
    with pytest.raises(ParameterError, match=r"mask of choose must have shape \(as scores\) = \(2, 3\)"):
        pick(torch.zeros(2, 3), torch.ones(3, dtype=torch.bool))
