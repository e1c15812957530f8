"""Estimates with 95 % intervals, of two kinds.

**Over problems** (`bootstrap_means`, `paired_differences`, `estimate_from_sums`, `mean_over_sets`): one model, another
draw of problems. The Bayesian bootstrap (Rubin 1981) gives each problem a random weight. It fits shares, F1 scores,
paired differences and averages over sets alike. For shares and means, one wholly right and one wholly wrong problem
are added: 0 of 30 does not mean never. For yes-or-no outcomes this is nearly Wilson's interval (`wilson`).

**Over starts** (`estimate`, `difference`, `ratio`, `gap_share`): one method, other starts and seeds. Arms are compared
unit by unit, (start, seed). Intervals are Student's t over the means of the starts, since seeds of one start have more
in common than others; with one start, over its seeds. A ratio of means is linearised (delta method), a ratio of steps
or tokens is on a logarithmic scale. No interval leaves the range of its measure.
"""

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np

Z_95 = 1.959963984540054  # of the normal distribution
RESAMPLES = 2000
_ROUNDING = 1e-9  # draws that differ by less are equal
_CHUNK = 100  # resamples at once: 15,000 problems x 2,000 resamples would take 240 MB
_SEED = 0
MIN_FOR_INTERVAL = 5  # runs; fewer are shown one by one
Unit = tuple[int, int]  # (start, seed)


class Estimate(NamedTuple):
    """A figure with its 95 % interval; NaN where it is not determined."""

    value: float
    low: float
    high: float


_UNKNOWN = Estimate(*[float("nan")] * 3)


# Over problems.


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's score interval at 95 %. (scipy.stats.binomtest takes whole numbers of successes only.)"""
    if count == 0:
        return float("nan"), float("nan")
    shrink = 1 + Z_95**2 / count
    middle = (share + Z_95**2 / (2 * count)) / shrink
    half = Z_95 * sqrt(share * (1 - share) / count + Z_95**2 / (4 * count**2)) / shrink
    # At 0 and at 1 the bound is exact, but for rounding.
    return 0.0 if share == 0 else middle - half, 1.0 if share == 1 else middle + half


def bootstrap_means(values_OA: np.ndarray) -> list[Estimate]:
    """The mean of each column of numbers between 0 and 1."""
    count, columns = values_OA.shape
    if not count:
        return [_UNKNOWN] * columns
    draws_JA = mean_draws(values_OA)
    return [estimate_of(float(values_OA[:, c].mean()), draws_JA[:, c]) for c in range(columns)]


def mean_draws(values_OA: np.ndarray) -> np.ndarray:
    one_of_each_PA = np.repeat([[0.0], [1.0]], values_OA.shape[1], axis=1)
    return resample(values_OA, lambda means_JA: means_JA, one_of_each_PA)


def paired_differences(values_OA: np.ndarray, baseline_O: np.ndarray) -> list[Estimate]:
    """The mean of each column minus the baseline's, paired by problem."""
    gaps_OA = values_OA - baseline_O[:, None]
    draws_JA = resample(gaps_OA, lambda means_JA: means_JA)
    return [estimate_of(float(gaps_OA[:, c].mean()), draws_JA[:, c]) for c in range(gaps_OA.shape[1])]


def estimate_from_sums(columns_OA: np.ndarray, statistic_fn: Callable[[np.ndarray], np.ndarray]) -> Estimate:
    """A figure from ratios of column sums, such as F1. `statistic_fn` maps sums to values_J."""
    if not len(columns_OA):
        return _UNKNOWN
    value = statistic_fn(np.asarray(columns_OA, float).sum(axis=0, keepdims=True))[0]
    return estimate_of(float(value), resample(columns_OA, statistic_fn))


def resample(
    columns_OA: np.ndarray, statistic_fn: Callable[[np.ndarray], np.ndarray], further_PA: np.ndarray | None = None
) -> np.ndarray:
    """J draws of a statistic of the weighted column means. `further_PA`: rows that are weighted too."""
    rows_RA = np.asarray(columns_OA, float)
    if further_PA is not None:
        rows_RA = np.concatenate([rows_RA, further_PA])
    rng, parts = np.random.default_rng(_SEED), []
    for _ in range(0, RESAMPLES, _CHUNK):
        weight_JR = rng.standard_exponential((_CHUNK, len(rows_RA)))
        parts.append(statistic_fn(weight_JR / weight_JR.sum(axis=1, keepdims=True) @ rows_RA))
    return np.concatenate(parts)


def estimate_of(value: float, draws_J: np.ndarray) -> Estimate:
    """The value with the middle 95 % of its draws; NaN draws are left out.

    The bounds are NaN if all draws are equal: identical rows show no variation, which is not certainty.
    """
    draws_J = draws_J[np.isfinite(draws_J)]
    if np.isnan(value) or not draws_J.size or np.ptp(draws_J) < _ROUNDING:
        return _UNKNOWN._replace(value=value)
    low, high = np.percentile(draws_J, [2.5, 97.5])
    return Estimate(value, min(float(low), value), max(float(high), value))


