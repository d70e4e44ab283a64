"""Gains, surrogate errors and their bounds against enumeration on random trees."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemblepp.errors import ParameterError
from ensemblepp.policy.bounds import (
    baseline_tangent,
    context_shift_bounds,
    expectation_gap_bound,
    gain_decomposition,
    gradient_bias_bound,
    surrogate_error_bounds,
    surrogate_errors,
    tv_from_chi2,
    tv_from_kl,
)
from ensemblepp.policy.ratios import k3, log_ratios
from tests.policy_toy import Tree, make_generator, make_trees

EXACT = {"rtol": 0.0, "atol": 1e-10}
TREES = make_trees()
SLACK = 1e-13


class Problem:
    """A tree with two random policies and rewards, and all that the bounds speak of."""

    def __init__(self, tree: Tree, seed: int, spread: float = 1.0) -> None:
        generator = make_generator(seed)
        self.tree, self.sampler = tree, tree.random_logits(generator)
        self.trainer = self.sampler + spread * tree.random_logits(generator)
        self.rewards = tree.random_rewards(generator)
        self.q, self.p = tree.probs(self.sampler), tree.probs(self.trainer)
        self.d = log_ratios(tree.logprobs(self.trainer), tree.logprobs(self.sampler), tree.mask)
        self.gain = (self.p - self.q) @ self.rewards
        self.kl = tree.sequence_kl(self.sampler, self.trainer)
        self.surrogate = self.q @ (self.rewards * torch.expm1(self.d).sum(1))
        tv = tree.token_tv(self.sampler, self.trainer)
        self.known = {
            "kl_max": tree.token_kl(self.sampler, self.trainer).max(),
            "tv_max": tv.max(),
            "kl_sequence": self.kl,
            "tv_sequence": tree.sequence_tv(self.sampler, self.trainer),
            "mean_tv": self.q @ tv,
        }


PROBLEMS = [Problem(tree, seed, spread) for tree in TREES for seed in range(25) for spread in (0.1, 1.0, 3.0)]


def test_surrogate_error_is_exact_and_in_both_forms() -> None:
    for x in PROBLEMS:
        errors = surrogate_errors(x.d, x.tree.mask)
        torch.testing.assert_close(x.q @ (x.rewards * errors), x.gain - x.surrogate, **EXACT)
        rho = x.d.exp()
        rest = rho.flip(1).cumprod(1).flip(1) / rho
        torch.testing.assert_close(errors, ((rho - 1) * (rest - 1)).sum(1), rtol=1e-10, atol=1e-10)
        assert abs(x.q @ errors) < 1e-12
        assert (errors.clamp(min=0) <= k3(x.d.sum(1)) + SLACK).all()


def test_every_bound_holds_on_random_trees_and_the_unified_one_proves_improvement() -> None:
    improved = 0
    for x in PROBLEMS:
        error = (x.gain - x.surrogate).abs()
        bounds = surrogate_error_bounds(x.tree.horizon, **x.known)
        assert all(bound >= error - SLACK for bound in bounds.values()), bounds
        # Partial knowledge gives looser bounds.
        partly = surrogate_error_bounds(x.tree.horizon, kl_max=x.known["kl_max"], kl_sequence=x.kl)
        assert all(partly[name] >= bounds[name] - SLACK for name in bounds)
        if x.surrogate > bounds["unified"]:
            improved += 1
            assert x.gain > 0
    assert improved > 20


def test_rewards_in_another_interval_scale_the_bounds() -> None:
    for x in PROBLEMS[::7]:
        rewards = 5 * x.rewards - 2
        error = (x.p - x.q) @ rewards - x.q @ (rewards * torch.expm1(x.d).sum(1))
        bounds = surrogate_error_bounds(x.tree.horizon, **x.known, reward_range=5.0)
        assert bounds["unified"] >= error.abs() - SLACK
        assert bounds["coupling"] == 5 * surrogate_error_bounds(x.tree.horizon, **x.known)["coupling"]


def test_sequence_kl_is_below_the_mixed_and_marginal_bounds_while_caps_are_off() -> None:
    for x in PROBLEMS:
        bounds = surrogate_error_bounds(x.tree.horizon, **x.known)
        delta = x.known["kl_max"]
        if delta <= 4 and x.kl <= 2 and delta <= 2:
            assert bounds["sequence_kl"] <= bounds["mixed_kl"] + SLACK
        if x.tree.horizon >= 2 and delta * x.tree.horizon <= 2:
            assert bounds["sequence_kl"] <= bounds["pinsker_marginal_kl"] + SLACK


def test_published_table() -> None:
    known = {"kl_max": 1e-4, "kl_sequence": 0.01, "tv_sequence": 0.05}
    by_kl, by_tv = surrogate_error_bounds(4096, **known), surrogate_error_bounds(4096, **known, tv_max=5e-3)
    expected = [
        (by_kl["classical"], 1677, 1),
        (by_tv["classical"], 839, 1),
        (by_kl["coupling"], 113.8, 0.1),
        (by_tv["coupling"], 79.9, 0.1),
        (by_kl["pinsker_marginal_kl"], 35.0, 0.06),
        (by_tv["pinsker_marginal_tv"], 24.7, 0.05),
        (by_kl["mixed_kl"], 8.2, 0.05),
        (by_tv["mixed_tv"], 4.1, 0.05),
        (by_tv["sequence_kl"], 0.01, 1e-12),
        (by_tv["unified"], 0.01, 1e-12),
    ]
    for bound, value, tolerance in expected:
        assert bound.item() == pytest.approx(value, abs=tolerance)
    assert by_kl["classical"] / by_tv["mixed_tv"] == pytest.approx(409, abs=1)


def test_adaptive_bound_recovers_its_special_cases() -> None:
    horizon, delta, eps = 50, 1e-3, 0.01
    pinsker = tv_from_kl(delta)
    marginal = surrogate_error_bounds(horizon, kl_max=delta, tv_max=1.0, mean_tv=pinsker.expand(horizon))
    torch.testing.assert_close(marginal["adaptive"], marginal["pinsker_marginal_kl"], **EXACT)
    coupled = surrogate_error_bounds(horizon, tv_max=eps, mean_tv=torch.full((horizon,), eps, dtype=torch.float64))
    torch.testing.assert_close(coupled["adaptive"], coupled["coupling"], **EXACT)
    # The two futures cross where T - t = delta / (2 eps^2) = 5.
    steps = torch.arange(1, horizon + 1, dtype=torch.float64)
    assert int(((steps * eps) <= (steps * delta / 2).sqrt() + 1e-15).sum()) == 5


def test_adaptive_bound_counts_what_follows_a_token() -> None:
    # A divergence at the last token only cannot change any later context.
    mean_tv = torch.tensor([0.0, 0.0, 0.5], dtype=torch.float64)
    assert surrogate_error_bounds(3, kl_max=0.5, mean_tv=mean_tv)["adaptive"].item() == 0.0
    assert surrogate_error_bounds(3, kl_max=0.5, mean_tv=mean_tv.flip(0))["adaptive"].item() > 0.5


def test_asymptotic_forms() -> None:
    horizon, delta, eps, whole = 10_000, 1e-6, 5e-4, 1e-4
    bounds = surrogate_error_bounds(horizon, kl_max=delta, tv_max=eps, kl_sequence=whole)
    assert bounds["pinsker_marginal_kl"].item() == pytest.approx(4 / 3 * horizon**1.5 * delta, rel=1e-3)
    marginal = 8 / 3 * horizon**1.5 * eps * math.sqrt(delta / 2)
    assert bounds["pinsker_marginal_tv"].item() == pytest.approx(marginal, rel=1e-3)
    assert bounds["mixed_kl"].item() == pytest.approx(2 * horizon * math.sqrt(delta * whole))
    # At a fixed sequence KL the remainder bound is flat in T, the marginal one grows.
    short, long = (surrogate_error_bounds(t, kl_max=whole / t, kl_sequence=whole) for t in (100, 10_000))
    assert short["sequence_kl"] == long["sequence_kl"]
    assert long["pinsker_marginal_kl"] / short["pinsker_marginal_kl"] == pytest.approx(10.0, rel=0.02)
    fixed = [surrogate_error_bounds(t, kl_max=delta)["pinsker_marginal_kl"].item() for t in (100, 10_000)]
    assert fixed[1] / fixed[0] == pytest.approx(1000, rel=0.02)


def test_unknown_divergences_and_one_token() -> None:
    nothing = surrogate_error_bounds(4)
    assert nothing["sequence_kl"].item() == math.inf
    assert torch.isfinite(nothing["unified"])
    one = surrogate_error_bounds(1, kl_max=0.3, kl_sequence=0.3)
    assert one["unified"].item() == one["classical"].item() == one["coupling"].item() == 0.0


def test_contexts_shift_no_faster_than_the_simulation_lemma() -> None:
    for x in PROBLEMS:
        tree = x.tree
        bounds = context_shift_bounds(tree.horizon, **{k: v for k, v in x.known.items() if k != "mean_tv"})
        linear = context_shift_bounds(tree.horizon, tv_max=x.known["tv_max"])
        for t in range(tree.horizon):
            # The context before token t, an ended response being a context of its own.
            contexts = torch.cat([tree.tokens[:, :t], tree.mask[:, : t + 1].long()], 1)
            _, label = contexts.unique(dim=0, return_inverse=True)
            mass = torch.zeros(len(label), dtype=torch.float64).index_add(0, label, x.p - x.q)
            assert mass.abs().sum() / 2 <= bounds[t] + SLACK
            assert bounds[t] <= linear[t]
        assert linear[0] == 0


def test_total_variation_of_sequences_is_at_most_the_sum_over_tokens() -> None:
    for x in PROBLEMS:
        assert x.known["tv_sequence"] <= x.known["mean_tv"].sum() + SLACK


def test_ignoring_the_mismatch_biases_the_gradient_no_more_than_its_bound() -> None:
    for x in PROBLEMS:
        tree, scores = x.tree, x.tree.token_scores(x.trainer)
        bias = (x.q * x.rewards) @ scores.sum(1) - tree.gradient(x.trainer, x.rewards).flatten()
        bound = gradient_bias_bound(scores.norm(dim=-1).max(), x.known["tv_max"], tree.horizon)
        assert bias.norm() <= bound + SLACK


@settings(max_examples=50)
@given(seed=st.integers(0, 10_000), size=st.integers(2, 8), spread=st.floats(0.01, 4.0))
def test_divergence_inequalities_on_random_distributions(seed: int, size: int, spread: float) -> None:
    generator = make_generator(seed)
    first, second, f = torch.randn(3, size, generator=generator, dtype=torch.float64)
    q, p = first.softmax(0), (first + spread * second).softmax(0)
    tv, chi2, kl = (p - q).abs().sum() / 2, (p.square() / q).sum() - 1, (q * (q / p).log()).sum()
    assert (p @ f - q @ f).abs() <= expectation_gap_bound(f.abs().max(), tv) + SLACK
    assert tv <= tv_from_chi2(chi2, sharp=True) + SLACK
    assert tv_from_chi2(chi2, sharp=True) <= tv_from_chi2(chi2)
    assert tv <= tv_from_kl(kl) + SLACK
    assert chi2 == pytest.approx(float(q @ (p / q).square()) - 1)


def test_small_total_variation_goes_with_a_huge_chi2() -> None:
    # One event of q-probability 1e-9 that p gives 1e-3: chi2 is about 1e-6 / 1e-9.
    q, p = torch.tensor([[1e-9, 1 - 1e-9], [1e-3, 1 - 1e-3]], dtype=torch.float64)
    assert ((p - q).abs().sum() / 2).item() == pytest.approx(1e-3, rel=1e-5)
    assert ((p.square() / q).sum() - 1).item() == pytest.approx(1e3, rel=1e-2)


def test_gain_is_tangent_plus_remainder_and_the_remainder_is_bounded() -> None:
    worst = 0.0
    for x in PROBLEMS:
        parts = gain_decomposition(x.rewards, x.d, x.tree.mask, weights=x.q)
        torch.testing.assert_close(parts.gain, x.gain, **EXACT)
        torch.testing.assert_close(parts.gain, parts.tangent + parts.remainder, **EXACT)
        torch.testing.assert_close(parts.bound, (x.rewards.max() - x.rewards.min()) * x.kl, **EXACT)
        assert parts.remainder.abs() <= parts.bound + SLACK
        signed = gain_decomposition(2 * x.rewards - 1, x.d, x.tree.mask, weights=x.q)
        assert signed.remainder.abs() <= signed.bound + SLACK
        worst = max(worst, float(parts.remainder.abs() / parts.bound))
    assert 0.3 < worst < 1.0


def test_gain_from_samples_divides_by_one_less() -> None:
    x = PROBLEMS[5]
    draws = torch.multinomial(x.q, 7, replacement=True, generator=make_generator(3))
    parts = gain_decomposition(x.rewards[draws], x.d[draws], x.tree.mask[draws])
    stacked = torch.stack([x.rewards[draws], x.d[draws].sum(1)])
    torch.testing.assert_close(parts.tangent, torch.cov(stacked)[0, 1], **EXACT)
    torch.testing.assert_close(parts.gain, parts.tangent + parts.remainder, **EXACT)


@pytest.mark.parametrize("size", [0, 1])
def test_gain_without_comparison_is_zero(size: int) -> None:
    d = torch.full((size, 2), 0.3, requires_grad=True)
    parts = gain_decomposition(torch.ones(size), d, torch.ones(size, 2))
    sum(parts).backward()
    assert [part.item() for part in parts] == [0.0] * 4
    assert torch.isfinite(d.grad).all()


@pytest.mark.parametrize("tree", TREES)
def test_tangent_and_gain_share_their_gradient_where_the_policies_are_equal(tree: Tree) -> None:
    x = Problem(tree, 1)
    leaf = x.sampler.clone().requires_grad_()
    d = log_ratios(tree.logprobs(leaf), tree.logprobs(x.sampler), tree.mask)
    parts = gain_decomposition(x.rewards, d, tree.mask, weights=x.q)
    true = tree.gradient(x.sampler, x.rewards)
    for part in (parts.tangent, parts.gain):
        torch.testing.assert_close(torch.autograd.grad(part, leaf, retain_graph=True)[0], true, **EXACT)
    # The remainder is of second order in the step.
    direction = tree.random_logits(make_generator(9))
    shares = []
    for step in (1e-2, 1e-3, 1e-4):
        moved = log_ratios(tree.logprobs(x.sampler + step * direction), tree.logprobs(x.sampler), tree.mask)
        shares.append(float(gain_decomposition(x.rewards, moved, tree.mask, weights=x.q).remainder.abs()) / step)
    assert shares[1] == pytest.approx(shares[0] / 10, rel=0.1)
    assert shares[2] == pytest.approx(shares[1] / 10, rel=0.1)


def test_the_remainder_keeps_its_bound_where_the_sampler_never_goes() -> None:
    """The trainer gives mass to the last response, of which the sampler has no sample and no log-ratio."""
    for seed in range(20):
        generator = make_generator(seed)
        rewards = torch.rand(6, generator=generator, dtype=torch.float64)
        q, p = (torch.randn(size, generator=generator, dtype=torch.float64).softmax(0) for size in (5, 6))
        d, mask = (p[:5] / q).log().unsqueeze(1), torch.ones(5, 1)
        seen = gain_decomposition(rewards[:5], d, mask, weights=q)
        gain = p @ rewards - q @ rewards[:5]
        bound = (rewards.max() - rewards.min()) * (q * (q / p[:5]).log()).sum()
        assert (gain - seen.tangent).abs() <= bound + SLACK
        assert (seen.gain - gain).abs() > 1e-4  # the sampled part alone misses what is off its support


def prefix_values(x: Problem) -> torch.Tensor:
    """V_t(c_t) = E_q[R | c_t] along each sequence."""
    tree = x.tree
    rows = torch.nn.functional.one_hot(tree.prefix, tree.num_prefixes).double() * tree.mask.unsqueeze(-1)
    visits = torch.einsum("s,stp->p", x.q, rows)
    values = torch.einsum("s,s,stp->p", x.q, x.rewards, rows) / visits
    return torch.where(tree.mask, values[tree.prefix], 0.0)


def test_any_prefix_baseline_gives_a_tangent_with_the_same_bound() -> None:
    for x in PROBLEMS[::5]:
        tree, divergence = x.tree, x.tree.token_kl(x.sampler, x.trainer)
        random = torch.rand(tree.num_prefixes, generator=make_generator(2), dtype=torch.float64)[tree.prefix]
        mean = (x.q @ x.rewards).expand_as(x.d)
        for baseline in (0 * x.d, mean, prefix_values(x), random):
            tangent = baseline_tangent(x.rewards, x.d, tree.mask, baseline, weights=x.q)
            remainder = x.q @ (x.rewards * k3(x.d.sum(1))) - x.q @ (baseline * divergence).sum(1)
            torch.testing.assert_close(x.gain - tangent, remainder, **EXACT)
            assert (x.gain - tangent).abs() <= x.kl + SLACK
            # A penalty of reward_range times the KL makes it a guarantee.
            assert x.gain >= tangent - x.kl - SLACK
        torch.testing.assert_close(
            baseline_tangent(x.rewards, x.d, tree.mask, mean, weights=x.q),
            gain_decomposition(x.rewards, x.d, tree.mask, weights=x.q).tangent,
            **EXACT,
        )
        assert x.gain >= baseline_tangent(x.rewards, x.d, tree.mask, 0 * x.d, weights=x.q) - SLACK


@pytest.mark.parametrize("tree", TREES)
def test_tangent_gradients_split_into_centred_scores_and_drift(tree: Tree) -> None:
    x = Problem(tree, 2)
    scores, shift = tree.token_scores(x.trainer), tree.mean_shift(x.sampler, x.trainer)
    centred, values, mean = scores - shift, prefix_values(x), x.q @ x.rewards

    def gradient(baseline: torch.Tensor) -> torch.Tensor:
        leaf = x.trainer.clone().requires_grad_()
        d = log_ratios(tree.logprobs(leaf), tree.logprobs(x.sampler), tree.mask)
        return torch.autograd.grad(baseline_tangent(x.rewards, d, tree.mask, baseline, weights=x.q), leaf)[0].flatten()

    centred_part = (x.q * x.rewards) @ centred.sum(1)
    drift = torch.einsum("s,st,stk->k", x.q, torch.where(tree.mask, values - mean, 0.0), shift)
    torch.testing.assert_close(gradient(mean.expand_as(x.d)), centred_part + drift, **EXACT)
    # The prefix value as baseline is score centering.
    torch.testing.assert_close(gradient(values), centred_part, **EXACT)
    # Subtracting beta KL adds beta to the reward of the uncentred gradient.
    leaf = x.trainer.clone().requires_grad_()
    penalty = torch.autograd.grad(tree.sequence_kl(x.sampler, leaf), leaf)[0].flatten()
    uncentred = (x.q * x.rewards) @ scores.sum(1)
    torch.testing.assert_close(uncentred - 0.7 * penalty, (x.q * (x.rewards + 0.7)) @ scores.sum(1), **EXACT)
    torch.testing.assert_close(penalty, -x.q @ scores.sum(1), **EXACT)


def test_masking_sequences_bounds_the_remainder_by_threshold_times_acceptance() -> None:
    for x in PROBLEMS:
        rho, excess = x.d.sum(1), k3(x.d.sum(1))
        threshold = float(excess.median())
        keep = x.q * x.rewards * (excess <= threshold)
        gap = keep @ torch.expm1(rho) - keep @ rho
        torch.testing.assert_close(gap, keep @ excess, **EXACT)
        assert gap <= threshold * x.q @ (excess <= threshold).double() + SLACK


def test_bad_input_is_named(without_shape_checks: None) -> None:
    d = torch.zeros(2, 3)
    with pytest.raises(ParameterError, match="horizon of surrogate_error_bounds must be an int >= 1; got 0"):
        surrogate_error_bounds(0)
    with pytest.raises(ParameterError, match="reward_range of surrogate_error_bounds must be"):
        surrogate_error_bounds(2, reward_range=-1.0)
    with pytest.raises(ParameterError, match="mean_tv of surrogate_error_bounds must have shape"):
        surrogate_error_bounds(2, mean_tv=torch.zeros(3))
    with pytest.raises(ParameterError, match="rewards of gain_decomposition must have shape"):
        gain_decomposition(torch.zeros(3), d, torch.ones(2, 3))
    with pytest.raises(ParameterError, match="baseline of baseline_tangent must have shape"):
        baseline_tangent(torch.zeros(2), d, torch.ones(2, 3), torch.zeros(2))
