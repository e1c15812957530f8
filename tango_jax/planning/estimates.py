"""Memory and traffic of a run's functions by arithmetic, where nothing is compiled.

States, weights, caches, gradients and saved activations are exact. The compiler's scratch memory is rough: one layer's
arrays, the parameters that it gathers, a few copies of the logits.
"""

import dataclasses
import math

import jax
import numpy as np

from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.costs import SKIPPING, MicroBatchShape, cached_token_bytes, head_parts, micro_batch_shape
from tango_jax.planning.job import Job, SizedPolicy, device_bytes
from tango_jax.planning.memory import PHASES_OF, Phase, saved_activations
from tango_jax.planning.programs import Program
from tango_jax.planning.traffic import (
    Collective,
    axis_members,
    dtype_widths,
    param_sizes,
    score_traffic,
    update_traffic,
)
from tango_jax.records import Batch
from tango_jax.rl.score import is_chunked

LOGITS_FORWARD, LOGITS_BACKWARD = 3, 5  # arrays of the size of the logits that exist at once
TPU_COLUMNS = 128  # of a register


def estimated_programs(job: Job, platform: str) -> dict[str, Program]:
    return {name: program for role in job.policies
            for name, program in (training_estimates(job, role, platform) | sampling_estimates(job, role)).items()}


def estimated_phases(job: Job, role: str, kind: str) -> list[Phase]:
    platform = job.machine.platform
    programs = sampling_estimates(job, role) if kind == "sampling" else training_estimates(job, role, platform)
    return PHASES_OF[kind](job, programs, role)


def training_estimates(job: Job, role: str, platform: str) -> dict[str, Program]:
    policy, found = job.policies[role], {}
    if job.trains(role) or policy.is_scored:
        found[f"{role}/score"] = _score_estimate(policy, platform)
    if job.trains(role):
        found[f"{role}/update"] = _update_estimate(policy, policy.batch, device_bytes(policy.state.params), platform)
    if role in job.stage_one:
        own = policy.in_stage_one
        found[f"{role}/sft"] = _update_estimate(own, own.stage_one, device_bytes(own.state.params), platform)
    return found


def _program(temp: float, output: float = 0.0, argument: float = 0.0, sent: list[Collective] | None = None) -> Program:
    return Program(round(argument), round(output), alias=0, temp=round(temp), collectives=sent or [])


def _score_estimate(policy: SizedPolicy, platform: str) -> Program:
    model, mesh, tokens = policy.model_config, policy.placement.train, micro_batch_shape(policy.batch)
    layer, logits = _working_bytes(policy, tokens)
    temp = layer + LOGITS_FORWARD * logits + gathered_bytes(model, mesh.shape["tensor"])[0]
    sent = [_as_compiled(item, platform, policy)
            for item in score_traffic(model, mesh, tokens, policy.config.logp_chunk)]
    return _program(temp, output=device_bytes(policy.batch.ref_logp_NZRT), sent=sent)


def _update_estimate(policy: SizedPolicy, batch: Batch, trained: int, platform: str) -> Program:
    model, mesh, tokens = policy.model_config, policy.placement.train, micro_batch_shape(batch)
    layer, logits = _working_bytes(policy, tokens)
    unsaved = model.num_layers * layer if model.remat == "none" else 0.0
    temp = 2 * trained + saved_activations(policy, batch) + unsaved + 2 * layer + LOGITS_BACKWARD * logits
    sent = [_as_compiled(item, platform, policy)
            for item in update_traffic(model, mesh, tokens, policy.config.logp_chunk)]
    return _program(temp + sum(gathered_bytes(model, mesh.shape["tensor"])), sent=sent)


def _working_bytes(policy: SizedPolicy, tokens: MicroBatchShape) -> tuple[float, float]:
    model, tensor, chunk = policy.model_config, policy.placement.train.shape["tensor"], policy.config.logp_chunk
    layer = layer_bytes(model, tokens.total, tokens.pairs(model.attention), tensor)
    return layer, logits_bytes(model, chunk if is_chunked(tokens.scored, chunk) else tokens.scored, tensor)


