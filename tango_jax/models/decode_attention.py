"""Attention of one new token per row by kernels that read only the filled part of the cache.

    xla      `cache.make_decode_attention`: any platform; reads both buckets whole
    cudnn    NVIDIA GPUs
    paged    TPUs (paged.py)

A slot (`cache_tokens`) is attended at once; prefix and suffix of a plain batch are attended apart and joined by
`merge_parts`. Keys are [.., K, S, E], like values. Kernels take lengths only, so windows use xla.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from tango_jax.models.attention import AttendFn, capability_of, unsupported_reason

DECODE_ATTENTION_KINDS = ("auto", "xla", "cudnn", "paged")  # values of ModelConfig.decode_attention
PAGES = (256, 128, 64, 32, 16)  # columns that paged reads at a time: the largest of these that divides the bucket
LANES = 128  # numbers in a row of a TPU's registers: head_dim must fill them


def resolve_decode_attention(
    name: str,
    platform: str,
    compute_dtype: str,
    head_dim: int,
    buckets: Sequence[int],
    capability: float | None = None,
    cache_dtype: str = "",
    window: int = 0,
) -> str:
    """xla, cudnn or paged for ModelConfig.decode_attention; ValueError if a named one cannot run. Uses no device."""
    is_auto = name == "auto"
    if is_auto:
        name = {"gpu": "cudnn", "tpu": "paged"}.get(platform, "xla")
    reason = ""
    if name == "cudnn":
        reason = unsupported_reason(name, platform, compute_dtype, head_dim, capability)
    elif name == "paged":
        reason = _unsupported_by_paged(platform, compute_dtype, head_dim, buckets)
    if name != "xla" and cache_dtype and not reason:
        reason = f"reads keys and values of compute_dtype, and sample_cache_dtype={cache_dtype}"
    if name != "xla" and window and not reason:
        reason = f"reads a cache from its first column on, and some layers see only the last {window} tokens"
    if reason and not is_auto:
        raise ValueError(
            f"model.decode_attention={name} {reason}: use auto (what the machine has) or xla (runs everywhere)"
        )
    return "xla" if reason else name


def _unsupported_by_paged(platform: str, compute_dtype: str, head_dim: int, buckets: Sequence[int]) -> str:
    if platform != "tpu":
        return f"runs on a tpu, and the devices are of platform {platform}"
    if compute_dtype != "bfloat16":
        return f"computes in bfloat16, and compute_dtype is {compute_dtype}"
    if head_dim % LANES:
        return f"takes a head_dim that is a multiple of {LANES}, and it is {head_dim}"
    odd = [bucket for bucket in buckets if bucket % PAGES[-1]]
    if odd:
        return f"takes caches of a multiple of {PAGES[-1]} columns, and one has {odd[0]}"
    return ""


def decode_attention_of(config: Any, buckets: Sequence[int], device: jax.Device) -> str:
    """`resolve_decode_attention` for a device, perhaps only a planned one."""
    return resolve_decode_attention(
        config.decode_attention, device.platform, config.compute_dtype, config.head_dim, buckets,
        capability_of(device), config.sample_cache_dtype, max(config.windows),
    )


def attention_names(config: Any) -> str:
    decoding = "" if config.decode_attention == "xla" else f" (of decode steps: {config.decode_attention})"
    return f"{config.attention}{decoding}"


def page_size(bucket: int) -> int:
    """Columns that paged reads at a time."""
    return next(page for page in PAGES if bucket % page == 0)


def merge_parts(
    first_out: jax.Array, first_lse: jax.Array, second_out: jax.Array, second_lse: jax.Array
) -> jax.Array:
    """Attention over two parts of the keys, from attention over each: float32 [.., E].

    With lse = log sum exp(s_i) of a part's scaled scores (section 3.1.1 of FlashAttention-2, arXiv 2307.08691),

        out = (exp(lse_1) out_1 + exp(lse_2) out_2) / (exp(lse_1) + exp(lse_2))

    that is, weight sigmoid(lse_1 - lse_2) for the first, which cannot overflow. Without keys lse is -inf.
    """
    first_lse, second_lse = (lse.astype(jnp.float32)[..., None] for lse in (first_lse, second_lse))
    # -inf minus itself is NaN.
    gap = jnp.where(first_lse == second_lse, 0.0, first_lse - second_lse)
    return jax.nn.sigmoid(gap) * first_out.astype(jnp.float32) + jax.nn.sigmoid(-gap) * second_out.astype(jnp.float32)


def make_part_attention(implementation: str, mesh: Mesh | None) -> Any:
    """(q_BKWE, k_BKSE, v_BKSE, length_B >= 1) -> (out_BKWE, float32 lse_BKW). `mesh` splits the kernel."""
    if implementation == "cudnn":
        part_fn = _cudnn_part
    elif implementation == "paged":
        from tango_jax.models import paged  # here, because no other platform needs Pallas

        def part_fn(q_BKWE: jax.Array, k_BKSE: jax.Array, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
            return paged.attend_part(q_BKWE, k_BKSE, *rest, page_size(k_BKSE.shape[2]))

    else:
        raise ValueError(f"decode attention {implementation!r} is none of {', '.join(DECODE_ATTENTION_KINDS[2:])}")
    if mesh is None or mesh.size == 1:
        return part_fn
    heads, rows = PartitionSpec("rows", "tensor"), PartitionSpec("rows")
    # Kernels do not declare what varies over which axes.
    return jax.shard_map(part_fn, mesh=mesh, in_specs=(heads, heads, heads, rows), out_specs=heads, check_vma=False)


def _cudnn_part(
    q_BKWE: jax.Array, k_BKSE: jax.Array, v_BKSE: jax.Array, length_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # `jax.nn.dot_product_attention` rounds the log-sum-exp to its result's dtype: in bfloat16 up to 3 % of a weight.
    # The compiled program kept the error, so cuDNN is called directly.
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    B, K, W, E = q_BKWE.shape
    # Each key head is a sequence with one head, its W queries are tokens: no transpose, and keys are read once.
    q, k, v = (x.reshape(B * K, -1, 1, E) for x in (q_BKWE, k_BKSE, v_BKSE))
    length = jnp.repeat(length_B, K)
    out, lse = cudnn.dot_product_attention(
        q, k, v, q_seqlen=jnp.full_like(length, W), kv_seqlen=length, scale=1 / math.sqrt(E),
        mask_type=cudnn.MaskType.PADDING, return_residual=True,
    )
    return out.reshape(B, K, W, E), lse.reshape(B, K, W)


def make_skipping_decode_attention(
    prefix_k_PKXE: jax.Array,
    prefix_v_PKXE: jax.Array,
    prompt_length_P: jax.Array,
    suffix_k_BKSE: jax.Array,
    suffix_v_BKSE: jax.Array,
    column: jax.Array,
    length_B: jax.Array,
    implementation: str,
    mesh: Mesh | None = None,
) -> AttendFn:
    """`attend_fn` for one new token per row; its cache is the updated suffix pair.

    Rows read `prompt_length_P` prefix columns and `length_B` suffix columns, both at least 1, with the new `column`.
    """
    part_fn = make_part_attention(implementation, mesh)

    def attend_fn(q_B1HE: jax.Array, k_B1KE: jax.Array, v_B1KE: jax.Array) -> tuple[jax.Array, tuple]:
        B, _, H, E = q_B1HE.shape
        P, K = prefix_k_PKXE.shape[:2]
        G, M = H // K, B // P
        new_k_BKSE, new_v_BKSE = (
            lax.dynamic_update_slice(cache, new.swapaxes(1, 2), (0, 0, column, 0))
            for cache, new in ((suffix_k_BKSE, k_B1KE), (suffix_v_BKSE, v_B1KE))
        )
        q_BKGE = q_B1HE.reshape(B, K, G, E)
        # W = M x G: the samples of a prompt share its keys.
        q_PKWE = q_BKGE.reshape(P, M, K, G, E).swapaxes(1, 2).reshape(P, K, M * G, E)
        of_prefix = part_fn(q_PKWE, prefix_k_PKXE, prefix_v_PKXE, prompt_length_P)
        of_suffix = part_fn(q_BKGE, new_k_BKSE, new_v_BKSE, length_B)
        prefix_out, prefix_lse = (
            x.reshape(P, K, M, G, *x.shape[3:]).swapaxes(1, 2).reshape(B, K, G, *x.shape[3:]) for x in of_prefix
        )
        out_BKGE = merge_parts(prefix_out, prefix_lse, *of_suffix).astype(q_B1HE.dtype)
        return out_BKGE.reshape(B, 1, H, E), (new_k_BKSE, new_v_BKSE)

    return attend_fn
