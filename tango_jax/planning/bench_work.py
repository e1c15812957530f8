"""What the phases of `bench --model` have to do, by arithmetic."""

from typing import NamedTuple

import numpy as np

from tango_jax.models.decode_attention import columns_read
from tango_jax.planning import needs
from tango_jax.planning.bench_sizes import Sizes
from tango_jax.planning.needs import Flops, MicroBatchShape
from tango_jax.planning.programs import device_bytes
from tango_jax.records import Batch
from tango_jax.rl.policy import Policy
from tango_jax.rl.score import is_chunked


class Work(NamedTuple):
    """What a phase has to do, by arithmetic (needs.py)."""

    tokens: int  # of all devices: those of prompts and responses that it reads or makes, without padding
    flops: Flops  # of a device, with all that is computed again
    bytes: float  # of a device
    needed: Flops  # FLOPs without what remat computes again


def sampling_work(policy: Policy, sizes: Sizes) -> dict[str, Work]:
    """Of each device group, which has its share of the prompts and rows."""
    model, groups = policy.model_config, policy.placement.row_multiple
    tensor, steps = policy.placement.local.shape["tensor"], sizes.new - 1  # prefill makes the first tokens
    prompts, rows = sizes.prompts / groups, sizes.rows / groups
    read = needs.prefill_flops(model, prompts, sizes.prompt, tensor, model.attention)
    of_prompt = float(columns_read(model.decode_attention, np.int64(sizes.prompt), sizes.prompt))
    of_row = float(columns_read(model.decode_attention, np.arange(1, sizes.new), sizes.new).mean())
    step = needs.decode_flops(model, rows, of_prompt + of_row, tensor)
    steps_bytes = steps * needs.decode_bytes(model, prompts, of_prompt, rows, of_row, tensor)
    return {
        "prefill": Work(sizes.prompts * sizes.prompt, read,
                        needs.prefill_bytes(model, prompts, sizes.prompt, tensor), read),
        "decode": Work(sizes.rows * steps, scaled(step, steps), steps_bytes, scaled(step, steps)),
    }  # fmt: skip


def training_work(policy: Policy, batch: Batch, tokens: int) -> dict[str, Work]:
    """Of each shard, which has its own micro-batches. `tokens` are those of the whole batch, without padding."""
    model, tensor, count = policy.model_config, policy.placement.train.shape["tensor"], int(batch.num_micro)
    micro, state = micro_batch_shape(batch), policy.abstract_state()
    params = device_bytes(state.params)
    chunked = is_chunked(micro.scored, policy.config.logp_chunk)
    score = scaled(needs.score_flops(model, micro, tensor, model.attention), count)
    update = scaled(needs.update_flops(model, micro, tensor, model.attention, chunked), count)
    step = needs.optimizer_bytes(device_bytes(state), params)
    none = Flops(0.0, 0.0)
    return {
        "score": Work(tokens, score, count * needs.weight_bytes(model, tensor), score),
        "update": Work(tokens, update, needs.update_bytes(model, count, tensor, params) + step, scaled(score, 3)),
        "optimizer": Work(0, none, step, none),
    }


def scaled(flops: Flops, count: float) -> Flops:
    return Flops(count * flops.layers, count * flops.head)


def micro_batch_shape(batch: Batch) -> MicroBatchShape:
    (_, _, R, T), (_, _, Q, X) = batch.token_NZRT.shape, batch.prefix_token_NZQX.shape
    return MicroBatchShape(R, T, Q, X)
