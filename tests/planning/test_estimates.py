"""What a compiled function would say of itself, by arithmetic, beside compiled ones of tiny models."""

import dataclasses
import math

import jax
import pytest
from jax.sharding import AbstractMesh

from support.hlo import collectives, wire_bytes_by_kind
from support.paths import ROOT
from tango_jax.cli.command_line import load_config
from tango_jax.config import ROLES
from tango_jax.models.transformer import ModelConfig
from tango_jax.planning import estimates
from tango_jax.planning.assumed_lengths import Even
from tango_jax.planning.costs import MicroBatchShape
from tango_jax.planning.estimates import estimated_programs
from tango_jax.planning.job import device_bytes, make_job, sized_job
from tango_jax.planning.machines import Machine
from tango_jax.planning.memory import phases
from tango_jax.planning.programs import examine, lowered_functions
from tango_jax.planning.run_plan import PlanOptions
from tango_jax.planning.targets import TARGETS, Devices
from tango_jax.planning.times import trained_seconds, turn_times
from tango_jax.planning.traffic import axis_members, score_traffic, update_traffic
from tango_jax.planning.workload import update_workload

HALF = Even(0.5)
A100 = TARGETS["a100-80gb"]
TINY = str(ROOT / "configs/tiny.py")
SIZES = ("model.num_layers=1", "model.num_kv_heads=2", "row_buckets=(4,)", "cache_buckets=(16,)")
SMALL = ["rl.prompts_per_step=16", *(f"{role}.{item}" for role in ROLES for item in SIZES)]


def options_of(*settings: str, memory: float = A100.memory, devices: int = 4) -> PlanOptions:
    target = dataclasses.replace(A100, memory=memory, compilers=("a_package_that_is_not_there",))
    return PlanOptions(load_config(TINY, [*SMALL, *settings]), target, devices, devices, lengths=HALF, is_json=True)


def devices_of(options: PlanOptions) -> Devices:
    return Devices(jax.devices()[: options.devices], False, {})


@pytest.fixture(scope="module")
def job():
    options = options_of()
    return make_job(options.config, devices_of(options), options.per_process)


def resized(job, config):
    """The job with these settings."""
    models = {role: dataclasses.replace(policy.model_config, remat=config[role].model.remat)
              for role, policy in job.policies.items()}
    return sized_job(config, models, job.machine)


def described(tree):
    return jax.tree.map(lambda leaf: (leaf.dtype, leaf.sharding.spec, leaf.sharding.shard_shape(leaf.shape)), tree)


@pytest.mark.parametrize("settings", [
    ("generator.mesh.fsdp=2", "generator.mesh.tensor=2", "generator.mesh.decode_tensor=2",
     "generator.row_buckets=(8,)"),
    ("verifier.mesh.data=-1", "verifier.mesh.fsdp=2", "verifier.cache_tokens=448", "verifier.row_buckets=(4,8,12)",
     "verifier.model.remat=dots", "verifier.rows_per_micro_batch=2", "verifier.mesh.offload=true"),
])
def test_a_resized_job_is_the_job_of_those_settings(job, settings):
    options = options_of(*settings)
    made = make_job(options.config, devices_of(options), options.per_process)
    sized = resized(job, options.config)
    for role in ROLES:
        one, other = sized.policies[role], made.policies[role]
        for name in ("state", "batch", "stage_one"):
            assert described(getattr(one, name)) == described(getattr(other, name))
        for name in ("weights", "states"):
            assert described(getattr(one.sampling, name)) == described(getattr(other.sampling, name))
        assert one.sampling.prompts == other.sampling.prompts
        assert one.model_config == other.model_config
        assert one.sampler_config == other.sampler_config == made.functions[role].sampler.config


@pytest.mark.parametrize("settings", [
    (), ("generator.mesh.fsdp=2", "generator.mesh.tensor=2", "verifier.cache_tokens=448"),
])
def test_devices_that_are_only_counted_give_the_same_sizes(settings):
    options = options_of(*settings)
    made = make_job(options.config, devices_of(options), options.per_process)
    models = {role: policy.model_config for role, policy in made.policies.items()}
    sized = sized_job(options.config, models, Machine("cpu", options.devices, 0))
    for role in ROLES:
        assert sized.policies[role].model_config == made.policies[role].model_config
    programs = estimated_programs(sized, "cpu")
    assert programs == estimated_programs(made, "cpu") and phases(sized, programs) == phases(made, programs)


def test_a_mesh_that_does_not_fit_is_refused(job):
    options = options_of("generator.mesh.decode_tensor=4")
    with pytest.raises(ValueError, match="generator: mesh decode_tensor=4 does not divide the model's num_kv_heads=2"):
        resized(job, options.config)


def test_members_of_a_group():
    mesh = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"))
    assert axis_members(mesh, "tensor") == (0, 1)
    assert axis_members(mesh, "fsdp") == (0, 2)
    assert axis_members(mesh, "data") == (0, 4)
    assert axis_members(mesh, "data", "fsdp") == (0, 2, 4, 6)


