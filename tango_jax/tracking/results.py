"""What a finished run leaves behind for people: summary.json, curves.png and transcripts.md."""

from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from tango_jax.records import Solution, Verification
from tango_jax.runtime.atomic import write_atomically, write_json_atomic
from tango_jax.runtime.console import Console
from tango_jax.runtime.manifest import complete_steps
from tango_jax.runtime.model_text import markdown_cell, markdown_code, markdown_fence
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.plots import plot_curves

FILES = ("transcripts.md", "curves.png", "summary.json")  # in the order in which they are written


def summarize(config: ConfigDict, rows: list[dict], compiles: int, seconds: float) -> dict:
    """The summary of a run from the run's metrics; the verifier's figures are on the fixed pool."""
    evaluations = [row for row in rows if row["phase"] == "eval"]
    first, last = evaluations[0], evaluations[-1]
    gaps = [
        row[f"{role}/logprob_gap_max"]
        for row in rows
        for role in ("generator", "verifier")
        if f"{role}/logprob_gap_max" in row
    ]
    verifier = {}
    for kind in ("step_f1", "outcome_f1"):
        name = f"verifier/pool/{kind}"  # a task without a fixed pool, or without step labels for it, has no such figure
        verifier |= {f"{kind}_initial": first.get(name), f"{kind}_final": last.get(name)}
    return {
        "arm": config.arm,
        "seed": config.seed,
        "wall_seconds": seconds,
        "compiles_after_warmup": compiles,
        "generator": {
            "accuracy_initial": first["generator/accuracy"],
            "accuracy_final": last["generator/accuracy"],
        },
        "verifier": verifier,
        "logprob_gap_max": max(gaps, default=0.0),
    }


def write_results(
    config: ConfigDict,
    workdir: Path,
    rows: list[dict],
    solutions: Sequence[Solution],
    verifications: Sequence[Verification],
    compiles: int,
    seconds: float,
) -> dict:
    """Write all three files; returns the summary, which is written last: it is the sign of a finished run."""
    summary = summarize(config, rows, compiles, seconds)
    write_atomically(workdir / "transcripts.md", transcripts(solutions, verifications, config.transcripts))
    draw_curves(config, rows, workdir)
    write_json_atomic(workdir / "summary.json", summary)
    return summary


def draw_curves(config: ConfigDict, rows: list[dict], workdir: Path) -> None:
    plot_curves(rows, workdir / "curves.png", f"{config.task.name}, arm {config.arm}, seed {config.seed}")


def has_results(workdir: Path) -> bool:
    return all((workdir / name).exists() for name in FILES)


def is_finished(workdir: Path, num_turns: int) -> bool:
    """Whether nothing is left to do. Without its transcripts a run evaluates once more from its last checkpoint, where
    it still has that: runs used to write the summary first, and a kill could leave nothing else."""
    if not (workdir / "summary.json").exists():
        return False
    last = max(complete_steps(workdir / "checkpoints"), default=None)
    return (workdir / "transcripts.md").exists() or last != num_turns


def redraw_missing(config: ConfigDict, workdir: Path, console: Console) -> None:
    """Draw the curves of a finished run if they are gone and its metrics are there."""
    metrics = workdir / "metrics.jsonl"
    if metrics.exists() and not (workdir / "curves.png").exists():
        console.log(f"{workdir / 'curves.png'} was missing and is drawn anew")
        draw_curves(config, read_metrics(metrics), workdir)


def transcripts(solutions: Sequence[Solution], verifications: Sequence[Verification], count: int) -> str:
    """Markdown of a few held-out problems: every step with its judgement, the verdict, the grade.

    Chosen for what they show: first disagreements between verdict and grade, then wrong solutions, then right ones.
    """

    def interest(pair: tuple[Solution, Verification]) -> tuple:
        solution, verification = pair
        agrees = (verification.verdict == "CORRECT") == solution.is_correct
        return agrees, solution.is_correct

    pairs = list(zip(solutions, verifications, strict=True))
    kinds = sorted({interest(pair) for pair in pairs})
    by_kind = [[pair for pair in pairs if interest(pair) == kind] for kind in kinds]
    chosen = []
    while len(chosen) < min(count, len(pairs)):
        chosen += [group.pop(0) for group in by_kind if group]
    parts = [
        "# Transcripts\n\nGreedy solutions of held-out problems by the final generator, judged by the final verifier."
    ]
    return "\n\n".join(parts + [_transcript(*pair) for pair in chosen[:count]]) + "\n"


def _transcript(solution: Solution, verification: Verification) -> str:
    marks = {True: "CORRECT", False: "INCORRECT", None: "no judgement"}
    judged = verification.judgements if verification.is_aligned else (None,) * len(solution.steps)
    gold = solution.gold_steps or (None,) * len(solution.steps)
    lines = ["| step | the generator wrote | the verifier judged | in fact |", "|---|---|---|---|"]
    for k, (step, judgement, label) in enumerate(zip(solution.steps, judged, gold, strict=True), 1):
        fact = marks[label] if label is not None else "unknown"
        lines.append(f"| {k} | {markdown_cell(step)} | {marks[judgement]} | {fact} |")
    grade = "right" if solution.is_correct else f"wrong (gold answer {markdown_code(solution.problem.answer)})"
    return "\n".join(
        [
            f"## {markdown_code(solution.problem.id)}",
            "",
            f"Problem: {markdown_code(solution.problem.question)}",
            "",
            *lines,
            "",
            f"Verdict of the verifier: **{verification.verdict}**. Grade of the answer: **{grade}**.",
            "",
            "<details><summary>raw text</summary>",
            "",
            "The generator:",
            "",
            markdown_fence(solution.text),
            "",
            "The verifier:",
            "",
            markdown_fence(verification.text),
            "",
            "</details>",
        ]
    )
