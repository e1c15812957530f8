"""Seconds of a turn that neither sample nor train: grading, and the turn's part of evaluations and checkpoints."""

import math

from ml_collections import ConfigDict

from tango_jax.grading.pool import DEFAULT_MAX_WORKERS
from tango_jax.method.own_arm import make_schedule
from tango_jax.planning.assumed_lengths import AssumedLengths
from tango_jax.planning.job import Job
from tango_jax.planning.programs import Program
from tango_jax.planning.time_model import TimeModel
from tango_jax.planning.workload import reading_workload, sampling_workload
from tango_jax.rl.schedule import evaluations_before
from tango_jax.text.prompts import SECOND_TRY

# Seconds of a core for an answer: 700 fractions, roots, intervals and polynomials took 7 s, with the start of workers.
GRADE = 0.01
TO_HOST = 3e9  # bytes a second that a host copies from its devices to memory that is not pinned


def grade_seconds(config: ConfigDict, solutions: float) -> float:
    """Of a process's solutions. Only math answers need workers, and a user's grader is unknown."""
    return solutions * GRADE / DEFAULT_MAX_WORKERS if config.task.name == "math" and not config.task.grader else 0.0


def upkeep_seconds(
    job: Job, programs: dict[str, Program], times: TimeModel, lengths: AssumedLengths
) -> dict[str, float]:
    """The seconds of all evaluations and of all checkpoints, shared evenly by the turns."""
    config, schedule = job.config, make_schedule(job.config)
    turns, every = schedule.num_turns, config.checkpoint.every
    # One after the last turn, and one for the transcripts.
    evaluations = evaluations_before(config, schedule, turns) + 2
    return {"evaluate": evaluations * evaluation_seconds(job, programs, times, lengths) / turns,
            "checkpoint": math.ceil(turns / every) * checkpoint_seconds(job, times) / turns}


def evaluation_seconds(job: Job, programs: dict[str, Program], times: TimeModel, lengths: AssumedLengths) -> float:
    """The generator solves `eval.problems`; the verifier judges the solutions and the pool, where there may be one. In
    arms with second tries all are solved again: the most possible."""
    config = job.config
    problems, pool = (math.ceil(count / job.processes) for count in (config.eval.problems, config.eval.pool))
    asked = [("generator", problems), ("verifier", problems)]
    asked += [("verifier", pool)] if config.task.name != "math" or config.task.stage_one == "gsm8k" else []
    asked += [("generator", problems)] if SECOND_TRY in job.method.further_prompts("generator") else []
    seconds = sum(grade_seconds(config, count) for role, count in asked if role == "generator")
    for role, count in asked:
        if job.policies[role].is_scored:
            passes = reading_workload(job, role, count, lengths)
            seconds += times.training_seconds(job.policies[role], programs[f"{role}/score"], passes, "score")
            continue
        done = sampling_workload(job, role, count, 1, lengths)
        seconds += times.layout_seconds(programs[f"{role}/layout"])
        seconds += times.sampling_seconds(job.policies[role], done)
    return seconds


def checkpoint_seconds(job: Job, times: TimeModel) -> float:
    """Every host copies its part to its memory, and writes it while training goes on."""
    hosts = max(1, job.machine.devices // times.target.per_host)
    return job.checkpoint_bytes / hosts / TO_HOST
