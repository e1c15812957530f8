"""The algorithms that turn rewards into advantages (equations in advantages.py).

`loss.algorithm` is a name of the table, or `FILE.py:name` or `package.module:name` of an `Algorithm`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import chex
import numpy as np

from tango_jax.rl import advantages
from tango_jax.rl.step_norm import leave_one_out_baseline, standard_baseline
from tango_jax.runtime.checks import meant
from tango_jax.runtime.user_code import is_user_code, load_object


def differs_within_group_P(reward_PM: np.ndarray) -> np.ndarray:
    """bool [P]; one reward alone counts if it is not 0."""
    return (reward_PM[:, 0] != 0) if reward_PM.shape[1] == 1 else np.ptp(reward_PM, axis=1) > 0


def differs_within_batch_P(reward_PM: np.ndarray) -> np.ndarray:
    """bool [P], the same for every group."""
    return np.full(len(reward_PM), np.ptp(reward_PM) > 0)


class Algorithm(NamedTuple):
    """How rewards become advantages. Rows are B = P prompts x M samples, prompt-major; `loss` is `ROLE.loss`. Both
    functions return float32 [B, T], 0 off the actions:

        outcome_fn(reward_B, is_action_BT, M, loss)
        step_fn(step_reward_BT, is_step_end_BT, is_action_BT, M, loss)

    `has_signal_fn(reward_PM)`: bool [P], groups with an outcome advantage. `compares_groups_alone`: no group depends on
    the others, so groups may differ in size. `baseline_fn(scores, loss)`: (baselines, scale) by which the forms of
    step_norm.py compare solutions; None: the algorithm has no such form.
    """

    outcome_fn: Callable[[np.ndarray, np.ndarray, int, Any], np.ndarray]
    step_fn: Callable[[np.ndarray, np.ndarray, np.ndarray, int, Any], np.ndarray]
    has_signal_fn: Callable[[np.ndarray], np.ndarray] = differs_within_group_P
    formula: str = ""
    compares_groups_alone: bool = False
    baseline_fn: Callable[[np.ndarray, Any], tuple[np.ndarray, float]] | None = None


def _on_actions(adv_B: np.ndarray, is_action_BT: np.ndarray) -> np.ndarray:
    chex.assert_equal_shape_prefix([adv_B, is_action_BT], 1)
    return (adv_B[:, None] * is_action_BT).astype(np.float32)


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType({
    "grpo": Algorithm(
        lambda reward_B, is_action_BT, M, loss: _on_actions(
            advantages.grpo_outcome_B(reward_B, M, loss.use_std), is_action_BT),
        lambda reward_BT, is_end_BT, is_action_BT, M, loss: advantages.grpo_step_BT(
            reward_BT, is_end_BT, is_action_BT, M, loss.use_std),
        formula="(reward - mean) / std of the group, or without the std where use_std is off",
        compares_groups_alone=True, baseline_fn=lambda scores, loss: standard_baseline(scores, loss.use_std),
    ),
    "rloo": Algorithm(
        lambda reward_B, is_action_BT, M, loss: _on_actions(advantages.rloo_outcome_B(reward_B, M), is_action_BT),
        lambda reward_BT, is_end_BT, is_action_BT, M, loss: advantages.rloo_step_BT(
            reward_BT, is_end_BT, is_action_BT, M),
        formula="M / (M - 1) x (reward - mean of the group)", compares_groups_alone=True,
        baseline_fn=lambda scores, loss: leave_one_out_baseline(scores),
    ),
    "reinforce_pp": Algorithm(
        lambda reward_B, is_action_BT, M, loss: advantages.reinforce_pp_outcome_BT(reward_B, is_action_BT),
        lambda reward_BT, is_end_BT, is_action_BT, M, loss: advantages.reinforce_pp_step_BT(
            reward_BT, is_end_BT, is_action_BT),
        differs_within_batch_P, "reward, whitened over all tokens of the batch",
        baseline_fn=lambda scores, loss: standard_baseline(scores, loss.use_std),
    ),
})


def algorithm_of(name: str, key: str = "loss.algorithm") -> Algorithm:
    """Raises ValueError if the setting `key` names no algorithm."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if not is_user_code(name):
        raise ValueError(f"{key}={name!r} is not one of {', '.join(ALGORITHMS)}{meant(name, ALGORITHMS)}; your own "
                         "algorithm is FILE.py:name")
    return load_object(key, name, Algorithm)
