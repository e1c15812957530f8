"""The learning curve of one run, how far and how soon it rises, and the mean curve of many runs.

`pairs_of` is the only way in which arms are compared. A run that never reaches a level is censored: it counts with
all its steps or tokens, and the mean of its arm is a lower bound. A ratio of means is an upper bound if only runs of
the denominator are censored, and a lower bound if only runs of the numerator are.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tango_jax.tracking.curves import Series, at_common_x
from tango_jax.tracking.evaluations import UNKNOWN_BETWEEN, Evaluation, digests_of
from tango_jax.tracking.intervals import (
    MIN_FOR_INTERVAL,
    Estimate,
    Unit,
    difference,
    gap_share,
    has_interval,
    independent_means,
    t_interval,
)
from tango_jax.tracking.known_arms import record_of

LEVEL = 0.8  # accuracy that counts as having learned the task


class Reached(NamedTuple):
    x: float  # steps or tokens at which a curve first reached a level, or at its end
    is_reached: bool


class Curve(NamedTuple):
    evaluations: tuple[Evaluation, ...]

    def of(self, name: str) -> np.ndarray:
        """Float [evaluations]; NaN where there are none."""
        return np.array([np.nan if (value := getattr(row, name)) is None else value for row in self.evaluations], float)

    def by_step(self) -> Series:
        accuracy = {row.generator_step: row.accuracy for row in self.evaluations}
        return Series(np.array(list(accuracy), float), np.array(list(accuracy.values()), float))

    @property
    def last_step(self) -> int:
        return self.evaluations[-1].generator_step

    def until(self, step: int) -> "Curve":
        """The curve up to a generator step. Without an evaluation there, the last one is interpolated."""
        kept = tuple(row for row in self.evaluations if row.generator_step <= step)
        assert kept, f"no evaluation up to generator step {step}"
        if kept[-1].generator_step in (step, self.last_step):
            return Curve(kept)
        before, after = kept[-1], self.evaluations[len(kept)]
        share = (step - before.generator_step) / (after.generator_step - before.generator_step)
        unknown, between = dict.fromkeys(UNKNOWN_BETWEEN), {}
        for name in ("sampled_tokens", "seconds", "accuracy", "scored_tokens", "flops"):
            ends = getattr(before, name), getattr(after, name)
            if None not in ends:
                between[name] = (1 - share) * ends[0] + share * ends[1]
        return Curve((*kept, before._replace(generator_step=step, **unknown | between)))


Curves = dict[Unit, Curve]  # of one arm
Arms = dict[str, Curves]
Settings = dict[tuple[str, str], Arms]  # (task, setting) -> arms


def curves_by_setting(rows: Sequence[Evaluation]) -> Settings:
    grouped: dict = {}
    for row in rows:
        runs = grouped.setdefault((row.task, row.setting), {}).setdefault(row.arm, {})
        runs.setdefault((row.start, row.seed), []).append(row)
    return {key: {arm: {unit: Curve(tuple(sorted(found, key=lambda row: row.turn))) for unit, found in runs.items()}
                  for arm, runs in arms.items()} for key, arms in grouped.items()}


def trains_generator(arm: str) -> bool:
    """Whether this arm trains the generator's weights; True for an unknown arm."""
    record = record_of(arm)
    return record is None or record.is_one_policy or "generator" in record.turns


def first_reaching(x: np.ndarray, y: np.ndarray, level: float) -> Reached:
    """Where y first reaches the level, interpolated; x ascends."""
    [above] = np.nonzero(y >= level)
    if not above.size:
        return Reached(float(x[-1]), False)
    index = above[0]
    if index == 0:
        return Reached(float(x[0]), True)
    share = (level - y[index - 1]) / (y[index] - y[index - 1])
    return Reached(float(x[index - 1] + share * (x[index] - x[index - 1])), True)


def steps_to(curve: Curve, level: float = LEVEL) -> Reached:
    return first_reaching(*curve.by_step(), level)


def tokens_to(curve: Curve, level: float = LEVEL) -> Reached:
    """Tokens of both roles, with the warm-up, until the level."""
    return first_reaching(curve.of("sampled_tokens"), curve.of("accuracy"), level)


def flops_to(curve: Curve, level: float = LEVEL) -> Reached:
    """As `tokens_to`: what both roles sampled, read and were updated with."""
    return first_reaching(curve.of("flops"), curve.of("accuracy"), level)


def has_flops(arms: Iterable[Curves]) -> bool:
    """Tables of earlier versions have none."""
    return all(np.isfinite(curve.of("flops")).all() for curves in arms for curve in curves.values())


