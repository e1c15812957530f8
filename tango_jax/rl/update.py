"""One optimizer step on a packed batch: gradients accumulated over micro-batches, then clipping and AdamW.

Token weights come from packing.py: packing and micro-batch size change no result.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tango_jax.models.transformer import ModelConfig
from tango_jax.records import Batch, TrainState, with_base
from tango_jax.rl import losses
from tango_jax.rl.rows import MAX_SEGMENTS
from tango_jax.rl.score import micro_batch, token_logps
from tango_jax.runtime.ahead import quick_options
from tango_jax.sharding import collectives

GAP_TOLERANCE = 0.1  # a token counts as off when sampler and trainer probabilities differ by more than this share
MIN_NORM = 1e-30  # parameters that are all 0 have no norm to divide by


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Static settings of the policy loss (arXiv 2505.15034, and the usual options of GRPO)."""

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
    term_fn: Callable | None = None  # (losses.LossTokens) -> loss_BT of the user's, which is added


def make_policy_loss(model_config: ModelConfig, config: LossConfig, mesh: Mesh | None = None) -> Callable:
    """`loss_fn(params, micro) -> (loss, sums)`: clipped surrogate + KL - entropy. With `Batch.other_NZRT` both are of a
    choice between two words, whatever `kl_kind`."""

    def loss_fn(params: dict, micro: Batch) -> tuple[jax.Array, tuple[dict, dict]]:
        logp_BT, entropy_BT = token_logps(model_config, params, micro, config.temperature, config.logp_chunk, mesh)
        rows = TokenRows(micro)
        # Prompts and padding get 0: their ratios could overflow, and a weight of 0 would make NaN of that.
        logp_BT = jnp.where(rows.is_action_BT, logp_BT, 0.0)
        # With one update per batch the old policy is this one: its ratio is 1, and only the gradient goes through it.
        old_BT = rows.old_logp_BT if config.has_old_logp else lax.stop_gradient(logp_BT)
        if config.ratio == "sequence":
            log_ratio_BT = losses.sequence_log_ratio_BT(
                logp_BT, old_BT, rows.is_action_BT, rows.segment_BT, MAX_SEGMENTS
            )
        else:
            log_ratio_BT = losses.log_ratio_BT(logp_BT, old_BT)
        loss_BT, is_clipped_BT = losses.clipped_loss_BT(log_ratio_BT, rows.adv_BT, config.clip_low, config.clip_high)
        if config.importance_cap > 0:
            loss_BT *= losses.truncated_importance_BT(old_BT, rows.sampler_logp_BT, config.importance_cap)
        sums = {"entropy": entropy_BT, "clip_fraction": is_clipped_BT}
        if config.kl_coef > 0:
            # In the loss, as in GRPO, not in the reward, as in PPO: normalising rewards does not rescale it.
            if micro.other_NZRT is None:
                kl_BT = losses.kl_BT(logp_BT, rows.ref_logp_BT, config.kl_kind)
            else:  # estimators need samples, and the text has CORRECT everywhere
                kl_BT = losses.two_word_kl_BT(logp_BT, rows.ref_logp_BT)
            loss_BT += config.kl_coef * kl_BT
            sums["kl"] = kl_BT
        if config.entropy_coef != 0:
            loss_BT -= config.entropy_coef * entropy_BT
        if config.term_fn is not None:
            tokens = losses.LossTokens(logp_BT, old_BT, rows.sampler_logp_BT, rows.ref_logp_BT, entropy_BT, rows.adv_BT,
                                       rows.is_action_BT)
            loss_BT += jnp.where(rows.is_action_BT, config.term_fn(tokens), 0.0)
        # Against the policy that sampled: later updates of a batch rightly move away from it.
        gap_BT = jnp.where(rows.is_action_BT, jnp.abs(old_BT - rows.sampler_logp_BT), 0.0)
        sums |= {"logprob_gap_mean": gap_BT, "logprob_gap_share": jnp.expm1(gap_BT) > GAP_TOLERANCE}
        sums = {name: jnp.sum(jnp.where(rows.is_action_BT, value, 0.0)) for name, value in sums.items()}
        loss, sums = collectives.sum_over_rows((jnp.sum(rows.weight_BT * loss_BT), sums), mesh)
        return loss, (sums, collectives.max_over_rows({"logprob_gap_max": jnp.max(gap_BT)}, mesh))

    return collectives.over_shards(loss_fn, mesh, P())


