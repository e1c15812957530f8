"""Attention of one new token per row by cuDNN on NVIDIA GPUs, which reads only that part of the cache which is there.

Prefix and suffix are attended apart, as only the prefix is shared by the samples of a prompt, and `merge_parts` makes
of both what one softmax over all columns gives. Plain attention, which runs anywhere and reads both buckets whole, is
in cache.py (`model.decode_attention=xla`).

The kernel is told how many columns a row sees, counted from the first. So it serves neither layers with a window nor a
budget of cached tokens, with which a row begins in any column of a ring.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from tango_jax.models.attention import AttendFn, capability_of, unsupported_reason

DECODE_ATTENTION_KINDS = ("auto", "xla", "cudnn")  # values of ModelConfig.decode_attention
TILE = 128  # columns that cuDNN is taken to read at a time, which it does not publish


def resolve_decode_attention(
    name: str,
    platform: str,
    compute_dtype: str,
    head_dim: int,
    cache_tokens: int,
    capability: float | None = None,
    cache_dtype: str = "",
    window: int = 0,
) -> str:
    """What ModelConfig.decode_attention = `name` stands for: xla or cudnn. Looks at no device.

    Args:
        platform, capability: see `attention.resolve_attention`.
        cache_tokens: the sampler's budget; 0: none.
        cache_dtype: of keys and values, if it is not compute_dtype.
        window: tokens that a query of some layers sees; 0: every layer sees all.

    Raises:
        ValueError: cudnn is named and cannot run there.
    """
    reason = unsupported_reason("cudnn", platform, compute_dtype, head_dim, capability)
    if cache_tokens and not reason:
        reason = f"needs rows that begin together, and cache_tokens={cache_tokens} refills a batch as rows end"
    if cache_dtype and not reason:
        reason = f"reads keys and values of compute_dtype, and sample_cache_dtype={cache_dtype}"
    if window and not reason:
        reason = f"reads a cache from its first column on, and some layers see only the last {window} tokens"
    if name == "cudnn" and reason:
        raise ValueError(
            f"model.decode_attention={name} {reason}: use auto (what the machine has) or xla (runs everywhere)"
        )
    return "xla" if name == "xla" or reason else "cudnn"


def decode_attention_of(config: Any, cache_tokens: int, device: jax.Device) -> str:
    """The implementation of a ModelConfig on a device, which may only be planned for. Raises ValueError."""
    return resolve_decode_attention(
        config.decode_attention, device.platform, config.compute_dtype, config.head_dim, cache_tokens,
        capability_of(device), config.sample_cache_dtype, max(config.windows),
    )  # fmt: skip


def attention_names(config: Any) -> str:
    """The implementations of a ModelConfig, for a line of text."""
    decoding = "" if config.decode_attention == "xla" else f" (of decode steps: {config.decode_attention})"
    return f"{config.attention}{decoding}"


def columns_read(implementation: str, length: np.ndarray, bucket: int) -> np.ndarray:
    """Columns of the cache that are read where `length` of `bucket` are there: all of them, or whole tiles."""
    if implementation == "xla":
        return np.full_like(length, bucket)
    return np.minimum(bucket, -(-np.maximum(length, 1) // TILE) * TILE)


def merge_parts(
    first_out: jax.Array, first_lse: jax.Array, second_out: jax.Array, second_lse: jax.Array
) -> jax.Array:
    """Attention over the keys of two parts from attention over each, float32: with a part's scores s_i and values v_i,
    lse = log sum exp(s_i) and out = sum exp(s_i - lse) v_i, both together give

        out = (exp(lse_1) out_1 + exp(lse_2) out_2) / (exp(lse_1) + exp(lse_2))

    which is a weight of sigmoid(lse_1 - lse_2) for the first: never an exponential of a large number (section 3.1.1 of
    FlashAttention-2, arXiv 2307.08691). A part without keys has lse = -inf and weight 0, if its `out` is finite.
    """
    first_lse, second_lse = (lse.astype(jnp.float32)[..., None] for lse in (first_lse, second_lse))
    # Equal ones apart: -inf minus itself is NaN.
    gap = jnp.where(first_lse == second_lse, 0.0, first_lse - second_lse)
    return jax.nn.sigmoid(gap) * first_out.astype(jnp.float32) + jax.nn.sigmoid(-gap) * second_out.astype(jnp.float32)


def attend_part(
    q_BKWE: jax.Array, k_BKSE: jax.Array, v_BKSE: jax.Array, length_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(out_BKWE, float32 log-sum-exp_BKW): W queries of each key head over its first columns, at least one."""
    # `jax.nn.dot_product_attention` rounds the log-sum-exp to the dtype of its result. In bfloat16 that is an error of
    # up to 3 % of a weight, and the compiled program was seen to keep it: so what it calls is called here.
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    B, K, W, E = q_BKWE.shape
    # Each key head is a sequence of its own, and the queries that share it are its tokens, none of which is later than
    # another: cuDNN's [B, S, K, E] with one head. Thus nothing is transposed, and keys are read once for all of them.
    q, k, v = (x.reshape(B * K, -1, 1, E) for x in (q_BKWE, k_BKSE, v_BKSE))
    length = jnp.repeat(length_B, K)
    out, lse = cudnn.dot_product_attention(
        q, k, v, q_seqlen=jnp.full_like(length, W), kv_seqlen=length, scale=1 / math.sqrt(E),
        mask_type=cudnn.MaskType.PADDING, return_residual=True,
    )  # fmt: skip
    return out.reshape(B, K, W, E), lse.reshape(B, K, W)


