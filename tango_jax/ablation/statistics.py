"""Measures of many learning curves, and 95 % intervals for what arms have and differ in.

Takes the curve of every run; returns estimates. A run is known by its unit, (start, seed): arms of one unit have the
same stage 1 and see the same problems, so arms are compared unit by unit, in pairs.

With several starts, an interval is Student's t interval of the means over each start's seeds, with one degree of
freedom less than there are starts: runs of one start have more in common than others, so starts and not runs are the
independent observations. It holds for as few as three starts, where a bootstrap of starts is too narrow. With one start
it is the t interval of the seeds, which says nothing about other starts. A ratio of means is linearised about its value
(the delta method), that of steps or tokens on a logarithmic scale. A mean is the mean of its starts' means, each of
which counts alike; no interval leaves the range that its measure has.

A run that never reaches a level is censored: it would have needed more than it had. It counts with what it had, steps
or tokens, at its end, so that its arm's mean is a lower bound; with the same number of steps in all runs that is the
restricted mean of survival analysis. A ratio of two such means is an upper bound of the true one if only runs of the
denominator are censored, and a lower bound if only runs of the numerator are.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from tango_jax.tracking.learning_curve import Curve, Curves

MIN_FOR_INTERVAL = 5  # with fewer runs every one of them is shown instead
Unit = tuple[int, int]  # (start, seed)


class Estimate(NamedTuple):
    """A figure with its 95 % interval; the bounds are NaN if the runs do not determine them."""

    value: float
    low: float
    high: float


_UNKNOWN = Estimate(*[float("nan")] * 3)


def paired(*measures: Mapping[Unit, float]) -> tuple[list[Unit], np.ndarray]:
    """The units that all arms have, and the measure of each arm there, float [units, arms]."""
    units = [unit for unit in measures[0] if all(unit in measure for measure in measures)]
    return units, np.array([[measure[unit] for measure in measures] for unit in units], float)


def independent_means(units: Sequence[Unit], values_UX: np.ndarray) -> np.ndarray:
    """The independent observations among values of U units, float [observations, X]: the mean over each start's units,
    or with one start the units themselves."""
    starts = np.array([start for start, _ in units])
    if len(set(starts.tolist())) < 2:
        return values_UX
    return np.array([values_UX[starts == start].mean(axis=0) for start in dict.fromkeys(starts.tolist())])


def t_interval(observations_OX: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over O independent observations and the bounds of its 95 % t interval, float [X] each.

    Bounds are NaN with one observation, or where all are alike: identical runs do not mean certainty.
    """
    count, mean_X = len(observations_OX), observations_OX.mean(axis=0)
    if count < 2:
        return mean_X, np.full_like(mean_X, np.nan), np.full_like(mean_X, np.nan)
    deviation_X = observations_OX.std(axis=0, ddof=1)
    # Rounding alone makes the means of identical runs differ.
    is_alike_X = np.ptp(observations_OX, axis=0) <= 1e-9 * np.abs(observations_OX).max(axis=0)
    half_X = np.where(is_alike_X, np.nan, special.stdtrit(count - 1, 0.975) * deviation_X / np.sqrt(count))
    return mean_X, mean_X - half_X, mean_X + half_X


def estimate(values: Mapping[Unit, float], most: float = np.inf) -> Estimate:
    """The mean over units, with its interval, of a measure in [0, most]."""
    value, low, high = _mean(*paired(values), lambda means_OK: means_OK[:, 0])
    return Estimate(value, float(np.maximum(low, 0.0)), float(np.minimum(high, most)))


def difference(more: Mapping[Unit, float], less: Mapping[Unit, float]) -> Estimate:
    """Mean of one arm's measure minus the mean of another's, paired."""
    return _mean(*paired(more, less), lambda means_OK: means_OK[:, 0] - means_OK[:, 1])


def ratio(over: Mapping[Unit, float], under: Mapping[Unit, float]) -> Estimate:
    """Mean of one arm's measure over the mean of another's, paired; both are positive."""
    units, values_UK = paired(over, under)
    if not units:
        return _UNKNOWN
    value, low, high = _ratio(units, values_UK[:, :1], values_UK[:, 1:])
    with np.errstate(divide="ignore", invalid="ignore"):
        return Estimate(value, *(float(value * np.exp(bound / value - 1)) for bound in (low, high)))