def mean_over_sets(values: list[float], draws: list[np.ndarray]) -> Estimate:
    """The mean over independent sets, such as ProcessBench's four."""
    rng = np.random.default_rng(_SEED)
    # All sets were resampled with one seed: without a new order they would rise and fall together.
    mixed_J = np.mean([rng.permutation(draws_J) for draws_J in draws], axis=0)
    return estimate_of(float(np.mean(values)), mixed_J)


# Over starts.


def paired(*measures: Mapping[Unit, float]) -> tuple[list[Unit], np.ndarray]:
    """The units that all arms have, and their measures there, float [units, arms]."""
    units = [unit for unit in measures[0] if all(unit in measure for measure in measures)]
    return units, np.array([[measure[unit] for measure in measures] for unit in units], float)


def independent_means(units: Sequence[Unit], values_UA: np.ndarray) -> np.ndarray:
    """Float [O, A]: means over each start's units or, with one start, its units."""
    starts = np.array([start for start, _ in units])
    if len(set(starts.tolist())) < 2:
        return values_UA
    return np.array([values_UA[starts == start].mean(axis=0) for start in dict.fromkeys(starts.tolist())])


def t_interval(observations: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over O independent observations, float [O, ...], and the bounds of its 95 % t interval, float [...] each.

    Bounds are NaN with one observation, or where all are alike.
    """
    from scipy import special  # takes half a second to import

    count, mean = len(observations), observations.mean(axis=0)
    if count < 2:
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    deviation = observations.std(axis=0, ddof=1)
    is_alike = np.ptp(observations, axis=0) <= 1e-9 * np.abs(observations).max(axis=0)
    half = np.where(is_alike, np.nan, special.stdtrit(count - 1, 0.975) * deviation / np.sqrt(count))
    return mean, mean - half, mean + half


def estimate(values: Mapping[Unit, float], most: float = np.inf) -> Estimate:
    value, low, high = _mean(*paired(values), lambda means_OA: means_OA[:, 0])
    return Estimate(value, float(np.maximum(low, 0.0)), float(np.minimum(high, most)))


def difference(more: Mapping[Unit, float], less: Mapping[Unit, float]) -> Estimate:
    return _mean(*paired(more, less), lambda means_OA: means_OA[:, 0] - means_OA[:, 1])


def ratio(over: Mapping[Unit, float], under: Mapping[Unit, float]) -> Estimate:
    """Mean of one arm's measure over the mean of another's, paired. NaN where one is 0."""
    units, values_UA = paired(over, under)
    if not units or not values_UA.any(axis=0).all():
        return _UNKNOWN
    value, low, high = _ratio(units, values_UA[:, :1], values_UA[:, 1:])
    with np.errstate(divide="ignore", invalid="ignore"):
        return Estimate(value, *(float(value * np.exp(bound / value - 1)) for bound in (low, high)))


def gap_share(
    arm: Mapping[Unit, float], low: Mapping[Unit, float], high: Mapping[Unit, float]
) -> Estimate:
    """(arm - low) / (high - low) of mean measures, paired. NaN where the gap is 0, or its interval includes 0."""
    units, values_UA = paired(arm, low, high)
    gap = _mean(units, values_UA, lambda means_OA: means_OA[:, 2] - means_OA[:, 1])
    if not units or gap.value == 0 or (len(units) >= MIN_FOR_INTERVAL and gap.low <= 0 <= gap.high):
        return _UNKNOWN
    return _ratio(units, values_UA[:, :1] - values_UA[:, 1:2], values_UA[:, 2:] - values_UA[:, 1:2])


def _mean(
    units: Sequence[Unit], values_UA: np.ndarray, contrast_fn: Callable[[np.ndarray], np.ndarray]
) -> Estimate:
    if not len(units):
        return _UNKNOWN
    return Estimate(*(float(bound) for bound in t_interval(contrast_fn(independent_means(units, values_UA)))))


def _ratio(units: Sequence[Unit], over_U1: np.ndarray, under_U1: np.ndarray) -> Estimate:
    """Ratio of means, with the interval of value + (over - value * under) / mean(under)."""
    over_O, under_O = (independent_means(units, part_U1)[:, 0] for part_U1 in (over_U1, under_U1))
    with np.errstate(divide="ignore", invalid="ignore"):
        value = over_O.mean() / under_O.mean()
        _, low, high = t_interval((over_O - value * under_O) / under_O.mean() + value)
    return Estimate(float(value), float(low), float(high))


def has_interval(units: Sequence[Unit]) -> bool:
    return len(independent_means(units, np.zeros((len(units), 1)))) >= MIN_FOR_INTERVAL
