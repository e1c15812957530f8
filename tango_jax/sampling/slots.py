"""The jitted functions of continuous batching: rows enter and leave a state of slots, in which each stands at its own
position.

A slot is a row of the state, numbered on its shard; a number beyond them stands for no row. Its columns are positions:
first the prompt, then the new tokens. No shard reads another's caches. Every shape of a state has one program of each
kind, whatever the group size and the lengths of prompts.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from tango_jax.models import cache as kv
from tango_jax.models.attention import AttendFn
from tango_jax.models.decode_attention import make_part_attention
from tango_jax.models.transformer import ModelConfig
from tango_jax.runtime.ahead import CompileAhead, quick_options
from tango_jax.sampling.buckets import Shape
from tango_jax.sampling.decode import (
    Rows,
    all_ropes,
    append_tokens,
    decode_step,
    empty_rows,
    goes_on,
    read_prompts,
    row_uniforms,
    rows_specs,
    shardings_of,
)
from tango_jax.sampling.logits import SamplingParams, logits_spec, sample_on_shard

ENTERING = 4  # rows of a shard that enter in one call


@struct.dataclass
class SlotState:
    """B slots of C columns, in layers L."""

    k: tuple  # L x [B, K, E, C], or [B, K, C, E] for a kernel
    v: tuple  # L x [B, K, C, E]
    prompt_length_B: jax.Array  # int32
    steps: jax.Array  # int32[], of the last decode loop
    rows: Rows


@struct.dataclass
class NewRows:
    slot_B: np.ndarray  # int32
    token_B: np.ndarray  # int32, the newest token
    length_B: np.ndarray  # int32, new tokens so far
    limit_B: np.ndarray  # int32
    number_B: np.ndarray  # int32
    prompt_length_B: np.ndarray  # int32
    key_data: np.ndarray  # uint32[2]


@dataclasses.dataclass(frozen=True)
class SlotFns:
    """A row's cache is a `Suffix` of one row of each shard, with layers as the first axis."""

    make_empty: Callable  # (Shape) -> SlotState
    # (weights, token_PX, length_P) -> keys and values, as wide as the longest prompt allowed, and the logits of the
    # first new tokens [P, V]
    read: Callable
    insert: Callable  # (SlotState, what was read, place_B, NewRows, SamplingParams) -> SlotState; the state is donated
    save: Callable  # (SlotState, slot_Z) -> (is_alive_B, a row's cache)
    restore: Callable  # (SlotState, a row's cache, NewRows) -> SlotState; the state is donated
    decode: Callable  # (weights, SlotState, SamplingParams, min_alive) -> SlotState; the state is donated
    resize_layer: Callable  # (columns, k and v of a layer, keep_B) -> k and v
    cache_sharding: jax.sharding.Sharding | None  # of a row's cache

    def compile_ahead(self, ahead: CompileAhead) -> "SlotFns":
        names = [field.name for field in dataclasses.fields(self) if field.name != "cache_sharding"]
        return dataclasses.replace(self, **{name: ahead(getattr(self, name), is_local=True) for name in names})


def slot_specs() -> SlotState:
    """Rows over devices, heads over tensor groups of `sharding.DECODE_AXES`."""
    rows, heads = PartitionSpec("rows"), PartitionSpec("rows", "tensor")
    return SlotState(k=heads, v=heads, prompt_length_B=rows, steps=PartitionSpec(), rows=rows_specs())


