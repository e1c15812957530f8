"""Where the arrays of a policy live: its meshes, the table of parameter shardings, and the moves between layouts.

Training shards parameters, gradients and optimizer state over `fsdp` and `tensor`. Rows of a batch are split over
`data` and `fsdp`: a batch has a leading axis Z, one slice per group of devices that shares rows. Forward and backward
pass run under `jax.shard_map` (`over_shards`), so that what is sent is what the code says: a layer's matrices are
gathered over fsdp in the compute dtype when they are used, and their gradients go back by reduce-scatter, in float32
unless `mesh.grad_reduce_dtype` says otherwise; heads, mlp width and vocabulary stay split over tensor, with one sum
after attention, after the mlp, and in the loss.

Decoding keeps the weights resident: whole, or split over `tensor` devices of one process; every process samples its own
rows on its own devices (the `local` mesh). On a single device everything here does nothing.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from tango_jax.records import Batch

TRAIN_AXES = ("data", "fsdp", "tensor")
DECODE_AXES = ("rows", "tensor")
HOST_MEMORY = "pinned_host"
ROWS = ("data", "fsdp")  # mesh axes that split the rows of a training batch

# How each parameter is stored; a layer's are stacked on L. Without fsdp it is the layout of use. Embedding and head are
# both split over the vocabulary, so that a tied table serves as either.
STORED = {
    "embed": P("tensor", "fsdp"),
    "head": P("fsdp", "tensor"),
    "final_norm": P(None),
    "layers/attention_norm": P(None, None),
    "layers/q": P(None, "fsdp", "tensor", None),
    "layers/k": P(None, "fsdp", "tensor", None),
    "layers/v": P(None, "fsdp", "tensor", None),
    "layers/q_bias": P(None, "tensor", None),
    "layers/k_bias": P(None, "tensor", None),
    "layers/v_bias": P(None, "tensor", None),
    "layers/q_norm": P(None, None),
    "layers/k_norm": P(None, None),
    "layers/o": P(None, "tensor", None, "fsdp"),
    "layers/mlp_norm": P(None, None),
    "layers/gate": P(None, "fsdp", "tensor"),
    "layers/up": P(None, "fsdp", "tensor"),
    "layers/down": P(None, "tensor", "fsdp"),
}


@dataclasses.dataclass(frozen=True)
class Placement:
    """The meshes of one policy; hashable."""

    train: Mesh  # TRAIN_AXES over all devices of the job
    decode: Mesh  # DECODE_AXES over the same devices
    local: Mesh  # DECODE_AXES over this process's devices: a part of `decode`

    @property
    def num_shards(self) -> int:
        """Z: groups of devices with rows of their own."""
        return self.train.shape["data"] * self.train.shape["fsdp"]

    @property
    def num_local_shards(self) -> int:
        """Those of this process."""
        return self.local.size // self.train.shape["tensor"]

    @property
    def row_multiple(self) -> int:
        """Rows of a decode batch are a multiple of this."""
        return self.local.shape["rows"]


def make_placement(
    settings: ConfigDict, devices: Sequence[jax.Device] | None = None, num_local: int | None = None
) -> Placement:
    """Meshes from a role's `mesh` settings, over all devices of the job or the given ones, of which the first
    `num_local` are this process's (planning); by default those that say so themselves.

    Raises:
        ValueError: the axes do not multiply to the number of devices, or a tensor group spans processes.
    """
    # Devices that are not here (planning) are seen as their first process would see them.
    mine = jax.process_index() if devices is None else min(device.process_index for device in devices)
    devices = jax.devices() if devices is None else devices
    devices = sorted(devices, key=lambda device: (device.process_index, device.id))
    data, fsdp, tensor = resolve_axes(settings, len(devices))
    devices = devices[: data * fsdp * tensor]
    local = devices[:num_local] if num_local else [device for device in devices if device.process_index == mine]
    for name, size in (("tensor", tensor), ("decode_tensor", settings.decode_tensor)):
        if size < 1 or len(local) % size:
            raise ValueError(
                f"mesh.{name}={size} does not divide the {len(local)} devices of a process: the devices of a tensor "
                f"group belong to one process; choose a divisor of {len(local)}, or start one process per node"
            )
    decode_shape = (-1, settings.decode_tensor)
    return Placement(
        train=_mesh(devices, (data, fsdp, tensor), TRAIN_AXES),
        decode=_mesh(devices, decode_shape, DECODE_AXES),
        local=_mesh(local, decode_shape, DECODE_AXES),
    )


def resolve_axes(settings: ConfigDict, num_devices: int) -> tuple[int, int, int]:
    """(data, fsdp, tensor) with -1 replaced by what the others leave.

    Raises:
        ValueError: the product is not the number of devices. A single process may leave devices unused.
    """
    sizes = [settings.data, settings.fsdp, settings.tensor]
    asked = ", ".join(f"{name}={size}" for name, size in zip(TRAIN_AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"mesh axes {asked}: each is at least 1, and one of them may be -1 for the rest")
    known = int(np.prod([size for size in sizes if size > 0]))
    if -1 in sizes:
        if num_devices % known:
            raise ValueError(f"mesh axes {asked}: {known} does not divide the {num_devices} devices: "
                             "choose axes that do")
        sizes[sizes.index(-1)] = num_devices // known
    elif known > num_devices or (known < num_devices and jax.process_count() > 1):
        raise ValueError(f"mesh axes {asked} need {known} devices, and there are {num_devices}: set one axis to -1")
    return tuple(sizes)


def check_model(model, settings: ConfigDict, placement: Placement) -> None:
    """Raises ValueError where an axis of the model cannot be split as the mesh says."""
    shape, decode_tensor = placement.train.shape, settings.decode_tensor
    for name, size, parts, axes in (
        ("width", model.width, shape["fsdp"], "fsdp"),
        ("num_kv_heads", model.num_kv_heads, shape["tensor"], "tensor"),
        ("mlp_width", model.mlp_width, shape["tensor"], "tensor"),
        ("num_kv_heads", model.num_kv_heads, decode_tensor, "decode_tensor"),
        ("mlp_width", model.mlp_width, decode_tensor, "decode_tensor"),
    ):
        if size % parts:
            raise ValueError(f"mesh {axes}={parts} does not divide the model's {name}={size}: choose a divisor")


def _mesh(devices: Sequence[jax.Device], shape: tuple[int, ...], axes: tuple[str, ...]) -> Mesh:
    """Neighbours in the list are neighbours on the last axis, so tensor groups stay inside a process."""
    return Mesh(np.array(devices).reshape(shape), axes, axis_types=(AxisType.Auto,) * len(axes))


def over_shards(fn: Callable, mesh: Mesh | None, out_specs) -> Callable:
    """`fn(params, micro)` on every device by itself: parameters as they are stored, Z = 1 of the batch.

    The gradient with respect to the parameters comes out as they are stored, summed over all rows.
    """
    if mesh is None or mesh.size == 1:
        return fn

    def sharded(params, micro):
        stored = jax.tree.map(lambda place: place.spec, param_shardings(mesh, params))
        rows = jax.tree.map(lambda leaf: P(ROWS) if leaf.ndim else P(), micro)

        def on_device(params, micro):
            # Here, not where they are used: the sum of their gradients over rows is then made once, of what is stored.
            return fn(jax.tree.map(_used_by_rows, params, stored), micro)

        return jax.shard_map(on_device, mesh=mesh, in_specs=(stored, rows), out_specs=out_specs)(params, micro)

    return sharded


def _used_by_rows(param: jax.Array, stored: P) -> jax.Array:
    """The parameter, for use by rows that differ between devices: its gradient is summed over them."""
    return jax.lax.pcast(param, tuple(name for name in ROWS if name not in stored), to="varying")


def sum_over_rows(values: Any, mesh: Mesh | None) -> Any:
    """Inside `over_shards`: the sum of all shards' values, in each."""
    return values if mesh is None or mesh.size == 1 else jax.lax.psum(values, ROWS)


