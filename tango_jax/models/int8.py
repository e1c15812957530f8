"""Numbers in int8 for sampling: x is about value x scale, with a float32 scale = max |x| / 127 over a group."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

SAMPLE_DTYPES = ("", "int8")  # empty: the model's compute_dtype
LARGEST = 127
# Axes that a product sums over; names as in decode_layers.split_layers.
_INPUT_AXES = dict.fromkeys(("qkv", "q", "k", "v", "gate_up", "gate", "up", "down"), 0) | {"o": (0, 1)}


@struct.dataclass
class Quantized:
    """Keys or values, with a scale for each token and key/value head."""

    value: jax.Array  # int8 [.., K, E, S] or [.., K, S, E]
    scale: jax.Array  # float32 [.., K, S]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape


def quantize(x: jax.Array, axes: int | tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """(int8, float32 scales without `axes`): numbers along `axes` share a scale. Non-finite x: non-finite scale."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=axes, keepdims=True) / LARGEST
    # All zeros give scale 0. A tiny scale has few digits, so a quotient may exceed 127.
    value = jnp.round(x / jnp.where(scale > 0, scale, 1.0)).clip(-LARGEST, LARGEST)
    return value.astype(jnp.int8), jnp.squeeze(scale, axes)


def quantize_matrices(layer: dict) -> dict:
    """One layer with int8 matrices, and `<name>_scale` for their outputs."""
    quantized = dict(layer)
    for name in filter(layer.__contains__, _INPUT_AXES):
        if layer[name].dtype == jnp.int8:  # a frozen base may be int8 already
            continue
        quantized[name], quantized[f"{name}_scale"] = quantize(layer[name], _INPUT_AXES[name])
    return quantized


def in_this_step(constant: Any, changing: jax.Array) -> tuple[Any, jax.Array]:
    """Both arguments, behind a barrier in a loop's body.

    Without it XLA converts a constant int8 array before the loop, and every step reads the wide copy.
    """
    return lax.optimization_barrier((constant, changing))
