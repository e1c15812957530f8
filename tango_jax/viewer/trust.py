"""The section "Can the verifier be trusted?": takes a run and what its dumped rollouts hold, returns panels and tables.

Counts and rates come from quality.py. The verifications are those of one role's turns (`quality.of_one_role`), which
the captions name. Panels without curves, and tables without cases, are left out.
"""

from tango_jax.method.arms import BLUE, GREEN, GREY, SKY, VERMILION
from tango_jax.runtime.model_text import on_one_line
from tango_jax.runtime.user_code import is_user_code
from tango_jax.tracking.curves import Series, series
from tango_jax.tracking.intervals import wilson
from tango_jax.viewer import quality
from tango_jax.viewer.charts import TURN, responses_of_a_turn, warmup_shade
from tango_jax.viewer.panels import FEW, bars, noisy, panel, rated, with_content
from tango_jax.viewer.runs import Run

STEPS = "step of the solution"
# Cells of the matrices -> the filter that shows their rollouts.
DISAGREE = {("wrong", "CORRECT"): "false_accept", ("right", "INCORRECT"): "false_reject"}
MISJUDGED = {("wrong", "CORRECT"): "misjudged", ("right", "INCORRECT"): "misjudged"}


def panels(run: Run, judged: list[quality.Judged]) -> list[dict]:
    """Where the verifier is right: by turn, by step, by length. From the dumped rollouts and the metrics."""
    parts = quality.early_and_late(judged)
    looks = ((GREY, ":", "circle-open"), (GREEN, "-", "triangle-up"))[-len(parts) or 2 :]
    looks = list(zip(parts.items(), looks, strict=True)) if parts else []
    accepted = bars("false accept", quality.disagreement_by_turn(judged, "CORRECT", False), VERMILION, "/")
    rejected = bars("false reject", quality.disagreement_by_turn(judged, "INCORRECT", True), BLUE, "\\")
    invalid = bars("INVALID, right answer", quality.disagreement_by_turn(judged, "INVALID", True), GREY, "x")
    invalid += bars("INVALID, wrong answer", quality.disagreement_by_turn(judged, "INVALID", False), GREY, ".")
    recalls = rated("correct steps approved", quality.recall_by_turn(judged, True), GREEN, "-", "triangle-up")
    recalls += rated("wrong steps rejected", quality.recall_by_turn(judged, False), VERMILION, "--", "x")
    wrong_steps = rated("right verdicts with a misjudged step", quality.wrong_steps_by_turn(judged), VERMILION)

    def rate(name: str, phases: set[str]) -> Series:
        return series(run.rows, phases, "step", name)

    def early_late(rates_fn) -> list[dict]:
        return [trace for (name, part), look in looks for trace in rated(name, rates_fn(part), *look)]

    said = noisy("says CORRECT, verifier's turns", rate("verifier/rate_correct", {"warmup", "verifier"}), BLUE)
    said += noisy("says CORRECT, generator's turns", rate("verifier/live_rate_correct", {"generator"}), SKY, "--")
    said += noisy("says CORRECT, of the part it judges", rate("verifier/judged_rate_correct", {"generator"}), SKY)
    if said:  # only meaningful next to the verifier's rates
        said += noisy("share of correct answers", rate("generator/reward/outcome", {"generator"}), GREY, ":")
    whose = _whose(judged)
    return with_content(
        [
            panel("Right verdict, wrong steps", "Share of the right verdicts that come with a misjudged step: right, "
                  f"but not because of the steps. In {whose}.", wrong_steps, TURN, score=True),
            panel("Disagreements with the grader", f"Share of a turn's verifications, in {whose}.",
                  accepted + rejected + invalid, TURN, barmode="stack"),
            panel("Rate of CORRECT", "Compared with the share of correct solutions; a collapsed verifier is flat at 0 "
                  f"or 1. {responses_of_a_turn(run)} verdicts a turn.", said, TURN, score=True,
                  **warmup_shade(run.rows)),
            panel("Agreement with gold steps", f"For steps with a known label, in {whose}.", recalls, TURN, score=True),
            panel("Step F1 by position", "Macro-F1 of the judgement of step 1, 2, ... against gold steps.",
                  early_late(quality.step_f1_by_position), STEPS, score=True),
            panel("Step F1 by number of steps", "Macro-F1 of all judgements on solutions with this many steps.",
                  early_late(quality.step_f1_by_count), "steps in the solution", score=True),
            panel("Verdict F1 by number of steps", "Macro-F1 of the verdicts on solutions with this many steps.",
                  early_late(quality.verdict_f1_by_count), "steps in the solution", score=True),
        ]
    )  # fmt: skip


def groups(run: Run, grades: dict[tuple[int, int], list[bool]]) -> list[dict]:
    """Shares of the generator's groups whose answers are all wrong, mixed, all right; see quality.groups_by_turn."""
    looks = {"all wrong": (VERMILION, "/"), "mixed": (GREEN, ""), "all right": (BLUE, "\\")}
    rates = quality.groups_by_turn(grades)
    traces = [trace for name, look in looks.items() for trace in bars(name, rates[name], *look)]
    caption = f"Samples of a problem, dumped turns. {_which_teach(run.settings)}"
    if further := run.settings["rl.dynamic_sampling"]:
        caption += (f" These are the groups that rl.dynamic_sampling={further} chose; of all that were sampled, a "
                    "smaller share may be mixed.")  # fmt: skip
    return with_content([panel("Groups by their answers", caption, traces, TURN, barmode="stack")])


