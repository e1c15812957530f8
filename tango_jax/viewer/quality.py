"""The section on the verifier's quality: panels and tables from a run's dumped rollouts."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tango_jax.method.arms import BLACK, BLUE, GREEN, GREY, SKY, VERMILION
from tango_jax.tracking.curves import Series, series
from tango_jax.tracking.intervals import wilson
from tango_jax.tracking.metrics import TURN_PHASES, VERIFIER_TURNS
from tango_jax.tracking.scores import LEFT_OUT_SENTENCE, VERDICTS
from tango_jax.tracking.turn_metrics import tokens_scored
from tango_jax.viewer.charts import TURN, pool_size, warmup_shade
from tango_jax.viewer.panels import FEW, Rates, bars, line, noisy, panel, rated, with_content
from tango_jax.viewer.runs import Run

STOPPED = "after its first INCORRECT"  # a step that a verifier with verifier.stop_at_first_error did not judge
SAID = {True: "CORRECT", False: "INCORRECT", None: "not judged"}
DISAGREE = {("wrong", "CORRECT"): "false_accept", ("right", "INCORRECT"): "false_reject"}
MISJUDGED = {("wrong", "CORRECT"): "misjudged", ("right", "INCORRECT"): "misjudged"}
UNUSABLE = {"INVALID": "invalid", "not judged": "misaligned"}


class Judged(NamedTuple):
    turn: int
    role: str  # of the turn: generator or verifier
    is_correct: bool
    verdict: str
    judgements: tuple  # one per step of the solution; None if the verification is misaligned; or STOPPED
    gold: tuple | None


def judged(rollout: dict) -> list[Judged]:
    """The verifications of one rollout; none of an evaluation, which is greedy."""
    solution, found = rollout["solution"], []
    if rollout["role"] == "evaluation":
        return found
    for item in rollout["verifications"]:
        labels = tuple(STOPPED if mark is None else mark for mark in item["judgements"])
        labels = labels if item["is_aligned"] else (None,) * len(solution["steps"])
        gold = None if solution["gold_steps"] is None else tuple(solution["gold_steps"])
        found.append(Judged(rollout["turn"], rollout["role"], solution["is_correct"], item["verdict"], labels, gold))
    return found


def of_one_role(items: list[Judged]) -> list[Judged]:
    """Items of the generator's turns; without any, of the verifier's, whose problems may be easier."""
    return [item for item in items if item.role == "generator"] or items


def section(run: Run, items: list[Judged]) -> dict:
    """{"note": what was measured on what, "confusion": tables, "panels": curves}."""
    return {"note": _note(run, items), "confusion": confusion_tables(items), "panels": panels(run, items)}


def panels(run: Run, items: list[Judged]) -> list[dict]:
    rows, warmup = run.rows, warmup_shade(run.rows)

    def of(name: str, phases=TURN_PHASES) -> Series:
        return series(rows, phases, "step", name)

    f1 = line("verdicts, macro-F1", of("verifier/pool/outcome_f1", {"eval"}), BLUE, "--", "square")
    f1 += line("steps, macro-F1", of("verifier/pool/step_f1", {"eval"}), GREEN, "-", "triangle-up")
    if _left_out(run):
        f1 += line("first error, F1", of("verifier/pool/first_error_f1", {"eval"}), VERMILION, "-.", "cross")
    verdicts = noisy("agrees with the grader", of("verifier/reward/correctness"), GREEN)
    verdicts += noisy("says CORRECT, verifier's turns", of("verifier/rate_correct", {"warmup", "verifier"}), BLUE)
    verdicts += noisy("says CORRECT, generator's turns", of("verifier/live_rate_correct", {"generator"}), SKY, "--")
    verdicts += noisy("says CORRECT, part of generator's turns", of("verifier/judged_rate_correct", {"generator"}),
                      SKY)
    verdicts += noisy("share of correct answers in that part", of("verifier/judged_solutions_correct", {"generator"}),
                      GREY, "--")
    verdicts += noisy("quality by a second judgement", of("verifier/reward/quality"), BLACK)
    verdicts += noisy("INVALID", of("verifier/rate_invalid"), VERMILION, "-.")
    if verdicts:  # verdicts mean something only next to the verifier's rates
        verdicts += noisy("correct answers, verifier's turns", of("verifier/solutions_correct", {"warmup", "verifier"}),
                          GREY, "-.")
        verdicts += noisy("correct answers, generator's turns", of("generator/reward/outcome", {"generator"}), GREY,
                          ":")
    shares = bars("false accept", disagreement_by_turn(items, "CORRECT", False), VERMILION, "/")
    shares += bars("false reject", disagreement_by_turn(items, "INCORRECT", True), BLUE, "\\")
    shares += bars("INVALID, right answer", disagreement_by_turn(items, "INVALID", True), GREY, "x")
    shares += bars("INVALID, wrong answer", disagreement_by_turn(items, "INVALID", False), GREY, ".")
    steps = rated("correct steps approved", recall_by_turn(items, True), GREEN, "-", "triangle-up")
    steps += rated("wrong steps rejected", recall_by_turn(items, False), VERMILION, "--", "x")
    return with_content(
        [
            panel("Verifier on the fixed pool", f"Agreement with the known labels on {pool_size(run)} fixed solutions, "
                  f"greedy.{_left_out(run)}", f1, TURN, score=True, **warmup),
            panel("Verdicts in training", "A collapsed verifier says CORRECT always or never."
                  f"{_by_label(run)}{_practice(run)}", verdicts, TURN, score=True, **warmup),
            panel("Disagreements with the grader", f"Share of a turn's verifications, in {_whose(items)}.", shares,
                  TURN, barmode="stack"),
            panel("Agreement with gold steps", f"For steps with a known label, in {_whose(items)}. The steps of a "
                  f"misaligned verification count as missed{_stops(items)}.", steps, TURN, score=True),
        ]
    )


def confusion_tables(items: list[Judged]) -> list[dict]:
    """Verdicts by grade, and judgements by gold label; a disagreement links to its rollouts."""
    verdicts = [(item.is_correct, item.verdict) for item in items]
    steps = [(gold, SAID.get(judgement, judgement)) for _, judgement, gold in _steps(items)]
    said = [*SAID.values(), *[STOPPED] * any(name == STOPPED for _, name in steps)]
    tables = [("Verdicts by the grade of the answer", "answer", confusion(verdicts, VERDICTS), DISAGREE),
              ("Judgements by the gold label of the step", "step", confusion(steps, said), MISJUDGED)]
    return [_matrix(*table, items[0].role) for table in tables if any(map(sum, map(dict.values, table[2].values())))]


def confusion(pairs: Iterable[tuple[bool, str]], names: Iterable[str]) -> dict[str, dict[str, int]]:
    """{"right": {name: count}, "wrong": ...} of pairs (is it right, name)."""
    counts = {label: dict.fromkeys(names, 0) for label in ("right", "wrong")}
    for is_right, name in pairs:
        counts["right" if is_right else "wrong"][name] += 1
    return counts


def recall_by_turn(items: Iterable[Judged], label: bool) -> Rates:
    """Steps after the first INCORRECT, which a verifier is to leave out, do not count: they would make the rates of one
    that finds the error lower than those of one that misses it."""
    return share_by_turn((turn, judgement is label) for turn, judgement, gold in _steps(items)
                         if gold is label and judgement != STOPPED)


def disagreement_by_turn(items: Iterable[Judged], verdict: str, is_correct: bool) -> Rates:
    return share_by_turn((item.turn, item.verdict == verdict and item.is_correct == is_correct) for item in items)


def share_by_turn(outcomes: Iterable[tuple[int, bool]]) -> Rates:
    found: dict[int, list[bool]] = {}
    for turn, outcome in outcomes:
        found.setdefault(turn, []).append(bool(outcome))
    shares = {turn: sum(found[turn]) / len(found[turn]) for turn in sorted(found)}
    points = [(turn, share, *wilson(share, len(found[turn])), len(found[turn])) for turn, share in shares.items()]
    return Rates(*np.array(points, float).reshape(-1, 5).T)


def _steps(items: Iterable[Judged]) -> list[tuple]:
    """(turn, judgement, gold label) of every step with a known label."""
    return [(item.turn, *pair) for item in items if item.gold is not None
            for pair in zip(item.judgements, item.gold, strict=True)]


def _matrix(caption: str, of: str, counts: dict, filters: dict[tuple[str, str], str], role: str) -> dict:
    rows = []
    for label, row in counts.items():
        total, cells = sum(row.values()), []
        grade = f"&grade={label}" if of == "answer" else ""  # steps have no filter for their labels
        for name, count in row.items():
            chosen = UNUSABLE.get(name) or filters.get((label, name))
            cells.append({"name": name, "count": count, "part": count / max(1, total), "share": _told(count, total),
                          "link": f"only={chosen}{grade}&role={role}" if chosen else ""})
        rows.append({"label": label, "total": total, "cells": cells})
    return {"caption": caption, "of": of, "rows": rows}


def _told(count: int, total: int) -> str:
    if not total:
        return ""
    low, high = wilson(count / total, total)
    return f"{100 * count / total:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"


def _whose(items: list[Judged]) -> str:
    return f"the {items[0].role}'s turns" if items else "no turns"


def _stops(items: list[Judged]) -> str:
    leaves_out = any(STOPPED in item.judgements for item in items)
    return f"; those {STOPPED}, where the verifier stops, do not count" if leaves_out else ""


def _by_label(run: Run) -> str:
    told = " In the verifier's turns of no_labels solutions are chosen by label: half are labelled right if possible."
    return told if _has_labels(run) else ""


def _has_labels(run: Run) -> bool:
    return any("generator/label_accuracy" in row for row in run.rows if row["phase"] in VERIFIER_TURNS)


def _left_out(run: Run) -> str:
    return f" {LEFT_OUT_SENTENCE}" if run.settings.get("verifier.stop_at_first_error") else ""


def _practice(run: Run) -> str:
    told = (" rl.practice chose the problems of the verifier's turns: those that the generator should solve half the "
            f"time{', by the labels of no_labels' * _has_labels(run)}.")
    return told if run.settings.get("rl.practice", "all") != "all" else ""


def _note(run: Run, items: list[Judged]) -> str:
    if not items:
        return "No rollouts of a verifier were dumped by this run, so some charts and tables are missing."
    settings, chosen = run.settings, ""
    if any(f"{items[0].role}/batches_sampled" in row for row in run.rows):
        chosen += " Dynamic sampling chose them: most groups with equal rewards are missing."
    if items[0].role == "verifier":
        chosen += _practice(run)
    is_part = any(name.startswith(("generator/judged_share", "verifier/judged_")) for row in run.rows for name in row)
    if items[0].role == "generator" and is_part:
        chosen += (" In the generator's turns verdicts are of a part of the solutions, which rl.judge, rl.trust, "
                   "dynamic sampling or the method choose: their share of correct ones is not that of the turn.")
    how = f"sampled at temperature {settings['verifier.temperature']:g}"
    phases = ("generator",) if items[0].role == "generator" else VERIFIER_TURNS
    if any(tokens_scored(row) and not row.get("verifier/tokens_sampled") for row in run.rows if row["phase"] in phases):
        how = ("whose judgements are read in one pass, not sampled; of several judgements of a solution by its marks, "
               "each is drawn")
    has_pool = any("verifier/pool/outcome_f1" in row for row in run.rows)
    return (
        f"{'The fixed pool is judged greedily, so that runs can be compared. ' * has_pool}"
        f"The tables, disagreements and gold steps count the dumped rollouts of {_whose(items)}, {how}. Small pale "
        f"points have fewer than {FEW} cases. The 95 % intervals treat cases as independent, so they are somewhat too "
        f"narrow.{chosen}"
    )
