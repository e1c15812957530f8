"""The plan of a run: command line, targets, what a turn does, predicted times and advice, with numbers by hand."""
import dataclasses
import io
import json
import re

import jax
import numpy as np
import pytest

from support.paths import ROOT
from tango_jax import plan
from tango_jax.cli.command_line import load_config
from tango_jax.cli.validation import validate
from tango_jax.config import ROLES, default_config
from tango_jax.loop.compilation import _batches
from tango_jax.method.load import load_method
from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.advice import advice
from tango_jax.planning.assumed_lengths import Even, evenly_spaced_lengths
from tango_jax.planning.costs import Flops, MicroBatchShape, decode_flops, decode_parts, num_parameters
from tango_jax.planning.estimates import estimated_programs
from tango_jax.planning.job import device_bytes, make_job, sized_job
from tango_jax.planning.memory import Phase, phases, resident
from tango_jax.planning.plan_tables import as_json, assumptions, describe_slice, show
from tango_jax.planning.programs import Program, compile_one, lowered_functions
from tango_jax.planning.run_plan import PlanOptions, make_plan
from tango_jax.planning.sources import plan_source
from tango_jax.planning.targets import (
    GPU_FLAGS,
    GPU_OPTIMIZATION_LEVEL,
    TARGETS,
    TPU_FLAGS,
    Devices,
    machine_of,
)
from tango_jax.planning.time_model import TimeModel, function_flops
from tango_jax.planning.traffic import Collective
from tango_jax.planning.workload import (
    DecodeSegment,
    UpdateWorkload,
    decode_segments,
    sampling_workload,
    stage_one_workload,
)
from tango_jax.runtime.console import Console
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.tracking.run_config import save_config
from tango_jax.weights.presets import CONFIG_JSON, known_name, preset_model

HALF = Even(0.5)
A100 = TARGETS["a100-80gb"]
GIB = 2**30


@pytest.fixture(scope="module")
def tiny_plan():
    """Two processes of four A100 without a compiler for them: virtual CPU devices stand in."""
    config = load_config(str(ROOT / "configs/tiny.py"), ["generator.cache_buckets=()", "verifier.model.num_layers=1"])
    target = dataclasses.replace(A100, compilers=("a_package_that_is_not_there", "json"))
    options = PlanOptions(config, target, devices=8, per_process=4, lengths=HALF, is_json=True)
    return make_plan(options, Console(enabled=False))


def test_json_has_what_programs_read(tiny_plan):
    report = json.loads(json.dumps(as_json(tiny_plan)))
    assert report["fits"] is True and report["devices"] == 8 and report["compiled_for_target"] is False
    assert report["available_gib_per_device"] == pytest.approx(0.95 * 85.1e9 / GIB)
    peaks = [phase["peak"] for phase in report["phases"].values()]
    assert report["peak_gib_per_device"] == max(peaks) > 0
    assert set(report["phases"]) == {f"{role}/{phase}" for role in ("generator", "verifier")
                                     for phase in ("reshard", "sample", "score", "update", "sft")}
    assert set(report["predicted_seconds"]) == {"reshard", "sample", "verify", "grade", "score", "update", "evaluate",
                                                "checkpoint"}
    # Words are compared without workers.
    assert {phase for phase, seconds in report["predicted_seconds"].items() if not seconds > 0} == {"grade"}
    low, high = report["predicted_hours_between"]
    assert low == high == report["predicted_hours"]  # of a target whose shares are assumed, and bound by nothing
    assert report["predicted_hours"] == pytest.approx((report["compile_seconds"] + sum(
        count * sum(report["predicted_seconds_by_turn"][role].values())
        for role, count in (("generator", 6), ("verifier", 4))  # 2 of warm-up, 1 after each 3 of the generator
    )) / 3600)
    assert report["compile_seconds"] > 0


