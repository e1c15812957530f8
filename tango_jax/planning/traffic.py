"""What devices must send each other in a function, by arithmetic. tests/planning/test_collectives.py checks it."""

import dataclasses
import functools
import math

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.costs import MicroBatchShape, head_parts
from tango_jax.rl import score
from tango_jax.sharding.layouts import PARAM_SPECS, fit_spec, param_name
from tango_jax.weights.hf_layout import abstract_params

# How much of the layers' gathers XLA for GPUs sends during a product: of four that an update makes for two layers, one;
# of two in a score, both (parameters split over fsdp alone) or none (also over tensor). Read off the compiled programs
# of `qwen2_5_math_7b` for 32 A100, where the layers' scatters lie beside products, and those of embedding and head do
# not.
HIDDEN_IN_UPDATES, HIDDEN_IN_SCORES = 1 / 4, 1 / 2


@dataclasses.dataclass(frozen=True)
class Collective:
    kind: str
    size: int  # bytes of the whole array: gathered, before scattering, or summed
    members: tuple[int, ...]  # devices of a group, as places in the mesh
    times: int  # in a pass or in all
    in_pass: bool  # `times` counts each micro-batch of an update, or each decode step
    hidden: float = 0.0  # the share that is sent while products run

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device receives, as ring algorithms send them."""
        count = len(self.members)
        if self.kind == "collective-permute":
            return float(self.times * self.size) if count > 1 else 0.0
        return self.times * ring_bytes(self.kind, self.size, count)


def ring_bytes(kind: str, size: float, count: int) -> float:
    return size * (count - 1) / count * (2 if kind == "all-reduce" else 1)


def update_traffic(
    model: ModelConfig, mesh: Mesh | AbstractMesh, tokens: MicroBatchShape, chunk: int
) -> list[Collective]:
    """For one micro-batch of an update:

    all-gather      each matrix over fsdp, in the dtype of its use; a layer's twice with remat, a tied table's once each
    reduce-scatter  their gradients, in grad_reduce_dtype or the dtype of use, whichever is wider
    all-reduce      over data: the gradient of each stored part, in param_dtype; over all rows: of what fsdp does not
                    split. Over tensor: activations [tokens, D], twice a layer in the forward pass, once more with
                    remat, twice in the backward pass; once for the embedding, once for the loss
    """
    shape, width = mesh.shape, dtype_widths(model)
    found = _gathers(model, mesh, 1 if model.remat == "none" else 2, HIDDEN_IN_UPDATES)
    # Gradients of adapters are too small to count.
    for name, size in () if model.lora else param_sizes(model):
        stored = fit_spec(PARAM_SPECS[name], size, mesh)
        part = math.prod(size) / (shape["tensor"] if "tensor" in stored else 1)
        axes = ("data", "fsdp")
        if "fsdp" in stored:
            for dtype in _uses(model, name):
                summed = part * max(width[dtype], width["grad_reduce"])
                hidden = float(name.startswith("layers/"))
                found.append(_in_pass("reduce-scatter", summed, axis_members(mesh, "fsdp"), hidden=hidden))
            part, axes = part / shape["fsdp"], ("data",)
        found.append(_in_pass("all-reduce", part * width["param"], axis_members(mesh, *axes)))
    again = 0 if model.remat == "none" else 1
    return _between_devices([*found, *_tensor_sums(model, mesh, tokens, chunk, layer_sums=4 + again, is_update=True)])


def score_traffic(
    model: ModelConfig, mesh: Mesh | AbstractMesh, tokens: MicroBatchShape, chunk: int
) -> list[Collective]:
    sums = _tensor_sums(model, mesh, tokens, chunk, layer_sums=2, is_update=False)
    return _between_devices([*_gathers(model, mesh, 1, HIDDEN_IN_SCORES), *sums])


def dtype_widths(model: ModelConfig) -> dict[str, int]:
    return {name: np.dtype(getattr(model, f"{name}_dtype")).itemsize
            for name in ("param", "compute", "head", "grad_reduce")}


def param_sizes(model: ModelConfig) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(name in PARAM_SPECS, shape) of every parameter."""
    return _param_sizes(dataclasses.replace(model, remat="none"))


@functools.cache
def _param_sizes(model: ModelConfig) -> tuple[tuple[str, tuple[int, ...]], ...]:
    leaves = jax.tree_util.tree_flatten_with_path(abstract_params(model))[0]
    return tuple((param_name(path), leaf.shape) for path, leaf in leaves)


def axis_members(mesh: Mesh | AbstractMesh, *axes: str) -> tuple[int, ...]:
    """Places in the mesh of the devices that differ from the first one on these axes alone."""
    places = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    first = tuple(slice(None) if name in axes else 0 for name in mesh.shape)
    return tuple(int(place) for place in places[first].reshape(-1))


def _in_pass(kind: str, size: float, members: tuple[int, ...], times: int = 1, hidden: float = 0.0) -> Collective:
    return Collective(kind, round(size), members, times, in_pass=True, hidden=hidden)


def _between_devices(found: list[Collective]) -> list[Collective]:
    return [item for item in found if len(item.members) > 1]


def _gathers(model: ModelConfig, mesh: Mesh | AbstractMesh, layer_times: int, hidden: float) -> list[Collective]:
    """`hidden`: of the layers' gathers."""
    found, width = [], dtype_widths(model)
    for name, size in param_sizes(model):
        stored = fit_spec(PARAM_SPECS[name], size, mesh)
        if "fsdp" not in stored:
            continue
        part = math.prod(size) / (mesh.shape["tensor"] if "tensor" in stored else 1)
        # A tied table with one dtype for both uses is gathered once.
        for use in {getattr(model, f"{use}_dtype"): use for use in _uses(model, name)}.values():
            times, share = (layer_times, hidden) if name.startswith("layers/") else (1, 0.0)
            found.append(_in_pass("all-gather", part * width[use], axis_members(mesh, "fsdp"), times, share))
    return found


def _uses(model: ModelConfig, name: str) -> list[str]:
    if name.startswith("layers/"):
        return ["compute"]
    return ["compute"] * (name == "embed") + ["head"] * (name == ("embed" if model.tied_head else "head"))


def _tensor_sums(
    model: ModelConfig, mesh: Mesh | AbstractMesh, tokens: MicroBatchShape, chunk: int, layer_sums: int, is_update: bool
) -> list[Collective]:
    padded = -(-tokens.scored // chunk) * chunk if score.is_chunked(tokens.scored, chunk) else tokens.scored
    is_split = head_parts(model, mesh.shape["tensor"]) > 1
    activations = model.num_layers * layer_sums * tokens.total + is_split * (tokens.total + is_update * padded)
    # Of each scored token: the largest logit, the normaliser, the chosen logit, the mean logit, and their gradients.
    numbers = is_split * (8 if is_update else 4) * padded * 4
    size = activations * model.width * dtype_widths(model)["compute"] + numbers
    return [_in_pass("all-reduce", size, axis_members(mesh, "tensor"))]