def mean_accuracy(curve: Curve) -> float:
    """Mean accuracy over generator steps, by trapezoids."""
    steps, accuracy = curve.by_step()
    span = steps[-1] - steps[0]
    return float(np.trapezoid(accuracy, steps) / span) if span else float(accuracy[-1])


def mean_over(curve: Curve, name: str, amount: float) -> float:
    """Mean accuracy over the first `amount` of a cumulative column, such as sampled_tokens, by trapezoids. The curve
    has as much."""
    x, accuracy = curve.of(name), curve.of("accuracy")
    if not amount:
        return float(accuracy[0])
    kept = x < amount
    x, accuracy = np.append(x[kept], amount), np.append(accuracy[kept], np.interp(amount, x, accuracy))
    return float(np.trapezoid(accuracy, x) / amount)


def measured(curves: Curves, measure_fn: Callable[[Curve], Any]) -> dict[Unit, Any]:
    return {unit: measure_fn(curve) for unit, curve in curves.items()}


def over_same_steps(arms: Mapping[Hashable, Curves]) -> tuple[dict, int]:
    """All curves, cut to the generator steps that all have, and the last of these steps."""
    span = min((curve.last_step for curves in arms.values() for curve in curves.values()), default=0)
    return {arm: measured(curves, lambda curve: curve.until(span)) for arm, curves in arms.items()}, span


class Pairs(NamedTuple):
    arms: tuple[Curves, ...]  # of the same units in the same order, cut to the same steps
    span: int  # the last of these generator steps

    @property
    def units(self) -> list[Unit]:
        return list(self.arms[0])

    def difference(self, measure_fn: Callable[[Curve], float] = mean_accuracy) -> Estimate:
        return difference(*(measured(curves, measure_fn) for curves in self.arms[:2]))

    def gap_share(self) -> Estimate:
        """The share of the gap in mean accuracy from the second arm to the third that the first arm closes."""
        return gap_share(*(measured(curves, mean_accuracy) for curves in self.arms))


def pairs_of(*arms: Curves) -> Pairs:
    """The runs of the starts and seeds that all arms have, cut to the generator steps that all of these runs have."""
    units = [unit for unit in arms[0] if all(unit in curves for curves in arms)]
    cut, span = over_same_steps(dict(enumerate({unit: curves[unit] for unit in units} for curves in arms)))
    return Pairs(tuple(cut.values()), span)


def differing(one: Curve, other: Curve) -> set[str]:
    """The digests, recorded in both runs, in which they differ apart from the arm."""
    ours, theirs = (digests_of(curve.evaluations[0]) for curve in (one, other))
    both = ours.keys() & theirs.keys()
    if both & {"generator_weights", "verifier_weights"}:
        both -= {"weights"}  # of both roles, of which an arm may not use one
    return {name for name in both if ours[name] != theirs[name]}


class Band(NamedTuple):
    """A mean curve with its 95 % interval, or with the range of too few observations (`has_interval`)."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def band_over_steps(curves: Curves) -> Band:
    return band_of_values(list(curves), *at_common_x(curve.by_step() for curve in curves.values()))


def band_over(curves: Curves, name: str, points: int = 100) -> Band:
    """Accuracy over another cumulative column, until the first run ends; interpolated."""
    end = min(curve.of(name)[-1] for curve in curves.values())
    x = np.linspace(0.0, end, points)
    values_UA = np.array([np.interp(x, curve.of(name), curve.of("accuracy")) for curve in curves.values()])
    return band_of_values(list(curves), x, values_UA)


def band_of_difference(pairs: Pairs) -> Band:
    """Accuracy of the first arm minus the second's; with an interval from MIN_FOR_INTERVAL pairs on."""
    steps, both_UA = at_common_x(curve.by_step() for curves in pairs.arms for curve in curves.values())
    values_UA = both_UA[: len(pairs.units)] - both_UA[len(pairs.units) :]
    return band_of_values(pairs.units, steps, values_UA, is_interval=len(pairs.units) >= MIN_FOR_INTERVAL)


def band_of_values(units: list[Unit], x: np.ndarray, values_UA: np.ndarray, is_interval: bool | None = None) -> Band:
    """The mean over units at every x. `is_interval`: an interval or the range; None: an interval where there is one."""
    observations_OA = independent_means(units, values_UA)
    mean, low, high = t_interval(observations_OA)
    if not (has_interval(units) if is_interval is None else is_interval):
        return Band(x, mean, observations_OA.min(axis=0), observations_OA.max(axis=0))
    low, high = (np.where(np.isnan(bound), mean, bound) for bound in (low, high))  # no width where all are alike
    return Band(x, mean, low, high)
