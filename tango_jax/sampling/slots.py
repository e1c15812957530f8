"""The jitted functions of continuous batching that run no model: rows enter and leave a decode state.

A slot is a row of the state, numbered on its shard; a number beyond them stands for no row. No shard reads another's
caches.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from tango_jax.models import cache as kv
from tango_jax.models.transformer import ModelConfig
from tango_jax.runtime.ahead import CompileAhead
from tango_jax.sampling.decode import DecodeState, StartedRows, row_uniforms, shardings_of, state_specs


@struct.dataclass
class NewRows:
    slot_B: np.ndarray  # int32
    token_B: np.ndarray  # int32, the newest token
    length_B: np.ndarray  # int32, new tokens so far
    limit_B: np.ndarray  # int32
    number_B: np.ndarray  # int32
    prompt_length_B: np.ndarray  # int32
    key_data: np.ndarray  # uint32[2]


@struct.dataclass
class RowCache:
    """One row of each shard: its prompt's keys and values, and its new tokens' from column 0 on."""

    prefix_k: kv.Cached  # [L, Z, K, E, prompt bucket]
    prefix_v: kv.Cached  # [L, Z, K, prompt bucket, E]
    suffix_k: kv.Cached  # [L, Z, K, E, cache bucket]
    suffix_v: kv.Cached  # [L, Z, K, cache bucket, E]


@dataclasses.dataclass(frozen=True)
class SlotFns:
    make_empty: Callable  # (rows, prompt bucket, cache bucket) -> DecodeState
    insert: Callable  # (DecodeState, StartedRows, NewRows) -> DecodeState; the state is donated
    save: Callable  # (DecodeState, slot_Z) -> (is_alive_B, RowCache)
    restore: Callable  # (DecodeState, RowCache, NewRows) -> DecodeState; the state is donated
    widen: Callable  # (cache bucket, RowCache) -> RowCache
    cache_sharding: jax.sharding.Sharding | None  # of a RowCache

    def compile_ahead(self, ahead: CompileAhead) -> "SlotFns":
        fns = {name: ahead(getattr(self, name)) for name in ("make_empty", "insert", "save", "restore", "widen")}
        return dataclasses.replace(self, **fns)


def make_slot_fns(config: ModelConfig, max_new: int, mesh: Mesh | None) -> SlotFns:
    state, of_cache, rows = state_specs(), PartitionSpec(None, "rows", "tensor"), PartitionSpec("rows")
    new_rows = NewRows(**{field.name: rows for field in dataclasses.fields(NewRows)} | {"key_data": PartitionSpec()})
    started = StartedRows(prefix=state.prefix, token_B=rows, logp_B=rows, is_alive_B=rows)

    def jit(fn: Callable, in_specs: tuple, out_specs: object, **settings: object) -> Callable:
        if mesh is not None:
            fn = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(fn, out_shardings=shardings_of(mesh, out_specs), **settings)

    def insert(state: DecodeState, started: StartedRows, new: NewRows) -> DecodeState:
        return _insert(max_new, state, started, new)

    def restore(state: DecodeState, cache: RowCache, new: NewRows) -> DecodeState:
        return _restore(max_new, state, cache, new)

    return SlotFns(
        make_empty=jax.jit(
            lambda *sizes: empty_state(config, max_new, *sizes),
            static_argnums=(0, 1, 2),
            out_shardings=shardings_of(mesh, state),
        ),
        insert=jit(insert, (state, started, new_rows), state, donate_argnums=0),
        save=jit(_save, (state, rows), (rows, of_cache)),
        restore=jit(restore, (state, of_cache, new_rows), state, donate_argnums=0),
        widen=jax.jit(_widen, static_argnums=0, out_shardings=shardings_of(mesh, of_cache)),
        cache_sharding=shardings_of(mesh, of_cache),
    )


def empty_state(config: ModelConfig, max_new: int, rows: int, prompt_bucket: int, cache_bucket: int) -> DecodeState:
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


def _put(target: jax.Array, slot_B: jax.Array, rows: jax.Array | float) -> jax.Array:
    return target.at[slot_B].set(rows, mode="drop")


def _put_rows(max_new: int, state: DecodeState, new: NewRows) -> DecodeState:
    """Everything but the caches. Random numbers depend on key and row alone, and are drawn again."""
    return state.replace(
        prefix=state.prefix.replace(length_P=_put(state.prefix.length_P, new.slot_B, new.prompt_length_B)),
        token_B=_put(state.token_B, new.slot_B, new.token_B),
        is_alive_B=_put(state.is_alive_B, new.slot_B, True),
        limit_B=_put(state.limit_B, new.slot_B, new.limit_B),
        length_B=_put(state.length_B, new.slot_B, new.length_B),
        uniform_BT=_put(state.uniform_BT, new.slot_B, row_uniforms(new.key_data, new.number_B, max_new)),
    )


def _insert(max_new: int, state: DecodeState, started: StartedRows, new: NewRows) -> DecodeState:
    state = _put_rows(max_new, state, new)
    P, B, width = started.prefix.length_P.shape[0], new.slot_B.shape[0], state.prefix.v[0].shape[-2]
    widened = [kv.append_columns(width, *layer) for layer in zip(started.prefix.k, started.prefix.v, strict=True)]
    k, v = zip(*widened, strict=True)

    def put_prompts(targets: tuple, prompts: tuple) -> tuple:
        return jax.tree.map(
            lambda target, x: _put(target, new.slot_B, jnp.repeat(x, B // P, axis=0)), targets, prompts
        )

    def clear(targets: tuple) -> tuple:
        return jax.tree.map(lambda target: _put(target, new.slot_B, 0), targets)

    prefix = state.prefix.replace(k=put_prompts(state.prefix.k, k), v=put_prompts(state.prefix.v, v))
    # A masked column has weight 0 in attention, but 0 x NaN is NaN: a row whose logits were not finite leaves nothing.
    return state.replace(prefix=prefix, suffix=kv.Suffix(k=clear(state.suffix.k), v=clear(state.suffix.v)))


def _first_column(state: DecodeState, length: jax.Array) -> jax.Array:
    """The column of a row's first new token. The newest is not in the cache yet."""
    return (state.step - length) % state.out_token_BS.shape[1]


