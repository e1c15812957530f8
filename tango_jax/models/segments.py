"""Segments of a packed row, numbered from 1; 0 is padding.

A segment is a whole sequence, a prompt, or a response to the last prompt before it.
"""

import jax
import jax.numpy as jnp
from jax import lax

STARTS = 512


def segment_start(segment_BT: jax.Array) -> jax.Array:
    """int32[B, T]: index of the first token of each token's segment."""
    index_T = jnp.arange(segment_BT.shape[1], dtype=jnp.int32)
    is_first_BT = jnp.pad(segment_BT[:, 1:] != segment_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return lax.cummax(jnp.where(is_first_BT, index_T[None], 0), axis=1)


def prompt_end(segment_BT: jax.Array, prompt_BT: jax.Array) -> jax.Array:
    """int32[B, T]: the column after the prompt that a token's segment continues, where its first response begins; 0
    where it continues none. prompt_BT: Batch.prompt_NZRT."""
    index_T = jnp.arange(segment_BT.shape[1], dtype=jnp.int32)
    is_prompt_BT = (segment_BT > 0) & (prompt_BT == 0)
    return jnp.where(prompt_BT > 0, lax.cummax(jnp.where(is_prompt_BT, index_T[None] + 1, 0), axis=1), 0)


def response_alignment(row_length: int) -> int:
    """Responses that continue a prompt of their row begin at multiples of this: at most STARTS different columns, so
    that a mask needs few bits to name one (splash.py)."""
    return -(-row_length // STARTS)
