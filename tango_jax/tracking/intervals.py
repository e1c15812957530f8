"""Estimates with 95 % intervals, of two kinds. Takes outcomes or measures, returns estimates.

**Over problems** (`share_of`, `bootstrap_means`, ...): how much would a figure of one model vary with other problems? A
share gets Wilson's interval; everything else gets the percentile bootstrap over problems, with a fixed seed. An average
over sets takes draws of each; a set whose outcomes are all alike draws from Jeffreys' posterior.

**Over starts** (`estimate`, `difference`, `ratio`, `gap_share`): how much would a figure of one method vary with other
starts and seeds? A run is known by its unit, (start, seed); arms are compared unit by unit. Intervals are Student's t
over the means of the starts, since seeds of one start have more in common than others. With one start they are over its
seeds, and say nothing about other starts. A ratio of means is linearised (the delta method), that of steps or tokens
on a logarithmic scale. No interval leaves the range that its measure has.
"""

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np
from scipy import special

Z_95 = 1.959963984540054  # of the normal distribution
RESAMPLES = 2000
_CHUNK = 100  # resamples computed at once, for memory
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


def share_of(outcomes: Sequence[bool] | np.ndarray) -> Estimate:
    outcomes = np.asarray(outcomes, bool)
    if not outcomes.size:
        return _UNKNOWN
    return Estimate(float(outcomes.mean()), *wilson(float(outcomes.mean()), outcomes.size))


def bootstrap_means(values_OA: np.ndarray) -> list[Estimate]:
    """The mean of each column of numbers between 0 and 1."""
    count, columns = values_OA.shape
    if not count:
        return [_UNKNOWN] * columns
    draws_JA = resample(values_OA, lambda sums_JA: sums_JA / count)
    estimates = []
    for c in range(columns):
        mean = float(values_OA[:, c].mean())
        # Without spread resampling shows none, and 0 of 30 does not mean never.
        is_constant = np.ptp(values_OA[:, c]) == 0
        estimates.append(Estimate(mean, *(wilson(mean, count) if is_constant else percentile_interval(draws_JA[:, c]))))
    return estimates


def paired_differences(values_OA: np.ndarray, baseline_O: np.ndarray) -> list[Estimate]:
    """The mean of each column minus the baseline's, paired by problem."""
    gaps_OA = values_OA - baseline_O[:, None]
    draws_JA = resample(gaps_OA, lambda sums_JA: sums_JA / len(gaps_OA))
    return [
        Estimate(float(gaps_OA[:, c].mean()), *percentile_interval(draws_JA[:, c])) for c in range(gaps_OA.shape[1])
    ]


def estimate_from_sums(columns_OA: np.ndarray, statistic_fn: Callable[[np.ndarray], np.ndarray]) -> Estimate:
    """A figure computed from column sums, such as F1 from counts."""
    if not len(columns_OA):
        return _UNKNOWN
    value = statistic_fn(np.asarray(columns_OA, float).sum(axis=0, keepdims=True))[0]
    return Estimate(float(value), *percentile_interval(resample(columns_OA, statistic_fn)))


