"""The jitted functions that run the model in consecutive batches: the prompts' pass and the decode loop, specialised by
shapes alone. `batches.py` calls them; those of continuous batching are in `slots.py`."""

import dataclasses
from collections.abc import Sequence

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
from tango_jax.models.rotary import Ropes
from tango_jax.models.transformer import ModelConfig
from tango_jax.sampling.logits import SamplingParams, sample_tokens


@struct.dataclass
class PromptBatch:
    """P prompts, padded to their bucket, and B = P x M rows that continue them."""

    token_PX: np.ndarray  # int32
    length_P: np.ndarray  # int32, tokens of each prompt
    rows: "RowStart"


@struct.dataclass
class RowStart:
    limit_B: np.ndarray  # int32, new tokens allowed; 0 for rows that only fill the batch
    number_B: np.ndarray  # int32, folded into the key: all that a row's randomness depends on
    key_data: np.ndarray  # uint32[2], the data of a key: requests are NumPy arrays, and NumPy has no keys


@struct.dataclass
class Rows:
    """What sampling knows of B rows, beside their caches; T is the largest cache bucket."""

    token_B: jax.Array  # int32, the newest token, which is not in the cache yet
    is_alive_B: jax.Array  # bool, still generating
    limit_B: jax.Array  # int32, new tokens allowed
    length_B: jax.Array  # int32, new tokens so far; stands still once the row has ended
    uniform_BT: jax.Array  # float32, one random number per row and new token
    out_token_BT: jax.Array  # int32, new tokens, EOS included
    out_logp_BT: jax.Array  # float32, their log-probs under the sampling distribution; NaN: logits were not finite


@struct.dataclass
class DecodeState:
    """What a decode step reads and writes. Rows begin together: in a step all write the same column of the suffix."""

    prefix: kv.Prefix
    suffix: kv.Suffix
    step: jax.Array  # int32[], tokens sampled by rows that are alive
    rows: Rows


def state_specs() -> DecodeState:
    """Rows over devices, heads over tensor groups of `sharding.DECODE_AXES`."""
    rows, heads = PartitionSpec("rows"), PartitionSpec("rows", "tensor")
    prefix, suffix = kv.Prefix(k=heads, v=heads, length_P=rows), kv.Suffix(k=heads, v=heads)
    return DecodeState(prefix=prefix, suffix=suffix, step=PartitionSpec(), rows=rows_specs())


def rows_specs() -> Rows:
    return Rows(**{field.name: PartitionSpec("rows") for field in dataclasses.fields(Rows)})


def shardings_of(mesh: Mesh | None, specs: object) -> object:
    """NamedShardings; without a mesh None, which leaves the choice to jax."""
    if mesh is None:
        return None
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, PartitionSpec)
    )


def empty_state(config: ModelConfig, max_new: int, rows: int, prompt_bucket: int, cache_bucket: int) -> DecodeState:
    """A state without samples, with one prompt per row."""
    prefix = kv.init_suffix(config, rows, prompt_bucket)
    return DecodeState(
        prefix=kv.Prefix(k=prefix.k, v=prefix.v, length_P=jnp.ones((rows,), jnp.int32)),
        suffix=kv.init_suffix(config, rows, cache_bucket),
        step=jnp.zeros((), jnp.int32),
        rows=empty_rows(rows, max_new),
    )


def empty_rows(count: int, max_new: int) -> Rows:
    ints, floats = jnp.zeros((count,), jnp.int32), jnp.zeros((count, max_new), jnp.float32)
    return Rows(token_B=ints, is_alive_B=jnp.zeros((count,), bool), limit_B=ints, length_B=ints, uniform_BT=floats,
                out_token_BT=jnp.zeros((count, max_new), jnp.int32), out_logp_BT=floats)


def row_uniforms(key_data: jax.Array, number_B: jax.Array, count: int) -> jax.Array:
    """float32[B, count]: one number for each new token. Each row folds its number into the key and draws all at once,
    so neither batch, place nor time changes them."""
    key = jax.random.wrap_key_data(key_data)
    keys_B = jax.vmap(lambda number: jax.random.fold_in(key, number))(number_B)
    return jax.vmap(lambda row_key: jax.random.uniform(row_key, (count,)))(keys_B)


