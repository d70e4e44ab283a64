"""Truncation, masking, rejection and trust regions against enumeration on small trees and hand-made ratios."""

import math

import pytest
import torch

from ensemblepp.errors import ParameterError
from ensemblepp.policy.aggregation import aggregate
from ensemblepp.policy.masks import (
    REJECTIONS,
    geometric_mask,
    importance_weights,
    mask_ratio,
    rejection_mask,
    truncate,
)
from ensemblepp.policy.ratios import log_ratios, sequence_ratios, token_ratios
from ensemblepp.policy.trust_region import (
    length_neutral_mask,
    sampled_trust_region_mask,
    ser_mask,
    token_divergences,
    trust_region_mask,
)
from tests.policy_toy import Tree, make_generator, make_trees

EXACT = {"rtol": 0.0, "atol": 1e-10}
ONES = torch.ones(1, 3)


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor([ratios], dtype=torch.float64).log()


def problem(tree: Tree) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sampler's and trainer's logits, rewards, log-ratios)."""
    generator = make_generator()
    sampler, trainer = tree.random_logits(generator), tree.random_logits(generator)
    rewards = tree.random_rewards(generator)
    return sampler, trainer, rewards, log_ratios(tree.logprobs(trainer), tree.logprobs(sampler), tree.mask)


@pytest.mark.parametrize("tree", make_trees())
def test_masking_and_truncation_have_their_biases(tree: Tree) -> None:
    sampler, trainer, rewards, log_ratio = problem(tree)
    q, p, rho = tree.probs(sampler), tree.probs(trainer), sequence_ratios(log_ratio, tree.mask)
    f = rewards.unsqueeze(1) * tree.scores(trainer)
    true = tree.gradient(trainer, rewards).flatten()
    biases = []
    for upper in (0.5, 1.0, 2.0, 1e6):
        keep = mask_ratio(rho, 0.0, upper)
        masked, truncated = (q * rho * keep) @ f, (q * truncate(rho, upper)) @ f
        # Seq-MIS: bias = -E_p[f 1{rho > C}]; Seq-TIS: bias = -E_q[(rho - C)_+ f].
        torch.testing.assert_close(masked - true, -(p * ~keep) @ f, **EXACT)
        torch.testing.assert_close(truncated - true, -(q * (rho - upper).clamp(min=0)) @ f, **EXACT)
        assert torch.equal(masked, truncated) or bool((rho > upper).any())
        biases.append(float(q @ rho - q @ truncate(rho, upper)))
    assert biases == sorted(biases, reverse=True)
    torch.testing.assert_close(truncated, true, **EXACT)


def test_truncation_and_masking_keep_their_bounds() -> None:
    ratio = torch.tensor([0.499, 0.5, 1.0, 5.0, 5.001], dtype=torch.float64)
    assert truncate(ratio, 2.0).tolist() == [0.499, 0.5, 1.0, 2.0, 2.0]
    assert mask_ratio(ratio, 0.5, 5.0).tolist() == [False, True, True, True, False]
    assert mask_ratio(ratio, 0.0, 5.0).tolist() == [True, True, True, True, False]


def test_token_and_sequence_weights_by_hand() -> None:
    d, mask = torch.cat([logs(0.5, 3.0, 7.0), logs(0.5, 0.5, 0.5)]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    weights = importance_weights(d, mask, level="token")
    torch.testing.assert_close(weights, torch.tensor([[0.5, 2.0, 0], [0.5] * 3], dtype=torch.float64), **EXACT)
    weights = importance_weights(d, mask, level="sequence")
    torch.testing.assert_close(weights, torch.tensor([[1.5, 1.5, 0], [0.125] * 3], dtype=torch.float64), **EXACT)
    torch.testing.assert_close(importance_weights(d, mask, upper=None), token_ratios(d, mask), **EXACT)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalised_weights_have_mean_one_after_truncation(level: str) -> None:
    tree = Tree(3, 3, eos=0)
    log_ratio = problem(tree)[3]
    weights = importance_weights(log_ratio, tree.mask, level=level, upper=1.5, normalise=True)
    mean = weights[tree.mask].mean() if level == "token" else weights[:, 0].mean()
    assert mean.item() == pytest.approx(1.0, abs=1e-12)
    plain = importance_weights(log_ratio, tree.mask, level=level, upper=1.5)
    torch.testing.assert_close(weights * plain[0, 0], plain * weights[0, 0], **EXACT)


def test_normalised_untruncated_weights_are_self_normalised_importance_sampling() -> None:
    tree = Tree(3, 3)
    log_ratio = problem(tree)[3]
    rho = sequence_ratios(log_ratio, tree.mask)
    weights = importance_weights(log_ratio, tree.mask, level="sequence", upper=None, normalise=True)
    torch.testing.assert_close(weights[:, 0] / len(rho), rho / rho.sum(), **EXACT)


def test_weights_are_frozen_and_normalisation_ignores_rows_without_tokens() -> None:
    d = logs(0.5, 0.5, 0.5).requires_grad_()
    assert not importance_weights(d, ONES).requires_grad
    padded, mask = torch.cat([d.detach(), d.detach() * math.nan]), torch.tensor([[1, 1, 1], [0, 0, 0]])
    for level in ("token", "sequence"):
        weights = importance_weights(padded, mask, level=level, normalise=True)
        torch.testing.assert_close(weights, mask.double())


def test_geometric_mask_is_two_sided_and_length_neutral_and_the_product_is_not() -> None:
    for k in (1, 2, 10, 200):
        d = logs(1.02, 0.99, 1.001).repeat(1, k)
        mask = torch.ones(1, 3 * k)
        assert geometric_mask(d, mask).all()
        assert geometric_mask(d, mask, lower=0.999, upper=1.001).sum() == 0
        # One block has rho = 1.0108; the product passes 5 after log 5 / log rho = 149.7 blocks.
        assert bool(rejection_mask(d, mask, "seq_sum_k1", "0_5").all()) == (k < math.log(5) / float(d[0, :3].sum()))
        # Too small is rejected as well as too large.
        assert not geometric_mask(torch.full((1, k), math.log(0.4)), torch.ones(1, k)).any()
        assert not geometric_mask(torch.full((1, k), math.log(2.5)), torch.ones(1, k)).any()


def test_critical_length_of_a_product_has_the_published_value() -> None:
    lengths = torch.tensor([1610, 1611])
    d = torch.full((2, 1611), math.log(1.001), dtype=torch.float64)
    mask = torch.arange(1611) < lengths.unsqueeze(1)
    assert rejection_mask(d, mask, "seq_sum_k1", "0_5").any(1).tolist() == [True, False]
    assert geometric_mask(d, mask).any(1).all()
    for length, ratio in ((10, 1.01), (1000, 2.72), (2000, 7.38), (5000, 148.0)):
        d = torch.full((1, length), math.log(1.001), dtype=torch.float64)
        assert sequence_ratios(d, torch.ones(1, length)).item() == pytest.approx(ratio, rel=2e-3)


@pytest.mark.parametrize("level", ["token", "seq_sum", "seq_mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k1_keeps_exactly_the_stated_interval(level: str, dtype: torch.dtype) -> None:
    # Bounds on 1 / ratio instead would keep [0.2, 2].
    inside, outside = [0.5, 0.6, 1.0, 2.5, 5.0], [0.2, 0.49999, 5.0001, 20.0]
    d = torch.tensor([inside + outside], dtype=dtype).log().T
    keep = rejection_mask(d, torch.ones_like(d), f"{level}_k1", "0.5_5")
    assert keep.flatten().tolist() == [True] * len(inside) + [False] * len(outside)
    assert rejection_mask(logs(0.6, 1.6, 1.65), ONES, "token_k1", "0.6_1.6").tolist() == [[True, True, False]]


def test_single_number_means_a_reciprocal_interval() -> None:
    d = logs(0.5, 2.0, 2.001)
    assert rejection_mask(d, ONES, "token_k1", 2.0).tolist() == [[True, True, False]]
    assert torch.equal(rejection_mask(d, ONES, "token_k1", 2.0), rejection_mask(d, ONES, "token_k1", "0.5_2.0"))


def test_every_statistic_by_hand() -> None:
    d = torch.tensor([[0.5, -1.0, 0.2]], dtype=torch.float64)
    second, third = [x * x / 2 for x in d[0].tolist()], [math.exp(x) - 1 - x for x in d[0].tolist()]
    values = {
        "seq_sum_k2": sum(second),
        "seq_mean_k2": sum(second) / 3,
        "seq_max_k2": max(second),
        "seq_sum_k3": sum(third),
        "seq_mean_k3": sum(third) / 3,
        "seq_max_k3": max(third),
    }
    for option, value in values.items():
        assert rejection_mask(d, ONES, option, value + 1e-9).all()
        assert not rejection_mask(d, ONES, option, value - 1e-9).any()
    for name, token in (("token_k2", second), ("token_k3", third)):
        threshold = sorted(token)[1]
        assert rejection_mask(d, ONES, name, threshold + 1e-9).tolist() == [[x <= threshold for x in token]]
    bounds = f"{math.exp(-0.3) - 1e-9}_{math.exp(-0.3) + 1e-9}"
    assert rejection_mask(d, ONES, "seq_sum_k1", bounds).all()


@pytest.mark.parametrize("tree", make_trees())
def test_lists_of_options_are_the_and_of_each(tree: Tree) -> None:
    d = problem(tree)[3]
    first = rejection_mask(d, tree.mask, "token_k1", "0.5_2")
    second = rejection_mask(d, tree.mask, "seq_max_k3", 0.5)
    both = rejection_mask(d, tree.mask, "token_k1, seq_max_k3", "0.5_2,0.5")
    assert torch.equal(both, first & second)
    options = "token_k2,token_k3"
    one, two = (rejection_mask(d, tree.mask, options, threshold) for threshold in (0.1, "0.1,0.1"))
    assert torch.equal(one, two)


@pytest.mark.parametrize("option", REJECTIONS)
def test_padding_influences_no_rule_and_equal_policies_are_kept(option: str) -> None:
    tree = Tree(3, 3, eos=0)
    d = problem(tree)[3]
    threshold = "0.8_1.5" if option.endswith("k1") else 0.05
    clean = rejection_mask(d, tree.mask, option, threshold)
    dirty = rejection_mask(torch.where(tree.mask, d, math.nan), tree.mask, option, threshold)
    assert torch.equal(clean, dirty)
    assert not dirty[~tree.mask].any()
    assert 0 < clean.sum() < tree.mask.sum()
    assert torch.equal(rejection_mask(0 * d, tree.mask, option, 1.0), tree.mask)


@pytest.mark.parametrize(("batch", "time"), [(0, 0), (0, 2), (2, 0), (2, 2)])
def test_batches_without_tokens_keep_nothing(batch: int, time: int) -> None:
    d, mask = torch.full((batch, time), math.nan), torch.zeros(batch, time)
    keeps = [
        *(rejection_mask(d, mask, option, 1.0) for option in REJECTIONS),
        geometric_mask(d, mask),
        ser_mask(d, mask),
        trust_region_mask(d, mask, max_upper=1.0, mean_upper=1.0),
        sampled_trust_region_mask(d, mask, max_upper=1.0, mean_upper=1.0),
        length_neutral_mask(d, mask, tv_max=0.1, kl_max=0.1, upper=0.1),
        *(importance_weights(d, mask, level=level, normalise=True) for level in ("token", "sequence")),
        *token_divergences(torch.full((batch, time, 3), math.nan), torch.zeros(batch, time, 3), mask),
    ]
    assert all(keep.shape == (batch, time) and not keep.any() for keep in keeps)


@pytest.mark.parametrize("tree", make_trees())
@pytest.mark.parametrize("block_values", [1, 7, 2**20])
def test_divergences_from_logits_are_exact_in_any_block_size(tree: Tree, block_values: int) -> None:
    sampler, trainer = problem(tree)[:2]
    full = [torch.where(tree.mask.unsqueeze(-1), x[tree.prefix], math.nan) for x in (sampler, trainer)]
    kl, tv = token_divergences(*full, tree.mask, block_values=block_values)
    torch.testing.assert_close(kl, tree.token_kl(sampler, trainer), **EXACT)
    torch.testing.assert_close(tv, tree.token_tv(sampler, trainer), **EXACT)
    warm = token_divergences(*full, tree.mask, temperature=2.0).kl
    torch.testing.assert_close(warm, tree.token_kl(sampler / 2, trainer / 2), **EXACT)
    torch.testing.assert_close((tree.probs(sampler) @ kl).sum(), tree.sequence_kl(sampler, trainer), **EXACT)


def test_divergences_with_excluded_tokens_and_half_precision() -> None:
    q = torch.tensor([[[0.0, 0.0, -math.inf]]])
    p = torch.tensor([[[0.0, -math.inf, -math.inf]]])
    one = torch.ones(1, 1)
    assert [x.item() for x in token_divergences(p, q, one)] == pytest.approx([math.log(2), 0.5])
    assert [x.item() for x in token_divergences(q, p, one)] == [math.inf, 0.5]
    half = token_divergences(q.bfloat16(), q.bfloat16(), one)
    assert half.kl.dtype == torch.float32
    assert half.kl.item() == half.tv.item() == 0.0
    assert not trust_region_mask(token_divergences(q, p, one).kl, one, max_upper=1e9).any()
    with pytest.raises(ParameterError, match="logits of token_divergences must hold at least one finite value"):
        token_divergences(q * math.nan, p, one)


def test_one_spiky_token_leaves_the_region_though_the_mean_passes() -> None:
    calm, spiky = [1e-4] * 100, [1e-4] * 99 + [0.06]
    kl, mask = torch.tensor([calm, spiky]), torch.ones(2, 100)
    assert trust_region_mask(kl, mask, mean_upper=0.001).any(1).tolist() == [True, True]
    assert trust_region_mask(kl, mask, max_upper=0.05).any(1).tolist() == [True, False]
    both = trust_region_mask(kl, mask, max_upper=0.1, mean_upper=5e-4)
    assert torch.equal(both, trust_region_mask(kl, mask, max_upper=0.1) & trust_region_mask(kl, mask, mean_upper=5e-4))
    # Thresholds do not depend on length: repeating a response changes nothing.
    assert torch.equal(
        trust_region_mask(kl.repeat(1, 7), mask.repeat(1, 7), max_upper=0.1, mean_upper=5e-4), both.repeat(1, 7)
    )


def test_rejected_responses_count_in_the_denominator() -> None:
    # Equal gradients, half of them rejected: the gradient halves and is not renormalised.
    values, mask = torch.ones(4, 3, requires_grad=True), torch.ones(4, 3)
    keep = trust_region_mask(torch.tensor([[0.0], [0.0], [1.0], [1.0]]).expand(4, 3), mask, max_upper=0.5)
    for aggregation in ("sequence_mean_token_sum", "sequence_mean_token_mean", "token_mean"):
        whole, half = (aggregate(values, mask, aggregation, keep=k) for k in (None, keep))
        assert half.item() == whole.item() / 2
        gradients = [torch.autograd.grad(x, values)[0] for x in (whole, half)]
        assert torch.equal(gradients[1], torch.where(keep, gradients[0], 0.0))


@pytest.mark.parametrize("tree", make_trees())
def test_sampled_fall_back_uses_k2_for_the_maximum_and_k3_for_the_mean(tree: Tree) -> None:
    d = problem(tree)[3]
    keep = sampled_trust_region_mask(d, tree.mask, max_upper=0.3, mean_upper=0.2)
    assert torch.equal(keep, rejection_mask(d, tree.mask, "seq_max_k2,seq_mean_k3", "0.3,0.2"))
    # k2 does not care which policy is the rarer.
    keep = sampled_trust_region_mask(d, tree.mask, max_upper=0.3)
    assert torch.equal(keep, sampled_trust_region_mask(-d, tree.mask, max_upper=0.3))


@pytest.mark.parametrize("tree", make_trees())
def test_distance_of_the_ratio_from_one_is_twice_the_total_variation(tree: Tree) -> None:
    sampler, trainer, _, d = problem(tree)
    distance = (token_ratios(d, tree.mask) - tree.mask.double()).abs()
    q = tree.probs(sampler)
    torch.testing.assert_close(q @ distance, 2 * q @ tree.token_tv(sampler, trainer), **EXACT)
    mean = distance.sum(1) / tree.mask.sum(1)
    keep = ser_mask(d, tree.mask, upper=float(mean.median()) + 1e-12)
    assert torch.equal(keep.any(1), mean <= mean.median() + 1e-12)


@pytest.mark.parametrize("tree", make_trees())
def test_weighted_distance_bounds_the_surrogate_error(tree: Tree) -> None:
    sampler, trainer, rewards, d = problem(tree)
    q = tree.probs(sampler)
    eps, delta = tree.token_tv(sampler, trainer).max(), tree.token_kl(sampler, trainer).max()
    rho, distance = token_ratios(d, tree.mask), (token_ratios(d, tree.mask) - tree.mask.double()).abs()
    left = tree.horizon - torch.arange(1, tree.horizon + 1)
    weight = torch.minimum((left * eps).clamp(max=1.0), (left * delta / 2).sqrt())
    error = tree.expect(trainer, rewards) - q @ (rewards * (1 + (rho - tree.mask.double()).sum(1)))
    assert error.abs() <= 2 * q @ (distance @ weight) + 1e-14
    level = float((distance @ weight).median())
    share = torch.where(tree.mask, weight, 0.0).sum(1)
    options = {"tv_max": float(eps), "kl_max": float(delta), "horizon": tree.horizon}
    keep = length_neutral_mask(d, tree.mask, upper=level, **options)
    assert torch.equal(keep.any(1), distance @ weight <= level * share)


def test_length_neutral_mask_keeps_what_cannot_err() -> None:
    d = torch.full((2, 3), 3.0)
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    keep = length_neutral_mask(d, mask, tv_max=0.5, kl_max=0.5, upper=0.1)
    assert keep.any(1).tolist() == [True, False]
    # Its own length is the default horizon: more padding changes nothing.
    wide = length_neutral_mask(d.repeat(1, 2), torch.cat([mask, 0 * mask], 1), tv_max=0.5, kl_max=0.5, upper=0.1)
    assert torch.equal(wide[:, :3], keep)


def test_bad_options_are_named(without_shape_checks: None) -> None:
    d = logs(1.0, 1.0, 1.0)
    with pytest.raises(ParameterError, match=r"options of rejection_mask must be one of .*; got 'seq_max_k1'"):
        rejection_mask(d, ONES, "seq_max_k1", 2.0)
    with pytest.raises(ParameterError, match=r"thresholds of rejection_mask must be one, or one per option \(1\)"):
        rejection_mask(d, ONES, "token_k2", "1,2")
    with pytest.raises(ParameterError, match="thresholds of rejection_mask must be numbers >= 0"):
        rejection_mask(d, ONES, "token_k2", "much")
    with pytest.raises(ParameterError, match=r"thresholds of rejection_mask must be numbers >= 0.*; got '1_5'"):
        rejection_mask(d, ONES, "token_k2", "1_5")
    for function in (geometric_mask, ser_mask, importance_weights):
        with pytest.raises(ParameterError, match=f"log_ratio of {function.__name__} must have shape"):
            function(d[:, :1], ONES)
    with pytest.raises(ParameterError, match="divergence of trust_region_mask must have shape"):
        trust_region_mask(d[:, :1], ONES, max_upper=1.0)
    with pytest.raises(ParameterError, match=r"thresholds of rejection_mask must be a finite number >= 1; got 0.5"):
        rejection_mask(d, ONES, "token_k1", 0.5)
    with pytest.raises(ParameterError, match="lower of rejection_mask must be a finite number >= 0 and <= 1"):
        rejection_mask(d, ONES, "token_k1", "2_1")
    with pytest.raises(ParameterError, match="lower of mask_ratio must be"):
        mask_ratio(d, 3.0, 2.0)
    with pytest.raises(ParameterError, match="upper of truncate must be a finite number > 0"):
        truncate(d, 0.0)
    with pytest.raises(ParameterError, match="level of importance_weights must be one of 'sequence', 'token'"):
        importance_weights(d, ONES, level="word")
    with pytest.raises(ParameterError, match="max_upper of trust_region_mask must be given, or mean_upper, or both"):
        trust_region_mask(d, ONES)
    with pytest.raises(ParameterError, match="trainer_logits of token_divergences must have shape"):
        token_divergences(torch.zeros(1, 3, 2), torch.zeros(1, 3, 4), ONES)
