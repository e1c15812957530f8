"""Equations of the rewards (arXiv 2505.15034), NumPy. Rows are B = P prompts x M samples, prompt-major."""

import math
from collections.abc import Iterator, Sequence

import chex
import numpy as np

VERDICTS = ("CORRECT", "INCORRECT", "INVALID")
# Of a step's reward, as the report shows it: see `step_reward_BT`.
STEP_FORMULA, SOFT_STEP_FORMULA = "±1 / K, K = {num_steps}", "(2 P(CORRECT) − 1) / K, K = {num_steps}"


def generator_outcome_reward_B(
    is_correct_B: np.ndarray, format_B: np.ndarray, outcome_weight: float, format_weight: float
) -> np.ndarray:
    """outcome_weight * graded outcome + format_weight * format score in [0, 1] (arXiv 2505.15034), float32 [B]."""
    chex.assert_rank([is_correct_B, format_B], 1)
    chex.assert_equal_shape([is_correct_B, format_B])
    reward_B = outcome_weight * is_correct_B.astype(np.float64) + format_weight * format_B.astype(np.float64)
    return reward_B.astype(np.float32)


def verifier_reward_B(
    verdicts: Sequence[str], is_correct_B: np.ndarray, format_B: np.ndarray, gamma: float
) -> tuple[np.ndarray, np.ndarray]:
    """Correctness + gamma * format score (arXiv 2505.15034). Returns reward_B and correctness_B, float32.

    Correctness is 1 where the verdict equals the graded outcome of the solution; an INVALID verdict earns 0.
    """
    chex.assert_rank([is_correct_B, format_B], 1)
    chex.assert_shape([is_correct_B, format_B], (len(verdicts),))
    unknown = sorted(set(verdicts) - set(VERDICTS))
    assert not unknown, f"verdicts {unknown} are not among {VERDICTS}"
    expected = ["CORRECT" if correct else "INCORRECT" for correct in is_correct_B]
    correctness_B = np.array([v == e for v, e in zip(verdicts, expected, strict=True)], np.float64)
    reward_B = correctness_B + gamma * format_B.astype(np.float64)
    return reward_B.astype(np.float32), correctness_B.astype(np.float32)


def step_reward_BT(
    judgements: Sequence[tuple[bool | float | None, ...] | None],
    step_ends: Sequence[Sequence[int]],
    num_tokens: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Step rewards y_k / K at the end token of each step, y = +1 approved, -1 rejected (arXiv 2505.15034).

    `judgements`: B entries, None for a misaligned verification. True and False stand for +1 and -1, a float is y, and
    NaN a step that is not judged: it has no element, and counts in K, so that the reward of a step does not depend on
    how many are judged. `step_ends`: token index of each step's end, -1 if unknown. Returns reward_BT float32 and
    is_step_end_BT bool. A row has no step element at all if judgements are missing, hold a None or do not number K, or
    if a step end lies outside [0, T): another K would change the row's scale.
    """
    reward_BT = np.zeros((len(step_ends), num_tokens), np.float64)
    is_step_end_BT = np.zeros((len(step_ends), num_tokens), bool)
    for row, end, y, num_steps in _elements(judgements, step_ends, num_tokens):
        # Divided by K: a solution's step rewards add up to at most 1, and more steps do not earn more. Added: one long
        # token may close two steps.
        reward_BT[row, end] += y / num_steps
        is_step_end_BT[row, end] = True
    return reward_BT.astype(np.float32), is_step_end_BT


def lowest_y_BT(
    judgements: Sequence[tuple[bool | float | None, ...] | None], step_ends: Sequence[Sequence[int]], num_tokens: int
) -> np.ndarray:
    """y where `step_reward_BT` has an element, the lowest of the steps that end in a token; 0 elsewhere. float32."""
    y_BT = np.full((len(step_ends), num_tokens), np.inf)
    for row, end, y, _ in _elements(judgements, step_ends, num_tokens):
        y_BT[row, end] = min(y_BT[row, end], y)
    return np.where(np.isinf(y_BT), 0.0, y_BT).astype(np.float32)


def y_of(label: bool | float) -> float:
    """+1 or -1; a float is y itself, NaN of a step that is not judged."""
    return label if isinstance(label, float) else 1.0 if label else -1.0


def _elements(
    judgements: Sequence[tuple[bool | float | None, ...] | None], step_ends: Sequence[Sequence[int]], num_tokens: int
) -> Iterator[tuple[int, int, float, int]]:
    """(row, end token, y, K) of each step that is judged, of the rows that have step rewards."""
    assert len(judgements) == len(step_ends), f"{len(judgements)} judgements for {len(step_ends)} rows of step ends"
    assert num_tokens >= 0, f"num_tokens is {num_tokens}"
    for row, (labels, ends) in enumerate(zip(judgements, step_ends, strict=True)):
        num_steps = len(ends)
        if labels is None or num_steps == 0 or len(labels) != num_steps or any(label is None for label in labels):
            continue
        if any(end < 0 or end >= num_tokens for end in ends):
            continue
        yield from ((row, end, y, num_steps) for label, end in zip(labels, ends, strict=True)
                    if not math.isnan(y := y_of(label)))
