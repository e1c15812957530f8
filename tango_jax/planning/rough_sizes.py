"""How much memory sampling and updates take, by arithmetic: weights, optimizer states, references, caches, activations.

For choosing sizes in a moment, before anything is compiled. `python -m tango_jax.plan` compiles the run and is exact.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from ml_collections import ConfigDict

from tango_jax.models.transformer import ModelConfig

GIB = 2**30


class Machine(NamedTuple):
    """What a run has to run on."""

    platform: str  # cpu, gpu or tpu
    devices: int  # of the job
    memory: int  # bytes that programs may use on each device
    capability: float | None = None  # compute capability of NVIDIA GPUs

    @property
    def is_cpu(self) -> bool:
        return self.platform == "cpu"


class Scale(NamedTuple):
    """Sizes that depend on how fast a machine is, where the user sets none."""

    response: int  # tokens of a solution, at least
    prompts: int  # problems of a turn
    samples: int  # solutions of each
    passes: int  # how often every problem is drawn in the run, if that takes no more than
    steps: int  # generator steps
    evaluated: int  # held-out problems, at most
    logits: int  # bytes of the logits that exist at a time
    memory: float  # share of the memory to plan with; compiling and saving take the rest


# A first run on a CPU should end while its user is still there: 135 M parameters on two cores take under two hours.
CPU = Scale(response=256, prompts=4, samples=4, passes=1, steps=20, evaluated=32, logits=2**25, memory=0.5)
# 300 steps are the published number (arXiv 2505.15034).
ACCELERATOR = Scale(response=1024, prompts=32, samples=8, passes=10, steps=300, evaluated=200, logits=2**28,
                    memory=0.85)


def num_parameters(model: ModelConfig) -> int:
    """Parameters of a model, but for norms and biases."""
    D, F, H, K, E = model.width, model.mlp_width, model.num_heads, model.num_kv_heads, model.head_dim
    embeddings = model.vocab_size * D * (1 if model.tied_head else 2)
    return embeddings + model.num_layers * (2 * D * E * (H + K) + 3 * D * F)


def resident_bytes(config: ConfigDict, models: dict[str, ModelConfig], machine: Machine) -> int:
    """What is on a device all the time: of each role its parameters, both Adam moments and the reference policy."""
    total = 0
    for role, model in models.items():
        copies = 3 + (config[role].loss.kl_coef > 0)
        if config[role].mesh.offload:
            copies = 1
        total += copies * num_parameters(model) * jnp.dtype(model.param_dtype).itemsize
    return total // machine.devices


def sampling_bytes(config: ConfigDict, model: ModelConfig, rows: int) -> int:
    """What sampling adds: a copy of the weights, the caches of a decode batch while they grow, and its logits."""
    size = jnp.dtype(model.compute_dtype).itemsize
    cached = 2 * model.num_layers * model.num_kv_heads * model.head_dim * size
    weights = num_parameters(model) * size // config.mesh.decode_tensor
    return weights + rows * (cached * (config.max_prompt + 2 * config.max_response) + 2 * 4 * model.vocab_size)


def update_bytes(config: ConfigDict, model: ModelConfig, rows: int, machine: Machine) -> int:
    """What an update adds: gradients twice, what layers keep of a micro-batch, one layer's work, and a chunk of logits.

    Attention's scores are counted as if they were written out, which kernels for accelerators avoid.
    """
    size = jnp.dtype(model.compute_dtype).itemsize
    prompts = config.prompts_per_micro_batch
    tokens = rows * (config.max_response + 1) + prompts * config.max_prompt
    kept = model.num_layers * tokens * model.width
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    layer = 2 * tokens * (3 * model.width + heads + 3 * model.mlp_width)
    scores = 2 * rows * model.num_heads * config.max_response * (config.max_prompt + config.max_response)
    logits = 3 * 4 * model.vocab_size * (config.logp_chunk or rows * config.max_response)
    return 2 * 4 * num_parameters(model) // machine.devices + size * (kept + layer + scores) + logits


def logits_chunk(scale: Scale, model: ModelConfig) -> int:
    """Tokens whose logits exist at a time."""
    return 2 ** int(math.log2(max(scale.logits // (4 * model.vocab_size), 16)))


def halved(most: int, multiple: int) -> list[int]:
    """`most` and what repeated halving makes of it, as multiples, the largest first."""
    found = []
    while most >= multiple:
        found.append(most // multiple * multiple)
        most //= 2
    return found
