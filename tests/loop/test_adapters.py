"""Runs that train adapters: one base for both roles, resumption, what checkpoints hold, and what comes out of a run."""

import dataclasses
import functools
import json
import shutil
from collections import Counter

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from support.hf_loading import add_adapters
from support.paths import CONFIGS
from support.policies import policies_of
from support.tiny_checkpoints import MODEL, tiny_params, write_tiny_folder
from support.tiny_train import StopAfter, repeatable_rows
from tango_jax import export
from tango_jax.cli.command_line import load_config
from tango_jax.cli.validation import validate
from tango_jax.config import ROLES, flatten
from tango_jax.loop import run, stage_one
from tango_jax.loop.describe import describe_run
from tango_jax.loop.imitation import sft_batch, sft_pairs
from tango_jax.loop.init_from import check_init_from
from tango_jax.loop.resume import fingerprints_of, references_of, start_or_resume
from tango_jax.loop.stage_one import run_stage_one
from tango_jax.method.load import load_method
from tango_jax.method.own_arm import make_schedule, shares_policy
from tango_jax.models import lora
from tango_jax.models.transformer import init_params
from tango_jax.planning.job import make_job
from tango_jax.planning.targets import Devices
from tango_jax.records import with_base
from tango_jax.runtime import hosts
from tango_jax.runtime.checkpoint import Checkpointer, CheckpointError, peek_meta, read_state
from tango_jax.runtime.console import Console
from tango_jax.tasks.registry import make_task
from tango_jax.tracking.evaluations import Sources, evaluations_of, read_tables, write_table
from tango_jax.tracking.run_config import save_config
from tango_jax.weights.peft_folder import read_adapter, write_adapter
from tango_jax.weights.to_hf import export_hf
from tango_jax.weights.workdir import full_stage_one, open_workdir, read_adapters, read_config, start_source

SILENT = Console(enabled=False)
RANK = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("hf") / "model")


def config_of(model, *overrides: str):
    """Both roles from one checkpoint, with a stage 1 that trains their adapters."""
    own = (f"checkpoint={model}", f"model.lora.rank={RANK}", "max_prompt=200", "max_response=40", "row_buckets=(8,)",
           "model.remat=none", "cache_buckets=()", "mesh.fsdp=1", "optimizer.lr=1e-3")
    settings = [f"{role}.{setting}" for role in ROLES for setting in own]
    return load_config(str(CONFIGS / "tiny.py"), [
        *settings, "rl.format_weight=1.0", "rl.generator_steps=3", *overrides])


@pytest.fixture(scope="module")
def policies(model):
    """Compiled once for all runs with these settings."""
    return policies_of(config_of(model))


