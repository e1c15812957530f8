"""Names, shapes, fingerprints and values of the arrays in a tree, as checkpoints store and check them."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tango_jax.runtime.unread import Unread

# The square of a parameter above 1.8e19 overflows float32 in norms. Such a parameter means that training diverged.
LARGEST = 1e18
BROKEN_VALUES = f"values that are NaN, infinite or above {LARGEST:g}"


def flatten_names(tree: Any) -> dict[str, Any]:
    """{slash-separated name: array}, so that files do not depend on container types."""
    leaves = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
              for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
    flat = dict(leaves)
    assert len(flat) == len(leaves), f"two arrays share a name among {[name for name, _ in leaves]}"
    return flat


def prefix_of(part: tuple[str, ...]) -> str:
    """Of the names of a branch."""
    return "".join(f"{name}/" for name in part)


def array_table(tree: Any) -> dict[str, str]:
    """{name: "float32[3,4]"}."""
    return {name: describe_array(leaf) for name, leaf in flatten_names(tree).items()}


def describe_array(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def tree_fingerprint(tree: Any) -> str:
    """Hash of names, shapes, dtypes and bits: equal for bit-equal trees, on any mesh. Computed where the arrays are;
    leaves may be `Unread`."""
    flat = dict(sorted(flatten_names(tree).items()))
    # One at a time: with more virtual devices than cores, concurrent sums deadlock.
    sums = [int(_mixed_sum(leaf.load() if isinstance(leaf, Unread) else leaf)) for leaf in flat.values()]
    lines = [f"{name} {describe_array(leaf)} {total}" for (name, leaf), total in zip(flat.items(), sums, strict=True)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@jax.jit
def _mixed_sum(leaf: jax.Array) -> jax.Array:
    """uint32 sum of all elements' bits, each mixed with its index. The order does not matter."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
    place = jnp.zeros(leaf.shape, jnp.uint32)
    for axis, size in enumerate(leaf.shape):
        place = place * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
    mixed = (bits ^ (place * np.uint32(0x9E3779B1))) * np.uint32(0x85EBCA77)
    return jnp.sum(mixed ^ (mixed >> 15), dtype=jnp.uint32)


def first_not_finite(tree: Any) -> str | None:
    """Name of the first array with NaN, infinity or a magnitude above LARGEST. All processes must call it."""
    flat = {name: leaf for name, leaf in flatten_names(tree).items() if jnp.issubdtype(leaf.dtype, jnp.inexact)}
    flags = jax.device_get(_are_usable(list(flat.values())))
    return next((name for name, is_usable in zip(flat, flags, strict=True) if not is_usable), None)


@jax.jit
def _are_usable(leaves: list[jax.Array]) -> list[jax.Array]:
    # float16 cannot represent the limit. NaN compares false.
    return [jnp.all(jnp.abs(leaf.astype(jnp.float32)) <= LARGEST) for leaf in leaves]

