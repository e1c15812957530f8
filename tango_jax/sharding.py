"""Where the arrays of a policy live: its meshes, the table of parameter shardings, and the moves between layouts.

Training shards parameters, gradients and optimizer state over `fsdp` and `tensor`; each layer's matrices are gathered
over fsdp, in the compute dtype, when they are used. Rows of a batch are split over `data` and `fsdp`: a batch has a
leading axis Z, one slice per group of devices that shares rows. Decoding keeps the weights resident: whole, or split
over `tensor` devices of one process; every process samples its own rows on its own devices (the `local` mesh).

Placement is fixed when a policy is made. On a single device everything here does nothing.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from tango_jax.records import Batch

TRAIN_AXES = ("data", "fsdp", "tensor")
DECODE_AXES = ("rows", "tensor")
ROWS = ("data", "fsdp")  # mesh axes that split the rows of a training batch

# How each parameter is stored; a layer's are stacked on L. Dropping fsdp gives the layout in which it is used. The
# embedding is never split over the vocabulary: XLA would replicate the table to look tokens up. The head is, so that
# logits stay split; a tied head is moved from one to the other once per micro-batch.
STORED = {
    "embed": P(None, ("tensor", "fsdp")),
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
HEAD_USE = P(None, "tensor")  # [D, V], tied or not


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


def make_placement(settings: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Placement:
    """Meshes from a role's `mesh` settings, over all devices of the job or the given ones.

    Raises:
        ValueError: the axes do not multiply to the number of devices, or a tensor group spans processes.
    """
    # Devices that are not here (planning) are seen as their first process would see them.
    mine = jax.process_index() if devices is None else min(device.process_index for device in devices)
    devices = jax.devices() if devices is None else devices
    devices = sorted(devices, key=lambda device: (device.process_index, device.id))
    data, fsdp, tensor = resolve_axes(settings, len(devices))
    devices = devices[: data * fsdp * tensor]
    local = [device for device in devices if device.process_index == mine]
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
    sizes = [settings[name] for name in TRAIN_AXES]
    asked = ", ".join(f"{name}={size}" for name, size in zip(TRAIN_AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"mesh axes {asked}: each is at least 1, and one of them may be -1 for the rest")
    known = int(np.prod([size for size in sizes if size > 0]))
    if -1 in sizes:
        if num_devices % known:
            raise ValueError(f"mesh axes {asked}: {known} does not divide the {num_devices} devices")
        sizes[sizes.index(-1)] = num_devices // known
    elif known > num_devices or (known < num_devices and jax.process_count() > 1):
        raise ValueError(f"mesh axes {asked} need {known} devices, and there are {num_devices}: set one axis to -1")
    return tuple(sizes)


def check_model(model, settings: ConfigDict, placement: Placement) -> None:
    """Raises ValueError where an axis of the model cannot be split as the mesh says."""
    shape, decode_tensor = placement.train.shape, settings.decode_tensor
    for name, size, parts, axes in (
        ("width", model.width, shape["fsdp"] * shape["tensor"], "fsdp x tensor"),
        ("num_kv_heads", model.num_kv_heads, shape["tensor"], "tensor"),
        ("mlp_width", model.mlp_width, shape["tensor"], "tensor"),
        ("num_kv_heads", model.num_kv_heads, decode_tensor, "decode_tensor"),
        ("mlp_width", model.mlp_width, decode_tensor, "decode_tensor"),
        ("width", model.width, decode_tensor, "decode_tensor"),
    ):
        if size % parts:
            raise ValueError(f"mesh {axes}={parts} does not divide the model's {name}={size}: choose a divisor")


def _mesh(devices: Sequence[jax.Device], shape: tuple[int, ...], axes: tuple[str, ...]) -> Mesh:
    """Neighbours in the list are neighbours on the last axis, so tensor groups stay inside a process."""
    return Mesh(np.array(devices).reshape(shape), axes, axis_types=(AxisType.Auto,) * len(axes))


def constrain(x: jax.Array, mesh: Mesh | None, spec: P) -> jax.Array:
    """x with the given sharding; on one device (or without a mesh) x itself."""
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, fit(spec, x.shape, mesh)))


def constrain_rows(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """x [Z, ...] split over its leading axis."""
    return constrain(x, mesh, P(ROWS))


def fit(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The spec without the axes that do not divide their dimension (a vocabulary may have any size)."""
    entries = [
        entry if entry is None or size % _parts(entry, mesh) == 0 else None
        for entry, size in zip(spec, shape[: len(spec)], strict=True)
    ]
    return P(*entries)


