"""Import of GGUF checkpoints of llama and qwen2 models.

llama.cpp rotates interleaved pairs and reorders the rows of a llama's q and k for it. The order is undone here, because
this decoder rotates the halves of a head. Files of qwen2 keep the order.
"""

import dataclasses
import functools
import math
from pathlib import Path

import jax
import numpy as np

from tango_jax.models.rotary import RopeScaling, rope_frequencies
from tango_jax.models.transformer import ModelConfig
from tango_jax.runtime.unread import Unread, load_all, read_array
from tango_jax.weights import hf_layout
from tango_jax.weights.gguf_file import GgufFile, dequantize, open_gguf
from tango_jax.weights.safetensors_files import tensor_problems

ARCHITECTURES = ("llama", "qwen2")
_ROPE_FACTORS = "rope_freqs.weight"
# Metadata that is read here, or that changes nothing in a supported model.
_KNOWN = {
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
    "attention.sliding_window", "attention.value_length", "block_count", "context_length", "embedding_length",
    "expert_count", "expert_used_count", "feed_forward_length", "rope.dimension_count", "rope.freq_base",
    "rope.scale_linear", "rope.scaling.factor", "rope.scaling.finetuned", "rope.scaling.original_context_length",
    "rope.scaling.type", "vocab_size",
}
# Other metadata may change the model, but not at these values. `_check_variant` adds attention.scale.
_NEUTRAL = {
    "attention.causal": True, "attention.clamp_kqv": 0, "attention.max_alibi_bias": 0, "attn_logit_softcapping": 0,
    "embedding_scale": 1, "final_logit_softcapping": 0, "logit_scale": 1, "residual_scale": 1,
    "rope.scaling.attn_factor": 1, "use_parallel_residual": False,
}

_NAMES = {  # of the tensors, by the path of their parameter; {} stands for the layer
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "layers/attention_norm": "blk.{}.attn_norm.weight",
    "layers/q": "blk.{}.attn_q.weight",
    "layers/k": "blk.{}.attn_k.weight",
    "layers/v": "blk.{}.attn_v.weight",
    "layers/q_bias": "blk.{}.attn_q.bias",
    "layers/k_bias": "blk.{}.attn_k.bias",
    "layers/v_bias": "blk.{}.attn_v.bias",
    "layers/o": "blk.{}.attn_output.weight",
    "layers/mlp_norm": "blk.{}.ffn_norm.weight",
    "layers/gate": "blk.{}.ffn_gate.weight",
    "layers/up": "blk.{}.ffn_up.weight",
    "layers/down": "blk.{}.ffn_down.weight",
}
_ROTATED = ("layers/q", "layers/k", "layers/q_bias", "layers/k_bias")  # whose rows llama.cpp reorders in a llama


def model_config_from_gguf(path: str | Path | GgufFile, **numerics) -> ModelConfig:
    """The ModelConfig of a file, or ValueError. `numerics`: source.NUMERICS, or max_position."""
    file = open_gguf(path)
    arch = _architecture(file)
    width, heads = file.require(f"{arch}.embedding_length"), file.require(f"{arch}.attention.head_count")
    head_dim = file.get(f"{arch}.attention.key_length", None) or width // _one(file, "head_count", heads)
    _check_variant(file, arch, head_dim)
    tensors = file.tensors
    context = file.get(f"{arch}.context_length", 32_768)
    config = ModelConfig(
        vocab_size=_shape(_tensor(file, "token_embd.weight"))[0],
        width=width,
        num_layers=file.require(f"{arch}.block_count"),
        num_heads=_one(file, "head_count", heads),
        num_kv_heads=_one(file, "head_count_kv", file.get(f"{arch}.attention.head_count_kv", heads)),
        head_dim=head_dim,
        mlp_width=_one(file, "feed_forward_length", file.require(f"{arch}.feed_forward_length")),
        rope_base=file.get(f"{arch}.rope.freq_base", 10_000.0),
        # Rounded to a float32's digits, so that 1e-5 equals a config.json's.
        norm_eps=float(f"{file.require(f'{arch}.attention.layer_norm_rms_epsilon'):.6g}"),
        tied_head="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        # Full attention is exact for sequences within the window.
        max_position=min(context, file.get(f"{arch}.attention.sliding_window", 0) or context),
    )
    if _ROPE_FACTORS in tensors:
        config = dataclasses.replace(config, rope_scaling=_rope_scaling(file, config))
    return dataclasses.replace(config, **numerics)


def load_gguf(path: str | Path | GgufFile, config: ModelConfig, shardings=None) -> dict:
    """`open_gguf_params`, read. The host holds its share and the largest parameter."""
    return load_all(open_gguf_params(path, config, shardings))


def open_gguf_params(path: str | Path | GgufFile, config: ModelConfig, shardings=None) -> dict:
    """The parameters of a file, as the tree of `init_params`, in `config.param_dtype`; `Unread`.

    ValueError: the file is damaged or does not match `config`.
    """
    file = open_gguf(path)
    _check_tensors(file, config)
    tensors, sizes, is_interleaved = file.tensors, hf_layout.axis_sizes(config), _architecture(file) == "llama"

    def load_leaf(path: str, leaf: jax.ShapeDtypeStruct, sharding) -> jax.Array | np.ndarray:
        values, layout = np.empty(leaf.shape, leaf.dtype), hf_layout.layout_of(config, path)
        whole = tuple(slice(0, sizes[axis]) for axis in layout.axes)
        for layer in range(leaf.shape[0]) if layout.stacked else [None]:
            stored = dequantize(file, tensors[_NAMES[path].format(layer)])
            if is_interleaved and path in _ROTATED:
                stored = _pairs_to_halves(stored, config.head_dim)
            values[... if layer is None else layer] = hf_layout.from_stored(layout, sizes, whole, stored)
        # Also for devices of several processes: each takes its slices.
        return read_array(leaf, sharding, lambda index: values[index])

    def open_leaf(keys: tuple, leaf: jax.ShapeDtypeStruct, sharding=None) -> Unread:
        load_fn = functools.partial(load_leaf, hf_layout.path_name(keys), leaf, sharding)
        return Unread(leaf.shape, leaf.dtype, load_fn)

    rest = [] if shardings is None else [shardings]
    return jax.tree_util.tree_map_with_path(open_leaf, hf_layout.abstract_params(config), *rest)


