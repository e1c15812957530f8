"""A whole run: configuration -> two policies -> stage 1 -> turns of both roles -> results.

Takes a validated configuration and a workdir; writes the workdir's files and returns the summary. If interrupted at any
moment, the same call resumes where it stopped, bit for bit.
"""

import contextlib
import dataclasses
import time
from pathlib import Path

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.grading import check_grader
from tango_jax.loop.breakdown import check_metrics, check_params, explained
from tango_jax.loop.describe import describe_results, describe_run, describe_turn
from tango_jax.loop.init_from import check_init_from
from tango_jax.loop.measure import evaluate, fixed_pool
from tango_jax.loop.problems_ahead import check_problems
from tango_jax.loop.resume import (
    Start,
    check_start,
    fingerprints_of,
    read_finished,
    save_checkpoint,
    start_or_resume,
)
from tango_jax.loop.stage_one import run_stage_one
from tango_jax.loop.try_method import try_method
from tango_jax.loop.turn import RunContext, run_turn
from tango_jax.loop.warm_up import warm_up, warm_up_transfers
from tango_jax.records import Solution, States, TurnResult
from tango_jax.rl.policy import Policy, make_policies
from tango_jax.rl.schedule import (
    Schedule,
    Turn,
    evaluations_before,
    generator_steps_after,
    is_evaluation_due,
    make_schedule,
    turn_at,
)
from tango_jax.runtime import hosts
from tango_jax.runtime.checkpoint import Checkpointer
from tango_jax.runtime.console import Console, Stage
from tango_jax.runtime.lock import hold
from tango_jax.runtime.timers import CompileCounter, PhaseTimer
from tango_jax.sharding.layouts import offload
from tango_jax.tasks.registry import make_task
from tango_jax.tracking.loggers import RunLog
from tango_jax.tracking.metrics import check_log, read_metrics
from tango_jax.tracking.provenance import begin
from tango_jax.tracking.results import write_results
from tango_jax.tracking.rollout_dump import RolloutDump
from tango_jax.tracking.run_config import ANY_PLACE, check_config
from tango_jax.tracking.turn_metrics import sampled_per_second


@dataclasses.dataclass(frozen=True)
class Run:
    """What all turns of a run share."""

    context: RunContext
    schedule: Schedule
    pool: list[Solution]  # the solutions on which the verifier is evaluated
    fingerprints: dict[str, str]  # what the run started from; see `fingerprints_of`
    workdir: Path
    began: float  # time.monotonic(), less the seconds of earlier attempts
    # What it writes to:
    log: RunLog
    dump: RolloutDump
    checkpointer: Checkpointer
    progress: Stage
    preemption: hosts.Preemption

    def explained(self, doing: str) -> contextlib.AbstractContextManager:
        """See `breakdown.explained`."""
        return explained(doing, self.context.config, self.workdir, self.checkpointer.latest_step())


def train(
    config: ConfigDict, workdir: Path, console: Console, policies: dict[str, Policy] | None = None,
    preemption: hosts.Preemption | None = None,
) -> dict:
    """Run everything and return the summary. `policies`: reused from an earlier run with the same role settings.

    Raises:
        ValueError: a user error (settings, another run's folder, a checkpoint that does not match), or another process
            is using this folder.
        FloatingPointError: a loss is not finite; the message has the turn, the role and the metrics.
        Preempted: SIGTERM was received; the state is saved.
    """
    if summary := read_finished(config, workdir, console):
        return summary
    with hold(workdir, console), CompileCounter() as compiles:
        # Check again: another process may have finished the run while this one waited for the lock.
        if summary := read_finished(config, workdir, console):
            return summary
        return run_all(config, workdir, console, policies, preemption or hosts.Preemption(), compiles)


