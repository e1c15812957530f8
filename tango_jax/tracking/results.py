"""The result files of a finished run: summary.json, curves.png and transcripts.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.grading import why_misaligned
from tango_jax.method.own_arm import arm_name
from tango_jax.records import Solution, Verification
from tango_jax.runtime.atomic import write_atomically, write_json_atomic
from tango_jax.runtime.model_text import markdown_cell, markdown_code, markdown_fence
from tango_jax.tracking.provenance import read_provenance, summary_of

TRANSCRIPTS = 6  # annotated examples in transcripts.md


def summarize(config: ConfigDict, rows: list[dict], compiles: int, seconds: float) -> dict:
    evaluations = [row for row in rows if row["phase"] == "eval"]
    first, last = evaluations[0], evaluations[-1]
    gaps = [row[name] for row in rows for role in ROLES if (name := f"{role}/logprob_gap_max") in row]
    verifier = {}
    for kind in ("step_f1", "outcome_f1", *["first_error_f1"] * config.verifier.stop_at_first_error):
        name = f"verifier/pool/{kind}"  # missing for tasks without a fixed pool or without step labels
        verifier |= {f"{kind}_initial": first.get(name), f"{kind}_final": last.get(name)}
    return {
        "arm": arm_name(config.arm),
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
    start: Mapping[str, str] = {},
) -> dict:
    """Write all files, summary.json last: it marks the run as finished.

    `compiles`: programs compiled after the warm-up. `start`: digests of what the run started from (loop/resume.py).
    """
    # Here, because Matplotlib takes a second to import, and most commands draw nothing.
    from tango_jax.tracking.plots import plot_curves, save_figure

    summary = summarize(config, rows, compiles, seconds)
    summary |= {"provenance": summary_of(read_provenance(workdir)) | {"start": dict(start)}}
    write_atomically(workdir / "transcripts.md", transcripts(solutions, verifications, TRANSCRIPTS))
    title = f"{config.task.name}, arm {arm_name(config.arm)}, seed {config.seed}"
    save_figure(plot_curves(rows, title, config.verifier.stop_at_first_error), workdir / "curves.png")
    write_json_atomic(workdir / "summary.json", summary)
    return summary


def is_finished(workdir: Path) -> bool:
    return (workdir / "summary.json").exists()


def transcripts(solutions: Sequence[Solution], verifications: Sequence[Verification], count: int) -> str:
    pairs = list(zip(solutions, verifications, strict=True))
    kinds = sorted({_interest(pair) for pair in pairs})
    by_kind = [[pair for pair in pairs if _interest(pair) == kind] for kind in kinds]
    chosen = []
    while len(chosen) < min(count, len(pairs)):
        chosen += [group.pop(0) for group in by_kind if group]
    parts = ["# Transcripts", _introduction(pairs, len(chosen[:count]))]
    return "\n\n".join(parts + [_transcript(*pair) for pair in chosen[:count]]) + "\n"


def _interest(pair: tuple[Solution, Verification]) -> tuple[bool, bool]:
    """(verdict and grade agree, the answer is right): the most instructive kind comes first."""
    solution, verification = pair
    return verification.verdict == ("CORRECT" if solution.is_correct else "INCORRECT"), solution.is_correct


def _introduction(pairs: Sequence[tuple[Solution, Verification]], shown: int) -> str:
    right = sum(solution.is_correct for solution, _ in pairs)
    agree = sum(_interest(pair)[0] for pair in pairs)
    return (
        "Greedy solutions of held-out problems by the final generator, judged by the final verifier. "
        f"These {shown} of {len(pairs)} problems were chosen to show most, not at random: in turn a verdict that "
        "disagrees with the grade, a wrong answer and a right answer. Of all problems, "
        f"{right} answers are right, and {agree} verdicts agree with the grade."
    )


def _transcript(solution: Solution, verification: Verification) -> str:
    marks = {True: "CORRECT", False: "INCORRECT", None: "not judged"}
    if verification.is_aligned:
        judged = [marks[label] for label in verification.judgements]
    else:
        reason = why_misaligned(verification.judgements, len(solution.steps))
        judged = [f"{reason}: no step reward"] * len(solution.steps)
    gold = solution.gold_steps or (None,) * len(solution.steps)
    lines = ["| step | the generator wrote | the verifier judged | gold label |", "|---|---|---|---|"]
    for k, (step, judgement, label) in enumerate(zip(solution.steps, judged, gold, strict=True), 1):
        gold_label = "unknown" if label is None else marks[label]
        lines.append(f"| {k} | {markdown_cell(step)} | {judgement} | {gold_label} |")
    table = "\n".join(lines)
    grade = "right" if solution.is_correct else f"wrong (gold answer {markdown_code(solution.problem.answer)})"
    return f"""\
## {markdown_code(solution.problem.id)}

Problem: {markdown_code(solution.problem.question)}

{table}

Verdict of the verifier: **{verification.verdict}**. Grade of the answer: **{grade}**.

<details><summary>raw text</summary>

The generator:

{markdown_fence(solution.text)}

The verifier:

{markdown_fence(verification.text)}

</details>"""
