"""The charts of the report: takes runs and their verifiers' judgements, returns sections of panels (panels.py).

Curves of metrics that a run did not log are missing, and panels without curves are left out.
"""

from collections.abc import Sequence

from tango_jax.arms import ARMS, BLUE, GREEN, GREY, SKY, VERMILION
from tango_jax.tracking.curves import Series, label_of, looks_of, over_seeds, series
from tango_jax.viewer import quality
from tango_jax.viewer.panels import band, bars, line, noisy, panel, with_content
from tango_jax.viewer.runs import Run

LEARNS = {"warmup", "generator", "verifier"}  # phases with an update


def training(run: Run) -> list[dict]:
    """Figure 1: both roles over training, with health metrics."""
    rows = run.rows

    def of(name: str, phases=LEARNS, x: str = "step") -> Series:
        return series(rows, phases, x, name)

    def both(name: str) -> list[dict]:
        return noisy("generator", of(f"generator/{name}", {"generator"}), VERMILION) + noisy(
            "verifier", of(f"verifier/{name}", {"warmup", "verifier"}), BLUE, "--"
        )

    warmup = _warmup(rows)
    accuracy = line("greedy, held out", of("generator/accuracy", {"eval"}), VERMILION)
    reward = noisy("sampled, in training", of("generator/reward/outcome", {"generator"}), GREY, "--")
    f1 = line("verdicts, macro-F1", of("verifier/pool/outcome_f1", {"eval"}), BLUE, "--", "square")
    f1 += line("steps, macro-F1", of("verifier/pool/step_f1", {"eval"}), GREEN, "-", "triangle-up")
    verdicts = noisy("agrees with the grader", of("verifier/reward/correctness"), GREEN)
    verdicts += noisy("says CORRECT", of("verifier/rate_correct"), BLUE, "--")
    verdicts += noisy("share of correct answers", of("verifier/solutions_correct"), GREY, ":")
    verdicts += noisy("INVALID", of("verifier/rate_invalid"), VERMILION, "-.")
    turn = "turn (both roles)"
    return with_content(
        [
            panel("Generator", "Share of correct answers: greedy on held-out problems, and sampled in training.",
                  accuracy + reward, turn, score=True, **warmup),
            panel("Verifier on the fixed pool", "Agreement with the known labels on a fixed set of solutions.",
                  f1, turn, score=True, **warmup),
            panel("Verdicts in training", "How often it says CORRECT, and the share of correct solutions.",
                  verdicts, turn, score=True, **warmup),
            panel("Entropy", "Nats per token; near 0 the policy no longer explores.", both("entropy"), turn, **warmup),
            panel("KL to the reference", "For policies with a reference.", both("kl"), turn, **warmup),
            panel("Response length", "Mean number of sampled tokens.", both("length_mean"), turn, **warmup),
            panel("Truncated responses", "Share that reached the length limit.", both("truncation_rate"), turn,
                  score=True, **warmup),
            panel("Log-prob gap", "Largest difference between sampler and trainer over all tokens of a turn. More than "
                  "rounding means that the cache or a mask is wrong.", both("logprob_gap_max"), turn, **warmup),
        ]
    )  # fmt: skip


def headline(run: Run) -> list[list[str]]:
    """First and last value of the main metrics: [name, first, last]."""
    evaluations, found = [row for row in run.rows if row["phase"] == "eval"], []
    for title, name in (("Generator accuracy", "generator/accuracy"), ("Verifier step F1", "verifier/pool/step_f1"),
                        ("Verifier outcome F1", "verifier/pool/outcome_f1")):  # fmt: skip
        values = [row[name] for row in evaluations if row.get(name) is not None]
        if values:
            found.append([title, f"{values[0]:.3f}", f"{values[-1]:.3f}"])
    return found


