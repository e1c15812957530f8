"""Whether parameters and optimizer states can still be computed with. Stage: before every save, after every restore."""

from typing import Any

import jax
import jax.numpy as jnp

# Norms square what they are given, and the square of more than 1.8e19 is infinite in float32: a parameter near it is
# the trace of a step that went wrong, although the number itself is finite.
LARGEST = 1e18
BROKEN_VALUES = f"values that are NaN, infinite or above {LARGEST:g}"


def first_not_finite(tree: Any) -> str | None:
    """The slash-separated name of the first array that holds NaN, infinity or a magnitude above LARGEST; None if none.

    Every process must call it. The arrays are read where they lie, and only one flag for each of them is fetched.
    """
    named = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
             for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
             if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    flags = jax.device_get(_are_usable([leaf for _, leaf in named]))
    return next((name for (name, _), is_usable in zip(named, flags, strict=True) if not is_usable), None)


@jax.jit
def _are_usable(leaves: list[jax.Array]) -> list[jax.Array]:
    # In float32: float16 cannot hold the limit. NaN compares false.
    return [jnp.all(jnp.abs(leaf.astype(jnp.float32)) <= LARGEST) for leaf in leaves]


def check_loaded(tree: Any, name: str, otherwise: str) -> Any:
    """Arrays out of a checkpoint, as they are.

    Raises:
        ValueError: a value is NaN, infinite or absurdly large; `otherwise` says what to do then.
    """
    broken = first_not_finite(tree)
    if broken is not None:
        raise ValueError(f"{name}: the array {broken} holds {BROKEN_VALUES}, with which nothing can be computed: "
                         f"{otherwise}")
    return tree
