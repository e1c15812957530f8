"""Supervised fine-tuning: the update of rl/update.py with the negative log-likelihood and stage 1's optimizer."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tango_jax.models.transformer import ModelConfig
from tango_jax.records import Batch, TrainState
from tango_jax.rl.optimizer import make_optimizer
from tango_jax.rl.policy import Policy, make_state
from tango_jax.rl.score import micro_batch, token_logps
from tango_jax.rl.update import TokenRows, make_update
from tango_jax.runtime.ahead import quick_options
from tango_jax.sharding import collectives

WEIGHT_DECAY, CLIP_NORM = 0.01, 1.0


class Sft(NamedTuple):
    init: Callable  # (key_data) -> TrainState
    restart: Callable  # (weights) -> TrainState
    update: Callable  # (TrainState without base, Batch, base) -> (TrainState, metrics)
    loss: Callable  # (weights, Batch) -> float32[]
    shardings: TrainState


def make_sft(policy: Policy) -> Sft:
    sft, mesh = policy.config.sft, policy.placement.train
    model = policy.model_config if policy.trains_adapters else policy.full_model
    settings = sft.optimizer.copy_and_resolve_references().unlock()
    settings.weight_decay, settings.clip_norm = WEIGHT_DECAY, CLIP_NORM
    cosine_to = sft.steps if sft.optimizer.schedule == "cosine" else 0
    optimizer = make_optimizer(settings, model.lora is not None, cosine_to=cosine_to, b2=sft.optimizer.b2)
    init, restart, shardings = make_state(model, optimizer, policy.placement)
    loss_fn = make_nll_loss(model, policy.config.logp_chunk, mesh)
    return Sft(init, restart, make_update(optimizer, loss_fn, shardings), make_loss(loss_fn, mesh), shardings)


def make_nll_loss(model_config: ModelConfig, logp_chunk: int, mesh: Mesh | None = None) -> Callable:
    """`loss_fn(params, micro) -> (loss, sums)`: weighted negative log-likelihood."""

    def loss_fn(params: dict, micro: Batch) -> tuple[jax.Array, tuple[dict, dict]]:
        # At temperature 1, whatever the role samples at: text is imitated as it is.
        logp_BT, _ = token_logps(model_config, params, micro, 1.0, logp_chunk, mesh)
        rows = TokenRows(micro)
        loss = -jnp.sum(jnp.where(rows.is_action_BT, rows.weight_BT * logp_BT, 0.0))
        return collectives.sum_over_rows(loss, mesh), ({}, {})

    return collectives.over_shards(loss_fn, mesh, P())


def make_loss(loss_fn: Callable, mesh: Mesh | None = None) -> Callable:
    """Build the jitted `loss(weights, batch) -> float32[]` of the whole batch, without an update."""

    @functools.partial(jax.jit, compiler_options=quick_options(mesh))
    def loss(weights: dict, batch: Batch) -> jax.Array:
        def body(index: jax.Array, total: jax.Array) -> jax.Array:
            return total + loss_fn(weights, micro_batch(batch, index))[0]

        return lax.fori_loop(0, batch.num_micro, body, jnp.zeros(()))

    return loss
