"""Grading, evaluations and checkpoints of a run, in seconds by hand."""

import jax
import pytest

from tango_jax.cli.command_line import load_config
from tango_jax.config import ROLES
from tango_jax.planning.assumed_lengths import Even
from tango_jax.planning.estimates import estimated_programs
from tango_jax.planning.job import sized_job
from tango_jax.planning.sources import plan_source
from tango_jax.planning.targets import TARGETS, machine_of
from tango_jax.planning.time_model import TimeModel
from tango_jax.planning.upkeep import checkpoint_seconds, evaluation_seconds, grade_seconds, upkeep_seconds
from tango_jax.planning.workload import sampling_workload

TIMES = TimeModel(TARGETS["a100-80gb"])
HALF = Even(0.5)


def job_of(*settings: str, devices: int = 1):
    config = load_config("tiny", settings)
    models = {role: plan_source(config, role).model_config for role in ROLES}
    return sized_job(config, models, machine_of("a100-80gb", devices))


def state_bytes(job, *roles: str) -> int:
    """Float32 of parameters and two moments; the optimizer has counters in addition."""
    return sum(3 * 4 * leaf.size for role in roles for leaf in jax.tree.leaves(job.policies[role].state.params))


def test_grading_by_hand():
    """1280 answers of 10 ms on sixteen cores; words need no workers."""
    config = load_config("tiny")
    assert grade_seconds(config, 1280) == 0
    config.task.name = "math"
    assert grade_seconds(config, 1280) == pytest.approx(0.8)
    config.task.grader = "mine.py:grade"  # nobody knows how long it takes
    assert grade_seconds(config, 1280) == 0


def test_a_checkpoint_by_hand():
    """Copied at 3 GB/s by each host."""
    alone, two = job_of(), job_of(devices=16)
    size = state_bytes(alone, *ROLES)
    assert checkpoint_seconds(alone, TIMES) == pytest.approx(size / 3e9, rel=1e-3)
    assert checkpoint_seconds(two, TIMES) == pytest.approx(size / 6e9, rel=1e-3)
    one_policy = job_of("verifier.adapter=generator")
    assert checkpoint_seconds(one_policy, TIMES) == pytest.approx(
        state_bytes(one_policy, "generator") / 3e9, rel=1e-3)


def test_an_evaluation_is_a_layout_and_a_greedy_sample_for_each_question():
    job = job_of("eval.problems=6", "eval.pool=3")
    programs = estimated_programs(job, "gpu")

    def asked(role: str, count: int) -> float:
        sampled = TIMES.sampling_seconds(job.policies[role], sampling_workload(job, role, count, 1, HALF))
        return TIMES.layout_seconds(programs[f"{role}/layout"]) + sampled

    solved_and_judged = asked("generator", 6) + asked("verifier", 6)
    assert evaluation_seconds(job, programs, TIMES, HALF) == pytest.approx(solved_and_judged + asked("verifier", 3))
    # Problems from files have no fixed pool, unless their worked answers are imitated.
    for stage_one, pool in (("", 0.0), ("gsm8k", asked("verifier", 3))):
        job.config.task.name, job.config.task.stage_one = "math", stage_one
        found = evaluation_seconds(job, programs, TIMES, HALF) - grade_seconds(job.config, 6)
        assert found == pytest.approx(solved_and_judged + pool)


def test_an_evaluation_may_solve_every_problem_again():
    once, twice = (job_of(f"arm={arm}", "task.name=math", "generator.max_prompt=300", "verifier.max_prompt=300")
                   for arm in ("self_verify", "second_try"))
    programs, problems = estimated_programs(once, "gpu"), once.config.eval.problems
    again = TIMES.sampling_seconds(once.policies["generator"], sampling_workload(once, "generator", problems, 1, HALF))
    again += TIMES.layout_seconds(programs["generator/layout"]) + grade_seconds(once.config, problems)
    first, both = (evaluation_seconds(job, programs, TIMES, HALF) for job in (once, twice))
    assert both == pytest.approx(first + again)


def test_the_part_of_a_turn_by_hand():
    """`tiny` has ten turns: two of warm-up and two cycles of three and one. There are evaluations before the first
    turn, after the warm-up, after generator steps 3 and 6, after the last turn, and for the transcripts; and
    checkpoints after turns 4, 8 and 10."""
    job = job_of("eval.every=3", "checkpoint.every=4")
    programs = estimated_programs(job, "gpu")
    found = upkeep_seconds(job, programs, TIMES, HALF)
    evaluation, checkpoint = evaluation_seconds(job, programs, TIMES, HALF), checkpoint_seconds(job, TIMES)
    assert found == pytest.approx({"evaluate": 6 * evaluation / 10, "checkpoint": 3 * checkpoint / 10})
