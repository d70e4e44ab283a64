"""Advantages against a public implementation's numbers, hand-computed groups, loops and enumeration."""

import pytest
import torch
from torch import Tensor

from ensemblepp.errors import ParameterError
from ensemblepp.policy.advantages import (
    generalised_advantages,
    group_mean_advantages,
    opo_advantages,
    reward_to_go,
    rloo_advantages,
    weighted_advantages,
)
from ensemblepp.policy.token_baseline import optimal_token_baseline, token_energy
from ensemblepp.seeding import make_generator
from tests.policy_reference import CASES, GROUP, INPUTS, MASK
from tests.policy_toy import close

REWARDS = INPUTS["token_level_rewards"]
EXPECTED = {case["name"]: torch.tensor(case["advantages"], dtype=torch.float64) for case in CASES["advantage"]}
ENERGY = token_energy(INPUTS["old_log_prob"], INPUTS["sum_pi_squared"], MASK)

SCALAR = [group_mean_advantages, rloo_advantages, opo_advantages]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=make_generator(seed, "data"), dtype=torch.float64)


def every_baseline(
    rewards: Tensor, mask: Tensor, group: Tensor, keep: Tensor | None = None, energy: Tensor | None = None
) -> list[Tensor]:
    """All group baselines on one batch, with an energy that differs between tokens."""
    energy = normal(*mask.shape, seed=9).abs() if energy is None else energy
    one_each = [estimate(rewards, mask, group, keep=keep) for estimate in SCALAR]
    scaled = group_mean_advantages(rewards, mask, group, keep=keep, scale_by_std=True)
    weighted = weighted_advantages(rewards, mask, group, energy.sum(1), keep=keep)
    tokens = [
        optimal_token_baseline(rewards, mask, group, energy, keep=keep, leave_one_out=alone, multi_turn=turns)
        for alone in (False, True)
        for turns in (False, True)
    ]
    return [*one_each, scaled, weighted, *tokens]


@pytest.mark.parametrize(
    ("name", "actual"),
    [
        ("grpo", group_mean_advantages(REWARDS, MASK, GROUP, scale_by_std=True)),
        ("rloo", rloo_advantages(REWARDS, MASK, GROUP)),
        ("otb", optimal_token_baseline(REWARDS, MASK, GROUP, ENERGY, zero_tail=True)),
        ("otb_no_zero_tail", optimal_token_baseline(REWARDS, MASK, GROUP, ENERGY)),
        (
            "tir_otb_is",
            optimal_token_baseline(
                REWARDS,
                MASK,
                GROUP,
                ENERGY,
                importance_weights=torch.tensor(CASES["is_weights"][0]["weights"], dtype=torch.float64),
                multi_turn=True,
            ),
        ),
    ],
)
def test_a_public_implementation_gets_the_same_advantages(name: str, actual: Tensor) -> None:
    close(actual, EXPECTED[name], 1e-8)


def test_baselines_of_one_group_by_hand() -> None:
    rewards, group = torch.tensor([1.0, 0.0, 2.0, 7.0], dtype=torch.float64), torch.tensor([4, 4, 4, 0])
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
    for estimate, expected in zip(
        SCALAR, ([0.0, -1.0, 1.0, 7.0], [0.0, -1.5, 1.5, 7.0], [-1 / 6, -7 / 6, 5 / 6, 7.0]), strict=True
    ):
        close(estimate(rewards, mask, group), torch.tensor(expected, dtype=torch.float64).unsqueeze(1) * mask)
    scaled = group_mean_advantages(rewards, mask, group, scale_by_std=True, eps=1e-12)
    close(scaled[:, 0], torch.tensor([0.0, -1.0, 1.0, 7.0], dtype=torch.float64))


def test_equal_rewards_give_exactly_zero_in_single_precision() -> None:
    rewards, mask, group = torch.full((7,), 0.1), torch.ones(7, 2), torch.zeros(7, dtype=torch.long)
    for estimate in SCALAR:
        assert torch.equal(estimate(rewards, mask, group), torch.zeros(7, 2))
    assert torch.equal(group_mean_advantages(rewards, mask, group, scale_by_std=True), torch.zeros(7, 2))


def test_a_rejected_row_enters_no_baseline_and_gets_zero() -> None:
    rewards = torch.tensor([1.0, 0.0, 100.0, 0.5], dtype=torch.float64)
    group, mask, energy = torch.zeros(4, dtype=torch.long), torch.ones(4, 3), normal(4, 3).abs()
    keep = torch.ones(4, 3, dtype=torch.bool)
    keep[2] = False
    rest = torch.tensor([0, 1, 3])
    removed = every_baseline(rewards[rest], mask[rest], group[rest], energy=energy[rest])
    counted = every_baseline(rewards, mask, group, energy=energy)
    for reward in (100.0, torch.nan):
        rewards[2] = reward
        rejected = every_baseline(rewards, mask, group, keep, energy)
        for actual, wanted, leaked in zip(rejected, removed, counted, strict=True):
            assert torch.equal(actual[2], torch.zeros(3, dtype=torch.float64))
            close(actual[rest], wanted)
            assert (leaked[rest] - wanted).abs().max() > 0.4


def test_a_row_that_keeps_one_token_still_counts() -> None:
    keep = MASK.bool().clone()
    keep[0, 1:] = False
    for kept, wanted in zip(
        every_baseline(REWARDS, MASK, GROUP, keep), every_baseline(REWARDS, MASK, GROUP), strict=True
    ):
        assert torch.equal(kept, wanted)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 3)])
