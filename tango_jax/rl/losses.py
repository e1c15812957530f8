"""Losses: per-token losses from log-probs and advantages, and the weights that sum them. One function per equation.

Traced, float32; only `token_weights_BT` runs on the host. The loss of an update is sum(weight_BT * loss_BT) with
weights from all its rows, so packing and micro-batching cannot change it. `logp_BT[:, t]` scores token t. A row holds
at most I whole sequences. Values off the actions must be finite.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

KL_KINDS = ("k1", "k2", "k3")
WEIGHT_KINDS = ("token_mean", "seq_mean", "seq_sum_norm")
# exp(20) is 5e8: no healthy run gets near it, and products with it stay finite in float32.
MAX_EXPONENT = 20.0
MIN_SURPRISE = 1e-30  # -log p of a word that is all but certain: the other word's log-prob stays finite


class LossTokens(NamedTuple):
    """What a loss term gets for each token, [B, T]. Gradient flows through logp and the entropy."""

    logp_BT: jax.Array  # float32, of the policy; 0 off the actions
    old_logp_BT: jax.Array  # float32, of the policy before the first update of the batch
    sampler_logp_BT: jax.Array  # float32
    ref_logp_BT: jax.Array  # float32, of the reference policy; 0 where loss.kl_coef is 0
    entropy_BT: jax.Array  # float32, nats
    adv_BT: jax.Array  # float32
    is_action_BT: jax.Array  # bool


def log_ratio_BT(logp_BT: jax.Array, old_logp_BT: jax.Array) -> jax.Array:
    """log c = logp - old_logp of each token, float32 [B, T]; no gradient flows into old_logp."""
    chex.assert_rank([logp_BT, old_logp_BT], 2)
    chex.assert_equal_shape([logp_BT, old_logp_BT])
    return logp_BT.astype(jnp.float32) - jax.lax.stop_gradient(old_logp_BT.astype(jnp.float32))


def sequence_log_ratio_BT(
    logp_BT: jax.Array, old_logp_BT: jax.Array, is_action_BT: jax.Array, segment_BT: jax.Array, num_segments: int
) -> jax.Array:
    """GSPO (arXiv 2507.18071): log s_i, the mean log-ratio of a sequence's actions, at each of them; float32 [B, T].

    segment_BT is 1..num_segments for the sequences of a row, 0 for padding. With `clipped_loss_BT` and seq_mean weights
    this is the paper's sequence-level objective; its clip range is about 3e-4, not 0.2.
    """
    chex.assert_rank([logp_BT, old_logp_BT, is_action_BT, segment_BT], 2)
    chex.assert_equal_shape([logp_BT, old_logp_BT, is_action_BT, segment_BT])
    # No one-hot matmul: it would run in reduced precision on TPU and A100.
    is_member_BTI = segment_BT[:, :, None] == jnp.arange(1, num_segments + 1)[None, None, :]
    is_member_BTI = is_member_BTI & is_action_BT.astype(bool)[:, :, None]
    token_BTI = log_ratio_BT(logp_BT, old_logp_BT)[:, :, None]
    sum_BI = jnp.sum(jnp.where(is_member_BTI, token_BTI, 0.0), axis=1)
    mean_BI = sum_BI / jnp.maximum(jnp.sum(is_member_BTI, axis=1, dtype=jnp.float32), 1.0)
    return jnp.sum(jnp.where(is_member_BTI, mean_BI[:, None, :], 0.0), axis=2)


def clipped_loss_BT(
    ratio_log_BT: jax.Array, adv_BT: jax.Array, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array]:
    """Clipped surrogate -min(c A, clip(c, 1 - clip_low, 1 + clip_high) A) from log c (arXiv 1707.06347, eq. 7).

    is_clipped_BT: no gradient flows. clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476). log c is clamped to
    +-20 against overflow, without gradient beyond.
    """
    chex.assert_rank([ratio_log_BT, adv_BT], 2)
    chex.assert_equal_shape([ratio_log_BT, adv_BT])
    adv_BT = jax.lax.stop_gradient(adv_BT.astype(jnp.float32))
    ratio_BT = jnp.exp(jnp.clip(ratio_log_BT, -MAX_EXPONENT, MAX_EXPONENT))
    loss_BT = -ratio_BT * adv_BT
    limited_BT = -jnp.clip(ratio_BT, 1.0 - clip_low, 1.0 + clip_high) * adv_BT
    is_clipped_BT = limited_BT > loss_BT
    # where, not maximum: at a tie, such as c = 1, the unclipped term gets the whole gradient.
    return jnp.where(is_clipped_BT, limited_BT, loss_BT), is_clipped_BT


def kl_BT(logp_BT: jax.Array, ref_logp_BT: jax.Array, kind: str) -> jax.Array:
    """Estimates of KL(policy || reference) from sampled tokens, float32 [B, T], with d = ref_logp - logp.

    "k1" = -d: as a loss its gradient is 0 on average, so it only watches. "k2" = d^2 / 2 (mse). "k3" = exp(d) - d - 1
    (low_var, GRPO's choice, arXiv 2402.03300, eq. 4), with d held at or below 20 against overflow, without gradient
    above. No gradient flows into ref_logp. Raises ValueError: another kind.
    """
    chex.assert_rank([logp_BT, ref_logp_BT], 2)
    chex.assert_equal_shape([logp_BT, ref_logp_BT])
    if kind not in KL_KINDS:
        raise ValueError(f"unknown KL estimator {kind!r}: choose one of {', '.join(KL_KINDS)}")
    difference_BT = -log_ratio_BT(logp_BT, ref_logp_BT)
    if kind == "k1":
        return -difference_BT
    if kind == "k2":
        return 0.5 * jnp.square(difference_BT)
    # Held as a whole: with the exponent alone held, the bare -d would push logp further from the reference.
    difference_BT = jnp.minimum(difference_BT, MAX_EXPONENT)
    # expm1 keeps the digits that exp(d) - 1 loses where the policies almost agree.
    return jnp.expm1(difference_BT) - difference_BT


def two_word_kl_BT(logp_BT: jax.Array, ref_logp_BT: jax.Array) -> jax.Array:
    """KL(policy || reference) of a choice between two words, from the log-probs of one of them, float32 [B, T]:
    p log(p / p_0) + (1 - p) log((1 - p) / (1 - p_0)). No gradient flows into ref_logp."""
    chex.assert_rank([logp_BT, ref_logp_BT], 2)
    chex.assert_equal_shape([logp_BT, ref_logp_BT])

    def both(logp_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        logp_BT = jnp.minimum(logp_BT.astype(jnp.float32), -MIN_SURPRISE)
        return logp_BT, jnp.log(-jnp.expm1(logp_BT))

    own, reference = both(logp_BT), both(jax.lax.stop_gradient(ref_logp_BT))
    return sum(jnp.exp(mine_BT) * (mine_BT - its_BT) for mine_BT, its_BT in zip(own, reference, strict=True))


def truncated_importance_BT(old_logp_BT: jax.Array, sampler_logp_BT: jax.Array, cap: float) -> jax.Array:
    """min(exp(old_logp - sampler_logp), cap), float32 [B, T], without gradient: truncated importance weights of the
    trainer against the sampler, which multiply the token losses."""
    chex.assert_rank([old_logp_BT, sampler_logp_BT], 2)
    chex.assert_equal_shape([old_logp_BT, sampler_logp_BT])
    weight_BT = jnp.minimum(jnp.exp(log_ratio_BT(old_logp_BT, sampler_logp_BT)), cap)
    return jax.lax.stop_gradient(weight_BT)


def token_weights_BT(is_action_BT: np.ndarray, kind: str, max_length: int) -> np.ndarray:
    """Weights with which sum(weight_BT * loss_BT) is the named aggregation, float32 [B, T]; NumPy, on the host.

    Args:
        is_action_BT: bool, one whole sequence a row; all rows of one update.
        kind: "token_mean" 1 / tokens of all rows (DAPO, arXiv 2503.14476; Tango's published code);
              "seq_mean" 1 / (sequences * own tokens) (GRPO and Tango's equation);
              "seq_sum_norm" 1 / (sequences * max_length) (Dr. GRPO, arXiv 2503.20783).
        max_length: longest response allowed, in tokens; read by seq_sum_norm alone.

    A sequence without an action token (masked for its length, or padding of the batch) has weight 0 and does not count
    in the denominators. Raises ValueError: another kind, or a max_length below 1.
    """
    chex.assert_rank(is_action_BT, 2)
    if kind not in WEIGHT_KINDS:
        raise ValueError(f"unknown loss aggregation {kind!r}: choose one of {', '.join(WEIGHT_KINDS)}")
    if kind == "seq_sum_norm" and max_length < 1:
        raise ValueError(f"seq_sum_norm divides by max_length, which is {max_length}: it must be at least 1")
    is_action_BT = is_action_BT.astype(np.float64)
    length_B1 = is_action_BT.sum(axis=1, keepdims=True)
    if kind == "token_mean":
        return (is_action_BT / max(length_B1.sum(), 1.0)).astype(np.float32)
    length_B1 = np.maximum(length_B1, 1.0) if kind == "seq_mean" else max_length
    num_sequences = np.count_nonzero(is_action_BT.any(axis=1))
    return (is_action_BT / length_B1 / max(num_sequences, 1)).astype(np.float32)
