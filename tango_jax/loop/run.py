"""A whole run: configuration -> two policies -> stage 1 -> turns of both roles -> results.

If interrupted at any moment, the same call resumes where it stopped, bit for bit.
"""

import dataclasses
import functools
import time
from pathlib import Path

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.grading import check_grader
from tango_jax.loop.best import Best, after_evaluation, check_keep_best, is_over, role_of_best, trained_roles
from tango_jax.loop.breakdown import check_metrics, names_memory
from tango_jax.loop.compilation import compile_run, compile_transfers
from tango_jax.loop.describe import describe_results, describe_run, describe_turn
from tango_jax.loop.fork import check_fork
from tango_jax.loop.init_from import check_init_from
from tango_jax.loop.measure import evaluate_roles, fixed_pool
from tango_jax.loop.output import RunOutput
from tango_jax.loop.problems_ahead import check_problems
from tango_jax.loop.resume import (
    RunState,
    abstract_states,
    check_start,
    fingerprints_of,
    peek,
    read_finished,
    references_of,
    start_or_resume,
)
from tango_jax.loop.stage_one import run_stage_one
from tango_jax.loop.turn import RunContext, check_alike, run_turn
from tango_jax.method.load import Method, check_task, load_method
from tango_jax.method.own_arm import check_fixed, make_schedule, shares_policy
from tango_jax.method.trust import turns_done
from tango_jax.records import Solution, States
from tango_jax.rl.policy import Policy, make_policies
from tango_jax.rl.schedule import Schedule, is_evaluation_due, turn_at, turns_since_evaluation
from tango_jax.runtime import hosts
from tango_jax.runtime.checkpoint import Checkpointer
from tango_jax.runtime.console import Console
from tango_jax.runtime.lock import locked
from tango_jax.runtime.process import return_freed_memory
from tango_jax.runtime.timers import CompileCounter, PhaseTimer
from tango_jax.tasks.registry import make_task
from tango_jax.tasks.task import Task
from tango_jax.tracking.loggers import RunLog
from tango_jax.tracking.metrics import check_log, read_metrics
from tango_jax.tracking.provenance import begin
from tango_jax.tracking.results import write_results
from tango_jax.tracking.rollout_dump import RolloutDump
from tango_jax.tracking.run_config import ANY_PLACE, check_config
from tango_jax.tracking.turn_metrics import check_names


def run_or_resume(
    config: ConfigDict, workdir: Path, console: Console, policies: dict[str, Policy] | None = None,
    preemption: hosts.Preemption | None = None,
) -> dict:
    """`policies`: reused from an earlier run with the same role settings.

    Raises:
        ValueError: settings, a folder or a checkpoint that does not match; or another run uses the folder.
        FloatingPointError: a loss is not finite; the message has the turn, the role and the metrics.
        Preempted: SIGTERM was received; the state is saved.
    """
    if summary := read_finished(config, workdir, console):
        return summary
    with locked(workdir, console), CompileCounter() as compiles:
        # Again: another process may have finished the run while this one waited for the lock.
        if summary := read_finished(config, workdir, console):
            return summary
        return run_stages(config, workdir, console, policies, preemption or hosts.Preemption(), compiles)


def run_stages(
    config: ConfigDict, workdir: Path, console: Console, policies: dict[str, Policy] | None,
    preemption: hosts.Preemption, compiles: CompileCounter,
) -> dict:
    """`run_or_resume` in a workdir that is locked and not finished."""
    # Nothing is written yet: errors in settings, data and checkpoints are found here.
    check_config(config, workdir / "config.json", may_move=ANY_PLACE)
    provenance = begin(config, workdir, console)
    began = time.monotonic()
    check_init_from(config)
    schedule, policies = make_schedule(config), policies or make_policies(config, shares_policy(config))
    check_fixed(config, {role: policy.model_config.score_head for role, policy in policies.items()})
    method, task = rehearsed(config, policies)
    check_problems(config, policies, task, schedule, method)
    check_keep_best(config, task, method)
    check_grader(task.grade_kind)
    describe_run(console, config, policies, task, schedule, method)
    checkpointer = Checkpointer(workdir / "checkpoints", keep=config.checkpoint.keep)
    newest = peek(checkpointer, policies)
    check_log(workdir, newest, config.checkpoint.every)
    if config.fork_of and newest is None:
        check_fork(config, policies, abstract_states(policies))
        console.log(f"the policies are those of {provenance.fork['run']} after turn {provenance.fork['turn']}")

    # Stage 1.
    is_set_up = functools.partial(names_memory, "setting up the policies", ["init"], config, *policies.values())
    with is_set_up():
        start_params = run_stage_one(policies, config, task, workdir, console, preemption, provenance)
    fingerprints = fingerprints_of(policies, start_params, task)
    check_start(newest, fingerprints, config)

    with is_set_up():
        references = references_of(policies, start_params, config)
    context = RunContext(config, task, policies, references, PhaseTimer(), method)
    with console.stage("Compiling", total=len(ROLES)) as progress:
        compile_run(context, start_params, progress, preemption)
    return_freed_memory()
    with is_set_up():
        start = start_or_resume(policies, start_params, newest, fingerprints, checkpointer, config,
                                provenance.fork)
        compile_transfers(context, start.states)
    if start.memory.turn:
        console.log(f"resumed after turn {start.memory.turn} of {schedule.num_turns} from {workdir / 'checkpoints'}")
    compiles.mark_warm()

    # Stage 2.
    began -= start.seconds
    pool = fixed_pool(task, config.eval.pool)
    dump = RolloutDump(workdir / "rollouts", config, start.memory.turn, task.step_kinds)
    title = f"Stage 2: reinforcement learning ({config.arm})"
    with (
        RunLog(workdir, config, console, resume_at=start.metrics_bytes, provenance=provenance) as log,
        console.stage(title, schedule.num_turns, start.memory.turn) as progress,
    ):
        context = dataclasses.replace(context, show_fn=preemption.ends_sampling(progress.show))
        output = RunOutput(context, schedule, log, dump, checkpointer, progress, start.fingerprints, workdir, began)
        with preemption.held(), checkpointer:
            states = run_turns(context, schedule, pool, start, output, preemption)
        progress.begin("evaluation for the transcripts")
        final = evaluate_roles(context, states, pool[:1])

    summary = {}
    if hosts.is_first():
        rows, seconds = read_metrics(workdir / "metrics.jsonl"), time.monotonic() - began
        summary = write_results(
            config, workdir, rows, final.solutions, final.verifications, len(compiles.late()), seconds,
            start.fingerprints,
        )
    if compiles.late():
        console.log(f"warning: compiled after warm-up: {compiles.late()}")
    summary = hosts.from_first(summary)
    describe_results(console, config, workdir, summary)
    return summary


