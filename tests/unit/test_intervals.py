from __future__ import annotations

import math

import numpy as np
import pytest

from ensemblepp.errors import ParameterError
from ensemblepp.intervals import (
    Interval,
    bootstrap_band,
    bootstrap_interval,
    compute_statistic,
    paired_difference,
)


def test_statistics_match_hand_computed_numbers():
    values = [0.0, 1.0, 2.0, 3.0, 100.0, 4.0, 5.0, 6.0]
    # Sorted: 0 1 | 2 3 4 5 | 6 100; the interquartile mean drops two values at each end.
    assert compute_statistic(values, "mean") == pytest.approx(121 / 8)
    assert compute_statistic(values, "iqm") == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert compute_statistic(values, "median") == pytest.approx(3.5)


def test_statistic_reduces_the_named_axis():
    values = np.arange(12.0).reshape(4, 3)
    for statistic in ("mean", "iqm", "median"):
        expected = [compute_statistic(column, statistic) for column in values.T]
        np.testing.assert_allclose(compute_statistic(values, statistic, axis=0), expected)


@pytest.mark.parametrize("statistic", ["mean", "iqm", "median"])
def test_two_values_give_an_interval_from_the_smaller_to_the_larger(statistic):
    # The corrected level is 1 to machine precision, so the ends are the extreme resamples (a, a) and (b, b).
    assert bootstrap_interval([1.0, 4.0], statistic) == Interval(2.5, 1.0, 4.0, 2, 0)


def test_large_samples_agree_with_the_normal_interval():
    values = np.random.default_rng(0).normal(3.0, 2.0, size=400)
    half = 1.96 * values.std(ddof=1) / math.sqrt(len(values))
    interval = bootstrap_interval(values)
    assert interval.low is not None
    assert interval.high is not None
    # The ends are quantiles of 9999 resamples: their Monte Carlo error is about 3 % of the half-width.
    assert interval.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.1 * half)


@pytest.mark.parametrize("statistic", ["mean", "iqm", "median"])
def test_equal_values_give_zero_width_and_the_value_itself(statistic):
    # 0.1 + 0.1 + 0.1 divided by 3 is not 0.1 in floating point.
    assert bootstrap_interval([0.1, 0.1, 0.1], statistic) == Interval(0.1, 0.1, 0.1, 3, 0)


def test_one_value_has_no_interval():
    assert bootstrap_interval([2.0]) == Interval(2.0, None, None, 1, 0)


def test_nan_and_infinity_are_counted_and_left_out():
    clean = bootstrap_interval([1.0, 2.0, 4.0])
    holed = bootstrap_interval([1.0, math.nan, 2.0, math.inf, 4.0, -math.inf])
    assert holed == Interval(clean.estimate, clean.low, clean.high, 3, 3)
    assert bootstrap_interval([math.nan, 5.0]) == Interval(5.0, None, None, 1, 1)
    nothing = bootstrap_interval([math.nan])
    assert math.isnan(nothing.estimate)
    assert (nothing.low, nothing.count, nothing.missing) == (None, 0, 1)


def test_equal_input_gives_equal_output_and_the_seed_matters():
    values = np.random.default_rng(1).gamma(2.0, size=20)
    assert bootstrap_interval(values, "iqm") == bootstrap_interval(values.tolist(), "iqm")
    assert bootstrap_interval(values, seed=0) != bootstrap_interval(values, seed=1)


def test_global_generator_is_untouched():
    state = np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
    bootstrap_interval([1.0, 2.0, 4.0])
    np.testing.assert_array_equal(state, np.random.get_state()[1])  # type: ignore[index]


