"""Ratios, estimators and the mismatch report against enumeration on small trees."""

import math

import pytest
import torch

from ensemblepp.errors import ParameterError
from ensemblepp.policy.inputs import check_mask
from ensemblepp.policy.ratios import (
    effective_sample_size,
    geometric_ratios,
    k1,
    k2,
    k3,
    log_ratios,
    masked_max,
    masked_mean,
    masked_sum,
    mismatch_report,
    sequence_ratios,
    token_ratios,
)
from tests.policy_toy import Tree, make_generator, make_trees

TREES = make_trees()
EXACT = {"rtol": 0.0, "atol": 1e-10}


def pair(tree: Tree, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = make_generator(seed)
    return tree.random_logits(generator), tree.random_logits(generator)


def ratios(tree: Tree, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(probabilities of the sampler, log-ratios)."""
    sampler, trainer = pair(tree, seed)
    return tree.probs(sampler), log_ratios(tree.logprobs(trainer), tree.logprobs(sampler), tree.mask)


@pytest.mark.parametrize("tree", TREES)
def test_sequence_ratio_gives_the_true_gradient_and_token_ratios_do_only_for_one_token(tree: Tree) -> None:
    _, trainer = pair(tree)
    rewards = tree.random_rewards(make_generator(1))
    q, log_ratio = ratios(tree)
    true = tree.gradient(trainer, rewards).flatten()
    weighted = (q * rewards * sequence_ratios(log_ratio, tree.mask)) @ tree.scores(trainer)
    torch.testing.assert_close(weighted, true, rtol=0.0, atol=1e-12)
    by_token = token_ratios(log_ratio, tree.mask).unsqueeze(-1) * tree.token_scores(trainer)
    gap = ((q * rewards) @ by_token.sum(1) - true).abs().max()
    assert (gap < 1e-12) if tree.horizon == 1 else (gap > 1e-3)
    # On-policy nothing is to be corrected.
    same = log_ratios(tree.logprobs(trainer), tree.logprobs(trainer), tree.mask)
    assert torch.equal(token_ratios(same, tree.mask), tree.mask.double())


@pytest.mark.parametrize("tree", TREES)
def test_token_ratio_gradient_is_that_of_the_surrogate(tree: Tree) -> None:
    # L_q(p) = J(q) + sum_t E_{c~q} E_{y~p} A_q(c, y), with A_q the sampler's own advantage.
    sampler, trainer = pair(tree)
    rewards = tree.random_rewards(make_generator(1))
    q, log_ratio = ratios(tree)
    leaf = trainer.clone().requires_grad_()

    def surrogate(logits: torch.Tensor) -> torch.Tensor:
        d = log_ratios(tree.logprobs(logits), tree.logprobs(sampler), tree.mask)
        return q @ rewards + q @ (rewards * masked_sum(torch.expm1(d), tree.mask, dim=1))

    gradient = torch.autograd.grad(surrogate(leaf), leaf)[0].flatten()
    by_token = token_ratios(log_ratio, tree.mask).unsqueeze(-1) * tree.token_scores(trainer)
    torch.testing.assert_close((q * rewards) @ by_token.sum(1), gradient, **EXACT)
    # Equal value and gradient at p = q.
    leaf = sampler.clone().requires_grad_()
    assert surrogate(leaf).item() == pytest.approx(float(q @ rewards), abs=1e-14)
    torch.testing.assert_close(torch.autograd.grad(surrogate(leaf), leaf)[0], tree.gradient(sampler, rewards), **EXACT)


@pytest.mark.parametrize("tree", TREES)
def test_k1_and_k3_have_the_divergence_as_their_mean(tree: Tree) -> None:
    sampler, trainer = pair(tree)
    q, log_ratio = ratios(tree)
    divergence = tree.sequence_kl(sampler, trainer)
    whole = log_ratio.sum(1)
    for estimate in (k1, k3):
        torch.testing.assert_close(q @ estimate(whole), divergence, **EXACT)
        torch.testing.assert_close(q @ masked_sum(estimate(log_ratio), tree.mask, dim=1), divergence, **EXACT)
    torch.testing.assert_close(q @ tree.token_kl(sampler, trainer).sum(1), divergence, **EXACT)
    # The inverted ratio estimates something else.
    assert (q @ k3(-whole) - divergence).abs() > 1e-3
    assert (k3(log_ratio) >= 0).all()
    assert torch.equal(k2(log_ratio), k2(-log_ratio))


def test_estimators_of_equal_policies_are_zero_and_small_differences_stay_exact() -> None:
    zero = torch.zeros(3, dtype=torch.float64)
    for estimate in (k1, k2, k3):
        assert not estimate(zero).any()
    # exp(d) - 1 - d loses half its digits at d = 1e-4 in float32; expm1 keeps them.
    d = torch.tensor([1e-4, -1e-4])
    torch.testing.assert_close(k3(d), d.square() / 2 + d**3 / 6, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize(("ratio", "value"), [(0.5, 0.19), (2.0, 0.31), (10.0, 6.70), (100.0, 94.4)])
def test_k3_has_the_published_values(ratio: float, value: float) -> None:
    assert k3(torch.tensor(math.log(ratio), dtype=torch.float64)).item() == pytest.approx(value, abs=6e-3)


@pytest.mark.parametrize("tree", TREES)
def test_geometric_ratio_is_the_inverse_perplexity_ratio_and_its_mean_log_is_a_divergence(tree: Tree) -> None:
    sampler, trainer = pair(tree)
    q, log_ratio = ratios(tree)
    geometric = geometric_ratios(log_ratio, tree.mask)
    log_p, log_q = tree.logprobs(trainer).sum(1), tree.logprobs(sampler).sum(1)
    length = tree.mask.sum(1)
    torch.testing.assert_close(geometric * torch.exp((log_q - log_p) / length), torch.ones_like(geometric), **EXACT)
    if tree.eos is None:
        torch.testing.assert_close(q @ geometric.log(), -tree.sequence_kl(sampler, trainer) / tree.horizon, **EXACT)
    torch.testing.assert_close(geometric, sequence_ratios(log_ratio, tree.mask) ** (1 / length.double()), **EXACT)


def test_squared_ratios_of_independent_tokens_multiply() -> None:
    tree, generator = Tree(3, 4), make_generator()
    one_q, one_p = (torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(2))
    sampler, trainer = one_q.expand(tree.num_prefixes, 3), one_p.expand(tree.num_prefixes, 3)
    q, p = one_q.softmax(0), one_p.softmax(0)
    log_ratio = log_ratios(tree.logprobs(trainer), tree.logprobs(sampler), tree.mask)
    second_moment = tree.probs(sampler) @ sequence_ratios(log_ratio, tree.mask).square()
    assert second_moment.item() == pytest.approx(float((p.square() / q).sum() ** 4), rel=1e-12)


@pytest.mark.parametrize("garbage", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_padding_reaches_neither_value_nor_gradient(garbage: float, dtype: torch.dtype) -> None:
    tree = Tree(3, 3, eos=0)
    sampler, trainer = pair(tree)
    results = []
    for padding in (0.0, garbage):
        p, q = (tree.logprobs(x, padding).to(dtype).requires_grad_() for x in (trainer, sampler))
        d = log_ratios(p, q, tree.mask)
        values = [token_ratios(d, tree.mask).sum(1), sequence_ratios(d, tree.mask), geometric_ratios(d, tree.mask)]
        report = mismatch_report(p, q, tree.mask)
        sum(v.sum() for v in values).backward()
        results.append([*values, p.grad, q.grad, *report.values()])
    assert d.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
        assert torch.isfinite(dirty).all()
    assert not p.grad[~tree.mask].any()


@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize("time", [0, 2])
def test_batches_without_tokens_give_zeros_and_finite_gradients(batch: int, time: int) -> None:
    p = torch.full((batch, time), math.nan, requires_grad=True)
    mask = torch.zeros(batch, time)
    d = log_ratios(p, torch.full((batch, time), -math.inf), mask)
    total = sequence_ratios(d, mask).sum() + geometric_ratios(d, mask).sum() + masked_mean(d, mask)
    (total + token_ratios(d, mask).sum()).backward()
    assert not p.grad.any()
    assert total.item() == 2 * batch  # an empty product is 1
    assert all(value.item() == 0 for value in mismatch_report(p, p, mask).values())


def test_log_ratios_are_clamped_and_the_clamp_stops_the_gradient() -> None:
    p = torch.tensor([[-1.0, -0.5, -0.1]], requires_grad=True)
    q = torch.tensor([[-2.0, -40.0, -41.0]])
    d = log_ratios(p, q, torch.ones(1, 3, dtype=torch.int64))
    d.sum().backward()
    assert d.tolist() == [[1.0, 20.0, 20.0]]
    assert p.grad.tolist() == [[1.0, 0.0, 0.0]]
    assert sequence_ratios(d, torch.ones(1, 3)).item() == pytest.approx(math.exp(20.0))
    assert log_ratios(p, q, torch.ones(1, 3), clamp=50.0)[0, 1].item() == 39.5


def test_report_has_hand_computed_values() -> None:
    q = torch.tensor([[0.5, 0.2, 0.9], [0.4, 0.5, 0.5]], dtype=torch.float64)
    p = torch.tensor([[0.25, 0.6, 0.9], [0.4, 0.5, 0.5]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    report = mismatch_report(p.log(), q.log(), mask)
    ratio = [0.5, 3.0, 1.0]
    expected = {
        "kl": -math.log(1.5) / 3,
        "k3": (sum(ratio) - 3 - math.log(1.5)) / 3,
        "chi2_token": sum(r * r for r in ratio) / 3 - 1,
        "chi2_sequence": (1.5**2 + 1) / 2 - 1,
        "ess_token": 3.5**2 / (3 * (0.25 + 4 + 1)),
        "ess_sequence": 2.5**2 / (2 * (2.25 + 1)),
        "perplexity_trainer": (0.15**-0.5 + 2.5) / 2,
        "perplexity_sampler": (0.1**-0.5 + 2.5) / 2,
        "log_perplexity_trainer": -(math.log(0.15) / 2 + math.log(0.4)) / 2,
        "log_perplexity_sampler": -(math.log(0.1) / 2 + math.log(0.4)) / 2,
        "log_perplexity_gap": -math.log(1.5) / 4,
        "log_perplexity_gap_abs": math.log(1.5) / 4,
        "log_perplexity_gap_max": 0.0,
        "log_perplexity_gap_min": -math.log(1.5) / 2,
        "perplexity_ratio": (1.5**-0.5 + 1) / 2,
        "clip_fraction_high": 1 / 3,
        "clip_fraction_low": 0.0,  # exactly 0.5 lies inside
        "clip_fraction_raw": 1 / 3,
        "clip_fraction_applied": 1 / 3,
    }
    assert report.keys() == expected.keys()
    assert {k: v.item() for k, v in report.items()} == pytest.approx(expected, abs=1e-12)


def test_applied_clip_fraction_counts_only_tokens_whose_advantage_pushes_outwards() -> None:
    p = torch.tensor([[3.0, 3.0, 0.1, 0.1]]).log() - 2
    q = torch.full((1, 4), -2.0)
    report = mismatch_report(p, q, torch.ones(1, 4), advantages=torch.tensor([[1.0, -1.0, 1.0, -1.0]]))
    assert (report["clip_fraction_raw"].item(), report["clip_fraction_applied"].item()) == (1.0, 0.5)
    assert mismatch_report(p, q, torch.ones(1, 4))["clip_fraction_applied"].item() == 0.5
    # Small weights are not raised for the effective sample size.
    size = effective_sample_size(torch.tensor([[2.0, 2.0, 0.1, 0.1]]), torch.ones(1, 4))
    torch.testing.assert_close(report["ess_token"], size)
    assert mismatch_report(p, q, torch.ones(1, 4), lower=0.0)["clip_fraction_low"].item() == 0.0


def test_report_carries_no_gradient() -> None:
    p = torch.full((1, 2), -1.0, requires_grad=True)
    assert not any(value.requires_grad for value in mismatch_report(p, p, torch.ones(1, 2)).values())


def test_effective_sample_size() -> None:
    ones = torch.ones(2, 2)
    assert effective_sample_size(3 * ones, ones).item() == pytest.approx(1.0)
    assert effective_sample_size(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), ones).item() == pytest.approx(0.25)
    assert effective_sample_size(0 * ones, ones).item() == 0.0


def test_masked_sums_means_and_maxima() -> None:
    values, mask = torch.tensor([[1.0, 2.0], [4.0, math.nan]]), torch.tensor([[1, 1], [1, 0]])
    assert masked_sum(values, mask).item() == 7.0
    assert masked_mean(values, mask).item() == pytest.approx(7 / 3)
    assert masked_sum(values, mask, dim=1).tolist() == [3.0, 4.0]
    assert masked_mean(values, mask, dim=1).tolist() == [1.5, 4.0]
    assert masked_mean(values, mask, dim=0).tolist() == [2.5, 2.0]
    assert masked_max(-values, mask).item() == -1.0
    assert masked_max(-values, mask, dim=1).tolist() == [-1.0, -4.0]
    assert masked_max(-values, mask * 0, dim=0).tolist() == [0.0, 0.0]
    assert masked_max(values[:0], mask[:0]).item() == 0.0


def test_masks_hold_zeros_and_ones() -> None:
    for mask in (torch.tensor([[0, 1]]), torch.tensor([[0.0, 1.0]]), torch.tensor([[False, True]])):
        assert check_mask(mask, "test").tolist() == [[False, True]]
    with pytest.raises(ParameterError, match=r"mask of test must hold 0 and 1 only; got 0.5 at index \(0, 1\)"):
        check_mask(torch.tensor([[1.0, 0.5]]), "test")
    with pytest.raises(ParameterError, match="mask of test must hold 0 and 1 only; got nan"):
        check_mask(torch.tensor([[1.0, math.nan]]), "test")


def test_bad_input_is_named(without_shape_checks: None) -> None:
    p, mask = torch.full((2, 2), -1.0), torch.ones(2, 2)
    with pytest.raises(
        ParameterError, match=r"trainer_logprob of log_ratios must be finite; got -inf at index \(0, 0\)"
    ):
        log_ratios(torch.tensor([[-math.inf, 0.0], [0.0, 0.0]]), p, mask)
    with pytest.raises(ParameterError, match="sampler_logprob of log_ratios must be finite"):
        log_ratios(p, p * math.nan, mask)
    with pytest.raises(ParameterError, match="sampler_logprob of log_ratios must have shape"):
        log_ratios(p, p[:1], mask)
    with pytest.raises(ParameterError, match="trainer_logprob of log_ratios must be floating point"):
        log_ratios(p.long(), p, mask)
    with pytest.raises(ParameterError, match="mask of log_ratios must have shape"):
        log_ratios(p, p, mask[0])
    with pytest.raises(ParameterError, match="clamp of log_ratios must be a finite number > 0"):
        log_ratios(p, p, mask, clamp=0.0)
    with pytest.raises(ParameterError, match="lower of mismatch_report must be a finite number >= 0 and <= 2"):
        mismatch_report(p, p, mask, lower=3.0)