def append_tokens(
    rows: Rows, logits_BV: jax.Array, sampling: SamplingParams, stop_ids: tuple[int, ...], mesh: Mesh | None,
    column: jax.Array | int | None = None,
) -> Rows:
    """Samples the next token of the rows that are alive. `column`: their length, if they began together."""
    # Clipped for rows that ended at their last number; what they draw is dropped.
    uniform_B = jnp.take_along_axis(rows.uniform_BT, rows.length_B[:, None], axis=1, mode="clip")[:, 0]
    token_B, logp_B = sample_tokens(mesh, logits_BV, uniform_B, sampling)
    place = jnp.where(rows.is_alive_B, rows.length_B, rows.uniform_BT.shape[1]) if column is None else column
    length_B = rows.length_B + rows.is_alive_B
    return rows.replace(
        token_B=token_B,
        length_B=length_B,
        is_alive_B=rows.is_alive_B & goes_on(token_B, logp_B, length_B, rows.limit_B, stop_ids),
        out_token_BT=_put_numbers(rows.out_token_BT, place, token_B),
        out_logp_BT=_put_numbers(rows.out_logp_BT, place, logp_B),
    )


def _put_numbers(target_BT: jax.Array, place: jax.Array | int, number_B: jax.Array) -> jax.Array:
    """In one column, or in a place of each row, which stays on its device; none beyond the last place."""
    if jnp.ndim(place) == 0:  # one slice; what is written after a row's end is not read
        return lax.dynamic_update_slice(target_BT, number_B[:, None], (0, place))
    put_fn = jax.vmap(lambda row_T, one, number: row_T.at[one].set(number, mode="drop"))
    return put_fn(target_BT, place, number_B)


def goes_on(
    token_B: jax.Array, logp_B: jax.Array, length_B: jax.Array, limit_B: jax.Array, stop_ids: tuple[int, ...]
) -> jax.Array:
    is_stop_B = jnp.zeros(token_B.shape, bool)
    for stop_id in stop_ids:
        is_stop_B |= token_B == stop_id
    return ~is_stop_B & (length_B < limit_B) & jnp.isfinite(logp_B)


def read_tokens(
    config: ModelConfig, mesh: Mesh | None, weights: dict, token_BT: jax.Array
) -> tuple[jax.Array, tuple]:
    """Hidden states [B, T, D] of rows that are padded on the right, and each layer's cache."""
    x_BTD = transformer.embed_tokens(config, weights, token_BT)
    rope = transformer.rope_tables(config, jnp.broadcast_to(jnp.arange(token_BT.shape[1])[None], token_BT.shape))
    settings = attention_of(config), mesh, kv.key_axis(config), bool(config.sample_cache_dtype)
    by_window = {window: kv.make_prefill_attention(*settings, window) for window in config.windows}
    attend_fns = [by_window[kind.window] for kind in config.layer_kinds]
    return decode_layers.apply_split_layers(config, weights["layers"], x_BTD, rope, attend_fns)


def read_prompts(
    config: ModelConfig, mesh: Mesh | None, weights: dict, token_PX: jax.Array, length_P: jax.Array
) -> tuple[kv.Prefix, jax.Array]:
    """Keys and values of the prompts, and the next token's logits [P, V]."""
    x_PXD, caches = read_tokens(config, mesh, weights, token_PX)
    # The head runs on one position of each prompt: all logits would be the largest array of sampling.
    last_P1D = jnp.take_along_axis(x_PXD, (length_P - 1)[:, None, None], axis=1)
    logits_PV = transformer.logits_from_hidden(config, weights["final_norm"], weights["head_DV"], last_P1D)[:, 0]
    return kv.Prefix(k=tuple(k for k, _ in caches), v=tuple(v for _, v in caches), length_P=length_P), logits_PV


