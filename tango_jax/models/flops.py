"""FLOPs of the matrix products of a forward pass: a product of [n, a] and [a, b] is 2nab."""

import math
from typing import NamedTuple

import numpy as np

from tango_jax.models.lora import MATRICES
from tango_jax.models.transformer import ModelConfig


class Work(NamedTuple):
    """Of forward passes."""

    tokens: float
    pairs: float  # of queries and keys
    scored: float  # tokens whose logits are needed

    def plus(self, other: "Work") -> "Work":
        return Work(*(one + two for one, two in zip(self, other, strict=True)))


def reading(length_B: np.ndarray, scored: float = 0) -> Work:
    length_B = np.asarray(length_B, float)
    return Work(float(length_B.sum()), float((length_B * (length_B + 1) / 2).sum()), scored)


def writing(prompt_B: np.ndarray, length_B: np.ndarray) -> Work:
    """Responses of these lengths. Their prompts, of these lengths, are in another Work."""
    prompt_B, length_B = np.asarray(prompt_B, float), np.asarray(length_B, float)
    pairs = length_B * prompt_B + length_B * (length_B + 1) / 2
    return Work(float(length_B.sum()), float(pairs.sum()), float(length_B.sum()))


def forward_flops(model: ModelConfig, work: Work) -> float:
    adapters = adapter_flops(model, work.tokens) if model.lora else 0.0
    return layer_flops(model, work.tokens, work.pairs) + adapters + head_flops(model, work.scored)


def layer_flops(model: ModelConfig, tokens: float, pairs: float) -> float:
    """Forward pass of all layers, without a tensor split."""
    D, F, H, K, E = model.width, model.mlp_width, model.num_heads, model.num_kv_heads, model.head_dim
    return model.num_layers * (2 * tokens * (D * E * (H + 2 * K) + H * E * D + 3 * D * F) + 4 * pairs * H * E)


def adapter_flops(model: ModelConfig, tokens: float) -> float:
    sizes = {"D": model.width, "F": model.mlp_width, "H": model.num_heads, "K": model.num_kv_heads, "E": model.head_dim}
    sides = sum(math.prod(sizes[axis] for axis in axes) for name in model.lora.names for axes in MATRICES[name])
    return 2 * tokens * model.num_layers * model.lora.rank * sides


def head_flops(model: ModelConfig, tokens: float) -> float:
    outputs = {"": model.vocab_size, "linear": 2, "mlp": model.width + 2}[model.score_head]
    return 2 * tokens * model.width * outputs
