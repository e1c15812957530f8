"""Rotary positions. `config` is a ModelConfig of transformer.py, which imports this file."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Rope = tuple[jax.Array, jax.Array]  # sine and cosine of every position
Ropes = tuple[Rope | None, ...]  # for each kind in ModelConfig.pattern; None: it rotates nothing


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling, or linear scaling (Gemma 3) without an `original_max_position`."""

    factor: float
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position: int = 0


def rope_frequencies(config: Any, kind: Any = None) -> np.ndarray:
    """Angular frequencies, float32 [E/2], of the model or of a LayerKind."""
    own = config if kind is None or kind.rope_base is None else kind
    base, scaling = own.rope_base, own.rope_scaling
    # Rounded as in PyTorch: one unit in the last place is 3e-4 radians at position 5000.
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequency = 1 / np.power(base, exponent.astype(np.float64)).astype(np.float32)
    if scaling is None:
        return frequency
    if not scaling.original_max_position:
        return frequency / np.float32(scaling.factor)
    wavelength = 2 * math.pi / frequency
    ratio = scaling.original_max_position / wavelength
    band = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((ratio - scaling.low_freq_factor) / band, 0.0, 1.0)
    return keep * frequency + (1 - keep) * frequency / scaling.factor


def rope_tables(config: Any, position_BT: jax.Array) -> Ropes:
    """Sine and cosine of every position, float32[B, T, 1, E/2], for each kind of layer in `config.pattern`."""
    tables = {}
    for kind in config.pattern:
        key = kind.rope_base, kind.rope_scaling
        if kind.rope_base == 0:
            tables[key] = None
        elif key not in tables:
            angle = position_BT[..., None].astype(jnp.float32) * rope_frequencies(config, kind)[None, None, :]
            tables[key] = jnp.sin(angle)[:, :, None, :], jnp.cos(angle)[:, :, None, :]
    return tuple(tables[kind.rope_base, kind.rope_scaling] for kind in config.pattern)


def apply_rope(x_BTHE: jax.Array, rope: Rope | None) -> jax.Array:
    """Rotate the two halves of the head dim (Hugging Face's convention, not interleaved pairs)."""
    if rope is None:
        return x_BTHE
    sin, cos = rope
    first, second = jnp.split(x_BTHE.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHE.dtype)