def test_empty_masked_and_rejected_batches_give_zeros(shape: tuple[int, int]) -> None:
    rewards, group = torch.ones(shape[0], dtype=torch.float64), torch.zeros(shape[0], dtype=torch.long)
    nothing = torch.zeros(shape, dtype=torch.bool)
    for mask, keep in ((nothing, None), (~nothing, nothing)):
        for advantages in every_baseline(rewards, mask, group, keep):
            assert torch.equal(advantages, torch.zeros(shape, dtype=torch.float64))
    zeros = torch.zeros(shape, dtype=torch.float64)
    assert torch.equal(generalised_advantages(zeros + 1, zeros + 2, nothing), zeros)


def test_padding_never_matters_and_nothing_carries_gradient() -> None:
    rewards, energy = REWARDS.clone().requires_grad_(), ENERGY.clone()
    clean = optimal_token_baseline(rewards, MASK, GROUP, energy)
    assert not clean.requires_grad
    rewards = torch.where(MASK.bool(), REWARDS, torch.nan)
    energy = torch.where(MASK.bool(), ENERGY, torch.nan)
    close(optimal_token_baseline(rewards, MASK, GROUP, energy), clean)
    close(rloo_advantages(rewards, MASK, GROUP), EXPECTED["rloo"])
    logprob = torch.where(MASK.bool(), INPUTS["old_log_prob"], -torch.inf).requires_grad_()
    masked = token_energy(logprob, INPUTS["sum_pi_squared"] * torch.where(MASK.bool(), 1.0, torch.nan), MASK)
    assert torch.equal(masked, ENERGY)
    assert not masked.requires_grad


def test_group_numbers_and_row_order_are_irrelevant() -> None:
    order = torch.tensor([5, 2, 0, 4, 1, 3])
    shuffled = every_baseline(REWARDS[order], MASK[order], 100 - 7 * GROUP[order], energy=ENERGY[order])
    for actual, wanted in zip(shuffled, every_baseline(REWARDS, MASK, GROUP, energy=ENERGY), strict=True):
        close(actual, wanted[order])


def test_rloo_is_n_over_n_minus_1_times_the_group_mean() -> None:
    rewards, mask, group = normal(12), torch.ones(12, 1), torch.arange(12) % 3
    close(rloo_advantages(rewards, mask, group), 4 / 3 * group_mean_advantages(rewards, mask, group))


# ----- generalised advantage estimation -----------------------------------------------------------------------------


@pytest.mark.parametrize(("discount", "trace"), [(1.0, 0.95), (0.9, 0.5), (0.99, 0.0), (1.0, 1.0), (0.0, 0.7)])
def test_gae_equals_the_backward_recursion_over_own_tokens(discount: float, trace: float) -> None:
    rewards, values, final = normal(4, 11, seed=1), normal(4, 11, seed=2), normal(4, seed=3)
    mask = normal(4, 11, seed=4) > -0.3
    mask[3] = False
    wanted = torch.zeros(4, 11, dtype=torch.float64)
    for row in range(4):
        following, carried = final[row], torch.zeros((), dtype=torch.float64)
        for time in reversed(range(11)):
            if mask[row, time]:
                delta = rewards[row, time] + discount * following - values[row, time]
                carried = delta + discount * trace * carried
                wanted[row, time], following = carried, values[row, time]
    holed = values.masked_fill(~mask, torch.nan)
    actual = generalised_advantages(rewards, holed, mask, discount=discount, trace=trace, final_value=final)
    close(actual, wanted)
    if trace == discount == 1.0:
        close(actual, torch.where(mask, reward_to_go(rewards, mask) + final.unsqueeze(1) - values, 0.0))


def test_gae_without_a_final_value_ends_at_zero() -> None:
    ones, zeros = torch.ones(1, 3, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    given = generalised_advantages(ones, ones, ones, final_value=zeros)
    assert torch.equal(generalised_advantages(ones, ones, ones), given)
    assert given[0, -1] == 0


# ----- refusals -----------------------------------------------------------------------------------------------------


def test_what_is_refused(without_shape_checks: None) -> None:
    with pytest.raises(ParameterError, match=r"rewards of rloo_advantages must be finite; got nan at index \(1,\)"):
        rloo_advantages(torch.tensor([1.0, torch.nan]), torch.ones(2, 1), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ParameterError, match="group of rloo_advantages must be integers"):
        rloo_advantages(torch.ones(2), torch.ones(2, 1), torch.zeros(2))
    with pytest.raises(ParameterError, match="group of weighted_advantages must have shape"):
        opo_advantages(torch.ones(2), torch.ones(2, 1), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ParameterError, match="eps of group_mean_advantages must be a finite number > 0; got 0"):
        group_mean_advantages(torch.ones(2), torch.ones(2, 1), torch.zeros(2, dtype=torch.long), eps=0)
    with pytest.raises(ParameterError, match="energy of weighted_advantages must be at least 0; got -1"):
        weighted_advantages(torch.ones(2), torch.ones(2, 1), torch.zeros(2, dtype=torch.long), -torch.ones(2))
    with pytest.raises(ParameterError, match="trace of generalised_advantages must be"):
        generalised_advantages(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), trace=1.5)