def max_over_rows(values: Any, mesh: Mesh | None) -> Any:
    """Inside `over_shards`: the largest of all shards' values, in each. Not differentiable."""
    return values if mesh is None or mesh.size == 1 else jax.lax.pmax(jax.lax.stop_gradient(values), ROWS)


def tensor_size(mesh: Mesh | None) -> int:
    return 1 if mesh is None else mesh.shape["tensor"]


def tensor_index(mesh: Mesh | None) -> jax.Array | int:
    """Inside `over_shards`: this device's place in its tensor group."""
    return 0 if tensor_size(mesh) == 1 else jax.lax.axis_index("tensor")


def enter_tensor(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Inside `over_shards`: x on its way into matrices that are split over tensor. One sum of gradients for all."""
    return x if tensor_size(mesh) == 1 else jax.lax.pcast(x, "tensor", to="varying")


def sum_over_tensor(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Inside `over_shards`: the sum of the parts that a tensor group's devices have computed."""
    return x if tensor_size(mesh) == 1 else jax.lax.psum(x, "tensor")


def max_over_tensor(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Like `sum_over_tensor`; not differentiable."""
    x = jax.lax.stop_gradient(x)
    return x if tensor_size(mesh) == 1 else jax.lax.pmax(x, "tensor")


def gather(x: jax.Array, mesh: Mesh | None, stored: P, dtype, reduce_dtype) -> jax.Array:
    """Inside `over_shards`: a parameter in the dtype of its use, whole over fsdp.

    It is sent in that dtype. Its gradient goes back by reduce-scatter, summed in `reduce_dtype`, or in `dtype` if that
    is the wider one: of bfloat16 each device adds its share to a sum of which only eight bits are kept.
    """
    if not _is_split(mesh, stored):
        return x.astype(dtype)
    sum_dtype = jnp.promote_types(dtype, reduce_dtype)
    return _gather(x, list(stored).index("fsdp"), jnp.dtype(dtype), sum_dtype, x.dtype)


def _is_split(mesh: Mesh | None, stored: P) -> bool:
    return mesh is not None and mesh.shape["fsdp"] > 1 and "fsdp" in stored


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(x: jax.Array, axis: int, dtype, sum_dtype, own_dtype) -> jax.Array:
    return jax.lax.all_gather(x.astype(dtype), "fsdp", axis=axis, tiled=True)


def _gather_forward(x, axis, dtype, sum_dtype, own_dtype):
    return _gather(x, axis, dtype, sum_dtype, own_dtype), None


def _gather_backward(axis, dtype, sum_dtype, own_dtype, _, grad):
    grad = jax.lax.psum_scatter(grad.astype(sum_dtype), "fsdp", scatter_dimension=axis, tiled=True)
    return (grad.astype(own_dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


def gather_table(x: jax.Array, mesh: Mesh | None, stored: P, dtype, reduce_dtype) -> jax.Array:
    """`gather` of a table [V, D] of which rows are picked."""
    table_VD = gather(x, mesh, stored, dtype, reduce_dtype)
    if not _is_split(mesh, stored) or mesh.devices.flat[0].platform != "tpu":
        return table_VD
    # The gradient of picked rows lies row by row. A TPU scatters that over fsdp only in parts of 128 columns; else it
    # sums the whole, which is twice the bytes. Laid out by columns, any parts will do.
    return with_layout_constraint(table_VD, Layout(major_to_minor=(1, 0)))


def gather_layer(layer: dict, mesh: Mesh | None, dtype, reduce_dtype) -> dict:
    """One layer's parameters, sliced from the stack, in the dtype and layout of their use."""
    if mesh is None or mesh.size == 1:
        return layer
    return {
        name: gather(leaf, mesh, P(*STORED[f"layers/{name}"][1:]), dtype, reduce_dtype) for name, leaf in layer.items()
    }


def fit(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The spec without axes of one device, and without those that do not divide their dimension (a vocabulary may have
    any size)."""
    entries = [
        entry if entry and mesh.shape[entry] > 1 and size % mesh.shape[entry] == 0 else None
        for entry, size in zip(spec, shape[: len(spec)], strict=True)
    ]
    return P(*entries)


def _only(spec: P, axes: Sequence[str]) -> P:
    """The spec with these mesh axes alone."""
    return P(*(entry if entry in axes else None for entry in spec))


def param_name(path) -> str:
    """The name in STORED of a leaf of a parameter tree, or of a tree of such trees (optimizer moments)."""
    names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    return "/".join(names[-2:]) if "layers" in names[-2:-1] else names[-1]


def param_shardings(mesh: Mesh, tree: Any) -> Any:
    """NamedShardings of a parameter tree, or of a TrainState: moments lie where their parameters do, counters
    everywhere.

    Raises:
        KeyError: a parameter without an entry in STORED.
    """

    def sharding_of(path, leaf):
        spec = P() if leaf.ndim == 0 else fit(STORED[param_name(path)], leaf.shape, mesh)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding_of, tree)


def with_shardings(abstract_tree: Any, shardings: Any) -> Any:
    """Shapes that say where their arrays shall lie, as a restore wants them."""
    return jax.tree.map(lambda leaf, place: leaf.update(sharding=place), abstract_tree, shardings)


def decode_shardings(mesh: Mesh, abstract_weights: Any) -> Any:
    """Shardings of `transformer.split_layers`' result on a DECODE_AXES mesh: split over tensor, copied over rows."""

    def sharding_of(path, leaf):
        name = param_name(path)
        if f"layers/{name}" in STORED:  # an element of the tuple of layers: not stacked
            spec = P(*STORED[f"layers/{name}"][1:])
        else:  # joined matrices exist where tensor is 1
            spec = STORED.get({"head_DV": "head"}.get(name, name), P())
        return NamedSharding(mesh, fit(_only(spec, ("tensor",)), leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(sharding_of, abstract_weights)


def to_local(placement: Placement, tree: Any) -> Any:
    """Arrays on the decode mesh as arrays on this process's part of it, without a copy."""
    if placement.local == placement.decode:
        return tree

    def local_array(leaf):
        sharding = NamedSharding(placement.local, leaf.sharding.spec)
        shards = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)

    return jax.tree.map(local_array, tree)


def park(tree: Any) -> Any:
    """Arrays moved to the host memory that their devices reach; `fetch` brings them back."""
    places = jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind(HOST_MEMORY), tree)
    return jax.device_put(tree, places)


def fetch(tree: Any, shardings: Any) -> Any:
    """Arrays moved to where the shardings say; those that are there already are not copied."""
    return jax.device_put(tree, shardings)


def check_host_memory(placement: Placement) -> None:
    """Raises ValueError where the platform has no host memory that arrays may live in."""
    device = placement.local.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_MEMORY not in kinds:
        raise ValueError(f"mesh.offload=True needs {HOST_MEMORY} memory; {device.device_kind} has {', '.join(kinds)}: "
                         "set it to False")


def batch_sharding(placement: Placement, leaf) -> NamedSharding:
    """[N, Z, ...] is split over Z; the number of micro-batches is everywhere."""
    return NamedSharding(placement.train, P(None, ROWS) if np.ndim(leaf) else P())


def place_batch(placement: Placement, batch: Batch) -> Batch:
    """This process's part of a batch, [N, Z of this process, ...] on the host, as part of the whole on the devices."""
    if placement.train.size == 1:
        return batch
    return jax.tree.map(
        lambda leaf: jax.make_array_from_process_local_data(batch_sharding(placement, leaf), np.asarray(leaf)), batch
    )
