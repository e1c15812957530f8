"""The meshes of a policy: devices that train it, and this process's devices, which sample its rows (`local`)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict

TRAIN_AXES = ("data", "fsdp", "tensor")
DECODE_AXES = ("rows", "tensor")
BATCH_AXES = ("data", "fsdp")  # mesh axes that split the rows of a training batch


@dataclasses.dataclass(frozen=True)
class Placement:
    """The meshes of one policy; hashable."""

    train: Mesh  # TRAIN_AXES over all devices of the job
    decode: Mesh  # DECODE_AXES over the same devices
    local: Mesh  # DECODE_AXES over this process's devices: a part of `decode`

    @property
    def num_shards(self) -> int:
        """Z: the device groups with different rows."""
        return self.train.shape["data"] * self.train.shape["fsdp"]

    @property
    def num_local_shards(self) -> int:
        return self.local.size // self.train.shape["tensor"]

    @property
    def row_multiple(self) -> int:
        """Device groups that share a decode batch, whose rows are a multiple of it."""
        return self.local.shape["rows"]


def make_placement(
    settings: ConfigDict, devices: Sequence[jax.Device] | None = None, num_local: int | None = None
) -> Placement:
    """The meshes of a role's `mesh` settings, or ValueError. `num_local` (planning): devices per process."""
    # Planned devices are seen as by their first process.
    mine = jax.process_index() if devices is None else min(device.process_index for device in devices)
    devices = jax.devices() if devices is None else devices
    devices = sorted(devices, key=lambda device: (device.process_index, device.id))
    data, fsdp, tensor = resolve_axes(settings, len(devices))
    devices = devices[: data * fsdp * tensor]
    local = devices[:num_local] if num_local else [device for device in devices if device.process_index == mine]
    check_tensor_groups(tensor, settings.decode_tensor, len(local))
    decode_shape = (-1, settings.decode_tensor)
    return Placement(
        train=_mesh(devices, (data, fsdp, tensor), TRAIN_AXES),
        decode=_mesh(devices, decode_shape, DECODE_AXES),
        local=_mesh(local, decode_shape, DECODE_AXES),
    )


def check_tensor_groups(tensor: int, decode_tensor: int, num_local: int) -> None:
    """ValueError where a process's `num_local` devices cannot form tensor groups."""
    for name, size in (("tensor", tensor), ("decode_tensor", decode_tensor)):
        if size < 1 or num_local % size:
            raise ValueError(
                f"mesh.{name}={size} does not divide the {num_local} devices of a process: the devices of a tensor "
                f"group belong to one process; choose a divisor of {num_local}, or start one process per node"
            )


def resolve_axes(settings: ConfigDict, num_devices: int) -> tuple[int, int, int]:
    """(data, fsdp, tensor) with -1 replaced. ValueError unless they need all devices; one process may use fewer."""
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


def check_model(model: Any, settings: ConfigDict, placement: Placement) -> None:
    """ValueError where an axis of a ModelConfig cannot be split as the mesh says."""
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