def _which_teach(settings: dict) -> str:
    """Which groups have an outcome advantage: where the answers differ, if the reward is of answers alone."""
    own = [name for name in ("arm", "generator.loss.algorithm") if is_user_code(settings[name])]
    if own:
        return f"Which of them have an outcome advantage depends on {own[0]}={on_one_line(settings[own[0]])}."
    if settings["generator.loss.algorithm"] == "reinforce_pp":
        return ("REINFORCE++ compares the rewards of a whole turn, so that a group whose answers are all alike can "
                "have an outcome advantage, too.")
    if settings["rl.samples_per_prompt"] == 1:
        return "A sample that is alone in its group keeps its reward as its outcome advantage."
    others = [name for name in ("rl.format_weight", "generator.reward") if settings[name]]
    if others:
        shown = " and ".join(f"{name}={settings[name]}" for name in others)
        return (f"The outcome advantage compares rewards, to which {shown} adds: groups whose answers are all alike "
                "can have one, too.")
    return "Only mixed groups have an outcome advantage to learn from."


def confusion_tables(judged: list[quality.Judged]) -> list[dict]:
    """Verdicts by grade, and judgements by gold label, early and late in the run.

    Each cell has its count and its share of the row with an interval; a disagreement names the filter that shows it.
    """
    tables = []
    for name, part in quality.early_and_late(judged).items():
        verdicts = _matrix(f"Verdicts by the grade of the answer, {name}", "answer", quality.confusion(part), DISAGREE)
        steps = _matrix(f"Judgements by the gold label of the step, {name}", "step", quality.step_confusion(part),
                        MISJUDGED)
        turns = [min(item.turn for item in part), max(item.turn for item in part)]
        tables += [made | {"role": part[0].role, "turns": turns} for made in (verdicts, steps)
                   if any(row["total"] for row in made["rows"])]  # fmt: skip
    return tables


def _matrix(caption: str, of: str, counts: dict[str, dict[str, int]], filters: dict[tuple[str, str], str]) -> dict:
    rows = []
    for label, row in counts.items():
        total = sum(row.values())
        cells = [{"name": name, "count": count, "share": _told(count, total),
                  "filter": {"INVALID": "invalid", "not judged": "misaligned"}.get(name, filters.get((label, name)))}
                 for name, count in row.items()]  # fmt: skip
        rows.append({"label": label, "total": total, "cells": cells})
    return {"caption": caption, "of": of, "rows": rows}


def kinds_table(judged: list[quality.Judged]) -> dict | None:
    """How often the verifier misjudges steps of each kind, early and late, where the task names kinds."""
    parts = {name: quality.misjudged_by_kind(part) for name, part in quality.early_and_late(judged).items()}
    keys = sorted({key for part in parts.values() for key in part}, key=lambda key: (key[1], key[0]))
    if not keys:
        return None
    rows = []
    for kind, gold in keys:
        cells = [_told(*part.get((kind, gold), (0, 0)), with_total=True) for part in parts.values()]
        rows.append([kind, "right" if gold else "wrong", *cells])
    caption = "Judgements that differ from the gold label, by the kind of the step, with 95 % intervals."
    return {"caption": caption, "head": ["kind of step or mistake", "gold label", *parts], "rows": rows}


def _told(count: int, total: int, with_total: bool = False) -> str:
    """A share as `12 % [8, 17]`, with `n = 250` behind it if asked for; empty without any cases."""
    if not total:
        return ""
    low, high = wilson(count / total, total)
    told = f"{100 * count / total:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"
    return f"{told}, n = {total:,}" if with_total else told


def _whose(judged: list[quality.Judged]) -> str:
    return f"the {judged[0].role}'s turns" if judged else "no turns"


def _which(run: Run) -> str:
    """Which of its solutions a generator's turn has judged, where that is not all."""
    judge = run.settings.get("rl.judge", "all")
    return "" if judge == "all" else f" that rl.judge={judge} has judged"


def measured_on(run: Run, judged: list[quality.Judged]) -> str:
    """Why the headline's figures of the verifier differ from those that are computed from rollouts."""
    return (
        "The headline's F1 is greedy and on a fixed pool of solutions, so that it can be compared over a run and "
        f"between runs. What follows counts the dumped rollouts of {_whose(judged)} instead: sampled at temperature "
        f"{run.settings['verifier.temperature']:g}, on the solutions of that turn{_which(run)}. "
        "The verifier's own turns, which may have easier problems, count only if the generator's have no verdicts. "
        "When nearly all solutions are right, or nearly all wrong, the rare class decides an F1, which then falls even "
        "if the verifier judges as well as before. "
        f"Small pale points have fewer than {FEW} cases; intervals are 95 %, as if all cases were independent, and so "
        "rather too narrow."
    )
