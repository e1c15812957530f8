"""One optimizer step on a packed batch: gradients accumulated over micro-batches, then clipping and AdamW.

The loss of a micro-batch is a sum over its tokens, each with a weight fixed on the host, so that the result depends
neither on packing nor on the micro-batch size. The number of micro-batches is traced: the loop runs over those in use.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tango_jax.prompts.collate import MAX_SEGMENTS
from tango_jax.records import Batch, TrainState
from tango_jax.rl import losses
from tango_jax.rl.score import micro_batch, token_logps

RATIO_LEVELS = ("token", "sequence")
GAP_TOLERANCE = 0.1  # a token counts as off when sampler and trainer probabilities differ by more than this share


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Static settings of the policy loss (SPEC section 5)."""

    temperature: float
    clip_low: float
    clip_high: float
    ratio: str  # token (PPO, GRPO) or sequence (GSPO)
    kl_coef: float
    kl_kind: str
    entropy_coef: float
    importance_cap: float  # 0 switches truncated importance weights off
    has_old_logp: bool  # several updates per batch: old log-probs were scored before the first
    logp_chunk: int


def make_policy_loss(model_config, config: LossConfig) -> Callable:
    """`loss_fn(params, micro) -> (loss, sums)` of reinforcement learning: clipped surrogate + KL - entropy."""

    def loss_fn(params, micro: Batch):
        logp_RT, entropy_RT = token_logps(model_config, params, micro, config.temperature, config.logp_chunk)
        mask_RT, weight_RT = micro.is_action_NRT, micro.weight_NRT
        logp_RT = jnp.where(mask_RT, logp_RT, 0.0)
        old_RT = micro.old_logp_NRT if config.has_old_logp else lax.stop_gradient(logp_RT)
        if config.ratio == "sequence":
            ratio_log_RT = losses.sequence_log_ratio_BT(logp_RT, old_RT, mask_RT, micro.segment_NRT, MAX_SEGMENTS)
        else:
            ratio_log_RT = losses.log_ratio_BT(logp_RT, old_RT)
        loss_RT, is_clipped_RT = losses.clipped_loss_BT(ratio_log_RT, micro.adv_NRT, config.clip_low, config.clip_high)
        if config.importance_cap > 0:
            loss_RT *= losses.truncated_importance_BT(old_RT, micro.sampler_logp_NRT, config.importance_cap)
        sums = {"entropy": entropy_RT, "clip_fraction": is_clipped_RT}
        if config.kl_coef > 0:
            kl_RT = losses.kl_BT(logp_RT, micro.ref_logp_NRT, config.kl_kind)
            loss_RT += config.kl_coef * kl_RT
            sums["kl"] = kl_RT
        if config.entropy_coef != 0:
            loss_RT -= config.entropy_coef * entropy_RT
        gap_RT = jnp.where(mask_RT, jnp.abs(logp_RT - micro.sampler_logp_NRT), 0.0)
        sums |= {"logprob_gap_mean": gap_RT, "logprob_gap_share": jnp.expm1(gap_RT) > GAP_TOLERANCE}
        sums = {name: jnp.sum(jnp.where(mask_RT, value, 0.0)) for name, value in sums.items()}
        return jnp.sum(weight_RT * loss_RT), (sums, {"logprob_gap_max": jnp.max(gap_RT)})

    return loss_fn


def make_nll_loss(model_config, logp_chunk: int) -> Callable:
    """`loss_fn(params, micro) -> (loss, sums)` of supervised fine-tuning: weighted negative log-likelihood."""

    def loss_fn(params, micro: Batch):
        logp_RT, _ = token_logps(model_config, params, micro, 1.0, logp_chunk)
        loss = -jnp.sum(jnp.where(micro.is_action_NRT, micro.weight_NRT * logp_RT, 0.0))
        return loss, ({}, {})

    return loss_fn


def make_update(optimizer: optax.GradientTransformation, loss_fn: Callable) -> Callable:
    """Build the jitted `update(state, batch) -> (state, metrics)`. The state is donated.

    Metrics are device scalars: `loss`, `grad_norm`, `tokens`, means over action tokens and maxima from the loss.
    """

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)

        def body(index, carry):
            grads, loss, sums, maxima = carry
            micro = micro_batch(batch, index)
            with jax.named_scope("loss"):
                (micro_loss, (micro_sums, micro_maxima)), micro_grads = value_and_grad(state.params, micro)
            grads, sums = jax.tree.map(jnp.add, (grads, sums), (micro_grads, micro_sums))
            return grads, loss + micro_loss, sums, jax.tree.map(jnp.maximum, maxima, micro_maxima)

        _, (sums, maxima) = jax.eval_shape(loss_fn, state.params, jax.eval_shape(micro_batch, batch, 0))
        start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (state.params, sums, maxima))
        grads, loss, sums, maxima = lax.fori_loop(0, batch.num_micro, body, (start[0], jnp.zeros(()), *start[1:]))
        with jax.named_scope("update"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        tokens = jnp.sum(batch.is_action_NRT)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "tokens": tokens}
        metrics |= {name: value / jnp.maximum(tokens, 1) for name, value in sums.items()} | maxima
        return TrainState(params=params, opt_state=opt_state, step=state.step + 1), metrics

    return jax.jit(update, donate_argnums=0)


def init_state(optimizer: optax.GradientTransformation, params) -> TrainState:
    """Step 0 with fresh moments; call it under jit."""
    return TrainState(params=params, opt_state=optimizer.init(params), step=jnp.zeros((), jnp.int32))