@pytest.fixture(scope="module")
def whole(model, policies, tmp_path_factory):
    """A run that nothing interrupted."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    run.run_or_resume(config_of(model), workdir, SILENT, policies)
    return workdir


def copy_stage_one(workdir, other):
    """The start of a run that has been through the stage 1 of another."""
    shutil.copytree(workdir / "sft", other / "sft")
    shutil.copy(workdir / "config.json", other)


def adapters_in(workdir, role="generator"):
    config = read_config(workdir)
    return read_adapters(workdir, role, start_source(config, role).model_config)


@pytest.mark.long
def test_roles_of_one_checkpoint_share_the_arrays_of_its_base(model, policies, whole, tmp_path):
    config = config_of(model)
    copy_stage_one(whole, tmp_path)
    task = make_task(config, {role: policy.tokenizer for role, policy in policies.items()})
    weights = run_stage_one(policies, config, task, tmp_path, SILENT, hosts.Preemption(is_watching=False))
    bases = [jax.tree.leaves(lora.split(weights[role])[1]) for role in ROLES]
    assert len(bases[0]) > 10 and all(ours is theirs for ours, theirs in zip(*bases, strict=True))
    for name, leaf in lora.split(weights["generator"])[1]["layers"].items():
        np.testing.assert_array_equal(leaf, tiny_params()["layers"][name], err_msg=name)
    other = config_of(model, "verifier.model.lora.base_dtype=bfloat16", *(f"{role}.sft.steps=0" for role in ROLES))
    policies = policies_of(other)
    weights = run_stage_one(policies, other, task, tmp_path / "other", SILENT, hosts.Preemption(is_watching=False))
    assert weights["verifier"]["embed"].dtype == np.dtype("bfloat16") != weights["generator"]["embed"].dtype


def test_fresh_adapters_of_one_policy_and_of_two_are_one_start(model, tmp_path):
    """They draw another A for the verifier, and B is 0."""
    found = []
    for arm in ("tango", "self_verify"):
        config = config_of(model, f"arm={arm}", *(f"{role}.sft.steps=0" for role in ROLES))
        policies = policies_of(config)
        task = make_task(config, {role: policy.tokenizer for role, policy in policies.items()})
        weights = run_stage_one(policies, config, task, tmp_path, SILENT, hosts.Preemption(is_watching=False))
        start = fingerprints_of(policies, weights, task)
        row = {"step": 0, "phase": "eval", "generator_step": 0, "generator/accuracy": 0.5}
        found += evaluations_of([row], config, "", Sources(start, {}))
        assert (start["verifier"] == start["generator"]) == shares_policy(config)
    write_table(found, tmp_path / "a.csv")
    assert read_tables([tmp_path / "a.csv"])[1].verifier_start == found[0].verifier_start != ""


def test_a_run_trains_its_adapters_and_saves_nothing_else(whole):
    rows = [row for row in repeatable_rows(whole / "metrics.jsonl") if row["phase"] != "eval"]
    assert max(row.get("generator/logprob_gap_max", 0) for row in rows) < 1e-4
    assert json.loads((whole / "summary.json").read_text())["compiles_after_warmup"] == 0
    for role in ROLES:
        leaves = adapters_in(whole, role)["layers"]
        assert len(leaves) == 14 and all(np.abs(leaf).max() > 0 for leaf in leaves.values())
    with pytest.raises(CheckpointError, match=r"has no part 'generator/base/'"):
        read_state(whole / "checkpoints", {}, part=("generator", "base"))


@pytest.mark.long
def test_a_resumed_run_is_the_same_to_the_bit(model, policies, whole, tmp_path):
    """Stopped in stage 1 and between two turns."""
    workdir = tmp_path / "stopped"
    for moments, has_turns in ((3, False), (17, True)):
        with pytest.raises(hosts.Preempted):
            run.run_or_resume(config_of(model), workdir, SILENT, policies, preemption=StopAfter(moments))
        found = peek_meta(workdir / "checkpoints")
        assert (found is not None and 0 < found.step < 6) == has_turns
    run.run_or_resume(config_of(model), workdir, SILENT, policies)
    assert repeatable_rows(workdir / "metrics.jsonl") == repeatable_rows(whole / "metrics.jsonl")
    jax.tree.map(np.testing.assert_array_equal, adapters_in(workdir), adapters_in(whole))


def test_another_base_is_refused(model, policies, tmp_path):
    """It has the same base as the other runs, so nothing new is compiled. The base's weights are put back."""
    weights, workdir = model / "model.safetensors", tmp_path / "run"
    config = config_of(model, "generator.sft.steps=0", "verifier.sft.steps=0")
    with pytest.raises(hosts.Preempted):
        run.run_or_resume(config, workdir, SILENT, policies, preemption=StopAfter(4))
    before = weights.read_bytes()
    try:
        tensors = load_file(weights)
        save_file({name: 1.01 * value for name, value in tensors.items()}, weights, {"format": "pt"})
        with pytest.raises(ValueError, match=r"^generator\.checkpoint=.* has changed and verifier\.checkpoint=.* has "
                                             "changed since the checkpoint of turn"):
            run.run_or_resume(config, workdir, SILENT, policies)
        with pytest.raises(ValueError, match="were trained on other weights than the run's generator starts"):
            open_workdir(workdir, "generator").load_params()
    finally:
        weights.write_bytes(before)


def test_another_base_is_refused_in_stage_one_and_by_what_starts_from_it(model, whole, tmp_path):
    other = tmp_path / "other"
    export_hf(other, MODEL, init_params(MODEL, jax.random.key(5)), "llama", tokenizer_folder=f"{model}_tokenizer")
    config = config_of(other, f"generator.init_from={whole}", "verifier.sft.steps=0")
    policies = policies_of(config)
    task = make_task(config, {role: policy.tokenizer for role, policy in policies.items()})
    with pytest.raises(ValueError, match=r"^generator\.init_from=.*: its adapters do not belong to the weights"):
        run_stage_one(policies, config, task, tmp_path / "run", SILENT, hosts.Preemption(is_watching=False))
    # The verifier's is read before the generator's stage 1, which may take hours.
    config = config_of(other, f"verifier.init_from={whole}")
    with pytest.raises(ValueError, match=r"^verifier\.init_from=.*: its adapters do not belong to the weights"):
        run_stage_one(policies, config, task, tmp_path / "later", SILENT, hosts.Preemption(is_watching=False))
    assert not (tmp_path / "later/sft").exists()
    moved = config_of(other)
    (tmp_path / "begun").mkdir()
    shutil.copytree(whole / "sft", tmp_path / "begun/sft")
    with pytest.raises(CheckpointError, match="stage 1 of the generator: the checkpoint that its adapters belong to"):
        run_stage_one(policies_of(moved), moved, task, tmp_path / "begun", SILENT,
                      hosts.Preemption(is_watching=False))


