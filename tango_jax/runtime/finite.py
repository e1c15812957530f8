"""Checks that parameters and optimizer states are finite and of usable magnitude.

Takes a pytree of arrays and returns the name of the first broken one, or raises. Runs before every save, and on weights
that come from elsewhere.
"""

from typing import Any

import jax
import jax.numpy as jnp

# Norms square their input, and the square of anything above 1.8e19 overflows float32: a parameter near that limit is
# the result of a diverged update, even though the number itself is finite.
LARGEST = 1e18
BROKEN_VALUES = f"values that are NaN, infinite or above {LARGEST:g}"


def first_not_finite(tree: Any) -> str | None:
    """Return the slash-separated name of the first array with NaN, infinity or a magnitude above LARGEST, or None.

    Every process must call this. The arrays are reduced where they reside; only one flag per array is fetched.
    """
    named = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
             for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
             if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    flags = jax.device_get(_are_usable([leaf for _, leaf in named]))
    return next((name for (name, _), is_usable in zip(named, flags, strict=True) if not is_usable), None)


@jax.jit
def _are_usable(leaves: list[jax.Array]) -> list[jax.Array]:
    # In float32, since float16 cannot represent the limit. NaN compares false.
    return [jnp.all(jnp.abs(leaf.astype(jnp.float32)) <= LARGEST) for leaf in leaves]


def check_loaded(tree: Any, name: str, otherwise: str) -> Any:
    """Return arrays loaded from a checkpoint unchanged, after checking their values.

    Raises:
        ValueError: a value is NaN, infinite or absurdly large; `otherwise` tells the user what to do.
    """
    broken = first_not_finite(tree)
    if broken is not None:
        raise ValueError(f"{name}: the array {broken} holds {BROKEN_VALUES}, so it cannot be used: {otherwise}")
    return tree
