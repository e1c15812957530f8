"""The decoder's layers in sampling: a Python loop over `transformer.Block`, since a scan copies the cache each step."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from tango_jax.models.attention import AttendFn
from tango_jax.models.int8 import quantize_matrices
from tango_jax.models.lora import join_adapters, merge
from tango_jax.models.rotary import Ropes
from tango_jax.models.transformer import SCORE_PARAMS, Block, ModelConfig, head_matrix


def split_layers(config: ModelConfig, join: bool, params: dict) -> dict:
    """The decode layout: parameters in the compute dtype, and a tuple of L layers, since slicing a stack copies it.

    With `join`, matrices with the same input are joined: for few rows, one wide product is quicker. With
    `sample_weight_dtype` "int8" each layer matrix is int8, with output scales `<name>_scale`. Adapters are merged only
    where all is float32: rounding to bfloat16 or int8 would lose them.
    """
    if config.lora and not config.sample_weight_dtype and (
            {config.compute_dtype, config.lora.base_dtype or config.compute_dtype} == {"float32"}):
        params, config = merge(config, params), dataclasses.replace(config, lora=None)
    # Except int8 matrices and their scales.
    cast = {name: leaf if leaf.dtype == jnp.int8 or name.endswith("_scale") else leaf.astype(config.compute_dtype)
            for name, leaf in params["layers"].items()}
    for joined, names in (("qkv", ("q", "k", "v")), ("gate_up", ("gate", "up"))) if join else ():
        flat = [cast.pop(name).reshape(config.num_layers, config.width, -1) for name in names]
        cast[joined] = jnp.concatenate(flat, axis=-1)
        if f"{names[0]}_scale" in cast:
            scales = [cast.pop(f"{name}_scale").reshape(config.num_layers, -1) for name in names]
            cast[f"{joined}_scale"] = jnp.concatenate(scales, axis=-1)
        if config.lora:
            cast |= join_adapters(config, cast, joined, names)
    layers = tuple(jax.tree.map(lambda leaf, i=i: leaf[i], cast) for i in range(config.num_layers))
    if config.sample_weight_dtype:
        layers = tuple(quantize_matrices(layer) for layer in layers)
    scores = {name: params[name].astype(config.head_dtype) for name in SCORE_PARAMS if name in params}
    return {
        "embed": params["embed"].astype(config.compute_dtype),
        "layers": layers,
        "final_norm": params["final_norm"].astype(config.compute_dtype),
        **(scores or {"head_DV": head_matrix(config, params)}),
    }


def apply_split_layers(
    config: ModelConfig, layers: tuple[dict, ...], x_BTD: jax.Array, ropes: Ropes, attend_fns: Sequence[AttendFn]
) -> tuple[jax.Array, tuple]:
    """Hidden states and each layer's cache."""
    block, caches = Block(config), []
    for i, (layer_params, attend_fn) in enumerate(zip(layers, attend_fns, strict=True)):
        x_BTD, cache = block.apply({"params": layer_params}, x_BTD, ropes[i % len(ropes)], attend_fn)
        caches.append(cache)
    return x_BTD, tuple(caches)
