"""The work of `python -m tango_jax.evaluate`."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from tango_jax.config import ROLES, default_config
from tango_jax.evaluation.cost import CostBasis
from tango_jax.evaluation.judging import open_verifier
from tango_jax.evaluation.measures import SetResult, judge_result, solve_result, value_of
from tango_jax.evaluation.output import write_rows, write_tables
from tango_jax.evaluation.responses import claims_of, judge_shard, read_judged, read_solved, samples_of, solve_shard
from tango_jax.evaluation.sets import EvalSet, JudgeSet, SolveSet, grader_name, open_sets
from tango_jax.evaluation.settings import MAY_CHANGE, Settings, check_settings, models_of, save_settings
from tango_jax.evaluation.shards import Shard, complete_shards
from tango_jax.grading import check_grader
from tango_jax.records import Problem
from tango_jax.runtime import hosts
from tango_jax.runtime.checks import require
from tango_jax.runtime.console import Console
from tango_jax.runtime.machine import describe_machine
from tango_jax.runtime.model_text import markdown_code
from tango_jax.sampling.checkpoint_sampler import CheckpointSampler, open_checkpoint_sampler
from tango_jax.tasks.own_grader import load_grader, try_grader
from tango_jax.text.templates import generator_prompt, verifier_prompt
from tango_jax.tracking.scores import LEFT_OUT
from tango_jax.weights.source import kind_of
from tango_jax.weights.workdir import read_config

_NO_LIMIT = 1 << 30


def evaluate_checkpoint(settings: Settings, console: Console) -> list[SetResult]:
    """The whole evaluation, or what is left of it. Every process returns the results; the first writes them.

    Raises ValueError, before any model runs, where the sets, a checkpoint or the output folder cannot be used. The
    generator's weights are freed before the verifier's are loaded.
    """
    sets, samplers = _open(settings, console)
    passes, votes = settings.passes, settings.votes
    temperature = settings.verifier_temperature if votes > 1 else 0.0
    num_samples = len(samples_of(passes))
    solve_shards = _shards_of(sets, SolveSet, "solved", settings)
    solved = complete_shards(
        "Solving",
        solve_shards,
        read_fn=lambda shard: read_solved(shard, samples_of(passes)),
        open_fn=lambda: _load_weights(samplers["generator"], settings),
        work_fn=lambda sampler, shard: solve_shard(sampler, shard, passes, settings.seed),
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
        read_fn=lambda shard: read_judged(shard, votes),
        open_fn=lambda: _load_weights(samplers["verifier"], settings),
        work_fn=lambda sampler, shard: judge_shard(sampler, shard, votes, temperature, num_samples, settings.seed),
        console=console,
    )
    results = []
    for eval_set in sets:
        rows, verifications = _rows_of(eval_set, solve_shards, solved), _rows_of(eval_set, judge_shards, judged)
        is_solved = isinstance(eval_set, SolveSet)
        results.append(
            solve_result(eval_set, rows, verifications, cost_basis(eval_set, samplers)) if is_solved else
            judge_result(eval_set, verifications)
        )
        if hosts.is_first():
            write_rows(settings.out, eval_set, rows, verifications)
    if hosts.is_first():
        write_tables(settings.out, _introduction(settings, results, samplers), results, console)
        for note in _of_left_out(results, samplers):
            console.log(note)
    return results


def _open(settings: Settings, console: Console) -> tuple[list[EvalSet], dict[str, CheckpointSampler]]:
    """The sets, and a sampler without weights for each role that has work. Every mistake is found here."""
    is_correct = load_grader("--grader", settings.grader or "")
    sets = open_sets(settings.sets, settings.checkpoint, settings.judge, settings.problems, settings.seed, is_correct)
    for kind in {eval_set.grade_kind for eval_set in sets if isinstance(eval_set, SolveSet)}:
        check_grader(kind)
    samplers = {
        role: open_verifier(name, settings.sampler(role), settings.scored) if role == "verifier" else
        open_checkpoint_sampler(role, name, settings.sampler(role)) for role, name in models_of(settings).items()
    }
    is_sampled = "verifier" not in samplers or samplers["verifier"].is_sampled
    require(is_sampled or settings.votes == 1, f"--votes={settings.votes}: {settings.judge} writes nothing and judges "
            "the same each time: leave --votes out")
    for note in grader_notes(settings, sets):
        console.log(note)
    check_prompt_lengths(sets, samplers, are_solutions_judged=settings.verifier is not None)
    console.log(f"machine: {describe_machine()}")
    for eval_set in sets:
        what = "problems to solve" if isinstance(eval_set, SolveSet) else "solutions to judge"
        graded = f", graded by {grader_name(eval_set)}" if eval_set.is_correct else ""
        console.log(f"{eval_set.name}: {len(eval_set.items)} {what}, from {eval_set.source}{graded}")
        if isinstance(eval_set, SolveSet) and eval_set.num_other:
            console.log(f"{eval_set.name}: {eval_set.num_other} further rows are left out, since they are of another "
                        "kind or repeat others")
    check_settings(settings)
    return sets, samplers


def grader_notes(settings: Settings, sets: Sequence[EvalSet]) -> list[str]:
    solved = [eval_set for eval_set in sets if isinstance(eval_set, SolveSet)]
    notes = [note for one in solved if one.problems for note in try_grader(one, one.problems[0][1])]
    left = ", ".join(one.name for one in (sets if settings.grader else solved) if not one.is_correct)
    if left and settings.grader:
        notes.append(f"--grader={settings.grader} is not used in {left}: the rows say what is right")
    elif left and kind_of(settings.checkpoint) == "workdir":
        if used := read_config(Path(settings.checkpoint).expanduser()).task.grader:
            notes.append(f"in training {used} decided what is right; here answers in {left} are compared with the gold "
                         f"answers: use --grader={used} to decide here as well")
    return notes


def check_prompt_lengths(
    sets: Iterable[EvalSet], samplers: dict[str, CheckpointSampler], are_solutions_judged: bool
) -> None:
    """Raises ValueError where no problem of a set fits the prompt of a role."""
    solving = ROLES if are_solutions_judged else ("generator",)
    for eval_set in sets:
        if isinstance(eval_set, SolveSet):
            roles, problems = solving, [problem for _, problem in eval_set.problems]
        else:
            roles, problems = ("verifier",), [claim.solution.problem for claim in eval_set.claims]
        for role in roles:
            limit = samplers[role].max_prompt
            if all(_num_tokens(role, samplers[role], problem) > limit for problem in problems):
                shortest = min(_num_tokens(role, samplers[role], problem) for problem in problems)
                flag = {"generator": "--max_prompt", "verifier": "--verifier_max_prompt"}[role]
                raise ValueError(f"{flag}={limit} is too short for every problem of {eval_set.name}: the shortest "
                                 f"makes a prompt of {shortest} tokens; raise it to at least that")


def cost_basis(solve_set: SolveSet, samplers: dict[str, CheckpointSampler]) -> CostBasis:
    generator, verifier = (samplers.get(role) for role in ROLES)
    prompt_tokens = {number: _num_tokens("generator", generator, problem) for number, problem in solve_set.problems}
    if verifier is None:
        return CostBasis(prompt_tokens, generator.source.model_config, None)
    return CostBasis(prompt_tokens, generator.source.model_config, verifier.source.model_config, verifier.is_sampled)


def _num_tokens(role: str, sampler: CheckpointSampler, problem: Problem) -> int:
    """Tokens of a problem's prompt, for a verifier with the shortest solution."""
    if role == "generator":
        return len(generator_prompt(sampler.template, sampler.tokenizer, problem))
    return len(verifier_prompt(sampler.template, sampler.tokenizer, problem, "", 1, _NO_LIMIT)[0])


