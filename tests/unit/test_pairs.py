"""Which responses are shown: every rule against its definition, ragged sets, ties, and what is refused."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import expit
from scipy.stats import chisquare, norm

from ensemblepp.errors import ParameterError
from ensemblepp.heads import IndexedOutput
from ensemblepp.pairs import PAIRS, SINGLES, Candidates, probability_variance, select_pair, select_response
from ensemblepp.seeding import make_generator

R, N, M = 3, 5, 4


def output(seed=0, sets=R, count=N):
    generator = make_generator(seed, "scores")
    kind = {"generator": generator, "dtype": torch.float64}
    return IndexedOutput(torch.randn(sets, count, **kind), torch.randn(sets, count, M, **kind))


def all_pairs(values, mask):
    """Return the best [i, j] of every set by a plain loop."""
    best = []
    for r in range(len(values)):
        ranked = [
            (float(values[r, i, j]), i, j)
            for i in range(values.shape[1])
            for j in range(values.shape[1])
            if i != j and mask[r, i] and mask[r, j]
        ]
        best.append(max(ranked)[1:])
    return best


def loop_variance(scores):
    members = scores.members
    return torch.stack(
        [torch.stack([(members[:, i] - members[:, j]).square().sum(-1) for j in range(N)], -1) for i in range(N)], 1
    )


MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 1, 0, 0, 1]], dtype=torch.bool)


def pair(name, scores, mask=None, seed=1, scale=1.0):
    return select_pair(name, scores, mask, generator=make_generator(seed, "act"), scale=scale)


def test_greedy_and_ucb_take_the_two_best():
    scores = output()
    top = torch.where(MASK, scores.mean, -math.inf).topk(2).indices
    first, second = pair("greedy", scores, MASK)
    assert torch.equal(torch.stack([first, second], -1), top)
    bound = scores.mean + 0.7 * scores.members.square().sum(-1).sqrt()
    top = torch.where(MASK, bound, -math.inf).topk(2).indices
    first, second = pair("ucb", scores, MASK, scale=0.7)
    assert torch.equal(torch.stack([first, second], -1), top)


def test_best_arm_asks_about_the_most_uncertain_rival():
    scores = output()
    first, second = pair("best_arm", scores, MASK)
    variance = loop_variance(scores)
    for r in range(R):
        best = int(torch.where(MASK[r], scores.mean[r], -math.inf).argmax())
        rivals = [j for j in range(N) if MASK[r, j] and j != best]
        assert int(first[r]) == best
        assert int(second[r]) == max(rivals, key=lambda j: float(variance[r, best, j]))


@pytest.mark.parametrize("name", ["infomax", "information_gain", "delta_ucb"])
def test_rules_over_all_pairs_equal_a_loop(name):
    scores = output()
    gap = scores.mean.unsqueeze(-1) - scores.mean.unsqueeze(-2)
    variance = loop_variance(scores)
    chance = torch.sigmoid(gap)
    value = {
        "infomax": probability_variance(gap, variance),
        "information_gain": variance * chance * (1 - chance),
        "delta_ucb": gap + 0.5 * variance.sqrt(),
    }[name]
    found = pair(name, scores, MASK, scale=0.5)
    for r, (i, j) in enumerate(all_pairs(value, MASK)):
        expected = (i, j) if name == "delta_ucb" else {i, j}
        got = (int(found[0][r]), int(found[1][r]))
        assert (got if name == "delta_ucb" else set(got)) == expected


@pytest.mark.parametrize("mean", [0.0, 0.7, -3.0])
@pytest.mark.parametrize("variance", [0.0, 0.04, 1.0, 6.0])
def test_variance_of_a_probability_by_integration(mean, variance):
    got = float(probability_variance(torch.tensor([mean]).double(), torch.tensor([variance]).double()))
    if variance == 0.0:
        assert got == pytest.approx(0.0, abs=1e-12)
        return
    deviation = math.sqrt(variance)
    moments = [
        quad(lambda g, k=k: expit(g) ** k * norm.pdf(g, mean, deviation), mean - 9 * deviation, mean + 9 * deviation)[0]
        for k in (1, 2)
    ]
    assert got == pytest.approx(moments[1] - moments[0] ** 2, rel=2e-3, abs=1e-5)


def test_double_thompson_never_repeats_and_falls_back_to_the_runner_up():
    certain = IndexedOutput(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.zeros(1, 4, M))
    first, second = pair("double_thompson", certain)
    assert (int(first), int(second)) == (0, 2)


@pytest.mark.statistical
def test_double_thompson_follows_two_independent_draws():
    n = 20_000
    scores = output(sets=1)
    many = IndexedOutput(scores.mean.expand(n, -1), scores.members.expand(n, -1, -1))
    first, second = pair("double_thompson", many)
    draws = torch.randn(2 * n, M, generator=make_generator(7, "check"), dtype=torch.float64)
    drawn = scores.sample(draws.unsqueeze(0))[0]
    best = drawn.argmax(-1)
    share = torch.bincount(best, minlength=N).double() / len(best)
    top = drawn.topk(2).indices
    joint = torch.zeros(N, N, dtype=torch.float64)
    for i in range(N):  # P(first = i, second = j): the second draw's best, or its runner-up where its best is i
        runner = torch.bincount(top[top[:, 0] == i, 1], minlength=N).double() / len(best)
        joint[i] = share[i] * (share + runner)
        joint[i, i] = 0
    counts = torch.zeros(N, N, dtype=torch.float64).index_put_((first, second), torch.tensor(1.0).double(), True)
    seen = joint > 1e-3
    expected = joint[seen] / joint[seen].sum() * counts[seen].sum()
    # The expected shares are estimates themselves: their own noise doubles the variance.
    assert chisquare(counts[seen].numpy(), expected.numpy()).statistic / 2 < 40


@pytest.mark.parametrize("name", PAIRS)
def test_every_rule_shows_two_different_real_responses(name):
    for seed in range(20):
        scores = output(seed)
        first, second = pair(name, scores, MASK, seed=seed)
        assert bool((first != second).all())
        assert bool(MASK.gather(1, first.unsqueeze(-1)).all())
        assert bool(MASK.gather(1, second.unsqueeze(-1)).all())


@pytest.mark.parametrize("name", PAIRS)
def test_padding_may_hold_anything_finite_and_two_responses_are_enough(name):
    scores = output()
    wild = IndexedOutput(torch.where(MASK, scores.mean, 1e6), torch.where(MASK.unsqueeze(-1), scores.members, -1e6))
    for got, want in zip(pair(name, wild, MASK), pair(name, scores, MASK), strict=True):
        assert torch.equal(got, want)
    assert {int(pair(name, scores, MASK)[0][2]), int(pair(name, scores, MASK)[1][2])} == {1, 4}


@pytest.mark.parametrize("name", PAIRS)
def test_identical_responses_are_a_valid_pair(name):
    same = IndexedOutput(torch.zeros(R, N), torch.ones(R, N, M))
    first, second = pair(name, same)
    assert bool((first != second).all())


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["greedy", "ucb", "uniform", "infomax", "delta_ucb", "information_gain"])
def test_ties_are_broken_uniformly(name):
    n = 12_000
    same = IndexedOutput(torch.zeros(n, 3), torch.zeros(n, 3, 2))
    first, second = pair(name, same)
    counts = torch.bincount(3 * first + second, minlength=9)
    assert chisquare(counts[[1, 2, 3, 5, 6, 7]].numpy()).pvalue > 1e-4


def test_passive_keeps_the_order_of_arrival():
    first, second = pair("passive", output(), MASK)
    assert first.tolist() == [0, 0, 1]
    assert second.tolist() == [1, 2, 4]


@pytest.mark.parametrize("name", SINGLES)
def test_one_response_is_a_choice_and_no_pair(name):
    alone = output(count=1)
    assert select_response(name, alone, generator=make_generator(0, "act")).tolist() == [0] * R
    with pytest.raises(ParameterError, match="responses of the choice of responses must be at least 2"):
        pair(name, alone)
    mask = MASK.clone()
    mask[2, 4] = False
    with pytest.raises(ParameterError, match=r"at least 2 in every set; got 1 at index \(2,\)"):
        pair(name, output(), mask)


def test_a_single_choice_is_the_best_of_its_rule():
    scores = output()
    for name in ("greedy", "best_arm"):
        chosen = select_response(name, scores, generator=make_generator(0, "act"))
        assert torch.equal(chosen, scores.mean.argmax(-1))
    index = torch.randn(R, M, generator=make_generator(5, "act"), dtype=torch.float64)
    chosen = select_response("thompson", scores, generator=make_generator(5, "act"))
    assert torch.equal(chosen, scores.sample(index).argmax(-1))


def test_what_is_refused():
    scores, generator = output(), make_generator(0, "act")
    with pytest.raises(ParameterError, match=r"acquisition of the choice of responses must be one of .*; got .best."):
        select_pair("best", scores, generator=generator)
    with pytest.raises(ParameterError, match=r"must be one of .*; got .infomax."):
        select_response("infomax", scores, generator=generator)
    with pytest.raises(ParameterError, match="mask of the choice of responses must have shape"):
        select_pair("greedy", scores, MASK[:, :3], generator=generator)
    with pytest.raises(ParameterError, match="scale of the choice of responses must be a finite number >= 0; got -1"):
        select_pair("ucb", scores, generator=generator, scale=-1.0)
    with pytest.raises(ParameterError, match="must be at least 1 in every set"):
        select_response("greedy", scores, torch.zeros(R, N, dtype=torch.bool), generator=generator)


def test_gap_variance_is_that_of_sampled_differences():
    scores = output(sets=1)
    candidates = Candidates(scores, torch.ones(1, N, dtype=torch.bool), 1.0, make_generator(0, "act"))
    torch.testing.assert_close(candidates.gap_variance(), loop_variance(scores))
    assert np.allclose(candidates.gap(), -candidates.gap().mT)