def _parts(entry: str | tuple[str, ...], mesh: Mesh) -> int:
    return int(np.prod([mesh.shape[name] for name in (entry if isinstance(entry, tuple) else (entry,))]))


def without_fsdp(spec: P) -> P:
    """The layout in which a stored parameter is used."""
    return P(*(_kept(entry) for entry in spec))


def _kept(entry):
    if isinstance(entry, tuple):
        kept = tuple(name for name in entry if name != "fsdp")
        return kept[0] if len(kept) == 1 else kept
    return None if entry == "fsdp" else entry


def gather(x: jax.Array, mesh: Mesh | None, stored: P, use: P) -> jax.Array:
    """A parameter moved from its stored layout to that of its use; its gradient goes straight back.

    By itself the gradient would first be completed on every device, then cut: an all-reduce where a reduce-scatter
    does, which moves half the bytes.
    """
    if mesh is None or mesh.size == 1:
        return x

    @jax.custom_vjp
    def moved(x):
        return constrain(x, mesh, use)

    moved.defvjp(lambda x: (moved(x), None), lambda _, grad: (constrain(grad, mesh, stored),))
    return moved(x)


def gather_layer(layer: dict, mesh: Mesh | None, dtype) -> dict:
    """One layer's parameters, sliced from the stack, cast and ready for use."""
    if mesh is None or mesh.size == 1:
        return layer
    return {
        name: gather(leaf.astype(dtype), mesh, P(*STORED[f"layers/{name}"][1:]),
                     without_fsdp(P(*STORED[f"layers/{name}"][1:])))
        for name, leaf in layer.items()
    }


def param_name(path) -> str:
    """The name in STORED of a leaf of a parameter tree, or of a tree of such trees (optimizer moments)."""
    names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    return "/".join(names[-2:]) if "layers" in names[-2:-1] else names[-1]


def state_shardings(placement: Placement, abstract_tree: Any) -> Any:
    """NamedShardings of a parameter tree, or of a TrainState: moments lie where their parameters do, counters
    everywhere.

    Raises:
        KeyError: a parameter without an entry in STORED.
    """
    mesh = placement.train

    def sharding_of(path, leaf):
        spec = P() if leaf.ndim == 0 else fit(STORED[param_name(path)], leaf.shape, mesh)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding_of, abstract_tree)


def with_shardings(abstract_tree: Any, shardings: Any) -> Any:
    """Shapes that say where their arrays shall lie, as a restore wants them."""
    return jax.tree.map(lambda leaf, place: leaf.update(sharding=place), abstract_tree, shardings)


def decode_shardings(mesh: Mesh, abstract_weights: Any) -> Any:
    """Shardings of `transformer.split_layers`' result on a DECODE_AXES mesh: split over tensor, copied over rows."""

    def sharding_of(path, leaf):
        name = param_name(path)
        if name == "head_DV":
            spec = HEAD_USE
        elif name in STORED:
            spec = without_fsdp(STORED[name])
        else:  # an element of the tuple of layers, and the joined matrices that exist where tensor is 1
            spec = P(*without_fsdp(STORED[f"layers/{name}"])[1:]) if f"layers/{name}" in STORED else P()
        return NamedSharding(mesh, fit(spec, leaf.shape, mesh))

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