def rehearsed(config: ConfigDict, policies: dict[str, Policy]) -> tuple[Method, Task]:
    """Each tried with the other. Raises as `make_task` and `load_method`."""
    method = load_method(config)
    further = {role: method.further_prompts(role) for role in ROLES}
    tokenizers = {role: policy.tokenizer for role, policy in policies.items()}
    task = make_task(config, tokenizers, further, has_remarks=not method.arm.is_scored)
    check_task(config, method, task)
    method = load_method(config, task)
    for role, rehearsal in method.rehearsals.items():
        check_alike(config, role, rehearsal.digests)
        check_names(*rehearsal.example)
    return method, task


def run_turns(
    context: RunContext, schedule: Schedule, pool: list[Solution], start: RunState, output: RunOutput,
    preemption: hosts.Preemption,
) -> States:
    """Returns the last states. Raises FloatingPointError: a metric is not finite; Preempted: SIGTERM was received and
    the state is saved or being saved. The resumed run repeats a turn that was sampling, and a due evaluation."""
    states, memory, config = start.states, start.memory, context.config
    save_every, patience = config.checkpoint.every, config.checkpoint.patience
    owes_evaluation, best, is_saved = start.owes_evaluation, start.best, True
    try:
        if owes_evaluation:
            best, owes_evaluation = run_evaluation(context, states, pool, memory.turn, output, best), False
            # A fork that is resumed needs no other run.
            if (best and best.turn == memory.turn) or (config.fork_of and memory.turn == 0):
                output.save(states, memory, owes_evaluation, best)
        while memory.turn < schedule.num_turns and not is_over(best, patience):
            output.checkpointer.check()
            place, began = turn_at(schedule, memory.turn), time.monotonic()
            output.progress.begin(describe_turn(place, schedule))
            with output.explained(f"turn {place.index + 1} ({place.phase}, update of the {place.role})"):
                result = run_turn(context, states, memory, place)
                check_metrics(place.role, result.metrics)
            done = turns_done(config.rl, place, result.memory)
            states, memory = result.states, result.memory.replace(turn=done)
            owes_evaluation, is_saved = is_evaluation_due(config, schedule, done - 1), False
            output.write_turn(place, result, began, done)
            preemption.check()
            if owes_evaluation:
                best, owes_evaluation = run_evaluation(context, states, pool, done, output, best), False
                preemption.check()
            is_last = done == schedule.num_turns or is_over(best, patience)
            is_best = best is not None and best.turn == done
            if is_best or is_last or done // save_every > place.index // save_every:
                output.save(states, memory, owes_evaluation, best)
                is_saved = True
    except hosts.Preempted:
        if not is_saved:
            output.save(states, memory, owes_evaluation, best)
        raise
    if memory.turn < schedule.num_turns:
        output.progress.log(f"training ends after turn {memory.turn} of {schedule.num_turns}: since turn {best.turn}, "
                            f"{best.misses} evaluations after turns that train the {role_of_best(config)} "
                            f"were not better (checkpoint.patience={patience})")
    return states


def run_evaluation(
    context: RunContext, states: States, pool: list[Solution], turns_done: int, output: RunOutput, best: Best | None
) -> Best | None:
    """Returns the best evaluation so far, with `checkpoint.keep_best`."""
    output.progress.begin("evaluation")
    with output.explained(f"the evaluation after turn {turns_done}"), context.timer("evaluate"):
        measured = evaluate_roles(context, states, pool)
    output.write_evaluation(turns_done, measured)
    config, name = context.config, context.config.checkpoint.keep_best
    turns = turns_since_evaluation(config, output.schedule, turns_done)
    is_trained = role_of_best(config) in trained_roles(config, turns)
    return after_evaluation(best, measured.metrics, name, turns_done, is_trained) if name else None
