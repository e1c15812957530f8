"""What a function must compute, read and send, by arithmetic alone: FLOPs of the matrix products, bytes of memory and
of the collectives.

In: a model, its mesh and the tokens of one micro-batch of a shard. Out: numbers per device. `plan` holds the compiled
programs against them: FLOPs because XLA counts the body of a loop once, bytes because a compiler may send more. `bench`
divides them by measured seconds.

FLOPs. A product of [n, a] and [a, b] is 2nab. With t devices of a tensor group, per device and token:
    layer      2 D E (H + 2K) + 2 H E D + 6 D F, over t
    head       2 D V, over t where it divides V
    attention  4 H E per query-key pair, over t; all pairs of a row, masked or not, unless a kernel skips what is above
               the diagonal
A backward pass costs twice its forward pass. What remat computes again: with `full` a layer but for its last product,
whose result nothing asks for; with `dots` attention; and the head, where log-probs are made in chunks.

Memory. Counted is what cannot stay on the chip: weights once a pass in the dtype of their use, the cache, gradients and
the optimizer's state. Activations and logits are not.
"""

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.hlo import ring_bytes
from tango_jax.rl import score
from tango_jax.sharding.layouts import PARAM_SPECS, fit_spec, param_name
from tango_jax.weights.hf_layout import abstract_params

SKIPPING = ("cudnn", "splash")  # attention that does not compute what lies above the diagonal


class MicroBatchShape(NamedTuple):
    """One micro-batch of one shard."""

    rows: int  # R
    row_length: int  # T
    prefixes: int = 0  # Q
    prefix_length: int = 0  # X

    @property
    def scored(self) -> int:
        return self.rows * self.row_length

    @property
    def total(self) -> int:
        return self.scored + self.prefixes * self.prefix_length

    def pairs(self, attention: str) -> float:
        """Query-key pairs that attention computes."""
        R, T, Q, X = self
        if attention not in SKIPPING:
            return float(Q * X * X + R * T * (X + T))
        own = T if X and attention == "cudnn" else (T + 1) / 2  # cuDNN skips nothing against a prefix
        return Q * X * (X + 1) / 2 + R * T * (X + own)


def layer_flops(model: ModelConfig, tokens: float, pairs: float) -> float:
    """Forward pass of all layers, on a device that has all of each."""
    D, F, H, K, E = model.width, model.mlp_width, model.num_heads, model.num_kv_heads, model.head_dim
    return model.num_layers * (2 * tokens * (D * E * (H + 2 * K) + H * E * D + 3 * D * F) + 4 * pairs * H * E)


def head_flops(model: ModelConfig, tokens: float) -> float:
    return 2 * tokens * model.width * model.vocab_size


class Flops(NamedTuple):
    """FLOPs of a device, apart by the type that the products are made in."""

    layers: float  # compute_dtype
    head: float  # head_dtype

    @property
    def total(self) -> float:
        return self.layers + self.head


def score_flops(model: ModelConfig, tokens: MicroBatchShape, tensor: int, attention: str) -> Flops:
    """Forward pass of one micro-batch."""
    layers = layer_flops(model, tokens.total, tokens.pairs(attention)) / tensor
    return Flops(layers, head_flops(model, tokens.scored) / _head_parts(model, tensor))


def update_flops(model: ModelConfig, tokens: MicroBatchShape, tensor: int, attention: str, is_chunked: bool) -> Flops:
    """Forward and backward pass of one micro-batch, with what is computed again."""
    forward = score_flops(model, tokens, tensor, attention)
    attended = layer_flops(model, 0, tokens.pairs(attention)) / tensor
    last = model.num_layers * 2 * tokens.total * model.width * model.mlp_width / tensor
    again = {"none": 0.0, "dots": attended, "full": forward.layers - last}[model.remat]
    if attention in SKIPPING:  # the kernel's backward pass computes the scores again
        again += attended / 2
    return Flops(3 * forward.layers + again, (3 + is_chunked) * forward.head)


def decode_flops(model: ModelConfig, rows: float, keys: float, tensor: int) -> Flops:
    """One step of `rows` rows that attend to `keys` keys each."""
    layers = layer_flops(model, rows, rows * keys) / tensor
    return Flops(layers, head_flops(model, rows) / _head_parts(model, tensor))


def prefill_flops(model: ModelConfig, prompts: float, length: int, tensor: int, attention: str) -> Flops:
    pairs = prompts * MicroBatchShape(1, length).pairs(attention)
    layers = layer_flops(model, prompts * length, pairs) / tensor
    return Flops(layers, head_flops(model, prompts) / _head_parts(model, tensor))


def weight_bytes(model: ModelConfig, tensor: int) -> float:
    """The matrices that a pass over the model reads, in the dtype of their use; not the embedding, of which it looks up
    a few rows."""
    # A token takes a product and a sum for each weight.
    layers, head = layer_flops(model, 1, 0) / 2, head_flops(model, 1) / 2
    parts = _head_parts(model, tensor)
    return _itemsize(model.compute_dtype) * layers / tensor + _itemsize(model.head_dtype) * head / parts


