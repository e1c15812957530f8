"""Plans of runs whose verifier is a process reward model: it reads, keeps no cache, and decodes nothing."""

import dataclasses

import jax
import pytest

from support.paths import ROOT
from support.reward_models import write_qwen_folder, write_trl_folder
from tango_jax.cli.command_line import load_config
from tango_jax.config import ROLES
from tango_jax.planning.assumed_lengths import Even
from tango_jax.planning.costs import head_flops, layer_flops, num_parameters, prefill_flops
from tango_jax.planning.estimates import estimated_programs
from tango_jax.planning.job import device_bytes, make_job
from tango_jax.planning.memory import phases, resident
from tango_jax.planning.plan_tables import describe_sampling
from tango_jax.planning.program_counts import role_programs
from tango_jax.planning.programs import examine, lowered_functions
from tango_jax.planning.targets import TARGETS, Devices
from tango_jax.planning.time_model import TimeModel
from tango_jax.planning.times import turn_times
from tango_jax.planning.workload import Lengths, sampling_workload
from tango_jax.rl.less_memory import less_memory
from tango_jax.weights.presets import preset_model


@pytest.fixture(scope="module", params=[write_trl_folder, write_qwen_folder])
def job(request, tmp_path_factory):
    folder = request.param(tmp_path_factory.mktemp("prm") / "model")
    template = {write_trl_folder: "trl_prm", write_qwen_folder: "qwen_prm"}[request.param]
    config = load_config(str(ROOT / "configs/tiny.py"), [
        "arm=fixed_verifier", f"verifier.checkpoint={folder}", f"verifier.template={template}", "verifier.sft.steps=0",
        "verifier.max_prompt=600", "verifier.max_response=1", "rl.prompts_per_step=8",
        "rl.verifications_per_solution=3",
        *(f"{role}.mesh.{setting}" for role in ROLES for setting in ("fsdp=2", "data=2")),
        "generator.model.num_kv_heads=2"])
    return make_job(config, Devices(jax.devices()[:4], False, {}), 4)


def test_flops_and_parameters_of_a_head_by_hand():
    model = preset_model("Qwen/Qwen2.5-Math-PRM-7B")
    assert head_flops(model, 10) == 2 * 10 * 3584 * (3584 + 2)
    linear = dataclasses.replace(model, score_head="linear")
    assert head_flops(linear, 10) == 2 * 10 * 3584 * 2
    writer = dataclasses.replace(model, score_head="")
    assert num_parameters(writer) - num_parameters(model) == 152064 * 3584
    # All tokens of a row are classified, on every device of a tensor group.
    read = prefill_flops(model, 3, 512, 2, "xla")
    assert read.head == head_flops(model, 3 * 512) and read.layers == prefill_flops(writer, 3, 512, 2, "xla").layers
    assert read.layers > layer_flops(model, 3 * 512, 0) / 2


def test_each_solution_is_read_once_whatever_the_samples(job):
    groups = job.policies["verifier"].placement.row_multiple
    done = sampling_workload(job, "verifier", 16, 3, Even(0.5))
    assert groups == 4 and (done.batches, done.prompts, done.segments, done.steps) == (1, 4, (), 0)
    assert len(done.chunk_lengths) == 16 / groups and set(done.chunk_lengths) <= {256, 512, 600}
    text = describe_sampling("generator", "verifier", done)
    quarter = sampling_workload(job, "verifier", 64, 3, Even(0.5), {"verifier": Lengths(0, 0.0, share=0.25)})
    assert len(quarter.chunk_lengths) * groups == 16
    tokens = 4 * sum(done.chunk_lengths)
    assert text.endswith(f"the verifier, a process reward model, reads {tokens:,} tokens, padding included")


def test_memory_and_time_of_a_pass(job):
    programs = {name: examine(lowered().compile()) for role in ROLES
                for name, lowered in ((f"{role}/{part}", fn) for part, fn in lowered_functions(job, role).items())
                if role == "verifier"}
    assert programs.keys() == {"verifier/layout", "verifier/prefill"}
    estimated = estimated_programs(job, "cpu")
    assert {name for name in estimated if name.startswith("verifier")} == programs.keys()
    assert 0.3 < estimated["verifier/prefill"].temp / programs["verifier/prefill"].temp < 3
    [phase] = [one for one in phases(job, estimated | programs) if one.name == "verifier/sample"]
    weights = job.policies["verifier"].sampling.weights
    assert (phase.weights, phase.cache) == (device_bytes(weights), 0) and "score" in weights
    assert phase.temporaries == programs["verifier/prefill"].added

    target = TARGETS["a100-80gb"]
    turn = turn_times(job, estimated, target, "generator", Even(0.5))
    done, model = turn.sampled["verifier"], job.policies["verifier"].model_config
    times = TimeModel(target)
    expected = sum(times.matmul_seconds(prefill_flops(model, 1, length, 1, model.attention), model, "prefill")
                   for length in done.chunk_lengths)
    assert turn.seconds["verify"] == pytest.approx(expected) and expected > 0


def test_a_fixed_policy_has_no_moments_and_no_reference(job):
    states = {role: policy.state for role, policy in job.policies.items()}
    assert jax.tree.leaves(states["verifier"].opt_state) == []
    kept = resident(job, "")
    assert kept.parameters == 2 * device_bytes(states["generator"].params) + device_bytes(states["verifier"].params)
    assert kept.optimizer == device_bytes(states["generator"].opt_state)


def test_of_a_model_that_decodes_nothing_no_decode_batch_is_advised(job):
    own = job.policies["verifier"]
    policy = dataclasses.replace(own, config=own.config.copy_and_resolve_references())
    policy.config.mesh.offload, policy.config.cache_tokens = True, 4000
    assert len(policy.config.row_buckets) > 1
    for phase in ("sample", "init"):  # and it has no adapters
        changes = less_memory(policy, phase, (), is_scored=False)
        assert changes and all(change.startswith("verifier.mesh.") for change in changes)


def test_few_programs_are_compiled(job):
    assert role_programs(job, "verifier") == {"layout": 1, "prefill": 3}
