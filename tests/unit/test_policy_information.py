"""Bits of learning signals, enumerated over small sets of reward parameters."""

import itertools
import math

import pytest
import torch

from ensemblepp.errors import ParameterError
from ensemblepp.policy.information import (
    binary_entropy,
    conditional_information,
    discounted_returns,
    entropy,
    episode_bound,
    group_information_bound,
    mutual_information,
    noisy_information,
    quantise,
    rewards_from_returns,
    signal_information,
    td_errors,
)
from tests.policy_toy import make_generator

EXACT = {"rtol": 0.0, "atol": 1e-10}
# The unknown parameter is the reward of each of three tokens, all eight being equally likely.
BITS = torch.tensor(list(itertools.product([0.0, 1.0], repeat=3)), dtype=torch.float64)
PRIOR = torch.full((8,), 1 / 8, dtype=torch.float64)


def test_entropies_by_hand() -> None:
    assert entropy(torch.tensor([0.5, 0.25, 0.25, 0.0])).item() == pytest.approx(1.5)
    assert binary_entropy(torch.tensor([0.0, 0.5, 1.0])).tolist() == [0.0, 1.0, 0.0]
    p = torch.tensor(0.1, dtype=torch.float64)
    assert binary_entropy(p).item() == pytest.approx(-0.1 * math.log2(0.1) - 0.9 * math.log2(0.9))
    assert mutual_information(torch.full((2, 2), 0.25)).item() == pytest.approx(0.0, abs=1e-6)
    assert mutual_information(torch.eye(4) / 4).item() == pytest.approx(2.0)


def test_three_fair_bits() -> None:
    assert signal_information(BITS, PRIOR).item() == pytest.approx(3.0)
    assert signal_information(BITS.sum(1, keepdim=True), PRIOR).item() == pytest.approx(1.811, abs=5e-4)
    both = BITS.prod(1, keepdim=True)
    eighth = torch.tensor(1 / 8, dtype=torch.float64)
    torch.testing.assert_close(signal_information(both, PRIOR), binary_entropy(eighth), **EXACT)


def test_scalar_advantages_carry_at_most_their_levels_and_token_advantages_the_entropy_of_rewards() -> None:
    generator = make_generator()
    prior = torch.rand(8, generator=generator, dtype=torch.float64)
    prior = prior / prior.sum()
    for levels in (2, 3, 4):
        signal = BITS @ torch.rand(3, 1, generator=generator, dtype=torch.float64)
        scalar = quantise(signal, levels, low=0.0, high=float(signal.max()))
        bits = signal_information(scalar, prior)
        assert 0 < bits <= episode_bound(levels, "scalar") + 1e-12
    torch.testing.assert_close(signal_information(BITS, prior), entropy(prior), **EXACT)
    assert signal_information(BITS, prior) <= episode_bound(2, "dense", horizon=3)


def test_a_generic_discount_hides_everything_in_one_number_until_it_is_quantised() -> None:
    returns = discounted_returns(BITS, 0.9371)[:, :1]
    assert signal_information(returns, PRIOR).item() == pytest.approx(3.0)
    assert signal_information(discounted_returns(BITS)[:, :1], PRIOR).item() == pytest.approx(1.811, abs=5e-4)
    assert signal_information(quantise(returns, 4, low=0.0, high=3.0), PRIOR) <= 2.0


def test_returns_and_errors_are_rewards_in_other_coordinates() -> None:
    rewards, values = torch.randn(2, 5, 6, generator=make_generator(), dtype=torch.float64)
    for discount in (0.0, 0.9, 1.0):
        returns = discounted_returns(rewards, discount)
        expected = torch.zeros_like(rewards)
        for t in reversed(range(6)):
            expected[:, t] = rewards[:, t] + (discount * expected[:, t + 1] if t < 5 else 0)
        torch.testing.assert_close(returns, expected, **EXACT)
        torch.testing.assert_close(rewards_from_returns(returns, discount), rewards, **EXACT)
        following = torch.cat([values[:, 1:], torch.zeros(5, 1, dtype=torch.float64)], 1)
        torch.testing.assert_close(
            td_errors(rewards, values, discount), rewards + discount * following - values, **EXACT
        )
    # So their information is that of the rewards.
    known = torch.randn(3, generator=make_generator(), dtype=torch.float64).expand(8, 3)
    for signal in (discounted_returns(BITS, 0.5), td_errors(BITS, known, 0.5).round(decimals=12)):
        assert signal_information(signal, PRIOR).item() == pytest.approx(3.0)
    assert discounted_returns(rewards[:, :0]).shape == (5, 0)


