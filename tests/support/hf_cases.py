"""Small random checkpoints of every family, and inputs for them, from seeds: shared by the tests that read them here
and by the script that runs them in PyTorch (make_hf_golden.py), so that only logits need to be stored.

NumPy and safetensors only. Tensor names and shapes are written out once more on purpose, independent of the package.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file

from support.paths import FIXTURES

GOLDEN = FIXTURES / "hf_logits.npz"
VOCAB = 48
_COMMON = dict(vocab_size=VOCAB, hidden_act="silu", max_position_embeddings=8192, bos_token_id=1, eos_token_id=2)


class Case(NamedTuple):
    """A config.json, as published checkpoints of the family spell it."""

    config: dict
    head_dim: int
    biases: bool = False
    norms: bool = False  # of each head
    whole_norms: bool = False  # of all heads as one
    before: bool = True  # norms before attention and MLP
    after: bool = False  # and after them
    norm_mean: float = 1.0  # of a norm's weights


CASES = {
    "llama2": Case(
        dict(_COMMON, model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=32, intermediate_size=56,
             num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, rms_norm_eps=1e-5, rope_theta=10000.0,
             rope_scaling=None, tie_word_embeddings=False, attention_bias=False, torch_dtype="float32"),
        head_dim=8),
    "llama3_1": Case(  # rotary scaling, in the older spelling
        dict(_COMMON, model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=32, intermediate_size=56,
             num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=500000.0,
             rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_type="llama3",
                               original_max_position_embeddings=256), tie_word_embeddings=False, mlp_bias=False),
        head_dim=8),
    "llama3_2": Case(  # rotary scaling, in the spelling of transformers 5; tied
        dict(_COMMON, model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=32, intermediate_size=56,
             num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5,
             rope_parameters=dict(rope_theta=500000.0, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                  rope_type="llama3", original_max_position_embeddings=128),
             tie_word_embeddings=True, dtype="float32"),
        head_dim=8),
    "smollm2": Case(  # a number of heads that is no power of two
        dict(_COMMON, model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=24, intermediate_size=64,
             num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, rms_norm_eps=1e-5, rope_theta=100000,
             rope_interleaved=False, rope_scaling=None, pretraining_tp=1, tie_word_embeddings=True),
        head_dim=8),
    "mistral": Case(  # heads that together are wider than the model, as in Mistral-Nemo
        dict(_COMMON, model_type="mistral", architectures=["MistralForCausalLM"], hidden_size=24, intermediate_size=40,
             num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=12, rms_norm_eps=1e-5,
             rope_theta=1000000.0, sliding_window=None, tie_word_embeddings=False),
        head_dim=12, ),
    "qwen2": Case(
        dict(_COMMON, model_type="qwen2", architectures=["Qwen2ForCausalLM"], hidden_size=32, intermediate_size=48,
             num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=10000,
             sliding_window=4096, max_window_layers=2, use_sliding_window=False, use_mrope=False,
             tie_word_embeddings=False),
        head_dim=8, biases=True),
    "qwen3": Case(
        dict(_COMMON, model_type="qwen3", architectures=["Qwen3ForCausalLM"], hidden_size=32, intermediate_size=48,
             num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6,
             rope_theta=1000000, attention_bias=False, use_sliding_window=False, sliding_window=None,
             max_window_layers=2, rope_scaling=None, tie_word_embeddings=True),
        head_dim=16, norms=True),
    "smollm3": Case(  # no rotation in every third layer, and one layer more than two periods
        dict(_COMMON, model_type="smollm3", architectures=["SmolLM3ForCausalLM"], hidden_size=32, intermediate_size=48,
             num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=5000000.0,
             no_rope_layers=[1, 1, 0, 1, 1, 0, 1], no_rope_layer_interval=3, attention_bias=False, mlp_bias=False,
             use_sliding_window=False, sliding_window=None, rope_scaling=None, pad_token_id=0,
             tie_word_embeddings=True),
        head_dim=8),
    "gemma3": Case(  # windows in two of three layers, shorter than the input; scores not scaled by the head dim
        dict(_COMMON, model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], hidden_size=32,
             intermediate_size=48, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
             rms_norm_eps=1e-6, rope_theta=1000000.0, rope_local_base_freq=10000.0, sliding_window=4,
             sliding_window_pattern=3, rope_scaling=dict(factor=8.0, rope_type="linear"), query_pre_attn_scalar=12,
             hidden_activation="gelu_pytorch_tanh", attention_bias=False, pad_token_id=0, tie_word_embeddings=True),
        head_dim=16, norms=True, after=True, norm_mean=0.0),
    "gemma3_scaled": Case(  # rotary scaling in layers with a window, too
        dict(_COMMON, model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], hidden_size=32,
             intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
             rms_norm_eps=1e-6, sliding_window=4, sliding_window_pattern=3, query_pre_attn_scalar=16,
             rope_parameters=dict(
                 full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0),
                 sliding_attention=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                        original_max_position_embeddings=64, rope_theta=10000.0)),
             hidden_activation="gelu_pytorch_tanh", attention_bias=False, pad_token_id=0, tie_word_embeddings=True),
        head_dim=16, norms=True, after=True, norm_mean=0.0),
    "olmo2": Case(
        dict(_COMMON, model_type="olmo2", architectures=["Olmo2ForCausalLM"], hidden_size=32, intermediate_size=48,
             num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=500000,
             attention_bias=False, pad_token_id=0, tie_word_embeddings=False),
        head_dim=8, whole_norms=True, before=False, after=True),
}


class Inputs(NamedTuple):
    """One batch: rows may start with padding, which no token attends to."""

    token_BT: np.ndarray
    position_BT: np.ndarray
    is_token_BT: np.ndarray


def _inputs() -> dict[str, Inputs]:
    token_BT = np.random.default_rng(1).integers(0, VOCAB, (3, 10))
    everything_BT = np.ones_like(token_BT, bool)
    left_BT = np.arange(10)[None, :] >= np.array([0, 4, 8])[:, None]
    # Distances, not positions, are what rotary attention sees: hence jumps.
    far_T = np.array([0, 1, 2, 300, 301, 2500, 4997, 4998, 4999, 5000])
    return {
        "plain": Inputs(token_BT, np.arange(10)[None, :].repeat(3, 0), everything_BT),
        "left_padded": Inputs(token_BT, np.maximum(np.cumsum(left_BT, 1) - 1, 0), left_BT),
        "far": Inputs(token_BT, far_T[None, :].repeat(3, 0), everything_BT),
    }


INPUTS = _inputs()


def make_tensors(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under the names and shapes of published checkpoints, float32; no leaf is zero or one."""
    c, rng = case.config, np.random.default_rng(seed)
    mean = case.norm_mean
    D, F, E = c["hidden_size"], c["intermediate_size"], case.head_dim
    H, K = c["num_attention_heads"], c["num_key_value_heads"]
    tensors = {}

    def add(name, *shape, mean=0.0):
        spread = 0.3 if len(shape) == 1 else 1.0 if "embed" in name else 1.5 * shape[-1] ** -0.5
        tensors[name] = (mean + spread * rng.normal(size=shape)).astype(np.float32)

    add("model.embed_tokens.weight", VOCAB, D)
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        if case.before:
            add(f"{prefix}.input_layernorm.weight", D, mean=mean)
        for name, heads in (("q", H), ("k", K), ("v", K)):
            add(f"{prefix}.self_attn.{name}_proj.weight", heads * E, D)
            if case.biases:
                add(f"{prefix}.self_attn.{name}_proj.bias", heads * E)
            if (case.norms or case.whole_norms) and name != "v":
                add(f"{prefix}.self_attn.{name}_norm.weight", E if case.norms else heads * E, mean=mean)
        add(f"{prefix}.self_attn.o_proj.weight", D, H * E)
        add(f"{prefix}.post_attention_layernorm.weight", D, mean=mean)
        if case.after and case.before:
            add(f"{prefix}.pre_feedforward_layernorm.weight", D, mean=mean)
        add(f"{prefix}.mlp.gate_proj.weight", F, D)
        add(f"{prefix}.mlp.up_proj.weight", F, D)
        add(f"{prefix}.mlp.down_proj.weight", D, F)
        if case.after:
            add(f"{prefix}.post_feedforward_layernorm.weight", D, mean=mean)
    add("model.norm.weight", D, mean=mean)
    if not c["tie_word_embeddings"]:
        add("lm_head.weight", VOCAB, D)
    return tensors


def write_checkpoint(
    folder: Path, case: Case, dtype: str = "float32", shards: int = 1, tensors: dict | None = None, **changes
) -> Path:
    """A checkpoint folder: config.json (with `changes`) and one file, or `shards` of them with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case.config | changes), encoding="utf-8")
    tensors = {name: value.astype(dtype) for name, value in (tensors or make_tensors(case)).items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::shards]}  # layers strewn over the files
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(value.nbytes for value in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder
