"""Ratios, weights and masks against numbers computed by a public implementation on one padded batch.

Its masked means divide by the number of tokens plus 1e-8, hence a tolerance of 1e-8 and not less. The k1 bounds differ
on purpose, which the last test pins. Advantages and losses of the same batch are tested beside their functions.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from ensemblepp.policy.masks import importance_weights, mask_ratio, rejection_mask
from ensemblepp.policy.ratios import (
    effective_sample_size,
    log_ratios,
    masked_mean,
    mismatch_report,
    sequence_ratios,
    token_ratios,
)
from tests.policy_reference import CASES, MASK, OLD, SAMPLER

OWN = MASK.bool()
LOG_RATIO = log_ratios(OLD, SAMPLER, OWN)

NAMES = {
    "training_ppl": "perplexity_trainer",
    "training_log_ppl": "log_perplexity_trainer",
    "kl": "kl",
    "k3_kl": "k3",
    "rollout_ppl": "perplexity_sampler",
    "rollout_log_ppl": "log_perplexity_sampler",
    "log_ppl_diff": "log_perplexity_gap",
    "log_ppl_abs_diff": "log_perplexity_gap_abs",
    "log_ppl_diff_max": "log_perplexity_gap_max",
    "log_ppl_diff_min": "log_perplexity_gap_min",
    "ppl_ratio": "perplexity_ratio",
    "chi2_token": "chi2_token",
    "chi2_seq": "chi2_sequence",
}


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-8, abs=1e-8)


def is_asymmetric(case: dict[str, Any]) -> bool:
    return case["option"].endswith("k1") and case["threshold"] == "0.5_1.2"


def weigh(level: str, threshold: float | str) -> tuple[Tensor, float, float]:
    """(weights, lower, upper): truncated at a number, masked outside an interval."""
    if isinstance(threshold, float):
        return importance_weights(LOG_RATIO, OWN, level=level, upper=threshold), 1 / threshold, threshold
    lower, upper = (float(bound) for bound in threshold.split("_"))
    ratio = token_ratios(LOG_RATIO, OWN)
    if level == "sequence":
        ratio = sequence_ratios(LOG_RATIO, OWN).unsqueeze(1).expand_as(ratio)
    return torch.where(OWN & mask_ratio(ratio, lower, upper), ratio, 0.0), lower, upper


def test_mismatch_report() -> None:
    report = mismatch_report(OLD, SAMPLER, OWN)
    assert CASES["offpolicy_metrics"].keys() == NAMES.keys()
    for theirs, ours in NAMES.items():
        assert report[ours].item() == near(CASES["offpolicy_metrics"][theirs]), ours


@pytest.mark.parametrize("case", CASES["is_weights"], ids=lambda case: f"{case['level']}-{case['threshold']}")
def test_importance_weights(case: dict[str, Any]) -> None:
    assert not case["batch_normalize"]
    weights, lower, upper = weigh(case["level"], case["threshold"])
    expected = torch.tensor(case["weights"], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-8)
    metrics = case["metrics"]
    assert masked_mean(weights, OWN).item() == near(metrics["rollout_is_mean"])
    # Theirs is (n + e) (mean + e)^2 / sum w^2 with e = 1e-8, too far from e = 0 for a comparison to 1e-8.
    count, total = int(OWN.sum()), float(weights.sum())
    padded = count * (count + 1e-8) * ((total / (count + 1e-8) + 1e-8) / total) ** 2
    size = padded * effective_sample_size(weights, OWN).item()
    assert size == near(metrics["rollout_is_eff_sample_size"])
    ratio = sequence_ratios(LOG_RATIO, OWN)
    if case["level"] == "token":
        report = mismatch_report(OLD, SAMPLER, OWN, lower=lower, upper=upper)
        high, low = report["clip_fraction_high"].item(), report["clip_fraction_low"].item()
    else:
        high, low = (ratio > upper).double().mean().item(), (ratio < lower).double().mean().item()
    # Theirs counts sequences in single precision.
    assert high == pytest.approx(metrics["rollout_is_ratio_fraction_high"], abs=1e-7)
    assert low == pytest.approx(metrics["rollout_is_ratio_fraction_low"], abs=1e-7)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES["rejection"] if not is_asymmetric(case)],
    ids=lambda case: f"{case['option']}-{case['threshold']}",
)
def test_rejection_masks(case: dict[str, Any]) -> None:
    keep = rejection_mask(LOG_RATIO, OWN, case["option"], case["threshold"])
    assert torch.equal(keep, torch.tensor(case["mask"]).bool())
    rejected = masked_mean((~keep).double(), OWN).item()
    assert rejected == near(case["metrics"]["rollout_rs_masked_fraction"])


def test_asymmetric_k1_bounds_apply_to_the_ratio_and_not_to_its_inverse() -> None:
    (case,) = [case for case in CASES["rejection"] if is_asymmetric(case)]
    theirs, ratio = torch.tensor(case["mask"]).bool(), token_ratios(LOG_RATIO, OWN)
    ours = rejection_mask(LOG_RATIO, OWN, case["option"], case["threshold"])
    assert torch.equal(ours, OWN & (ratio >= 0.5) & (ratio <= 1.2))
    assert torch.equal(theirs, OWN & (ratio >= 1 / 1.2) & (ratio <= 1 / 0.5))
    assert not torch.equal(ours, theirs)
    # The same bounds, inverted by hand, give their mask.
    assert torch.equal(rejection_mask(LOG_RATIO, OWN, case["option"], f"{1 / 1.2}_2.0"), theirs)
