"""Arrays that are read when they are needed, one at a time: large models are exported without being held whole."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Unread:
    """A leaf of a tree. `load` reads it, each time again, onto devices only if they share it: `jax.device_put` keeps
    its argument in memory until the next call."""

    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[], jax.Array | np.ndarray]


def load_all(tree: Any) -> Any:
    """As arrays on devices, on the default one without being committed to it: for others jitted functions recompile."""
    return jax.tree.map(lambda leaf: _on_device(leaf.load()), tree)


def _on_device(array: jax.Array | np.ndarray) -> jax.Array:
    return array if isinstance(array, jax.Array) else jax.device_put(array)


def read_array(
    leaf: Any, sharding: jax.sharding.Sharding | None, read_fn: Callable[[tuple], np.ndarray]
) -> jax.Array | np.ndarray:
    """An array of the parts that `read_fn(slices with start and stop)` returns, each read once; without a sharding,
    the whole in host memory."""
    if sharding is None:
        return read_fn(_bounds((slice(None),) * len(leaf.shape), leaf.shape))
    parts = {}

    def part(index: tuple[slice, ...]) -> np.ndarray:
        bounds = _bounds(index, leaf.shape)
        key = tuple((one.start, one.stop) for one in bounds)
        if key not in parts:  # several devices may hold it
            parts[key] = read_fn(bounds)
        return parts[key]

    return jax.make_array_from_callback(leaf.shape, sharding, part, dtype=leaf.dtype)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Slices with start and stop."""
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True))
