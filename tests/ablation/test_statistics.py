"""Measures of curves and their intervals, against numbers worked by hand."""

import numpy as np
import pytest

from support.ablation_cases import curve, evaluation, run_rows
from tango_jax.ablation.statistics import (
    RESAMPLES,
    band_over,
    band_over_steps,
    difference,
    estimate,
    gap_share,
    paired,
    percentile_interval,
    ratio,
    resampled_weights,
)
from tango_jax.tracking.learning_curve import Curve, Reached, curves_by_setting, mean_accuracy, steps_to, tokens_to

# ------------------------------------------------------------------------------------------------ of one curve


@pytest.mark.parametrize("accuracy, expected", [
    ({0: 0.0, 10: 0.6, 20: 1.0}, Reached(15.0, True)),  # half of the way from 0.6 to 1.0
    ({0: 0.0, 10: 0.8, 20: 0.7}, Reached(10.0, True)),
    ({0: 0.0, 10: 0.9, 20: 0.5, 30: 0.9}, Reached(10 * 0.8 / 0.9, True)),  # the first time counts
    ({0: 0.9, 10: 1.0}, Reached(0.0, True)),
    ({0: 0.0, 10: 0.5, 20: 0.79}, Reached(20.0, False)),  # censored at its end
])  # fmt: skip
def test_steps_to_a_level(accuracy, expected):
    found = steps_to(curve(accuracy), 0.8)
    assert found.is_reached == expected.is_reached and found.x == pytest.approx(expected.x)


def test_tokens_to_a_level_include_the_warm_up():
    rows = (evaluation(0, 0.0, turn=0, sampled_tokens=0), evaluation(0, 0.0, turn=5, sampled_tokens=1000),
            evaluation(10, 0.4, turn=15, sampled_tokens=3000), evaluation(20, 1.0, turn=25, sampled_tokens=6000))
    assert tokens_to(Curve(rows), 0.8).x == pytest.approx(3000 + 3000 * 0.4 / 0.6)
    assert steps_to(Curve(rows), 0.8).x == pytest.approx(10 + 10 * 0.4 / 0.6)
    assert tokens_to(Curve(rows[:3]), 0.8) == Reached(3000.0, False)


def test_mean_accuracy_is_the_area_by_trapezoids():
    assert mean_accuracy(curve({0: 0.0, 10: 0.5, 30: 1.0})) == pytest.approx((10 * 0.25 + 20 * 0.75) / 30)
    assert mean_accuracy(curve({0: 0.25})) == 0.25  # the generator stands still


def test_of_several_evaluations_at_a_step_the_last_counts():
    rows = (evaluation(0, 0.1, turn=0), evaluation(0, 0.2, turn=5), evaluation(10, 0.4, turn=15),
            evaluation(10, 0.6, turn=16))  # fmt: skip
    steps, accuracy = Curve(rows).by_step()
    assert (steps.tolist(), accuracy.tolist()) == ([0, 10], [0.2, 0.6])


def test_curves_are_found_by_setting_arm_and_unit():
    rows = [*run_rows("grpo", (0.1, 0.2), start=1, seed=5), *run_rows("tango", (0.3, 0.4), start=1, seed=5),
            *run_rows("grpo", (0.5, 0.6), start=1, seed=5, setting="words=4")]  # fmt: skip
    found = curves_by_setting(reversed(rows))
    assert set(found) == {("last_letter", ""), ("last_letter", "words=4")}
    assert set(found["last_letter", ""]) == {"grpo", "tango"}
    assert found["last_letter", ""]["grpo"][1, 5].of("accuracy").tolist() == [0.1, 0.2]  # in the order of turns
    assert np.isnan(found["last_letter", ""]["grpo"][1, 5].of("alpha")).all()


# ----------------------------------------------------------------------------------------------- resamples


ONE_START = tuple((0, seed) for seed in range(8))
THREE_STARTS = tuple((start, seed) for start in range(3) for seed in range(4))


def test_with_one_start_seeds_are_drawn():
    weights_RU = resampled_weights(ONE_START)
    assert weights_RU.shape == (RESAMPLES, 8)
    assert (weights_RU.sum(axis=1) == 8).all()
    np.testing.assert_allclose(weights_RU.var(axis=0), 8 * (1 / 8) * (7 / 8), rtol=0.1)  # of a multinomial draw


def test_with_several_starts_these_are_drawn_first():
    weights_RU = resampled_weights(THREE_STARTS)
    per_start_RS = weights_RU.reshape(RESAMPLES, 3, 4).sum(axis=2)
    assert (per_start_RS.sum(axis=1) == 12).all() and (per_start_RS % 4 == 0).all()  # whole starts
    # All three draws of starts fall on one start in 3 of 27 cases.
    assert np.mean(per_start_RS.max(axis=1) == 12) == pytest.approx(3 / 27, abs=0.01)
    assert len({tuple(row) for row in weights_RU[:, :4]}) > 50  # and seeds within them


