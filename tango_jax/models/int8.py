"""Numbers in int8 for sampling: symmetric, each with a float32 scale that it shares with its neighbours.

A number is about value x scale, where the scale is the largest magnitude among those that share it, over 127. Products
take the values as they are (every int8 is exact in bfloat16), and the scale multiplies the result or the other factor:
no array in the original precision exists beside the small one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

SAMPLE_DTYPES = ("", "int8")  # empty: the model's compute_dtype
LARGEST = 127
# Axes of a layer's matrices that a product sums over; see decode_layers.split_layers.
_INPUT_AXES = dict.fromkeys(("qkv", "q", "k", "v", "gate_up", "gate", "up", "down"), 0) | {"o": (0, 1)}


@struct.dataclass
class Quantized:
    """Keys or values of the cache, with one scale for each token and key/value head."""

    value: jax.Array  # int8 [.., K, E, S] or [.., K, S, E]
    scale: jax.Array  # float32 [.., K, S]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape


def quantize(x: jax.Array, axes: int | tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """(int8 of the same shape, float32 scales without `axes`): numbers along `axes` share a scale.

    Rounding is to the nearest multiple of the scale, so that no number is off by more than half of it. Where x is not
    finite, the scale is not either, and neither is what is computed with it.
    """
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=axes, keepdims=True) / LARGEST
    # Zeros alone have a scale of 0. A tiny scale has few digits, and the quotient may then be above 127.
    value = jnp.round(x / jnp.where(scale > 0, scale, 1.0)).clip(-LARGEST, LARGEST)
    return value.astype(jnp.int8), jnp.squeeze(scale, axes)


def quantize_matrices(layer: dict) -> dict:
    """One layer's parameters with int8 matrices: `<name>_scale` has a scale for each output of the matrix."""
    quantized = dict(layer)
    for name in filter(layer.__contains__, _INPUT_AXES):
        if layer[name].dtype == jnp.int8:  # a frozen base may be int8 already
            continue
        quantized[name], quantized[f"{name}_scale"] = quantize(layer[name], _INPUT_AXES[name])
    return quantized


def in_this_step(constant: Any, changing: jax.Array) -> tuple[Any, jax.Array]:
    """Both arguments, in the body of a loop that leaves the first one unchanged.

    What is computed from a loop's constants alone XLA computes once, before the loop: int8 would be converted there,
    and every step would read the wide copy. Behind a barrier that what changes must pass as well, nothing is constant.
    """
    return lax.optimization_barrier((constant, changing))
