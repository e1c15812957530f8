"""What devices send each other inside a jitted function, under `jax.shard_map` (`over_shards`).

A layer's matrices are gathered over fsdp in the compute dtype when used. Gradients return by reduce-scatter in
`mesh.grad_reduce_dtype`. Heads, mlp width and vocabulary stay split over tensor, with one sum after attention, mlp and
in the loss. On one device nothing is sent. All functions but `over_shards` are called inside it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tango_jax.records import Batch
from tango_jax.sharding.layouts import PARAM_SPECS, param_shardings
from tango_jax.sharding.placement import BATCH_AXES


def over_shards(fn: Callable, mesh: Mesh | None, out_specs: P) -> Callable:
    """`fn(params, micro)` on each device: stored parameters, Z = 1. Gradients are summed over all rows, as stored."""
    if mesh is None or mesh.size == 1:
        return fn

    def sharded(params: dict, micro: Batch) -> Any:
        stored = jax.tree.map(lambda place: place.spec, param_shardings(mesh, params))
        rows = jax.tree.map(lambda leaf: P(BATCH_AXES) if leaf.ndim else P(), micro)

        def on_device(params: dict, micro: Batch) -> Any:
            # For rows that differ between devices: here, so that gradients are summed over rows once, as stored.
            return fn(jax.tree.map(lambda param, place: jax.lax.pcast(
                param, tuple(name for name in BATCH_AXES if name not in place), to="varying"), params, stored), micro)

        return jax.shard_map(on_device, mesh=mesh, in_specs=(stored, rows), out_specs=out_specs)(params, micro)

    return sharded


def sum_over_rows(values: Any, mesh: Mesh | None) -> Any:
    return values if mesh is None or mesh.size == 1 else jax.lax.psum(values, BATCH_AXES)


def max_over_rows(values: Any, mesh: Mesh | None) -> Any:
    """The maximum over the mesh axes of rows; not differentiable."""
    return values if mesh is None or mesh.size == 1 else jax.lax.pmax(jax.lax.stop_gradient(values), BATCH_AXES)


def tensor_size(mesh: Mesh | None) -> int:
    return 1 if mesh is None else mesh.shape["tensor"]


def tensor_index(mesh: Mesh | None) -> jax.Array | int:
    """This device's place in its tensor group."""
    return 0 if tensor_size(mesh) == 1 else jax.lax.axis_index("tensor")


def copy_to_tensor(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """x before matrices split over tensor: gradients are summed (operator f of Megatron-LM, arXiv 1909.08053)."""
    return x if tensor_size(mesh) == 1 else jax.lax.pcast(x, "tensor", to="varying")


def sum_over_tensor(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    return x if tensor_size(mesh) == 1 else jax.lax.psum(x, "tensor")


def mean_over_tensor(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """The mean of means over parts of equal size."""
    return x if tensor_size(mesh) == 1 else jax.lax.pmean(x, "tensor")


def max_over_tensor(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """The maximum over the tensor axis; not differentiable."""
    x = jax.lax.stop_gradient(x)
    return x if tensor_size(mesh) == 1 else jax.lax.pmax(x, "tensor")


def gather(x: jax.Array, mesh: Mesh | None, stored: P, dtype: str, reduce_dtype: str) -> jax.Array:
    """A parameter, whole over fsdp, sent in `dtype`. Its gradient sums in the wider of it and `reduce_dtype`."""
    if not _is_split(mesh, stored):
        return x.astype(dtype)
    sum_dtype = jnp.promote_types(dtype, reduce_dtype)
    return _gather(x, list(stored).index("fsdp"), jnp.dtype(dtype), sum_dtype, x.dtype)


def _is_split(mesh: Mesh | None, stored: P) -> bool:
    return mesh is not None and mesh.shape["fsdp"] > 1 and "fsdp" in stored


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(x: jax.Array, axis: int, dtype: np.dtype, sum_dtype: np.dtype, stored_dtype: np.dtype) -> jax.Array:
    return jax.lax.all_gather(x.astype(dtype), "fsdp", axis=axis, tiled=True)


def _gather_forward(
    x: jax.Array, axis: int, dtype: np.dtype, sum_dtype: np.dtype, stored_dtype: np.dtype
) -> tuple[jax.Array, None]:
    return _gather(x, axis, dtype, sum_dtype, stored_dtype), None


def _gather_backward(
    axis: int, dtype: np.dtype, sum_dtype: np.dtype, stored_dtype: np.dtype, residuals: None, grad: jax.Array
) -> tuple[jax.Array]:
    grad = jax.lax.psum_scatter(grad.astype(sum_dtype), "fsdp", scatter_dimension=axis, tiled=True)
    return (grad.astype(stored_dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


def gather_table(x: jax.Array, mesh: Mesh | None, stored: P, dtype: str, reduce_dtype: str) -> jax.Array:
    """`gather` of a table [V, D] from which rows are picked."""
    table_VD = gather(x, mesh, stored, dtype, reduce_dtype)
    if not _is_split(mesh, stored) or mesh.devices.flat[0].platform != "tpu":
        return table_VD
    # A TPU scatters a gradient laid out by rows only in parts of 128 columns; otherwise it sums the whole, twice the
    # bytes. By columns any parts will do.
    return with_layout_constraint(table_VD, Layout(major_to_minor=(1, 0)))


def gather_layer(layer: dict, mesh: Mesh | None, dtype: str, reduce_dtype: str) -> dict:
    """One layer's parameters in the dtype and layout of use."""
    if mesh is None or mesh.size == 1:
        return layer
    # Without the L axis, which the scan slices off.
    specs = {name: P(*PARAM_SPECS[f"layers/{name}"][1:]) for name in layer}
    # An int8 base and its scales are sent as they are.
    dtypes = {name: leaf.dtype if leaf.dtype == jnp.int8 or name.endswith("_scale") else jnp.dtype(dtype)
              for name, leaf in layer.items()}
    return {name: gather(leaf, mesh, specs[name], dtypes[name], reduce_dtype) for name, leaf in layer.items()}
