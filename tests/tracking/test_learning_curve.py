"""Measures of learning curves, and mean curves with bands, against numbers worked by hand."""

import numpy as np
import pytest

from support.ablation_cases import curve, evaluation, run_rows
from tango_jax.tracking.intervals import estimate
from tango_jax.tracking.learning_curve import (
    Curve,
    Reached,
    band_of_difference,
    band_over,
    band_over_steps,
    curves_by_setting,
    mean_accuracy,
    mean_over,
    pairs_of,
    steps_to,
    tokens_to,
)

# ------------------------------------------------------------------------------------------------ of one curve


@pytest.mark.parametrize("accuracy, expected", [
    ({0: 0.0, 10: 0.6, 20: 1.0}, Reached(15.0, True)),  # half of the way from 0.6 to 1.0
    ({0: 0.0, 10: 0.8, 20: 0.7}, Reached(10.0, True)),
    ({0: 0.0, 10: 0.9, 20: 0.5, 30: 0.9}, Reached(10 * 0.8 / 0.9, True)),  # the first time counts
    ({0: 0.9, 10: 1.0}, Reached(0.0, True)),
    ({0: 0.0, 10: 0.5, 20: 0.79}, Reached(20.0, False)),  # censored at its end
])
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


def test_mean_accuracy_over_tokens_counts_the_warm_up_and_ends_between_evaluations():
    rows = (evaluation(0, 0.0, turn=0, sampled_tokens=0), evaluation(0, 0.2, turn=5, sampled_tokens=1000),
            evaluation(10, 0.6, turn=15, sampled_tokens=3000))
    assert mean_over(Curve(rows), "sampled_tokens", 2000) == pytest.approx((1000 * 0.1 + 1000 * 0.3) / 2000)
    assert mean_over(Curve(rows), "sampled_tokens", 3000) == pytest.approx((1000 * 0.1 + 2000 * 0.4) / 3000)
    assert mean_over(Curve(rows[:1]), "sampled_tokens", 0) == 0.0


def test_of_several_evaluations_at_a_step_the_last_counts():
    rows = (evaluation(0, 0.1, turn=0), evaluation(0, 0.2, turn=5), evaluation(10, 0.4, turn=15),
            evaluation(10, 0.6, turn=16))
    steps, accuracy = Curve(rows).by_step()
    assert (steps.tolist(), accuracy.tolist()) == ([0, 10], [0.2, 0.6])


def test_a_curve_is_cut_to_a_step_by_interpolation():
    rows = (evaluation(0, 0.1, turn=0), evaluation(0, 0.2, turn=5), evaluation(10, 0.4, turn=15, alpha=0.5),
            evaluation(20, 0.8, turn=25))
    assert Curve(rows).until(20) == Curve(rows).until(30) == Curve(rows)
    assert Curve(rows).until(10) == Curve(rows[:3])
    assert Curve(rows).until(0) == Curve(rows[:2])
    *kept, between = Curve(rows).until(15).evaluations
    assert tuple(kept) == rows[:3]
    assert (between.generator_step, between.accuracy, between.sampled_tokens) == (15, pytest.approx(0.6), 1500)
    assert between.alpha is between.verifier_step_f1 is None  # not measured there


def test_curves_of_other_lengths_are_compared_over_what_they_share():
    """Two identical curves of 60 and of 30 steps differ in nothing."""
    long, short = ({(0, 0): curve({step: step / 60 for step in range(0, end + 1, 10)})} for end in (60, 30))
    assert mean_accuracy(long[0, 0]) - mean_accuracy(short[0, 0]) == pytest.approx(0.25)  # the fallacy
    pairs = pairs_of(long, short)
    assert (pairs.span, pairs.units) == (30, [(0, 0)]) and pairs.difference().value == pytest.approx(0.0)
    assert pairs_of(long, {(1, 1): short[0, 0]}) == (({}, {}), 0)


