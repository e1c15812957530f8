"""Rewards of responses and steps (arXiv 2505.15034). Rows are B = P prompts x M samples, prompt-major."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from ml_collections import ConfigDict

from tango_jax.method.turn import Turn
from tango_jax.records import Lesson, Responses, Rewards, Solution, StepRewards, Term, Verification
from tango_jax.rl.rewards import generator_outcome_reward_B, lowest_y_BT, step_reward_BT, verifier_reward_B, y_of
from tango_jax.runtime.checks import require

# Of each step of B solutions; None: a solution without step rewards. A float is y itself, NaN of a step not judged.
Labels = Sequence[tuple[bool | float | None, ...] | None]


def graded(t: Turn, solutions: Responses) -> tuple[Responses, Rewards]:
    """The generator's reward: grade and format score. A label replaces the grade, except in the metric."""
    return solutions, t.with_own_reward(solutions, outcome_reward(solutions, t.rl))


def outcome_reward(solutions: Sequence[Solution], rl: ConfigDict) -> Rewards:
    is_right_B, is_correct_B = right_B(solutions), np.array([solution.is_correct for solution in solutions])
    format_B = np.array([solution.format_score for solution in solutions])
    reward_B = generator_outcome_reward_B(is_right_B, format_B, rl.outcome_weight, rl.format_weight)
    metrics = {"generator/reward/outcome": is_correct_B.mean(), "generator/reward/format": format_B.mean()}
    has_labels = any(solution.label is not None for solution in solutions)
    terms = (Term("label" if has_labels else "grade", rl.outcome_weight, is_right_B.astype(np.float32)),
             Term("format score", rl.format_weight, format_B.astype(np.float32)))
    return Rewards(reward_B, metrics, terms)


def agreement(t: Turn, judged: Responses) -> tuple[Responses, Rewards]:
    """The verifier's reward: whether its verdict agrees with the grade (or label), and the format score."""
    return judged, t.with_own_reward(judged, verdict_reward(judged, t.rl))


def verdict_reward(judged: Responses, rl: ConfigDict) -> Rewards:
    is_right_B, is_correct_B = right_B(judged.owners), np.array([solution.is_correct for solution in judged.owners])
    format_B = np.array([verification.format_score for verification in judged])
    verdicts = [verification.verdict for verification in judged]
    reward_B, agrees_B = verifier_reward_B(verdicts, is_right_B, format_B, rl.gamma)
    _, correctness_B = verifier_reward_B(verdicts, is_correct_B, format_B, rl.gamma)
    metrics = {"verifier/reward/correctness": correctness_B.mean(), "verifier/reward/format": format_B.mean()}
    has_labels = any(solution.label is not None for solution in judged.owners)
    terms = (Term(f"agreement with the {'label' if has_labels else 'grade'}", 1.0, agrees_B),
             Term("format score", rl.gamma, format_B.astype(np.float32)))
    return Rewards(reward_B, metrics, terms)


def right_B(solutions: Sequence[Solution]) -> np.ndarray:
    """bool [B], whether training takes each solution for right."""
    return np.array([solution.is_right for solution in solutions], bool)


def judged_steps(t: Turn, solutions: Responses, judged: Responses, rejects_unmatched: bool = False
                 ) -> list[StepRewards]:
    """One per verification of a solution. A solution has none if it was not judged, or if judgements and steps do not
    match, unless those steps are to be rejected."""
    unmatched = [(False,) * len(one.of.steps) if rejects_unmatched else None for one in judged]
    labels = [_labels(t.rl, one) if one.is_aligned else other for one, other in zip(judged, unmatched, strict=True)]
    row_of = {id(solution): row for row, solution in enumerate(solutions)}
    found = []
    for number in range(judged.group_size):
        of_rows: list = [None] * len(solutions)
        for parent, label in zip(judged.parents, labels[number :: judged.group_size], strict=True):
            of_rows[row_of[id(parent)]] = label
        found.append(step_rewards(t, solutions, of_rows))
    return found