def test_memory_of_states_is_counted_by_hand(tiny_plan):
    """float32 over 8 devices: each holds both policies and their references, and the moments of both."""
    job = tiny_plan.job
    stored = {role: sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) * 4 for leaf in
                        jax.tree.leaves(policy.state.params)) for role, policy in job.policies.items()}
    phase = tiny_plan.phases[0]
    assert phase.parameters == 2 * sum(stored.values())
    assert phase.optimizer == pytest.approx(2 * sum(stored.values()), abs=64)  # and two counters
    table = job.policies["generator"].state.params["embed"]
    assert table.sharding.shard_shape(table.shape) == (table.shape[0], table.shape[1] // 8)


def test_stage_one_is_planned_by_hand(tiny_plan):
    """Four examples of a step on two processes of four devices: one row on each of two devices, the others idle."""
    job = tiny_plan.job
    generator, verifier = (device_bytes(job.policies[role].state.params) for role in ("generator", "verifier"))
    by_name = {phase.name: phase for phase in tiny_plan.phases}
    # No reference; the generator's stage 1 comes first and has nothing beside it.
    held = [by_name[f"{role}/sft"].parameters for role in ROLES]
    assert held == [generator, generator + verifier]
    assert by_name["verifier/sft"].optimizer == pytest.approx(2 * verifier, abs=64)
    assert by_name["verifier/sft"].gradients == verifier
    config, passes = job.config.generator, stage_one_workload(job, "generator", HALF)
    length = config.max_prompt + config.max_response  # sft.pack_length is 0
    assert job.policies["generator"].stage_one.token_NZRT.shape == (1, 8, config.sft.rows_per_micro_batch, length)
    assert (passes.micro_batches, passes.calls) == (1, 1)
    assert passes.tokens == config.sft.rows_per_micro_batch * length
    report = as_json(tiny_plan)
    stage = report["stage_one"]["generator"]
    assert stage["steps"] == 6 and stage["hours"] == 6 * stage["seconds_of_a_step"] / 3600 > 0


def test_a_stage_one_of_own_samples_is_planned_for_all_its_rounds(tiny_plan, capsys):
    """Three rounds of six steps at most."""
    config = tiny_plan.options.config.copy_and_resolve_references()
    config.task.stage_one = "self"
    own = tiny_plan._replace(options=tiny_plan.options._replace(config=config))
    one, most = (as_json(plan)["stage_one"]["generator"] for plan in (tiny_plan, own))
    assert (one["steps"], most["steps"]) == (6, 18) and most["hours"] == pytest.approx(3 * one["hours"])
    assert most["hours_between"] == pytest.approx([3 * hours for hours in one["hours_between"]])
    show(own, Console())
    assert "stage 1 of the generator: up to 18 steps, up to " in capsys.readouterr().out


def test_a_role_without_stage_one_has_none():
    config = load_config(str(ROOT / "configs/tiny.py"), ["verifier.sft.steps=0"])
    job = make_job(config, Devices(jax.devices()[:1], True, {}), 1)
    assert set(job.stage_one) == {"generator"}
    assert "sft" in lowered_functions(job, "generator")
    assert set(lowered_functions(job, "verifier")) == {"update", "score", "layout", "prefill", "decode"}


def test_one_policy_in_both_roles_is_in_memory_once():
    settings = ["verifier.adapter=generator"]
    one, two = (make_job(load_config(str(ROOT / "configs/tiny.py"), chosen), Devices(jax.devices()[:1], True, {}), 1)
                for chosen in (settings, []))
    generator, verifier = (device_bytes(policy.state.params) for policy in two.policies.values())
    for role in ("generator", "verifier"):  # each with its reference, which KL is measured against
        assert resident(two, "", role).parameters == 2 * (generator + verifier)
        assert resident(one, "", role).parameters == 2 * generator
    assert resident(one, "").optimizer == device_bytes(one.policies["generator"].state.opt_state)


def test_a_role_that_is_not_trained_has_no_update():
    for arm, trained in (("fixed_verifier", "generator"), ("fixed_generator", "verifier")):
        job = counted_job(f"arm={arm}", *(f"{role}.sft.steps=0" for role in ROLES))
        names = [phase.name for phase in phases(job, estimated_programs(job, "cpu"))]
        of_updates = [name for name in names if name.endswith(("score", "update"))]
        assert of_updates == [f"{trained}/score", f"{trained}/update"]


@pytest.mark.parametrize("minibatches", [1, 2, 4])
@pytest.mark.parametrize("arm", ["tango", "second_try"])
def test_an_update_is_planned_with_the_batch_that_is_compiled(arm, minibatches):
    """In second_try both tries are trained on, and all may be of one minibatch's problems."""
    config = load_config(str(ROOT / "configs/tiny.py"), [f"arm={arm}", f"generator.loss.minibatches={minibatches}"])
    job = make_job(config, Devices(jax.devices()[:1], True, {}), 1)
    planned, learner = job.policies["generator"], job.method.rehearsals["generator"].learner
    for batch in _batches(job.functions["generator"], config.generator.max_prompt, learner):
        assert jax.tree.map(np.shape, batch) == jax.tree.map(np.shape, planned.batch)
    rl = config.rl
    room = rl.prompts_per_step // minibatches if arm == "tango" else 2 * rl.prompts_per_step * rl.samples_per_prompt
    assert planned.trained_groups == (room, rl.samples_per_prompt if arm == "tango" else 1)


def counted_job(*settings: str):
    config = load_config(str(ROOT / "configs/tiny.py"), settings)
    models = {role: plan_source(config, role).model_config for role in ROLES}
    return sized_job(config, models, machine_of("cpu", 1))


@pytest.mark.parametrize("arm", ["self_verify", "no_labels"])
@pytest.mark.parametrize("kl_coefs, copies", [((0.01, 0), 2), ((0, 0.01), 2), ((0.01, 0.01), 2), ((0, 0), 1)])
def test_one_policy_has_a_reference_if_the_loss_of_either_role_has_a_kl_term(arm, kl_coefs, copies):
    settings = [f"{role}.loss.kl_coef={value}" for role, value in zip(ROLES, kl_coefs, strict=True)]
    held, waiting = (counted_job(f"arm={arm}", *settings, *(f"{role}.mesh.offload={is_offloaded}" for role in ROLES))
                     for is_offloaded in (False, True))
    own = device_bytes(held.policies["generator"].state.params)
    assert {resident(held, "", role).parameters for role in ("", *ROLES)} == {copies * own}
    for role, value in zip(ROLES, kl_coefs, strict=True):  # it leaves host memory for scores of the role that needs it
        assert resident(waiting, "", role, with_reference=True).parameters == (1 + (value > 0)) * own
        assert resident(waiting, "", role).parameters == own


def test_the_stage_one_of_one_policy_as_verifier_has_the_examples_of_both_roles():
    sizes = [f"{role}.sft.batch_size=64" for role in ROLES]
    two, doubled = counted_job(*sizes), counted_job("verifier.sft.batch_size=128")
    for setting in ("arm=self_verify", "verifier.adapter=generator"):
        one = counted_job(setting, *sizes)
        assert stage_one_workload(one, "generator", HALF) == stage_one_workload(two, "generator", HALF)
        # The generator's examples are shorter than as many more of the verifier's.
        few, both, many = (stage_one_workload(job, "verifier", HALF).micro_batches for job in (two, one, doubled))
        assert few < both < many
        for role, same in (("generator", two), ("verifier", doubled)):
            shapes = [job.policies[role].stage_one.token_NZRT.shape for job in (one, same)]
            assert shapes[0] == shapes[1]


def test_a_process_works_on_its_share(tiny_plan):
    assert (tiny_plan.job.processes, tiny_plan.job.prompts) == (2, 2)  # of four prompts a turn
    placement = tiny_plan.job.policies["generator"].placement
    assert (placement.num_shards, placement.num_local_shards, placement.row_multiple) == (8, 4, 4)
    assert tiny_plan.job.policies["generator"].batch.token_NZRT.shape[1] == 8


def test_tables_for_people(tiny_plan):
    stream = io.StringIO()
    show(tiny_plan, Console(stream=stream))
    text = stream.getvalue()
    assert "8 x a100-80gb: 2 process(es) of 4" in text and "mesh data 1 x fsdp 8 x tensor 1" in text
    assert "compiled for virtual CPU devices, because a_package_that_is_not_there is not installed" in text
    for word in ("parameters", "turn of the verifier", "it fits by a rough guess",
                 "stage 1 of the verifier: 6 steps, ", "most likely"):
        assert word in text


def test_the_plan_says_that_dynamic_sampling_may_take_longer(tiny_plan):
    assert "dynamic_sampling" not in str(assumptions(tiny_plan))
    for arm, whose in {"tango": "generator and of the verifier", "scored_exact": "generator"}.items():
        config = load_config(str(ROOT / "configs/tiny.py"), [f"arm={arm}", "rl.dynamic_sampling=2"])
        job = dataclasses.replace(tiny_plan.job, config=config, loaded=load_method(config))
        resampling = tiny_plan._replace(options=tiny_plan.options._replace(config=config), job=job)
        assert assumptions(resampling)[-1].startswith(f"a turn of the {whose} samples one batch of problems; with "
                                                      "rl.dynamic_sampling=2 it may sample up to 3, and then")


def test_the_plan_says_where_prompts_of_several_kinds_are_taken_as_equally_long(tiny_plan):
    config = load_config(str(ROOT / "configs/tiny.py"), ["arm=second_try"])
    job = dataclasses.replace(tiny_plan.job, config=config, loaded=load_method(config))
    rough = [line for line in assumptions(tiny_plan._replace(job=job)) if "equally long" in line]
    assert rough == ["prompts of all kinds that the generator gets (generator and second_try) are taken to be equally "
                     "long, which is rough"]
    assert "equally long" not in str(assumptions(tiny_plan))


def test_the_plan_says_that_a_run_may_end_before_its_last_turn(tiny_plan):
    config = tiny_plan.options.config.copy_and_resolve_references()
    config.checkpoint.patience, config.rl.warmup_until = 3, 0.5
    early = tiny_plan._replace(options=tiny_plan.options._replace(config=config))
    assert set(assumptions(early)) - set(assumptions(tiny_plan)) == {
        "all turns are counted, though with checkpoint.patience=3 and rl.warmup_until=0.5 the run may have fewer"}


def test_the_plan_says_that_a_users_task_is_counted_with_a_pool(tiny_plan):
    config = load_config(str(ROOT / "configs/tiny.py"), ["task.name=mine.py:make_task"])
    own = tiny_plan._replace(options=tiny_plan.options._replace(config=config))
    [line] = set(assumptions(own)) - set(assumptions(tiny_plan))
    assert f"eval.pool={config.eval.pool}" in line and "task.name=mine.py:make_task" in line


def test_what_to_change_when_it_does_not_fit(tiny_plan):
    small, large = (dataclasses.replace(A100, memory=size) for size in (1.0, 1e12))
    lines = advice(tiny_plan.job, tiny_plan.phases, small)
    assert lines[0].startswith("generator/reshard needs 0.0 GiB of 0.0 GiB")
    text = "\n".join(lines)
    for change in ("generator.row_buckets=(4,)", "generator.rows_per_micro_batch=2", "generator.model.remat=full",
                   "generator.logp_chunk=512", "one process for the 8 devices of a host", "verifier.mesh.offload=True",
                   "more devices"):
        assert change in text
    assert advice(tiny_plan.job, tiny_plan.phases, large) == []
    stage_one = [phase for phase in tiny_plan.phases if phase.name == "verifier/sft"]
    text = "\n".join(advice(tiny_plan.job, stage_one, small))
    assert "verifier.sft.rows_per_micro_batch=2" in text and "mesh.offload" not in text  # in stage 1 nothing is
    failed = Phase("generator/update", error="RESOURCE_EXHAUSTED: too much")
    assert "does not compile for this memory" in advice(tiny_plan.job, [failed], large)[0]


@pytest.mark.parametrize("settings, of_both", [
    ([], ""), (["verifier.sft.start=generator"], "model."), (["arm=self_verify"], "model. mesh.")])
def test_what_is_advised_is_no_mistake(settings, of_both):
    meshes = [f"{role}.mesh.{axis}=2" for role in ROLES for axis in ("data", "fsdp")]
    config = load_config(str(ROOT / "configs/tiny.py"), [*settings, *meshes])
    models = {role: plan_source(config, role).model_config for role in ROLES}
    job = sized_job(config, models, machine_of("cpu", 4))
    full = [Phase(f"generator/{name}", optimizer=2.0) for name in ("sample", "update")]
    lines = advice(job, full, dataclasses.replace(A100, memory=1))
    changes = [line.removeprefix("try ").split(": ")[0] for line in lines if line.startswith("try generator.")]
    assert {"generator.mesh.offload=True and verifier.mesh.offload=True", "generator.row_buckets=(4,)"} <= set(changes)
    advised = [setting for change in changes for setting in change.split(" and ")]
    validate(load_config(str(ROOT / "configs/tiny.py"), [*settings, *meshes, *advised]))
    for name in ("model.remat=full", "mesh.data=1", "mesh.fsdp=4"):
        assert f"generator.{name}" in advised and (f"verifier.{name}" in advised) == (name[:5] in of_both)


def test_a_compiler_that_runs_out_of_memory_is_no_crash():
    class Lowered:
        def compile(self, compiler_options):
            raise jax.errors.JaxRuntimeError(self.message)

    lowered = Lowered()
    lowered.message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm.\nmore"
    program = compile_one(lowered, {})
    assert program.temp == 20.5 * GIB and program.error == lowered.message.splitlines()[0]
    lowered.message = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        compile_one(lowered, {})


@pytest.mark.parametrize("argument, message", [
    ("--target=b200:8", f"choose one of {', '.join(TARGETS)}, cpu"),
    ("--target=a100-80gb:12", "a machine has 8 devices, and 12 is not a multiple"),
    ("--target=tpu-v5p:24", "comes in slices of 4, 8, 16, 32"),
    ("--target=a100-80gb:x", "with a number of devices, 1 or more, after a colon"),
    ("--target=a100-80gb:0", "with a number of devices, 1 or more, after a colon"),
    ("--target=a100-80gb:99999992", "at most 16384 devices of a100-80gb; lower the number"),
    ("--target=cpu:1000", "at most 256 devices of cpu; lower the number"),
    ("--per-process=3", "divides 32"),
    ("--per-process=-1", "--per-process=-1: choose a number of devices"),
    ("--per-process=", "argument --per-process: invalid int value: ''; --help shows the usage"),
    ("--lengths=even:nan", "--lengths='even:nan': give lognormal:MEAN,SHARE"),
    ("--lengths=even:half", "--lengths='even:half': 'half' is no list of numbers"),
    ("--lengths=lognormal:20", "SHARE of lognormal is above 0 and below 1"),
    ("--lengths=lognormal:20,0", "SHARE of lognormal is above 0 and below 1"),
    ("--lengths=lognormal:inf,0.02", "--lengths: with 0.02 of the lengths at generator.max_response=32, the mean lies "
     "between 1 and 32 tokens, and inf does not"),
    ("--lengths=lognormal:600,0.02", "with 0.02 of the lengths at generator.max_response=32, the mean lies between 1 "
     "and 32 tokens, and 600 does not: give another mean or share"),
    ("--lengths=nothing", "--lengths='nothing': there is no folder nothing/rollouts; give lognormal:MEAN,SHARE"),
    ("--jsn", "unknown argument '--jsn'"),
    ("--config.rl.gama=1", "did you mean rl.gamma"),
])
def test_mistakes_on_the_command_line(argument, message):
    with pytest.raises(SystemExit, match=re.escape(message)):
        plan.main(["--config=configs/tiny.py", "--target=a100-80gb:32", argument])


def test_the_command_prints_one_object(tiny_plan, monkeypatch, capsys):
    monkeypatch.setattr(plan, "make_plan", lambda options, console: tiny_plan)
    arguments = [f"--config={ROOT / 'configs/tiny.py'}", "--target=h100:16", "--config.notes=mine"]
    plan.main([*arguments, "--per-process=1", "--json"])
    assert json.loads(capsys.readouterr().out)["fits"] is True
    plan.main(arguments)  # what the run would say of its settings comes first
    assert capsys.readouterr().out.startswith("mine\n")
    options, *_ = plan.parse_options(["--config=configs/tiny.py", "--target=tpu-v5p:8", "--lengths=even:0.25"])
    assert (options.devices, options.per_process, options.lengths, options.is_json) == (8, 4, Even(0.25), False)


def test_flags_are_those_of_the_launchers():
    """All but --xla_gpu_enable_command_buffer, which changes neither memory nor what is sent."""
    text = (ROOT / "launch/flags_gpu.sh").read_text()
    flags = dict(re.findall(r"^ +--(xla_gpu_\w+)=(\w+)$", text, re.MULTILINE))
    assert flags == {name: str(value).lower() for name, value in GPU_FLAGS.items()}
    flags = re.findall(r"^ +(--xla_tpu\S+)$", (ROOT / "launch/flags_tpu.sh").read_text(), re.MULTILINE)
    assert tuple(flags) == TPU_FLAGS


def test_programs_are_compiled_at_the_level_of_the_launchers():
    levels = {name: re.findall(r"JAX_OPTIMIZATION_LEVEL:-(\w+)", (ROOT / f"launch/flags_{name}.sh").read_text())
              for name in ("gpu", "tpu")}
    assert levels == {"gpu": [GPU_OPTIMIZATION_LEVEL], "tpu": []}


@pytest.mark.parametrize("name, chips, line", [
    ("tpu-v5p", 32, "32 chips with 64 cores: Google calls this slice v5p-64 (v5p-32 is 16 chips)"),
    ("tpu-v5p", 4, "4 chips with 8 cores: Google calls this slice v5p-8"),
    ("tpu-v5e", 4, "4 chips with 4 cores: Google calls this slice v5litepod-4"),
    ("tpu-v6e", 8, "8 chips with 8 cores: Google calls this slice v6e-8"),
    ("h100", 8, ""),
])
def test_a_slice_by_the_name_that_it_is_sold_under(name, chips, line):
    target = TARGETS[name]
    assert target.slice_name(chips) == line.split("slice ")[-1].split(" ")[0]
    assert not line or describe_slice(target, chips, target.slice_name(chips)) == line


def test_sizes_of_checkpoints_without_them():
    config = load_config(str(ROOT / "configs/qwen2_5_math_7b.py"))
    source = plan_source(config, "generator")
    assert (source.model_config.width, source.model_config.compute_dtype) == (3584, "bfloat16")
    assert source.tokenizer.vocab_size == 152064
    config.generator.checkpoint = f"Qwen/Qwen2.5-Math-7B@{'0' * 40}"
    assert plan_source(config, "generator").model_config == source.model_config
    config.generator.checkpoint = "someone/unknown"
    with pytest.raises(ValueError, match="no preset sizes for someone/unknown: give a folder"):
        plan_source(config, "generator")
    for name, raw in CONFIG_JSON.items():
        assert preset_model(name).num_layers == raw.get("text_config", raw)["num_hidden_layers"]


def test_one_policy_has_the_sizes_of_the_generator_in_a_run_of_two(tmp_path):
    two = default_config()
    two.generator.model.width, two.verifier.model.width = 32, 128
    save_config(two, tmp_path / "config.json")
    config = load_config("tiny", ["arm=self_verify", *(f"{role}.checkpoint={tmp_path}" for role in ROLES)])
    assert [plan_source(config, role).model_config.width for role in ROLES] == [32, 32]
    config.arm = "tango"
    assert [plan_source(config, role).model_config.width for role in ROLES] == [32, 128]


@pytest.mark.parametrize("name, known", [
    ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-1.5B"), ("qwen/qwen3-4b-base", "Qwen/Qwen3-4B"),
    ("unsloth/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
    ("meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.2-3B-Instruct"), ("google/gemma-3-1b-pt", "google/gemma-3-1b-it"),
    ("mlx-community/Qwen2.5-Math-7B-Instruct-bf16", "Qwen/Qwen2.5-Math-7B"), ("someone/Qwen2.5-1.5B-Instruct", None),
    ("Qwen/Qwen2.5-1.5B-Instruct-4bit", None),
])
def test_a_tuned_model_and_its_copies_have_the_sizes_of_the_known_one(name, known):
    assert known_name(name) == known
    if known:
        assert preset_model(name) == preset_model(known)


@pytest.mark.parametrize("name, millions", [
    # As published; of the 4B without the part that reads images. Norms and biases are not counted.
    ("google/gemma-3-270m-it", 268), ("google/gemma-3-1b-it", 1000), ("google/gemma-3-4b-it", 3880),
    ("HuggingFaceTB/SmolLM3-3B", 3075), ("allenai/OLMo-2-0425-1B-Instruct", 1485),
    ("allenai/OLMo-2-1124-7B-Instruct", 7298),
])
def test_parameters_of_the_families_whose_layers_differ(name, millions):
    assert num_parameters(preset_model(name)) / 1e6 == pytest.approx(millions, abs=1)


def test_layers_of_published_models():
    """Five layers with a window before each without; every fourth rotates nothing."""
    gemma, smollm = preset_model("google/gemma-3-1b-it"), preset_model("HuggingFaceTB/SmolLM3-3B")
    assert [layer.window for layer in gemma.layer_kinds].count(512) == 22 and not gemma.layer_kinds[5].window
    assert gemma.rope_scaling is None and preset_model("google/gemma-3-4b-it").rope_scaling.factor == 8
    assert [layer.rope_base == 0 for layer in smollm.pattern] == [False, False, False, True]


def test_a_folder_with_a_config_json_is_enough(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_JSON["Qwen/Qwen2.5-1.5B"]))
    config = load_config(str(ROOT / "configs/qwen2_5_1_5b_last_letter.py"))
    config.verifier.checkpoint = str(tmp_path)
    assert plan_source(config, "verifier").model_config == plan_source(config, "generator").model_config


def test_segments_of_a_decode_batch():
    # Six rows in eight places: at once no more than 8 > alive = 6 > 4. At step 3 four are left, in a batch of four; its
    # cache of 4 is full at step 4 and grows to 10; the last row ends at step 9.
    lengths = np.array([9, 9, 5, 5, 3, 2])
    assert list(decode_segments(lengths, 8, SamplerConfig((1,), (4, 10), (4, 8)))) == [
        DecodeSegment(8, 4, 2), DecodeSegment(4, 4, 1), DecodeSegment(4, 10, 5)
    ]
    # Prefill has made the only token.
    assert list(decode_segments(np.array([1, 1]), 2, SamplerConfig((1,), (4,), (2,)))) == []


def test_a_budget_of_cached_tokens():
    """A prompt of 24 tokens and a response of 32 take 56 columns. The budget of 160 holds four rows of 28, then two of
    56."""
    settings = ["generator.max_prompt=24", "generator.row_buckets=(1,2,4,8)", "generator.cache_tokens=160"]
    config = load_config(str(ROOT / "configs/tiny.py"), settings)
    job = make_job(config, Devices(jax.devices()[:1], True, {}), 1)
    shapes = job.policies["generator"].sampling
    assert [state.v[0].shape[::2] for state in shapes.states] == [(4, 28), (2, 56)]
    assert shapes.prefill[1].shape == shapes.prompts == (1, 24)
    filled = sampling_workload(job, "generator", 4, 2, HALF)
    lengths = evenly_spaced_lengths(8, 32, 0.5)
    assert (filled.batches, filled.pass_lengths, filled.prompts, filled.shares_prompts) == (1, (24,) * 4, 1, False)
    assert {(segment.rows, segment.cache) for segment in filled.segments} >= {(4, 28), (2, 56)}
    assert filled.prompt_length == 0  # slots hold both
    row_steps = sum(segment.rows * segment.steps for segment in filled.segments)
    assert lengths.sum() - 8 <= row_steps < 1.3 * lengths.sum()  # reading prompts has given the first tokens


def test_prompts_are_read_in_the_bucket_of_their_chunk():
    """Prompts of 24, 16, 8 and 1 tokens, one at a time."""
    config = load_config(str(ROOT / "configs/tiny.py"), [
        "generator.max_prompt=24", "generator.row_buckets=(1,2,4,8)", "generator.cache_tokens=160",
        "generator.prompt_buckets=(8,16)",
    ])
    job = make_job(config, Devices(jax.devices()[:1], True, {}), 1)
    done = sampling_workload(job, "generator", 4, 2, HALF)
    assert sorted(done.pass_lengths) == [8, 8, 16, 24]
    times, policy = TimeModel(A100), job.policies["generator"]

    def seconds(*lengths):
        return times.sampling_seconds(policy, done._replace(chunk_lengths=lengths))

    assert seconds(24, 16, 8, 8) - seconds(24, 16, 8) == pytest.approx(seconds(8, 8) - seconds(8))
    assert 0 < seconds(24, 16, 8, 8) < seconds(24, 24, 24, 24)


def test_a_decode_step_is_a_sum_of_parts():
    """By hand: 24 weights in two layers, 12 in the head; of few rows reading takes longer, of many the products."""
    model = ModelConfig(6, 2, 2, 1, 1, 2, 1, tied_head=False, compute_dtype="bfloat16")
    weights, cached = 2 * (3 * 2 * 2 + 2 * 2 + 3 * 2), 2 * 2 * 2 * 2  # in the layers; bytes of a token's cache
    target = dataclasses.replace(A100, flops=100.0, flops_highest=50.0, read=10.0)
    times, few, many = TimeModel(target), 2, 1000
    for rows in (few, many):
        parts = decode_parts(model, 1, 3, rows, 5, tensor=1)
        assert [part.read for part in parts] == [2 * weights, (3 + rows * 5) * cached, 4 * 12]
        products = [part.flops for part in parts]
        assert products == [(2 * weights * rows, 0), (2 * 4 * rows * 8 * 2, 0), (0, 2 * 12 * rows)]
        assert np.sum(products, axis=0).tolist() == list(decode_flops(model, rows, 8, 1))
    reads = [part.read / 7 for part in decode_parts(model, 1, 3, few, 5, 1)]
    assert [times.part_seconds(part, model) for part in decode_parts(model, 1, 3, few, 5, 1)] == pytest.approx(reads)
    matrices, attention, head = (times.part_seconds(part, model) for part in decode_parts(model, 1, 3, many, 5, 1))
    assert matrices == pytest.approx(2 * weights * many / 50) and head == pytest.approx(2 * 12 * many / 35)
    assert attention == pytest.approx((3 + many * 5) * cached / 7)


def test_a_micro_batch_waits_for_what_is_not_sent_meanwhile():
    """Three micro-batches in two calls on eight A100. A quarter of a gather of 8 GB and a whole scatter are sent while
    products run: (7 / 4 + 7) / 240 of a second, which are longer than the products. Three quarters of the gather and a
    sum, of 7 GB both ways, wait in each micro-batch; another gather in each call."""
    def sent(kind: str, in_pass: bool = True, hidden: float = 0.0) -> Collective:
        return Collective(kind, 8 * 10**9, tuple(range(8)), 1, in_pass, hidden)

    items = [sent("all-gather", hidden=0.25), sent("reduce-scatter", hidden=1.0), sent("all-reduce"),
             sent("all-gather", in_pass=False)]
    policy, shape = counted_job().policies["generator"], MicroBatchShape(4, 64, 1, 32)
    times, passes = TimeModel(A100), UpdateWorkload({shape: 3}, calls=2, useful=1.0)
    seconds = times.training_seconds(policy, Program(0, 0, 0, 0, items), passes)
    assert seconds == pytest.approx((3 * ((7 / 4 + 7) + (3 * 7 / 4 + 14)) + 2 * 7) / 240)
    products = times.matmul_seconds(function_flops(policy, shape, "update"), policy.model_config)
    alone = times.training_seconds(policy, Program(0, 0, 0, 0, []), passes)
    assert alone == pytest.approx(3 * products) and 0 < products < (7 / 4 + 7) / 240


def test_bandwidth_of_a_group():
    times = TimeModel(A100)
    assert times.bandwidth((0, 1, 2, 3, 4, 5, 6, 7)) == 300e9
    assert times.bandwidth((0, 8, 16, 24)) == 25e9  # one device of each host, one network card each
    assert times.bandwidth(tuple(range(32))) == 200e9  # eight cards of a host
    gather = Collective("all-gather", size=8 * 10**9, members=tuple(range(8)), times=3, in_pass=True)
    assert times.transfer_seconds(gather) == pytest.approx(3 * 7e9 / (0.8 * 300e9))
    # Half of 312 TFLOP/s for bfloat16, half of 156 for float32 as it is, 70 % of 19.5 for a head in full float32; on a
    # TPU, where that is six products of bfloat16, half of 76.5.
    model = ModelConfig(6, 2, 2, 1, 1, 2, 1, compute_dtype="bfloat16")
    assert times.matmul_seconds(Flops(156e12, 13.65e12), model) == pytest.approx(2.0)
    assert TimeModel(TARGETS["tpu-v5p"]).matmul_seconds(Flops(0.0, 38.25e12), model) == pytest.approx(1)
    split = dataclasses.replace(model, head_precision="bfloat16_x3")
    assert times.matmul_seconds(Flops(156e12, 52e12), split) == pytest.approx(2.0)
    assert TimeModel(TARGETS["tpu-v5p"]).matmul_seconds(Flops(0.0, 76.5e12), split) == pytest.approx(1)
    wide = dataclasses.replace(model, compute_dtype="float32", head_dtype="bfloat16")
    assert times.matmul_seconds(Flops(78e12, 156e12), wide) == pytest.approx(2.0)
    assert times.read_seconds(2.04e12) == pytest.approx(1 / 0.7)