def test_the_interval_of_a_mean_is_that_of_its_spread():
    """The standard error of a mean of 8: half the interval's width is about 1.96 of them."""
    values = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    found = estimate(ONE_START, values[:, None])
    error = values.std() / np.sqrt(8)
    assert found.value == 4.5
    assert found.high - found.value == pytest.approx(1.96 * error, rel=0.1)
    assert found.value - found.low == pytest.approx(1.96 * error, rel=0.1)
    assert estimate(ONE_START, values[:, None]) == found  # the seed is fixed


def test_starts_that_differ_widen_the_interval():
    by_start = {unit: float(unit[0]) for unit in THREE_STARTS}
    ignoring = estimate(tuple((0, number) for number in range(12)), paired(by_start)[1])
    found = estimate(*paired(by_start))
    assert found.high - found.low > 1.5 * (ignoring.high - ignoring.low)
    assert (found.low, found.high) == (0.0, 2.0)  # all draws on the lowest or highest start: 1 in 27 each


def test_pairing_takes_out_what_arms_have_in_common():
    hard = {unit: 10.0 * number for number, unit in enumerate(ONE_START)}
    easier = {unit: value - 3.0 - 0.25 * (number % 2) for number, (unit, value) in enumerate(hard.items())}
    found = difference(easier, hard)
    assert found.value == pytest.approx(-3.125)
    assert -3.25 <= found.low < found.high <= -3.0
    apart = estimate(*paired(hard))
    assert apart.high - apart.low > 30


def test_only_units_that_all_arms_have_are_compared():
    units, values_UK = paired({(0, 0): 1.0, (0, 1): 2.0, (0, 2): 3.0}, {(0, 2): 6.0, (0, 0): 8.0})
    assert units == [(0, 0), (0, 2)] and values_UK.tolist() == [[1.0, 8.0], [3.0, 6.0]]
    assert ratio({(0, 0): 1.0, (0, 1): 9.0}, {(0, 0): 4.0}).value == 0.25


def test_a_ratio_is_one_of_means():
    found = ratio({(0, 0): 10.0, (0, 1): 20.0}, {(0, 0): 20.0, (0, 1): 80.0})
    assert found.value == pytest.approx(15 / 50)  # and not the mean of 0.5 and 0.25
    assert (found.low, found.high) == pytest.approx((0.25, 0.5))  # both draws on one unit


def test_the_share_of_a_gap():
    low = {unit: 0.2 + 0.01 * unit[1] for unit in ONE_START}
    high = {unit: 0.6 + 0.02 * unit[1] for unit in ONE_START}
    middle = {unit: low[unit] + 0.75 * (high[unit] - low[unit]) for unit in ONE_START}
    found = gap_share(middle, low, high)
    assert found.value == pytest.approx(0.75)
    assert np.isnan(found.low)  # all resamples say the same, which is no certainty
    assert np.isnan(gap_share(middle, low, {unit: value + 0.01 * (-1) ** unit[1] for unit, value in low.items()}).value)


def test_no_interval_without_variation():
    assert np.isnan(percentile_interval(np.full(10, 0.3))).all()
    assert np.isnan(percentile_interval(np.array([0.3, np.inf]))).all()
    one = estimate([(0, 0)], np.array([[2.0]]))
    assert one.value == 2.0 and np.isnan(one.low)
    assert np.isnan(estimate([], np.empty((0, 1)))).all()


# -------------------------------------------------------------------------------------------------- bands


def test_a_band_over_steps_is_of_the_steps_that_all_runs_have():
    curves = {(0, 0): curve({0: 0.0, 10: 0.5, 20: 1.0}), (0, 1): curve({0: 0.2, 20: 0.6})}
    band = band_over_steps(curves)
    assert band.x.tolist() == [0, 20]
    np.testing.assert_allclose(band.mean, [0.1, 0.8])
    np.testing.assert_allclose([band.low, band.high], [[0.0, 0.6], [0.2, 1.0]])  # two runs: their range


def test_a_band_of_many_runs_is_an_interval():
    curves = {(0, seed): curve({0: 0.0, 10: 0.1 * seed}) for seed in range(8)}
    band = band_over_steps(curves)
    expected = estimate(list(curves), np.array([[0.1 * seed] for seed in range(8)]))
    np.testing.assert_allclose([band.low[1], band.mean[1], band.high[1]], [expected.low, 0.35, expected.high])


def test_a_band_over_tokens_ends_with_the_shortest_run():
    curves = {(0, 0): curve({0: 0.0, 10: 1.0}), (0, 1): curve({0: 0.0, 20: 1.0})}  # 1000 and 2000 tokens
    band = band_over(curves, "sampled_tokens", points=3)
    assert band.x.tolist() == [0, 500, 1000]
    np.testing.assert_allclose(band.mean, [0.0, 0.375, 0.75])
