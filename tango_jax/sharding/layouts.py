"""How arrays lie on the devices: the table of parameter shardings, and moves between layouts.

Training shards parameters, gradients and optimizer state over `fsdp` and `tensor`, and rows over `data` and `fsdp`: a
batch has a leading axis Z, one slice per device group. Decoding keeps weights whole or split over `tensor`.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from tango_jax.records import Batch
from tango_jax.sharding.placement import BATCH_AXES, Placement

HOST_MEMORY = "pinned_host"
# As stored; without fsdp, as used. A layer's are stacked on L. Embedding and head are split over the vocabulary, so a
# tied table serves as both.
PARAM_SPECS = {
    "embed": P("tensor", "fsdp"),
    "head": P("fsdp", "tensor"),
    "final_norm": P(None),
    # The two classes of a process reward model.
    "score": P("fsdp", None),
    "score_bias": P(None),
    "score_hidden": P("fsdp", None),
    "score_hidden_bias": P(None),
    **{f"layers/{name}_norm": P(None, None) for name in ("attention", "attention_out", "mlp", "mlp_out", "q", "k")},
    "layers/q": P(None, "fsdp", "tensor", None),
    "layers/k": P(None, "fsdp", "tensor", None),
    "layers/v": P(None, "fsdp", "tensor", None),
    "layers/q_bias": P(None, "tensor", None),
    "layers/k_bias": P(None, "tensor", None),
    "layers/v_bias": P(None, "tensor", None),
    **{f"layers/{name}_whole_norm": P(None, "tensor", None) for name in ("q", "k")},
    "layers/o": P(None, "tensor", None, "fsdp"),
    "layers/gate": P(None, "fsdp", "tensor"),
    "layers/up": P(None, "fsdp", "tensor"),
    "layers/down": P(None, "tensor", "fsdp"),
    # Adapters (models/lora.py), and the scales of an int8 base.
    **{f"layers/{name}_lora_a": P(None, "fsdp", None) for name in ("q", "k", "v", "gate", "up")},
    **{f"layers/{name}_lora_b": P(None, None, "tensor", None) for name in ("q", "k", "v")},
    **{f"layers/{name}_lora_b": P(None, None, "tensor") for name in ("gate", "up")},
    "layers/o_lora_a": P(None, "tensor", None, None),
    "layers/down_lora_a": P(None, "tensor", None),
    **{f"layers/{name}_lora_b": P(None, None, "fsdp") for name in ("o", "down")},
    **{f"layers/{name}_scale": P(None, "tensor", None) for name in ("q", "k", "v")},
    **{f"layers/{name}_scale": P(None, "tensor") for name in ("gate", "up")},
    **{f"layers/{name}_scale": P(None, None) for name in ("o", "down")},
}


def fit_spec(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The spec without axes of size 1 or axes that do not divide their dimension (a vocabulary has any size)."""
    entries = [
        entry if entry and mesh.shape[entry] > 1 and size % mesh.shape[entry] == 0 else None
        for entry, size in zip(spec, shape[: len(spec)], strict=True)
    ]
    return P(*entries)


def param_name(path: KeyPath) -> str:
    """The name in PARAM_SPECS of a leaf of a parameter tree, or of a tree of such trees (optimizer moments)."""
    names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    return "/".join(names[-2:]) if "layers" in names[-2:-1] else names[-1]


def param_shardings(mesh: Mesh, tree: Any) -> Any:
    """NamedShardings of parameters or of a TrainState: moments lie like their parameters, counters everywhere."""

    def sharding_of(path: KeyPath, leaf: Any) -> NamedSharding:
        spec = P() if leaf.ndim == 0 else fit_spec(PARAM_SPECS[param_name(path)], leaf.shape, mesh)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding_of, tree)


def with_shardings(abstract_tree: Any, shardings: Any) -> Any:
    """Abstract arrays with these shardings, for a restore."""
    return jax.tree.map(lambda leaf, place: leaf.update(sharding=place), abstract_tree, shardings)


def decode_shardings(mesh: Mesh, abstract_weights: Any) -> Any:
    """Shardings of a `split_layers` result on a DECODE_AXES mesh: split over tensor, copied over rows."""

    def sharding_of(path: KeyPath, leaf: Any) -> NamedSharding:
        name = param_name(path)
        layer_name = f"layers/{name.removesuffix('_scale')}"  # of an int8 matrix: an entry for each of its outputs
        if layer_name in PARAM_SPECS:  # an element of the tuple of layers: not stacked
            spec = P(*PARAM_SPECS[layer_name][-leaf.ndim :])
        else:  # joined matrices exist where tensor is 1
            spec = PARAM_SPECS.get({"head_DV": "head"}.get(name, name), P())
        spec = P(*(entry if entry == "tensor" else None for entry in spec))
        return NamedSharding(mesh, fit_spec(spec, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(sharding_of, abstract_weights)


def to_local(placement: Placement, tree: Any) -> Any:
    """Arrays on the decode mesh as arrays on this process's part of it, without a copy."""
    if placement.local == placement.decode:
        return tree

    def local_array(leaf: jax.Array) -> jax.Array:
        sharding = NamedSharding(placement.local, leaf.sharding.spec)
        shards = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)

    return jax.tree.map(local_array, tree)


def offload(tree: Any) -> Any:
    """Move arrays to the host memory of their devices; `fetch` brings them back."""
    places = jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind(HOST_MEMORY), tree)
    return jax.device_put(tree, places)


def fetch(tree: Any, shardings: Any) -> Any:
    return jax.device_put(tree, shardings)


def batch_sharding(placement: Placement, leaf: Any) -> NamedSharding:
    """[N, Z, ...] is split over Z; the number of micro-batches is everywhere."""
    return NamedSharding(placement.train, P(None, BATCH_AXES) if np.ndim(leaf) else P())


def place_batch(placement: Placement, batch: Batch) -> Batch:
    """This process's host part of a batch, [N, its Z, ...], as part of the whole on the devices."""
    if placement.train.size == 1:
        return batch
    return jax.tree.map(
        lambda leaf: jax.make_array_from_process_local_data(batch_sharding(placement, leaf), np.asarray(leaf)), batch
    )


def check_host_memory(placement: Placement) -> None:
    """ValueError where the platform has no host memory for arrays."""
    device = placement.local.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_MEMORY not in kinds:
        raise ValueError(f"mesh.offload=True needs {HOST_MEMORY} memory; {device.device_kind} has {', '.join(kinds)}: "
                         "set it to False")
