"""What a compiled function would say of itself, by arithmetic: memory of a device, and collectives.

In: a job, as shapes. Out: one `ProgramEstimate` for each of its functions, which stands in for a compiled `Program`.
Stage: `plan --search`, which counts hundreds of settings and compiles a few of them; own_problems and `bench --model`,
which choose sizes without compiling any.

What shapes tell is exact: states, weights, caches, gradients, saved activations. What a compiler needs for itself is
not: the arrays of one layer, the parameters that it gathers, a few copies of the logits. They are added up here, and a
program of the same function that has been compiled tells by what factor the sum is off.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import numpy as np

from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.costs import (
    SKIPPING,
    MicroBatchShape,
    cached_token_bytes,
    micro_batch_shape,
)
from tango_jax.planning.hlo import Collective
from tango_jax.planning.job import Job, SizedPolicy, device_bytes
from tango_jax.planning.machines import Machine
from tango_jax.planning.memory import PHASES_OF, Phase, saved_activations
from tango_jax.planning.programs import Program
from tango_jax.planning.traffic import (
    axis_members,
    dtype_widths,
    param_sizes,
    score_traffic,
    update_traffic,
)
from tango_jax.records import Batch
from tango_jax.rl.score import is_chunked

# A compiled program may need so much less or more than the sum.
LEAST_FACTOR, MOST_FACTOR = 0.05, 20.0
LOGITS_FORWARD, LOGITS_BACKWARD = 3, 5  # arrays of the size of the logits that exist at once

Factors = dict[str, float]  # function -> by what its estimate of what a compiler needs is multiplied


class ProgramEstimate(NamedTuple):
    """One function; bytes of a device."""

    known: float  # beside arguments and result, as far as shapes tell
    rough: float  # what else it needs, to a factor
    output: float = 0.0  # the result, where it takes no argument's place
    argument: float = 0.0
    traffic: list[Collective] = []  # noqa: RUF012

    def program(self, factor: float = 1.0) -> Program:
        """As if it had been compiled."""
        temp = round(self.known + factor * self.rough)
        return Program(round(self.argument), round(self.output), alias=0, temp=temp, collectives=self.traffic)

    def factor(self, program: Program) -> float | None:
        """By what `rough` must be multiplied to give this compiled program; None where that says nothing."""
        if program.error or not self.rough:
            return None
        return min(MOST_FACTOR, max(LEAST_FACTOR, (program.added - self.output - self.known) / self.rough))


def estimates_of(job: Job, role: str, platform: str) -> dict[str, ProgramEstimate]:
    """Of all functions of a role."""
    return training_estimates(job, role, platform) | sampling_estimates(job, role)


def as_programs(role: str, estimates: dict[str, ProgramEstimate], factors: Factors) -> dict[str, Program]:
    """{"generator/update": Program, ...}, as if they had been compiled."""
    return {f"{role}/{name}": estimate.program(factors.get(f"{role}/{name}", 1.0))
            for name, estimate in estimates.items()}


def estimated_phases(job: Job, role: str, kind: str, platform: str) -> list[Phase]:
    """The phases of a role's sampling or training (`kind`) with nothing compiled."""
    found = sampling_estimates(job, role) if kind == "sampling" else training_estimates(job, role, platform)
    return PHASES_OF[kind](job, as_programs(role, found, {}), role)


def rows_fit(job: Job, role: str, kind: str, machine: Machine) -> bool:
    """Whether a role's sampling or training stays within the share of a device's memory that sizes are chosen for.

    Laying out the weights is left out: fewer rows would not help it.
    """
    room = machine.scale.memory * machine.memory
    return all(phase.peak <= room for phase in estimated_phases(job, role, kind, machine.platform)
               if not phase.name.endswith("/reshard"))


def training_estimates(job: Job, role: str, platform: str) -> dict[str, ProgramEstimate]:
    """{"score": ..., "update": ...} of one role, and "sft" where it has a stage 1."""
    policy = job.policies[role]
    batch, params = policy.batch, device_bytes(policy.state.params)
    in_stage_one = device_bytes(policy.stage_one_state.params)
    found = {
        "score": _score_estimate(policy, batch),
        "update": _update_estimate(policy, batch, params, platform),
    }
    if role in job.stage_one:
        found["sft"] = _update_estimate(policy, policy.stage_one, in_stage_one, platform)
    return found


def _score_estimate(policy: SizedPolicy, batch: Batch) -> ProgramEstimate:
    model, mesh, chunk = policy.model_config, policy.placement.train, policy.config.logp_chunk
    tokens = micro_batch_shape(batch)
    layer, logits = _working_bytes(policy, tokens)
    return ProgramEstimate(
        known=0.0,
        rough=layer + LOGITS_FORWARD * logits + gathered_bytes(model, mesh.shape["tensor"])[0],
        output=device_bytes(batch.ref_logp_NZRT),
        traffic=score_traffic(model, mesh, tokens, chunk),
    )


