"""The plan of a run on a target: everything that `python -m tango_jax.plan` prints, worked out.

In: the options of the command. Out: one record, which `plan_tables.py` shows. Stage: none of a run; before it.
"""

import dataclasses
from collections import Counter
from typing import NamedTuple

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.method.own_arm import make_schedule
from tango_jax.planning.advice import advice
from tango_jax.planning.hlo import wire_bytes_by_kind
from tango_jax.planning.job import Job, make_job
from tango_jax.planning.memory import Phase, phases
from tango_jax.planning.programs import Program, compile_job, function_names
from tango_jax.planning.targets import Target, open_devices
from tango_jax.planning.times import StageOneTimes, TurnTimes, stage_one_times, turn_times
from tango_jax.planning.traffic import dtype_widths, update_collectives
from tango_jax.runtime.console import Console


class PlanOptions(NamedTuple):
    """The command line."""

    config: ConfigDict
    target: Target
    devices: int
    per_process: int
    filled: float
    is_json: bool


class RunPlan(NamedTuple):
    """All that the plan found."""

    options: PlanOptions
    job: Job
    is_target: bool  # compiled for the target itself
    programs: dict[str, Program]
    phases: list[Phase]
    turns: dict[str, TurnTimes]  # by the role that is updated
    stage_one: dict[str, StageOneTimes]  # by role
    counts: Counter  # turns of the run, by that role
    advice: list[str]

    @property
    def fits(self) -> bool:
        return not self.advice


def make_plan(options: PlanOptions, console: Console) -> RunPlan:
    """Compile everything, and work out the rest.

    Raises:
        ValueError: settings, a mesh or a checkpoint that this target cannot run or the plan cannot size.
    """
    config = options.config
    devices = open_devices(options.target, options.devices)
    job = make_job(config, devices, options.per_process)
    with console.stage("Compiling", total=len(function_names(job))) as progress:
        programs = compile_job(job, devices, lambda name, seconds: progress.advance(phase=name, seconds=seconds))
    return plan_of(options, job, programs, devices.is_target)


def plan_of(options: PlanOptions, job: Job, programs: dict[str, Program], is_target: bool) -> RunPlan:
    """The plan of a job whose functions have been compiled, or estimated."""
    config = job.config
    found = phases(job, programs)
    counts = Counter(turn.role for turn in make_schedule(config).turns())
    turns = {role: turn_times(job, programs, options.target, role, options.filled) for role in ROLES if counts[role]}
    stage_one = {role: stage_one_times(job, programs, options.target, role, options.filled) for role in job.stage_one}
    hints = advice(job, found, options.target)
    return RunPlan(options, job, is_target, programs, found, turns, stage_one, counts, hints)


def bounds(plan: RunPlan) -> tuple[RunPlan, RunPlan]:
    """The same plan if all work is as quick as measurements allow, and as slow (`Reached`)."""
    reached = plan.options.target.reached
    targets = (plan.options.target.with_shares(shares) for shares in (reached.quick, reached.slow))
    quick, slow = (_timed(plan, target) for target in targets)
    return quick, slow


def _timed(plan: RunPlan, target: Target) -> RunPlan:
    """The same with times of another target."""
    job, options = plan.job, plan.options._replace(target=target)
    turns = {role: turn_times(job, plan.programs, target, role, options.filled) for role in plan.turns}
    stage_one = {role: stage_one_times(job, plan.programs, target, role, options.filled) for role in plan.stage_one}
    return plan._replace(options=options, turns=turns, stage_one=stage_one)


def run_seconds(plan: RunPlan) -> float:
    """All turns of the run, without stage 1."""
    return sum(plan.counts[role] * turn.total for role, turn in plan.turns.items())


def seconds_with_narrow_head(plan: RunPlan) -> float | None:
    """All turns, were no head wider than the rest of its model (`model.head_dtype`); None where none is.

    Products and the head's weights count; what collectives would save does not.
    """
    policies = dict(plan.job.policies)
    for role, policy in plan.job.policies.items():
        model, width = policy.model_config, dtype_widths(policy.model_config)
        if width["head"] > width["compute"]:
            narrow = dataclasses.replace(model, head_dtype=model.compute_dtype)
            policies[role] = dataclasses.replace(policy, model_config=narrow)
    if all(policies[role] is policy for role, policy in plan.job.policies.items()):
        return None
    job = dataclasses.replace(plan.job, policies=policies)
    return run_seconds(plan_of(plan.options, job, plan.programs, plan.is_target))


def comparison(plan: RunPlan, role: str) -> dict[str, tuple[float, float]]:
    """{kind: (bytes needed, bytes found)} that a device receives in the update of a turn."""
    policy, passes = plan.job.policies[role], plan.turns[role].passes
    epochs = policy.config.loss.epochs
    count = epochs * passes.micro_batches
    mesh, chunk = policy.placement.train, policy.config.logp_chunk
    need = update_collectives(policy.model_config, mesh, passes.tokens, chunk)
    found = wire_bytes_by_kind(plan.programs[f"{role}/update"].collectives, count, epochs * passes.calls)
    return {kind: (count * need.get(kind, 0.0), found.get(kind, 0.0)) for kind in need | found}
