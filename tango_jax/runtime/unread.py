"""Arrays that are read when they are needed, one at a time: large models are exported without being held whole."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Unread:
    """A leaf of a tree. `load` reads it, each time again."""

    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[], jax.Array]


def load_all(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.load(), tree)


def read_array(leaf: Any, sharding: jax.sharding.Sharding | None, read_fn: Callable[[tuple], np.ndarray]) -> jax.Array:
    """An array of the parts that `read_fn(slices with start and stop)` returns, each read once.

    Without a sharding it is not committed to a device: jitted functions recompile for arrays that are.
    """
    if sharding is None:
        return jax.device_put(read_fn(_bounds((slice(None),) * len(leaf.shape), leaf.shape)))
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
