"""Estimates and intervals against numbers worked by hand."""

from math import nan, sqrt

import numpy as np
import pytest

from tango_jax.evaluation.statistics import (
    bootstrap_means,
    estimate_from_sums,
    mean_over_sets,
    paired_differences,
    pass_at_k,
    percentile_interval,
    reported_sample_counts,
    resample,
    share_draws,
    share_of,
)
from tango_jax.tracking.scores import wilson


@pytest.mark.parametrize("n, c, k, expected", [
    (4, 1, 1, 1 / 4), (4, 1, 2, 1 / 2), (4, 1, 4, 1), (5, 2, 3, 9 / 10), (6, 3, 2, 4 / 5), (8, 0, 8, 0), (3, 3, 1, 1),
    (10, 8, 3, 1),
])  # fmt: skip
def test_pass_at_k(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected)


def test_the_axis_doubles_and_ends_with_all():
    assert [reported_sample_counts(n) for n in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_shares():
    assert share_of([True] * 3 + [False] * 7) == pytest.approx((0.3, *wilson(0.3, 10)))
    assert np.isnan(share_of([])).all()


def test_means_come_with_the_spread_over_problems():
    values_NC = np.stack([np.repeat([0.0, 1.0], 200), np.full(400, 0.25), np.zeros(400)], axis=1)
    half, quarter, none = bootstrap_means(values_NC)
    error = 1.96 * 0.5 / sqrt(400)  # of the mean of 400 fair coins
    assert half.value == 0.5 and (half.low, half.high) == pytest.approx((0.5 - error, 0.5 + error), abs=8e-3)
    assert quarter == pytest.approx((0.25, *wilson(0.25, 400))) and none == pytest.approx((0, *wilson(0.0, 400)))
    assert bootstrap_means(values_NC) == [half, quarter, none]  # the same rows, the same table
    assert np.isnan(bootstrap_means(np.zeros((0, 2)))).all()


def test_differences_are_paired():
    """The problems differ much, the rules by 0.1 or 0.2 on each: the difference is 0.15, give or take 0.01."""
    baseline_N = np.repeat([0.0, 0.8], 50)
    above, same = paired_differences(np.stack([baseline_N + np.tile([0.1, 0.2], 50), baseline_N], axis=1), baseline_N)
    assert above == pytest.approx((0.15, 0.14, 0.16), abs=2e-3)
    assert same.value == 0 and np.isnan(same[1:]).all()  # rows that are all alike say nothing of others


def test_a_figure_of_sums_and_its_undetermined_resamples():
    def ratio(sums_RC):
        with np.errstate(invalid="ignore"):
            return sums_RC[:, 0] / sums_RC[:, 1]

    estimate = estimate_from_sums(np.array([[1.0, 2.0], [2.0, 2.0], [0.0, 0.0]]), ratio)
    assert estimate.value == 3 / 4 and (estimate.low, estimate.high) == (0.5, 1.0)
    assert np.isnan(percentile_interval(np.array([nan, nan]))).all()


def test_the_average_of_sets_is_surer_than_each():
    columns_NC = np.repeat([0.0, 1.0], 100)[:, None]
    draws_R = resample(columns_NC, lambda sums_RC: sums_RC[:, 0] / 200)
    low, high = percentile_interval(draws_R)
    mean = mean_over_sets([0.5] * 4, [draws_R] * 4)
    assert mean.value == 0.5 and (mean.high - mean.low) == pytest.approx((high - low) / 2, rel=0.1)


def test_a_set_without_a_success_is_not_certain_in_an_average():
    """Jeffreys' interval of 0 of 30 is [0, 0.080], that of two such sets together narrower."""
    none, half = share_draws([False] * 30), share_draws([True, False] * 15)
    alone, whole = mean_over_sets([0.0], [none]), mean_over_sets([1.0], [share_draws([True] * 30)])
    assert alone == pytest.approx((0, 0, 0.080), abs=0.004) and whole == pytest.approx((1, 0.920, 1), abs=0.004)
    both = mean_over_sets([0.0, 0.0], [none, none])
    assert (both.value, both.low) == (0, 0) and 0.04 < both.high < 0.08
    certain, mean = mean_over_sets([0.0, 0.5], [np.zeros(2000), half]), mean_over_sets([0.0, 0.5], [none, half])
    assert mean.value == 0.25 and mean.high > certain.high + 0.003