@pytest.fixture(scope="module")
def two_policies(tmp_path_factory):
    """A run of two policies up to the end of stage 1, and the weights that it has then."""
    workdir = tmp_path_factory.mktemp("runs") / "first"
    config = load_config(str(CONFIGS / "tiny.py"), ["generator.mesh.fsdp=1", "verifier.mesh.fsdp=1"])
    save_config(config, workdir / "config.json")
    policies = policies_of(config)
    task = make_task(config, {role: policy.tokenizer for role, policy in policies.items()})
    made = run_stage_one(policies, config, task, workdir, SILENT, hosts.Preemption(is_watching=False))
    assert np.abs(made["generator"]["embed"] - made["verifier"]["embed"]).max() > 0
    return workdir, made


@pytest.mark.long
@pytest.mark.parametrize("said, rank, base_dtype, sources", [
    ("verifier.adapter=", RANK, "", ROLES),
    ("verifier.adapter=generator", RANK, "", ("generator", "generator")),
    ("arm=self_verify", RANK, "int8", ("generator", "generator")),
    ("verifier.adapter=generator", 0, "", ("generator", "generator")),
])
def test_roles_that_go_on_from_a_run_start_from_its_roles_and_one_policy_from_its_generator(
    two_policies, tmp_path, capsys, said, rank, base_dtype, sources
):
    workdir, made = two_policies
    own = (f"checkpoint={workdir}", "sft.steps=0", f"model.lora.rank={rank}", f"model.lora.base_dtype={base_dtype}",
           "mesh.fsdp=1")
    config = load_config(str(CONFIGS / "tiny.py"), [*(f"{role}.{setting}" for role in ROLES for setting in own), said])
    policies = policies_of(config)
    task = make_task(config, {role: policy.tokenizer for role, policy in policies.items()})
    weights = run_stage_one(policies, config, task, tmp_path / "run", SILENT, hosts.Preemption(is_watching=False))
    describe_run(Console(), config, policies, task, make_schedule(config), load_method(config))
    said = f"one policy starts from {workdir}: from its generator, and not from its verifier"
    told = capsys.readouterr().out
    assert (said in told) == (len(set(sources)) == 1)
    assert "words of a problem: generator turns 1 to 2, verifier turns 1 to 2" in told
    assert (" parameters of adapters (those of the frozen model are not listed), " in told) == (rank > 0)
    for role, source in zip(ROLES, sources, strict=True):
        np.testing.assert_array_equal(weights[role]["embed"], made[source]["embed"], err_msg=role)
        read = start_source(config, role, is_one_policy=shares_policy(config)).load_params()
        np.testing.assert_array_equal(read["embed"], made[source]["embed"])
    if len(set(sources)) == 1:
        bases = [jax.tree.leaves(weights[role]) for role in ROLES]
        assert all(ours is theirs for ours, theirs in zip(*bases, strict=True))


@pytest.mark.long
def test_the_export_of_one_policy_that_went_on_from_a_run_is_the_policy(two_policies, tmp_path):
    """The adapters of stage 1 are merged into the base that they were trained on."""
    own = (f"checkpoint={two_policies[0]}", f"model.lora.rank={RANK}", "mesh.fsdp=1", "sft.checkpoint_every=100")
    config = load_config(str(CONFIGS / "tiny.py"), [*(f"{role}.{setting}" for role in ROLES for setting in own),
                                                    "verifier.adapter=generator"])
    save_config(config, tmp_path / "run/config.json")
    policies = policies_of(config)
    task = make_task(config, {role: policy.tokenizer for role, policy in policies.items()})
    weights = run_stage_one(policies, config, task, tmp_path / "run", SILENT, hosts.Preemption(is_watching=False))
    expected = lora.merge(policies["generator"].model_config, weights["generator"])
    merged = open_workdir(tmp_path / "run", "verifier").load_params()
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7), merged, expected)


