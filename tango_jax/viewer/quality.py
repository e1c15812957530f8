"""Verifier quality computed from the rollouts: confusion tables, agreement with gold steps, by position and over time.

Takes rollouts as in rollouts/*.jsonl, one after the other, and returns numbers for the charts. Runs while a report is
built.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tango_jax.tracking.curves import Series
from tango_jax.tracking.scores import class_scores

VERDICTS = ("CORRECT", "INCORRECT", "INVALID")
LEAST_OF_CLASS = 5  # minimum number per class for an F1 or a share: with fewer, the value is 0, 1 or chance


class Judged(NamedTuple):
    """One verification, reduced to what is counted."""

    turn: int
    is_correct: bool
    verdict: str
    judgements: tuple  # one per step of the solution; None if the verification is misaligned
    gold: tuple | None


def judged(rollout: dict) -> list[Judged]:
    """The reduced verifications of one rollout."""
    solution, found = rollout["solution"], []
    for item in rollout["verifications"]:
        steps = len(solution["steps"])
        labels = tuple(item["judgements"]) if item["is_aligned"] else (None,) * steps
        gold = None if solution["gold_steps"] is None else tuple(solution["gold_steps"])
        found.append(Judged(rollout["turn"], solution["is_correct"], item["verdict"], labels, gold))
    return found


def early_and_late(items: list[Judged]) -> dict[str, list[Judged]]:
    """The first and the last third of the dumped turns, or a single part if there are too few turns."""
    turns = sorted({item.turn for item in items})
    third = len(turns) // 3
    if third == 0:
        return {"all turns": items} if items else {}
    early, late = turns[third - 1], turns[-third]
    return {
        f"turns {turns[0]} to {early}": [item for item in items if item.turn <= early],
        f"turns {late} to {turns[-1]}": [item for item in items if item.turn >= late],
    }


def confusion(items: Iterable[Judged]) -> dict[str, dict[str, int]]:
    """{"right": {"CORRECT": 12, ...}, "wrong": ...}: verdicts by the grade of the solution."""
    counts = {grade: dict.fromkeys(VERDICTS, 0) for grade in ("right", "wrong")}
    for item in items:
        counts["right" if item.is_correct else "wrong"][item.verdict] += 1
    return counts


def step_f1_by_position(items: Iterable[Judged]) -> Series:
    """Macro-F1 of the judgements of step 1, 2, ... against the gold steps."""
    pairs = {}
    for item in _with_gold(items):
        for position, pair in enumerate(zip(item.judgements, item.gold, strict=True), 1):
            pairs.setdefault(position, []).append(pair)
    return _f1_of(pairs)


def step_f1_by_count(items: Iterable[Judged]) -> Series:
    """Macro-F1 of all judgements, by the number of steps of the solution."""
    pairs = {}
    for item in _with_gold(items):
        pairs.setdefault(len(item.gold), []).extend(zip(item.judgements, item.gold, strict=True))
    return _f1_of(pairs)


def verdict_f1_by_count(items: Iterable[Judged]) -> Series:
    """Macro-F1 of the verdicts, by the number of steps of the solution."""
    pairs = {}
    for item in items:
        predicted = {"CORRECT": True, "INCORRECT": False, "INVALID": None}[item.verdict]
        pairs.setdefault(len(item.judgements), []).append((predicted, item.is_correct))
    return _f1_of(pairs)


def recall_by_turn(items: Iterable[Judged], label: bool) -> Series:
    """Recall of the verifier on steps whose gold label is `label`, turn by turn."""
    pairs = {}
    for item in _with_gold(items):
        pairs.setdefault(item.turn, []).extend(
            (judgement, gold) for judgement, gold in zip(item.judgements, item.gold, strict=True) if gold is label
        )
    # Late in a run a turn has only one or two wrong steps, whose recall would be 0 or 1 by chance.
    return _points({turn: sum(judgement is label for judgement, _ in of) / len(of) for turn, of in pairs.items()
                    if len(of) >= LEAST_OF_CLASS})  # fmt: skip


def disagreement_by_turn(items: Iterable[Judged], verdict: str, is_correct: bool) -> Series:
    """Share of a turn's verifications with this verdict on a solution of this grade."""
    hits, totals = {}, {}
    for item in items:
        totals[item.turn] = totals.get(item.turn, 0) + 1
        hits[item.turn] = hits.get(item.turn, 0) + (item.verdict == verdict and item.is_correct == is_correct)
    return _points({turn: hits[turn] / totals[turn] for turn in totals})


def _with_gold(items: Iterable[Judged]) -> list[Judged]:
    return [item for item in items if item.gold is not None]


def _f1_of(pairs: dict[int, list[tuple]]) -> Series:
    """Macro-F1 over (predicted, actual) pairs, for keys at which both classes are common enough."""
    scores = {}
    for x, of in pairs.items():
        predicted, actual = [pair[0] for pair in of], [pair[1] for pair in of]
        if min(sum(actual), len(actual) - sum(actual)) >= LEAST_OF_CLASS:
            scores[x] = class_scores(predicted, actual)["f1"]
    return _points(scores)


def _points(values: dict[int, float]) -> Series:
    x = sorted(values)
    return Series(np.array(x, float), np.array([values[key] for key in x], float))
