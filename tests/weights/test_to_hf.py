"""Export to Hugging Face format: the same tensors back, a folder that transformers accepts, nothing half-written."""
import dataclasses
import json
import logging

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from support.hf_cases import CASES, INPUTS, make_tensors, write_checkpoint
from support.hf_loading import TOLERANCE, assert_equal_trees, load, logits, shardings_of
from tango_jax.weights import to_hf
from tango_jax.weights.from_hf import load_hf, model_config_from_hf
from tango_jax.weights.to_hf import export_hf, family_of, hf_config

LLAMA, QWEN2, QWEN3 = (CASES[name] for name in ("llama2", "qwen2", "qwen3"))


def files_of(folder):
    return sorted(path.name for path in folder.iterdir())


def tensors_of(folder):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_round_trip_is_bit_equal(name, dtype, tmp_path):
    case = CASES[name]
    config, params = load(write_checkpoint(tmp_path / "in", case, dtype), param_dtype=dtype)
    folder = export_hf(tmp_path / "out", config, params, architecture=case.config["model_type"])
    assert model_config_from_hf(folder, param_dtype=dtype) == config
    assert_equal_trees(load_hf(folder, config), params)
    # Against the tensors as they were first written: two mistakes that cancel would show here.
    found, expected = tensors_of(folder), make_tensors(case)
    assert found.keys() == expected.keys()
    for tensor, value in expected.items():
        assert found[tensor].dtype == dtype
        assert found[tensor].tobytes() == value.astype(dtype).tobytes(), tensor
    assert files_of(folder) == ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # readable for whoever may read config.json


def test_several_files(tmp_path):
    config, params = load(write_checkpoint(tmp_path / "in", QWEN3))
    one = export_hf(tmp_path / "one", config, params)
    limit = 20_000
    many = export_hf(tmp_path / "many", config, params, max_shard_bytes=limit)
    files = sorted(many.glob("*.safetensors"))
    count = len(files)
    assert [file.name for file in files] == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert count > 2 and max(sum(v.nbytes for v in load_file(file).values()) for file in files) <= limit
    index = json.loads((many / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    assert index["metadata"]["total_size"] == 4 * index["metadata"]["total_parameters"]
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors_of(one).values())
    assert_equal_trees(load_hf(many, config), load_hf(one, config))
    # A tensor above the limit is not cut: every tensor has a file of its own.
    each = export_hf(tmp_path / "each", config, params, max_shard_bytes=1)
    assert len(list(each.glob("*.safetensors"))) == len(tensors_of(one))
    assert_equal_trees(load_hf(each, config), params)


def test_sharded_parameters_are_gathered(tmp_path):
    config, params = load(write_checkpoint(tmp_path / "in", QWEN2))
    sharded = jax.device_put(params, shardings_of(config))
    folder = export_hf(tmp_path / "out", config, sharded)
    assert_equal_trees(load_hf(folder, config), params)


def test_storing_in_another_dtype(tmp_path):
    config, params = load(write_checkpoint(tmp_path / "in", LLAMA))
    folder = export_hf(tmp_path / "out", config, params, dtype="bfloat16")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    expected = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), params)
    assert_equal_trees(load_hf(folder, config), expected)


@pytest.mark.parametrize("name", CASES)
def test_transformers_reads_the_config_without_a_word(name, tmp_path, caplog, monkeypatch):
    from transformers import AutoConfig

    is_gemma = name.startswith("gemma3")
    config, params = load(write_checkpoint(tmp_path / "in", CASES[name]))
    original = AutoConfig.from_pretrained(tmp_path / "in")
    folder = export_hf(tmp_path / "out", config, params, architecture=original.architectures[0])
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        exported = AutoConfig.from_pretrained(folder)
    assert not caplog.records
    for field in (
        "model_type", "architectures", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        *(("hidden_activation", "query_pre_attn_scalar", "layer_types") if is_gemma else ("hidden_act",)),
        "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "vocab_size",
    ):
        assert getattr(exported, field) == getattr(original, field)
    assert exported.head_dim == CASES[name].head_dim
    assert exported.rope_parameters == original.rope_parameters
    assert getattr(exported, "sliding_window", None) == (4 if is_gemma else None)
    assert getattr(exported, "no_rope_layers", None) == getattr(original, "no_rope_layers", None)
    raw = json.loads((folder / "config.json").read_text())
    rope = exported.rope_parameters
    assert raw["rope_theta"] == rope.get("full_attention", rope)["rope_theta"]  # for readers older than transformers 5
    assert ("rope_scaling" in raw) == (config.rope_scaling is not None)
    assert {"hidden_act", "hidden_activation"} & raw.keys() == {"hidden_activation" if is_gemma else "hidden_act"}


