"""Attention on TPUs by jax's splash kernel: packed rows, with or without a prefix, with gradients.

A query sees only keys with its segment id, so segments could not share a prompt. Instead a mask is computed per block
from columns that each query sees; segment ids mark padding, or what belongs to one prompt. The kernel does not declare
vma (what varies over mesh axes), so it runs without that check of `shard_map`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as lib
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tango_jax.models.segments import STARTS, prompt_end, response_alignment, segment_start

BLOCK_SIZES = (512, 256, 128)  # tokens that a step of the kernel works on; lengths are padded to a multiple
MAX_PADDING_SHARE = 1 / 8  # of the tokens, that a larger block may add
INDEX_BITS = 15  # of a token's index in its row, so that two of them fit the one int32 that a query has
START_BITS = STARTS.bit_length() - 1  # of a column where responses may begin, so that two fit beside an index
JOINED_BITS = 32 - 2 * START_BITS

MaskInputs = tuple[jax.Array, jax.Array, jax.Array | None]  # segments of queries, of keys, and ranges of tokens


@dataclasses.dataclass(frozen=True)
class PrefixAndSegment:
    """The mask inside the kernel: all of a prefix, and a range of row tokens."""

    prefix: int
    window: int = 0

    def __call__(self, range_: jax.Array, key: jax.Array) -> jax.Array:
        token, first, last = key - self.prefix, range_ >> INDEX_BITS, range_ & (1 << INDEX_BITS) - 1
        if not self.window:
            return (token < 0) | ((token >= first) & (token <= last))
        # The columns before the row are the tokens before any of its segments.
        own = (token >= first) & (token <= last) & (last - token < self.window)
        return own | ((token < 0) & (last - first - token < self.window))


@dataclasses.dataclass(frozen=True)
class PromptAndSegment:
    """The mask inside the kernel: of what has the query's segment id, the tokens from a response's first on, and those
    of its prompt, which ends at a column before."""

    align: int
    window: int = 0

    def __call__(self, columns: jax.Array, key: jax.Array) -> jax.Array:
        index = columns & (1 << JOINED_BITS) - 1
        first, end = ((columns >> bits & STARTS - 1) * self.align for bits in (JOINED_BITS, JOINED_BITS + START_BITS))
        own, prompt = (key >= first) & (key <= index), key < end
        if self.window:
            own, prompt = own & (index - key < self.window), prompt & (end - key + index - first < self.window)
        return own | prompt


def block_size(*lengths: int) -> int:
    """The largest block that does not pad too much."""
    for block in BLOCK_SIZES[:-1]:
        if sum(-length % block for length in lengths) <= MAX_PADDING_SHARE * sum(lengths):
            return block
    return BLOCK_SIZES[-1]


def check_row(tokens: int, holds_prompts: bool) -> None:
    """Raises ValueError for a packed row that is longer than the masks can tell."""
    limit = 1 << (JOINED_BITS if holds_prompts else INDEX_BITS)
    if tokens > limit:
        raise ValueError(f"a row of {tokens} tokens is longer than the {limit} of attention=splash"
                         f"{' for rows that hold prompts' * holds_prompts}: lower pack_length")


def mask_inputs(
    segment_BT: jax.Array, is_prefix_BX: jax.Array | None, window: int = 0, prompt_BT: jax.Array | None = None
) -> MaskInputs:
    """Inputs of the masks, padded to blocks."""
    T = segment_BT.shape[1]
    if prompt_BT is not None:
        check_row(T, holds_prompts=True)
        is_joined_BT = prompt_BT > 0
        # A prompt and its responses have one segment id. Prompts begin nowhere in particular, and need no beginning.
        first_BT = jnp.where(is_joined_BT, segment_start(segment_BT), 0) // response_alignment(T)
        end_BT = prompt_end(segment_BT, prompt_BT) // response_alignment(T)
        index_T = jnp.arange(T, dtype=jnp.int32)
        column_BT = index_T[None] | first_BT << JOINED_BITS | end_BT << JOINED_BITS + START_BITS
        block, group_BT = block_size(T), jnp.where(is_joined_BT, prompt_BT, segment_BT)
        return _pad(group_BT, block), _pad(group_BT, block), _pad(column_BT, block)
    if is_prefix_BX is None:
        segment_BT = _pad(segment_BT, block_size(T))
        return segment_BT, segment_BT, None
    check_row(T, holds_prompts=False)
    block = block_size(is_prefix_BX.shape[1], T)
    segment_BT, is_prefix_BX = _pad(segment_BT, block), _pad(is_prefix_BX, block)
    if window:
        is_prefix_BX = is_prefix_BX[:, ::-1]  # its tokens, which are the first columns, are moved to the last ones
    index_T, first_BT = jnp.arange(segment_BT.shape[1], dtype=jnp.int32), segment_start(segment_BT)
    is_token_BT = (segment_BT > 0).astype(jnp.int32)
    key_segment_BS = jnp.concatenate([is_prefix_BX.astype(jnp.int32), is_token_BT], axis=1)
    return is_token_BT, key_segment_BS, (first_BT << INDEX_BITS) | index_T[None]


def attend(
    q_BTHE: jax.Array,
    k_BSKE: jax.Array,
    v_BSKE: jax.Array,
    mask: MaskInputs | None,
    window: int = 0,
    interpret: bool = False,
) -> jax.Array:
    """Attention of T queries over S = X + T keys: [B, T, H, E]. `mask`: from `mask_inputs`; None: causal, X = 0."""
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        return _attend_in_shard_map(q_BTHE, k_BSKE, v_BSKE, mask, window, interpret)
    return _attend(q_BTHE, k_BSKE, v_BSKE, mask, window, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend_in_shard_map(
    q_BTHE: jax.Array, k_BSKE: jax.Array, v_BSKE: jax.Array, mask: MaskInputs | None, window: int, interpret: bool
) -> jax.Array:
    return _without_vma_check(lambda *args: _attend(*args, window, interpret), q_BTHE, k_BSKE, v_BSKE, mask)


def _forward(
    q_BTHE: jax.Array, k_BSKE: jax.Array, v_BSKE: jax.Array, mask: MaskInputs | None, window: int, interpret: bool
) -> tuple[jax.Array, Callable]:
    def kernel_fn(q: jax.Array, k: jax.Array, v: jax.Array, mask: MaskInputs | None) -> tuple[jax.Array, Callable]:
        return jax.vjp(lambda q, k, v: _attend(q, k, v, mask, window, interpret), q, k, v)

    return _without_vma_check(kernel_fn, q_BTHE, k_BSKE, v_BSKE, mask)


def _backward(window: int, interpret: bool, pullback_fn: Callable, grad_BTHE: jax.Array) -> tuple:
    return *_without_vma_check(lambda grad, pullback_fn: pullback_fn(grad), grad_BTHE, pullback_fn), None


_attend_in_shard_map.defvjp(_forward, _backward)


def _without_vma_check(fn: Callable, first: jax.Array, *rest: Any) -> Any:
    """fn(first, *rest) in a `shard_map` without the vma check; the result varies as `first` does.

    `jnp.where` only changes types: it drops vma on the way in and restores it on the way out.
    """

    def fn_without_vma(*args: Any) -> Any:
        return fn(*jax.tree.map(lambda leaf: jnp.where(True, leaf, jnp.zeros((), leaf.dtype)), args))

    out = jax.shard_map(fn_without_vma, in_specs=P(), out_specs=P(), check_vma=False)(first, *rest)
    one = first.ravel()[0]
    return jax.tree.map(lambda leaf: jnp.where(True, leaf, one.astype(leaf.dtype)), out)


def _attend(
    q_BTHE: jax.Array, k_BSKE: jax.Array, v_BSKE: jax.Array, mask: MaskInputs | None, window: int, interpret: bool
) -> jax.Array:
    T, E = q_BTHE.shape[1], q_BTHE.shape[3]
    X = k_BSKE.shape[1] - T
    block = block_size(X, T) if X else block_size(T)
    q_BHTE = _pad(q_BTHE * jnp.asarray(E**-0.5, q_BTHE.dtype), block).swapaxes(1, 2)

    def columns(x_BSKE: jax.Array) -> jax.Array:
        prefix_BXKE, row_BTKE = _pad(x_BSKE[:, :X], block), _pad(x_BSKE[:, X:], block)
        if X and window:
            length_B = mask[1][:, : prefix_BXKE.shape[1]].sum(axis=1)
            prefix_BXKE = jax.vmap(functools.partial(jnp.roll, axis=0))(prefix_BXKE, -length_B)
        return jnp.concatenate([prefix_BXKE, row_BTKE], axis=1).swapaxes(1, 2)

    k_BKSE, v_BKSE = columns(k_BSKE), columns(v_BSKE)
    in_blocks = 0 if mask is not None and mask[2] is not None else window  # else the mask's columns know the window
    kernel = _kernel(q_BHTE.shape[1], q_BHTE.shape[2], k_BKSE.shape[2], block, in_blocks, interpret)

    def attend_row(q_HTE: jax.Array, k_KSE: jax.Array, v_KSE: jax.Array, mask: MaskInputs | None) -> jax.Array:
        if mask is None:
            return kernel(q_HTE, k_KSE, v_KSE)
        query_segment_T, key_segment_S, range_T = mask
        row_kernel = kernel
        if range_T is not None:
            prefix = k_KSE.shape[1] - q_HTE.shape[1]
            mask_fn = PrefixAndSegment(prefix, window) if X else PromptAndSegment(response_alignment(T), window)
            row_kernel = _with_ranges(kernel, range_T, mask_fn)
        return row_kernel(q_HTE, k_KSE, v_KSE, lib.SegmentIds(query_segment_T, key_segment_S))

    return jax.vmap(attend_row)(q_BHTE, k_BKSE, v_BKSE, mask).swapaxes(1, 2)[:, :T]


def _kernel(heads: int, queries: int, keys: int, block: int, window: int, interpret: bool) -> Any:
    """Causal: the diagonal ends at the last key."""
    shape, offset = (queries, keys), keys - queries
    own = lib.LocalMask(shape, (window - 1, 0), offset) if window else lib.CausalMask(shape, offset=offset)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes = lib.BlockSizes(**dict.fromkeys(names, block))
    return lib.make_splash_mha_single_device(lib.MultiHeadMask([own] * heads), block_sizes=sizes, interpret=interpret)


def _with_ranges(kernel: Any, range_T: jax.Array, mask_fn: Callable) -> Any:
    infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    settings = kernel.kwargs | {"mask_function": mask_fn}
    return type(kernel)(*(info._replace(q_sequence=range_T) for info in infos), **settings)


def _pad(x_BT: jax.Array, block: int) -> jax.Array:
    """Zeros on axis 1, to a multiple of the block."""
    return jnp.pad(x_BT, [(0, 0), (0, -x_BT.shape[1] % block)] + [(0, 0)] * (x_BT.ndim - 2))
