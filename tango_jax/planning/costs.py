"""FLOPs of the matrix products and bytes read from memory, per device, by arithmetic.

A product of [n, a] and [a, b] is 2nab FLOPs. Per token, on one of t devices of a tensor group:
    layer      2 D E (H + 2K) + 2 H E D + 6 D F, over t
    head       2 D V, over t where it divides V
    attention  4 H E per query-key pair, over t. Without a kernel, a block of queries meets all keys up to its end.
               Windows are ignored
A backward pass costs twice its forward pass, or once where a matrix is frozen. remat=full computes a layer again except
its last product, remat=dots only attention; log-probs in chunks compute the head again. Activations and logits count
no bytes.
"""

from typing import NamedTuple

import numpy as np

from tango_jax.models.attention import query_blocks
from tango_jax.models.flops import adapter_flops, head_flops, layer_flops
from tango_jax.models.transformer import ModelConfig
from tango_jax.records import Batch

SKIPPING = ("cudnn", "splash")  # attention that skips what lies above the diagonal


class MicroBatchShape(NamedTuple):
    rows: int  # R
    row_length: int  # T
    prefixes: int = 0  # Q
    prefix_length: int = 0  # X
    sampled_share: float = 1.0  # of the rows' tokens, those whose logits are computed

    @property
    def scored(self) -> int:
        return self.rows * self.row_length

    @property
    def total(self) -> int:
        return self.scored + self.prefixes * self.prefix_length

    def pairs(self, attention: str) -> float:
        R, T, Q, X, _ = self
        if attention not in SKIPPING:
            return float(Q * _pairs_in_blocks(X) + R * (T * X + _pairs_in_blocks(T)))
        own = T if X and attention == "cudnn" else (T + 1) / 2  # cuDNN skips nothing against a prefix
        return Q * X * (X + 1) / 2 + R * T * (X + own)


def _pairs_in_blocks(T: int) -> int:
    return sum((block.stop - block.start) * block.stop for block in query_blocks(T)) if T else 0


def micro_batch_shape(batch: Batch) -> MicroBatchShape:
    (_, _, R, T), (_, _, Q, X) = batch.token_NZRT.shape, batch.prefix_token_NZQX.shape
    return MicroBatchShape(R, T, Q, X)


def num_parameters(model: ModelConfig) -> int:
    """Parameters of a model, without norms and biases."""
    D, F, H, K, E = model.width, model.mlp_width, model.num_heads, model.num_kv_heads, model.head_dim
    embeddings = model.vocab_size * D * (1 if model.tied_head or model.score_head else 2)
    return embeddings + model.num_layers * (2 * D * E * (H + K) + 3 * D * F)


class Flops(NamedTuple):
    layers: float  # compute_dtype
    head: float  # head_dtype

    @property
    def total(self) -> float:
        return self.layers + self.head


def score_flops(model: ModelConfig, tokens: MicroBatchShape, tensor: int, attention: str) -> Flops:
    layers = layer_flops(model, tokens.total, tokens.pairs(attention)) / tensor
    return Flops(layers, head_flops(model, tokens.scored * tokens.sampled_share) / head_parts(model, tensor))


def update_flops(model: ModelConfig, tokens: MicroBatchShape, tensor: int, attention: str, is_chunked: bool) -> Flops:
    forward = score_flops(model, tokens, tensor, attention)
    layers, head = 3 * forward.layers, 3 * forward.head
    if model.lora:  # no gradient of frozen matrices: one product less
        layers -= (layer_flops(model, tokens.total, 0) - 3 * adapter_flops(model, tokens.total)) / tensor
        head -= forward.head
    attended = layer_flops(model, 0, tokens.pairs(attention)) / tensor
    last = model.num_layers * 2 * tokens.total * model.width * model.mlp_width / tensor
    again = {"none": 0.0, "dots": attended, "full": forward.layers - last}[model.remat]
    if attention in SKIPPING:  # the kernel's backward pass computes the scores again
        again += attended / 2
    return Flops(layers + again, head + is_chunked * forward.head)


def decode_flops(model: ModelConfig, rows: float, keys: float, tensor: int) -> Flops:
    layers = layer_flops(model, rows, rows * keys) / tensor
    return Flops(layers, head_flops(model, rows) / head_parts(model, tensor))


def prefill_flops(model: ModelConfig, prompts: float, length: int, tensor: int, attention: str) -> Flops:
    """A process reward model's head runs on all tokens."""
    pairs = prompts * MicroBatchShape(1, length).pairs(attention)
    layers = layer_flops(model, prompts * length, pairs) / tensor
    return Flops(layers, head_flops(model, prompts * (length if model.score_head else 1)) / head_parts(model, tensor))


def weight_bytes(model: ModelConfig, tensor: int) -> float:
    """The matrices that a pass reads, in the dtype of their use, without the embedding."""
    # A token takes a product and a sum for each weight.
    layers = layer_flops(model, 1, 0) / 2
    return _itemsize(model.compute_dtype) * layers / tensor + head_bytes(model, tensor)


def head_bytes(model: ModelConfig, tensor: int) -> float:
    return _itemsize(model.head_dtype) * head_flops(model, 1) / 2 / head_parts(model, tensor)


def sampling_weight_bytes(model: ModelConfig, tensor: int) -> float:
    """Matrices in the layout of sampling; in int8 with a float32 scale for each output."""
    size = weight_bytes(model, tensor)
    if not model.sample_weight_dtype:
        return size
    H, K, E = model.num_heads, model.num_kv_heads, model.head_dim
    saved = (_itemsize(model.compute_dtype) - _itemsize(model.sample_weight_dtype)) * layer_flops(model, 1, 0) / 2
    # Scales: split queries, keys, values, gates and ups; whole outputs of the width.
    scales = ((H + 2 * K) * E + 2 * model.mlp_width) / tensor + 2 * model.width
    return size - saved / tensor + 4 * model.num_layers * scales


def cached_token_bytes(model: ModelConfig, tensor: int) -> float:
    """Keys and values of one token; in int8, each head has a float32 scale."""
    of_head = model.head_dim * _itemsize(model.sample_cache_dtype or model.compute_dtype)
    of_head += 4 * bool(model.sample_cache_dtype)
    return 2 * model.num_layers * model.num_kv_heads * of_head / tensor


class StepPart(NamedTuple):
    read: float
    flops: Flops


def decode_parts(
    model: ModelConfig, prompts: float, prompt_length: float, rows: float, cache: float, tensor: int
) -> tuple[StepPart, ...]:
    """A step of `rows` rows: the layers' matrices, attention to the cache of `prompts` prompts and to `cache` new
    tokens a row, and the head."""
    flops = decode_flops(model, rows, prompt_length + cache, tensor)
    matrices = Flops(layer_flops(model, rows, 0) / tensor, 0.0)
    head = head_bytes(model, tensor)
    # xla reads all columns, filled or not.
    cached = (prompts * prompt_length + rows * cache) * cached_token_bytes(model, tensor)
    return (
        StepPart(sampling_weight_bytes(model, tensor) - head, matrices),
        StepPart(cached, Flops(flops.layers - matrices.layers, 0.0)),
        StepPart(head, Flops(0.0, flops.head)),
    )


def optimizer_bytes(state: float, params: float) -> float:
    """Parameters and moments (`state`) are read and written; gradients, of the size of `params`, are read twice."""
    return 2 * state + 2 * params


def _itemsize(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def head_parts(model: ModelConfig, tensor: int) -> int:
    return tensor if model.vocab_size % tensor == 0 and not model.score_head else 1