def test_traffic_of_scoring_by_hand():
    # As in test_collectives.test_bytes_by_hand: 160 numbers in a layer's matrices, 24 in table and head each.
    model = ModelConfig(
        vocab_size=6, width=4, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=2, mlp_width=8, tied_head=False,
        compute_dtype="bfloat16",
    )
    mesh = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"))
    sent = wire_bytes_by_kind(score_traffic(model, mesh, MicroBatchShape(1, 10), 4), passes=1)
    # Layers once; two sums a layer of 10 tokens and one for the table; four numbers of each of 12 scored tokens.
    assert sent == {"all-gather": 0.5 * (80 * 2 + 12 * 2 + 12 * 4),
                    "all-reduce": 2 * 0.5 * ((2 * 10 + 10) * 4 * 2 + 12 * 4 * 4)}
    alone = AbstractMesh((1, 1, 1), ("data", "fsdp", "tensor"))
    assert score_traffic(model, alone, MicroBatchShape(1, 10), 4) == []
    assert update_traffic(model, alone, MicroBatchShape(1, 10), 4) == []


@pytest.mark.long
@pytest.mark.parametrize("settings", [(), ("generator.mesh.fsdp=2", "generator.mesh.tensor=2")])
def test_estimates_of_compiled_programs(settings):
    """What is called known is known; what is not is right to a factor of a few; traffic is what is sent."""
    options = options_of(*settings)
    job = make_job(options.config, devices_of(options), options.per_process)
    compiled = {f"{role}/{name}": lower().compile() for role in ROLES
                for name, lower in lowered_functions(job, role).items()}
    estimated = estimated_programs(job, "cpu")
    assert compiled.keys() == estimated.keys()
    for name, executable in compiled.items():
        estimate, program = estimated[name], examine(executable)
        print(name, estimate.added, program.added)
        assert program.added / 10 < estimate.added < 10 * program.added, name
        if name.endswith("/layout"):
            assert estimate.argument == program.argument
        if name.endswith(("/layout", "/prefill")):
            assert estimate.output == pytest.approx(program.output, rel=0.01)
        if name.endswith(("/update", "/score", "/sft")):
            found = collectives(executable.as_text(), options.devices)
            sent, seen = (wire_bytes_by_kind(one, 1) for one in (estimate.collectives, found))
            for kind in ("all-gather", "reduce-scatter"):
                assert sent.get(kind, 0.0) == pytest.approx(seen.get(kind, 0.0), rel=0.05), (name, kind)


def test_gradients_are_summed_over_data_once_on_gpus(job):
    options = options_of("generator.mesh.data=2", "generator.mesh.fsdp=2")
    sized = resized(job, options.config)
    members = axis_members(sized.policies["generator"].placement.train, "data")
    for platform, in_pass in (("gpu", False), ("tpu", True)):
        traffic = estimates.training_estimates(sized, "generator", platform)["generator/update"].collectives
        assert {item.in_pass for item in traffic if item.members == members} == {in_pass}


def test_on_tpus_everything_sent_waits_and_narrow_gradients_are_summed_whole(job):
    """Parts of a width of 64 over four devices have 16 columns; of 512, 128."""
    for width, kind in ((64, "all-reduce"), (512, "reduce-scatter")):
        models = {role: dataclasses.replace(policy.model_config, width=width) for role, policy in job.policies.items()}
        sized = sized_job(job.config, models, job.machine)
        tpu, gpu = (estimates.training_estimates(sized, "generator", platform) for platform in ("tpu", "gpu"))
        for name, program in tpu.items():
            assert {item.hidden for item in program.collectives} == {0.0}
            assert any(item.hidden for item in gpu[name].collectives)
        layers = {item.kind for item, same in zip(tpu["generator/update"].collectives,
                                                  gpu["generator/update"].collectives, strict=True)
                  if same.kind == "reduce-scatter"}
        assert layers == {kind}


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_the_scores_of_a_teacher_take_as_long_as_those_of_the_reference(job, is_offloaded):
    programs = estimates.training_estimates(job, "verifier", "gpu")
    tango, taught = (
        resized(job, options_of(f"arm={arm}", "verifier.loss.minibatches=2", "verifier.loss.kl_coef=0.01",
                                f"verifier.mesh.offload={is_offloaded}").config)
        for arm in ("tango", "taught_verifier")
    )
    plain, more = (trained_seconds(one, programs, A100, "verifier", update_workload(one, "verifier", HALF))
                   for one in (tango, taught))
    fetched = device_bytes(job.policies["verifier"].state.params) / (0.8 * 32e9) if is_offloaded else 0.0
    # By the reference for the KL term, with its parameters fetched for each minibatch; by the policy before the first
    # update; and by the teacher, once for the whole turn.
    assert more["score"] - fetched == pytest.approx(1.5 * (plain["score"] - 2 * fetched) + 2 * fetched)
    assert more["update"] == plain["update"]
    solved = [turn_times(one, estimated_programs(one, "gpu"), A100, "generator", HALF).seconds
              for one in (tango, taught)]
    assert solved[0] == solved[1]


def test_time_of_what_waits_in_host_memory(job):
    passes = update_workload(job, "generator", HALF)
    programs = estimates.training_estimates(job, "generator", "gpu")
    stays = trained_seconds(job, programs, A100, "generator", passes)
    options = options_of("generator.mesh.offload=true")
    waiting = trained_seconds(resized(job, options.config), programs, A100, "generator", passes)
    params = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * 4
                 for leaf in jax.tree.leaves(job.policies["generator"].state.params))
    assert waiting["score"] - stays["score"] == pytest.approx(params / (0.8 * 32e9), rel=0.01)
    assert waiting["update"] - stays["update"] == pytest.approx(2 * 2 * params / (0.8 * 32e9), rel=0.01)
