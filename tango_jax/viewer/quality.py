"""Verifier quality computed from the rollouts: confusion tables, agreement with gold steps, by position and over time.

Takes rollouts as in rollouts/*.jsonl, one after the other, and returns numbers for the charts, each with the number of
cases behind it and a 95 % interval. Runs while a report is built.

The intervals take cases as independent. Steps of a solution and samples of a problem are not, so the intervals are
rather too narrow than too wide.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tango_jax.tracking.intervals import wilson
from tango_jax.tracking.scores import VERDICTS, class_scores

LEAST_OF_CLASS = 5  # minimum number per class for an F1: with fewer, the value is 0, 1 or chance


class Judged(NamedTuple):
    """One verification, reduced to what is counted."""

    turn: int
    role: str  # whose turn it is: generator or verifier
    is_correct: bool
    verdict: str
    judgements: tuple  # one per step of the solution; None if the verification is misaligned
    gold: tuple | None
    kinds: tuple | None = None  # of the steps, where the task names them

    @property
    def is_right(self) -> bool:
        """Whether the verdict agrees with the grade."""
        return self.verdict == ("CORRECT" if self.is_correct else "INCORRECT")


class Rates(NamedTuple):
    """Points of a curve of rates, x ascending: each with its interval and the number of cases."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: np.ndarray


def judged(rollout: dict) -> list[Judged]:
    """The reduced verifications of one rollout; none of an evaluation, which is greedy."""
    solution, found = rollout["solution"], []
    if rollout["role"] == "evaluation":
        return found
    steps, kinds = len(solution["steps"]), solution.get("step_kinds")
    for item in rollout["verifications"]:
        labels = tuple(item["judgements"]) if item["is_aligned"] else (None,) * steps
        gold = None if solution["gold_steps"] is None else tuple(solution["gold_steps"])
        found.append(Judged(rollout["turn"], rollout["role"], solution["is_correct"], item["verdict"], labels, gold,
                            None if kinds is None else tuple(kinds)))  # fmt: skip
    return found


def of_one_role(items: list[Judged]) -> list[Judged]:
    """Those of the generator's turns, whose solutions are rewarded; if there are none, those of the verifier's turns.

    The two are not mixed. The verifier may learn from other, easier problems, and the first turns are mostly its own,
    because of the warm-up: a trend of both together would show how the mixture changes, rather than the verifier.
    """
    return [item for item in items if item.role == "generator"] or items


def early_and_late(items: list[Judged]) -> dict[str, list[Judged]]:
    """The first and the last third of the dumped turns of one role, or a single part if there are too few turns."""
    turns = sorted({item.turn for item in items})
    third = len(turns) // 3
    if third == 0:
        return {f"all turns of the {items[0].role}": items} if items else {}
    whose, early, late = f"{items[0].role}'s turns", turns[third - 1], turns[-third]
    return {
        f"{whose} {turns[0]} to {early}": [item for item in items if item.turn <= early],
        f"{whose} {late} to {turns[-1]}": [item for item in items if item.turn >= late],
    }


# Tables.


def confusion(items: Iterable[Judged]) -> dict[str, dict[str, int]]:
    """{"right": {"CORRECT": 12, ...}, "wrong": ...}: verdicts by the grade of the solution."""
    counts = {grade: dict.fromkeys(VERDICTS, 0) for grade in ("right", "wrong")}
    for item in items:
        counts["right" if item.is_correct else "wrong"][item.verdict] += 1
    return counts


def step_confusion(items: Iterable[Judged]) -> dict[str, dict[str, int]]:
    """{"right": {"CORRECT": 12, ..., "not judged": 1}, "wrong": ...}: judgements by the gold label of the step."""
    names = {True: "CORRECT", False: "INCORRECT", None: "not judged"}
    counts = {label: dict.fromkeys(names.values(), 0) for label in ("right", "wrong")}
    for item in _with_gold(items):
        for judgement, gold in zip(item.judgements, item.gold, strict=True):
            counts["right" if gold else "wrong"][names[judgement]] += 1
    return counts


def misjudged_by_kind(items: Iterable[Judged]) -> dict[tuple[str, bool], tuple[int, int]]:
    """{(kind, gold label): (judgements that differ from the label, judgements)}, of steps that were judged."""
    counts: dict[tuple[str, bool], tuple[int, int]] = {}
    for item in _with_gold(items):
        for kind, judgement, gold in zip(item.kinds or (), item.judgements, item.gold, strict=bool(item.kinds)):
            if judgement is not None:
                misses, total = counts.get((kind, gold), (0, 0))
                counts[kind, gold] = misses + (judgement is not gold), total + 1
    return counts


