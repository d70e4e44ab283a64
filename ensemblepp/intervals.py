"""Bootstrap intervals over replicas: how far the reported figure could move if the runs were drawn again.

Why an expanded percentile bootstrap. The percentile interval exists for all three statistics here; BCa does not (its
acceleration comes from the jackknife, which is inconsistent for the median and undefined when all values agree). The
plain percentile interval is too short for few replicas: it uses normal instead of Student tails and the divisor n
instead of n - 1. Both are undone by widening the level of the quantiles,

    alpha' / 2 = Phi(-sqrt(n / (n - 1)) * t[n - 1, 1 - alpha / 2]),

which fades out as n grows. Coverage is then close to nominal from about five replicas on. No resampling can make up
for two or three: their interval ends at the smallest and largest value, which holds a normal mean in 1/2 and 3/4 of
cases.

Source: Hesterberg (arXiv 1411.5279), "What Teachers Should Know About the Bootstrap", expanded percentile interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from ensemblepp.errors import ParameterError, check_choice, check_int, check_real

Statistic: TypeAlias = str
"""A key of `STATISTIC_NAMES`: "mean", "iqm" or "median". A plain string, as it arrives from command lines."""
Array: TypeAlias = NDArray[np.float64]

STATISTIC_NAMES = {"mean": "mean", "iqm": "interquartile mean", "median": "median"}
NUM_RESAMPLES = 9999
BAND_RESAMPLES = 1000
_BLOCK_VALUES = 4_000_000  # resampled values held at once: 32 MB


@dataclass(frozen=True)
class Interval:
    """An estimate over replicas and its bootstrap interval.

    Attributes:
        estimate: The statistic of the finite values; NaN when there are none.
        low: Lower end; None when fewer than two finite values leave no spread to resample.
        high: Upper end; None as `low`.
        count: Finite values that entered the estimate.
        missing: NaN or infinite values that were left out.
    """

    estimate: float
    low: float | None
    high: float | None
    count: int
    missing: int

    def __str__(self) -> str:
        """Return e.g. "12.3 [11.9, 12.8]", rounded to what the interval's width supports."""
        if self.count == 0:
            text = "no finite value"
        elif self.low is None or self.high is None:
            text = f"{self.estimate:.4g} (one value, no interval)"
        elif self.low == self.high:
            text = f"{self.estimate:.4g} [{self.low:.4g}, {self.high:.4g}]"
        else:
            decimals = min(12, max(0, -math.floor(math.log10((self.high - self.low) / 6))))
            estimate, low, high = (
                # Adding zero turns -0.0 into 0.0.
                f"{round(value, decimals) + 0.0:.{decimals}f}"
                for value in (self.estimate, self.low, self.high)
            )
            text = f"{estimate} [{low}, {high}]"
        return text + (f" ({self.missing} missing)" if self.missing else "")


def compute_statistic(values: ArrayLike, statistic: Statistic = "mean", axis: int = -1) -> Any:
    """Reduce finite values along one axis.

    Args:
        values: Finite numbers.
        statistic: "mean"; "iqm", the mean of the middle half (a quarter of the values cut off at each end, rounded
            down to whole values); or "median". Raising robustness in this order costs precision on well-behaved data.
        axis: The axis to reduce.

    Returns:
        `values` without `axis`.

    Raises:
        ParameterError: If `statistic` is unknown.
    """
    array = np.asarray(values, dtype=np.float64)
    check_choice("statistic", "compute_statistic", statistic, STATISTIC_NAMES)
    if statistic == "mean":
        return array.mean(axis=axis)
    if statistic == "median":
        return np.median(array, axis=axis)
    return stats.trim_mean(array, 0.25, axis=axis)


