"""The key/value cache of decoding. In consecutive batches: a prefix of X columns per prompt, shared by its samples, and
a suffix of S per row, of which all rows write the same column. In slots (`cache_tokens`): C columns per row, which are
its positions. Layers with a window keep all columns, masked.

Keys are [.., E, S] and values [.., S, E]; kernels take keys as values (`key_axis`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh

from tango_jax.models.attention import MASKED, AttendFn, make_row_attention
from tango_jax.models.int8 import Quantized, in_this_step, quantize
from tango_jax.models.transformer import ModelConfig

Cached = jax.Array | Quantized
K_AXES, V_AXES = (-2, -1), (-1, -2)  # of E and S


@struct.dataclass
class Prefix:
    """Keys and values of P prompts, one array per layer."""

    k: tuple  # L x [P, K, E, X], or [P, K, X, E] for a kernel
    v: tuple  # L x [P, K, X, E]
    length_P: jax.Array  # int32, tokens of each prompt


@struct.dataclass
class Suffix:
    """Keys and values of the new tokens of B = P x M rows, one array per layer."""

    k: tuple  # L x [B, K, E, S], or [B, K, S, E] for a kernel
    v: tuple  # L x [B, K, S, E]


def key_axis(config: ModelConfig) -> int:
    """The axis of S in a cache of keys. For values it is -2."""
    return -1 if config.decode_attention == "xla" else -2


def init_suffix(config: ModelConfig, rows: int, length: int) -> Suffix:
    K, E, dtype = config.num_kv_heads, config.head_dim, jnp.dtype(config.sample_cache_dtype or config.compute_dtype)

    def zeros(*shape: int) -> Cached:
        values = jnp.zeros((rows, K, *shape), dtype)
        return Quantized(values, jnp.zeros((rows, K, length), jnp.float32)) if config.sample_cache_dtype else values

    k_shape, layers = (E, length) if key_axis(config) == -1 else (length, E), range(config.num_layers)
    return Suffix(k=tuple(zeros(*k_shape) for _ in layers), v=tuple(zeros(length, E) for _ in layers))


def map_columns(
    fn: Callable[[jax.Array, int], jax.Array], k: Cached, v: Cached, key_axis: int = -1
) -> tuple[Cached, Cached]:
    """`fn(array, axis of S)` of keys and values."""

    def mapped(cached: Cached, axis: int) -> Cached:
        if isinstance(cached, Quantized):
            return Quantized(fn(cached.value, axis), fn(cached.scale, -1))
        return fn(cached, axis)

    return mapped(k, key_axis), mapped(v, V_AXES[1])


def fit_columns(length: int, k: Cached, v: Cached, key_axis: int = -1) -> tuple[Cached, Cached]:
    """Cut to S = `length`, or padded with zeros."""

    def fit(x: jax.Array, axis: int) -> jax.Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, max(0, length - x.shape[axis]))
        return jnp.pad(lax.slice_in_dim(x, 0, min(length, x.shape[axis]), axis=axis % x.ndim), widths)

    return map_columns(fit, k, v, key_axis)


def make_prefill_attention(
    implementation: str = "xla", mesh: Mesh | None = None, key_axis: int = -1, is_int8: bool = False, window: int = 0
) -> AttendFn:
    """Causal `attend_fn` of right-padded prompts; its cache is (k, v). `is_int8` rounds only what enters the cache."""
    key_order = (0, 2, 3, 1) if key_axis == -1 else (0, 2, 1, 3)
    row_fn = make_row_attention(None, None, implementation, mesh, window)

    def attend_fn(q_BTHE: jax.Array, k_BTKE: jax.Array, v_BTKE: jax.Array) -> tuple[jax.Array, tuple]:
        out_BTHE = row_fn(q_BTHE, k_BTKE, v_BTKE)
        k, v_BKSE = k_BTKE.transpose(key_order), v_BTKE.transpose(0, 2, 1, 3)
        if is_int8:
            return out_BTHE, (Quantized(*quantize(k, K_AXES[0])), Quantized(*quantize(v_BKSE, V_AXES[0])))
        return out_BTHE, (k, v_BKSE)

    return attend_fn


def _write(cached: Cached, new: jax.Array, axes: tuple[int, int], column: jax.Array) -> Cached:
    """Write each row's new key or value, [B, K, E, 1] or [B, K, 1, E], in this column, or in a column for each row."""
    embed_axis, column_axis = axes

    def write(x: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        if column.ndim == 0:
            return lax.dynamic_update_slice_in_dim(x, new, column, axis)
        return jax.vmap(lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new, at, axis))(x, new, column)

    if isinstance(cached, Quantized):
        value, scale = quantize(new, embed_axis)
        return Quantized(write(cached.value, value, column_axis), write(cached.scale, scale, -1))
    return write(cached, new, column_axis)


