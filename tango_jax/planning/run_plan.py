"""The plan of a run on a target: everything that `python -m tango_jax.plan` prints, worked out.

In: the options of the command. Out: one record, which `plan_tables.py` shows. Stage: none of a run; before it.
"""

from collections import Counter
from typing import NamedTuple

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.method.own_arm import make_schedule
from tango_jax.planning.advice import advice
from tango_jax.planning.estimates import estimated_programs
from tango_jax.planning.job import Job, make_job
from tango_jax.planning.memory import Phase, phases
from tango_jax.planning.programs import Program, compile_job, function_names
from tango_jax.planning.targets import Target, open_devices
from tango_jax.planning.times import StageOneTimes, TurnTimes, stage_one_times, turn_times
from tango_jax.runtime.console import Console


class PlanOptions(NamedTuple):
    """The command line."""

    config: ConfigDict | None  # None: which models fit is asked
    target: Target
    devices: int
    per_process: int
    filled: float
    is_json: bool


class Times(NamedTuple):
    """How long everything takes if the target reaches certain shares."""

    turns: dict[str, TurnTimes]  # by the role that is updated
    stage_one: dict[str, StageOneTimes]  # by role
    run_seconds: float  # all turns, without stage 1


class RunPlan(NamedTuple):
    """All that the plan found."""

    options: PlanOptions
    job: Job
    is_target: bool  # compiled for the target itself
    programs: dict[str, Program]
    phases: list[Phase]
    counts: Counter  # turns of the run, by the role that is updated
    likely: Times
    quick: Times  # if all work is as quick as measurements of its kind allow
    slow: Times
    advice: list[str]

    @property
    def fits(self) -> bool:
        return not self.advice


def make_plan(options: PlanOptions, console: Console) -> RunPlan:
    """Compile everything, and work out the rest.

    Raises:
        ValueError: settings, a mesh or a checkpoint that this target cannot run or the plan cannot size.
    """
    devices = open_devices(options.target, options.devices)
    job = make_job(options.config, devices, options.per_process)
    with console.stage("Compiling", total=len(function_names(job))) as progress:
        programs = compile_job(job, devices, lambda name, seconds: progress.advance(phase=name, seconds=seconds))
    found = phases(job, programs)
    counts = Counter(turn.role for turn in make_schedule(options.config).turns())
    reached = options.target.reached
    times = (times_of(options, job, counts, options.target.with_shares(shares))
             for shares in (reached.likely, reached.quick, reached.slow))  # fmt: skip
    return RunPlan(options, job, devices.is_target, programs, found, counts, *times,
                   advice(job, found, options.target))  # fmt: skip


def times_of(options: PlanOptions, job: Job, counts: Counter, target: Target) -> Times:
    programs = estimated_programs(job, target.platform)
    turns = {role: turn_times(job, programs, target, role, options.filled) for role in ROLES if counts[role]}
    stage_one = {role: stage_one_times(job, programs, target, role, options.filled) for role in job.stage_one}
    return Times(turns, stage_one, sum(counts[role] * turn.total for role, turn in turns.items()))
