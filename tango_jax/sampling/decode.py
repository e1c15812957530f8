"""The jitted functions of sampling: prefill, the decode loop, and the two changes of its shape (`grow_cache` and
`compact_rows`).

Every function is specialised by shapes alone: P prompts, B rows, the prompt bucket and the cache bucket. `sampler.py`
calls them in turn.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tango_jax.models import cache as kv
from tango_jax.models import transformer
from tango_jax.models.attention import attention_of
from tango_jax.models.transformer import ModelConfig
from tango_jax.sampling.logits import SamplingParams, sample_token


@struct.dataclass
class PromptBatch:
    """What prefill reads: P prompts, padded to their bucket, and B = P x M rows that continue them."""

    token_PS: np.ndarray  # int32
    length_P: np.ndarray  # int32, tokens of each prompt
    limit_B: np.ndarray  # int32, new tokens allowed; 0 for rows that only fill the batch
    number_B: np.ndarray  # int32, folded into the key: all that a row's randomness depends on
    key_data: np.ndarray  # uint32[2]


@struct.dataclass
class DecodeState:
    """Everything that a decode step reads or writes."""

    prefix: kv.Prefix
    suffix: kv.Suffix
    step: jax.Array  # int32[], new tokens so far (the same for all rows)
    token_B: jax.Array  # int32, the newest token
    is_alive_B: jax.Array  # bool, still generating
    limit_B: jax.Array  # int32, new tokens allowed
    length_B: jax.Array  # int32, new tokens so far; stands still once the row has ended
    uniform_BX: jax.Array  # float32 [B, largest cache bucket], one random number per row and step
    out_token_BS: jax.Array  # int32, new tokens, EOS included
    out_logp_BS: jax.Array  # float32, their log-probs under the sampling distribution; NaN: logits were not finite


def state_shardings(mesh: Mesh) -> DecodeState:
    """How a decode state lies on a mesh of `sharding.DECODE_AXES`: rows over devices, heads over tensor groups."""
    rows, heads = NamedSharding(mesh, P("rows")), NamedSharding(mesh, P("rows", "tensor"))
    arrays = {field.name: rows for field in dataclasses.fields(DecodeState)}
    return DecodeState(
        **arrays
        | {
            "prefix": kv.Prefix(k=heads, v=heads, length_P=rows),
            "suffix": kv.Suffix(k=heads, v=heads),
            "step": NamedSharding(mesh, P()),
        }
    )


def _append_token(
    state: DecodeState, logits_BV: jax.Array, sampling: SamplingParams, stop_ids: tuple[int, ...]
) -> DecodeState:
    """Sample token number `state.step` of every row from the logits, and record it."""
    index = state.step
    uniform_B = lax.dynamic_index_in_dim(state.uniform_BX, index, axis=1, keepdims=False)
    token_B, logp_B = sample_token(logits_BV, uniform_B, sampling)
    token_B = jnp.where(state.is_alive_B, token_B, 0)
    logp_B = jnp.where(state.is_alive_B, logp_B, 0.0)
    is_stop_B = jnp.zeros_like(state.is_alive_B)
    for stop_id in stop_ids:
        is_stop_B |= token_B == stop_id
    return state.replace(
        step=index + 1,
        token_B=token_B,
        length_B=state.length_B + state.is_alive_B,
        # A row whose logits were not finite ends here; its log-prob tells the host.
        is_alive_B=state.is_alive_B & ~is_stop_B & (index + 1 < state.limit_B) & jnp.isfinite(logp_B),
        out_token_BS=lax.dynamic_update_slice(state.out_token_BS, token_B[:, None], (0, index)),
        out_logp_BS=lax.dynamic_update_slice(state.out_logp_BS, logp_B[:, None], (0, index)),
    )


def prefill(
    config: ModelConfig,
    stop_ids: tuple[int, ...],
    cache_bucket: int,
    max_new: int,
    mesh: Mesh | None,
    weights: dict,
    batch: PromptBatch,
    sampling: SamplingParams,
) -> DecodeState:
    """Run the prompts once, share each among its B/P rows, and sample every row's first token.

    Args:
        cache_bucket: new tokens that the state has room for.
        max_new: new tokens that it may be grown to.
    """
    P, S = batch.token_PS.shape
    B = batch.limit_B.shape[0]
    x_PSD = transformer.embed_tokens(config, weights, batch.token_PS)
    rope = transformer.rope_tables(config, jnp.broadcast_to(jnp.arange(S)[None], (P, S)))
    attend_fns = [kv.make_prefill_attention(attention_of(config), mesh)] * config.num_layers
    x_PSD, caches = transformer.apply_split_layers(config, weights["layers"], x_PSD, rope, attend_fns)
    # The head runs on one position of each prompt: logits of all of them would be the largest array of sampling.
    last_P1D = jnp.take_along_axis(x_PSD, (batch.length_P - 1)[:, None, None], axis=1)
    logits_PV = transformer.logits_from_hidden(config, weights["final_norm"], weights["head_DV"], last_P1D)[:, 0]
    # Each row folds its own number into the key, and all its random numbers are drawn here: neither the rows around it
    # nor compaction then change what it samples.
    key = jax.random.wrap_key_data(batch.key_data)
    keys_B = jax.vmap(lambda number: jax.random.fold_in(key, number))(batch.number_B)
    state = DecodeState(
        prefix=kv.Prefix(k=tuple(k for k, _ in caches), v=tuple(v for _, v in caches), length_P=batch.length_P),
        suffix=kv.init_suffix(config, B, cache_bucket),
        step=jnp.zeros((), jnp.int32),
        token_B=jnp.zeros((B,), jnp.int32),
        is_alive_B=batch.limit_B > 0,
        limit_B=batch.limit_B,
        length_B=jnp.zeros((B,), jnp.int32),
        uniform_BX=jax.vmap(lambda row_key: jax.random.uniform(row_key, (max_new,)))(keys_B),
        out_token_BS=jnp.zeros((B, cache_bucket), jnp.int32),
        out_logp_BS=jnp.zeros((B, cache_bucket), jnp.float32),
    )
    return _append_token(state, jnp.repeat(logits_PV, B // P, axis=0), sampling, stop_ids)


def decode(
    config: ModelConfig,
    stop_ids: tuple[int, ...],
    weights: dict,
    state: DecodeState,
    sampling: SamplingParams,
    min_alive: jax.Array,
) -> DecodeState:
    """Sample until the cache bucket is full, or no more than `min_alive` (int32[]) rows are alive."""
    B, S = state.out_token_BS.shape
    P = state.prefix.length_P.shape[0]
    prefix_mask_PS = jnp.arange(state.prefix.k[0].shape[-1])[None, :] < state.prefix.length_P[:, None]
    prompt_length_B = jnp.repeat(state.prefix.length_P, B // P)

    def is_unfinished(state: DecodeState) -> jax.Array:
        return (state.step < S) & (jnp.sum(state.is_alive_B) > min_alive)

    def body(state: DecodeState) -> DecodeState:
        index = state.step - 1  # the newest token's slot in the suffix
        rope = transformer.rope_tables(config, (prompt_length_B + index)[:, None])
        attend_fns = [
            kv.make_decode_attention(pk, pv, prefix_mask_PS, sk, sv, index)
            for pk, pv, sk, sv in zip(state.prefix.k, state.prefix.v, state.suffix.k, state.suffix.v, strict=True)
        ]
        x_B1D = transformer.embed_tokens(config, weights, state.token_B[:, None])
        x_B1D, caches = transformer.apply_split_layers(config, weights["layers"], x_B1D, rope, attend_fns)
        logits_BV = transformer.logits_from_hidden(config, weights["final_norm"], weights["head_DV"], x_B1D)[:, 0]
        suffix = kv.Suffix(k=tuple(k for k, _ in caches), v=tuple(v for _, v in caches))
        return _append_token(state.replace(suffix=suffix), logits_BV, sampling, stop_ids)

    return lax.while_loop(is_unfinished, body, state)


def grow_cache(new_bucket: int, state: DecodeState) -> DecodeState:
    """The same state with room for `new_bucket` new tokens."""
    extra = new_bucket - state.out_token_BS.shape[1]
    suffix = kv.Suffix(
        k=tuple(jnp.pad(k, ((0, 0), (0, 0), (0, 0), (0, extra))) for k in state.suffix.k),
        v=tuple(jnp.pad(v, ((0, 0), (0, 0), (0, extra), (0, 0))) for v in state.suffix.v),
    )
    return state.replace(
        suffix=suffix,
        out_token_BS=jnp.pad(state.out_token_BS, ((0, 0), (0, extra))),
        out_logp_BS=jnp.pad(state.out_logp_BS, ((0, 0), (0, extra))),
    )


def compact_rows(state: DecodeState, keep_B: jax.Array) -> DecodeState:
    """The rows `keep_B` alone, each with its own copy of its prompt's keys and values (P becomes B)."""
    # The rows that are left need not come in equal groups, so that they can no longer share prompts by reshaping.
    prompt_B = keep_B // (state.out_token_BS.shape[0] // state.prefix.length_P.shape[0])
    take = functools.partial(jnp.take, axis=0)
    return state.replace(
        prefix=jax.tree.map(lambda leaf: take(leaf, prompt_B), state.prefix),
        suffix=jax.tree.map(lambda leaf: take(leaf, keep_B), state.suffix),
        token_B=state.token_B[keep_B],
        is_alive_B=state.is_alive_B[keep_B],
        limit_B=state.limit_B[keep_B],
        length_B=state.length_B[keep_B],
        uniform_BX=state.uniform_BX[keep_B],
        out_token_BS=state.out_token_BS[keep_B],
        out_logp_BS=state.out_logp_BS[keep_B],
    )