def _factor(cached: Cached, dtype: jnp.dtype) -> jax.Array:
    """XLA converts int8 as the product reads it."""
    return cached.value.astype(dtype) if isinstance(cached, Quantized) else cached


def _scores(q_BKGE: jax.Array, k_BKES: Cached) -> jax.Array:
    """float32 [B, K, G, S], or [P, K, W, X] of a prefix."""
    scores_BKGS = jnp.matmul(q_BKGE, _factor(k_BKES, q_BKGE.dtype), preferred_element_type=jnp.float32)
    return scores_BKGS * k_BKES.scale[:, :, None, :] if isinstance(k_BKES, Quantized) else scores_BKGS


def _weights(weight_BKGS: jax.Array, v_PKSE: Cached, dtype: jnp.dtype) -> jax.Array:
    """Attention weights, times the scales of int8 values. For a suffix P is B."""
    if isinstance(v_PKSE, Quantized):
        scale_BKS = jnp.repeat(v_PKSE.scale, weight_BKGS.shape[0] // v_PKSE.shape[0], axis=0)
        weight_BKGS *= scale_BKS[:, :, None, :]
    return weight_BKGS.astype(dtype)


def make_decode_attention(
    prefix_k_PKEX: Cached,
    prefix_v_PKXE: Cached,
    prefix_mask_PX: jax.Array,
    suffix_k_BKES: Cached,
    suffix_v_BKSE: Cached,
    column: jax.Array,
    is_own_1S: jax.Array,
    is_near_BX: jax.Array | None = None,
) -> AttendFn:
    """`attend_fn` for one new token per row; its cache is the updated suffix pair.

    Two products under one softmax: joining prefix and suffix would copy every prompt's cache M times. Each row writes
    suffix `column` and attends to `is_own_1S` (with the new column) and, in a layer with a window, `is_near_BX`.
    """

    def attend_fn(q_B1HE: jax.Array, k_B1KE: jax.Array, v_B1KE: jax.Array) -> tuple[jax.Array, tuple]:
        B, _, H, E = q_B1HE.shape
        P, K, _, X = prefix_k_PKEX.shape
        G, M = H // K, B // P
        # One slice for all rows, which XLA writes in place.
        new_k_BKES = _write(suffix_k_BKES, k_B1KE.transpose(0, 2, 3, 1), K_AXES, column)
        new_v_BKSE = _write(suffix_v_BKSE, v_B1KE.transpose(0, 2, 1, 3), V_AXES, column)
        prefix_k, prefix_v = prefix_k_PKEX, prefix_v_PKXE
        if isinstance(prefix_k, Quantized):
            (prefix_k, prefix_v), q_B1HE = in_this_step((prefix_k, prefix_v), q_B1HE)
        q_BKGE = q_B1HE.reshape(B, K, G, E) * jnp.asarray(E**-0.5, q_B1HE.dtype)

        # M samples x G query heads are the W rows of one product: the cache is read once per prompt.
        q_PKWE = q_BKGE.reshape(P, M, K, G, E).transpose(0, 2, 1, 3, 4).reshape(P, K, M * G, E)
        prefix_PKWX = _scores(q_PKWE, prefix_k)
        prefix_PKWX = jnp.where(prefix_mask_PX[:, None, None, :], prefix_PKWX, MASKED)
        prefix_BKGX = prefix_PKWX.reshape(P, K, M, G, X).transpose(0, 2, 1, 3, 4).reshape(B, K, G, X)
        if is_near_BX is not None:
            prefix_BKGX = jnp.where(is_near_BX[:, None, None, :], prefix_BKGX, MASKED)
        suffix_BKGS = _scores(q_BKGE, new_k_BKES)
        # Other columns are zero or left by an earlier row.
        suffix_BKGS = jnp.where(is_own_1S[:, None, None, :], suffix_BKGS, MASKED)

        # One softmax over both parts.
        top_BKG1 = jnp.maximum(prefix_BKGX.max(-1, keepdims=True), suffix_BKGS.max(-1, keepdims=True))
        prefix_BKGX, suffix_BKGS = jnp.exp(prefix_BKGX - top_BKG1), jnp.exp(suffix_BKGS - top_BKG1)
        total_BKG1 = prefix_BKGX.sum(-1, keepdims=True) + suffix_BKGS.sum(-1, keepdims=True)
        prefix_BKGX = _weights(prefix_BKGX / total_BKG1, prefix_v, q_B1HE.dtype)
        suffix_BKGS = _weights(suffix_BKGS / total_BKG1, new_v_BKSE, q_B1HE.dtype)

        prefix_PKWX = prefix_BKGX.reshape(P, M, K, G, X).transpose(0, 2, 1, 3, 4).reshape(P, K, M * G, X)
        out_PKWE = jnp.matmul(prefix_PKWX, _factor(prefix_v, q_B1HE.dtype))
        out_BKGE = out_PKWE.reshape(P, K, M, G, E).transpose(0, 2, 1, 3, 4).reshape(B, K, G, E)
        out_BKGE = out_BKGE + jnp.matmul(suffix_BKGS, _factor(new_v_BKSE, q_B1HE.dtype))
        return out_BKGE.reshape(B, 1, H, E), (new_k_BKES, new_v_BKSE)

    return attend_fn


def make_slot_attention(
    k_BKEC: Cached,
    v_BKCE: Cached,
    position_B: jax.Array,
    is_seen_BC: jax.Array | None = None,
    part_fn: Callable | None = None,
    length_B: jax.Array | None = None,
) -> AttendFn:
    """`attend_fn` for one new token per row, which is written in the column of its position; its cache is the updated
    pair. Attends to `is_seen_BC` or, by a kernel that takes keys as values (`part_fn`), to the first `length_B`."""

    def attend_fn(q_B1HE: jax.Array, k_B1KE: jax.Array, v_B1KE: jax.Array) -> tuple[jax.Array, tuple]:
        B, _, H, E = q_B1HE.shape
        v = _write(v_BKCE, v_B1KE.transpose(0, 2, 1, 3), V_AXES, position_B)
        q_BKGE = q_B1HE.reshape(B, k_B1KE.shape[2], -1, E)
        if part_fn:
            k = _write(k_BKEC, k_B1KE.transpose(0, 2, 1, 3), V_AXES, position_B)
            out_BKGE = part_fn(q_BKGE, k, v, length_B)[0].astype(q_B1HE.dtype)
            return out_BKGE.reshape(B, 1, H, E), (k, v)
        k = _write(k_BKEC, k_B1KE.transpose(0, 2, 3, 1), K_AXES, position_B)
        scores_BKGC = _scores(q_BKGE * jnp.asarray(E**-0.5, q_B1HE.dtype), k)
        weight_BKGC = jax.nn.softmax(jnp.where(is_seen_BC[:, None, None, :], scores_BKGC, MASKED), axis=-1)
        weight_BKGC = _weights(weight_BKGC, v, q_B1HE.dtype)
        return jnp.matmul(weight_BKGC, _factor(v, q_B1HE.dtype)).reshape(B, 1, H, E), (k, v)

    return attend_fn
