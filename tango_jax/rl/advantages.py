"""Advantages from the rewards of one batch. One function per equation.

NumPy, float64 inside and float32 outside. Rows are B = P prompts x M samples, prompt-major; a group is M = `group_size`
neighbouring rows. Every host has the whole batch and computes the same advantages.
"""

from collections.abc import Callable, Sequence

import chex
import numpy as np

# As in verl; also that variances have ddof=1, and that a single value has mean 0 and standard deviation 1.
GROUP_EPS = 1e-6
WHITEN_EPS = 1e-8
RLOO_STEP_SCALE = 10.0  # as published
# A class counts as at least this share of all labels, so one class weighs at most 10 times the other.
MIN_CLASS_SHARE = 0.01


def standardise(values: np.ndarray, use_std: bool) -> np.ndarray:
    """(x - mean) / (std + 1e-6), 1-d, std with ddof=1; one value alone has mean 0 and std 1."""
    chex.assert_rank(values, 1)
    if values.size == 0:
        return values
    mean, std = (values.mean(), values.std(ddof=1)) if values.size > 1 else (0.0, 1.0)
    return (values - mean) / (std + GROUP_EPS) if use_std else values - mean


def leave_one_out(values: np.ndarray) -> np.ndarray:
    """x minus the mean of the others, n/(n-1) * (x - mean), 1-d; one value alone stays as it is."""
    chex.assert_rank(values, 1)
    size = values.size
    return values * 1.0 if size < 2 else size / (size - 1) * (values - values.mean())


def reward_to_go_BT(reward_BT: np.ndarray) -> np.ndarray:
    """Sum of the rewards at positions >= t, without discount, float64 [B, T]."""
    chex.assert_rank(reward_BT, 2)
    return np.flip(np.cumsum(np.flip(reward_BT.astype(np.float64), axis=1), axis=1), axis=1)