def test_terminal_rewards_do_not_gain_from_being_spread_over_tokens() -> None:
    terminal = torch.zeros(8, 3, dtype=torch.float64)
    terminal[:, 2] = BITS.sum(1)
    for signal in (terminal, discounted_returns(terminal, 0.5)):
        assert signal_information(signal, PRIOR).item() == pytest.approx(1.811, abs=5e-4)
        assert signal_information(signal, PRIOR) <= episode_bound(4, "terminal", horizon=3)


def test_information_on_the_best_policy_is_at_most_that_on_the_parameter() -> None:
    best = (BITS[:, 0] > 0).long()  # only the first token's reward matters
    vector, total = (
        signal_information(BITS, PRIOR, best=best),
        signal_information(BITS.sum(1, keepdim=True), PRIOR, best=best),
    )
    assert vector.item() == pytest.approx(1.0)
    # H(sum) - H(sum | first bit) = 1.8113 - 1.5
    assert total.item() == pytest.approx(1.811 - 1.5, abs=5e-4)
    assert signal_information(BITS[:, 1:], PRIOR, best=best).item() == pytest.approx(0.0, abs=1e-12)


def test_own_samples_tell_nothing_given_the_history_but_correlate_across_histories() -> None:
    # Two histories, each with its own policy; the history has already learned about xi.
    history = torch.tensor([0.5, 0.5], dtype=torch.float64)
    belief = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=torch.float64)
    policy = torch.tensor([[0.7, 0.3], [0.1, 0.9]], dtype=torch.float64)
    joint = torch.einsum("h,hr,hx->hrx", history, policy, belief)
    assert conditional_information(joint).item() == pytest.approx(0.0, abs=1e-12)
    assert mutual_information(joint.sum(0)).item() > 0.05
    never = torch.cat([joint, torch.zeros(1, 2, 2, dtype=torch.float64)])
    assert conditional_information(never).item() == conditional_information(joint).item()


def test_noisy_rewards_carry_less() -> None:
    likelihood = torch.tensor([[0.9, 0.1], [0.3, 0.7]], dtype=torch.float64)
    prior = torch.tensor([0.4, 0.6], dtype=torch.float64)
    joint = prior.unsqueeze(1) * likelihood
    torch.testing.assert_close(noisy_information(likelihood, prior), mutual_information(joint), **EXACT)
    assert noisy_information(likelihood, prior) < binary_entropy(prior @ likelihood[:, 0])
    certain = torch.eye(2, dtype=torch.float64)
    torch.testing.assert_close(noisy_information(certain, prior), entropy(prior), **EXACT)


def test_groups_add_up_to_at_most_one_bit_each() -> None:
    p = torch.tensor([[0.5, 0.5, 0.5], [0.999, 0.001, 1.0]], dtype=torch.float64)
    bits = group_information_bound(p)
    assert bits[0].item() == pytest.approx(3.0)
    assert bits[1].item() < 0.03
    # Two rollouts that pass together tell less than the bound.
    joint = torch.eye(2, dtype=torch.float64) / 2
    assert entropy(joint.flatten()) < group_information_bound(torch.tensor([0.5, 0.5], dtype=torch.float64))


def test_published_bits() -> None:
    bits = [episode_bound(levels, "scalar") for levels in (2, 5, 256)]
    assert bits == pytest.approx([1.0, 2.3, 8.0], abs=0.03)
    dense = episode_bound(3, "dense", horizon=1000)
    assert dense == pytest.approx(1585, abs=0.1)
    assert episode_bound(2001, "scalar") == pytest.approx(11, abs=0.04)
    assert dense / episode_bound(256, "scalar") == pytest.approx(198, abs=1)


def test_quantiser_snaps_to_equal_steps() -> None:
    values = torch.tensor([-9.0, 0.1, 0.3, 0.8, 9.0])
    assert quantise(values, 3, low=0.0, high=1.0).tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert len(quantise(torch.linspace(-2, 2, 1001), 7, low=-1.0, high=1.0).unique()) == 7


def test_bad_options_are_named(without_shape_checks: None) -> None:
    with pytest.raises(ParameterError, match="levels of quantise must be an int >= 2"):
        quantise(BITS, 1, low=0.0, high=1.0)
    with pytest.raises(ParameterError, match="high of quantise must be a finite number > 1"):
        quantise(BITS, 2, low=1.0, high=1.0)
    with pytest.raises(ParameterError, match="prior of signal_information must have shape"):
        signal_information(BITS, PRIOR[:3])
    with pytest.raises(ParameterError, match="best of signal_information must have shape"):
        signal_information(BITS, PRIOR, best=torch.zeros(3, dtype=torch.long))
    with pytest.raises(ParameterError, match="signal of episode_bound must be one of 'dense', 'scalar', 'terminal'"):
        episode_bound(2, "sparse")
    with pytest.raises(ParameterError, match="discount of discounted_returns must be"):
        discounted_returns(BITS, 1.5)
    with pytest.raises(ParameterError, match="values of td_errors must have shape"):
        td_errors(BITS, BITS[:2])