def arms(runs: Sequence[Run]) -> list[dict]:
    """Figure 4: the arms over generator steps, as the mean over seeds with a min-max band, for each cell of a grid."""
    return [panel for cell, members in _by_cell(runs).items() for panel in _arms_of_cell(cell, members)]


def _arms_of_cell(cell: str, runs: Sequence[Run]) -> list[dict]:
    by_arm, panels = _by_arm(runs), []
    looks = looks_of(by_arm)
    for name, title in (("generator/accuracy", "Generator: accuracy"), ("verifier/pool/step_f1", "Verifier: step F1"),
                        ("verifier/pool/outcome_f1", "Verifier: outcome F1")):  # fmt: skip
        bands, lines = [], []
        for rank, (arm, members) in enumerate(by_arm.items()):
            x, values = over_seeds([run.rows for run in members], name)
            if not x.size:
                continue
            look = looks[arm]
            if len(values) > 1:
                bands += band(Series(x, values.min(0)), Series(x, values.max(0)), look.colour)
            curve = line(label_of(arm), Series(x, values.mean(0)), look.colour, look.dash, look.marker)
            lines = [trace | {"legendrank": rank} for trace in curve] + lines  # the first arm is drawn last, on top
        caption = "Mean over seeds; the band spans the lowest to the highest seed. Negative steps are the warm-up."
        title = f"{title} ({cell})" if cell else title
        panels.append(panel(title, caption, bands + lines, "generator step", score=True))
    return with_content(panels)


def arms_table(runs: Sequence[Run]) -> dict | None:
    """Last evaluation of every run, one row per arm, with the value of each seed in brackets."""
    columns = {"accuracy": "generator/accuracy", "step F1": "verifier/pool/step_f1",
               "outcome F1": "verifier/pool/outcome_f1"}  # fmt: skip
    values = {}
    for cell, arm, run in [(cell, arm, run) for cell, members in _by_cell(runs).items()
                           for arm, found in _by_arm(members).items() for run in found]:  # fmt: skip
        last = next((row for row in reversed(run.rows) if row["phase"] == "eval"), {})
        for column, name in columns.items():
            if last.get(name) is not None:
                values.setdefault((cell, arm), {}).setdefault(column, []).append(last[name])
    if not values:
        return None

    def shown(seeds: list[float]) -> str:
        each = f" ({', '.join(f'{value:.2f}' for value in seeds)})" if len(seeds) > 1 else ""
        return f"{sum(seeds) / len(seeds):.3f}{each}"

    rows = [[f"{cell}: {label_of(arm)}" if cell else label_of(arm),
             *(shown(of[name]) if name in of else "" for name in columns)]
            for (cell, arm), of in values.items()]  # fmt: skip
    return {"caption": "Last evaluation: mean, with each seed in brackets.", "head": ["arm", *columns], "rows": rows}


