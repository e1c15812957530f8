"""Plans of a verifier that does not write: it has no sampler, and reads marks in a pass of whole texts."""

import dataclasses

import jax
import pytest

from tango_jax.cli.command_line import load_config
from tango_jax.loop.compilation import _batches
from tango_jax.method.rehearsal import Trained
from tango_jax.planning.advice import advice
from tango_jax.planning.assumed_lengths import Even
from tango_jax.planning.estimates import estimated_phases, estimated_programs
from tango_jax.planning.job import make_job, sized_job
from tango_jax.planning.machines import Machine
from tango_jax.planning.memory import phases
from tango_jax.planning.program_counts import role_programs
from tango_jax.planning.programs import compile_job, lowered_functions
from tango_jax.planning.targets import Devices, open_target
from tango_jax.planning.times import read_solutions, sampled_requests, turn_times
from tango_jax.planning.workload import reading_workload


def job_of(arm: str, *overrides: str):
    config = load_config("tiny", [f"arm={arm}", "generator.model.num_layers=1", "verifier.model.num_layers=1",
                                  "eval.problems=20", "verifier.max_response=64", *overrides])
    return make_job(config, Devices(jax.devices()[:1], True, {}), 1)


@pytest.fixture(scope="module")
def job():
    return job_of("scored_exact")


def test_it_has_no_sampler(job):
    assert set(lowered_functions(job, "verifier")) == {"update", "score", "sft"}
    assert set(lowered_functions(job, "generator")) > {"layout", "prefill", "decode", "update"}
    fixed = job_of("fixed_verifier")
    assert "layout" in lowered_functions(fixed, "verifier") and "score" not in lowered_functions(fixed, "verifier")


def test_its_batches_are_those_of_a_run(job):
    planned, policy = job.policies["verifier"].batch, job.functions["verifier"]
    [batch] = _batches(policy, 1, job.method.rehearsals["verifier"].learner)
    shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(planned)]
    assert shapes == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batch)]
    assert planned.other_NZRT.shape == planned.token_NZRT.shape == (2, 1, 4, 104 + 64)
    [read] = _batches(policy, 1, Trained(job.method.most_read(job.config), 1, is_scored=True))
    assert read.token_NZRT.shape[0] == 5  # 20 solutions, four rows at a time
    assert role_programs(job, "verifier") == {"sft": 2, "update": 1, "score": 2}
    same = job_of("scored", "eval.problems=8")
    assert same.method.most_read(same.config) == 8 and role_programs(same, "verifier")["score"] == 1


def test_no_plan_advises_fewer_shared_prompts():
    """There are none: the memory is the same with any verifier.prompts_per_micro_batch."""
    peaks, target = {}, open_target("cpu", 1)
    for arm, prompts in (("scored", 4), ("scored", 1), ("tango", 4), ("tango", 1)):
        sized = job_of(arm, f"verifier.prompts_per_micro_batch={prompts}")
        found = estimated_phases(sized, "verifier", "training")
        peaks[arm, prompts] = {phase.name: phase.peak for phase in found}["verifier/update"]
        lines = advice(sized, found, dataclasses.replace(target, memory=1))
        is_advised = any("verifier.prompts_per_micro_batch=2" in line for line in lines)
        assert is_advised == ((arm, prompts) == ("tango", 4))
    assert peaks["scored", 4] == peaks["scored", 1] and peaks["tango", 4] > peaks["tango", 1]


def test_memory_and_times_are_those_of_a_score(job):
    target = open_target("cpu", 1)
    programs = compile_job(job, Devices(jax.devices()[:1], True, {}), lambda *_: None)
    found = {phase.name: phase for phase in phases(job, programs)}
    assert {name for name in found if name.startswith("verifier")} == {
        "verifier/score", "verifier/update", "verifier/sft"}
    estimates = estimated_programs(job, "cpu")
    assert set(estimates) == set(programs)
    assert [sampled_requests(job, role) for role in ("generator", "verifier")] == [{"generator": (4, 2)}] * 2
    assert [read_solutions(job, role) for role in ("generator", "verifier")] == [8, 8]
    times = {role: turn_times(job, estimates, target, role, Even(0.5)).seconds for role in ("generator", "verifier")}
    assert 0 < times["generator"]["verify"] == pytest.approx(times["verifier"]["verify"])
    # Reading is a forward pass over what an update computes forwards and backwards, and a reference forwards.
    assert times["verifier"]["verify"] == pytest.approx(times["verifier"]["score"])
    assert times["verifier"]["verify"] < times["verifier"]["update"] / 2
    more = reading_workload(job, "verifier", 64, Even(0.5))
    assert more.micro_batches > reading_workload(job, "verifier", 8, Even(0.5)).micro_batches


def test_a_verifier_that_is_fixed_is_sized_for_its_passes():
    config = load_config("tiny", ["arm=scored"])
    models = {role: policy.model_config for role, policy in job_of("scored").policies.items()}
    sized = sized_job(config, models, Machine("cpu", 1, 0))
    assert sized.policies["verifier"].is_scored and not sized.policies["generator"].is_scored
    assert estimated_phases(sized, "verifier", "sampling") == []
    assert [phase.name for phase in estimated_phases(sized, "verifier", "training")][:2] == [
        "verifier/score", "verifier/update"]
