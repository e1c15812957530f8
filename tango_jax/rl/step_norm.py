"""Forms of the step advantage that weigh the quality of steps and not their number (`ROLE.loss.step_norm`).

The published form ("elements") subtracts the mean of a group once a step and then sums what is still to come, so a
solution pays for each of its steps. With all steps approved, four solutions of 2 steps and four of 8 get +3.95 and
-3.95 at their first token. The forms here give each solution one score, and compare the scores of a group.

Rows are B = P prompts x M samples, prompt-major; T is the token axis. y is +1 at the end of an approved step and -1 at
the end of a rejected one, or 2 P(CORRECT) - 1 (`rl.step_reward=probability`); n is the number of steps. Steps that end
in one token count as one, with their lowest y. A row without step rewards is not compared, and its advantage is 0.

Steps that the verifier did not judge, since it stops at the first wrong one, have no y and are not in n; their tokens
get 0. Only `first_error` counts them: its share is of all steps, as that of a verifier that judges them all.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import chex
import numpy as np

from tango_jax.rl.advantages import GROUP_EPS, RLOO_STEP_SCALE, check_groups, reward_to_go_BT

ELEMENTS = "elements"  # the published form: that of the algorithm (rl/algorithms.py)


def solutions_form(y_T: np.ndarray, ends: np.ndarray, baseline: float, num_steps: int) -> np.ndarray:
    """The share of approved steps. Each step gives (y - b) / n, and a token gets the sum of what is still to come.

    The first token gets s - b with s = mean of y, whatever n is. A token after j of n steps gets (sum of the y to come
    - (n - j) b) / n: its baseline depends on n, which is partly decided later, so only the first token's baseline is
    free of what follows. As in the published sum, right steps that do no work raise the share.
    """
    value_T = np.zeros(y_T.shape, np.float64)
    value_T[ends] = (y_T[ends] - baseline) / len(ends)
    return reward_to_go_BT(value_T[None])[0]


def minimum_form(y_T: np.ndarray, ends: np.ndarray, baseline: float, num_steps: int) -> np.ndarray:
    """The worst step (after PURE, arXiv 2504.15275): a token gets the lowest y still to come, minus b; 0 after the last
    step. Neither few nor trivial steps raise it. PURE gives 0 after the worst step, and shares ties among the steps."""
    value_T = np.zeros(y_T.shape, np.float64)
    lowest, first = np.minimum.accumulate(y_T[ends][::-1])[::-1], 0
    for end, low in zip(ends, lowest, strict=True):
        value_T[first : end + 1] = low - baseline
        first = end + 1
    return value_T


def first_error_form(y_T: np.ndarray, ends: np.ndarray, baseline: float, num_steps: int) -> np.ndarray:
    """The steps before the first rejected one (the idea of VPPO, arXiv 2601.18984). Tokens before it get the share of
    steps before it, minus b, at least 0; the step itself gets -1, later tokens 0. Without a rejected step all get 1 -
    b. VPPO looks for the error in wrong solutions alone, gives the steps before it a constant, and punishes all later
    tokens alike."""
    value_T = np.zeros(y_T.shape, np.float64)
    rejected = np.flatnonzero(y_T[ends] < 0)
    right = int(rejected[0]) if rejected.size else len(ends)
    start = int(ends[right - 1]) + 1 if right else 0
    value_T[:start] = max(right / num_steps - baseline, 0.0)
    if rejected.size:
        value_T[start : int(ends[right]) + 1] = -1.0
    return value_T


def mean_score(y: np.ndarray, num_steps: int) -> float:
    return float(np.mean(y))


def lowest_score(y: np.ndarray, num_steps: int) -> float:
    return float(np.min(y))


def prefix_score(y: np.ndarray, num_steps: int) -> float:
    rejected = np.flatnonzero(y < 0)
    return (float(rejected[0]) if rejected.size else len(y)) / num_steps


# name -> (the score of a solution, what its tokens get by it); `num_steps` counts steps that are not judged, too
FORMS: Mapping[str, tuple[Callable[[np.ndarray, int], float], Callable[..., np.ndarray]]] = MappingProxyType({
    "solutions": (mean_score, solutions_form),
    "among_equals": (mean_score, solutions_form),
    "minimum": (lowest_score, minimum_form),
    "first_error": (prefix_score, first_error_form),
})


def standard_baseline(scores: np.ndarray, use_std: bool) -> tuple[np.ndarray, float]:
    """GRPO: mean and deviation (ddof=1) of the scores. One score alone has mean 0 and deviation 1.

    Equal scores compare nothing: their deviation is infinite, so all advantages are exactly 0. (With a deviation of 0
    the later tokens of solutions with one rejected step each would get millions.)
    """
    if len(scores) == 1:
        return np.zeros(1), 1.0 + GROUP_EPS if use_std else 1.0
    if np.ptp(scores) < 1e-9:
        return scores.copy(), np.inf
    return np.full(len(scores), scores.mean()), (scores.std(ddof=1) + GROUP_EPS) if use_std else 1.0


def leave_one_out_baseline(scores: np.ndarray) -> tuple[np.ndarray, float]:
    """RLOO: the mean of the other scores, times the scale of RLOO's step advantages; 0 for one alone, nothing where all
    are equal."""
    if len(scores) == 1:
        return np.zeros(1), 1.0 / RLOO_STEP_SCALE
    if np.ptp(scores) < 1e-9:
        return scores.copy(), np.inf
    return (scores.sum() - scores) / (len(scores) - 1), 1.0 / RLOO_STEP_SCALE


def step_advantage_BT(
    form: str, baseline_fn: Callable[[np.ndarray, Any], tuple[np.ndarray, float]], is_of_batch: bool,
    y_BT: np.ndarray, is_step_end_BT: np.ndarray, num_steps_B: np.ndarray, is_right_B: np.ndarray,
    is_action_BT: np.ndarray, group_size: int, loss: Any,
) -> np.ndarray:
    """The step advantage of a form of FORMS, float32 [B, T].

    `among_equals` compares right solutions with right ones and wrong with wrong, so that the mean step advantage is the
    same of both; a solution without another of its kind gets 0. (PAPO, arXiv 2603.26535, does so with the right ones,
    PROGRS, arXiv 2604.02341, with the wrong ones.)

    Args:
        baseline_fn: (scores, loss) -> (what is subtracted from each score, what the difference is divided by).
        is_of_batch: the scores of the whole batch are compared, not those of a group.
        y_BT: read where `is_step_end_BT` is True: at the ends of the steps that are judged.
        num_steps_B: int, tokens in which steps end, judged or not.
    """
    chex.assert_equal_shape([y_BT, is_step_end_BT, is_action_BT])
    check_groups(len(y_BT), group_size)
    score_of, form_fn = FORMS[form]
    y_BT = y_BT.astype(np.float64)
    ends_B = [np.flatnonzero(row) for row in is_step_end_BT]
    adv_BT = np.zeros(y_BT.shape, np.float64)
    size = len(y_BT) if is_of_batch else group_size
    for start in range(0, len(y_BT), size):
        with_steps = [row for row in range(start, start + size) if ends_B[row].size]
        by_outcome = [[row for row in with_steps if is_right_B[row] == right] for right in (True, False)]
        for rows in by_outcome if form == "among_equals" else [with_steps]:
            if not rows or (len(rows) == 1 and form == "among_equals"):
                continue
            scores = np.array([score_of(y_BT[row, ends_B[row]], num_steps_B[row]) for row in rows])
            baselines, scale = baseline_fn(scores, loss)
            for row, baseline in zip(rows, baselines, strict=True):
                adv_BT[row] = form_fn(y_BT[row], ends_B[row], baseline, num_steps_B[row]) / scale
    return (adv_BT * is_action_BT).astype(np.float32)
