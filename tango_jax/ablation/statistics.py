"""Measures of many learning curves, and 95 % intervals for what arms have and differ in.

Takes the curve of every run; returns estimates. A run is known by its unit, (start, seed): arms of one unit have the
same stage 1 and see the same problems, so arms are compared unit by unit, in pairs.

Intervals come from a percentile bootstrap with RESAMPLES resamples and a fixed seed. With several starts it is
hierarchical: starts are drawn with replacement, and then seeds within each start that was drawn, because runs of one
start have more in common than others (Davison and Hinkley 1997, section 3.8). With few starts such intervals tend to be
too narrow; with one they say nothing about other starts. A mean is over units, each of which counts alike.

A run that never reaches a level is censored: it would have needed more than it had. It counts with what it had, steps
or tokens, at its end, so that its arm's mean is a lower bound; with the same number of steps in all runs that is the
restricted mean of survival analysis. A ratio of two such means is an upper bound of the true one if only runs of the
denominator are censored, and a lower bound if only runs of the numerator are.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tango_jax.tracking.learning_curve import Curves

RESAMPLES = 10_000
MIN_FOR_INTERVAL = 5  # with fewer runs every one of them is shown instead: a bootstrap of so few is too narrow
_SEED = 0
Unit = tuple[int, int]  # (start, seed)


class Estimate(NamedTuple):
    """A figure with its 95 % interval; the bounds are NaN if the runs do not determine them."""

    value: float
    low: float
    high: float


def paired(*measures: Mapping[Unit, float]) -> tuple[list[Unit], np.ndarray]:
    """The units that all arms have, and the measure of each arm there, float [units, arms]."""
    units = [unit for unit in measures[0] if all(unit in measure for measure in measures)]
    return units, np.array([[measure[unit] for measure in measures] for unit in units], float)


def estimate(
    units: Sequence[Unit], values_UK: np.ndarray, statistic_fn: Callable[[np.ndarray], np.ndarray] | None = None
) -> Estimate:
    """A statistic of the means over units, with its interval.

    Args:
        units: U pairs of start and seed.
        values_UK: K values of each unit.
        statistic_fn: maps means_RK to statistics_R; the first mean itself if missing.

    Returns:
        NaN bounds with fewer than two units, or where resamples differ in nothing.
    """
    statistic_fn = statistic_fn or (lambda means_RK: means_RK[:, 0])
    if not len(units):
        return Estimate(*[float("nan")] * 3)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic_fn(values_UK.mean(axis=0, keepdims=True))[0])
        return Estimate(value, *percentile_interval(statistic_fn(resampled_means(units, values_UK))))


def percentile_interval(draws_R: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of the draws; NaN if they are all alike: identical runs do not mean certainty."""
    # Rounding alone makes resamples of identical runs differ.
    if not np.isfinite(draws_R).all() or np.ptp(draws_R) <= 1e-9 * np.abs(draws_R).max():
        return float("nan"), float("nan")
    low, high = np.percentile(draws_R, [2.5, 97.5])
    return float(low), float(high)


def resampled_means(units: Sequence[Unit], values_UK: np.ndarray) -> np.ndarray:
    """Means over the units of R bootstrap samples, float [R, K]."""
    weights_RU = resampled_weights(tuple(units))
    return weights_RU @ values_UK / weights_RU.sum(axis=1, keepdims=True)


@functools.lru_cache(maxsize=8)  # all measures of a setting are resampled alike
def resampled_weights(units: tuple[Unit, ...]) -> np.ndarray:
    """How often each unit occurs in each bootstrap sample, [RESAMPLES, units]: starts are drawn, then their seeds."""
    rng = np.random.default_rng(_SEED)
    starts = list(dict.fromkeys(start for start, _ in units))
    draws_RS = rng.multinomial(len(starts), np.full(len(starts), 1 / len(starts)), size=RESAMPLES)
    weights_RU = np.zeros((RESAMPLES, len(units)), np.int64)
    for s, start in enumerate(starts):
        members = [u for u, unit in enumerate(units) if unit[0] == start]
        share = np.full(len(members), 1 / len(members))
        weights_RU[:, members] = rng.multinomial(draws_RS[:, s] * len(members), share)
    return weights_RU


def ratio(over: Mapping[Unit, float], under: Mapping[Unit, float]) -> Estimate:
    """Mean of one arm's measure over the mean of another's, paired."""
    return estimate(*paired(over, under), lambda means_RK: means_RK[:, 0] / means_RK[:, 1])


def difference(more: Mapping[Unit, float], less: Mapping[Unit, float]) -> Estimate:
    """Mean of one arm's measure minus the mean of another's, paired."""
    return estimate(*paired(more, less), lambda means_RK: means_RK[:, 0] - means_RK[:, 1])


def gap_share(
    arm: Mapping[Unit, float], low: Mapping[Unit, float], high: Mapping[Unit, float]
) -> Estimate:
    """Share of the gap between two arms that a third closes, (arm - low) / (high - low), of mean measures, paired.

    NaN where the gap is 0 or its interval includes 0: there is nothing to close.
    """
    units, values_UK = paired(arm, low, high)
    gap = estimate(units, values_UK, lambda means_RK: means_RK[:, 2] - means_RK[:, 1])
    if gap.value == 0 or gap.low <= 0 <= gap.high:
        return Estimate(*[float("nan")] * 3)
    return estimate(
        units, values_UK, lambda means_RK: (means_RK[:, 0] - means_RK[:, 1]) / (means_RK[:, 2] - means_RK[:, 1])
    )


# Curves with bands.


class Band(NamedTuple):
    """A mean curve with its 95 % interval at every point; of fewer than MIN_FOR_INTERVAL runs their range."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def band_over_steps(curves: Curves) -> Band:
    """Accuracy at the generator steps that all runs were evaluated at."""
    found = {unit: dict(zip(*curve.by_step(), strict=True)) for unit, curve in curves.items()}
    steps = sorted(set.intersection(*(set(one) for one in found.values())))
    return _band(list(found), np.array(steps), np.array([[one[step] for step in steps] for one in found.values()]))


def band_over(curves: Curves, name: str, points: int = 100) -> Band:
    """Accuracy over another cumulative column, as far as all runs got; interpolated between evaluations."""
    end = min(curve.of(name)[-1] for curve in curves.values())
    x = np.linspace(0.0, end, points)
    values_UX = np.array([np.interp(x, curve.of(name), curve.of("accuracy")) for curve in curves.values()])
    return _band(list(curves), x, values_UX)


def _band(units: list[Unit], x: np.ndarray, values_UX: np.ndarray) -> Band:
    mean = values_UX.mean(axis=0)
    if len(units) < MIN_FOR_INTERVAL:
        return Band(x, mean, values_UX.min(axis=0), values_UX.max(axis=0))
    low, high = np.percentile(resampled_means(units, values_UX), [2.5, 97.5], axis=0)
    return Band(x, mean, low, high)