def test_another_run_takes_the_adapters_of_stage_one(model, whole, tmp_path):
    config = config_of(model, f"generator.init_from={whole}", f"verifier.init_from={whole}")
    policies = policies_of(config)
    task = make_task(config, {role: policy.tokenizer for role, policy in policies.items()})
    weights = run_stage_one(policies, config, task, tmp_path, SILENT, hosts.Preemption(is_watching=False))
    policy = policies["verifier"]
    saved = read_state(whole / "sft/verifier/checkpoints", policy.abstract_state().params, part=("params",)).state
    jax.tree.map(np.testing.assert_array_equal, lora.split(weights["verifier"])[0], saved)
    wrong = config_of(model, f"verifier.init_from={whole}", "verifier.model.lora.rank=2")
    with pytest.raises(CheckpointError, match=r"layers/down_lora_a: checkpoint float32\[2,48,4\], this run"):
        run_stage_one(policies_of(wrong), wrong, task, tmp_path / "no", SILENT, hosts.Preemption(is_watching=False))
    assert not (tmp_path / "no").exists(), "found before the generator's stage 1"
    with pytest.raises(ValueError, match=r"were trained with generator\.model\.lora\.alpha=32\.0; here it is 64\.0"):
        check_init_from(config_of(model, f"generator.init_from={whole}", "generator.model.lora.alpha=64.0"))
    with pytest.raises(ValueError, match=r"holds adapters, but the verifier's stage 1, which continues from them, "
                                         r"trains all parameters: set verifier\.sft\.full=False"):
        check_init_from(config_of(model, f"generator.init_from={whole}", "verifier.sft.start=generator",
                                  "verifier.sft.full=True"))


@pytest.mark.long
@pytest.mark.release
def test_a_full_stage_one_is_the_base_of_what_follows(tmp_path):
    few_programs = ("mesh.fsdp=1", "row_buckets=(8,)", "cache_buckets=()", "sft.steps=2")
    settings = ["arm=grpo", "rl.generator_steps=2"] + [f"{role}.{setting}" for role in ROLES for setting in (
        f"model.lora.rank={RANK}", "sft.full=True", *few_programs)]
    config = load_config(str(CONFIGS / "tiny.py"), [*settings, "verifier.sft.start=generator"])
    workdir = tmp_path / "full"
    run.run_or_resume(config, workdir, SILENT)
    policy = policies_of(config)["generator"]
    stage_one = read_state(workdir / "sft/generator/checkpoints", policy.abstract_full_params(), part=("params",)).state
    adapters = read_state(workdir / "checkpoints", policy.abstract_state().params, part=("generator", "params")).state
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(adapters))
    expected = lora.merge(policy.model_config, with_base(stage_one, adapters))
    merged = open_workdir(workdir, "generator").load_params()
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7), merged, expected)
    with pytest.raises(ValueError, match=r"a run trained \(.*sft/generator/checkpoints\), not to a"):
        export.export_adapter(workdir, "generator", tmp_path / "out")
    taken = load_config(str(CONFIGS / "tiny.py"), [*settings, *(f"{role}.init_from={workdir}" for role in ROLES)])
    policies = policies_of(taken)
    task = make_task(taken, {role: policy.tokenizer for role, policy in policies.items()})
    weights = run_stage_one(policies, taken, task, tmp_path, SILENT, hosts.Preemption(is_watching=False))
    jax.tree.map(np.testing.assert_array_equal, lora.split(weights["generator"])[1], stage_one)


@pytest.mark.long
def test_the_base_of_adapters_that_were_trained_on_another_runs_stage_one(model, tmp_path):
    """It is that run's result, also where a checkpoint is named, and of one policy in both roles the verifier's."""
    full = config_of(model, *(f"{role}.model.lora.rank=0" for role in ROLES))
    policies = policies_of(full)
    task = make_task(full, {role: policy.tokenizer for role, policy in policies.items()})
    run_stage_one(policies, full, task, tmp_path / "full", SILENT, hosts.Preemption(is_watching=False))
    taken = config_of(model, *(f"{role}.init_from={tmp_path / 'full'}" for role in ROLES))
    shared = config_of(model, *(f"{role}.sft.full=True" for role in ROLES), "verifier.adapter=generator")
    of_generator, of_verifier = (tmp_path / "full/sft" / role / "checkpoints" for role in ROLES)

    def found(config, folder: str, role: str):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "config.json").write_text(json.dumps(flatten(config)))
        return full_stage_one(config, tmp_path / folder, role)

    assert found(taken, "run", "generator") == of_generator
    assert found(shared, "full", "generator") == of_verifier
    shared.verifier.sft.steps = 0
    assert found(shared, "full", "verifier") == of_generator
    assert found(config_of(model), "full", "generator") is None