def cached_token_bytes(model: ModelConfig, tensor: int) -> float:
    """Keys and values of one token."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * _itemsize(model.compute_dtype) / tensor


def prefill_bytes(model: ModelConfig, prompts: float, length: int, tensor: int) -> float:
    """Weights read and the prompts' cache written."""
    return weight_bytes(model, tensor) + prompts * length * cached_token_bytes(model, tensor)


def decode_bytes(
    model: ModelConfig, prompts: float, prompt_length: int, rows: float, cache: int, tensor: int
) -> float:
    """Read in one step of `rows` rows: the weights, the cache of `prompts` prompts, and each row's cache of new tokens,
    all `cache` of them whether they are there yet or not."""
    cached = prompts * prompt_length + rows * cache
    return weight_bytes(model, tensor) + cached * cached_token_bytes(model, tensor)


def update_bytes(model: ModelConfig, micro_batches: int, tensor: int, gradients: float) -> float:
    """Weights read by the forward pass, by the backward pass, and by what remat computes again; the accumulated
    gradients, of so many bytes, read and written for each micro-batch."""
    passes = 3 if model.remat == "full" else 2
    return micro_batches * (passes * weight_bytes(model, tensor) + 2 * gradients)


def optimizer_bytes(state: float, params: float) -> float:
    """One optimizer step: the state, which is the parameters with both moments, read and written; the gradients, of the
    size of `params`, read for their norm and for the step."""
    return 2 * state + 2 * params


def _itemsize(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def _head_parts(model: ModelConfig, tensor: int) -> int:
    return tensor if model.vocab_size % tensor == 0 else 1


def update_collectives(model: ModelConfig, mesh: Mesh, tokens: MicroBatchShape, chunk: int) -> dict[str, float]:
    """{kind: bytes} that a device must receive for one micro-batch of an update.

    all-gather      each matrix over fsdp, in the dtype of its use; twice for layers (the backward pass does it again
                    unless nothing is rematerialised); embedding and head once, both for a tied table
    reduce-scatter  their gradients, once, in grad_reduce_dtype or the dtype of use, whichever is wider
    all-reduce      over data: the gradient of each stored part, in param_dtype; over all rows: that of what is not
                    split over fsdp. Over tensor: activations [tokens, D], twice a layer in the forward pass, once more
                    where it is rematerialised, twice in the backward pass; once for the embedding, once for the loss
    """
    shape, width = mesh.shape, {name: np.dtype(getattr(model, f"{name}_dtype")).itemsize
                                for name in ("param", "compute", "head", "grad_reduce")}
    need = {"all-gather": 0.0, "reduce-scatter": 0.0, "all-reduce": 0.0}
    for path, leaf in jax.tree_util.tree_flatten_with_path(abstract_params(model))[0]:
        name = param_name(path)
        stored = fit_spec(PARAM_SPECS[name], leaf.shape, mesh)
        part = leaf.size / (shape["tensor"] if "tensor" in stored else 1)
        if "fsdp" in stored:
            for dtype, gathers in _uses(model, name):
                need["all-gather"] += gathers * ring_bytes("all-gather", part * width[dtype], shape["fsdp"])
                summed = part * max(width[dtype], width["grad_reduce"])
                need["reduce-scatter"] += ring_bytes("reduce-scatter", summed, shape["fsdp"])
            part, others = part / shape["fsdp"], shape["data"]
        else:
            others = shape["data"] * shape["fsdp"]
        need["all-reduce"] += ring_bytes("all-reduce", part * width["param"], others)
    need["all-reduce"] += _tensor_sums(model, shape["tensor"], tokens, chunk, width["compute"])
    return need


def _uses(model: ModelConfig, name: str) -> list[tuple[str, int]]:
    """(dtype, how often it is gathered) for each use of a parameter."""
    if name.startswith("layers/"):
        return [("compute", 1 if model.remat == "none" else 2)]
    return [("compute", 1)] * (name == "embed") + [("head", 1)] * (name == ("embed" if model.tied_head else "head"))


def _tensor_sums(model: ModelConfig, tensor: int, tokens: MicroBatchShape, chunk: int, width: int) -> float:
    again = 0 if model.remat == "none" else 1
    padded = -(-tokens.scored // chunk) * chunk if score.is_chunked(tokens.scored, chunk) else tokens.scored
    is_split = _head_parts(model, tensor) > 1
    activations = model.num_layers * (4 + again) * tokens.total + is_split * (tokens.total + padded)
    # Of each scored token: the largest logit, the normaliser, the chosen logit, the mean logit, and their gradients.
    numbers = is_split * 8 * padded * 4
    return ring_bytes("all-reduce", activations * model.width * width + numbers, tensor)