def bootstrap_interval(
    values: ArrayLike,
    statistic: Statistic = "mean",
    confidence: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Estimate a statistic over replicas with an expanded percentile bootstrap interval (see the module text).

    Args:
        values: One number per replica, shape (replicas,). NaN and infinity are counted as missing and left out.
        statistic: "mean", "iqm" (interquartile mean) or "median".
        confidence: Coverage asked for; raising it widens the interval.
        num_resamples: Bootstrap resamples; raising it steadies the ends at proportional cost.
        seed: Seed of the resampling, so that equal values give an equal interval.

    Returns:
        The interval: without ends for fewer than two finite values, of zero width when all values agree.

    Raises:
        ParameterError: If `values` is empty or not one-dimensional, or an option is out of range.

    Source: Hesterberg (arXiv 1411.5279), expanded percentile interval.
    """
    owner = "bootstrap_interval"
    array = _check_values("values", owner, values, ndim=1)
    _check_options(owner, statistic, confidence, num_resamples, seed)
    finite = array[np.isfinite(array)]
    count, missing = len(finite), len(array) - len(finite)
    if count == 0:
        return Interval(math.nan, None, None, count, missing)
    if np.all(finite == finite[0]):
        # Without this a mean of equal values could differ from the value in its last digit.
        value = float(finite[0])
        end = value if count > 1 else None
        return Interval(value, end, end, count, missing)
    estimate = float(compute_statistic(finite, statistic))
    low, high = _bootstrap_ends(finite[:, None], statistic, confidence, num_resamples, seed)
    return Interval(estimate, float(low[0]), float(high[0]), count, missing)


def bootstrap_band(
    curves: ArrayLike,
    statistic: Statistic = "mean",
    confidence: float = 0.95,
    num_resamples: int = BAND_RESAMPLES,
    seed: int = 0,
) -> tuple[Array, Array, Array]:
    """Estimate a statistic over replicas at every point of a curve, with pointwise intervals.

    A replica with a NaN or infinite value anywhere is left out everywhere, so that the centre never jumps where a
    replica drops out. Every point sees the same resamples of replicas, so the band is as smooth as the curves.

    Args:
        curves: Shape (replicas, points).
        statistic: See `bootstrap_interval`.
        confidence: Pointwise coverage asked for.
        num_resamples: Bootstrap resamples; raising it steadies the band at proportional cost.
        seed: Seed of the resampling.

    Returns:
        Centre, low and high, each of shape (points,). Low and high are NaN for fewer than two finite replicas, and
        all three are NaN for none.

    Raises:
        ParameterError: If `curves` is empty or not two-dimensional, or an option is out of range.
    """
    owner = "bootstrap_band"
    array = _check_values("curves", owner, curves, ndim=2)
    _check_options(owner, statistic, confidence, num_resamples, seed)
    finite = array[np.isfinite(array).all(axis=1)]
    empty = np.full(array.shape[1], np.nan)
    if len(finite) == 0:
        return empty, empty.copy(), empty.copy()
    center = np.asarray(compute_statistic(finite, statistic, axis=0))
    if len(finite) == 1:
        return center, empty, empty.copy()
    low, high = _bootstrap_ends(finite, statistic, confidence, num_resamples, seed)
    return center, low, high


def paired_difference(
    values_a: ArrayLike,
    values_b: ArrayLike,
    statistic: Statistic = "mean",
    confidence: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Estimate how far `values_a` lies above `values_b` over replicas that share their seeds.

    The statistic is taken of the differences a_i - b_i, so what both runs owe to the same problem draw cancels. A
    pair with a NaN or infinite value on either side is left out and counted once as missing.

    Args:
        values_a: Shape (replicas,).
        values_b: Shape (replicas,); entry i comes from the same seed as entry i of `values_a`.
        statistic: See `bootstrap_interval`.
        confidence: See `bootstrap_interval`.
        num_resamples: See `bootstrap_interval`.
        seed: See `bootstrap_interval`.

    Returns:
        The interval of the differences.

    Raises:
        ParameterError: If the two are not of one length, or as in `bootstrap_interval`.
    """
    owner = "paired_difference"
    first = _check_values("values_a", owner, values_a, ndim=1)
    second = _check_values("values_b", owner, values_b, ndim=1)
    if len(first) != len(second):
        raise ParameterError("values_b", owner, f"have as many values as values_a ({len(first)})", len(second))
    both = np.isfinite(first) & np.isfinite(second)
    # Masked first: infinity minus infinity would warn.
    difference = np.full(len(first), np.nan)
    difference[both] = first[both] - second[both]
    return bootstrap_interval(difference, statistic, confidence, num_resamples, seed)


def _bootstrap_ends(
    sample: Array, statistic: Statistic, confidence: float, num_resamples: int, seed: int
) -> tuple[Array, Array]:
    """Return the expanded percentile ends (points,) of a finite sample (replicas, points) of two or more replicas."""
    count, num_points = sample.shape
    alpha = 1.0 - confidence
    tail = stats.norm.cdf(-math.sqrt(count / (count - 1)) * stats.t.ppf(1.0 - alpha / 2, count - 1))
    reduce = cast(Callable[..., Any], lambda data, axis: compute_statistic(data, statistic, axis))
    result = stats.bootstrap(
        (sample,),
        reduce,
        axis=0,
        vectorized=True,
        n_resamples=num_resamples,
        batch=max(1, _BLOCK_VALUES // (count * num_points)),
        confidence_level=1.0 - 2.0 * tail,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    ends = result.confidence_interval
    return np.asarray(ends.low, dtype=np.float64), np.asarray(ends.high, dtype=np.float64)


def _check_values(name: str, owner: str, values: ArrayLike, *, ndim: int) -> Array:
    """Return `values` as a float64 array of `ndim` axes, none of them empty."""
    axes = "(replicas,)" if ndim == 1 else "(replicas, points)"
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ParameterError(name, owner, f"be numbers of shape {axes}", type(values).__name__) from None
    if array.ndim != ndim or array.size == 0:
        raise ParameterError(name, owner, f"have shape {axes} with at least one value", f"shape {array.shape}")
    return array


def _check_options(owner: str, statistic: str, confidence: float, num_resamples: int, seed: int) -> None:
    """Validate the options that all three estimators share."""
    check_choice("statistic", owner, statistic, STATISTIC_NAMES)
    if check_real("confidence", owner, confidence, above=0.0, at_most=1.0) == 1.0:
        raise ParameterError("confidence", owner, "be below 1", confidence)
    check_int("num_resamples", owner, num_resamples, minimum=100)
    check_int("seed", owner, seed, minimum=0)