def run_all(
    config: ConfigDict, workdir: Path, console: Console, policies: dict[str, Policy] | None,
    preemption: hosts.Preemption, compiles: CompileCounter,
) -> dict:
    """See `train`; the workdir is locked and not finished."""
    check_config(config, workdir / "config.json", may_move=ANY_PLACE)
    provenance = begin(config, workdir, console)
    began, schedule = time.monotonic(), make_schedule(config)
    # Before anything is written: these read data and checkpoints, and find errors that settings alone do not show.
    check_init_from(config)
    policies = policies or make_policies(config)
    task = make_task(config, {role: policy.tokenizer for role, policy in policies.items()})
    check_problems(config, policies, task, schedule)
    check_grader(task.grade_kind)
    method = try_method(config, task)
    describe_run(console, config, policies, task, schedule)

    # Detect a damaged or missing checkpoint now, before stage 1 and minutes of compilation.
    checkpointer = Checkpointer(workdir / "checkpoints", keep=config.checkpoint.keep)
    abstract_states = {role: policies[role].abstract_state() for role in ROLES}
    newest = checkpointer.peek(abstract_states)
    check_log(workdir, newest, config.checkpoint.every)
    start_params = run_stage_one(policies, config, task, workdir, console, preemption, provenance)
    fingerprints = fingerprints_of(policies, start_params, task)
    check_start(newest, fingerprints, config)
    references = {role: start_params[role] for role in ROLES if config[role].loss.kl_coef > 0}
    references |= {role: offload(params) for role, params in references.items() if config[role].mesh.offload}
    context = RunContext(config, task, policies, references, PhaseTimer(), method)
    with console.stage("Compiling", total=len(ROLES)) as progress:
        warm_up(context, start_params, progress, preemption)
    if newest is not None:
        start_params = {}  # frees them before the states are read, unless they serve as the reference on the devices
    start = start_or_resume(policies, start_params, abstract_states, fingerprints, checkpointer, config)
    if start.counters.turn:
        console.log(f"resumed after turn {start.counters.turn} of {schedule.num_turns} from {workdir / 'checkpoints'}")
    del start_params
    warm_up_transfers(context, start.states)
    compiles.mark_warm()
    began -= start.seconds
    pool = fixed_pool(task, config.eval.pool)
    dump = RolloutDump(workdir / "rollouts", config, start.counters.turn, task.step_kinds)
    title = f"Stage 2: reinforcement learning ({config.arm})"
    with (
        RunLog(workdir, config, console, resume_at=start.metrics_bytes, provenance=provenance) as log,
        console.stage(title, schedule.num_turns, start.counters.turn) as progress,
    ):
        context = dataclasses.replace(context, show_fn=progress.show)
        states = run_turns(
            Run(context, schedule, pool, fingerprints, workdir, began, log, dump, checkpointer, progress, preemption),
            start,
        )
        progress.begin("evaluation for the transcripts")
        final = evaluate(context, states, pool[:1])
    summary = {}
    if hosts.is_first():
        rows, seconds = read_metrics(workdir / "metrics.jsonl"), time.monotonic() - began
        summary = write_results(
            config, workdir, rows, final.solutions, final.verifications, compiles.after_warmup, seconds, fingerprints
        )
    if compiles.after_warmup:
        console.log(f"warning: compiled after warm-up: {[item.name for item in compiles.late()]}")
    summary = hosts.from_first(summary)
    describe_results(console, config, workdir, summary)
    return summary


def run_turns(run: Run, start: Start) -> States:
    """Run the remaining turns of the schedule, writing evaluations, metrics and checkpoints on the way.

    Raises:
        FloatingPointError: a metric is not finite.
        Preempted: SIGTERM was received; the state is saved, and a due evaluation is left to the resumed run.
    """
    config, schedule, preemption = run.context.config, run.schedule, run.preemption
    states, counters = start.states, start.counters
    if start.owes_evaluation:
        write_evaluation(run, states, counters.turn)
    for index in range(counters.turn, schedule.num_turns):
        turn = turn_at(schedule, index)
        began = time.monotonic()
        run.progress.begin(describe_turn(turn, schedule))
        with run.explained(f"turn {index + 1} ({turn.phase}, update of the {turn.role})"):
            result = run_turn(run.context, states, counters, turn)
            check_metrics(turn.role, result.metrics)
        states, counters = result.states, dataclasses.replace(result.counters, turn=index + 1)
        preemption.unsaved()
        write_turn(run, turn, result, began)
        owes_evaluation, must_stop = is_evaluation_due(config, schedule, index), preemption.is_due()
        if owes_evaluation and not must_stop:
            write_evaluation(run, states, index + 1)
            owes_evaluation, must_stop = False, preemption.is_due()
        if (index + 1) % config.checkpoint.every == 0 or index + 1 == schedule.num_turns or must_stop:
            with run.explained(f"the check of the parameters that turn {index + 1} would save"):
                check_params(states)
            run.progress.show("saving a checkpoint")
            with run.context.timer("checkpoint"):  # in the row of what comes next: this turn's is written
                save_checkpoint(run.checkpointer, counters, states, run.log.position(), time.monotonic() - run.began,
                                run.fingerprints, owes_evaluation)  # fmt: skip
            if must_stop:
                raise hosts.Preempted
            preemption.saved()
    return states


def write_turn(run: Run, turn: Turn, result: TurnResult, began: float) -> None:
    """Write the rollouts, metrics and progress of a turn that began at time.monotonic() `began`."""
    with run.context.timer("dump"):
        run.dump.write(turn, result)
    seconds = time.monotonic() - began
    timing = run.context.timer.pop() | {"time/turn_s": seconds}
    timing["throughput/sampled_tokens_per_s"] = sampled_per_second(result.metrics, timing)
    row = {"generator_step": turn.generator_step} | result.metrics | timing
    run.log.write(turn.index + 1, turn.phase, row)
    shown = {
        "outcome": result.metrics.get("generator/reward/outcome"),
        "verdicts_right": result.metrics.get("verifier/reward/correctness"),
    }
    shown = {name: value for name, value in shown.items() if value is not None}
    run.progress.advance(phase=describe_turn(turn, run.schedule), **shown)


def write_evaluation(run: Run, states: States, turns_done: int) -> None:
    """Evaluate both roles after the given number of turns, and write the metrics and some of the rollouts.

    Raises:
        FloatingPointError: logits are not finite.
    """
    context = run.context
    run.progress.begin("evaluation")
    with run.explained(f"the evaluation after turn {turns_done}"), context.timer("evaluate"):
        measured = evaluate(context, states, run.pool)
    step = generator_steps_after(run.schedule, turns_done - 1) if turns_done else 0
    number = evaluations_before(context.config, run.schedule, turns_done)
    run.dump.write_evaluation(number, turns_done, step, measured.solutions, measured.verifications)
    run.log.write(turns_done, "eval", {"generator_step": step} | measured.metrics | context.timer.pop())