def _shards_of(sets: Sequence[EvalSet], kind: type, stage: str, settings: Settings) -> list[Shard]:
    return [
        Shard(eval_set, eval_set.items[start : start + settings.shard], settings.out, stage, start // settings.shard)
        for eval_set in sets if isinstance(eval_set, kind)
        for start in range(0, len(eval_set.items), settings.shard)
    ]


def _load_weights(sampler: CheckpointSampler, settings: Settings) -> CheckpointSampler:
    sampler = sampler.with_weights()  # all settings are checked by now: they are saved
    save_settings(settings)
    return sampler


def _rows_of(eval_set: EvalSet, shards: Sequence[Shard], rows: Sequence[list]) -> list:
    return [row for shard, part in zip(shards, rows, strict=True) if shard.set is eval_set for row in part]


def _of_left_out(results: Sequence[SetResult], samplers: Mapping[str, CheckpointSampler]) -> list[str]:
    has_steps = any(value_of(result, "verifier_step_f1") for result in results)
    return [LEFT_OUT] * (has_steps and samplers["verifier"].stops)


def _introduction(
    settings: Settings, results: Sequence[SetResult], samplers: Mapping[str, CheckpointSampler]
) -> str:
    given = [(one.name, getattr(settings, one.name)) for one in dataclasses.fields(Settings)
             if getattr(settings, one.name) != one.default and one.name not in ("sets", *MAY_CHANGE)]
    lines = [f"- {name}: {markdown_code(str(value))}" for name, value in given]
    for grader in dict.fromkeys(result.grader for result in results if result.grader):
        names = ", ".join(result.name for result in results if result.grader == grader)
        lines.append(f"- {markdown_code(grader)} decides what is right in {names}; these figures do not compare with "
                     "published ones")
    if settings.samples and not settings.skip_greedy and "generator" in models_of(settings):
        lines.append("- of the sets to solve, figures of verifier, format and lengths are of the greedy solutions; the "
                     "samples have tables for each number of samples")
    if settings.votes > 1:
        lines.append("- first wrong steps: f1 and accuracy are of the majority of the aligned votes; all other figures "
                     "of the verifier count every vote")
    lines += [f"- {note}" for note in _of_left_out(results, samplers)]
    for role, name in models_of(settings).items():
        if chosen_by := samplers[role].chosen_by:
            # Training ends by patience after an evaluation that was not better.
            bias = "low" if "(checkpoint.patience=" in chosen_by else "high"
            lines.append(f"- the weights of the {role}, {markdown_code(name)}, were chosen by "
                         f"{markdown_code(chosen_by)}: figures of the same problems are probably too {bias}")
    lines.append("- percent, with 95 % intervals of a bootstrap over problems; this evaluation chose nothing by "
                 "looking at these sets")
    return "\n".join(lines)


def process_config(checkpoint: str) -> ConfigDict:
    config = default_config().copy_and_resolve_references()
    config.generator.checkpoint = checkpoint
    return config
