"""Low-rank adapters (LoRA, arXiv 2106.09685): W x + (alpha / r) B A x with W frozen, A and B trained.

`<name>_lora_a` and `<name>_lora_b` belong to a layer's matrix `<name>`. `config` is a ModelConfig, which imports this.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tango_jax.models.int8 import quantize

LORA_A, LORA_B = "_lora_a", "_lora_b"  # what follows the name of a matrix
# Input and output axes. A maps inputs to r, B maps r to outputs.
MATRICES = {"q": ("D", "HE"), "k": ("D", "KE"), "v": ("D", "KE"), "o": ("HE", "D"),
            "gate": ("D", "F"), "up": ("D", "F"), "down": ("F", "D")}


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    rank: int  # r
    alpha: float  # a product B A is multiplied by alpha / r
    targets: tuple[str, ...] = ()  # matrices of every layer that have one; empty: all
    base_dtype: str = ""  # of the frozen base; empty: the model's compute_dtype

    @property
    def names(self) -> tuple[str, ...]:
        """The matrices with an adapter, in the order of MATRICES."""
        return tuple(name for name in MATRICES if not self.targets or name in self.targets)


def narrowest_side(config: Any, names: tuple[str, ...] = tuple(MATRICES)) -> int:
    """The fewest inputs or outputs of these matrices: the highest rank."""
    sizes = _axis_sizes(config)
    return min(int(np.prod([sizes[axis] for axis in axes])) for name in names for axes in MATRICES[name])


def check_lora(config: Any) -> None:
    """ValueError where a matrix is narrower than the rank."""
    narrowest = narrowest_side(config, config.lora.names)
    if config.lora.rank > narrowest:
        raise ValueError(f"lora.rank={config.lora.rank} is above {narrowest}, the narrowest side of a matrix that gets "
                         "an adapter: lower it, or choose other lora.targets")


def init_adapters(config: Any, key: jax.Array) -> dict:
    """Fresh float32 {"layers": {"q_lora_a": [L, D, r], "q_lora_b": [L, r, H, E], ...}}: A as in `peft`, B zero."""
    sizes, lora, leaves = _axis_sizes(config), config.lora, {}
    for name, own_key in zip(lora.names, jax.random.split(key, len(lora.names)), strict=True):
        inputs, outputs = (tuple(sizes[axis] for axis in axes) for axes in MATRICES[name])
        shape = (config.num_layers, *inputs, lora.rank)
        leaves[name + LORA_A] = (3 * np.prod(inputs)) ** -0.5 * jax.random.normal(own_key, shape, jnp.float32)
        leaves[name + LORA_B] = jnp.zeros((config.num_layers, lora.rank, *outputs), jnp.float32)
    return {"layers": leaves}


def freeze(config: Any, params: dict) -> dict:
    """The base in `lora.base_dtype`. For int8, matrices have a `<name>_scale` per output, the rest is compute_dtype.
    `params` may lack leaves."""
    dtype = config.lora.base_dtype or config.compute_dtype
    if dtype != "int8":
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    frozen = jax.tree.map(lambda leaf: leaf.astype(config.compute_dtype), params)
    for name in filter(params["layers"].__contains__, MATRICES):
        frozen["layers"][name], frozen["layers"][f"{name}_scale"] = quantize(params["layers"][name], _inputs_of(name))
    return frozen


def split(weights: dict) -> tuple[dict, dict]:
    """(trained parameters, base) of a `records.with_base` result, or (weights, {})."""
    adapters = {name: leaf for name, leaf in weights["layers"].items() if name.endswith((LORA_A, LORA_B))}
    if not adapters or is_adapter_tree(weights):
        return weights, {}
    frozen = {name: leaf for name, leaf in weights["layers"].items() if name not in adapters}
    return {"layers": adapters}, {**weights, "layers": frozen}


def is_adapter_tree(params: dict) -> bool:
    return params.keys() == {"layers"}


def merge(config: Any, weights: dict) -> dict:
    """Parameters without adapters, float32: W + (alpha / r) A B. `weights` may lack leaves and layers."""
    own, scale = weights["layers"], config.lora.alpha / config.lora.rank
    layers = {name: leaf.astype(jnp.float32) for name, leaf in own.items()
              if not name.endswith(("_scale", LORA_A, LORA_B))}
    for name in MATRICES:
        if f"{name}_scale" in own:
            layers[name] *= jnp.expand_dims(own[f"{name}_scale"], _inputs_of(name))
    for name in filter(layers.__contains__, config.lora.names):
        wide, narrow = (own[name + part] for part in (LORA_A, LORA_B))
        wide, narrow = wide.reshape(len(wide), -1, config.lora.rank), narrow.reshape(len(narrow), config.lora.rank, -1)
        delta = jnp.matmul(wide, narrow, precision=jax.lax.Precision.HIGHEST)
        layers[name] += scale * delta.reshape(layers[name].shape)
    return {**{name: leaf.astype(jnp.float32) for name, leaf in weights.items() if name != "layers"}, "layers": layers}


def join_adapters(config: Any, layers: dict, joined: str, names: tuple[str, ...]) -> dict:
    """Move the adapters of `names` out of the stacked `layers` and join them: A side by side, B block-diagonal."""
    sizes, (num_layers, rank) = _axis_sizes(config), (config.num_layers, config.lora.rank)
    there = [name for name in names if name + LORA_A in layers]
    if not there:
        return {}
    wide = jnp.concatenate([layers.pop(name + LORA_A) for name in there], axis=-1)
    blocks = []
    for name in names:
        outputs = int(np.prod([sizes[axis] for axis in MATRICES[name][1]]))
        block = jnp.zeros((num_layers, len(there) * rank, outputs), wide.dtype)
        if name in there:
            start, own = there.index(name) * rank, layers.pop(name + LORA_B)
            block = block.at[:, start : start + rank].set(own.reshape(num_layers, rank, outputs))
        blocks.append(block)
    return {joined + LORA_A: wide, joined + LORA_B: jnp.concatenate(blocks, axis=-1)}


def _inputs_of(name: str) -> tuple[int, ...]:
    """The axes of a matrix, stacked on L, that its products sum over."""
    return tuple(range(1, 1 + len(MATRICES[name][0])))


def _axis_sizes(config: Any) -> dict[str, int]:
    return {"D": config.width, "F": config.mlp_width, "H": config.num_heads, "K": config.num_kv_heads,
            "E": config.head_dim}
