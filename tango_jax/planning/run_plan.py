"""The plan of a run on a target, which `plan_tables.py` shows."""

from collections import Counter
from typing import NamedTuple

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.method.own_arm import make_schedule
from tango_jax.planning.advice import advice
from tango_jax.planning.assumed_lengths import AssumedLengths
from tango_jax.planning.estimates import estimated_programs
from tango_jax.planning.job import Job, make_job
from tango_jax.planning.memory import Phase, phases
from tango_jax.planning.program_counts import compile_seconds, role_programs
from tango_jax.planning.programs import Program, compile_job, lowered_functions
from tango_jax.planning.targets import Target, open_devices
from tango_jax.planning.times import TurnTimes, stage_one_step_seconds, turn_times
from tango_jax.runtime.console import Console


class PlanOptions(NamedTuple):
    config: ConfigDict | None  # None: list the models that fit
    target: Target
    devices: int
    per_process: int
    lengths: AssumedLengths
    is_json: bool


class Times(NamedTuple):
    turns: dict[str, TurnTimes]  # by the role that is updated
    stage_one: dict[str, float]  # of a step, by role
    run_seconds: float  # all turns, with evaluations and checkpoints, without stage 1 and compiling


class RunPlan(NamedTuple):
    options: PlanOptions
    job: Job
    is_target: bool  # compiled for the target itself
    programs: dict[str, Program]
    phases: list[Phase]
    counts: Counter  # turns of the run, by the role that is updated
    compiled: dict[str, Counter]  # programs before the first turn, by role and kind
    likely: Times
    quick: Times  # as the quickest measurements of such work
    slow: Times
    advice: list[str]

    @property
    def compile_seconds(self) -> float:
        seconds = {name: program.seconds for name, program in self.programs.items()}
        return compile_seconds(self.compiled, seconds, self.job.processes)

    def hours(self, times: Times) -> float:
        """Of the whole run without stage 1."""
        return (times.run_seconds + self.compile_seconds) / 3600

    @property
    def fits(self) -> bool:
        return not self.advice


def make_plan(options: PlanOptions, console: Console) -> RunPlan:
    """Raises ValueError where the target cannot run the configuration."""
    devices = open_devices(options.target, options.devices)
    job = make_job(options.config, devices, options.per_process)
    total = sum(len(lowered_functions(job, role)) for role in ROLES)
    with console.stage("Compiling", total=total) as progress:
        programs = compile_job(job, devices, lambda name, seconds: progress.advance(phase=name, seconds=seconds))
    found = phases(job, programs)
    counts = Counter(turn.role for turn in make_schedule(options.config).turns())
    reached = options.target.reached
    estimates = estimated_programs(job, options.target.platform)
    times = (times_of(options, job, estimates, counts, options.target.with_shares(shares))
             for shares in (reached.likely, reached.quick, reached.slow))
    compiled = {role: role_programs(job, role) for role in ROLES}
    return RunPlan(options, job, devices.is_target, programs, found, counts, compiled, *times,
                   advice(job, found, options.target))


def times_of(
    options: PlanOptions, job: Job, programs: dict[str, Program], counts: Counter, target: Target
) -> Times:
    turns = {role: turn_times(job, programs, target, role, options.lengths) for role in ROLES if counts[role]}
    stage_one = {role: stage_one_step_seconds(job, programs, target, role, options.lengths) for role in job.stage_one}
    return Times(turns, stage_one, sum(counts[role] * turn.total for role, turn in turns.items()))