# -------------------------------------------------------------------------------------------------------- in and out


def test_the_merged_export_is_the_policy(whole, tmp_path):
    out = export.export(whole, "generator", tmp_path / "merged")
    tensors = load_file(out / "model.safetensors")
    adapters = adapters_in(whole)["layers"]
    wide, narrow = np.asarray(adapters["gate_lora_a"][1]), np.asarray(adapters["gate_lora_b"][1])
    expected = np.asarray(tiny_params()["layers"]["gate"][1]) + 32.0 / RANK * wide @ narrow
    np.testing.assert_allclose(tensors["model.layers.1.mlp.gate_proj.weight"], expected.T, rtol=1e-5, atol=1e-6)


def test_an_exported_adapter_is_read_back_to_the_bit(model, whole, tmp_path):
    assert export.main([f"--workdir={whole}", "--role=verifier", f"--out={tmp_path / 'adapter'}", "--adapter"]) == 0
    policy = policies_of(config_of(model))["verifier"]
    adapters = adapters_in(whole, "verifier")
    jax.tree.map(np.testing.assert_array_equal, read_adapter(tmp_path / "adapter", policy.model_config), adapters)
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == (str(model), None)
    with pytest.raises(SystemExit):
        export.main([f"--workdir={whole}", f"--out={tmp_path / 'half'}", "--adapter", "--dtype=bfloat16"])
    with pytest.raises(ValueError, match=r"verifier\.adapter: .* has rank=4, alpha=32 and targets=.*: set model\.lo"):
        validate(config_of(model, f"verifier.adapter={tmp_path / 'adapter'}", "verifier.model.lora.rank=2"))
    config = config_of(model, f"verifier.adapter={tmp_path / 'adapter'}", "verifier.sft.steps=0")
    policies = policies_of(config)
    task = make_task(config, {role: policy.tokenizer for role, policy in policies.items()})
    weights = run_stage_one(policies, config, task, tmp_path, SILENT, hosts.Preemption(is_watching=False))
    jax.tree.map(np.testing.assert_array_equal, lora.split(weights["verifier"])[0], adapters)