def sampling_estimates(job: Job, role: str) -> dict[str, Program]:
    policy = job.policies[role]
    if policy.is_scored:
        return {}
    shapes = policy.sampling
    model, placement, sizes = policy.model_config, policy.placement, policy.sampler_config
    tensor, groups = placement.local.shape["tensor"], placement.row_multiple
    weights = device_bytes(shapes.weights)
    received = Collective("all-gather", weights, axis_members(placement.train, "fsdp", "tensor"), 1, in_pass=False)
    widest = max(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
                 for leaf in jax.tree.leaves(shapes.weights))
    layout = _program(2 * widest, weights, device_bytes(policy.weights),
                      [received] if len(received.members) > 1 else [])
    prompts, length = shapes.prompts[0] / groups, shapes.prompts[1]
    pairs = prompts * MicroBatchShape(1, int(length)).pairs(model.attention)
    if model.score_head:  # with two arrays of float32 before the classes
        reading = layer_bytes(model, prompts * length, pairs, tensor) + 2 * 4 * prompts * length * model.width
        return {f"{role}/layout": layout, f"{role}/prefill": _program(reading)}
    of_prompts = prompts * length * cached_token_bytes(model, tensor)
    rows = shapes.states[-1].rows.token_B.shape[0] / groups
    scores = rows * sizes.longest * model.num_heads / tensor * 4
    reading = layer_bytes(model, prompts * length, pairs, tensor) + of_prompts
    reading += LOGITS_FORWARD * logits_bytes(model, prompts, tensor)
    decoding = layer_bytes(model, rows, 0, tensor) + LOGITS_FORWARD * logits_bytes(model, rows, tensor) + 2 * scores
    return {
        f"{role}/layout": layout,
        f"{role}/prefill": _program(reading, of_prompts + logits_bytes(model, prompts, tensor)),
        f"{role}/decode": _program(decoding),
    }


def layer_bytes(model: ModelConfig, tokens: float, pairs: float, tensor: int) -> float:
    """Four arrays of [tokens, D]; queries, keys and values, before and after rotation, and attention's output; three of
    [tokens, F]. Plain attention has its scores twice, in float32."""
    D, F, H, K, E = model.width, model.mlp_width, model.num_heads, model.num_kv_heads, model.head_dim
    numbers = tokens * (4 * D + (2 * (H + 2 * K) * E + H * E + 3 * F) / tensor)
    scores = 0.0 if model.attention in SKIPPING else 2 * 4 * pairs * H / tensor
    return numbers * np.dtype(model.compute_dtype).itemsize + scores


def logits_bytes(model: ModelConfig, tokens: float, tensor: int) -> float:
    """Bytes of float32 logits [tokens, V]."""
    return 4 * tokens * model.vocab_size / head_parts(model, tensor)


def gathered_bytes(model: ModelConfig, tensor: int) -> tuple[float, float]:
    """(parameters, gradients) in the layout of use: two layers, embedding and head."""
    width, parameters, gradients = dtype_widths(model), 0.0, 0.0
    is_trained = model.lora is None  # adapters' gradients are too small to count
    for name, size in param_sizes(model):
        part = math.prod(size) / tensor
        if name.startswith("layers/"):
            part /= model.num_layers
            parameters += 2 * part * width["compute"]
            gradients += part * max(width["compute"], width["grad_reduce"]) * is_trained
        elif len(size) > 1:
            is_head = name == "head" or model.tied_head
            parameters += part * width["head" if is_head else "compute"]
            gradients += part * max(width["head" if is_head else "compute"], width["grad_reduce"]) * is_trained
    return parameters, gradients


def _as_compiled(item: Collective, platform: str, policy: SizedPolicy) -> Collective:
    """XLA for GPUs sums gradients over data once, after the loop over micro-batches; for TPUs in each of them. For TPUs
    no gather or scatter lies beside a product (`qwen2_5_math_7b` for a v5p of 32 chips), and gradients of which a
    device keeps fewer than 128 columns are summed whole."""
    if platform == "tpu":
        is_narrow = policy.model_config.width < TPU_COLUMNS * len(item.members)
        kind = "all-reduce" if item.kind == "reduce-scatter" and is_narrow else item.kind
        return dataclasses.replace(item, kind=kind, hidden=0.0)
    mesh = policy.placement.train
    if platform == "gpu" and item.kind == "all-reduce" and item.members == axis_members(mesh, "data"):
        return dataclasses.replace(item, in_pass=False)
    return item
