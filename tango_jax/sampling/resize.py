"""Larger caches and fewer rows of a decode state, in consecutive batches. Caches are copied layer by layer: only one
layer is in memory twice."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from tango_jax.models import cache as kv
from tango_jax.runtime.ahead import CompileAhead
from tango_jax.sampling.decode import DecodeState, shardings_of, state_specs

Layer = tuple[kv.Cached, ...]  # keys and values of a layer


@dataclasses.dataclass(frozen=True)
class ResizeFns:
    grow_layer: Callable  # (cache bucket, suffix k and v) -> suffix k and v
    grow_rest: Callable  # (cache bucket, DecodeState without caches) -> the same
    compact_layer: Callable  # (prefix and suffix k and v, prompt_B, keep_B) -> the same
    compact_rest: Callable  # (DecodeState without caches, prompt_B, keep_B) -> the same
    windows: tuple[int, ...] | None  # of each layer, 0 for none, where those that have one keep no more columns

    def compile_ahead(self, ahead: CompileAhead) -> "ResizeFns":
        names = [field.name for field in dataclasses.fields(self) if field.name != "windows"]
        return dataclasses.replace(self, **{name: ahead(getattr(self, name), name, is_local=True) for name in names})


def make_resize_fns(mesh: Mesh | None, key_axis: int = -1, windows: tuple[int, ...] | None = None) -> ResizeFns:
    specs, heads = state_specs(), PartitionSpec("rows", "tensor")
    # Pinned, so that each function takes another's result without compiling again.
    of_layer, of_rest = shardings_of(mesh, heads), shardings_of(mesh, _without_caches(specs))
    grow_layer = functools.partial(_grow_layer, key_axis)
    return ResizeFns(
        grow_layer=jax.jit(grow_layer, static_argnums=0, out_shardings=of_layer),
        grow_rest=jax.jit(_grow_rest, static_argnums=0, out_shardings=of_rest),
        compact_layer=jax.jit(_compact_layer, out_shardings=of_layer),
        compact_rest=jax.jit(_compact_rest, out_shardings=of_rest),
        windows=windows,
    )


def grow_cache(fns: ResizeFns, state: DecodeState, bucket: int) -> DecodeState:
    """Makes room for `bucket` new tokens. The old suffix is deleted."""
    layers = list(zip(state.suffix.k, state.suffix.v, strict=True))
    rest = fns.grow_rest(bucket, _without_caches(state))
    for index, window in enumerate(fns.windows or (0,) * len(layers)):
        length = kv.suffix_length(window, bucket)
        if layers[index][1].shape[-2] < length:
            replace_layer(layers, index, lambda layer, length=length: fns.grow_layer(length, layer))
    k, v = zip(*layers, strict=True)
    return rest.replace(prefix=state.prefix, suffix=kv.Suffix(k=k, v=v))


def compact_rows(fns: ResizeFns, state: DecodeState, keep_B: np.ndarray) -> DecodeState:
    """Keeps the rows `keep_B`, each with a copy of its prompt's cache (P becomes B). The old cache is deleted."""
    # The rows left may form unequal groups, so they cannot share prompts by reshaping.
    prompt_B = keep_B // (state.out_token_BS.shape[0] // state.prefix.length_P.shape[0])
    layers = list(zip(state.prefix.k, state.prefix.v, state.suffix.k, state.suffix.v, strict=True))
    rest = fns.compact_rest(_without_caches(state), prompt_B, keep_B)
    for index in range(len(layers)):
        replace_layer(layers, index, lambda layer: fns.compact_layer(layer, prompt_B, keep_B))
    prefix_k, prefix_v, suffix_k, suffix_v = zip(*layers, strict=True)
    prefix = kv.Prefix(k=prefix_k, v=prefix_v, length_P=rest.prefix.length_P)
    return rest.replace(prefix=prefix, suffix=kv.Suffix(k=suffix_k, v=suffix_v))


def replace_layer(layers: list[Layer], index: int, layer_fn: Callable) -> None:
    layer = layers[index]
    # Waited for: calls are dispatched ahead of the device, and memory for all results would be taken at once.
    layers[index] = jax.block_until_ready(layer_fn(layer))
    for array in jax.tree.leaves(layer):
        if isinstance(array, jax.Array):  # and not only its shape, as in `compile_ahead`
            array.delete()


def _without_caches(state: DecodeState) -> DecodeState:
    return state.replace(prefix=kv.Prefix(k=(), v=(), length_P=state.prefix.length_P), suffix=kv.Suffix(k=(), v=()))


def _grow_layer(key_axis: int, bucket: int, layer: Layer) -> Layer:
    return kv.fit_columns(bucket, *layer, key_axis)


def _grow_rest(bucket: int, rest: DecodeState) -> DecodeState:
    extra = bucket - rest.out_token_BS.shape[1]
    return rest.replace(
        out_token_BS=jnp.pad(rest.out_token_BS, ((0, 0), (0, extra))),
        out_logp_BS=jnp.pad(rest.out_logp_BS, ((0, 0), (0, extra))),
    )


def _compact_layer(layer: Layer, prompt_B: jax.Array, keep_B: jax.Array) -> Layer:
    def take(rows_B: jax.Array, arrays: Layer) -> Layer:
        return jax.tree.map(lambda x: jnp.take(x, rows_B, axis=0), arrays)

    return (*take(prompt_B, layer[:2]), *take(keep_B, layer[2:]))


def _compact_rest(rest: DecodeState, prompt_B: jax.Array, keep_B: jax.Array) -> DecodeState:
    kept = {
        field.name: getattr(rest, field.name)[keep_B]
        for field in dataclasses.fields(rest)
        if field.name not in ("prefix", "suffix", "step")
    }
    return rest.replace(prefix=rest.prefix.replace(length_P=rest.prefix.length_P[prompt_B]), **kept)
