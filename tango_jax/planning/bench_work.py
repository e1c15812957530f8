"""What the phases of `bench --model` have to do, by arithmetic."""

from typing import NamedTuple

import numpy as np

from tango_jax.models.decode_attention import columns_read
from tango_jax.planning import costs
from tango_jax.planning.bench_sizes import Sizes
from tango_jax.planning.costs import Flops, micro_batch_shape
from tango_jax.planning.job import device_bytes
from tango_jax.planning.times import function_flops
from tango_jax.records import Batch
from tango_jax.rl.policy import Policy


class PhaseWork(NamedTuple):
    """What a phase has to do, by arithmetic (costs.py)."""

    tokens: int  # of all devices: those of prompts and responses that it reads or makes, without padding
    flops: Flops  # of a device, with all that is computed again
    bytes: float  # of a device
    needed: Flops  # FLOPs without what remat computes again


def sampling_work(policy: Policy, sizes: Sizes) -> dict[str, PhaseWork]:
    """Of each device group, which has its share of the prompts and rows."""
    model, groups = policy.model_config, policy.placement.row_multiple
    tensor, steps = policy.placement.local.shape["tensor"], sizes.new - 1  # prefill makes the first tokens
    prompts, rows = sizes.prompts / groups, sizes.rows / groups
    read = costs.prefill_flops(model, prompts, sizes.prompt, tensor, model.attention)
    of_prompt, of_row = columns(policy, sizes)
    step = costs.decode_flops(model, rows, of_prompt + of_row, tensor)
    steps_bytes = steps * costs.decode_bytes(model, prompts, of_prompt, rows, of_row, tensor)
    return {
        "prefill": PhaseWork(sizes.prompts * sizes.prompt, read,
                        costs.prefill_bytes(model, prompts, sizes.prompt, tensor), read),
        "decode": PhaseWork(sizes.rows * steps, scaled(step, steps), steps_bytes, scaled(step, steps)),
    }  # fmt: skip


def columns(policy: Policy, sizes: Sizes) -> tuple[float, float]:
    """Columns of a prompt's cache, and of a row's, that a decode step reads on average."""
    implementation = policy.model_config.decode_attention
    of_prompt = columns_read(implementation, np.int64(sizes.prompt), sizes.prompt)
    return float(of_prompt), float(columns_read(implementation, np.arange(1, sizes.new), sizes.new).mean())


def training_work(policy: Policy, batch: Batch, tokens: int) -> dict[str, PhaseWork]:
    """Of each shard, which has its own micro-batches. `tokens` are those of the whole batch, without padding."""
    model, tensor, count = policy.model_config, policy.placement.train.shape["tensor"], int(batch.num_micro)
    micro, state = micro_batch_shape(batch), policy.abstract_state()
    params = device_bytes(state.params)
    score, update = (scaled(flops, count) for flops in function_flops(policy, micro))
    needed = scaled(costs.needed_flops(model, micro, tensor, model.attention), count)
    step = costs.optimizer_bytes(device_bytes(state), params)
    none = Flops(0.0, 0.0)
    return {
        "score": PhaseWork(tokens, score, count * costs.weight_bytes(model, tensor), score),
        "update": PhaseWork(tokens, update, costs.update_bytes(model, count, tensor, params) + step, needed),
        "optimizer": PhaseWork(0, none, step, none),
    }


def scaled(flops: Flops, count: float) -> Flops:
    return Flops(count * flops.layers, count * flops.head)
