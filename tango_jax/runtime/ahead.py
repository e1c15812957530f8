"""Compiles jitted functions before their first call. The result's shapes can be arguments of the next function."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import jax
from jax.sharding import Mesh

from tango_jax.runtime.machine import num_cpus

# XLA compiles without Python's lock. A large model's program takes a few GB of host memory.
MOST_AT_A_TIME = 8


def quick_options(mesh: Mesh | None) -> dict[str, int]:
    """`compiler_options` of a jitted function, which must not stand inside another. On CPUs XLA then compiles at a
    lower level, which takes less time; the programs are as fast (configs/results/speed.md). Other platforms keep their
    level."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return {"xla_backend_optimization_level": 1} if platform == "cpu" else {}


class CompileAhead:
    """Wraps jitted functions in a `with` statement, which compiles everything at its end."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(min(MOST_AT_A_TIME, num_cpus()), thread_name_prefix="compile")
        # Compilers of several processes may wait for each other, and need one order.
        self._shared_pool = ThreadPoolExecutor(1) if jax.process_count() > 1 else self._pool
        self._pending: dict[Any, tuple[Future, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type | None, *_: object) -> None:
        for pool in {self._pool, self._shared_pool}:
            pool.shutdown(cancel_futures=error_type is not None)
        if error_type is None:
            for compiled, _ in self._pending.values():
                compiled.result()  # raises what the compiler did

    def __call__(self, fn: Callable, is_local: bool = False) -> Callable:
        """A function that compiles `fn` and returns the shapes of its result. `is_local`: on this process's devices
        alone."""
        pool = self._pool if is_local else self._shared_pool

        def compile_fn(*args: Any) -> Any:
            key = (id(fn), *program_key(args))
            if key not in self._pending:
                lowered = fn.lower(*args)
                self._pending[key] = pool.submit(lowered.compile), lowered.out_info
            return self._pending[key][1]

        return compile_fn


def program_key(args: tuple) -> tuple:
    """What a program depends on: structure, shapes, types, places, static numbers."""
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple(
        (leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)) if hasattr(leaf, "shape") else leaf for leaf in leaves
    )
