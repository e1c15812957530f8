"""Estimates and intervals, over problems and over starts, against numbers worked by hand."""

from math import nan, sqrt

import numpy as np
import pytest
from scipy.stats import beta, binomtest

from tango_jax.tracking.intervals import (
    Z_95,
    bootstrap_means,
    difference,
    estimate,
    estimate_from_sums,
    estimate_of,
    gap_share,
    mean_draws,
    mean_over_sets,
    paired,
    paired_differences,
    ratio,
    wilson,
)

# ---------------------------------------------------------------------------------------------- over problems


def test_wilson():
    z2 = Z_95**2
    assert wilson(0.0, 30) == pytest.approx((0, z2 / (30 + z2)))  # 0 to 11.4 %
    assert wilson(1.0, 30) == pytest.approx((30 / (30 + z2), 1))
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert np.isnan(wilson(nan, 0)).all()


@pytest.mark.parametrize("num_true, count", [(0, 30), (30, 30), (3, 10), (1, 1), (499, 500)])
def test_wilson_is_that_of_scipy(num_true, count):
    expected = binomtest(num_true, count).proportion_ci(0.95, method="wilson")
    assert wilson(num_true / count, count) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("num_true, count", [(0, 30), (30, 30), (3, 10), (1, 5), (499, 500)])
def test_the_bootstrap_of_a_share_is_nearly_wilsons(num_true, count):
    """One more problem that is right and one that is wrong make it a posterior with a uniform prior."""
    (found,) = bootstrap_means(np.repeat([1.0, 0.0], [num_true, count - num_true])[:, None])
    low, high = wilson(num_true / count, count)
    assert found.value == num_true / count and 0 <= found.low <= found.value <= found.high <= 1
    posterior = beta(num_true + 1, count - num_true + 1)
    bounds = min(posterior.ppf(0.025), found.value), max(posterior.ppf(0.975), found.value)
    assert (found.low, found.high) == pytest.approx(bounds, abs=0.02)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.04)


def test_means_come_with_the_spread_over_problems():
    values_OA = np.stack([np.repeat([0.0, 1.0], 200), np.full(400, 0.25), np.zeros(400)], axis=1)
    half, quarter, none = bootstrap_means(values_OA)
    error = 1.96 * 0.5 / sqrt(400)  # of the mean of 400 fair coins
    assert half.value == 0.5 and (half.low, half.high) == pytest.approx((0.5 - error, 0.5 + error), abs=8e-3)
    assert quarter.low < 0.25 < quarter.high  # means that are all alike are not certain
    assert none == pytest.approx((0, *wilson(0.0, 400)), abs=1e-3)
    assert bootstrap_means(values_OA) == [half, quarter, none]  # the same rows, the same table
    assert np.isnan(bootstrap_means(np.zeros((0, 2)))).all()


def test_differences_are_paired():
    """The problems differ much, the rules by 0.1 or 0.2 on each: the difference is 0.15, give or take 0.01."""
    baseline_N = np.repeat([0.0, 0.8], 50)
    above, same = paired_differences(np.stack([baseline_N + np.tile([0.1, 0.2], 50), baseline_N], axis=1), baseline_N)
    assert above == pytest.approx((0.15, 0.14, 0.16), abs=2e-3)
    assert same.value == 0 and np.isnan(same[1:]).all()  # rows that are all alike say nothing of others


def test_a_figure_of_sums_and_its_undetermined_resamples():
    def ratio(sums_JA):
        with np.errstate(invalid="ignore"):
            return sums_JA[:, 0] / sums_JA[:, 1]

    estimate = estimate_from_sums(np.array([[1.0, 2.0], [2.0, 2.0], [0.0, 0.0]]), ratio)
    # Of weights w and v it is (w + 2 v) / (2 w + 2 v) = 1/2 + v / (w + v) / 2, and v / (w + v) is uniform.
    assert estimate == pytest.approx((3 / 4, 0.5125, 0.9875), abs=5e-3)
    assert np.isnan(estimate_of(0.5, np.array([nan, nan]))[1:]).all() and np.isnan(estimate_of(nan, np.ones(2))).all()


def test_the_average_of_sets_is_surer_than_each():
    columns_OA = np.repeat([0.0, 1.0], 100)[:, None]
    (alone,), draws_J = bootstrap_means(columns_OA), mean_draws(columns_OA)[:, 0]
    mean = mean_over_sets([0.5] * 4, [draws_J] * 4)
    assert mean.value == 0.5 and (mean.high - mean.low) == pytest.approx((alone.high - alone.low) / 2, rel=0.1)


def test_a_set_without_a_success_is_not_certain_in_an_average():
    """The interval of 0 of 30 is [0, 0.112]; the one of two such sets together is narrower."""
    none, half, every = (mean_draws(np.array(outcomes, float)[:, None])[:, 0]
                         for outcomes in ([0] * 30, [0, 1] * 15, [1] * 30))
    alone, whole = mean_over_sets([0.0], [none]), mean_over_sets([1.0], [every])
    assert alone == pytest.approx((0, 0, 0.112), abs=0.006) and whole == pytest.approx((1, 0.888, 1), abs=0.006)
    both = mean_over_sets([0.0, 0.0], [none, none])
    assert (both.value, both.low) == (0, 0) and 0.06 < both.high < 0.11
    certain, mean = mean_over_sets([0.0, 0.5], [np.zeros(2000), half]), mean_over_sets([0.0, 0.5], [none, half])
    assert mean.value == 0.25 and mean.high > certain.high + 0.003