def _by_cell(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each cell of a grid, in their order."""
    by_cell = {}
    for run in runs:
        by_cell.setdefault(run.cell, []).append(run)
    return by_cell


def _by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each arm; known arms come first, in their usual order."""
    order = {arm: place for place, arm in enumerate(ARMS)}
    by_arm = {}
    for run in sorted(runs, key=lambda run: order.get(run.arm, len(order))):
        by_arm.setdefault(run.arm, []).append(run)
    return by_arm


def verifier(run: Run, judged: list[quality.Judged]) -> list[dict]:
    """Where the verifier is right: by step, by length, by turn. From the dumped rollouts and the metrics."""
    parts = quality.early_and_late(judged)
    looks = ((GREY, ":", "circle-open"), (GREEN, "-", "triangle-up"))[-len(parts) or 2 :]
    looks = list(zip(parts.items(), looks, strict=True)) if parts else []
    turn, steps = "turn (both roles)", "step of the solution"
    accepted = bars("false accept", quality.disagreement_by_turn(judged, "CORRECT", False), VERMILION, "/")
    rejected = bars("false reject", quality.disagreement_by_turn(judged, "INCORRECT", True), BLUE, "\\")
    invalid = bars("INVALID, right answer", quality.disagreement_by_turn(judged, "INVALID", True), GREY, "x")
    invalid += bars("INVALID, wrong answer", quality.disagreement_by_turn(judged, "INVALID", False), GREY, ".")
    recalls = line("correct steps approved", quality.recall_by_turn(judged, True), GREEN, "-", "triangle-up")
    recalls += line("wrong steps rejected", quality.recall_by_turn(judged, False), VERMILION, "--", "x")

    def rate(name: str, phases: set[str]) -> Series:
        return series(run.rows, phases, "step", name)

    said = noisy("says CORRECT, verifier's turns", rate("verifier/rate_correct", {"warmup", "verifier"}), BLUE)
    said += noisy("says CORRECT, generator's turns", rate("verifier/live_rate_correct", {"generator"}), SKY, "--")
    if said:  # only meaningful next to the verifier's rates
        said += noisy("share of correct answers", rate("generator/reward/outcome", {"generator"}), GREY, ":")
    return with_content(
        [
            panel("Disagreements with the grader", "Share of a turn's verifications.", accepted + rejected + invalid,
                  turn, barmode="stack"),
            panel("Rate of CORRECT", "Compared with the share of correct solutions; a collapsed verifier is flat at 0 "
                  "or 1.", said, turn, score=True, **_warmup(run.rows)),
            panel("Agreement with gold steps", "For steps with a known label; sampled like all dumped rollouts (the "
                  "fixed pool is decoded greedily).", recalls, turn, score=True),
            panel("Step F1 by position", "Macro-F1 of the judgement of step 1, 2, ... against gold steps.",
                  [t for (name, part), look in looks for t in line(name, quality.step_f1_by_position(part), *look)],
                  steps, score=True),
            panel("Step F1 by number of steps", "Macro-F1 of all judgements on solutions with this many steps.",
                  [t for (name, part), look in looks for t in line(name, quality.step_f1_by_count(part), *look)],
                  "steps in the solution", score=True),
            panel("Verdict F1 by number of steps", "Macro-F1 of the verdicts on solutions with this many steps.",
                  [t for (name, part), look in looks for t in line(name, quality.verdict_f1_by_count(part), *look)],
                  "steps in the solution", score=True),
        ]
    )  # fmt: skip


def confusion_tables(judged: list[quality.Judged]) -> list[dict]:
    """Verdicts by grade, early and late in the run; each cell with a disagreement names the filter that shows it."""
    filters = {("wrong", "CORRECT"): "false_accept", ("right", "INCORRECT"): "false_reject"}
    tables = []
    for name, part in quality.early_and_late(judged).items():
        counts = quality.confusion(part)
        rows = [
            {"grade": grade, "total": sum(row.values()),
             "cells": [{"verdict": verdict, "count": count,
                        "filter": "invalid" if verdict == "INVALID" else filters.get((grade, verdict))}
                       for verdict, count in row.items()]}
            for grade, row in counts.items()
        ]  # fmt: skip
        tables.append({"name": name, "rows": rows, "turns": [min(i.turn for i in part), max(i.turn for i in part)]})
    return tables


def _warmup(rows: list[dict]) -> dict:
    """Shading for the turns of the warm-up."""
    steps = [row["step"] for row in rows if row["phase"] == "warmup"]
    if not steps:
        return {}
    shape = {"type": "rect", "xref": "x", "yref": "paper", "x0": 0, "x1": max(steps), "y0": 0, "y1": 1,
             "fillcolor": GREY, "opacity": 0.12, "line": {"width": 0}, "layer": "below"}  # fmt: skip
    note = {"text": "warm-up", "x": max(steps) / 2, "y": 1, "xref": "x", "yref": "paper", "yanchor": "top",
            "showarrow": False, "font": {"size": 10}}  # fmt: skip
    return {"shapes": [shape], "annotations": [note]}
