"""Implementation of `python -m tango_jax.evaluate`: solves problems, judges solutions, computes and writes metrics.

Takes settings; writes the folder `settings.out` with rows, tables and, for several samples, a figure. The generator's
weights are freed before the verifier's are loaded. Stage of the loop: after training, on any checkpoint.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from tango_jax.config import default_config
from tango_jax.evaluation.figures import plot_samples
from tango_jax.evaluation.generator import claims_of, read_solved, samples_of, solve_shard
from tango_jax.evaluation.lengths import check_prompt_lengths
from tango_jax.evaluation.results import SetResult, averages, judge_result, solve_result
from tango_jax.evaluation.sets import EvalSet, JudgeSet, SolveSet, grader_name, open_sets
from tango_jax.evaluation.settings import Settings, check_settings, save_settings
from tango_jax.evaluation.shards import JudgedRow, Shard, SolvedRow, complete_shards
from tango_jax.evaluation.tables import csv_text, markdown, percent
from tango_jax.evaluation.verifier import first_wrong, judge_shard, read_judged
from tango_jax.grading import check_grader
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import write_atomically
from tango_jax.runtime.console import Console
from tango_jax.runtime.machine import describe_machine
from tango_jax.sampling.checkpoint_sampler import CheckpointSampler, open_checkpoint_sampler
from tango_jax.tasks.own_grader import load_grader, try_grader
from tango_jax.weights.source import kind_of
from tango_jax.weights.workdir import read_config

SUMMARY = {"greedy": "greedy", "pass": "pass@n", "majority": "maj@n", "best_of_by_verdict": "best of n, verdict",
           "f1": "first-error F1", "verifier_outcome_f1": "outcome F1", "verifier_step_f1": "step F1"}  # fmt: skip
TABLES = ("tables.md", "tables.csv")


def evaluate_checkpoint(settings: Settings, console: Console) -> list[SetResult]:
    """The whole evaluation, or what is left of it; every process returns the results, the first writes them.

    Raises:
        ValueError: the sets, a checkpoint or the output folder cannot be used; this is raised before any model is run.
    """
    is_correct = load_grader("--grader", settings.grader or "")
    sets = open_sets(settings.sets, settings.checkpoint, settings.judge, settings.problems, settings.seed, is_correct)
    for kind in {eval_set.grade_kind for eval_set in sets if isinstance(eval_set, SolveSet)}:
        check_grader(kind)
    # Only what is needed: a hub id is downloaded when it is opened.
    needs_solver = any(isinstance(eval_set, SolveSet) for eval_set in sets)
    needs_judge = not all(isinstance(eval_set, SolveSet) for eval_set in sets) or settings.verifier is not None
    names = {"generator": settings.checkpoint if needs_solver else None,
             "verifier": settings.judge if needs_judge else None}  # fmt: skip
    samplers = {
        role: open_checkpoint_sampler(role, name, settings.sampler(role)) for role, name in names.items() if name
    }
    for note in grader_notes(settings, sets):
        console.log(note)
    check_prompt_lengths(sets, samplers, are_solutions_judged=settings.verifier is not None)
    console.log(f"machine: {describe_machine()}")
    for eval_set in sets:
        count = len(eval_set.problems) if isinstance(eval_set, SolveSet) else len(eval_set.claims)
        what = "problems to solve" if isinstance(eval_set, SolveSet) else "solutions to judge"
        graded = f", graded by {grader_name(eval_set)}" if eval_set.is_correct else ""
        console.log(f"{eval_set.name}: {count} {what}, from {eval_set.source}{graded}")
    check_settings(settings)

    solve_shards, solved = solve_all(sets, samplers, settings, console)
    judge_shards, judged = judge_all(sets, solve_shards, solved, samplers, settings, console)
    results = []
    for eval_set in sets:
        rows, verifications = _rows_of(eval_set, solve_shards, solved), _rows_of(eval_set, judge_shards, judged)
        is_solved = isinstance(eval_set, SolveSet)
        results.append(
            solve_result(eval_set, rows, verifications) if is_solved else judge_result(eval_set, verifications)
        )
        if hosts.is_first():
            write_rows(settings, eval_set, rows, verifications)
    if hosts.is_first():
        write_tables(settings, results, console)
    return results


def grader_notes(settings: Settings, sets: Sequence[EvalSet]) -> list[str]:
    """Try the users' graders; and say which sets they leave alone."""
    solved = [eval_set for eval_set in sets if isinstance(eval_set, SolveSet)]
    notes = [note for one in solved if one.problems for note in try_grader(one, one.problems[0][1])]
    left = ", ".join(one.name for one in (sets if settings.grader else solved) if not one.is_correct)
    if left and settings.grader:
        notes.append(f"--grader={settings.grader} decides nothing in {left}, whose rows say what is right")
    elif left and kind_of(settings.checkpoint) == "workdir":
        if used := read_config(Path(settings.checkpoint).expanduser()).task.grader:
            notes.append(f"in training {used} decided what is right; without --grader, answers are compared in {left}")
    return notes