def resample(columns_OA: np.ndarray, statistic_fn: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The statistic of J bootstrap resamples of the rows, from their column sums."""
    columns_OA = np.asarray(columns_OA, float)
    rng, count = np.random.default_rng(_SEED), len(columns_OA)
    parts = []
    for _ in range(0, RESAMPLES, _CHUNK):
        times_JO = rng.multinomial(count, np.full(count, 1.0 / count), size=_CHUNK)
        parts.append(statistic_fn(times_JO @ columns_OA))
    return np.concatenate(parts)


def percentile_interval(draws_J: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of the finite draws. NaN if all are equal: identical rows do not mean certainty."""
    draws_J = draws_J[np.isfinite(draws_J)]
    if not draws_J.size or np.ptp(draws_J) == 0:
        return float("nan"), float("nan")
    low, high = np.percentile(draws_J, [2.5, 97.5])
    return float(low), float(high)


def share_draws(outcomes: Sequence[bool] | np.ndarray) -> np.ndarray:
    """Draws of a share, for `mean_over_sets`."""
    outcomes = np.asarray(outcomes, float)
    if np.ptp(outcomes) == 0:
        return jeffreys_draws(outcomes)[0]
    return resample(outcomes[:, None], lambda sums_JA: sums_JA[:, 0] / outcomes.size)


def jeffreys_draws(*outcomes: Sequence[bool] | np.ndarray) -> list[np.ndarray]:
    """For each list of outcomes, independent draws of the share of True, given a Beta(1/2, 1/2) prior."""
    rng = np.random.default_rng(_SEED)
    return [rng.beta(np.sum(each) + 0.5, np.sum(np.logical_not(each)) + 0.5, RESAMPLES) for each in outcomes]


def mean_over_sets(values: list[float], draws: list[np.ndarray]) -> Estimate:
    """The mean over independent sets, such as ProcessBench's four."""
    rng = np.random.default_rng(_SEED)
    # Every set was resampled with the same seed: without a new order they would rise and fall together.
    mixed_J = np.mean([rng.permutation(draws_J) for draws_J in draws], axis=0)
    mean, (low, high) = float(np.mean(values)), percentile_interval(mixed_J)
    # Jeffreys' interval of 0 of n begins at 0, although no draw is 0.
    return Estimate(mean, min(low, mean), max(high, mean))


# Over starts.


def paired(*measures: Mapping[Unit, float]) -> tuple[list[Unit], np.ndarray]:
    """The units that all arms have, and their measures there, float [units, arms]."""
    units = [unit for unit in measures[0] if all(unit in measure for measure in measures)]
    return units, np.array([[measure[unit] for measure in measures] for unit in units], float)


def independent_means(units: Sequence[Unit], values_UA: np.ndarray) -> np.ndarray:
    """The independent observations, float [O, A]: means over each start's units or, with one start, its units."""
    starts = np.array([start for start, _ in units])
    if len(set(starts.tolist())) < 2:
        return values_UA
    return np.array([values_UA[starts == start].mean(axis=0) for start in dict.fromkeys(starts.tolist())])


def t_interval(observations: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over O independent observations, float [O, ...], and the bounds of its 95 % t interval, float [...] each.

    Bounds are NaN with one observation, or where all are alike.
    """
    count, mean = len(observations), observations.mean(axis=0)
    if count < 2:
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    deviation = observations.std(axis=0, ddof=1)
    # Rounding alone makes the means of identical runs differ.
    is_alike = np.ptp(observations, axis=0) <= 1e-9 * np.abs(observations).max(axis=0)
    half = np.where(is_alike, np.nan, special.stdtrit(count - 1, 0.975) * deviation / np.sqrt(count))
    return mean, mean - half, mean + half


def estimate(values: Mapping[Unit, float], most: float = np.inf) -> Estimate:
    """The mean over units of a measure in [0, most]."""
    value, low, high = _mean(*paired(values), lambda means_OA: means_OA[:, 0])
    return Estimate(value, float(np.maximum(low, 0.0)), float(np.minimum(high, most)))


def difference(more: Mapping[Unit, float], less: Mapping[Unit, float]) -> Estimate:
    return _mean(*paired(more, less), lambda means_OA: means_OA[:, 0] - means_OA[:, 1])


def ratio(over: Mapping[Unit, float], under: Mapping[Unit, float]) -> Estimate:
    """Mean of one arm's measure over the mean of another's, paired. Unknown where one is 0."""
    units, values_UA = paired(over, under)
    if not units or not values_UA.any(axis=0).all():
        return _UNKNOWN
    value, low, high = _ratio(units, values_UA[:, :1], values_UA[:, 1:])
    with np.errstate(divide="ignore", invalid="ignore"):
        return Estimate(value, *(float(value * np.exp(bound / value - 1)) for bound in (low, high)))


def gap_share(
    arm: Mapping[Unit, float], low: Mapping[Unit, float], high: Mapping[Unit, float]
) -> Estimate:
    """Share of a gap that an arm closes, (arm - low) / (high - low), of mean measures, paired.

    NaN where the gap is 0 or, with runs enough for an interval, where that includes 0.
    """
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
    """Whether there are independent observations enough for an interval."""
    return len(independent_means(units, np.zeros((len(units), 1)))) >= MIN_FOR_INTERVAL