def prefill(
    config: ModelConfig, mesh: Mesh | None, weights: dict, batch: PromptBatch
) -> tuple[kv.Prefix, jax.Array]:
    """Runs the prompts once. Their caches, and the next token's logits [B, V] of the B/P rows that share each."""
    prefix, logits_PV = read_prompts(config, mesh, weights, batch.token_PX, batch.length_P)
    return prefix, jnp.repeat(logits_PV, batch.rows.limit_B.shape[0] // batch.token_PX.shape[0], axis=0)


def begin(
    config: ModelConfig,
    stop_ids: tuple[int, ...],
    cache_bucket: int,
    max_new: int,
    mesh: Mesh | None,
    logits_BV: jax.Array,
    new: RowStart,
    sampling: SamplingParams,
) -> tuple[kv.Suffix, jax.Array, Rows]:
    """All of a state but the prompts: room for `cache_bucket` new tokens, which may grow to `max_new`, one step, and
    the rows with their first tokens. Not in `prefill`, which is compiled for each prompt bucket."""
    rows = empty_rows(len(new.limit_B), max_new).replace(
        is_alive_B=new.limit_B > 0, limit_B=new.limit_B,
        uniform_BT=row_uniforms(new.key_data, new.number_B, max_new),
    )
    rows = append_tokens(rows, logits_BV, sampling, stop_ids, mesh, column=0)
    return kv.init_suffix(config, len(new.limit_B), cache_bucket), jnp.ones((), jnp.int32), rows


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
    B, S = len(state.rows.token_B), state.suffix.v[0].shape[-2]
    prompt_length_B = jnp.repeat(state.prefix.length_P, B // state.prefix.length_P.shape[0])
    ropes = all_ropes(config, state.prefix.v[0].shape[-2] + S)

    def is_unfinished(state: DecodeState) -> jax.Array:
        # One sum over the devices for both conditions: a row without room outweighs all others.
        vote_B = jnp.where(state.rows.length_B < S, 1, -B)
        return jnp.sum(jnp.where(state.rows.is_alive_B, vote_B, 0)) > min_alive

    def body(state: DecodeState) -> DecodeState:
        rows, attend_fns = state.rows, _attend_fns(config, mesh, state)
        position_B = prompt_length_B + rows.length_B - 1
        logits_BV, caches = decode_step(config, weights, ropes, rows.token_B, position_B, attend_fns)
        suffix = kv.Suffix(k=tuple(k for k, _ in caches), v=tuple(v for _, v in caches))
        rows = append_tokens(rows, logits_BV, sampling, stop_ids, mesh, column=state.step)
        return state.replace(suffix=suffix, step=state.step + 1, rows=rows)

    # Not a scan over all columns: most rows end long before the limit, and with the last one the loop ends.
    return lax.while_loop(is_unfinished, body, state)


def decode_step(
    config: ModelConfig, weights: dict, ropes: Ropes, token_B: jax.Array, position_B: jax.Array,
    attend_fns: Sequence[AttendFn],
) -> tuple[jax.Array, tuple]:
    """(logits_BV of the next tokens, each layer's cache) from a row's newest token and its position. `ropes`: tables of
    all positions."""
    x_B1D, layers = transformer.embed_tokens(config, weights, token_B[:, None]), weights["layers"]
    if config.sample_weight_dtype:
        layers, x_B1D = in_this_step(layers, x_B1D)
    rope = jax.tree.map(lambda table: jnp.take(table[0], position_B[:, None], axis=0, mode="clip"), ropes)
    x_B1D, caches = decode_layers.apply_split_layers(config, layers, x_B1D, rope, attend_fns)
    return transformer.logits_from_hidden(config, weights["final_norm"], weights["head_DV"], x_B1D)[:, 0], caches


def all_ropes(config: ModelConfig, count: int) -> Ropes:
    """Of the first `count` positions, made before the loop: XLA computes sines inside of it again in every layer."""
    return transformer.rope_tables(config, jnp.arange(count)[None])


def _attend_fns(config: ModelConfig, mesh: Mesh | None, state: DecodeState) -> list[AttendFn]:
    prefix, suffix, column = state.prefix, state.suffix, state.step - 1
    layers = list(zip(prefix.k, prefix.v, suffix.k, suffix.v, strict=True))
    if config.decode_attention == "xla":
        masks = {window: _masks(state, window) for window in set(config.windows)}
        fns = []
        for kind, (pk, pv, sk, sv) in zip(config.layer_kinds, layers, strict=True):
            is_prompt_PX, is_own_1S, is_near_BX = masks[kind.window]
            fns.append(kv.make_decode_attention(pk, pv, is_prompt_PX, sk, sv, column, is_own_1S, is_near_BX))
        return fns
    # Ended rows, and prompts whose rows have ended, need nothing; a kernel wants one column at least.
    is_asked_P = state.rows.is_alive_B.reshape(prefix.length_P.shape[0], -1).any(axis=1)
    prompt_length_P = jnp.where(is_asked_P, prefix.length_P, 1)
    length_B = jnp.where(state.rows.is_alive_B, column + 1, 1)
    return [
        make_skipping_decode_attention(pk, pv, prompt_length_P, sk, sv, column, length_B, config.decode_attention, mesh)
        for pk, pv, sk, sv in layers
    ]


def _masks(state: DecodeState, window: int) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """For layers with this window (0: none): prefix columns that hold a token, own columns that rows see and, with a
    window, the prefix columns of each row."""
    length_P, x_X = state.prefix.length_P, jnp.arange(state.prefix.v[0].shape[-2])
    age_1S = state.step - 1 - jnp.arange(state.suffix.v[0].shape[-2])[None, :]
    is_prompt_PX = x_X[None, :] < length_P[:, None]
    if not window:
        return is_prompt_PX, age_1S >= 0, None
    newest_B = jnp.repeat(length_P, len(state.rows.length_B) // len(length_P)) + state.step - 1
    return is_prompt_PX, (age_1S >= 0) & (age_1S < window), newest_B[:, None] - x_X[None, :] < window