def test_logits_of_an_export_in_pytorch(tmp_path):
    pytest.importorskip("torch")
    from support.make_hf_golden import torch_logits

    for name, case in CASES.items():
        config, params = load(write_checkpoint(tmp_path / name / "in", case))
        folder = export_hf(tmp_path / name / "out", config, params, case.config["model_type"], max_shard_bytes=30_000)
        for inputs in INPUTS.values():
            difference = np.abs(torch_logits(folder, inputs) - logits(config, params, inputs)).max(axis=-1)
            assert difference[inputs.is_token_BT].max() < TOLERANCE


def test_tokenizer_and_generation_files(tmp_path):
    config, params = load(write_checkpoint(tmp_path / "in", LLAMA))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "notes.txt"):
        (tmp_path / "in" / name).write_text(name)
    settings = {"eos_token_id": [2, 7], "temperature": 0.6, "do_sample": True}
    (tmp_path / "in" / "generation_config.json").write_text(json.dumps(settings))
    folder = export_hf(tmp_path / "out", config, params, tokenizer_folder=tmp_path / "in")
    assert (folder / "tokenizer.json").read_text() == "tokenizer.json"
    assert files_of(folder) == ["README.md", "chat_template.jinja", "config.json", "generation_config.json",
                                "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["temperature"]) == ([2, 7], 0.6)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [2, 7]
    # What the caller says goes before the file.
    folder = export_hf(tmp_path / "own", config, params, tokenizer_folder=tmp_path / "in",
                       generation_config={"eos_token_id": 5, "pad_token_id": 0})
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 5
    config_json = json.loads((folder / "config.json").read_text())
    assert [config_json[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None, 5, 0]
    with pytest.raises(ValueError, match="holds no tokenizer files"):
        export_hf(tmp_path / "none", config, params, tokenizer_folder=tmp_path)


def test_a_folder_in_use_is_left_alone(tmp_path):
    config, params = load(write_checkpoint(tmp_path / "in", LLAMA))
    with pytest.raises(ValueError, match="already exists and is not an empty folder"):
        export_hf(tmp_path / "in", config, params)
    (tmp_path / "empty").mkdir()
    export_hf(tmp_path / "empty", config, params)
    assert files_of(tmp_path) == ["empty", "in"]


def test_an_export_that_fails_leaves_no_folder_and_can_be_repeated(tmp_path, monkeypatch):
    config, params = load(write_checkpoint(tmp_path / "in", LLAMA))

    def full_disk(place, array):
        raise OSError(f"no space left on device for {place.file.name}")

    with monkeypatch.context() as patch:
        patch.setattr(to_hf, "write_tensor", full_disk)
        with pytest.raises(OSError, match=r"no space left on device for model\.safetensors"):
            export_hf(tmp_path / "out", config, params)
    assert not (tmp_path / "out").exists()
    export_hf(tmp_path / "out", config, params)
    assert files_of(tmp_path) == ["in", "out"]


def test_what_an_architecture_cannot_hold_is_refused(tmp_path):
    config, params = load(write_checkpoint(tmp_path / "in", QWEN2))
    assert [family_of(load(write_checkpoint(tmp_path / n, CASES[n]))[0]) for n in CASES] == [
        "llama", "llama", "llama", "llama", "llama", "qwen2", "qwen3", "smollm3", "gemma3_text",
        "gemma3_text", "olmo2"]
    with pytest.raises(ValueError, match="qkv_bias=False and qk_norm=True.*export it as qwen2"):
        export_hf(tmp_path / "out", config, params, architecture="Qwen3ForCausalLM")
    with pytest.raises(ValueError, match=r"a llama has pattern=\(LayerKind\(.*export it as smollm3"):
        hf_config(model_config_from_hf(write_checkpoint(tmp_path / "more", CASES["smollm3"])), "llama", "float32")
    with pytest.raises(ValueError, match="architecture='gpt2' is not one of llama, mistral"):
        export_hf(tmp_path / "out", config, params, architecture="gpt2")
    with pytest.raises(ValueError, match="no Hugging Face architecture"):
        family_of(dataclasses.replace(config, qk_norm=True))
    with pytest.raises(ValueError, match="dtype='float8' is not one of"):
        export_hf(tmp_path / "out", config, params, dtype="float8")
    with pytest.raises(ValueError, match="max_shard_bytes=0"):
        export_hf(tmp_path / "out", config, params, max_shard_bytes=0)
    assert not (tmp_path / "out").exists()


def test_a_qwen2_whose_heads_are_not_as_wide_as_the_model(tmp_path):
    """The class has no field for it, but the model reads it."""
    config = dataclasses.replace(model_config_from_hf(write_checkpoint(tmp_path, QWEN2)), head_dim=12)
    assert hf_config(config, "qwen2", "float32")["head_dim"] == 12