def per_group_B(reward_B: np.ndarray, group_size: int, normalise_fn: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Apply normalise_fn to the M rewards of each group, float32 [B]."""
    chex.assert_rank(reward_B, 1)
    check_groups(len(reward_B), group_size)
    adv_PM = np.array([normalise_fn(group) for group in reward_B.astype(np.float64).reshape(-1, group_size)])
    return adv_PM.reshape(-1).astype(np.float32)


def per_group_step_BT(
    step_reward_BT: np.ndarray, is_step_end_BT: np.ndarray, group_size: int,
    normalise_fn: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Apply normalise_fn to all step elements of each group jointly, 0 elsewhere, float64 [B, T]; samples masked for
    their length included."""
    chex.assert_rank([step_reward_BT, is_step_end_BT], 2)
    chex.assert_equal_shape([step_reward_BT, is_step_end_BT])
    check_groups(len(step_reward_BT), group_size)
    normalised_BT = np.zeros(step_reward_BT.shape, np.float64)
    for start in range(0, len(step_reward_BT), group_size):
        rows = slice(start, start + group_size)
        is_step_end = is_step_end_BT[rows].astype(bool)
        normalised_BT[rows][is_step_end] = normalise_fn(step_reward_BT[rows][is_step_end].astype(np.float64))
    return normalised_BT


def check_groups(num_rows: int, group_size: int) -> None:
    assert group_size >= 1, f"group_size is {group_size}"
    assert num_rows % group_size == 0, f"{num_rows} rows do not split into groups of {group_size}"


def grpo_outcome_B(reward_B: np.ndarray, group_size: int, use_std: bool = True) -> np.ndarray:
    """GRPO (arXiv 2402.03300; arXiv 2505.15034): A_i = (r_i - mean) / (std + 1e-6) in the group, float32 [B].
    use_std=False only centres (Dr. GRPO, arXiv 2503.20783)."""
    chex.assert_rank(reward_B, 1)
    return per_group_B(reward_B, group_size, lambda group: standardise(group, use_std))


def grpo_step_BT(
    step_reward_BT: np.ndarray, is_step_end_BT: np.ndarray, is_action_BT: np.ndarray, group_size: int,
    use_std: bool = True,
) -> np.ndarray:
    """Step advantage of RL Tango with GRPO (arXiv 2505.15034), float32 [B, T].

    Every step element is normalised by mean and std of all step elements of its group. A_t is the sum of the normalised
    elements at positions >= t; 0 off the actions. The mean is subtracted once a step: where most steps are approved,
    solutions with more steps get less, whatever they say (rl/step_norm.py has forms without this bias).
    """
    chex.assert_rank([step_reward_BT, is_step_end_BT, is_action_BT], 2)
    chex.assert_equal_shape([step_reward_BT, is_step_end_BT, is_action_BT])
    normalised_BT = per_group_step_BT(
        step_reward_BT, is_step_end_BT, group_size, lambda elements: standardise(elements, use_std)
    )
    return (reward_to_go_BT(normalised_BT) * is_action_BT).astype(np.float32)


def rloo_outcome_B(reward_B: np.ndarray, group_size: int) -> np.ndarray:
    """RLOO (arXiv 2402.14740): A_i = M/(M-1) * (r_i - mean), float32 [B]; with M = 1 the raw reward."""
    chex.assert_rank(reward_B, 1)
    return per_group_B(reward_B, group_size, leave_one_out)


def rloo_step_BT(
    step_reward_BT: np.ndarray, is_step_end_BT: np.ndarray, is_action_BT: np.ndarray, group_size: int,
    step_scale: float = RLOO_STEP_SCALE,
) -> np.ndarray:
    """Step advantage of RL Tango with RLOO (arXiv 2505.15034), float32 [B, T]: n/(n-1) * (r - mean) with n the number
    of step elements of the group, then reward-to-go, times step_scale."""
    chex.assert_rank([step_reward_BT, is_step_end_BT, is_action_BT], 2)
    chex.assert_equal_shape([step_reward_BT, is_step_end_BT, is_action_BT])
    normalised_BT = per_group_step_BT(step_reward_BT, is_step_end_BT, group_size, leave_one_out)
    return (step_scale * reward_to_go_BT(normalised_BT) * is_action_BT).astype(np.float32)


def whiten_BT(x_BT: np.ndarray, is_action_BT: np.ndarray) -> np.ndarray:
    """(x - mean) / sqrt(var + 1e-8) over all action tokens of the batch, 0 elsewhere, float64 [B, T]. var has ddof=1,
    and is 0 for a single token."""
    chex.assert_rank([x_BT, is_action_BT], 2)
    chex.assert_equal_shape([x_BT, is_action_BT])
    kept = x_BT[is_action_BT.astype(bool)].astype(np.float64)
    mean, var = (kept.mean(), kept.var(ddof=1)) if kept.size > 1 else (kept.sum(), 0.0)
    return np.where(is_action_BT, (x_BT - mean) / np.sqrt(var + WHITEN_EPS), 0.0)


def reinforce_pp_outcome_BT(reward_B: np.ndarray, is_action_BT: np.ndarray) -> np.ndarray:
    """REINFORCE++ (arXiv 2501.03262), float32 [B, T]. The reward sits on the last action token; the undiscounted
    returns are whitened over all action tokens of the batch."""
    chex.assert_rank([reward_B, is_action_BT], [1, 2])
    chex.assert_equal_shape_prefix([reward_B, is_action_BT], 1)
    reward_BT = np.zeros(is_action_BT.shape, np.float64)
    rows = np.flatnonzero(is_action_BT.any(axis=1))
    last = is_action_BT.shape[1] - 1 - np.argmax(np.flip(is_action_BT[rows], axis=1), axis=1) if rows.size else rows
    reward_BT[rows, last] = reward_B[rows]
    return whiten_BT(reward_to_go_BT(reward_BT), is_action_BT).astype(np.float32)


def reinforce_pp_step_BT(
    step_reward_BT: np.ndarray, is_step_end_BT: np.ndarray, is_action_BT: np.ndarray
) -> np.ndarray:
    """Step advantage of RL Tango with REINFORCE++ (arXiv 2505.15034), float32 [B, T].

    Returns of the raw step rewards, whitened over all action tokens. Rows without step rewards count as zeros in the
    statistics and get the advantage 0, not the whitened value of 0.
    """
    chex.assert_rank([step_reward_BT, is_step_end_BT, is_action_BT], 2)
    chex.assert_equal_shape([step_reward_BT, is_step_end_BT, is_action_BT])
    has_steps_B1 = is_step_end_BT.any(axis=1, keepdims=True)
    whitened_BT = whiten_BT(reward_to_go_BT(step_reward_BT), is_action_BT)
    return (whitened_BT * has_steps_B1).astype(np.float32)


def average_over_verifications(adv_steps: Sequence[np.ndarray]) -> np.ndarray:
    """Mean step advantage of several verifications, float32 [B, T]; those without step rewards count as zeros."""
    assert len(adv_steps) > 0, "no verification to average"
    chex.assert_rank(list(adv_steps), 2)
    chex.assert_equal_shape(list(adv_steps))
    return np.mean(np.stack(adv_steps), axis=0, dtype=np.float64).astype(np.float32)


def update_label_counts(counts_2: np.ndarray, is_correct_B: np.ndarray, decay: float) -> np.ndarray:
    """EMA of the class counts (incorrect, correct) of verified solutions (arXiv 2505.15034), float64 [2]: counts <-
    decay * counts + (1 - decay) * counts of this batch. The first batch replaces the zeros of the start."""
    chex.assert_rank([counts_2, is_correct_B], 1)
    chex.assert_shape(counts_2, (2,))
    assert 0.0 <= decay < 1.0, f"decay is {decay}"
    num_correct = int(np.count_nonzero(is_correct_B))
    batch_2 = np.array([len(is_correct_B) - num_correct, num_correct], np.float64)
    if not counts_2.any():
        return batch_2
    return decay * counts_2.astype(np.float64) + (1.0 - decay) * batch_2


def class_weights_B(counts_2: np.ndarray, is_correct_B: np.ndarray) -> np.ndarray:
    """Class-aware weights of the verifier's advantages (arXiv 2505.15034), float32 [B], mean 1, 1 without labels.
    Proportional to 1/sqrt(count) of the row's class, at least 1 % of all labels; counts_2 = (incorrect, correct)."""
    chex.assert_rank([counts_2, is_correct_B], 1)
    chex.assert_shape(counts_2, (2,))
    total = float(counts_2.sum(dtype=np.float64))
    floored_2 = np.maximum(counts_2.astype(np.float64), MIN_CLASS_SHARE * total) if total > 0 else np.ones(2)
    weight_B = 1.0 / np.sqrt(floored_2[is_correct_B.astype(np.int64)])
    return (weight_B * weight_B.size / weight_B.sum()).astype(np.float32)
