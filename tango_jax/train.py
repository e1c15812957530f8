"""Start here: config -> tokenizer -> two policies -> stage 1 (SFT) -> interleaved reinforcement learning -> results.

    python -m tango_jax.train --config=configs/last_letter.py --workdir=runs/last_letter

Interrupted, the same command goes on where it stopped, bit for bit. The workdir then holds metrics.jsonl, summary.json,
curves.png, transcripts.md and the checkpoints.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from tango_jax.cli import session as runtime
from tango_jax.config import ANY_PLACE, check_config, parse_command_line
from tango_jax.evaluate import evaluate, fixed_pool
from tango_jax.grading import check_grader
from tango_jax.loop.breakdown import check_loaded, check_metrics, check_params, explained
from tango_jax.loop.describe import describe_results, describe_run
from tango_jax.loop.init_from import check_init_from
from tango_jax.loop.rollouts import Loop
from tango_jax.loop.turn import Counters, action_mask, run_turn, update_policy
from tango_jax.records import Rollout
from tango_jax.rl.policy import Policy
from tango_jax.rl.schedule import Schedule, Turn, turn_at
from tango_jax.runtime import hosts, rng
from tango_jax.runtime.checkpoint import Checkpointer, Restored, tree_fingerprint
from tango_jax.runtime.console import Console
from tango_jax.runtime.finite import first_not_finite
from tango_jax.runtime.lock import hold
from tango_jax.sft import run_stage_one
from tango_jax.sharding.placement import park
from tango_jax.tasks.registry import make_task
from tango_jax.tracking.loggers import RunLog
from tango_jax.tracking.metrics import CompileCounter, PhaseTimer, read_metrics
from tango_jax.tracking.results import is_finished, redraw_missing, write_results
from tango_jax.tracking.rollout_dump import RolloutDump
from tango_jax.weights.workdir import check_log, make_policies

# What each arm trains: (generator, verifier, turns of the verifier after its warm-up).
ARM_SCHEDULES = {
    "tango": (True, True, True),
    "grpo": (True, False, False),
    "fixed_verifier": (True, False, False),
    "fixed_verifier_warm": (True, True, False),
    "fixed_generator": (False, True, True),
    "gold_steps": (True, False, False),
}
ROLES = ("generator", "verifier")


def make_schedule(config: ConfigDict) -> Schedule:
    rl = config.rl
    train_generator, train_verifier, interleaves = ARM_SCHEDULES[config.arm]
    return Schedule(
        warmup_steps=rl.warmup_steps,
        generator_steps_per_cycle=rl.generator_turns_per_cycle,
        verifier_steps_per_cycle=rl.verifier_turns_per_cycle if interleaves else 0,
        total_generator_steps=rl.generator_steps,
        train_generator=train_generator,
        train_verifier=train_verifier,
    )


def train(
    config: ConfigDict,
    workdir: Path,
    console: Console,
    policies: dict[str, Policy] | None = None,
    preemption: hosts.Preemption | None = None,
) -> dict:
    """The whole run; returns the summary. `policies` are those of an earlier run with the same role settings.

    Raises:
        ValueError: a user's mistake (settings, another run's folder, a checkpoint that does not fit), or another
            process is at work in this folder.
        FloatingPointError: a loss that is not finite, with the turn, the role and the metrics.
        Preempted: SIGTERM came; the state is saved.
    """
    if summary := read_finished(config, workdir, console):
        return summary
    with hold(workdir, console):
        # Asked again: another process may have brought it to its end since.
        return read_finished(config, workdir, console) or run_all(config, workdir, console, policies, preemption)


def read_finished(config: ConfigDict, workdir: Path, console: Console) -> dict | None:
    """The summary of a finished run, which is shown; None if it is not finished.

    Raises:
        ValueError: it was made with other settings.
    """
    if not hosts.from_first(is_finished(workdir, make_schedule(config).num_turns)):
        return None
    check_config(config, workdir / "config.json")
    console.log(f"{workdir} holds a finished run; choose another --workdir for a new one")
    if hosts.is_first():
        redraw_missing(config, workdir, console)
    summary = json.loads((workdir / "summary.json").read_text())
    describe_results(console, workdir, summary)
    return summary


def run_all(config: ConfigDict, workdir: Path, console: Console, policies, preemption) -> dict:
    """See `train`, for a workdir that is locked and not finished."""
    check_config(config, workdir / "config.json", may_move=ANY_PLACE)
    preemption = preemption or hosts.Preemption()
    started, compiles, schedule = time.monotonic(), CompileCounter(), make_schedule(config)
    # Before anything is written: they read data and checkpoints, and find what the settings alone did not show.
    check_init_from(config)
    policies = policies or make_policies(config)
    task = make_task(config, {role: policy.tokenizer for role, policy in policies.items()})
    check_grader(task.grade_kind)
    describe_run(console, config, policies, task, schedule)

    # A mistake, or something lost, shows before stage 1 and minutes of compiling.
    checkpointer = Checkpointer(workdir / "checkpoints", keep=config.checkpoint.keep)
    abstract_states = {role: policies[role].abstract_state() for role in ROLES}
    glance = checkpointer.peek(abstract_states)
    check_log(workdir, glance, config.checkpoint.every)
    start_params = run_stage_one(policies, config, task, workdir, console, preemption)
    fingerprints = {role: tree_fingerprint(start_params[role]) for role in ROLES}
    references = {role: start_params[role] for role in ROLES if config[role].loss.kl_coef > 0}
    references |= {role: park(params) for role, params in references.items() if config[role].mesh.offload}
    check_start(glance, fingerprints)
    loop = Loop(config, task, policies["generator"], policies["verifier"], references, PhaseTimer())
    # Before the states are made: beside them, the one that updates are compiled with could be too much.
    with console.stage("Compiling", total=2) as progress:
        warm_up(loop, start_params, progress, preemption)
    states, counters, position, seconds, is_owed = start_or_resume(
        policies, start_params, abstract_states, fingerprints, checkpointer
    )
    if counters.turn:
        console.log(f"resumed after turn {counters.turn} of {schedule.num_turns} from {workdir / 'checkpoints'}")
    del start_params  # where no KL is measured, or its reference is parked, nothing else needs them
    states = {role: policies[role].parked(states[role]) for role in ROLES}
    started -= seconds
    compiles.mark_warm()

    pool = fixed_pool(task, config.eval.pool)
    dump = RolloutDump(workdir / "rollouts", config, resume_after=counters.turn)
    with (
        RunLog(workdir, config, console, resume_at=position) as writer,
        console.stage(f"Stage 2: reinforcement learning ({config.arm})", schedule.num_turns, counters.turn) as progress,
    ):
        record = Record(writer, dump, checkpointer, fingerprints, started, workdir)
        if is_owed:
            done = generator_steps_after(schedule, counters.turn - 1) if counters.turn else 0
            with record.explained(f"the evaluation after turn {counters.turn}", config):
                write_evaluation(loop, states, pool, writer, counters.turn, done)
        states = run_turns(loop, schedule, states, counters, pool, record, progress, preemption)
    _, solutions, verifications = evaluate(loop, states, pool[:1])
    summary = {}
    if hosts.is_first():
        rows = read_metrics(workdir / "metrics.jsonl")
        summary = write_results(
            config, workdir, rows, solutions, verifications, compiles.after_warmup, time.monotonic() - started
        )
    summary = hosts.from_first(summary)
    if compiles.after_warmup:
        console.log(f"warning: compiled after warm-up: {[item.name for item in compiles.late()]}")
    describe_results(console, workdir, summary)
    return summary


def start_or_resume(
    policies: dict, start_params: dict, abstract_states: dict, fingerprints: dict, checkpointer: Checkpointer
):
    """(states, counters, bytes of metrics, seconds so far, whether an evaluation is owed) of the newest checkpoint, or
    of the start.

    Raises:
        ValueError: the checkpoint belongs to a run with another start, or another model, or holds broken values.
    """
    restored = checkpointer.restore(abstract_states)
    check_start(restored, fingerprints)
    if restored is None:
        return {role: policies[role].restart(start_params[role]) for role in ROLES}, Counters(), 0, 0.0, True
    for role, state in restored.state.items():  # one at a time: their meshes may be of other devices
        check_loaded(state, f"the checkpoint of turn {restored.step} ({role})", f"remove its folder {restored.step} to "
                     "go back to the turn before it, if one is left, or choose another --workdir")
    meta = restored.meta
    counters = Counters(meta["turn"], meta["cursor"], tuple(meta["label_counts"]))
    # Checkpoints of before were saved after the evaluation, always.
    return restored.state, counters, meta["metrics_bytes"], meta["seconds"], meta.get("owes_evaluation", False)


def check_start(restored: Restored | None, fingerprints: dict) -> None:
    """Raises ValueError where a checkpoint belongs to a run with another start."""
    if restored is not None and restored.meta["source_fingerprint"] != fingerprints:
        raise ValueError(
            f"stage 1, or what init_from names, changed since the checkpoint of turn {restored.step} was saved: "
            "restore the stage-1 checkpoints, or choose another --workdir"
        )


class Record(NamedTuple):
    """What of a run is kept while it goes on."""

    writer: RunLog
    dump: RolloutDump
    checkpointer: Checkpointer
    fingerprints: dict[str, str]  # of the parameters that the run started from
    started: float  # time.monotonic(), less the seconds of earlier attempts
    workdir: Path

    def explained(self, doing: str, config: ConfigDict):
        """See `breakdown.explained`."""
        return explained(doing, config, self.workdir, self.checkpointer.latest_step())

    def save(self, counters: Counters, states: dict, is_owed: bool) -> None:
        """`is_owed`: the evaluation that follows this turn is not written yet."""
        meta = dataclasses.asdict(counters) | {
            "metrics_bytes": self.writer.position(),
            "seconds": time.monotonic() - self.started,
            "source_fingerprint": self.fingerprints,
            "owes_evaluation": is_owed,
        }
        self.checkpointer.save(counters.turn, states, meta)


def warm_up(loop: Loop, params: dict, progress, preemption: hosts.Preemption) -> None:
    """Compile everything the run can need, on batches without content, so that nothing compiles later; `params` of both
    roles are as good as any."""
    rl = loop.config.rl
    hosts.warm_up()
    for policy, groups in (
        (loop.generator, (1, rl.samples_per_prompt)),
        (loop.verifier, (1, rl.samples_per_prompt, rl.verifications_per_solution)),
    ):
        policy.sampler.warm_up(policy.sampler.layout(params[policy.role]), groups)
        state = policy.parked(policy.restart(policy.init(rng.step_key(0, "warm-up")).params))
        for bucket in (*policy.config.prompt_buckets, policy.config.max_prompt):
            state = warm_up_update(loop, policy, state, bucket)
            preemption.check()
        first_not_finite(state.params)  # as before every save
        progress.advance(phase=f"sampler and update of the {policy.role}")


def warm_up_update(loop: Loop, policy: Policy, state, prompt_length: int):
    """Score and update on responses of one token, with prompts of the given length."""
    P, M = loop.config.rl.prompts_per_step, loop.config.rl.samples_per_prompt
    token = np.array(policy.tokenizer.stop_ids[:1], np.int32)
    logp = np.zeros((1,), np.float32)
    rollout = Rollout((token,) * (P * M), (logp,) * (P * M), np.zeros(P * M, bool), 1, P * M)
    is_action_BT = action_mask(policy, rollout)
    scratch = loop._replace(references={policy.role: state.params}, timer=PhaseTimer())
    adv_BT = np.zeros(is_action_BT.shape, np.float32)
    prompts = [[int(token[0])] * prompt_length] * P
    return update_policy(scratch, policy, state, prompts, rollout, adv_BT, is_action_BT)[0]


def run_turns(loop, schedule, states, counters, pool, record: Record, progress, preemption) -> dict:
    """Take turns until the schedule is done, writing evaluations, metrics and checkpoints on the way.

    Raises:
        FloatingPointError: a metric that is not finite.
        Preempted: SIGTERM came; the state is saved, without the evaluation that was due, if that would have been next.
    """
    config, writer = loop.config, record.writer
    for index in range(counters.turn, schedule.num_turns):
        turn = turn_at(schedule, index)
        began = time.monotonic()
        with record.explained(f"turn {index + 1} ({turn.phase}, update of the {turn.role})", config):
            result = run_turn(loop, states, counters, turn)
            check_metrics(turn.role, result.metrics)
        states, counters = result.states, dataclasses.replace(result.counters, turn=index + 1)
        preemption.unsaved()
        with loop.timer("dump"):
            record.dump.write(turn, result)
        seconds = time.monotonic() - began
        timing = loop.timer.pop() | {"time/turn_s": seconds}
        timing["throughput/sampled_tokens_per_s"] = sampled_per_second(result.metrics, timing)
        writer.write(index + 1, turn.phase, {"generator_step": turn.generator_step} | result.metrics | timing)
        shown = {
            "outcome": result.metrics.get("generator/reward/outcome"),
            "verdicts_right": result.metrics.get("verifier/reward/correctness"),
        }
        progress.advance(phase=describe_turn(turn, schedule), **{k: v for k, v in shown.items() if v is not None})
        is_owed, must_stop = is_evaluation_due(config, schedule, index), preemption.is_due()
        if is_owed and not must_stop:
            with record.explained(f"the evaluation after turn {index + 1}", config):
                write_evaluation(loop, states, pool, writer, index + 1, generator_steps_after(schedule, index))
            is_owed, must_stop = False, preemption.is_due()
        if (index + 1) % config.checkpoint.every == 0 or index + 1 == schedule.num_turns or must_stop:
            with record.explained(f"the check of what turn {index + 1} would save", config):
                check_params(states)
            record.save(counters, states, is_owed)
            if must_stop:
                raise hosts.Preempted
            preemption.saved()
    return states


def sampled_per_second(metrics: dict, timing: dict) -> float:
    """Tokens that the roles sampled in a turn per second of their sampling, over both."""
    phases = {"generator": "time/sample_s", "verifier": "time/verify_s"}
    tokens = sum(metrics.get(f"{role}/tokens_sampled", 0) for role in phases)
    return tokens / sum(timing.get(name, 0.0) for name in phases.values())


def generator_steps_after(schedule: Schedule, index: int) -> int:
    """Generator turns made once turn `index` is over. Where the generator is fixed: those its peers would have made."""
    turn = turn_at(schedule, index)
    if turn.phase == "warmup":
        return 0
    if schedule.train_generator:
        return turn.generator_step + (turn.phase == "generator")
    done = index + 1 - schedule.warmup_steps
    return min(
        schedule.total_generator_steps, done * schedule.generator_steps_per_cycle // schedule.verifier_steps_per_cycle
    )


def is_evaluation_due(config: ConfigDict, schedule: Schedule, index: int) -> bool:
    """At the end of the warm-up, whenever another `eval.every` generator steps are done, and at the end."""
    is_last = index + 1 == schedule.num_turns
    if is_last or (turn_at(schedule, index).phase == "warmup" and turn_at(schedule, index + 1).phase != "warmup"):
        return True
    before = generator_steps_after(schedule, index - 1) if index else 0
    return generator_steps_after(schedule, index) // config.eval.every > before // config.eval.every


def write_evaluation(loop: Loop, states, pool, writer: RunLog, step: int, generator_step: int) -> None:
    with loop.timer("evaluate"):
        metrics, *_ = evaluate(loop, states, pool)
    writer.write(step, "eval", {"generator_step": generator_step} | metrics | loop.timer.pop())


def describe_turn(turn: Turn, schedule: Schedule) -> str:
    if turn.phase == "warmup":
        return f"verifier warm-up {turn.index + 1}/{schedule.warmup_steps}"
    if turn.role == "generator":
        return f"generator step {turn.generator_step + 1}/{schedule.total_generator_steps}"
    return f"verifier step (after {turn.generator_step} generator steps)"


def main(argv: list[str]) -> None:
    config, workdir = parse_command_line(__doc__, argv, "runs/last_letter")
    with runtime.session(config, workdir) as console:
        train(config, workdir, console)


if __name__ == "__main__":
    main(sys.argv[1:])
