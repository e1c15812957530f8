"""What devices send to each other inside a jitted function: parameters that are gathered, and sums.

Forward and backward pass run under `jax.shard_map` (`over_shards`), so that what is sent is what the code says: a
layer's matrices are gathered over fsdp in the compute dtype when they are used, and their gradients go back by
reduce-scatter, in float32 unless `mesh.grad_reduce_dtype` says otherwise; heads, mlp width and vocabulary stay split
over tensor, with one sum after attention, after the mlp, and in the loss. On a single device everything here does
nothing.
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
    """`fn(params, micro)` on every device by itself: parameters as they are stored, Z = 1 of the batch.

    The gradient with respect to the parameters comes out as they are stored, summed over all rows.
    """
    if mesh is None or mesh.size == 1:
        return fn

    def sharded(params: dict, micro: Batch) -> Any:
        stored = jax.tree.map(lambda place: place.spec, param_shardings(mesh, params))
        rows = jax.tree.map(lambda leaf: P(BATCH_AXES) if leaf.ndim else P(), micro)

        def on_device(params: dict, micro: Batch) -> Any:
            # Here, not where they are used: the sum of their gradients over rows is then made once, of what is stored.
            return fn(jax.tree.map(_used_by_rows, params, stored), micro)

        return jax.shard_map(on_device, mesh=mesh, in_specs=(stored, rows), out_specs=out_specs)(params, micro)

    return sharded


def _used_by_rows(param: jax.Array, stored: P) -> jax.Array:
    """The parameter, for use by rows that differ between devices: its gradient is summed over them."""
    return jax.lax.pcast(param, tuple(name for name in BATCH_AXES if name not in stored), to="varying")


def sum_over_rows(values: Any, mesh: Mesh | None) -> Any:
    """Inside `over_shards`: the sum of all shards' values, in each."""
    return values if mesh is None or mesh.size == 1 else jax.lax.psum(values, BATCH_AXES)


def max_over_rows(values: Any, mesh: Mesh | None) -> Any:
    """Inside `over_shards`: the largest of all shards' values, in each. Not differentiable."""
    return values if mesh is None or mesh.size == 1 else jax.lax.pmax(jax.lax.stop_gradient(values), BATCH_AXES)


def tensor_size(mesh: Mesh | None) -> int:
    return 1 if mesh is None else mesh.shape["tensor"]


def tensor_index(mesh: Mesh | None) -> jax.Array | int:
    """Inside `over_shards`: this device's place in its tensor group."""
    return 0 if tensor_size(mesh) == 1 else jax.lax.axis_index("tensor")


def copy_to_tensor(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Inside `over_shards`: x on its way into matrices that are split over tensor.

    The backward pass sums the devices' gradients of x (the operator f of Megatron-LM, arXiv 1909.08053).
    """
    return x if tensor_size(mesh) == 1 else jax.lax.pcast(x, "tensor", to="varying")


def sum_over_tensor(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Inside `over_shards`: the sum of the parts that a tensor group's devices have computed."""
    return x if tensor_size(mesh) == 1 else jax.lax.psum(x, "tensor")


def mean_over_tensor(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Inside `over_shards`: the mean of what a tensor group's devices have computed of parts of equal size."""
    return x if tensor_size(mesh) == 1 else jax.lax.pmean(x, "tensor")


def max_over_tensor(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Like `sum_over_tensor`; not differentiable."""
    x = jax.lax.stop_gradient(x)
    return x if tensor_size(mesh) == 1 else jax.lax.pmax(x, "tensor")


def gather(x: jax.Array, mesh: Mesh | None, stored: P, dtype: str, reduce_dtype: str) -> jax.Array:
    """Inside `over_shards`: a parameter in the dtype of its use, whole over fsdp.

    It is sent in that dtype. Its gradient goes back by reduce-scatter, summed in the wider of `reduce_dtype` and
    `dtype`: in bfloat16, each device would add its share to a sum that keeps only eight bits.
    """
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
    # The gradient of picked rows lies row by row. A TPU scatters that over fsdp only in parts of 128 columns; else it
    # sums the whole, which is twice the bytes. Laid out by columns, any parts will do.
    return with_layout_constraint(table_VD, Layout(major_to_minor=(1, 0)))


def gather_layer(layer: dict, mesh: Mesh | None, dtype: str, reduce_dtype: str) -> dict:
    """One layer's parameters, sliced from the stack, in the dtype and layout of their use."""
    if mesh is None or mesh.size == 1:
        return layer
    # Without the leading L axis: the scan has sliced it off.
    specs = {name: P(*PARAM_SPECS[f"layers/{name}"][1:]) for name in layer}
    # Matrices of a frozen base in int8 are sent as they are, and so are their scales.
    dtypes = {name: leaf.dtype if leaf.dtype == jnp.int8 or name.endswith("_scale") else jnp.dtype(dtype)
              for name, leaf in layer.items()}  # fmt: skip
    return {name: gather(leaf, mesh, specs[name], dtypes[name], reduce_dtype) for name, leaf in layer.items()}