def test_more_confidence_widens_the_interval():
    values = np.random.default_rng(2).normal(size=30)
    narrow, wide = bootstrap_interval(values, confidence=0.5), bootstrap_interval(values, confidence=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high  # type: ignore[operator]


@pytest.mark.statistical
@pytest.mark.parametrize("count", [5, 12, 50])
def test_interval_covers_a_normal_mean_as_often_as_it_says(count):
    repetitions = 400
    samples = np.random.default_rng(3).normal(1.5, 2.0, size=(repetitions, count))
    hits = 0
    for repetition, sample in enumerate(samples):
        interval = bootstrap_interval(sample, num_resamples=999, seed=repetition)
        hits += interval.low <= 1.5 <= interval.high  # type: ignore[operator]
    # Nominal 0.95, less a known shortfall of up to 0.03 at five values; 4 standard errors with n = 400. The plain
    # percentile interval covers 0.83 at five values and fails this.
    standard_error = math.sqrt(0.95 * 0.05 / repetitions)
    shortfall = 0.03 if count == 5 else 0.01
    assert 0.95 - shortfall - 4 * standard_error < hits / repetitions < 0.95 + 4 * standard_error


@pytest.mark.parametrize("statistic", ["mean", "iqm", "median"])
def test_band_equals_the_interval_at_every_point(statistic):
    curves = np.random.default_rng(4).normal(size=(12, 7)).cumsum(axis=1)
    center, low, high = bootstrap_band(curves, statistic, num_resamples=500, seed=9)
    for point in range(curves.shape[1]):
        interval = bootstrap_interval(curves[:, point], statistic, num_resamples=500, seed=9)
        np.testing.assert_allclose(
            [center[point], low[point], high[point]], [interval.estimate, interval.low, interval.high], rtol=1e-12
        )


def test_band_does_not_depend_on_how_the_points_are_batched(monkeypatch):
    curves = np.random.default_rng(5).normal(size=(10, 20))
    whole = bootstrap_band(curves)
    monkeypatch.setattr("ensemblepp.intervals._BLOCK_VALUES", 10 * 20 * 7)
    np.testing.assert_array_equal(whole, bootstrap_band(curves))


def test_band_drops_a_broken_replica_at_every_point():
    curves = np.array([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0], [9.0, 9.0, math.nan]])
    center, low, high = bootstrap_band(curves)
    np.testing.assert_array_equal(center, [2.0, 3.0, 4.0])
    np.testing.assert_array_equal(low, [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(high, [3.0, 4.0, 5.0])


def test_band_of_one_or_no_replica_has_no_ends():
    center, low, high = bootstrap_band([[1.0, 2.0]])
    np.testing.assert_array_equal(center, [1.0, 2.0])
    assert np.isnan(low).all()
    assert np.isnan(high).all()
    assert np.isnan(bootstrap_band([[1.0, math.nan]])).all()


def test_paired_difference_cancels_what_both_share():
    shared = np.random.default_rng(6).normal(scale=100.0, size=20)
    assert paired_difference(shared + 2.0, shared).estimate == pytest.approx(2.0)
    interval = paired_difference([1.0, 2.0, 9.0, math.inf], [0.0, math.nan, 6.0, math.inf])
    assert interval == Interval(2.0, 1.0, 3.0, 2, 2)


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(12.34, 11.91, 12.82, 20, 0), "12.3 [11.9, 12.8]"),
        (Interval(12.34, 11.91, 12.82, 20, 2), "12.3 [11.9, 12.8] (2 missing)"),
        (Interval(12345.6, 12000.2, 12700.7, 20, 0), "12346 [12000, 12701]"),
        (Interval(0.00123, 0.00120, 0.00126, 20, 0), "0.00123 [0.00120, 0.00126]"),
        (Interval(-0.001, -3.0, 3.0, 20, 0), "0 [-3, 3]"),
        (Interval(0.5, 0.5, 0.5, 3, 0), "0.5 [0.5, 0.5]"),
        (Interval(7.0, None, None, 1, 1), "7 (one value, no interval) (1 missing)"),
        (Interval(math.nan, None, None, 0, 4), "no finite value (4 missing)"),
    ],
)
def test_text_shows_the_digits_that_the_width_supports(interval, text):
    assert str(interval) == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ([],),
            r"values of bootstrap_interval must have shape \(replicas,\) with at least one value; got shape \(0,\)",
        ),
        (([[1.0]],), r"must have shape \(replicas,\)"),
        ((["a"],), r"values of bootstrap_interval must be numbers of shape \(replicas,\); got list"),
        (([1.0], "mode"), "statistic of bootstrap_interval must be one of 'iqm', 'mean', 'median'; got 'mode'"),
        (([1.0], "mean", 1.0), "confidence of bootstrap_interval must be below 1; got 1.0"),
        (([1.0], "mean", 0.0), "confidence of bootstrap_interval must be a finite number > 0|confidence .* got 0.0"),
        (([1.0], "mean", 0.9, 10), "num_resamples of bootstrap_interval must be an int >= 100; got 10"),
        (([1.0], "mean", 0.9, 100, -1), "seed of bootstrap_interval must be an int >= 0; got -1"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ParameterError, match=message):
        bootstrap_interval(*arguments)


def test_pairs_of_unlike_length_are_refused():
    with pytest.raises(ParameterError, match=r"values_b of paired_difference must have as many values .* \(2\); got 1"):
        paired_difference([1.0, 2.0], [1.0])
