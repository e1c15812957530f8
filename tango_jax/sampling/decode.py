"""The jitted functions that run the model in consecutive batches: the prompts' pass and the decode loop, specialised by
shapes alone. `batches.py` calls them; those of continuous batching are in `slots.py`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tango_jax.models import cache as kv
from tango_jax.models import decode_layers, transformer
from tango_jax.models.attention import AttendFn, attention_of
from tango_jax.models.decode_attention import make_skipping_decode_attention
from tango_jax.models.int8 import in_this_step
from tango_jax.models.transformer import ModelConfig
from tango_jax.sampling.logits import SamplingParams, sample_tokens


@struct.dataclass
class PromptBatch:
    """P prompts, padded to their bucket, and B = P x M rows that continue them."""

    token_PX: np.ndarray  # int32
    length_P: np.ndarray  # int32, tokens of each prompt
    limit_B: np.ndarray  # int32, new tokens allowed; 0 for rows that only fill the batch
    number_B: np.ndarray  # int32, folded into the key: all that a row's randomness depends on
    key_data: np.ndarray  # uint32[2], the data of a key: requests are NumPy arrays, and NumPy has no keys


@struct.dataclass
class DecodeState:
    """What a decode step reads and writes. Rows begin together: in a step all write the same of S columns. In a layer
    with a window the suffix is a ring."""

    prefix: kv.Prefix
    suffix: kv.Suffix
    step: jax.Array  # int32[], tokens sampled by rows that are alive; the newest is in column step - 1
    token_B: jax.Array  # int32, the newest token
    is_alive_B: jax.Array  # bool, still generating
    limit_B: jax.Array  # int32, new tokens allowed
    length_B: jax.Array  # int32, new tokens so far; stands still once the row has ended
    uniform_BT: jax.Array  # float32, one random number per row and new token; T is the largest cache bucket
    out_token_BS: jax.Array  # int32, new tokens, EOS included
    out_logp_BS: jax.Array  # float32, their log-probs under the sampling distribution; NaN: logits were not finite


def state_specs() -> DecodeState:
    """Rows over devices, heads over tensor groups of `sharding.DECODE_AXES`."""
    rows, heads = PartitionSpec("rows"), PartitionSpec("rows", "tensor")
    arrays = {field.name: rows for field in dataclasses.fields(DecodeState)}
    return DecodeState(
        **arrays
        | {
            "prefix": kv.Prefix(k=heads, v=heads, length_P=rows),
            "suffix": kv.Suffix(k=heads, v=heads),
            "step": PartitionSpec(),
        }
    )


def shardings_of(mesh: Mesh | None, specs: object) -> object:
    """NamedShardings; without a mesh None, which leaves the choice to jax."""
    if mesh is None:
        return None
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, PartitionSpec)
    )


def empty_state(config: ModelConfig, max_new: int, rows: int, prompt_bucket: int, cache_bucket: int) -> DecodeState:
    """Each row has a prompt of its own."""
    prefix = kv.init_suffix(config, rows, prompt_bucket)
    return DecodeState(
        prefix=kv.Prefix(k=prefix.k, v=prefix.v, length_P=jnp.ones((rows,), jnp.int32)),
        suffix=kv.init_suffix(config, rows, cache_bucket),
        step=jnp.ones((), jnp.int32),
        token_B=jnp.zeros((rows,), jnp.int32),
        is_alive_B=jnp.zeros((rows,), bool),
        limit_B=jnp.zeros((rows,), jnp.int32),
        length_B=jnp.zeros((rows,), jnp.int32),
        uniform_BT=jnp.zeros((rows, max_new), jnp.float32),
        out_token_BS=jnp.zeros((rows, cache_bucket), jnp.int32),
        out_logp_BS=jnp.zeros((rows, cache_bucket), jnp.float32),
    )


def row_uniforms(key_data: jax.Array, number_B: jax.Array, count: int) -> jax.Array:
    """float32[B, count]: one number for each new token. Each row folds its number into the key and draws all at once,
    so neither batch, place nor time changes them."""
    key = jax.random.wrap_key_data(key_data)
    keys_B = jax.vmap(lambda number: jax.random.fold_in(key, number))(number_B)
    return jax.vmap(lambda row_key: jax.random.uniform(row_key, (count,)))(keys_B)


def _append_token(
    state: DecodeState, logits_BV: jax.Array, sampling: SamplingParams, stop_ids: tuple[int, ...], mesh: Mesh | None
) -> DecodeState:
    column = state.step % state.out_token_BS.shape[1]
    # Clipped for rows that ended at their last number; what they draw is dropped below.
    uniform_B = jnp.take_along_axis(state.uniform_BT, state.length_B[:, None], axis=1, mode="clip")[:, 0]
    token_B, logp_B = sample_tokens(mesh, logits_BV, uniform_B, sampling)
    token_B = jnp.where(state.is_alive_B, token_B, 0)
    logp_B = jnp.where(state.is_alive_B, logp_B, 0.0)
    length_B = state.length_B + state.is_alive_B
    return state.replace(
        step=state.step + 1,
        token_B=token_B,
        length_B=length_B,
        is_alive_B=state.is_alive_B & goes_on(token_B, logp_B, length_B, state.limit_B, stop_ids),
        out_token_BS=lax.dynamic_update_slice(state.out_token_BS, token_B[:, None], (0, column)),
        out_logp_BS=lax.dynamic_update_slice(state.out_logp_BS, logp_B[:, None], (0, column)),
    )


def goes_on(
    token_B: jax.Array, logp_B: jax.Array, length_B: jax.Array, limit_B: jax.Array, stop_ids: tuple[int, ...]
) -> jax.Array:
    is_stop_B = jnp.zeros(token_B.shape, bool)
    for stop_id in stop_ids:
        is_stop_B |= token_B == stop_id
    return ~is_stop_B & (length_B < limit_B) & jnp.isfinite(logp_B)


def read_prompts(
    config: ModelConfig, mesh: Mesh | None, weights: dict, token_PX: jax.Array, length_P: jax.Array
) -> tuple[kv.Prefix, jax.Array]:
    """Keys and values of the prompts, and the next token's logits [P, V]."""
    P, X = token_PX.shape
    x_PXD = transformer.embed_tokens(config, weights, token_PX)
    rope = transformer.rope_tables(config, jnp.broadcast_to(jnp.arange(X)[None], (P, X)))
    settings = attention_of(config), mesh, kv.key_axis(config), bool(config.sample_cache_dtype)
    by_window = {window: kv.make_prefill_attention(*settings, window) for window in config.windows}
    attend_fns = [by_window[kind.window] for kind in config.layer_kinds]
    x_PXD, caches = decode_layers.apply_split_layers(config, weights["layers"], x_PXD, rope, attend_fns)
    # The head runs on one position of each prompt: all logits would be the largest array of sampling.
    last_P1D = jnp.take_along_axis(x_PXD, (length_P - 1)[:, None, None], axis=1)
    logits_PV = transformer.logits_from_hidden(config, weights["final_norm"], weights["head_DV"], last_P1D)[:, 0]
    return kv.Prefix(k=tuple(k for k, _ in caches), v=tuple(v for _, v in caches), length_P=length_P), logits_PV


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
    """Runs the prompts once, shares each among its B/P rows, and samples their first tokens. The state has room for
    `cache_bucket` new tokens, and may grow to `max_new`."""
    P, B = batch.token_PX.shape[0], batch.limit_B.shape[0]
    prefix, logits_PV = read_prompts(config, mesh, weights, batch.token_PX, batch.length_P)
    state = DecodeState(
        prefix=kv.keep_windows(config, prefix),
        suffix=kv.init_suffix(config, B, cache_bucket, keeps_all=False),
        step=jnp.zeros((), jnp.int32),
        token_B=jnp.zeros((B,), jnp.int32),
        is_alive_B=batch.limit_B > 0,
        limit_B=batch.limit_B,
        length_B=jnp.zeros((B,), jnp.int32),
        uniform_BT=row_uniforms(batch.key_data, batch.number_B, max_new),
        out_token_BS=jnp.zeros((B, cache_bucket), jnp.int32),
        out_logp_BS=jnp.zeros((B, cache_bucket), jnp.float32),
    )
    return _append_token(state, jnp.repeat(logits_PV, B // P, axis=0), sampling, stop_ids, mesh)


def decode(
    config: ModelConfig,
    stop_ids: tuple[int, ...],
    weights: dict,
    state: DecodeState,
    sampling: SamplingParams,
    min_alive: jax.Array,
    mesh: Mesh | None = None,
) -> DecodeState:
    """Samples until a row has filled the cache bucket, or at most `min_alive` (int32[]) rows are alive."""
    B, S = state.out_token_BS.shape
    prompt_length_B = jnp.repeat(state.prefix.length_P, B // state.prefix.length_P.shape[0])

    def is_unfinished(state: DecodeState) -> jax.Array:
        # One sum over the devices for both conditions: a row without room outweighs all others.
        vote_B = jnp.where(state.length_B < S, 1, -B)
        return jnp.sum(jnp.where(state.is_alive_B, vote_B, 0)) > min_alive

    def body(state: DecodeState) -> DecodeState:
        rope = transformer.rope_tables(config, (prompt_length_B + state.length_B - 1)[:, None])
        attend_fns = _attend_fns(config, mesh, state)
        x_B1D, layers = transformer.embed_tokens(config, weights, state.token_B[:, None]), weights["layers"]
        if config.sample_weight_dtype:
            layers, x_B1D = in_this_step(layers, x_B1D)
        x_B1D, caches = decode_layers.apply_split_layers(config, layers, x_B1D, rope, attend_fns)
        logits_BV = transformer.logits_from_hidden(config, weights["final_norm"], weights["head_DV"], x_B1D)[:, 0]
        suffix = kv.Suffix(k=tuple(k for k, _ in caches), v=tuple(v for _, v in caches))
        return _append_token(state.replace(suffix=suffix), logits_BV, sampling, stop_ids, mesh)

    # Not a scan over all columns: most rows end long before the limit, and with the last one the loop ends.
    return lax.while_loop(is_unfinished, body, state)


def _attend_fns(config: ModelConfig, mesh: Mesh | None, state: DecodeState) -> list[AttendFn]:
    prefix, suffix = state.prefix, state.suffix
    layers = list(zip(prefix.k, prefix.v, suffix.k, suffix.v, strict=True))
    if config.decode_attention == "xla":
        sizes = [(kind.window, pv.shape[-2], sv.shape[-2])
                 for kind, (_, pv, _, sv) in zip(config.layer_kinds, layers, strict=True)]
        masks = {size: _masks(state, *size) for size in dict.fromkeys(sizes)}
        fns = []
        for size, (pk, pv, sk, sv) in zip(sizes, layers, strict=True):
            column, is_prompt_PX, is_own_BS, is_near_BX = masks[size]
            fns.append(kv.make_decode_attention(pk, pv, is_prompt_PX, sk, sv, column, is_own_BS, is_near_BX))
        return fns
    column = (state.step - 1) % state.out_token_BS.shape[1]
    # Ended rows, and prompts whose rows have ended, need nothing; a kernel wants one column at least.
    is_asked_P = state.is_alive_B.reshape(prefix.length_P.shape[0], -1).any(axis=1)
    prompt_length_P = jnp.where(is_asked_P, prefix.length_P, 1)
    length_B = jnp.where(state.is_alive_B, column + 1, 1)
    return [
        make_skipping_decode_attention(pk, pv, prompt_length_P, sk, sv, column, length_B, config.decode_attention, mesh)
        for pk, pv, sk, sv in layers
    ]


def _masks(state: DecodeState, window: int, X: int, S: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """For layers with this window (0: none) and caches of X and S columns: the newest tokens' column, prefix columns
    that hold a token, own columns that a row sees and, with a window, its prefix columns."""
    column, length_P = (state.step - 1) % S, state.prefix.length_P
    age_S = (column - jnp.arange(S)) % S
    is_own_BS = age_S[None, :] < state.length_B[:, None]
    if not window:
        return column, jnp.arange(X)[None, :] < length_P[:, None], is_own_BS, None
    # A prefix of the window's size holds the last tokens of a prompt (cache.keep_windows), any other all of them.
    all_PX = jnp.broadcast_to(jnp.arange(X), (len(length_P), X))
    position_PX = kv.window_positions(length_P, X) if X == window else all_PX
    is_prompt_PX = (position_PX >= 0) & (position_PX < length_P[:, None])
    samples = len(state.length_B) // len(length_P)
    newest_B = jnp.repeat(length_P, samples) + state.length_B - 1
    is_near_BX = newest_B[:, None] - jnp.repeat(position_PX, samples, axis=0) < window
    return column, is_prompt_PX, is_own_BS & (age_S < window)[None, :], is_near_BX
