"""Import of GGUF checkpoints of llama and qwen2 models.

Takes a file; returns a ModelConfig and a parameter tree. Stage of the loop: before the policies are built. llama.cpp
rotates interleaved pairs, whereas this project rotates the two halves of a head. For llama models, its converter
therefore reorders the rows of q and k, which is undone here; qwen2 models are stored unchanged.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tango_jax.models.transformer import ModelConfig, RopeScaling, init_params, rope_frequencies
from tango_jax.weights.gguf_file import GgufFile, dequantize, open_gguf

ARCHITECTURES = ("llama", "qwen2")
_ROPE_FACTORS = "rope_freqs.weight"


class Target(NamedTuple):
    """The place of a tensor of the file in the parameter tree."""

    leaf: str  # name in the parameter tree
    layer: int | None  # index on that leaf's L axis
    shape: tuple[int, ...]  # in the file
    convert_fn: Callable[[np.ndarray], np.ndarray]  # converts to the leaf's layout


def model_config_from_gguf(path: str | Path | GgufFile, **numerics) -> ModelConfig:
    """Return the architecture that a file's metadata describes.

    Args:
        numerics: fields of ModelConfig that no file determines: those of source.NUMERICS, and a shorter max_position.

    Raises:
        ValueError: not a GGUF file, an unsupported architecture, or a variant that this decoder does not implement.
    """
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
        # Rounded to the digits that a float32 holds, so that 1e-5 is the same number as in a config.json.
        norm_eps=float(f"{file.require(f'{arch}.attention.layer_norm_rms_epsilon'):.6g}"),
        tied_head="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        # Sequences no longer than the window get full attention, so the length is limited to the window.
        max_position=min(context, file.get(f"{arch}.attention.sliding_window", 0) or context),
    )
    if _ROPE_FACTORS in tensors:
        config = dataclasses.replace(config, rope_scaling=_rope_scaling(file, config))
    return dataclasses.replace(config, **numerics)


def load_gguf(path: str | Path | GgufFile, config: ModelConfig, shardings=None) -> dict:
    """Load the parameters of a file in `config.param_dtype`, as the same tree as `transformer.init_params`.

    Every leaf is allocated once on the host and filled tensor by tensor, so the host needs memory for the largest leaf
    in addition to its share of the result.

    Args:
        shardings: a tree of NamedSharding with the structure of the parameters, or None for the default device.

    Raises:
        ValueError: the file is broken, or its tensors are not exactly those that `config` requires.
    """
    file = open_gguf(path)
    plan = _tensor_plan(config, _architecture(file))
    _check_tensors(file, plan)
    abstract = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    places = [None] * len(leaves) if shardings is None else treedef.flatten_up_to(shardings)
    names = [jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in leaves]
    assert {target.leaf for target in plan.values()} == set(names), names
    return treedef.unflatten(
        _load_leaf(file, {tensor: target for tensor, target in plan.items() if target.leaf == name}, leaf, place)
        for name, (_, leaf), place in zip(names, leaves, places, strict=True)
    )


def _load_leaf(file: GgufFile, plan: dict[str, Target], leaf: jax.ShapeDtypeStruct, sharding) -> jax.Array:
    tensors, values = file.tensors, np.empty(leaf.shape, leaf.dtype)
    layers = [target.layer for target in plan.values()]
    assert layers == [None] or layers == list(range(leaf.shape[0])), (leaf, layers)  # each part is filled exactly once
    for name, target in plan.items():
        values[... if target.layer is None else target.layer] = target.convert_fn(dequantize(file, tensors[name]))
    if sharding is None:
        return jnp.array(values)
    # Also works if some devices belong to other processes: each process takes its own slices.
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def _tensor_plan(config: ModelConfig, arch: str) -> dict[str, Target]:
    """Map the name of every tensor of such a model to its place in the tree; layers are in order."""
    V, D = config.vocab_size, config.width
    plan = {
        "token_embd.weight": Target("embed", None, (V, D), _keep),
        "output_norm.weight": Target("final_norm", None, (D,), _keep),
    }
    if not config.tied_head:
        plan["output.weight"] = Target("head", None, (V, D), np.transpose)
    for layer in range(config.num_layers):
        for name, (leaf, shape, convert_fn) in _layer_tensors(config, arch).items():
            plan[f"blk.{layer}.{name}"] = Target(f"layers/{leaf}", layer, shape, convert_fn)
    return plan


def _layer_tensors(config: ModelConfig, arch: str) -> dict[str, tuple]:
    """Map the name of every tensor of one layer to (leaf, shape in the file, conversion)."""
    D, F, H, K, E = config.width, config.mlp_width, config.num_heads, config.num_kv_heads, config.head_dim
    q_fn, k_fn, v_fn = (
        functools.partial(_to_heads, head_dim=E, is_interleaved=arch == "llama" and name != "v") for name in "qkv"
    )
    table = {
        "attn_norm.weight": ("attention_norm", (D,), _keep),
        "attn_q.weight": ("q", (H * E, D), q_fn),
        "attn_k.weight": ("k", (K * E, D), k_fn),
        "attn_v.weight": ("v", (K * E, D), v_fn),
        "attn_output.weight": ("o", (D, H * E), lambda w: w.T.reshape(H, E, D)),
        "ffn_norm.weight": ("mlp_norm", (D,), _keep),
        "ffn_gate.weight": ("gate", (F, D), np.transpose),
        "ffn_up.weight": ("up", (F, D), np.transpose),
        "ffn_down.weight": ("down", (D, F), np.transpose),
    }
    if config.qkv_bias:
        table["attn_q.bias"] = ("q_bias", (H * E,), q_fn)
        table["attn_k.bias"] = ("k_bias", (K * E,), k_fn)
        table["attn_v.bias"] = ("v_bias", (K * E,), v_fn)
    return table


def _keep(w: np.ndarray) -> np.ndarray:
    return w


def _to_heads(w: np.ndarray, head_dim: int, is_interleaved: bool) -> np.ndarray:
    """Reshape [heads * E, D] to [D, heads, E], or a bias [heads * E] to [heads, E]; interleaved pairs become halves."""
    if is_interleaved:
        w = w.reshape(-1, head_dim // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
    w = w.reshape(-1, head_dim, *w.shape[1:])
    return np.moveaxis(w, -1, 0) if w.ndim == 3 else w


def _check_tensors(file: GgufFile, plan: dict[str, Target]) -> None:
    """Check that the file has exactly the tensors of the plan, each with its shape."""
    tensors = file.tensors
    missing = [name for name in plan if name not in tensors]
    unexpected = [name for name in tensors if name not in plan and name != _ROPE_FACTORS]
    if missing or unexpected:
        raise ValueError(
            f"{file.path} does not match the config: {_some(missing)} missing, {_some(unexpected)} unexpected; create "
            "the config with model_config_from_gguf from the same file"
        )
    for name, target in plan.items():
        if _shape(tensors[name]) != target.shape:
            raise ValueError(
                f"{file.path}: tensor {name} has shape {_shape(tensors[name])}, but the config needs {target.shape}; "
                "create the config with model_config_from_gguf from the same file"
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{len(names)} tensors ({shown})" if names else "no tensor"


def _tensor(file: GgufFile, name: str):
    tensors = file.tensors
    if name not in tensors:
        raise ValueError(f"{file.path} has no tensor {name}: it holds a tokenizer or an adapter, not a model")
    return tensors[name]


def _shape(tensor) -> tuple[int, ...]:
    """Return the shape in PyTorch's order; the file stores the axes in reverse order."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _one(file: GgufFile, name: str, value) -> int:
    """Return a number that some files give per layer; this decoder supports only one value for all layers."""
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
    """Reject features in the metadata that this decoder does not implement."""
    factor = file.get(f"{arch}.rope.scaling.factor", file.get(f"{arch}.rope.scale_linear", 0))
    # As llama.cpp reads it: a factor without a type is linear.
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


def _rope_scaling(file: GgufFile, config: ModelConfig) -> RopeScaling | None:
    """Recover Llama-3's scaling from the divisors of the frequencies, which are all that a file stores of it.

    With x = frequency / 2 pi, the share of the unscaled frequency is (original * x - low) / (high - low), clipped to
    0..1. Its slope and offset determine two of the three numbers; low is 1, as in every published model.
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
        "not those of Llama-3's rope scaling, the only one supported: choose another model"
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