# ------------------------------------------------------------------------------------------------ over starts


ONE_START = tuple((0, seed) for seed in range(8))
THREE_STARTS = tuple((start, seed) for start in range(3) for seed in range(4))


def test_with_one_start_the_interval_is_that_of_the_seeds():
    found = estimate({unit: float(number) for number, unit in enumerate(ONE_START, 1)})
    # 1 to 8: variance 6; Student's t with 7 degrees of freedom has 2.5 % above 2.3646.
    half = 2.3646 * np.sqrt(6 / 8)
    assert found == pytest.approx((4.5, 4.5 - half, 4.5 + half), rel=1e-4)


def test_with_several_starts_the_interval_is_that_of_their_means():
    values = {(start, seed): 10.0 * start + seed for start, seed in THREE_STARTS}  # means 1.5, 11.5 and 21.5
    half = 4.3027 * 10 / np.sqrt(3)
    assert difference(values, dict.fromkeys(values, 0.0)) == pytest.approx((11.5, 11.5 - half, 11.5 + half), rel=1e-4)
    apart = {(number, 0): value for number, value in enumerate(values.values())}
    assert estimate(apart).high - estimate(apart).low < 2 * half  # runs alone would pretend to know more


@pytest.mark.parametrize("starts, seeds", [(3, 4), (5, 2), (1, 6)])
def test_intervals_hold_for_few_starts(starts, seeds):
    """In nine to ten of ten experiments, about 95 %, the interval has the true mean; a bootstrap of three starts has it
    in 82 %."""
    rng = np.random.default_rng(0)
    held = []
    for _ in range(2000):
        own = rng.normal(size=starts) * (starts > 1)  # what the starts have in common, which one alone cannot tell
        values = {(start, seed): own[start] + 0.3 * rng.normal() for start in range(starts) for seed in range(seeds)}
        _, low, high = difference(values, dict.fromkeys(values, 0.0))
        held.append(low <= 0.0 <= high)
    assert np.mean(held) == pytest.approx(0.95, abs=0.02)


def test_no_interval_leaves_the_range_of_its_measure():
    values = {(start, 0): value for start, value in enumerate((0.1, 0.9, 0.95))}
    found = estimate(values, most=1.0)
    assert (found.low, found.high) == (0.0, 1.0)


def test_pairing_takes_out_what_arms_have_in_common():
    hard = {unit: 10.0 * number for number, unit in enumerate(ONE_START)}
    easier = {unit: value - 3.0 - 0.25 * (number % 2) for number, (unit, value) in enumerate(hard.items())}
    found = difference(easier, hard)
    assert found.value == pytest.approx(-3.125)
    assert -3.25 <= found.low < found.high <= -3.0
    apart = estimate(hard)
    assert apart.high - apart.low > 30


def test_only_units_that_all_arms_have_are_compared():
    units, values_UK = paired({(0, 0): 1.0, (0, 1): 2.0, (0, 2): 3.0}, {(0, 2): 6.0, (0, 0): 8.0})
    assert units == [(0, 0), (0, 2)] and values_UK.tolist() == [[1.0, 8.0], [3.0, 6.0]]
    assert ratio({(0, 0): 1.0, (0, 1): 9.0}, {(0, 0): 4.0}).value == 0.25


def test_a_ratio_is_one_of_means():
    found = ratio({(0, 0): 10.0, (0, 1): 20.0}, {(0, 0): 20.0, (0, 1): 80.0})
    assert found.value == pytest.approx(15 / 50)  # and not the mean of 0.5 and 0.25
    # Residuals 10 - 0.3 * 20 = 4 and 20 - 0.3 * 80 = -4 over the mean of 50: 0.08 and -0.08, standard error 0.08.
    half = 12.7062 * 0.08 / 0.3
    assert (found.low, found.high) == pytest.approx((0.3 * np.exp(-half), 0.3 * np.exp(half)), rel=1e-3)


def test_the_share_of_a_gap():
    low = {unit: 0.2 + 0.01 * unit[1] for unit in ONE_START}
    high = {unit: 0.6 + 0.02 * unit[1] for unit in ONE_START}
    middle = {unit: low[unit] + 0.75 * (high[unit] - low[unit]) for unit in ONE_START}
    found = gap_share(middle, low, high)
    assert found.value == pytest.approx(0.75)
    assert np.isnan(found.low)  # all runs say the same, which is no certainty
    assert np.isnan(gap_share(middle, low, {unit: value + 0.01 * (-1) ** unit[1] for unit, value in low.items()}).value)


def test_a_gap_that_may_be_none_has_no_share_where_runs_are_enough_to_tell():
    low = {unit: 0.2 for unit in ONE_START}
    high = {unit: 0.2 + 0.1 * (-1) ** unit[1] + 0.01 for unit in ONE_START}
    assert np.isnan(gap_share(high, low, high).value)
    few = ONE_START[:3]  # of which no interval is shown
    assert gap_share({unit: high[unit] for unit in few}, low, high).value == pytest.approx(1.0)


def test_no_interval_without_variation():
    alike = estimate(dict.fromkeys(ONE_START, 0.3))
    assert alike.value == pytest.approx(0.3) and np.isnan([alike.low, alike.high]).all()
    one = estimate({(0, 0): 2.0})
    assert one.value == 2.0 and np.isnan(one.low)
    assert np.isnan(estimate({})).all()