def _pairs_to_halves(w: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows [heads * E, ...] of q or k: interleaved pairs become the halves of a head."""
    return w.reshape(-1, head_dim // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def _check_tensors(file: GgufFile, config: ModelConfig) -> None:
    found = {name: _shape(tensor) for name, tensor in file.tensors.items() if name != _ROPE_FACTORS}
    wanted = {_NAMES[path].format(layer): shape
              for path, layer, shape in hf_layout.stored_tensors(config).values()}
    _, problems = tensor_problems(found, wanted)
    if problems:
        raise ValueError(f"{file.path} does not match the config ({problems}): create the config with "
                         "model_config_from_gguf from the same file")


def _tensor(file: GgufFile, name: str):
    tensors = file.tensors
    if name not in tensors:
        raise ValueError(f"{file.path} has no tensor {name}: it holds a tokenizer or an adapter, not a model")
    return tensors[name]


def _shape(tensor) -> tuple[int, ...]:
    """The shape in PyTorch's order; files reverse the axes."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _one(file: GgufFile, name: str, value) -> int:
    """A number that some files give per layer; here all layers must share it."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise ValueError(
            f"{file.path} has a {name} that differs between layers ({value[:8]}...): choose another model"
        )
    return value[0]


def _architecture(file: GgufFile) -> str:
    arch = file.require("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"{file.path} holds a model of architecture {arch!r}, not one of {', '.join(ARCHITECTURES)}: load it from "
            "a Hugging Face folder, or choose another model"
        )
    return arch


def _check_variant(file: GgufFile, arch: str, head_dim: int) -> None:
    factor = file.get(f"{arch}.rope.scaling.factor", file.get(f"{arch}.rope.scale_linear", 0))
    # As in llama.cpp: a factor without a type is linear.
    scaling = file.get(f"{arch}.rope.scaling.type", "linear" if factor not in (0, 1) else "none")
    experts = file.get(f"{arch}.expert_count", 0)
    if scaling != "none":
        raise ValueError(f"{file.path} has rope scaling {scaling!r}: only Llama-3's is supported")
    if experts:
        raise ValueError(f"{file.path} is a mixture of {experts} experts: only dense models are supported")
    for name in ("attention.value_length", "rope.dimension_count"):
        size = file.get(f"{arch}.{name}", head_dim)
        if size != head_dim:
            raise ValueError(f"{file.path} has {name}={size} and heads of size {head_dim}: they must be equal")
    neutral = _NEUTRAL | {"attention.scale": float(np.float32(head_dim**-0.5))}
    others = [key.removeprefix(f"{arch}.") for key in file.reader.fields if key.startswith(f"{arch}.")]
    for name in sorted(set(others) - _KNOWN):
        value = file.get(f"{arch}.{name}")
        if name not in neutral or value != neutral[name]:
            what = f"only {neutral[name]} is supported" if name in neutral else "this setting is not known here"
            raise ValueError(f"{file.path} has {arch}.{name}={value}, which may change what the model computes: {what};"
                             " load the model from its Hugging Face folder, or choose another one")


def _rope_scaling(file: GgufFile, config: ModelConfig) -> RopeScaling | None:
    """Llama-3's scaling, from the divisors of the frequencies, which are all that a file stores.

    With x = frequency / 2 pi, the unscaled frequency's share is (original * x - low) / (high - low), clipped to 0..1.
    Slope and offset give two numbers. The third, low, is 1, as in every published model.
    """
    factors = dequantize(file, file.tensors[_ROPE_FACTORS]).astype(np.float64)
    if np.all(factors == 1.0):
        return None
    frequency = np.asarray(rope_frequencies(config), np.float64)
    scaling = _fit_scaling(factors, frequency) if factors.shape == frequency.shape else None
    if scaling is not None:
        scaled = np.asarray(rope_frequencies(dataclasses.replace(config, rope_scaling=scaling)), np.float64)
        if np.allclose(scaled, frequency / factors, rtol=1e-4):
            return scaling
    raise ValueError(
        f"{file.path}: the {factors.size} factors in {_ROPE_FACTORS} ({factors.min():g} to {factors.max():g}) are "
        "not Llama-3's rope scaling, the only one supported: choose another model"
    )


def _fit_scaling(factors: np.ndarray, frequency: np.ndarray) -> RopeScaling | None:
    factor = float(factors.max())
    share = (1.0 / factors - 1.0 / factor) / (1.0 - 1.0 / factor) if factor > 1.0 else np.ones_like(factors)
    is_band = (share > 1e-4) & (share < 1.0 - 1e-4)
    if is_band.sum() < 2:
        return None
    slope, offset = np.polyfit(frequency[is_band] / (2 * math.pi), share[is_band], 1)
    if offset >= 0.0:
        return None
    width = -1.0 / offset  # high - low
    return RopeScaling(round(factor, 3), 1.0, round(1.0 + width, 3), round(slope * width))