def _save(state: DecodeState, slot_1: jax.Array) -> tuple[jax.Array, RowCache]:
    """One row's caches, and which rows are alive without it."""
    slot = jnp.minimum(slot_1[0], state.length_B.shape[0] - 1)
    first = _first_column(state, state.length_B[slot])

    def rows_of(layers: tuple) -> kv.Cached:
        return jax.tree.map(lambda *xs: jnp.stack([lax.dynamic_slice_in_dim(x, slot, 1) for x in xs]), *layers)

    suffix_k, suffix_v = kv.map_columns(
        lambda x, axis: jnp.roll(x, -first, axis), rows_of(state.suffix.k), rows_of(state.suffix.v)
    )
    cache = RowCache(rows_of(state.prefix.k), rows_of(state.prefix.v), suffix_k, suffix_v)
    return _put(state.is_alive_B, slot_1, False), cache


def _restore(max_new: int, state: DecodeState, cache: RowCache, new: NewRows) -> DecodeState:
    """The row's new tokens go into the columns before the next one."""
    state = _put_rows(max_new, state, new)
    first = _first_column(state, new.length_B[0])

    def put_layers(targets: tuple, layers: kv.Cached) -> tuple:
        return tuple(
            jax.tree.map(lambda x, stacked, i=index: _put(x, new.slot_B, stacked[i]), target, layers)
            for index, target in enumerate(targets)
        )

    suffix_k, suffix_v = kv.map_columns(lambda x, axis: jnp.roll(x, first, axis), cache.suffix_k, cache.suffix_v)
    prefix = state.prefix.replace(
        k=put_layers(state.prefix.k, cache.prefix_k), v=put_layers(state.prefix.v, cache.prefix_v)
    )
    suffix = kv.Suffix(
        k=put_layers(state.suffix.k, suffix_k),
        v=put_layers(state.suffix.v, suffix_v),
    )
    return state.replace(prefix=prefix, suffix=suffix)


def _widen(bucket: int, cache: RowCache) -> RowCache:
    suffix_k, suffix_v = kv.append_columns(bucket, cache.suffix_k, cache.suffix_v)
    return cache.replace(suffix_k=suffix_k, suffix_v=suffix_v)
