"""Checkpoints that cannot be loaded, or not as they are: each ends in one error that says what, and what to do."""
import json

import numpy as np
import pytest

from support.hf_cases import CASES, make_tensors, write_checkpoint
from tango_jax.weights.from_hf import load_hf, model_config_from_hf, resolve_folder

LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA3, SMOLLM3 = (
    CASES[name] for name in ("llama2", "qwen2", "qwen3", "mistral", "gemma3", "smollm3")
)
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "rope_theta": 1e4,
               "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "case, changes, message",
    [
        (LLAMA, dict(model_type="mixtral"), "model_type='mixtral' is not supported; choose.* llama, mistral"),
        (LLAMA, dict(model_type=None), "model_type=None is not supported"),
        (LLAMA, dict(architectures=["LlamaForSequenceClassification"]), "Classification is not.*LlamaForCausalLM"),
        (LLAMA, dict(quantization_config={"quant_method": "gptq"}), "quantization_config.*original checkpoint"),
        (LLAMA, dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "'dynamic' is not supported, only default"),
        (LLAMA, dict(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "rotary scaling 'yarn' is not supported"),
        (LLAMA, dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4}, rope_scaling={"type": "yarn"}),
         "rotary scaling 'yarn' is not supported, .* remove rope_scaling from config.json"),
        (LLAMA, dict(rope_theta=None), "rope_theta=None.* must be a number"),
        (LLAMA, dict(rope_parameters={"rope_type": "llama3", "factor": 4.0}), "config.json.*low_freq_factor"),
        (LLAMA, dict(rope_parameters=LLAMA3_ROPE | {"high_freq_factor": 1.0}), "high_freq_factor=1.0 .*above low_freq"),
        (LLAMA, dict(attention_bias=True), "attention_bias=true is not supported"),
        (QWEN3, dict(attention_bias=True), "attention_bias=true is not supported"),
        (LLAMA, dict(mlp_bias=True), "mlp_bias=true is not supported"),
        (LLAMA, dict(hidden_act="gelu"), "hidden_act='gelu' is not supported, only silu"),
        (LLAMA, dict(hidden_size="wide"), "config.json.*hidden_size.*wide"),
        (LLAMA, dict(num_attention_heads=5), "config.json.*32.*5"),
        (LLAMA, dict(num_key_value_heads=3), "num_heads=4 must be a multiple of num_kv_heads=3"),
        (LLAMA, dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not supported"),
        (MISTRAL, dict(sliding_window=4096), "sliding_window=4096 .*set max_position_embeddings to 4096"),
        (QWEN2, dict(use_sliding_window=True, max_window_layers=1), "sliding_window=4096 .*embeddings=8192"),
        (QWEN2, dict(layer_types=["sliding_attention", "full_attention"], use_sliding_window=False),
         "layer_types has sliding_attention, but there is no sliding_window"),
        (SMOLLM3, dict(no_rope_layers=[1, 0]), "no_rope_layers has 2 entries for num_hidden_layers=7"),
        (GEMMA3, dict(model_type="gemma2"), "model_type='gemma2' is not supported; choose.* gemma3_text, olmo2"),
        (GEMMA3, dict(final_logit_softcapping=30.0), "final_logit_softcapping=30.0 is not supported"),
        (GEMMA3, dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0 is not supported"),
        (GEMMA3, dict(use_bidirectional_attention=True), "use_bidirectional_attention=True is not supported"),
        (GEMMA3, dict(hidden_activation="gelu"), "hidden_activation='gelu' is not supported, only gelu_pytorch_tanh"),
        (GEMMA3, dict(sliding_window=None), "sliding_window=None must be at least 1"),
        (GEMMA3, dict(rope_scaling=None, rope_parameters={"full_attention": {"rope_type": "yarn", "factor": 2.0}}),
         "rotary scaling 'yarn' is not supported, .* remove rope_parameters"),
        (GEMMA3, dict(model_type="gemma3"), "model_type='gemma3' without a text_config"),
        (GEMMA3, dict(model_type="gemma3", text_config={}), r"\['Gemma3ForCausalLM'\] is not supported: .*Conditional"),
    ],
)
def test_configs_that_the_model_cannot_represent(case, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        model_config_from_hf(write_checkpoint(tmp_path, case, **changes))


@pytest.mark.parametrize(
    "text, message", [(None, "cannot be read.*folder needs it"), ("{", "is not JSON"), ("[]", "holds a list")]
)
def test_a_config_that_is_no_config(text, message, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"config.json.*{message}"):
        model_config_from_hf(tmp_path)


def damaged(folder, change):
    """A checkpoint whose tensors were changed."""
    tensors = make_tensors(LLAMA)
    change(tensors)
    return write_checkpoint(folder, LLAMA, tensors=tensors)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight\."),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight.*tie_word_embeddings to true"),
        (lambda t: t.update(extra=np.ones(2)), r"1 unexpected: extra\."),
        (lambda t: t.update({"model.norm.weight": np.ones(31)}), r"1 misshapen: model.norm.weight \[31\] instead of"),
        (lambda t: t.update({"model.norm.weight": np.ones(31), "extra": np.ones(2)}), "1 unexpected: .*; 1 misshapen"),
        (lambda t: [t.pop(name) for name in list(t) if "layers.1." in name], "9 missing: .* and 4 more"),
    ],
)
def test_tensors_and_parameters_must_match_one_to_one(change, message, tmp_path):
    folder = damaged(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load_hf(folder, model_config_from_hf(folder))


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file(keep, tmp_path):
    config = model_config_from_hf(write_checkpoint(tmp_path, LLAMA))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors .*truncated or not a .*download it again"):
        load_hf(tmp_path, config)


def test_a_missing_file_of_several(tmp_path):
    config = model_config_from_hf(write_checkpoint(tmp_path, LLAMA, shards=3))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="names model-00002-of-00003.safetensors, which is not there: download"):
        load_hf(tmp_path, config)


