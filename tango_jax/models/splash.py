"""Attention on TPUs by jax's splash kernel: packed rows, and packed rows that continue a prefix, with gradients.

In: queries, keys and values of whole rows, and what `visible` made of their segments. Out: what `attention.attend`
gives, for real tokens. Stage: every layer of training, scoring and prefill, where `ModelConfig.attention` is splash.

The kernel's own means are a mask that is fixed when it is built, and segment ids, which must be EQUAL for a query to
see a key. Equality cannot say that several segments of a row all see the row's prefix but not each other. What can is
the function from which the kernel computes its mask block by block: it is given a number per query, by default the
query's index. Here, where there is a prefix, that number holds the first and the last own token that the query may
see. Segment ids then only tell tokens from padding. The kernel still skips the blocks that causality rules out.

Training runs under a `shard_map` that checks which values vary over which mesh axes. The kernel does not tell it, so
there it is kept apart (`_unchecked`), with a gradient of its own.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu import splash_attention as lib
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

BLOCKS = (512, 256, 128)  # tokens that a step of the kernel works on; lengths are padded to a multiple
MOST_PADDING = 1 / 8  # of the tokens, that a larger block may add
BITS = 15  # of a token's index in its row


@dataclasses.dataclass(frozen=True)
class OwnTokens:
    """The mask of a row with a prefix, computed inside the kernel: all of the prefix, and a range of own tokens."""

    prefix: int

    def __call__(self, range_, key):
        own = key - self.prefix
        return (own < 0) | ((own >= range_ >> BITS) & (own <= range_ & (1 << BITS) - 1))


def block_of(*lengths: int) -> int:
    """The largest block that does not pad too much."""
    for block in BLOCKS[:-1]:
        if sum(-length % block for length in lengths) <= MOST_PADDING * sum(lengths):
            return block
    return BLOCKS[-1]


def visible(segment_BT: jax.Array, is_prefix_BX: jax.Array | None) -> tuple:
    """What the kernel's masks are made of, padded to its blocks: (query segments, key segments, ranges or None)."""
    T = segment_BT.shape[1]
    if is_prefix_BX is None:
        segment_BT = _pad(segment_BT, block_of(T))
        return segment_BT, segment_BT, None
    if T > 1 << BITS:
        raise ValueError(f"a row of {T} tokens is longer than the {1 << BITS} of attention=splash: lower pack_length")
    block = block_of(is_prefix_BX.shape[1], T)
    segment_BT, is_prefix_BX = _pad(segment_BT, block), _pad(is_prefix_BX, block)
    index_T = jnp.arange(segment_BT.shape[1], dtype=jnp.int32)
    is_first_BT = jnp.pad(segment_BT[:, 1:] != segment_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    first_BT = lax.cummax(jnp.where(is_first_BT, index_T[None], 0), axis=1)
    is_token_BT = (segment_BT > 0).astype(jnp.int32)
    key_segment_BS = jnp.concatenate([is_prefix_BX.astype(jnp.int32), is_token_BT], axis=1)
    return is_token_BT, key_segment_BS, (first_BT << BITS) | index_T[None]


def attend(q_BTHE, k_BSKE, v_BSKE, seen: tuple | None, interpret: bool = False) -> jax.Array:
    """Grouped-query attention of T queries over S = X + T keys: [B, T, H, E].

    Args:
        seen: from `visible`; None: causal, X = 0.
        interpret: run in Pallas's interpreter, which needs no TPU.
    """
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        return _attend_apart(q_BTHE, k_BSKE, v_BSKE, seen, interpret)
    return _attend(q_BTHE, k_BSKE, v_BSKE, seen, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend_apart(q_BTHE, k_BSKE, v_BSKE, seen, interpret: bool):
    return _unchecked(lambda *args: _attend(*args, interpret), q_BTHE, k_BSKE, v_BSKE, seen)


def _forward(q_BTHE, k_BSKE, v_BSKE, seen, interpret: bool):
    def kernel_fn(q, k, v, seen):
        return jax.vjp(lambda q, k, v: _attend(q, k, v, seen, interpret), q, k, v)

    return _unchecked(kernel_fn, q_BTHE, k_BSKE, v_BSKE, seen)


def _backward(interpret: bool, pullback_fn: Callable, grad_BTHE) -> tuple:
    return *_unchecked(lambda grad, pullback_fn: pullback_fn(grad), grad_BTHE, pullback_fn), None


_attend_apart.defvjp(_forward, _backward)


def _unchecked(fn: Callable, first: jax.Array, *rest) -> Any:
    """fn(first, *rest) without a check of what varies over which mesh axes; all of the result does as `first`.

    A `shard_map` over no further axis ends the check. What is selected below is known when compiling: nothing remains
    of it. It only concerns types, which lose their axes on the way in and get those of `first` on the way out.
    """

    def forgetful(*args):
        return fn(*jax.tree.map(lambda leaf: jnp.where(True, leaf, jnp.zeros((), leaf.dtype)), args))

    out = jax.shard_map(forgetful, in_specs=P(), out_specs=P(), check_vma=False)(first, *rest)
    one = first.ravel()[0]
    return jax.tree.map(lambda leaf: jnp.where(True, leaf, one.astype(leaf.dtype)), out)


def _attend(q_BTHE, k_BSKE, v_BSKE, seen: tuple | None, interpret: bool) -> jax.Array:
    T, E = q_BTHE.shape[1], q_BTHE.shape[3]
    X = k_BSKE.shape[1] - T
    block = block_of(X, T) if X else block_of(T)
    q_BHTE = _pad(q_BTHE * jnp.asarray(E**-0.5, q_BTHE.dtype), block).swapaxes(1, 2)
    k_BKSE, v_BKSE = (
        jnp.concatenate([_pad(x[:, :X], block), _pad(x[:, X:], block)], axis=1).swapaxes(1, 2)
        for x in (k_BSKE, v_BSKE)
    )
    kernel = _kernel(q_BHTE.shape[1], q_BHTE.shape[2], k_BKSE.shape[2], block, interpret)

    def attend_row(q_HTE, k_KSE, v_KSE, seen):
        if seen is None:
            return kernel(q_HTE, k_KSE, v_KSE)
        query_segment_T, key_segment_S, range_T = seen
        row_kernel = kernel if range_T is None else _with_ranges(kernel, range_T, k_KSE.shape[1] - q_HTE.shape[1])
        return row_kernel(q_HTE, k_KSE, v_KSE, lib.SegmentIds(query_segment_T, key_segment_S))

    return jax.vmap(attend_row)(q_BHTE, k_BKSE, v_BKSE, seen).swapaxes(1, 2)[:, :T]


def _kernel(heads: int, queries: int, keys: int, block: int, interpret: bool):
    """The kernel with a causal mask whose diagonal ends at the last key."""
    mask = lib.MultiHeadMask([lib.CausalMask((queries, keys), offset=keys - queries)] * heads)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes = lib.BlockSizes(**dict.fromkeys(names, block))
    return lib.make_splash_mha_single_device(mask, block_sizes=sizes, interpret=interpret)


def _with_ranges(kernel, range_T: jax.Array, prefix: int):
    """The same blocks, with `OwnTokens` as the mask inside them."""
    infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    settings = kernel.kwargs | {"mask_function": OwnTokens(prefix)}
    return type(kernel)(*(info._replace(q_sequence=range_T) for info in infos), **settings)


def _pad(x_BT: jax.Array, block: int) -> jax.Array:
    """Axis 1 padded with zeros to a multiple of the block."""
    return jnp.pad(x_BT, [(0, 0), (0, -x_BT.shape[1] % block)] + [(0, 0)] * (x_BT.ndim - 2))
