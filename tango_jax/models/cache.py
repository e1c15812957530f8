"""The key/value cache of decoding, in two parts: a prefix per prompt, shared by its samples, and a suffix per row.

The prefix is written once by prefill. The suffix holds the new tokens; all rows write the same of its columns, so a
decode step writes one slice instead of scattering per row. Keys are stored [.., E, S] and values [.., S, E]: the
layouts in which both products of attention read contiguous memory; the kernels of decode_attention.py take keys as
values lie (`key_axis`). S is the prompt bucket in the prefix and the cache bucket in the suffix.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh

from tango_jax.models.attention import MASKED, AttendFn, make_row_attention
from tango_jax.models.transformer import ModelConfig


@struct.dataclass
class Prefix:
    """Keys and values of the prompts (P of them, S = prompt bucket), one array per layer."""

    k: tuple  # L x [P, K, E, S], or [P, K, S, E] for a kernel
    v: tuple  # L x [P, K, S, E]
    length_P: jax.Array  # int32, tokens of each prompt


@struct.dataclass
class Suffix:
    """Keys and values of the new tokens (B = P x M rows, S = cache bucket), one array per layer."""

    k: tuple  # L x [B, K, E, S], or [B, K, S, E] for a kernel
    v: tuple  # L x [B, K, S, E]


def key_axis(config: ModelConfig) -> int:
    """The axis of S in a cache of keys, counted from the end; in one of values it is -2."""
    return -1 if config.decode_attention == "xla" else -2


def init_suffix(config: ModelConfig, rows: int, length: int) -> Suffix:
    K, E, dtype = config.num_kv_heads, config.head_dim, jnp.dtype(config.compute_dtype)
    layers = range(config.num_layers)
    key_shape = (E, length) if key_axis(config) == -1 else (length, E)
    return Suffix(
        k=tuple(jnp.zeros((rows, K, *key_shape), dtype) for _ in layers),
        v=tuple(jnp.zeros((rows, K, length, E), dtype) for _ in layers),
    )


def make_prefill_attention(implementation: str = "xla", mesh: Mesh | None = None, key_axis: int = -1) -> AttendFn:
    """`attend_fn` of prefill: causal attention within each right-padded prompt; its cache result is (k, v)."""
    key_order = (0, 2, 3, 1) if key_axis == -1 else (0, 2, 1, 3)
    row_fn = make_row_attention(None, None, implementation, mesh)

    def attend_fn(q_BTHE: jax.Array, k_BTKE: jax.Array, v_BTKE: jax.Array) -> tuple[jax.Array, tuple]:
        out_BTHE = row_fn(q_BTHE, k_BTKE, v_BTKE)
        return out_BTHE, (k_BTKE.transpose(key_order), v_BTKE.transpose(0, 2, 1, 3))

    return attend_fn


def make_decode_attention(
    prefix_k_PKES: jax.Array,
    prefix_v_PKSE: jax.Array,
    prefix_mask_PS: jax.Array,
    suffix_k_BKES: jax.Array,
    suffix_v_BKSE: jax.Array,
    column: jax.Array,
    is_own_BS: jax.Array,
) -> AttendFn:
    """`attend_fn` for one new token per row; its cache result is the updated suffix pair.

    Attention over prefix and suffix is two products, because the prefix has one set of keys per prompt and the suffix
    one per row: joining them would copy every prompt's cache M times. The softmax runs over both together, so the
    result is that of plain attention.

    Args:
        column: of the suffix, where every row's new key and value are written.
        is_own_BS: the columns that a row attends to, the new one among them.
    """

    def attend_fn(q_B1HE: jax.Array, k_B1KE: jax.Array, v_B1KE: jax.Array) -> tuple[jax.Array, tuple]:
        B, _, H, E = q_B1HE.shape
        P, K, _, S = prefix_k_PKES.shape
        G, M = H // K, B // P
        # All rows write the same column, so this is one slice for all of them, which XLA writes in place.
        new_k_BKES = lax.dynamic_update_slice(suffix_k_BKES, k_B1KE.transpose(0, 2, 3, 1), (0, 0, 0, column))
        new_v_BKSE = lax.dynamic_update_slice(suffix_v_BKSE, v_B1KE.transpose(0, 2, 1, 3), (0, 0, column, 0))
        q_BKGE = q_B1HE.reshape(B, K, G, E) * jnp.asarray(E**-0.5, q_B1HE.dtype)

        # The M samples of a prompt, and the G query heads of a key head, are rows of one product with the keys they
        # share (X = M x G): the prompt's cache is read once per prompt, not once per row.
        q_PKXE = q_BKGE.reshape(P, M, K, G, E).transpose(0, 2, 1, 3, 4).reshape(P, K, M * G, E)
        prefix_PKXS = jnp.matmul(q_PKXE, prefix_k_PKES, preferred_element_type=jnp.float32)
        prefix_PKXS = jnp.where(prefix_mask_PS[:, None, None, :], prefix_PKXS, MASKED)
        prefix_BKGS = prefix_PKXS.reshape(P, K, M, G, S).transpose(0, 2, 1, 3, 4).reshape(B, K, G, S)
        suffix_BKGS = jnp.matmul(q_BKGE, new_k_BKES, preferred_element_type=jnp.float32)
        # A column that is not the row's own has a score like any other: it is zero, or was left by an earlier row.
        suffix_BKGS = jnp.where(is_own_BS[:, None, None, :], suffix_BKGS, MASKED)

        # One softmax over both parts by hand: the larger of their maxima, and the sum of their normalisers.
        top_BKG1 = jnp.maximum(prefix_BKGS.max(-1, keepdims=True), suffix_BKGS.max(-1, keepdims=True))
        prefix_BKGS, suffix_BKGS = jnp.exp(prefix_BKGS - top_BKG1), jnp.exp(suffix_BKGS - top_BKG1)
        total_BKG1 = prefix_BKGS.sum(-1, keepdims=True) + suffix_BKGS.sum(-1, keepdims=True)
        prefix_BKGS = (prefix_BKGS / total_BKG1).astype(q_B1HE.dtype)
        suffix_BKGS = (suffix_BKGS / total_BKG1).astype(q_B1HE.dtype)

        prefix_PKXS = prefix_BKGS.reshape(P, M, K, G, S).transpose(0, 2, 1, 3, 4).reshape(P, K, M * G, S)
        out_PKXE = jnp.matmul(prefix_PKXS, prefix_v_PKSE)
        out_BKGE = out_PKXE.reshape(P, K, M, G, E).transpose(0, 2, 1, 3, 4).reshape(B, K, G, E)
        out_BKGE = out_BKGE + jnp.matmul(suffix_BKGS, new_v_BKSE)
        return out_BKGE.reshape(B, 1, H, E), (new_k_BKES, new_v_BKSE)

    return attend_fn