def _labels(rl: ConfigDict, one: Verification) -> tuple[bool | float, ...]:
    """Of an aligned verification, in which None is a step that is not judged. With `rl.step_reward=probability`,
    y = 2 P(CORRECT) - 1 is the mean of the marks that the verifier would write there, if its remark is the same."""
    if rl.step_reward == "mark":
        return tuple(math.nan if mark is None else mark for mark in one.judgements)
    require(len(one.p_steps) == len(one.judgements), "rl.step_reward=probability needs P(CORRECT) of each judgement, "
            f"and a verification has {len(one.p_steps)} of {len(one.judgements)}: a method that makes a Verification "
            "of its own gives it p_steps, or set rl.step_reward=mark")
    return tuple(math.nan if mark is None else 2.0 * p - 1.0 for mark, p in zip(one.judgements, one.p_steps,
                                                                               strict=True))


def step_rewards(t: Turn, solutions: Responses, labels: Labels) -> StepRewards:
    """y_k / K at the last token of each of K steps, y = +1 where its label is True and -1 where it is False."""
    placed = labels, [solution.step_ends for solution in solutions], t.config.generator.max_response
    reward_BT, is_end_BT = step_reward_BT(*placed)
    is_soft = any(isinstance(one, float) and not math.isnan(one) for label in labels if label for one in label)
    y_B = [list(map(y_of, label)) if has_steps else None
           for label, has_steps in zip(labels, is_end_BT.any(axis=1), strict=True)]
    of_steps = [one and tuple(None if math.isnan(y) else y / len(one) for y in one) for one in y_B]
    return StepRewards(reward_BT, is_end_BT, of_steps, lowest_y_BT(*placed) if is_soft else None)


def step_metrics(rewards: Sequence[StepRewards], alpha: float | np.ndarray) -> dict[str, float]:
    """What a turn logs of its step rewards, one for each verification of a solution, and of their largest weight. The
    approved share is of the steps that are rewarded; with `rl.step_reward=probability` P(CORRECT) of an approved one is
    above one half, whatever was written."""
    approved = [value > 0 for one in rewards for steps in one.of_steps if steps for value in steps if value is not None]
    return {
        **({"generator/steps_approved": np.mean(approved)} if approved else {}),
        "generator/alpha": float(np.max(alpha)),
        "generator/reward/step": np.mean([one.reward_BT.sum(axis=1).mean() for one in rewards]),
        "generator/step_rewarded_share": np.mean([one.is_end_BT.any(axis=1).mean() for one in rewards]),
    }


def step_count_metrics(lesson: Lesson, mask_overlong: bool) -> dict[str, float]:
    """`step_count_corr` of a lesson with step rewards and a term "steps"; nothing of others. `mask_overlong`: truncated
    responses are not trained on."""
    if not lesson.step_rewards or "steps" not in lesson.terms:
        return {}
    count_B = np.array([len(solution.step_ends) for solution in lesson.responses])
    has_steps_B = np.any([one.is_end_BT.any(axis=1) for one in lesson.step_rewards], axis=0)
    if mask_overlong:
        has_steps_B &= ~np.asarray(lesson.responses.rollout.is_truncated_B)
    adv_B = np.asarray(lesson.terms["steps"][1])[:, 0]
    correlation = step_count_corr(adv_B, count_B, has_steps_B, lesson.responses.groups())
    return {} if correlation is None else {"generator/step_count_corr": correlation}


def step_count_corr(
    adv_B: np.ndarray, count_B: np.ndarray, has_steps_B: np.ndarray, groups: Iterable[Sequence[int]]
) -> float | None:
    """Correlation within groups of the step advantage at the first token with the number of steps, pooled over groups.

    The published form favours few steps, which shows here once most steps are approved (rl/step_norm.py). None where no
    group has solutions of several counts, or of several advantages.
    """
    pairs = []
    for group in groups:
        rows = [row for row in group if has_steps_B[row]]
        if rows:
            pairs.append(np.stack([adv_B[rows] - adv_B[rows].mean(), count_B[rows] - count_B[rows].mean()]))
    advantage, count = np.concatenate(pairs, axis=1) if pairs else np.zeros((2, 0))
    scale = np.sqrt((advantage @ advantage) * (count @ count))
    return float(advantage @ count / scale) if scale > 1e-9 else None
