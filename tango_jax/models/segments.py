"""Segments: the sequences of a packed row, numbered from 1; 0 is padding."""

import jax
import jax.numpy as jnp
from jax import lax


def segment_start(segment_BT: jax.Array) -> jax.Array:
    """int32[B, T]: index of the first token of each token's segment."""
    index_T = jnp.arange(segment_BT.shape[1], dtype=jnp.int32)
    is_first_BT = jnp.pad(segment_BT[:, 1:] != segment_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return lax.cummax(jnp.where(is_first_BT, index_T[None], 0), axis=1)