def test_pairs_are_the_runs_that_all_arms_have():
    """A gap of 0.2 over the ten steps that the two common runs of three arms have."""
    low, middle, high = ({(0, seed): curve({0: 0.0, 10: rise, 20: 0.0}) for seed in range(6)}
                         for rise in (0.2, 0.3, 0.6))
    high = {(0, seed): high[0, seed].until(10) for seed in (2, 3)}
    pairs = pairs_of(middle, low, high)
    assert (pairs.span, pairs.units) == (10, [(0, 2), (0, 3)])
    assert pairs.difference().value == pytest.approx(0.05) and pairs.gap_share().value == pytest.approx(0.25)
    assert pairs.difference(lambda curve: curve.last_step).value == 0
    assert pairs_of(middle, low).span == 20 and len(pairs_of(middle).units) == 6


def test_curves_are_found_by_setting_arm_and_unit():
    rows = [*run_rows("grpo", (0.1, 0.2), start=1, seed=5), *run_rows("tango", (0.3, 0.4), start=1, seed=5),
            *run_rows("grpo", (0.5, 0.6), start=1, seed=5, setting="words=4")]
    found = curves_by_setting(reversed(rows))
    assert set(found) == {("last_letter", ""), ("last_letter", "words=4")}
    assert set(found["last_letter", ""]) == {"grpo", "tango"}
    assert found["last_letter", ""]["grpo"][1, 5].of("accuracy").tolist() == [0.1, 0.2]  # in the order of turns
    assert np.isnan(found["last_letter", ""]["grpo"][1, 5].of("alpha")).all()


# ------------------------------------------------------------------------------------------------------ bands


def test_a_band_over_steps_is_of_the_steps_that_all_runs_have():
    curves = {(0, 0): curve({0: 0.0, 10: 0.5, 20: 1.0}), (0, 1): curve({0: 0.2, 20: 0.6})}
    band = band_over_steps(curves)
    assert band.x.tolist() == [0, 20]
    np.testing.assert_allclose(band.mean, [0.1, 0.8])
    np.testing.assert_allclose([band.low, band.high], [[0.0, 0.6], [0.2, 1.0]])  # two runs: their range


def test_a_band_of_many_runs_is_an_interval():
    curves = {(0, seed): curve({0: 0.0, 10: 0.1 * seed}) for seed in range(8)}
    band = band_over_steps(curves)
    expected = estimate({(0, seed): 0.1 * seed for seed in range(8)})
    np.testing.assert_allclose([band.low[1], band.mean[1], band.high[1]], [expected.low, 0.35, expected.high])


def test_a_band_of_few_starts_is_their_range():
    curves = {(start, seed): curve({0: 0.0, 10: 0.1 * start + 0.02 * seed}) for start in range(3) for seed in range(3)}
    band = band_over_steps(curves)
    np.testing.assert_allclose([band.low[1], band.mean[1], band.high[1]], [0.02, 0.12, 0.22])  # means of the starts


def test_a_band_of_differences_is_of_pairs_and_has_an_interval():
    base = {(start, seed): curve({0: 0.0, 10: 0.2 * seed, 20: 0.5}) for start in range(3) for seed in range(2)}
    more = {unit: curve({0: 0.0, 10: 0.2 * unit[1] + 0.1 * unit[0], 20: 0.5}) for unit in base}
    band = band_of_difference(pairs_of(more, base | {(9, 9): curve({0: 0.0})}))
    assert band.x.tolist() == [0, 10, 20]
    half = 4.3027 * 0.1 / np.sqrt(3)
    np.testing.assert_allclose([band.low[1], band.mean[1], band.high[1]], [0.1 - half, 0.1, 0.1 + half], rtol=1e-4)
    assert (band.low[2], band.high[2]) == (0.0, 0.0)


def test_a_band_over_tokens_ends_with_the_shortest_run():
    curves = {(0, 0): curve({0: 0.0, 10: 1.0}), (0, 1): curve({0: 0.0, 20: 1.0})}  # 1000 and 2000 tokens
    band = band_over(curves, "sampled_tokens", points=3)
    assert band.x.tolist() == [0, 500, 1000]
    np.testing.assert_allclose(band.mean, [0.0, 0.375, 0.75])
