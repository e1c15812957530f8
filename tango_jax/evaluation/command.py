"""Implementation of `python -m tango_jax.evaluate`: solves problems, judges solutions, computes and writes metrics.

Takes settings; writes the folder `settings.out` with rows, tables and, for several samples, a figure. The generator's
weights are freed before the verifier's are loaded. Stage of the loop: after training, on any checkpoint.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from tango_jax.config import ROLES, default_config
from tango_jax.evaluation.generator import claims_of, read_solved, samples_of, solve_shard
from tango_jax.evaluation.measures import SetResult, judge_result, solve_result
from tango_jax.evaluation.output import write_rows, write_tables
from tango_jax.evaluation.sets import EvalSet, JudgeSet, SolveSet, grader_name, open_sets
from tango_jax.evaluation.settings import Settings, check_settings, models_of, save_settings
from tango_jax.evaluation.shards import Shard, complete_shards
from tango_jax.evaluation.verifier import judge_shard, read_judged
from tango_jax.grading import check_grader
from tango_jax.records import Problem
from tango_jax.runtime import hosts
from tango_jax.runtime.console import Console
from tango_jax.runtime.machine import describe_machine
from tango_jax.sampling.checkpoint_sampler import CheckpointSampler, open_checkpoint_sampler
from tango_jax.tasks.own_grader import load_grader, try_grader
from tango_jax.text.templates import generator_prompt, verifier_prompt
from tango_jax.weights.source import kind_of
from tango_jax.weights.workdir import read_config

_NO_LIMIT = 1 << 30


def evaluate_checkpoint(settings: Settings, console: Console) -> list[SetResult]:
    """The whole evaluation, or what is left of it; every process returns the results, the first writes them.

    Raises:
        ValueError: the sets, a checkpoint or the output folder cannot be used; this is raised before any model is run.
    """
    sets, samplers = _open(settings, console)
    solve_shards = _shards_of(sets, SolveSet, "solved", settings)
    solved = complete_shards(
        "Solving",
        solve_shards,
        read_fn=lambda shard: read_solved(shard, samples_of(settings)),
        open_fn=lambda: _load_weights(samplers["generator"], settings),
        work_fn=lambda sampler, shard: solve_shard(sampler, shard, settings),
        console=console,
    )
    judge_shards = _shards_of(sets, JudgeSet, "judged", settings)
    if settings.verifier is not None:  # it also judges the generator's solutions
        judge_shards += [
            Shard(shard.set, claims_of(shard.set, rows), settings.out, "judged", shard.index)
            for shard, rows in zip(solve_shards, solved, strict=True)
        ]
    judged = complete_shards(
        "Judging",
        judge_shards,
        read_fn=lambda shard: read_judged(shard, settings.votes),
        open_fn=lambda: _load_weights(samplers["verifier"], settings),
        work_fn=lambda sampler, shard: judge_shard(sampler, shard, settings),
        console=console,
    )
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


def _open(settings: Settings, console: Console) -> tuple[list[EvalSet], dict[str, CheckpointSampler]]:
    """The sets, and a sampler without weights for each role that has work: whatever can be wrong is found here."""
    is_correct = load_grader("--grader", settings.grader or "")
    sets = open_sets(settings.sets, settings.checkpoint, settings.judge, settings.problems, settings.seed, is_correct)
    for kind in {eval_set.grade_kind for eval_set in sets if isinstance(eval_set, SolveSet)}:
        check_grader(kind)
    samplers = {
        role: open_checkpoint_sampler(role, name, settings.sampler(role)) for role, name in models_of(settings).items()
    }
    for note in grader_notes(settings, sets):
        console.log(note)
    check_prompt_lengths(sets, samplers, are_solutions_judged=settings.verifier is not None)
    console.log(f"machine: {describe_machine()}")
    for eval_set in sets:
        what = "problems to solve" if isinstance(eval_set, SolveSet) else "solutions to judge"
        graded = f", graded by {grader_name(eval_set)}" if eval_set.is_correct else ""
        console.log(f"{eval_set.name}: {len(eval_set.items)} {what}, from {eval_set.source}{graded}")
    check_settings(settings)
    return sets, samplers


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


def check_prompt_lengths(
    sets: Iterable[EvalSet], samplers: dict[str, CheckpointSampler], are_solutions_judged: bool
) -> None:
    """Raises ValueError where not one problem of a set is within the limit of a role that gets to see it."""
    solving = ROLES if are_solutions_judged else ("generator",)
    for eval_set in sets:
        if isinstance(eval_set, SolveSet):
            roles, problems = solving, [problem for _, problem in eval_set.problems]
        else:
            roles, problems = ("verifier",), [claim.solution.problem for claim in eval_set.claims]
        for role in roles:
            sampler, shortest = samplers[role], _NO_LIMIT
            for problem in problems:  # the first is likely to do
                shortest = min(shortest, _num_tokens(role, sampler, problem))
                if shortest <= sampler.max_prompt:
                    break
            else:
                flag = {"generator": "--max_prompt", "verifier": "--verifier_max_prompt"}[role]
                raise ValueError(f"{flag}={sampler.max_prompt} is too short for every problem of {eval_set.name}: "
                                 f"the shortest makes a prompt of {shortest} tokens; raise it to that at least")


def _num_tokens(role: str, sampler: CheckpointSampler, problem: Problem) -> int:
    """Tokens of a problem's prompt; a verifier's, of the shortest solution there is."""
    if role == "generator":
        return len(generator_prompt(sampler.template, sampler.tokenizer, problem))
    return len(verifier_prompt(sampler.template, sampler.tokenizer, problem, "", 1, _NO_LIMIT)[0])


def _shards_of(sets: Sequence[EvalSet], kind: type, stage: str, settings: Settings) -> list[Shard]:
    """The shards of the sets of one kind, in order."""
    return [
        Shard(eval_set, eval_set.items[start : start + settings.shard], settings.out, stage, start // settings.shard)
        for eval_set in sets if isinstance(eval_set, kind)
        for start in range(0, len(eval_set.items), settings.shard)
    ]  # fmt: skip


def _load_weights(sampler: CheckpointSampler, settings: Settings) -> CheckpointSampler:
    """The sampler with its weights. The settings are saved now, because no mistake in them can be found any more."""
    sampler = sampler.with_weights()
    save_settings(settings)
    return sampler


def _rows_of(eval_set: EvalSet, shards: Sequence[Shard], rows: Sequence[list]) -> list:
    """The rows of one set, in order."""
    return [row for shard, part in zip(shards, rows, strict=True) if shard.set is eval_set for row in part]


def process_config(settings: Settings) -> ConfigDict:
    """Return the settings of the process in the form that `runtime.session` expects."""
    config = default_config().copy_and_resolve_references()
    config.generator.checkpoint = settings.judge
    return config
