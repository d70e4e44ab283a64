"""Weights and masks against off-policy data: what is truncated, and what is left out.

Every rule speaks of the ratio trainer / sampler. Bounds are inclusive and apply to that ratio: `[0.5, 5]` keeps exactly
the ratios from 0.5 to 5. A keep-mask is True on own tokens that stay; hand it to the losses, which let rejected tokens
contribute zero without shrinking the denominator.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from ensemblepp.errors import ParameterError, check_choice, check_real
from ensemblepp.policy.inputs import check_log_ratio
from ensemblepp.policy.ratios import (
    CLAMP,
    ESTIMATORS,
    masked_max,
    masked_mean,
    masked_sum,
    sequence_ratios,
    token_ratios,
)

REJECTIONS = (
    *(f"{level}_{name}" for level in ("token", "seq_sum", "seq_mean") for name in ESTIMATORS),
    "seq_max_k2",
    "seq_max_k3",
)
"""The statistics of `rejection_mask`."""


def truncate(ratio: Float[Tensor, "*shape"], upper: float) -> Float[Tensor, "*shape"]:
    """Return min(ratio, upper), the weight of truncated importance sampling (TIS).

    Args:
        ratio: rho, of tokens or of sequences.
        upper: C; raising it lowers the bias and raises the variance.

    Raises:
        ParameterError: If the bound is not above 0.

    Source: When Speed Kills Stability, TIS; C = 2 in all published runs.
    """
    return ratio.clamp(max=check_real("upper", "truncate", upper, above=0.0))


def mask_ratio(ratio: Float[Tensor, "*shape"], lower: float, upper: float) -> Bool[Tensor, "*shape"]:
    """Return lower <= ratio <= upper: masked importance sampling (MIS), or IcePop with a lower bound above 0.

    The weight that goes with it is the ratio itself, `ratio * keep`: nothing is truncated, outliers are left out.

    Args:
        ratio: rho, of tokens or of sequences.
        lower: Smallest ratio kept; 0 for one-sided masking.
        upper: Largest ratio kept.

    Raises:
        ParameterError: If the bounds are not 0 <= lower <= upper, both finite, with upper above 0.

    Source: When Speed Kills Stability, MIS (one-sided); IcePop (two-sided, 0.5 and 5).
    """
    lower, upper = _bounds("mask_ratio", lower, upper)
    return (ratio >= lower) & (ratio <= upper)


@torch.no_grad()
def importance_weights(
    log_ratio: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    level: str = "token",
    upper: float | None = 2.0,
    normalise: bool = False,
    clamp: float = CLAMP,
) -> Float[Tensor, "batch time"]:
    """Return frozen truncated weights, 0 where the mask is 0.

    ::

        token     w_t = min(exp(d_t), C)               sequence   w_t = min(exp(sum_t d_t), C) for every token

    Args:
        log_ratio: d, from `ratios.log_ratios`.
        mask: 1 on the response's own tokens.
        level: "token" or "sequence".
        upper: C; None truncates nothing.
        normalise: Divide by the mean weight after truncation: of all own tokens, or of the responses that have any.
        clamp: Largest |log ratio| before exp, in nats.

    Raises:
        ParameterError: If an option is out of range or the shapes do not match.

    Source: rollout correction: Token-TIS and Seq-TIS, with batch normalisation.
    """
    owner = "importance_weights"
    own, log_ratio = check_log_ratio(log_ratio, mask, owner)
    check_choice("level", owner, level, ("token", "sequence"))
    if level == "token":
        weights, units = token_ratios(log_ratio, own, clamp=clamp), own
    else:
        weights, units = sequence_ratios(log_ratio, own, clamp=clamp).unsqueeze(1), own.any(1, keepdim=True)
    if upper is not None:
        weights = truncate(weights, upper)
    if normalise:
        # Weights are at least exp(-clamp), so only a batch without tokens has mean 0.
        weights = weights / masked_mean(weights, units).clamp(min=torch.finfo(weights.dtype).tiny)
    return torch.where(own, weights, 0.0)


@torch.no_grad()
def geometric_mask(
    log_ratio: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    *,
    lower: float = 0.5,
    upper: float = 2.0,
) -> Bool[Tensor, "batch time"]:
    """Keep the responses whose geometric ratio exp(mean_t d_t) lies in [lower, upper].

    Length-neutral: repeating a response's ratios k times changes nothing, while the product leaves any interval at
    length log C / |mean d|. The published interval is [0.5, 2]; [0.999, 1.001] is a common strict one.

    Args:
        log_ratio: d, from `ratios.log_ratios`.
        mask: 1 on the response's own tokens.
        lower: Smallest ratio kept.
        upper: Largest ratio kept.

    Raises:
        ParameterError: If an own log-ratio is not finite, an option is out of range or the shapes do not match.

    Source: When Speed Kills Stability, part 3, Geo-Mask.
    """
    own, log_ratio = check_log_ratio(log_ratio, mask, "geometric_mask")
    lower, upper = _bounds("geometric_mask", lower, upper)
    return own & _within_ratio(masked_mean(log_ratio, own, dim=1), lower, upper).unsqueeze(1)


@torch.no_grad()
def rejection_mask(
    log_ratio: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    options: str,
    thresholds: float | str,
) -> Bool[Tensor, "batch time"]:
    """Keep what passes every listed test on k1 = -d, k2 = d^2 / 2 or k3 = exp(d) - 1 - d.

    `token_*` judges each token; `seq_sum_*`, `seq_mean_*` and `seq_max_*` judge a response by the sum, mean or maximum
    over its own tokens and keep or drop it as a whole.

    A threshold of k2 or k3 is the largest value kept. For k1 it is an interval of the ratio, "lower_upper", inclusive:
    of rho_t (token), rho (sum) or the geometric ratio (mean); a single number u means [1 / u, u]. Another widespread
    implementation applies these bounds to 1 / ratio, which agrees for such reciprocal intervals only.

    Args:
        log_ratio: d, from `ratios.log_ratios`.
        mask: 1 on the response's own tokens.
        options: One or more of `REJECTIONS`, separated by commas; all must hold.
        thresholds: One per option, separated by commas; a single one serves all.

    Raises:
        ParameterError: If an option is unknown, a threshold cannot be read or their numbers differ.

    Source: rollout correction: rejection sampling by K1, K2, K3.
    """
    owner = "rejection_mask"
    own, log_ratio = check_log_ratio(log_ratio, mask, owner)
    keep = own
    for level, estimator, lower, upper in read_tests(owner, options, thresholds):
        statistic = _LEVELS[level](ESTIMATORS[estimator](log_ratio), own)
        passed = _within_ratio(-statistic, lower, upper) if estimator == "k1" else statistic <= upper
        keep = keep & (passed if level == "token" else passed.unsqueeze(1))
    return keep


def read_tests(owner: str, options: str, thresholds: float | str) -> list[tuple[str, str, float, float]]:
    """Return (level, estimator, lower, upper) of every test that `rejection_mask` is asked for.

    Raises:
        ParameterError: If an option is unknown, a threshold cannot be read or their numbers differ.
    """
    names = [name.strip() for name in str(options).split(",")]
    limits = [limit.strip() for limit in str(thresholds).split(",")]
    if len(limits) not in (1, len(names)):
        raise ParameterError("thresholds", owner, f"be one, or one per option ({len(names)})", repr(thresholds))
    tests = []
    for name, limit in zip(names, limits * len(names) if len(limits) == 1 else limits, strict=True):
        level, _, estimator = check_choice("options", owner, name, REJECTIONS).rpartition("_")
        bounds = _read_interval(owner, limit) if estimator == "k1" else (0.0, _read(owner, limit))
        tests.append((level, estimator, *bounds))
    return tests


def _bounds(owner: str, lower: float, upper: float) -> tuple[float, float]:
    upper = check_real("upper", owner, upper, above=0.0)
    return check_real("lower", owner, lower, at_least=0.0, at_most=upper), upper


def _within_ratio(log_ratio: Tensor, lower: float, upper: float) -> Tensor:
    """Compare in logarithms: a ratio equal to a bound has its very logarithm, while exp(log x) may miss x."""
    return (log_ratio >= (math.log(lower) if lower > 0 else -math.inf)) & (log_ratio <= math.log(upper))


def _read(owner: str, text: str) -> float:
    try:
        # Python reads "1_5" as 15, which would turn an interval into a number.
        value = math.nan if "_" in text else float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ParameterError("thresholds", owner, 'be numbers >= 0, or "lower_upper" for k1', repr(text))
    return value


def _read_interval(owner: str, text: str) -> tuple[float, float]:
    first, separator, second = text.partition("_")
    if separator:
        return _bounds(owner, _read(owner, first), _read(owner, second))
    upper = check_real("thresholds", owner, _read(owner, first), at_least=1.0)
    return 1 / upper, upper


_LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda values, own: values,
    "seq_sum": lambda values, own: masked_sum(values, own, dim=1),
    "seq_mean": lambda values, own: masked_mean(values, own, dim=1),
    "seq_max": lambda values, own: masked_max(values, own, dim=1),
}