def test_an_adapter_names_its_base_as_peft_loads_it(model, whole, tmp_path, monkeypatch):
    policy = policies_of(config_of(model))["generator"]
    out = write_adapter(tmp_path / "out", policy.model_config, adapters_in(whole), f"owner/name@{'a' * 40}")
    settings = json.loads((out / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("owner/name", "a" * 40)
    (tmp_path / "base").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("~/base", "base")):
        out = write_adapter(tmp_path / str(number), policy.model_config, adapters_in(whole), name)
        settings = json.loads((out / "adapter_config.json").read_text())
        assert (settings["base_model_name_or_path"], settings["revision"]) == (str(tmp_path / "base"), None)


def test_the_text_part_of_a_model_of_text_and_images_has_no_adapter_for_peft(whole, tmp_path, monkeypatch):
    def read_from_the_whole_model(*args, **named):
        return dataclasses.replace(start_source(*args, **named), architecture="gemma3")

    monkeypatch.setattr(export, "start_source", read_from_the_whole_model)
    with pytest.raises(ValueError, match="text part of a model of text and images.*export it without --adapter"):
        export.export_adapter(whole, "generator", tmp_path / "adapter")
    assert not list(tmp_path.iterdir())


def test_an_adapter_of_peft_computes_the_same(whole, model, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    out = export.export_adapter(whole, "generator", tmp_path / "adapter")
    theirs = add_adapters(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), out)
    merged = AutoModelForCausalLM.from_pretrained(export.export(whole, "generator", tmp_path / "merged"),
                                                  dtype=torch.float32)
    token = torch.arange(5, 25)[None]
    with torch.no_grad():
        np.testing.assert_allclose(theirs(token).logits, merged(token).logits, rtol=1e-4, atol=1e-5)


def changed(folder, **settings):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize("settings, message", [
    ({"use_dora": True}, r"use_dora=True is not supported: merge this adapter into its base"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported"),
    ({"rank_pattern": {"q_proj": 2}}, r"rank_pattern=\{'q_proj': 2\} is not supported"),
    ({"peft_type": "IA3"}, r"peft_type='IA3' is not supported: only LORA is"),
    ({"target_modules": ["q_proj", "lm_head"]}, r"target_modules has lm_head, and an adapter here belongs to q_proj"),
    ({"init_lora_weights": "pissa"}, r"init_lora_weights='pissa' is not supported: merge this adapter into its base"),
    ({"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens=\[1, 2\] is not supported"),
    ({"exclude_modules": ["layers.0.q_proj"]}, r"exclude_modules=\['layers\.0\.q_proj'\] is not supported: merge"),
    ({"target_parameters": ["mlp.experts"]}, r"target_parameters=\['mlp\.experts'\] is not supported: merge this"),
    ({"an_option_of_tomorrow": {"a": 1}}, r"an_option_of_tomorrow=\{'a': 1\} is not supported: merge this adapter"),
    ({"lora_alpha": None}, r"lora_alpha=None must be a number above 0"),
    ({"target_modules": ["q_proj", 1]}, r"target_modules has \['q_proj', 1\], and an adapter here belongs to"),
    ({"r": 0}, r"r=0 must be a whole number of at least 1"),
    ({"r": 8}, r"has rank=8, alpha=32 and targets=\(q,k,v,o,gate,up,down\): set model\.lora\.rank"),
])
def test_a_folder_of_another_kind_is_refused(model, whole, tmp_path, settings, message):
    out = export.export_adapter(whole, "generator", tmp_path / "adapter")
    changed(out, **settings)
    with pytest.raises(ValueError, match=message):
        read_adapter(out, policies_of(config_of(model))["generator"].model_config)


def test_an_adapter_of_another_model_is_refused(model, whole, tmp_path):
    out = export.export_adapter(whole, "generator", tmp_path / "adapter")
    tensors = load_file(out / "adapter_model.safetensors")
    config = policies_of(config_of(model))["generator"].model_config
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file(tensors | {name: np.zeros((RANK, 7), np.float32)}, out / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"q_proj\.lora_A\.weight should be \[4, 32\], and is \[4, 7\]: this adapter"):
        read_adapter(out, config)
    save_file({key: value for key, value in tensors.items() if key != name}, out / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"should be \[4, 32\], and is missing"):
        read_adapter(out, config)
    save_file(tensors | {name: np.full((RANK, 32), np.nan, np.float32)}, out / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"q_lora_a has values that are not finite"):
        read_adapter(out, config)
    save_file(tensors | {"other": np.zeros(1, np.float32)}, out / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"has other, which no adapter here has"):
        read_adapter(out, config)


@pytest.mark.parametrize("settings, message", [
    (["generator.model.lora.rank=-1"], r"generator\.model\.lora\.rank=-1 must be at least 0"),
    (["generator.model.lora.targets=(q,head)"], r"targets=\('q', 'head'\): 'head' is not one of q, k, v, o, gate"),
    (["generator.model.lora.rank=4"], r"generator\.model\.lora\.rank=4 puts adapters on a model of random weights"),
    (["generator.model.lora.rank=4", "generator.adapter=somewhere"], r"generator\.adapter=somewhere needs generator\."),
    (["generator.model.lora.rank=4", "verifier.model.lora.rank=4", "verifier.sft.start=generator",
      "generator.sft.full=True", "generator.checkpoint=a/b", "verifier.checkpoint=a/b"],
     r"generator\.sft\.full=True and verifier\.sft\.full=False: the verifier's stage 1 continues from the"),
    (["generator.model.lora.rank=17", "generator.sft.full=True"], r"generator\.model: lora\.rank=17 is above 16, the"),
])
def test_settings_that_cannot_work_are_one_line(settings, message):
    with pytest.raises(ValueError, match=message):
        validate(load_config(str(CONFIGS / "tiny.py"), settings))


def test_a_rank_that_a_checkpoint_has_no_room_for(model):
    with pytest.raises(ValueError, match=r"lora\.rank=17 is above 16, the narrowest side"):
        policies_of(config_of(model, "generator.model.lora.rank=17"))


def test_other_sizes_than_the_base_are_refused(model, whole, tmp_path):
    """The checkpoint's folder now holds a wider model."""
    wide = dataclasses.replace(MODEL, width=48)
    folder = tmp_path / "wide"
    export_hf(folder, wide, init_params(wide, jax.random.key(0)), "llama", tokenizer_folder=f"{model}_tokenizer")
    out = export.export_adapter(whole, "generator", tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"should be \[4, 48\], and is \[4, 32\]: this adapter belongs"):
        read_adapter(out, policies_of(config_of(folder))["generator"].model_config)



# ---------------------------------------------------------------------------------------------- one policy, two roles


def ranks(rank: int) -> list[str]:
    return [f"{role}.model.lora.rank={rank}" for role in ROLES]


@pytest.fixture(scope="module")
def one_policy(model):
    """(rank) -> the policies of runs in which both roles are one, whichever setting says so: compiled once."""
    return functools.cache(lambda rank: policies_of(config_of(model, "verifier.adapter=generator", *ranks(rank))))


@pytest.mark.long
@pytest.mark.parametrize("said, rank, stopped_in", [
    ("verifier.adapter=generator", RANK, "stage 1"),
    pytest.param("arm=self_verify", RANK, "stage 2", marks=pytest.mark.release),
    pytest.param("arm=no_labels", 0, "stage 2", marks=pytest.mark.release)])
def test_both_roles_can_be_one_policy(model, one_policy, tmp_path, said, rank, stopped_in):
    """Turns of either role change what both sample with; a resumed run is the same; a checkpoint holds it once."""
    config, policies = config_of(model, said, *ranks(rank)), one_policy(rank)
    run.run_or_resume(config, tmp_path / "whole", SILENT, policies)
    if stopped_in == "stage 2":
        (tmp_path / "stopped").mkdir()
        copy_stage_one(tmp_path / "whole", tmp_path / "stopped")
    moments = {"stage 1": 9, "stage 2": 7}[stopped_in]  # in the steps of the verifier; between two turns
    with pytest.raises(hosts.Preempted):
        run.run_or_resume(config, tmp_path / "stopped", SILENT, policies, preemption=StopAfter(moments))
    assert (peek_meta(tmp_path / "stopped/checkpoints") is not None) == (stopped_in == "stage 2")
    run.run_or_resume(config, tmp_path / "stopped", SILENT, policies)
    rows = repeatable_rows(tmp_path / "whole/metrics.jsonl")
    assert repeatable_rows(tmp_path / "stopped/metrics.jsonl") == rows
    trained = [row for row in rows if row["phase"] != "eval"]
    # A mean over tokens: single ones of this model are ill-conditioned (on one CPU, weights that differ by 1e-7 of
    # their size move the log-prob of one token by 0.002, and the sampler's is 0.0006 away from the trainer's).
    gaps = [row[name] for row in trained for role in ROLES if (name := f"{role}/logprob_gap_mean") in row]
    assert len(gaps) == len(trained) and max(gaps) < 1e-5
    policy = policies["verifier"]
    with pytest.raises(CheckpointError, match=r"has no part 'verifier/'; its top-level names are generator"):
        read_state(tmp_path / "whole/checkpoints", policy.abstract_state(), part=("verifier",))
    state = read_state(tmp_path / "whole/checkpoints", policy.abstract_state(), part=("generator",)).state
    assert state.step == len(trained)
    turns = Counter("generator" if row["phase"] == "generator" else "verifier" for row in trained)
    assert optax.tree.get(state.opt_state, "generator") == turns["generator"] > 0  # what the schedules count
    assert optax.tree.get(state.opt_state, "verifier") == turns["verifier"] > 0
    ours, theirs = (open_workdir(tmp_path / "whole", role).load_params() for role in ROLES)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_one_policy_keeps_no_second_copy_of_what_it_starts_from(tmp_path):
    config = load_config(str(CONFIGS / "tiny.py"), ["verifier.adapter=generator"])
    policies = policies_of(config)
    start = dict.fromkeys(ROLES, policies["generator"].init(np.zeros(2, np.uint32)).params)
    references = references_of(policies, start, config)
    assert references["generator"] is references["verifier"]  # with `mesh.offload`, each would have a copy
    start_or_resume(policies, start, None, {}, Checkpointer(tmp_path), config)
    assert start == {}


def test_one_policy_rehearses_solutions_while_it_learns_to_judge():
    config = load_config(str(CONFIGS / "tiny.py"), ["arm=self_verify", "verifier.sft.batch_size=64"])
    policies = policies_of(config)
    task = make_task(config, {role: policy.tokenizer for role, policy in policies.items()})
    generator, verifier = policies.values()
    count = verifier.config.sft.batch_size
    alone, left_out = sft_batch(verifier, task, "train", 0, count)
    both, _ = sft_batch(verifier, task, "train", 0, count, generator)
    assert left_out == 0

    def responses(batch) -> int:
        is_first = np.diff(np.asarray(batch.segment_NZRT), axis=-1, prepend=0) > 0
        return int((is_first[: int(batch.num_micro)]).sum())

    assert (responses(alone), responses(both)) == (count, 2 * count)
    pairs = [pair for policy in (generator, verifier) for pair in sft_pairs(policy, task, "train", 0, count)]
    assert int((np.asarray(both.weight_NZRT) > 0).sum()) == sum(len(response) for _, response in pairs)
    np.testing.assert_allclose(np.asarray(both.weight_NZRT).sum(), 1.0, rtol=1e-5)  # a mean over the tokens of both
    job = make_job(config, Devices(jax.devices(), True, {}), len(jax.devices()))
    assert job.policies["verifier"].stage_one.token_NZRT.shape == both.token_NZRT.shape


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("said", ["arm=self_verify", "verifier.adapter=generator"])
def test_a_full_stage_one_of_both_roles_starts_from_the_checkpoint(model, monkeypatch, tmp_path, full, said):
    """And not from the adapters of a generator without a stage 1."""
    config = config_of(model, said, "generator.sft.steps=0", "verifier.sft.steps=5",
                       f"verifier.sft.full={full}")
    validate(config)
    starts, rehearsed = [], []

    def see(policy, task, config, workdir, console, title, preemption, start, provenance, base, generator):
        starts.append(start)
        rehearsed.append(generator and generator.role)
        raise hosts.Preempted

    monkeypatch.setattr(stage_one, "run_sft", see)
    with pytest.raises(hosts.Preempted):
        stage_one.run_stage_one(policies_of(config), config, None, tmp_path, SILENT, hosts.Preemption(False))
    assert [not start for start in starts] == [full] and rehearsed == ["generator"]


def test_a_full_stage_one_of_both_roles_may_start_from_random_weights(monkeypatch, tmp_path):
    """The generator's adapters, which would lie on no base, are left out."""
    config = load_config(str(CONFIGS / "tiny.py"), [
        "arm=self_verify", "generator.sft.steps=0", "verifier.sft.full=True",
        *(f"{role}.model.lora.rank=2" for role in ROLES)])
    policies = policies_of(config)
    monkeypatch.setattr(stage_one, "run_sft", lambda policy, *_: {"all": "trained"})
    monkeypatch.setattr(stage_one._StageOne, "_with_base", lambda _, policy, params: params)
    weights = stage_one.run_stage_one(policies, config, None, tmp_path, SILENT, hosts.Preemption(False))
    assert weights == dict.fromkeys(ROLES, {"all": "trained"})


def test_adapters_of_one_policy_may_be_of_the_generators_stage_one():
    settings = [f"{role}.model.lora.rank=4" for role in ROLES]
    settings += ["generator.sft.full=True", "generator.sft.steps=2", "verifier.sft.steps=0"]
    load = functools.partial(load_config, str(CONFIGS / "tiny.py"))
    validate(load(["arm=self_verify", *settings]))
    with pytest.raises(ValueError, match="verifier.model.lora.rank=4 puts adapters on a model of random weights"):
        validate(load(settings))


@pytest.mark.parametrize("settings, message", [
    (["verifier.adapter=generator", "verifier.model.width=64"],
     "makes both roles one policy, but generator and verifier differ in model: give both the same"),
    (["arm=self_verify", "verifier.model.width=64"], "arm=self_verify makes both roles one policy, but generator and "),
    *((["verifier.adapter=generator", f"arm={arm}"], f"arm={arm} keeps a role fixed, and with verifier.adapter=gen")
      for arm in ("fixed_verifier", "fixed_verifier_warm", "fixed_generator")),
    (["generator.adapter=generator"], r"generator\.adapter=generator: only the verifier can be the generator's policy"),
])
def test_roles_that_cannot_be_one_policy(settings, message):
    validate(load_config(str(CONFIGS / "tiny.py"), ["verifier.adapter=generator", "arm=grpo"]))
    with pytest.raises(ValueError, match=message):
        validate(load_config(str(CONFIGS / "tiny.py"), settings))