def make_skipping_decode_attention(
    prefix_k_PKXE: jax.Array,
    prefix_v_PKXE: jax.Array,
    prompt_length_P: jax.Array,
    suffix_k_BKSE: jax.Array,
    suffix_v_BKSE: jax.Array,
    column: jax.Array,
    length_B: jax.Array,
    mesh: Mesh | None = None,
) -> AttendFn:
    """`attend_fn` for one new token per row; its cache result is the updated suffix pair.

    Args:
        prompt_length_P: columns of the prefix that are read; at least 1.
        column: of the suffix, where every row's new key and value are written.
        length_B: columns of the suffix that a row attends to, from 0 on, the new one among them; at least 1.
        mesh: of arrays that XLA splits over devices, as it cannot do with a kernel.
    """
    part_fn = attend_part
    if mesh is not None and mesh.size > 1:
        heads, rows = PartitionSpec("rows", "tensor"), PartitionSpec("rows")
        # Without a check of what varies over which axes, since kernels do not say.
        part_fn = jax.shard_map(part_fn, mesh=mesh, in_specs=(heads,) * 3 + (rows,), out_specs=heads, check_vma=False)

    def attend_fn(q_B1HE: jax.Array, k_B1KE: jax.Array, v_B1KE: jax.Array) -> tuple[jax.Array, tuple]:
        B, _, H, E = q_B1HE.shape
        P, K = prefix_k_PKXE.shape[:2]
        G, M = H // K, B // P
        new_k_BKSE, new_v_BKSE = (
            lax.dynamic_update_slice(cache, new.swapaxes(1, 2), (0, 0, column, 0))
            for cache, new in ((suffix_k_BKSE, k_B1KE), (suffix_v_BKSE, v_B1KE))
        )
        q_BKGE = q_B1HE.reshape(B, K, G, E)
        # The M samples of a prompt are queries of the same keys: W = M x G.
        q_PKWE = q_BKGE.reshape(P, M, K, G, E).swapaxes(1, 2).reshape(P, K, M * G, E)
        of_prefix = part_fn(q_PKWE, prefix_k_PKXE, prefix_v_PKXE, prompt_length_P)
        of_suffix = part_fn(q_BKGE, new_k_BKSE, new_v_BKSE, length_B)
        prefix_out, prefix_lse = (
            x.reshape(P, K, M, G, *x.shape[3:]).swapaxes(1, 2).reshape(B, K, G, *x.shape[3:]) for x in of_prefix
        )
        out_BKGE = merge_parts(prefix_out, prefix_lse, *of_suffix).astype(q_B1HE.dtype)
        return out_BKGE.reshape(B, 1, H, E), (new_k_BKSE, new_v_BKSE)

    return attend_fn