def rewrite_index(folder, change):
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def test_an_index_that_disagrees_with_its_files(tmp_path):
    config = model_config_from_hf(write_checkpoint(tmp_path, LLAMA, shards=2))
    rewrite_index(tmp_path, lambda names: names.update(extra="model-00001-of-00002.safetensors"))
    with pytest.raises(ValueError, match="lists extra, but the files do not contain it"):
        load_hf(tmp_path, config)
    rewrite_index(tmp_path, lambda names: names.update(extra="../elsewhere.safetensors"))
    with pytest.raises(ValueError, match="inside the folder"):
        load_hf(tmp_path, config)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="not an index of safetensors files"):
        load_hf(tmp_path, config)


def test_a_tensor_in_two_files(tmp_path):
    config = model_config_from_hf(write_checkpoint(tmp_path, LLAMA, shards=2))
    first = tmp_path / "model-00001-of-00002.safetensors"
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match="00002-of-00002.safetensors holds .* and 6 more, which are also in .*00001"):
        load_hf(tmp_path, config)


def test_quantized_tensors_are_refused(tmp_path):
    config = model_config_from_hf(write_checkpoint(tmp_path, LLAMA, dtype="int8"))
    with pytest.raises(ValueError, match=r"\(I8\) and 16 more are not stored as F64, .*quantized"):
        load_hf(tmp_path, config)


@pytest.mark.parametrize("name, fix", [
    ("pytorch_model.bin", "or convert pytorch_model.bin with .*save_pretrained"), ("model.gguf", "or name model.gguf"),
    ("adapter_model.safetensors", "or merge the adapter"), (None, "page$")])
def test_a_folder_without_weights(name, fix, tmp_path):
    config = model_config_from_hf(write_checkpoint(tmp_path, LLAMA))
    (tmp_path / "model.safetensors").unlink()
    if name:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"lacks model\.safetensors \(or .*: copy them from the model's .*{fix}"):
        load_hf(tmp_path, config)


def test_resolve_folder(tmp_path):
    assert resolve_folder(str(tmp_path)) == tmp_path
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="is a file; give the folder"):
        resolve_folder(str(tmp_path / "model.safetensors"))
    with pytest.raises(ValueError, match="neither a folder nor a hub id"):
        resolve_folder(str(tmp_path / "missing"))
    # The tests' settings keep the hub out of reach.
    with pytest.raises(ValueError, match="nobody/nothing: could .*no folder of that name is here, and HF_HUB_OFFL"):
        resolve_folder("nobody/nothing")
