"""Larger caches and fewer rows of a decode state, in consecutive batches. Caches are copied layer by layer: only one
layer is in memory twice."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from tango_jax.models import cache as kv
from tango_jax.runtime.ahead import CompileAhead, quick_options
from tango_jax.sampling.decode import DecodeState, Rows, shardings_of

Layer = tuple[kv.Cached, ...]  # keys and values of a layer


@dataclasses.dataclass(frozen=True)
class ResizeFns:
    grow_layer: Callable  # (cache bucket, suffix k and v) -> suffix k and v
    compact_layer: Callable  # (prefix and suffix k and v, prompt_B, keep_B) -> the same
    compact_rest: Callable  # (length_P, Rows, prompt_B, keep_B) -> length_P, Rows

    def compile_ahead(self, ahead: CompileAhead) -> "ResizeFns":
        names = [field.name for field in dataclasses.fields(self)]
        return dataclasses.replace(self, **{name: ahead(getattr(self, name), is_local=True) for name in names})


def make_resize_fns(mesh: Mesh | None, key_axis: int = -1) -> ResizeFns:
    # Pinned, so that each function takes another's result without compiling again.
    of_layer, of_rows = (shardings_of(mesh, PartitionSpec(*axes)) for axes in (("rows", "tensor"), ("rows",)))
    return ResizeFns(
        grow_layer=jax.jit(
            lambda bucket, layer: kv.fit_columns(bucket, *layer, key_axis), static_argnums=0, out_shardings=of_layer
        ),
        compact_layer=jax.jit(_compact_layer, out_shardings=of_layer, compiler_options=quick_options(mesh)),
        compact_rest=jax.jit(_compact_rest, out_shardings=of_rows, compiler_options=quick_options(mesh)),
    )


def grow_cache(fns: ResizeFns, state: DecodeState, bucket: int) -> DecodeState:
    """Makes room for `bucket` new tokens. The old suffix is deleted."""
    layers = list(zip(state.suffix.k, state.suffix.v, strict=True))
    for index in range(len(layers)):
        replace_layer(layers, index, lambda layer: fns.grow_layer(bucket, layer))
    k, v = zip(*layers, strict=True)
    return state.replace(suffix=kv.Suffix(k=k, v=v))


def compact_rows(fns: ResizeFns, state: DecodeState, keep_B: np.ndarray) -> DecodeState:
    """Keeps the rows `keep_B`, each with a copy of its prompt's cache (P becomes B). The old cache is deleted."""
    # The rows left may form unequal groups, so they cannot share prompts by reshaping.
    prompt_B = keep_B // (len(state.rows.token_B) // len(state.prefix.length_P))
    layers = list(zip(state.prefix.k, state.prefix.v, state.suffix.k, state.suffix.v, strict=True))
    length_P, rows = fns.compact_rest(state.prefix.length_P, state.rows, prompt_B, keep_B)
    for index in range(len(layers)):
        replace_layer(layers, index, lambda layer: fns.compact_layer(layer, prompt_B, keep_B))
    prefix_k, prefix_v, suffix_k, suffix_v = zip(*layers, strict=True)
    prefix = kv.Prefix(k=prefix_k, v=prefix_v, length_P=length_P)
    return state.replace(prefix=prefix, suffix=kv.Suffix(k=suffix_k, v=suffix_v), rows=rows)


def replace_layer(layers: list[Layer], index: int, layer_fn: Callable) -> None:
    layer = layers[index]
    # Waited for: calls are dispatched ahead of the device, and memory for all results would be taken at once.
    layers[index] = jax.block_until_ready(layer_fn(layer))
    for array in jax.tree.leaves(layer):
        if isinstance(array, jax.Array):  # and not only its shape, as in `compile_ahead`
            array.delete()


def _compact_layer(layer: Layer, prompt_B: jax.Array, keep_B: jax.Array) -> Layer:
    def take(rows_B: jax.Array, arrays: Layer) -> Layer:
        return jax.tree.map(lambda x: jnp.take(x, rows_B, axis=0), arrays)

    return (*take(prompt_B, layer[:2]), *take(keep_B, layer[2:]))


def _compact_rest(
    length_P: jax.Array, rows: Rows, prompt_B: jax.Array, keep_B: jax.Array
) -> tuple[jax.Array, Rows]:
    return length_P[prompt_B], jax.tree.map(lambda x: x[keep_B], rows)
