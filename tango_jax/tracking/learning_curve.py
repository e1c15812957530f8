"""The learning curve of one run, and how far and how soon it rises.

Takes a run's evaluations (evaluations.py); returns numbers. Used after runs, to compare them. A mean over a longer run
says something else than one over a shorter run, so curves are cut to the generator steps that all of them have
(`same_span`) before they are compared.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tango_jax.arms import ARMS
from tango_jax.tracking.evaluations import Evaluation

LEVEL = 0.8  # accuracy that counts as having learned the task


class Reached(NamedTuple):
    """When a curve first reached a level."""

    x: float  # steps or tokens; if it never did: those at its end
    is_reached: bool


class Curve(NamedTuple):
    """The evaluations of one run, in their order."""

    evaluations: tuple[Evaluation, ...]

    def of(self, name: str) -> np.ndarray:
        """The values of a column, float [evaluations]; NaN where there are none."""
        return np.array([np.nan if (value := getattr(row, name)) is None else value for row in self.evaluations], float)

    def by_step(self) -> tuple[np.ndarray, np.ndarray]:
        """(generator steps, accuracy there): of several evaluations at a step, the last."""
        accuracy = {row.generator_step: row.accuracy for row in self.evaluations}
        return np.array(list(accuracy), float), np.array(list(accuracy.values()), float)

    @property
    def last_step(self) -> int:
        """The generator step of the last evaluation."""
        return self.evaluations[-1].generator_step

    def until(self, step: int) -> "Curve":
        """The curve up to a generator step, which must not be before its first evaluation. Where no evaluation was made
        at that step, the last one is interpolated, with the columns that grow or are shares; the others are None."""
        kept = tuple(row for row in self.evaluations if row.generator_step <= step)
        assert kept, f"no evaluation up to generator step {step}"
        if kept[-1].generator_step in (step, self.last_step):
            return Curve(kept)
        before, after = kept[-1], self.evaluations[len(kept)]
        share = (step - before.generator_step) / (after.generator_step - before.generator_step)
        between = {name: (1 - share) * getattr(before, name) + share * getattr(after, name)
                   for name in ("sampled_tokens", "seconds", "accuracy")}  # fmt: skip
        unknown = dict.fromkeys(("verifier_step_f1", "verifier_outcome_f1", "sampled_accuracy", "verifier_live_step_f1",
                                 "groups_without_signal", "alpha"))  # fmt: skip
        return Curve((*kept, before._replace(generator_step=step, **between, **unknown)))


Curves = dict[tuple[int, int], Curve]  # (start, seed) -> curve, of one arm
Arms = dict[str, Curves]


def curves_by_setting(rows: Sequence[Evaluation]) -> dict[tuple[str, str], Arms]:
    """{(task, setting): {arm: {(start, seed): curve}}}, all in the order of the rows."""
    grouped: dict = {}
    for row in rows:
        runs = grouped.setdefault((row.task, row.setting), {}).setdefault(row.arm, {})
        runs.setdefault((row.start, row.seed), []).append(row)
    return {key: {arm: {unit: Curve(tuple(sorted(found, key=lambda row: row.turn))) for unit, found in runs.items()}
                  for arm, runs in arms.items()} for key, arms in grouped.items()}  # fmt: skip


def trains_generator(arm: str) -> bool:
    """Whether the generator learns in this arm, so that its curve can rise; an arm that this version does not know is
    taken for one that does. Generator steps do not tell: where the generator is fixed, they are those that it would
    have made."""
    return arm not in ARMS or "generator" in ARMS[arm].turns


def shared_span(curves: Iterable[Curve]) -> int:
    """The last generator step that all of the curves have."""
    return min(curve.last_step for curve in curves)


def cut_to_shared_span(arms: Mapping[str, Curves]) -> Arms:
    """All curves of the arms, cut to the generator steps that all of them have."""
    span = shared_span(curve for curves in arms.values() for curve in curves.values())
    return {arm: {unit: curve.until(span) for unit, curve in curves.items()} for arm, curves in arms.items()}


def same_span(arms: Mapping[str, Curves]) -> tuple[Arms, int]:
    """The units that all arms have, with curves cut to the generator steps that all of these have; and their number."""
    units = [unit for unit in next(iter(arms.values())) if all(unit in curves for curves in arms.values())]
    common = {arm: {unit: curves[unit] for unit in units} for arm, curves in arms.items()}
    if not units:
        return common, 0
    cut = cut_to_shared_span(common)
    return cut, next(iter(next(iter(cut.values())).values())).last_step


def first_reaching(x: np.ndarray, y: np.ndarray, level: float) -> Reached:
    """Where y first reaches the level, by linear interpolation between neighbouring points; x ascends."""
    [above] = np.nonzero(y >= level)
    if not above.size:
        return Reached(float(x[-1]), False)
    index = above[0]
    if index == 0:
        return Reached(float(x[0]), True)
    share = (level - y[index - 1]) / (y[index] - y[index - 1])
    return Reached(float(x[index - 1] + share * (x[index] - x[index - 1])), True)


def steps_to(curve: Curve, level: float = LEVEL) -> Reached:
    """Generator steps to an accuracy."""
    return first_reaching(*curve.by_step(), level)


def tokens_to(curve: Curve, level: float = LEVEL) -> Reached:
    """Tokens that both roles sampled, warm-up included, to an accuracy."""
    return first_reaching(curve.of("sampled_tokens"), curve.of("accuracy"), level)


def mean_accuracy(curve: Curve) -> float:
    """Area under accuracy over generator steps, by trapezoids, divided by the steps: the mean over the run."""
    steps, accuracy = curve.by_step()
    span = steps[-1] - steps[0]
    return float(np.trapezoid(accuracy, steps) / span) if span else float(accuracy[-1])