def make_slot_fns(
    config: ModelConfig, stop_ids: tuple[int, ...], max_prompt: int, max_new: int, mesh: Mesh | None
) -> SlotFns:
    quickly = quick_options(mesh)
    state, rows, heads = slot_specs(), PartitionSpec("rows"), PartitionSpec("rows", "tensor")
    of_cache, everywhere = PartitionSpec(None, "rows", "tensor"), PartitionSpec()
    new_rows = NewRows(**{field.name: rows for field in dataclasses.fields(NewRows)} | {"key_data": everywhere})
    read = kv.Suffix(heads, heads), logits_spec(mesh, config.vocab_size)

    def jit(fn: Callable, in_specs: tuple, out_specs: object, **settings: object) -> Callable:
        if mesh is not None:
            fn = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        # Pinned, so that each function takes another's result without compiling again.
        return jax.jit(fn, out_shardings=shardings_of(mesh, out_specs), compiler_options=quickly, **settings)

    def resize_layer(columns: int, layer: tuple, keep_B: jax.Array) -> tuple:
        resize_fn = functools.partial(_resize_layer, kv.key_axis(config), columns)
        if mesh is not None:
            resize_fn = jax.shard_map(resize_fn, mesh=mesh, in_specs=(heads, rows), out_specs=heads, check_vma=False)
        return resize_fn(layer, keep_B)

    of_logits = functools.partial(sample_on_shard, mesh, config.vocab_size)
    insert = functools.partial(_insert, config, stop_ids, max_new, of_logits)
    return SlotFns(
        make_empty=jax.jit(
            functools.partial(empty_slots, config, max_new), static_argnums=0, out_shardings=shardings_of(mesh, state)
        ),
        read=jax.jit(
            functools.partial(_read, config, max_prompt, mesh), out_shardings=shardings_of(mesh, read),
            compiler_options=quickly,
        ),
        insert=jit(insert, (state, read, rows, new_rows, everywhere), state, donate_argnums=0),
        save=jit(_save, (state, rows), (rows, of_cache)),
        restore=jit(functools.partial(_restore, max_new), (state, of_cache, new_rows), state, donate_argnums=0),
        decode=jax.jit(
            functools.partial(decode_slots, config, stop_ids, mesh), donate_argnums=1,
            out_shardings=shardings_of(mesh, state), compiler_options=quickly,
        ),
        resize_layer=jax.jit(resize_layer, static_argnums=0, out_shardings=shardings_of(mesh, heads)),
        cache_sharding=shardings_of(mesh, of_cache),
    )


def empty_slots(config: ModelConfig, max_new: int, shape: Shape) -> SlotState:
    count, columns = shape
    cache, zeros = kv.init_suffix(config, count, columns), jnp.zeros((count,), jnp.int32)
    return SlotState(cache.k, cache.v, zeros, jnp.zeros((), jnp.int32), empty_rows(count, max_new))


def _read(
    config: ModelConfig, max_prompt: int, mesh: Mesh | None, weights: dict, token_PX: jax.Array, length_P: jax.Array
) -> tuple[kv.Suffix, jax.Array]:
    prefix, logits_PV = read_prompts(config, mesh, weights, token_PX, length_P)
    widened = [kv.fit_columns(max_prompt, *layer, kv.key_axis(config))
               for layer in zip(prefix.k, prefix.v, strict=True)]
    k, v = zip(*widened, strict=True)
    return kv.Suffix(k, v), logits_PV


def _put(target: jax.Array, slot_B: jax.Array, rows: jax.Array | float) -> jax.Array:
    return target.at[slot_B].set(rows, mode="drop")


def _put_rows(max_new: int, state: SlotState, new: NewRows) -> SlotState:
    """Everything but the caches. Random numbers depend on key and row alone, and are drawn again."""
    rows, slot_B = state.rows, new.slot_B
    rows = rows.replace(
        token_B=_put(rows.token_B, slot_B, new.token_B),
        is_alive_B=_put(rows.is_alive_B, slot_B, True),
        limit_B=_put(rows.limit_B, slot_B, new.limit_B),
        length_B=_put(rows.length_B, slot_B, new.length_B),
        uniform_BT=_put(rows.uniform_BT, slot_B, row_uniforms(new.key_data, new.number_B, max_new)),
    )
    return state.replace(prompt_length_B=_put(state.prompt_length_B, slot_B, new.prompt_length_B), rows=rows)


def _insert(
    config: ModelConfig, stop_ids: tuple[int, ...], max_new: int, sample_fn: Callable,
    state: SlotState, read: tuple[kv.Suffix, jax.Array], place_B: jax.Array, new: NewRows, sampling: SamplingParams,
) -> SlotState:
    """Rows of the prompts `place_B` of those that were read, with their first tokens."""
    (prompts, logits_PV), columns = read, state.v[0].shape[-2]

    def put_prompts(targets: tuple, layers: tuple) -> tuple:
        return tuple(jax.tree.map(lambda target, x: _put(target, new.slot_B, x[place_B]), *pair)
                     for pair in zip(targets, layers, strict=True))

    # All columns are written. A masked one has weight 0 in attention, but 0 x NaN is NaN: a row whose logits were not
    # finite must leave nothing.
    fitted = [kv.fit_columns(columns, *layer, kv.key_axis(config)) for layer in zip(prompts.k, prompts.v, strict=True)]
    k, v = zip(*fitted, strict=True)
    state = _put_rows(max_new, state, new).replace(k=put_prompts(state.k, k), v=put_prompts(state.v, v))
    uniform_B = row_uniforms(new.key_data, new.number_B, max_new)[:, 0]
    token_B, logp_B = sample_fn(logits_PV[place_B], uniform_B, sampling)
    is_alive_B = goes_on(token_B, logp_B, jnp.ones_like(token_B), new.limit_B, stop_ids)
    rows = state.rows
    return state.replace(rows=rows.replace(
        token_B=_put(rows.token_B, new.slot_B, token_B),
        is_alive_B=_put(rows.is_alive_B, new.slot_B, is_alive_B),
        out_token_BT=rows.out_token_BT.at[new.slot_B, 0].set(token_B, mode="drop"),
        out_logp_BT=rows.out_logp_BT.at[new.slot_B, 0].set(logp_B, mode="drop"),
    ))


