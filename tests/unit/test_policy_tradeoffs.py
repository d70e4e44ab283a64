"""Truncation levels, variance multipliers and step sizes against closed forms and enumeration."""

import math

import pytest
import torch

from ensemblepp.errors import ParameterError
from ensemblepp.policy.masks import truncate
from ensemblepp.policy.ratios import log_ratios, sequence_ratios
from ensemblepp.policy.tradeoffs import (
    ascent_bound,
    critical_length,
    optimal_step,
    seq_tis_bias,
    seq_tis_mse,
    seq_tis_threshold,
    seq_tis_variance,
    variance_multiplier,
)
from tests.policy_toy import Tree, make_generator, make_trees


def test_variance_multipliers_have_the_published_values() -> None:
    assert variance_multiplier(0.01, 200) == pytest.approx(7.3, abs=0.02)
    assert variance_multiplier(0.05, 200) == pytest.approx(17_292, abs=1)
    assert variance_multiplier(0.5, 0) == 1.0


def test_variance_multiplier_is_exact_for_independent_tokens() -> None:
    tree, generator = Tree(3, 4), make_generator()
    q, p = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    sampler, trainer = q.expand(tree.num_prefixes, 3), p.expand(tree.num_prefixes, 3)
    chi2 = float((p.softmax(0).square() / q.softmax(0)).sum()) - 1
    rho = sequence_ratios(log_ratios(tree.logprobs(trainer), tree.logprobs(sampler), tree.mask), tree.mask)
    assert float(tree.probs(sampler) @ rho.square()) == pytest.approx(variance_multiplier(chi2, 4), rel=1e-12)


def test_critical_length() -> None:
    assert critical_length(1.001, 5.0) == pytest.approx(1610, abs=0.5)
    assert critical_length(1.0, 5.0) == critical_length(0.9, 5.0) == math.inf


@pytest.mark.parametrize("sharp", [False, True])
@pytest.mark.parametrize("chi2", [0.0, 0.5, 8.0, 1e4])
def test_threshold_minimises_a_u_shaped_error(sharp: bool, chi2: float) -> None:
    best = seq_tis_threshold(chi2, sharp=sharp)
    errors = [
        seq_tis_mse(best * factor, chi2, largest=3.0, sharp=sharp) for factor in (0.25, 0.5, 0.999, 1, 1.001, 2, 4)
    ]
    assert min(errors) == errors[3]
    assert errors[:4] == sorted(errors[:4], reverse=True)
    assert errors[3:] == sorted(errors[3:])
    if not sharp:
        assert best == math.sqrt(2 * (1 + chi2))
        assert errors[3] == pytest.approx(4 * 9 * (1 + chi2), rel=1e-12)


@pytest.mark.parametrize("tree", make_trees())
@pytest.mark.parametrize("upper", [0.5, 1.0, 2.0, 5.0])
def test_bias_and_variance_stay_below_their_bounds(tree: Tree, upper: float) -> None:
    generator = make_generator()
    for _ in range(10):
        sampler, trainer = tree.random_logits(generator), tree.random_logits(generator)
        f = tree.random_rewards(generator).unsqueeze(1) * tree.scores(trainer)
        q = tree.probs(sampler)
        rho = sequence_ratios(log_ratios(tree.logprobs(trainer), tree.logprobs(sampler), tree.mask), tree.mask)
        chi2, largest = float(q @ rho.square()) - 1, float(f.norm(dim=1).max())
        weighted = truncate(rho, upper).unsqueeze(1) * f
        mean = q @ weighted
        bias, variance = float((mean - q @ (rho.unsqueeze(1) * f)).norm()), float(q @ (weighted - mean).square().sum(1))
        for sharp in (True, False):
            assert bias <= seq_tis_bias(upper, chi2, largest=largest, sharp=sharp) + 1e-12
        assert variance <= seq_tis_variance(upper, largest=largest, sharp=True) + 1e-12
        # K^2 C^2 is the tighter one below C = 1.
        assert variance <= seq_tis_variance(upper, largest=largest) + 1e-12
        excess = float(q @ (rho - upper).clamp(min=0))
        assert excess <= float(q @ rho.square()) / (4 * upper) + 1e-12
        assert float(q @ truncate(rho, upper).square()) <= upper + 1e-12


def test_ascent_bound_is_an_equality_for_a_quadratic() -> None:
    # J(x) = -L |x|^2 / 2 and g = grad J + b + sigma noise: E J(x + eta g) in closed form.
    smoothness, step, sigma = 3.0, 0.2, 0.7
    x, bias = torch.randn(2, 5, generator=make_generator(), dtype=torch.float64)
    gradient = -smoothness * x
    moved = x + step * (gradient + bias)
    exact = -smoothness / 2 * (moved.square().sum() + 5 * (step * sigma) ** 2 - x.square().sum())
    bound = ascent_bound(gradient, bias, 5 * sigma**2, smoothness=smoothness, step=step)
    assert bound.item() == pytest.approx(exact.item(), abs=1e-10)
    # Less curvature than L leaves slack.
    flatter = -1.0 / 2 * ((x + step * (-x + bias)).square().sum() + 5 * (step * sigma) ** 2 - x.square().sum())
    assert ascent_bound(-x, bias, 5 * sigma**2, smoothness=smoothness, step=step) < flatter


def test_optimal_step_maximises_the_bound_and_falls_with_the_variance() -> None:
    gradient = torch.tensor([3.0, -4.0], dtype=torch.float64)
    for variance in (0.0, 1.0, 1e3):
        best = float(optimal_step(25.0, variance, smoothness=2.0))
        values = [
            float(ascent_bound(gradient, 0 * gradient, variance, smoothness=2.0, step=factor * best))
            for factor in (0.5, 0.99, 1.0, 1.01, 2.0)
        ]
        assert max(values) == values[2]
    assert optimal_step(25.0, 0.0, smoothness=2.0).item() == 0.5
    ratio = optimal_step(1.0, 1e6, smoothness=1.0) / optimal_step(1.0, 2e6, smoothness=1.0)
    assert ratio.item() == pytest.approx(2.0, rel=1e-5)
    assert optimal_step(0.0, 0.0, smoothness=1.0).item() == 0.0


def test_bad_options_are_named() -> None:
    with pytest.raises(ParameterError, match="upper of seq_tis_bias must be a finite number > 0"):
        seq_tis_bias(0.0, 1.0)
    with pytest.raises(ParameterError, match="chi2 of seq_tis_threshold must be a finite number >= 0"):
        seq_tis_threshold(-1.0)
    with pytest.raises(ParameterError, match="upper of critical_length must be a finite number > 1"):
        critical_length(1.1, 1.0)
    with pytest.raises(ParameterError, match="smoothness of optimal_step must be a finite number > 0"):
        optimal_step(1.0, 1.0, smoothness=0.0)
