"""What is compiled from shapes is not compiled again, and a compiler's error reaches the caller."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tango_jax.runtime.ahead import CompileAhead
from tango_jax.runtime.timers import CompileCounter


@pytest.mark.parametrize("num_devices", [None, 1, 4])
def test_a_chain_of_calls_is_compiled_and_not_computed(num_devices):
    mesh = num_devices and jax.make_mesh((num_devices,), ("rows",), devices=jax.devices()[:num_devices])
    sharding = NamedSharding(mesh, P("rows")) if mesh else None
    called = []

    @functools.partial(jax.jit, out_shardings=sharding)
    def first_fn(rows_B):
        jax.debug.callback(lambda: called.append("first"))
        return jnp.outer(rows_B, jnp.arange(3.0))

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1, out_shardings=sharding)
    def next_fn(count, x_BD):
        return x_BD + count

    rows_B = np.ones((8,), np.float32)
    with CompileCounter() as counter, CompileAhead() as ahead:
        first, following = ahead(first_fn), ahead(next_fn)
        for _ in range(2):  # what is asked for twice is compiled once
            shape = following(5, following(5, first(rows_B)))
            following(6, shape)
    assert shape.shape == (8, 3) and not called
    assert len(counter.compilations) == 3  # the second one for 5 and for 6
    with CompileCounter() as counter:
        out_BD = next_fn(6, next_fn(5, next_fn(5, first_fn(rows_B))))
        assert counter.compilations == []
    np.testing.assert_array_equal(out_BD, np.tile(np.arange(3.0) + 16, (8, 1)))
    jax.effects_barrier()
    assert called == ["first"] * len(called) and called


def test_errors_reach_the_caller():
    class Broken:
        out_info = None

        def lower(self, *args):
            return self

        def compile(self):
            raise RuntimeError("no memory to compile")

    with pytest.raises(RuntimeError, match="no memory to compile"), CompileAhead() as ahead:
        ahead(Broken())(1)
    with pytest.raises(TypeError, match="tracing"), CompileAhead() as ahead:
        ahead(jax.jit(lambda: (_ for _ in ()).throw(TypeError("tracing"))))()