def _save(state: SlotState, slot_1: jax.Array) -> tuple[jax.Array, kv.Suffix]:
    """One row's caches, and which rows are alive without it."""
    slot = jnp.minimum(slot_1[0], len(state.prompt_length_B) - 1)

    def row_of(layers: tuple) -> kv.Cached:
        return jax.tree.map(lambda *xs: jnp.stack([lax.dynamic_slice_in_dim(x, slot, 1) for x in xs]), *layers)

    return _put(state.rows.is_alive_B, slot_1, False), kv.Suffix(row_of(state.k), row_of(state.v))


def _restore(max_new: int, state: SlotState, cache: kv.Suffix, new: NewRows) -> SlotState:
    def put_layers(targets: tuple, layers: kv.Cached) -> tuple:
        return tuple(
            jax.tree.map(lambda x, stacked, i=index: _put(x, new.slot_B, stacked[i]), target, layers)
            for index, target in enumerate(targets)
        )

    state = _put_rows(max_new, state, new)
    return state.replace(k=put_layers(state.k, cache.k), v=put_layers(state.v, cache.v))


def _resize_layer(key_axis: int, columns: int, layer: tuple, keep_B: jax.Array) -> tuple:
    kept = jax.tree.map(lambda x: jnp.take(x, keep_B, axis=0), layer)
    return kv.fit_columns(columns, *kept, key_axis)


def decode_slots(
    config: ModelConfig,
    stop_ids: tuple[int, ...],
    mesh: Mesh | None,
    weights: dict,
    state: SlotState,
    sampling: SamplingParams,
    min_alive: jax.Array,
) -> SlotState:
    """Samples until a row has filled its slot, or at most `min_alive` (int32[]) rows are alive."""
    B, columns = len(state.prompt_length_B), state.v[0].shape[-2]
    ropes = all_ropes(config, columns)

    def is_unfinished(state: SlotState) -> jax.Array:
        # One sum over the devices for both conditions: a row without room outweighs all others.
        vote_B = jnp.where(state.prompt_length_B + state.rows.length_B <= columns, 1, -B)
        return jnp.sum(jnp.where(state.rows.is_alive_B, vote_B, 0)) > min_alive

    def body(state: SlotState) -> SlotState:
        # Of the newest token. What ended rows write is not read.
        position_B = jnp.minimum(state.prompt_length_B + state.rows.length_B - 1, columns - 1)
        attend_fns = _attend_fns(config, mesh, state, position_B)
        logits_BV, caches = decode_step(config, weights, ropes, state.rows.token_B, position_B, attend_fns)
        rows = append_tokens(state.rows, logits_BV, sampling, stop_ids, mesh)
        k, v = zip(*caches, strict=True)
        return state.replace(k=k, v=v, steps=state.steps + 1, rows=rows)

    # Not a scan: most rows end long before the limit, and with the last one the loop ends.
    return lax.while_loop(is_unfinished, body, state.replace(steps=jnp.zeros((), jnp.int32)))


def _attend_fns(config: ModelConfig, mesh: Mesh | None, state: SlotState, position_B: jax.Array) -> list[AttendFn]:
    layers = list(zip(state.k, state.v, strict=True))
    if config.decode_attention != "xla":
        # Ended rows need nothing; a kernel wants one column at least.
        length_B = jnp.where(state.rows.is_alive_B, position_B + 1, 1)
        part_fn = make_part_attention(config.decode_attention, mesh)
        return [kv.make_slot_attention(k, v, position_B, part_fn=part_fn, length_B=length_B) for k, v in layers]
    age_BC = position_B[:, None] - jnp.arange(state.v[0].shape[-2])[None, :]
    is_seen = {window: (age_BC >= 0) & (age_BC < window) if window else age_BC >= 0 for window in set(config.windows)}
    return [kv.make_slot_attention(k, v, position_B, is_seen[kind.window])
            for kind, (k, v) in zip(config.layer_kinds, layers, strict=True)]