def solve_all(
    sets: Sequence[EvalSet], samplers: dict[str, CheckpointSampler], settings: Settings, console: Console
) -> tuple[list[Shard], list[list[SolvedRow]]]:
    """Solve every problem; return the shards and the rows of each."""
    shards = [
        Shard(eval_set, items, settings.out, "solved", index)
        for eval_set in sets if isinstance(eval_set, SolveSet)
        for index, items in enumerate(eval_set.shards(settings.shard))
    ]  # fmt: skip
    rows = complete_shards(
        "Solving",
        shards,
        read_fn=lambda shard: read_solved(shard, samples_of(settings)),
        open_fn=lambda: _load_weights(samplers["generator"], settings),
        work_fn=lambda sampler, shard: solve_shard(sampler, shard, settings),
        shown_fn=lambda rows: {
            "correct": sum(row.is_correct for row in rows) / len(rows),
            "truncated": sum(row.is_truncated for row in rows) / len(rows),
            "tokens": sum(row.num_tokens for row in rows) / len(rows),
        },
        console=console,
    )
    return shards, rows


def judge_all(
    sets: Sequence[EvalSet],
    solve_shards: Sequence[Shard],
    solved: Sequence[list[SolvedRow]],
    samplers: dict[str, CheckpointSampler],
    settings: Settings,
    console: Console,
) -> tuple[list[Shard], list[list[JudgedRow]]]:
    """Judge the given solutions and, if a verifier is named, those of the generator; return shards and rows."""
    shards = [
        Shard(eval_set, claims, settings.out, "judged", index)
        for eval_set in sets if isinstance(eval_set, JudgeSet)
        for index, claims in enumerate(eval_set.shards(settings.shard))
    ]  # fmt: skip
    if settings.verifier is not None:
        shards += [
            Shard(shard.set, claims_of(shard.set, rows), settings.out, "judged", shard.index)
            for shard, rows in zip(solve_shards, solved, strict=True)
        ]
    rows = complete_shards(
        "Judging",
        shards,
        read_fn=lambda shard: read_judged(shard, settings.votes),
        open_fn=lambda: _load_weights(samplers["verifier"], settings),
        work_fn=lambda sampler, shard: judge_shard(sampler, shard, settings),
        shown_fn=lambda rows: {
            "correct": sum(row.verdict == "CORRECT" for row in rows) / len(rows),
            "aligned": sum(row.is_aligned for row in rows) / len(rows),
            "tokens": sum(row.num_tokens for row in rows) / len(rows),
        },
        console=console,
    )
    return shards, rows


def _load_weights(sampler: CheckpointSampler, settings: Settings) -> CheckpointSampler:
    """The sampler with its weights. The settings are saved now, because no mistake in them can be found any more."""
    sampler = sampler.with_weights()
    save_settings(settings)
    return sampler


def _rows_of(eval_set: EvalSet, shards: Sequence[Shard], rows: Sequence[list]) -> list:
    """The rows of one set, in order."""
    return [row for shard, part in zip(shards, rows, strict=True) if shard.set is eval_set for row in part]


def write_rows(
    settings: Settings, eval_set: EvalSet, rows: Sequence[SolvedRow], judged: Sequence[JudgedRow]
) -> None:
    """One line per solution with its verifications, for people and for other programs."""
    by_claim: dict[tuple[int, int], list[dict]] = {}
    for row in judged:
        fields = {key: value for key, value in dataclasses.asdict(row).items() if key not in ("number", "sample")}
        by_claim.setdefault((row.number, row.sample), []).append(fields | {"first_wrong": first_wrong(row)})
    if isinstance(eval_set, SolveSet):
        lines = [dataclasses.asdict(row) for row in rows]
    else:
        lines = [
            {"number": claim.number, "sample": claim.sample, "problem_id": claim.solution.problem.id,
             "question": claim.solution.problem.question, "steps": claim.solution.steps,
             "is_correct": claim.solution.is_correct, "gold_steps": claim.solution.gold_steps,
             "gold_first_wrong": claim.first_wrong}
            for claim in eval_set.claims
        ]  # fmt: skip
    for line in lines:
        line["verifications"] = by_claim.get((line["number"], line["sample"]), [])
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write_atomically(settings.out / "rows" / f"{eval_set.name}.jsonl", text)


def write_tables(settings: Settings, results: Sequence[SetResult], console: Console) -> None:
    means = averages(results)
    texts = (markdown(settings, results, means), csv_text(results, means))
    for name, text in zip(TABLES, texts, strict=True):
        write_atomically(settings.out / name, text)
    figure = plot_samples(results, settings.out / "samples.png")
    console.table("percent, with 95 % intervals", ("set", *SUMMARY.values()), [_summary_row(one) for one in results])
    console.log("files:")
    for path in (*(settings.out / name for name in TABLES), *[settings.out / "samples.png"] * figure,
                 settings.out / "rows"):  # fmt: skip
        console.log(f"  {path}")


def _summary_row(result: SetResult) -> list[str]:
    """Return each figure of SUMMARY for one set, with the largest number of samples."""
    found = {metric.name: metric.estimate for metric in result.metrics}  # metrics ascend in k
    return [result.name, *(percent(found.get(name)) for name in SUMMARY)]


def process_config(settings: Settings) -> ConfigDict:
    """Return the settings of the process in the form that `runtime.session` expects."""
    config = default_config().copy_and_resolve_references()
    config.distributed.enabled = settings.distributed
    config.generator.checkpoint = settings.judge
    return config