class TokenRows:
    """A micro-batch's per-token fields as rows of all shards, [B = Z x R, T]."""

    def __init__(self, micro: Batch):
        def rows(leaf: jax.Array) -> jax.Array:
            return leaf.reshape(-1, leaf.shape[-1])

        self.segment_BT, self.is_action_BT = rows(micro.segment_NZRT), rows(micro.is_action_NZRT)
        self.weight_BT, self.adv_BT = rows(micro.weight_NZRT), rows(micro.adv_NZRT)
        self.sampler_logp_BT = rows(micro.sampler_logp_NZRT)
        self.old_logp_BT, self.ref_logp_BT = rows(micro.old_logp_NZRT), rows(micro.ref_logp_NZRT)


def make_update(
    optimizer: optax.GradientTransformation, loss_fn: Callable, shardings: TrainState | None = None
) -> Callable:
    """Build the jitted `update(state, batch, base) -> (state, metrics)`. The state is donated; the frozen `base` is
    not.

    Metrics are device scalars: `loss`, `grad_norm`, `update_ratio` (norm of the update over the norm of the
    parameters), `tokens`, `useful_share` (of the computed tokens, those that are not padding), means over action tokens
    and maxima from the loss.
    """

    def update(state: TrainState, batch: Batch, base: dict | None = None) -> tuple[TrainState, dict]:
        def loss_of(params: dict, micro: Batch) -> tuple[jax.Array, tuple[dict, dict]]:
            return loss_fn(with_base(base, params), micro)

        value_and_grad = jax.value_and_grad(loss_of, has_aux=True)

        def body(index: jax.Array, carry: tuple) -> tuple:
            grads, loss, sums, maxima = carry
            micro = micro_batch(batch, index)
            with jax.named_scope("loss"):
                (micro_loss, (micro_sums, micro_maxima)), micro_grads = value_and_grad(state.params, micro)
            grads, sums = jax.tree.map(jnp.add, (grads, sums), (micro_grads, micro_sums))
            return pinned(grads), loss + micro_loss, sums, jax.tree.map(jnp.maximum, maxima, micro_maxima)

        def pinned(grads: dict) -> dict:
            # Without this the accumulators would be whole on every device.
            return grads if shardings is None else lax.with_sharding_constraint(grads, shardings.params)

        _, (sums, maxima) = jax.eval_shape(loss_of, state.params, jax.eval_shape(micro_batch, batch, 0))
        start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (state.params, sums, maxima))
        start = (pinned(start[0]), jnp.zeros(()), *start[1:])
        # A loop with a traced end: a scan would also run over the empty rest of N.
        grads, loss, sums, maxima = lax.fori_loop(0, batch.num_micro, body, start)
        with jax.named_scope("update"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        tokens = jnp.sum(batch.is_action_NZRT)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "tokens": tokens}
        metrics["useful_share"] = _useful_share(batch)
        metrics["update_ratio"] = _norm(updates) / jnp.maximum(_norm(state.params), MIN_NORM)
        metrics |= {name: value / jnp.maximum(tokens, 1) for name, value in sums.items()} | maxima
        return state.replace(params=params, opt_state=opt_state, step=state.step + 1), metrics

    mesh = None if shardings is None else shardings.step.mesh
    out_shardings = None if mesh is None else (shardings, NamedSharding(mesh, P()))
    return jax.jit(update, donate_argnums=0, out_shardings=out_shardings, compiler_options=quick_options(mesh))


def _useful_share(batch: Batch) -> jax.Array:
    (_, Z, R, T), (Q, X) = batch.token_NZRT.shape, batch.prefix_token_NZQX.shape[2:]
    useful = jnp.sum(batch.segment_NZRT > 0) + jnp.sum(batch.prefix_length_NZQ)
    return useful / jnp.maximum(batch.num_micro * Z * (R * T + Q * X), 1)


def _norm(tree: Any) -> jax.Array:
    """float32 whatever the arrays are: a square of 16 bits would lose or overflow."""
    return optax.tree.norm(optax.tree.cast(tree, jnp.float32))


def init_state(optimizer: optax.GradientTransformation, params: dict) -> TrainState:
    """Step 0 with fresh moments; call it under jit."""
    return TrainState(params=params, opt_state=optimizer.init(params), step=jnp.zeros((), jnp.int32))
