"""FLOPs of the matrix products of a forward pass: a product of [n, a] and [a, b] is 2nab."""

import math

from tango_jax.models.lora import MATRICES
from tango_jax.models.transformer import ModelConfig


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
