"""Estimates with their uncertainty: takes outcomes per problem; returns estimates with 95 % confidence intervals.

The intervals show how much a figure would vary with another draw of problems. A share of yes-or-no outcomes gets
Wilson's interval, which is accurate near 0 and 1 and for as few as 30 problems; everything else gets the percentile
bootstrap over problems with a fixed seed, so that the same rows always give the same table. An average over sets takes
draws of each; where a set's outcomes are all alike, and resampling shows no spread, they come from Jeffreys' posterior.
"""

from collections.abc import Callable, Sequence
from math import comb
from typing import NamedTuple

import numpy as np

from tango_jax.tracking.scores import wilson

RESAMPLES = 2000
_CHUNK = 100  # resamples computed at once: 15,000 problems x 2,000 resamples would take 240 MB
_SEED = 0


class Estimate(NamedTuple):
    """A figure with its interval; NaN if the rows do not determine it."""

    value: float
    low: float
    high: float


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the probability that k of n samples, drawn without replacement, include a correct one.

    It is 1 - C(n-c, k) / C(n, k), the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374, section 2.1).
    """
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples, (num_samples, num_correct, k)
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def reported_sample_counts(num_samples: int) -> tuple[int, ...]:
    """The numbers of samples that are reported: 1, 2, 4, ... and all."""
    powers = [1 << power for power in range(num_samples.bit_length()) if 1 << power < num_samples]
    return (*powers, num_samples)


def share_of(outcomes: Sequence[bool] | np.ndarray) -> Estimate:
    """The share of True among yes-or-no outcomes."""
    outcomes = np.asarray(outcomes, bool)
    if not outcomes.size:
        return Estimate(*[float("nan")] * 3)
    return Estimate(float(outcomes.mean()), *wilson(float(outcomes.mean()), outcomes.size))


def bootstrap_means(values_NC: np.ndarray) -> list[Estimate]:
    """The mean of each column: one number per problem, between 0 and 1 in all of them."""
    count, columns = values_NC.shape
    if not count:
        return [Estimate(*[float("nan")] * 3)] * columns
    draws_RC = resample(values_NC, lambda sums_RC: sums_RC / count)
    estimates = []
    for c in range(columns):
        mean = float(values_NC[:, c].mean())
        # Without spread resampling shows none, and 0 of 30 does not mean never.
        is_constant = np.ptp(values_NC[:, c]) == 0
        estimates.append(Estimate(mean, *(wilson(mean, count) if is_constant else percentile_interval(draws_RC[:, c]))))
    return estimates


def paired_differences(values_NC: np.ndarray, baseline_N: np.ndarray) -> list[Estimate]:
    """The mean of each column minus that of the baseline: paired, so that hard problems do not hide a difference."""
    gaps_NC = values_NC - baseline_N[:, None]
    draws_RC = resample(gaps_NC, lambda sums_RC: sums_RC / len(gaps_NC))
    return [
        Estimate(float(gaps_NC[:, c].mean()), *percentile_interval(draws_RC[:, c])) for c in range(gaps_NC.shape[1])
    ]


def estimate_from_sums(columns_NC: np.ndarray, statistic_fn: Callable[[np.ndarray], np.ndarray]) -> Estimate:
    """A figure computed from column sums, such as F1 from counts; `statistic_fn` maps sums to values_R."""
    if not len(columns_NC):
        return Estimate(*[float("nan")] * 3)
    value = statistic_fn(np.asarray(columns_NC, float).sum(axis=0, keepdims=True))[0]
    return Estimate(float(value), *percentile_interval(resample(columns_NC, statistic_fn)))


def resample(columns_NC: np.ndarray, statistic_fn: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the statistic of R bootstrap resamples of the rows, computed from their column sums."""
    columns_NC = np.asarray(columns_NC, float)
    rng, count = np.random.default_rng(_SEED), len(columns_NC)
    parts = []
    for _ in range(0, RESAMPLES, _CHUNK):
        times_RN = rng.multinomial(count, np.full(count, 1.0 / count), size=_CHUNK)
        parts.append(statistic_fn(times_RN @ columns_NC))
    return np.concatenate(parts)


def percentile_interval(draws_R: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of the draws; a resample that does not determine the figure (NaN) is left out.

    NaN if all draws are equal: resampling identical rows shows no variation, but this does not mean certainty.
    """
    draws_R = draws_R[np.isfinite(draws_R)]
    if not draws_R.size or np.ptp(draws_R) == 0:
        return float("nan"), float("nan")
    low, high = np.percentile(draws_R, [2.5, 97.5])
    return float(low), float(high)


def share_draws(outcomes: Sequence[bool] | np.ndarray) -> np.ndarray:
    """Draws of the share of True among yes-or-no outcomes, for `mean_over_sets`."""
    outcomes = np.asarray(outcomes, float)
    if np.ptp(outcomes) == 0:
        return jeffreys_draws(outcomes)[0]
    return resample(outcomes[:, None], lambda sums_RC: sums_RC[:, 0] / outcomes.size)


def jeffreys_draws(*outcomes: Sequence[bool] | np.ndarray) -> list[np.ndarray]:
    """For each of several lists of yes-or-no outcomes, independent draws of the share of True, given a Beta(1/2, 1/2)
    prior."""
    rng = np.random.default_rng(_SEED)
    return [rng.beta(np.sum(each) + 0.5, np.sum(np.logical_not(each)) + 0.5, RESAMPLES) for each in outcomes]


def mean_over_sets(values: list[float], draws: list[np.ndarray]) -> Estimate:
    """The mean over sets that were drawn independently of each other, such as the average of ProcessBench's four."""
    rng = np.random.default_rng(_SEED)
    # Every set was resampled with the same seed: without a new order they would rise and fall together.
    mixed_R = np.mean([rng.permutation(draws_R) for draws_R in draws], axis=0)
    mean, (low, high) = float(np.mean(values)), percentile_interval(mixed_R)
    # Jeffreys' interval of 0 of n begins at 0, although no draw is 0.
    return Estimate(mean, min(low, mean), max(high, mean))