# Curves.


def step_f1_by_position(items: Iterable[Judged]) -> Rates:
    """Macro-F1 of the judgements of step 1, 2, ... against the gold steps."""
    pairs = {}
    for item in _with_gold(items):
        for position, pair in enumerate(zip(item.judgements, item.gold, strict=True), 1):
            pairs.setdefault(position, []).append(pair)
    return _f1_of(pairs)


def step_f1_by_count(items: Iterable[Judged]) -> Rates:
    """Macro-F1 of all judgements, by the number of steps of the solution."""
    pairs = {}
    for item in _with_gold(items):
        pairs.setdefault(len(item.gold), []).extend(zip(item.judgements, item.gold, strict=True))
    return _f1_of(pairs)


def verdict_f1_by_count(items: Iterable[Judged]) -> Rates:
    """Macro-F1 of the verdicts, by the number of steps of the solution."""
    pairs = {}
    for item in items:
        pairs.setdefault(len(item.judgements), []).append((VERDICTS[item.verdict], item.is_correct))
    return _f1_of(pairs)


def recall_by_turn(items: Iterable[Judged], label: bool) -> Rates:
    """Recall of the verifier on steps whose gold label is `label`, turn by turn."""
    return _share_by_turn((item.turn, judgement is label) for item in _with_gold(items)
                          for judgement, gold in zip(item.judgements, item.gold, strict=True) if gold is label)


def disagreement_by_turn(items: Iterable[Judged], verdict: str, is_correct: bool) -> Rates:
    """Share of a turn's verifications with this verdict on a solution of this grade."""
    return _share_by_turn((item.turn, item.verdict == verdict and item.is_correct == is_correct) for item in items)


def wrong_steps_by_turn(items: Iterable[Judged]) -> Rates:
    """Share of a turn's right verdicts that come with a judgement of a step that differs from its gold label."""
    return _share_by_turn((item.turn, item.judgements != item.gold) for item in _with_gold(items)
                          if item.is_right and item.gold and None not in item.judgements)


def groups_by_turn(grades: dict[tuple[int, int], list[bool]]) -> dict[str, Rates]:
    """Shares of groups whose answers are all wrong, mixed and all right, from the grades of each (turn, group)."""
    kinds = {"all wrong": lambda of: not any(of), "mixed": lambda of: any(of) and not all(of), "all right": all}
    return {name: _share_by_turn((turn, is_kind(of)) for (turn, _), of in grades.items())
            for name, is_kind in kinds.items()}


def _with_gold(items: Iterable[Judged]) -> list[Judged]:
    return [item for item in items if item.gold is not None]


def _share_by_turn(outcomes: Iterable[tuple[int, bool]]) -> Rates:
    counts: dict[int, tuple[int, int]] = {}
    for turn, outcome in outcomes:
        hits, total = counts.get(turn, (0, 0))
        counts[turn] = hits + bool(outcome), total + 1
    return _rates({turn: (hits / total, *wilson(hits / total, total), total) for turn, (hits, total) in counts.items()})


def _f1_of(pairs: dict[int, list[tuple]]) -> Rates:
    """Macro-F1 over (predicted, actual) pairs, for keys at which both classes are common enough."""
    points = {}
    for x, of in pairs.items():
        predicted, actual = [pair[0] for pair in of], [pair[1] for pair in of]
        if min(sum(actual), len(actual) - sum(actual)) >= LEAST_OF_CLASS:
            bounds = [_f1_interval(predicted, actual, label) for label in (True, False)]
            low, high = (sum(bound) / 2 for bound in zip(*bounds, strict=True))
            points[x] = (class_scores(predicted, actual)["f1"], low, high, len(of))
    return _rates(points)


def _f1_interval(predicted: list, actual: list, label: bool) -> tuple[float, float]:
    """The interval of a class's F1, which is 2 J / (1 + J) of the share J = hits / (hits + misses + false alarms).

    It rises with J, so that Wilson's bounds of J give its bounds. The macro-F1 takes the means of both classes' bounds,
    which is right if they rise and fall together, and else too wide.
    """
    hits = sum(p is label and a == label for p, a in zip(predicted, actual, strict=True))
    either = sum(p is label or a == label for p, a in zip(predicted, actual, strict=True))
    low, high = (2 * bound / (1 + bound) for bound in wilson(hits / either, either))
    return low, high


def _rates(points: dict[int, tuple[float, float, float, int]]) -> Rates:
    """The points {x: (share, low, high, n)} as columns."""
    x = sorted(points)
    columns = np.array([points[key] for key in x], float).reshape(-1, 4).T
    return Rates(np.array(x, float), *columns)