def gap_share(
    arm: Mapping[Unit, float], low: Mapping[Unit, float], high: Mapping[Unit, float]
) -> Estimate:
    """Share of the gap between two arms that a third closes, (arm - low) / (high - low), of mean measures, paired.

    NaN where the gap is 0, or where there are runs enough for an interval and that of the gap includes 0.
    """
    units, values_UK = paired(arm, low, high)
    gap = _mean(units, values_UK, lambda means_OK: means_OK[:, 2] - means_OK[:, 1])
    if not units or gap.value == 0 or (len(units) >= MIN_FOR_INTERVAL and gap.low <= 0 <= gap.high):
        return _UNKNOWN
    return _ratio(units, values_UK[:, :1] - values_UK[:, 1:2], values_UK[:, 2:] - values_UK[:, 1:2])


def _mean(
    units: Sequence[Unit], values_UK: np.ndarray, contrast_fn: Callable[[np.ndarray], np.ndarray]
) -> Estimate:
    """The mean of a contrast of K measures over the independent observations."""
    if not len(units):
        return _UNKNOWN
    return Estimate(*(float(bound) for bound in t_interval(contrast_fn(independent_means(units, values_UK)))))


def _ratio(units: Sequence[Unit], over_U1: np.ndarray, under_U1: np.ndarray) -> Estimate:
    """Ratio of means, with the interval of its linear approximation, value + (over - value * under) / mean(under)."""
    over_O, under_O = (independent_means(units, part_U1)[:, 0] for part_U1 in (over_U1, under_U1))
    with np.errstate(divide="ignore", invalid="ignore"):
        value = over_O.mean() / under_O.mean()
        _, low, high = t_interval((over_O - value * under_O) / under_O.mean() + value)
    return Estimate(float(value), float(low), float(high))


def has_interval(units: Sequence[Unit]) -> bool:
    """Whether there are independent observations enough for a band or a bar to show an interval, not their range."""
    return len(independent_means(units, np.zeros((len(units), 1)))) >= MIN_FOR_INTERVAL


# Curves with bands.


class Band(NamedTuple):
    """A mean curve with its 95 % interval at every point; of too few independent observations (`has_interval`), such as
    three starts, their range, which tells how far they differ and not where the mean of all starts may be."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def band_over_steps(curves: Curves) -> Band:
    """Accuracy at the generator steps that all runs were evaluated at."""
    steps, values_UX = _at_common_steps(curves)
    return _band(list(curves), steps, values_UX)


def band_over(curves: Curves, name: str, points: int = 100) -> Band:
    """Accuracy over another cumulative column, as far as all runs got; interpolated between evaluations."""
    end = min(curve.of(name)[-1] for curve in curves.values())
    x = np.linspace(0.0, end, points)
    values_UX = np.array([np.interp(x, curve.of(name), curve.of("accuracy")) for curve in curves.values()])
    return _band(list(curves), x, values_UX)


def band_of_difference(more: Curves, less: Curves) -> Band:
    """Accuracy of one arm minus that of another, paired, at the generator steps that all of their common runs were
    evaluated at; with the 95 % interval from MIN_FOR_INTERVAL runs on, however few starts they have."""
    units = [unit for unit in more if unit in less]
    steps, values_VX = _at_common_steps({(unit, arm): curves[unit] for arm, curves in enumerate((more, less))
                                         for unit in units})  # fmt: skip
    values_UX = values_VX[: len(units)] - values_VX[len(units) :]
    return _band(units, steps, values_UX, is_interval=len(units) >= MIN_FOR_INTERVAL)


def _at_common_steps(curves: Mapping[Any, Curve]) -> tuple[np.ndarray, np.ndarray]:
    """The generator steps that all curves were evaluated at, and accuracies there, float [curves, steps]."""
    found = [dict(zip(*curve.by_step(), strict=True)) for curve in curves.values()]
    steps = sorted(set.intersection(*map(set, found)))
    return np.array(steps), np.array([[one[step] for step in steps] for one in found])


def _band(units: list[Unit], x: np.ndarray, values_UX: np.ndarray, is_interval: bool | None = None) -> Band:
    observations_OX = independent_means(units, values_UX)
    mean, low, high = t_interval(observations_OX)
    if not (has_interval(units) if is_interval is None else is_interval):
        return Band(x, mean, observations_OX.min(axis=0), observations_OX.max(axis=0))
    low, high = (np.where(np.isnan(bound), mean, bound) for bound in (low, high))  # where all are alike: no width
    return Band(x, mean, low, high)