def _update_estimate(policy: SizedPolicy, batch: Batch, params: int, platform: str) -> ProgramEstimate:
    """Of an update whose parameters take `parameters` bytes."""
    model, mesh, chunk = policy.model_config, policy.placement.train, policy.config.logp_chunk
    tokens = micro_batch_shape(batch)
    layer, logits = _working_bytes(policy, tokens)
    unsaved = model.num_layers * layer if model.remat == "none" else 0.0
    # Gradients of one micro-batch are made beside their sum.
    working = params + unsaved + 2 * layer + LOGITS_BACKWARD * logits + sum(gathered_bytes(model, mesh.shape["tensor"]))
    traffic = [_moved_out(item, platform, mesh) for item in update_traffic(model, mesh, tokens, chunk)]
    return ProgramEstimate(known=params + saved_activations(policy, batch), rough=working, traffic=traffic)


def _working_bytes(policy: SizedPolicy, tokens: MicroBatchShape) -> tuple[float, float]:
    """(arrays of a layer, one array of logits)."""
    model, tensor, chunk = policy.model_config, policy.placement.train.shape["tensor"], policy.config.logp_chunk
    layer = layer_bytes(model, tokens.total, tokens.pairs(model.attention), tensor)
    return layer, logits_bytes(model, chunk if is_chunked(tokens.scored, chunk) else tokens.scored, tensor)


def sampling_estimates(job: Job, role: str) -> dict[str, ProgramEstimate]:
    """{"layout": ..., "prefill": ..., "decode": ...} of one role."""
    policy, shapes = job.policies[role], job.policies[role].sampling
    model, placement, sizes = policy.model_config, policy.placement, policy.sampler_config
    tensor, groups = placement.local.shape["tensor"], placement.row_multiple
    weights = device_bytes(shapes.weights)
    prompts, length = (size / share for size, share in zip(shapes.prefill[1].token_PX.shape, (groups, 1), strict=True))
    pairs = prompts * MicroBatchShape(1, int(length)).pairs(model.attention)
    of_prompts = prompts * length * cached_token_bytes(model, tensor)
    # A chunk of prompts is a result of its own; otherwise the result is a whole state in the first cache bucket.
    output = of_prompts if sizes.cache_tokens else device_bytes(shapes.states[0])
    rows = shapes.states[-1].out_token_BS.shape[0] / groups
    scores = rows * (sizes.prompt_buckets[-1] + sizes.cache_buckets[-1]) * model.num_heads / tensor * 4
    train = placement.train
    received = Collective("all-gather", weights, axis_members(train, "fsdp", "tensor"), 1, in_pass=False)
    widest = max(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
                 for leaf in jax.tree.leaves(shapes.weights))
    return {
        "layout": ProgramEstimate(
            known=0.0, rough=2 * widest, output=weights, argument=device_bytes(job.policies[role].weights),
            traffic=[received] if len(received.members) > 1 else [],
        ),
        "prefill": ProgramEstimate(
            known=0.0, output=output,
            rough=layer_bytes(model, prompts * length, pairs, tensor) + of_prompts
            + LOGITS_FORWARD * logits_bytes(model, prompts, tensor),
        ),
        "decode": ProgramEstimate(
            known=0.0, rough=LOGITS_FORWARD * logits_bytes(model, rows, tensor) + 2 * scores
            + layer_bytes(model, rows, 0, tensor),
        ),
    }  # fmt: skip


def layer_bytes(model: ModelConfig, tokens: float, pairs: float, tensor: int) -> float:
    """Arrays of the forward pass of one layer: four of [tokens, D]; queries, keys and values, before and after they are
    rotated, and what attention gives; three of [tokens, F]. Plain attention has its scores twice, in float32."""
    D, F, H, K, E = model.width, model.mlp_width, model.num_heads, model.num_kv_heads, model.head_dim
    numbers = tokens * (4 * D + (2 * (H + 2 * K) * E + H * E + 3 * F) / tensor)
    scores = 0.0 if model.attention in SKIPPING else 2 * 4 * pairs * H / tensor
    return numbers * np.dtype(model.compute_dtype).itemsize + scores


def logits_bytes(model: ModelConfig, tokens: float, tensor: int) -> float:
    """float32[tokens, V], of which a device of a tensor group has its part where that divides V."""
    return 4 * tokens * model.vocab_size / (tensor if model.vocab_size % tensor == 0 else 1)


def gathered_bytes(model: ModelConfig, tensor: int) -> tuple[float, float]:
    """(parameters, gradients) in the layout of use: two layers, of which one is on its way, embedding and head."""
    width, parameters, gradients = dtype_widths(model), 0.0, 0.0
    is_trained = model.lora is None  # gradients of adapters are too small to count
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


def _moved_out(item: Collective, platform: str, mesh: jax.sharding.Mesh) -> Collective:
    """XLA for GPUs sums gradients over data once, after the loop over micro-batches; for TPUs in each of them."""
    if platform == "gpu" and item.kind == "all-reduce" and item.members == axis_members(mesh, "data"):
        return dataclasses.replace(item, in_pass=False)
    return item
