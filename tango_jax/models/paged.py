"""Attention of decode steps on TPUs by jax's paged-attention kernel, over a cache that is not paged.

The kernel is called directly: `paged_attention` drops the maximum and sum of the exponentials, which merging needs.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention_kernel as lib

SUBLANES = 8  # the number of queries is padded to a multiple of a float32 register's rows


def attend_part(
    q_BKWE: jax.Array, k_BKSE: jax.Array, v_BKSE: jax.Array, length_B: jax.Array, page: int
) -> tuple[jax.Array, jax.Array]:
    """W queries of each key head over `length_B` >= 1 columns, in pages: float32 [B, K, W, E], lse [B, K, W]."""
    B, K, W, E = q_BKWE.shape
    heads, S = B * K, k_BKSE.shape[2]
    queries = q_BKWE.reshape(heads, W, E).astype(jnp.float32) * (1 / math.sqrt(E))
    queries = jnp.pad(queries, ((0, 0), (0, -W % SUBLANES), (0, 0)))
    pages = (x.reshape(1, heads * S // page, page, E) for x in (k_BKSE, v_BKSE))
    out, top, total = _kernel(queries.shape, S // page, page, k_BKSE.dtype)(
        jnp.repeat(length_B, K),
        lax.iota(jnp.int32, heads * S // page),
        jnp.zeros((1,), jnp.int32),  # which of the two buffers is read first
        jnp.ones((1,), jnp.int32),  # nothing has been read ahead
        queries,
        *(array for x in pages for array in (x, None)),  # None: the scales of quantised pages
    )
    lse = (top + jnp.log(total))[..., 0]
    return out[:, :W].reshape(B, K, W, E), lse[:, :W].reshape(B, K, W)


def _kernel(shape: tuple[int, int, int], pages_per_row: int, page: int, dtype: jnp.dtype) -> functools.partial:
    """The kernel for queries [rows, W, E]. Its last two results repeat a number along E."""
    rows, W, E = shape
    of_row = pl.BlockSpec((None, W, E), lambda core, row, head, *_: (row, 0, 0))
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    buffer = pltpu.VMEM((2, 1, page, E), dtype)  # two, since one is filled while the other is read
    return pl.pallas_call(
        functools.partial(
            lib.paged_flash_attention_kernel_inline_seq_dim,
            pages_per_sequence=pages_per_row,
            batch_size=rows,
            pages_per_compute_block=1,
            mask_value=lib.DEFAULT_MASK_VALUE,
            attn_logits_soft_cap=None,
            megacore_mode=None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            in_specs=[of_row, in_memory, None, in_memory, None],
            out_specs=[of_row] * 3,
            grid=(1, rows, 1),  # cores, rows, key heads of each
            scratch_shapes=(
                buffer, None, buffer, None, pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA((2,)),
            ),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32)] * 3,
        name="paged_decode_attention",
    )
