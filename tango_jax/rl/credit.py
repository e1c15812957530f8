"""Rewards and credit: the records of a turn in; one reward a row and one advantage a token out.

Stage: after parsing and grading, before the update; NumPy on the host. A turn's plan (arms.py) names one `..._reward`
of this file, how good each response of the role that learns is, and one `..._credit`, which tokens of it earned that.
Functions of the user's take and return the same (rl/own_method.py). Rows are B = P prompts x M samples, prompt-major; T
is the token axis of a response.
"""

import dataclasses
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import NamedTuple

import chex
import numpy as np
from ml_collections import ConfigDict

from tango_jax.records import Answers, Counters, Credit, Rewards, Term
from tango_jax.rl import advantages
from tango_jax.rl.algorithms import Algorithm, algorithm_of
from tango_jax.rl.schedule import Turn, alpha_at

VERDICTS = ("CORRECT", "INCORRECT", "INVALID")


class TurnSoFar(NamedTuple):
    """What a credit function sees: the turn up to its rewards. `loop.turn.run_turn` makes it."""

    config: ConfigDict
    turn: Turn
    answers: Answers
    reward_B: np.ndarray  # float32, of the role that learns
    is_action_BT: np.ndarray  # bool, the tokens that it is trained on
    counters: Counters
    # float64 [P], a factor of the weight of each group's step rewards (rl/trust.py); None: 1 everywhere, as published.
    # `answers` lacks the verifier's where nobody was asked.
    trust_P: np.ndarray | None = None
    # float32 [B, T], log-probs of the tokens by the plan's teacher (rl/informed.py); None: it has none.
    teacher_logp_BT: np.ndarray | None = None

    def algorithm(self, role: str) -> Algorithm:
        """The algorithm of a role."""
        return algorithm_of(self.config[role].loss.algorithm, f"{role}.loss.algorithm")

    def outcome_advantages(self, role: str) -> np.ndarray:
        """The normalised reward of the role that learns, on every token of a response, float32 [B, T]."""
        loss, group_size = self.config[role].loss, self.answers[role].group_size
        return self.algorithm(role).outcome_fn(self.reward_B, self.is_action_BT, group_size, loss)


def generator_outcome_reward_B(
    is_correct_B: np.ndarray, format_B: np.ndarray, outcome_weight: float, format_weight: float
) -> np.ndarray:
    """Generator reward, outcome_weight * graded outcome + format_weight * format score (arXiv 2505.15034).

    is_correct_B bool, format_B in [0, 1]; returns reward_B float32. The outcome is the grader's, not the verifier's.
    """
    chex.assert_rank([is_correct_B, format_B], 1)
    chex.assert_equal_shape([is_correct_B, format_B])
    reward_B = outcome_weight * is_correct_B.astype(np.float64) + format_weight * format_B.astype(np.float64)
    return reward_B.astype(np.float32)


def verifier_reward_B(
    verdicts: Sequence[str], is_correct_B: np.ndarray, format_B: np.ndarray, gamma: float,
    correctness_weight: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Verifier reward, correctness_weight * correctness + gamma * format score (arXiv 2505.15034, with weight 1).

    Args:
        verdicts: B of "CORRECT", "INCORRECT", "INVALID".
        is_correct_B: bool, graded outcome of the solution that each row verifies.
        format_B: format score in [0, 1].
        gamma: weight of the format score.

    Returns:
        reward_B and correctness_B, float32. Correctness is 1 where the verdict equals the graded outcome; an INVALID
        verdict equals neither outcome and earns 0.
    """
    chex.assert_rank([is_correct_B, format_B], 1)
    chex.assert_shape([is_correct_B, format_B], (len(verdicts),))
    unknown = sorted(set(verdicts) - set(VERDICTS))
    assert not unknown, f"verdicts {unknown} are not among {VERDICTS}"
    expected = ["CORRECT" if correct else "INCORRECT" for correct in is_correct_B]
    correctness_B = np.array([v == e for v, e in zip(verdicts, expected, strict=True)], np.float64)
    reward_B = correctness_weight * correctness_B + gamma * format_B.astype(np.float64)
    return reward_B.astype(np.float32), correctness_B.astype(np.float32)


def step_reward_BT(
    judgements: Sequence[tuple[bool | None, ...] | None],
    step_ends: Sequence[Sequence[int]],
    num_tokens: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Step rewards y_k / n at the end token of each step, y = +1 approved, -1 rejected (arXiv 2505.15034).

    Args:
        judgements: B entries, the verifier's judgement of each step; None for a misaligned verification.
        step_ends: B entries, the token index that ends each of the row's n steps; -1 where it is unknown.
        num_tokens: T.

    Returns:
        reward_BT float32 and is_step_end_BT bool. A row has no step element at all if its judgements are missing, hold
        a None or do not number n, if n is 0, or if a step end lies outside [0, T): dividing by an n that is not the
        number of rewarded steps would change the scale of that row against its group.
    """
    assert len(judgements) == len(step_ends), f"{len(judgements)} judgements for {len(step_ends)} rows of step ends"
    assert num_tokens >= 0, f"num_tokens is {num_tokens}"
    reward_BT = np.zeros((len(step_ends), num_tokens), np.float64)
    is_step_end_BT = np.zeros((len(step_ends), num_tokens), bool)
    for row, (labels, ends) in enumerate(zip(judgements, step_ends, strict=True)):
        num_steps = len(ends)
        if labels is None or num_steps == 0 or len(labels) != num_steps or any(label is None for label in labels):
            continue
        if any(end < 0 or end >= num_tokens for end in ends):
            continue
        for label, end in zip(labels, ends, strict=True):
            # Divided by n, so that a solution's step rewards add up to at most 1, and more steps do not earn more.
            # Added, because one long token may close two steps.
            reward_BT[row, end] += (1.0 if label else -1.0) / num_steps
            is_step_end_BT[row, end] = True
    return reward_BT.astype(np.float32), is_step_end_BT


def outcome_reward(answers: Answers, rl: ConfigDict) -> Rewards:
    """The generator's: whether the grader accepts the answer, and the format score (arXiv 2505.15034).

    A solution that has a label is rewarded by that. The metric is the share that the grader accepts all the same: what
    the reward says of labels is generator/labelled_right.
    """
    solutions = answers["generator"].records
    is_right_B = np.array([solution.is_right for solution in solutions])
    is_correct_B = np.array([solution.is_correct for solution in solutions])
    format_B = np.array([solution.format_score for solution in solutions])
    reward_B = generator_outcome_reward_B(is_right_B, format_B, rl.outcome_weight, rl.format_weight)
    metrics = {"generator/reward/outcome": is_correct_B.mean(), "generator/reward/format": format_B.mean()}
    has_labels = any(solution.label is not None for solution in solutions)
    terms = (Term("label" if has_labels else "grade", rl.outcome_weight, is_right_B.astype(np.float32)),
             Term("format score", rl.format_weight, format_B.astype(np.float32)))  # fmt: skip
    return Rewards(reward_B, metrics, terms)


def verdict_reward(answers: Answers, rl: ConfigDict) -> Rewards:
    """The verifier's: whether its verdict agrees with the grader, and the format score (arXiv 2505.15034).

    Labels take the place of grades in the reward, not in the metric, as in `outcome_reward`.
    """
    judged = answers["verifier"]
    is_right_B = np.array([solution.is_right for solution in judged.owners])
    is_correct_B = np.array([solution.is_correct for solution in judged.owners])
    format_B = np.array([verification.format_score for verification in judged.records])
    verdicts = [verification.verdict for verification in judged.records]
    reward_B, agrees_B = verifier_reward_B(verdicts, is_right_B, format_B, rl.gamma, rl.correctness_weight)
    _, correctness_B = verifier_reward_B(verdicts, is_correct_B, format_B, rl.gamma, rl.correctness_weight)
    metrics = {"verifier/reward/correctness": correctness_B.mean(), "verifier/reward/format": format_B.mean()}
    has_labels = any(solution.label is not None for solution in judged.owners)
    terms = (Term(f"agreement with the {'label' if has_labels else 'grade'}", rl.correctness_weight, agrees_B),
             Term("format score", rl.gamma, format_B.astype(np.float32)))  # fmt: skip
    return Rewards(reward_B, metrics, terms)


def outcome_credit(so_far: TurnSoFar) -> Credit:
    """The generator's reward is shared by all tokens of a response."""
    adv_BT = so_far.outcome_advantages("generator")
    return Credit(adv_BT, so_far.counters, {"generator/alpha": 0.0}, (Term("outcome", 1.0, adv_BT),))


def verified_majority_credit(so_far: TurnSoFar) -> Credit:
    """The outcome by labels, in groups whose labels the verifier confirms (after CoVerRL, arXiv 2603.17775).

    A group counts if at least half of the verdicts on its solutions that are labelled right are CORRECT; the others
    have no advantage. Here a verifier of its own says so, in all turns, from one verdict on each solution.
    """
    solved, judged = so_far.answers["generator"], so_far.answers["verifier"]
    is_right_B = np.array([solution.is_right for solution in solved.records])
    is_accepted_B = np.array([verification.verdict == "CORRECT" for verification in judged.records])
    is_accepted_B = is_accepted_B.reshape(len(is_right_B), -1).mean(axis=1)
    right_P, accepted_P = ((values_B * is_right_B).reshape(-1, solved.group_size).sum(axis=1)
                           for values_B in (np.ones(len(is_right_B)), is_accepted_B))  # fmt: skip
    is_kept_P = (right_P > 0) & (2 * accepted_P >= right_P)
    credit, is_kept_B = outcome_credit(so_far), np.repeat(is_kept_P, solved.group_size)
    adv_BT = (credit.adv_BT * is_kept_B[:, None]).astype(np.float32)
    agrees_B = np.array([solution.is_right == solution.is_correct for solution in solved.records])
    metrics = credit.metrics | {"generator/confirmed_groups": is_kept_P.mean()}
    if is_kept_P.any():
        metrics["generator/confirmed_label_accuracy"] = agrees_B[is_kept_B].mean()
    terms = (dataclasses.replace(credit.terms[0], weight=is_kept_B.astype(np.float32)),)
    return credit._replace(adv_BT=adv_BT, metrics=metrics, terms=terms)


def judged_steps_credit(so_far: TurnSoFar) -> Credit:
    """The outcome, blended with what the verifier says of each step; several verifications of a solution are
    averaged."""
    return steps_credit(so_far, judged_labels(so_far))


def strict_steps_credit(so_far: TurnSoFar) -> Credit:
    """`judged_steps_credit`, but where judgements do not match the steps, all steps count as rejected: a generator that
    joins its steps does not escape a verifier by that."""
    return steps_credit(so_far, judged_labels(so_far, rejects_unmatched=True))


def gold_steps_credit(so_far: TurnSoFar) -> Credit:
    """The outcome, blended with the task's own step labels: what a verifier without faults would say."""
    return steps_credit(so_far, [[solution.gold_steps for solution in so_far.answers["generator"].records]])


def judged_labels(so_far: TurnSoFar, rejects_unmatched: bool = False) -> list[list[tuple[bool, ...] | None]]:
    """The verifier's judgements of the steps of every solution: n_inference lists of B entries, which are None where
    nobody was asked, and where judgements and steps do not match, unless those steps are to be rejected."""
    if (judged := so_far.answers.get("verifier")) is None:
        return [[None] * len(so_far.reward_B)]
    labels = [[None] * len(so_far.reward_B) for _ in range(judged.group_size)]
    places = range(len(judged.parents)) if judged.places is None else judged.places
    for index, verification in enumerate(judged.records):
        parent, number = divmod(index, judged.group_size)
        unmatched = (False,) * len(judged.parents[parent].steps) if rejects_unmatched else None
        labels[number][places[parent]] = verification.judgements if verification.is_aligned else unmatched
    return labels


def class_balanced_credit(so_far: TurnSoFar) -> Credit:
    """The verifier's reward, weighted against the class of solutions that is more frequent (arXiv 2505.15034)."""
    owners = so_far.answers["verifier"].owners
    is_right_B = np.array([solution.is_right for solution in owners])
    adv_outcome_BT = so_far.outcome_advantages("verifier")
    counters, decay = so_far.counters, so_far.config.rl.label_count_decay
    label_counts = advantages.update_label_counts(np.array(counters.label_counts), is_right_B, decay)
    class_weight_B = advantages.class_weights_B(label_counts, is_right_B)
    # Weights of advantages, not of rewards: all verifications in a group judge solutions of one class, and dividing by
    # the group's deviation would take the weight out again.
    adv_BT = adv_outcome_BT * class_weight_B[:, None]
    term = Term("outcome, by the weight of its class", class_weight_B, adv_outcome_BT)
    metrics = {
        "verifier/solutions_correct": np.mean([solution.is_correct for solution in owners]),
        "verifier/label_count_incorrect": label_counts[0],
        "verifier/label_count_correct": label_counts[1],
    }
    counters = dataclasses.replace(counters, label_counts=tuple(map(float, label_counts)))
    return Credit(adv_BT, counters, metrics, (term,))


def steps_credit(
    so_far: TurnSoFar, labels: Sequence[Sequence], step_fn: Callable[..., np.ndarray] | None = None
) -> Credit:
    """The outcome, blended with labels of the steps, (1 - alpha) A_outcome + alpha A_step (arXiv 2505.15034).

    Args:
        labels: n_inference lists, one for each verification of a solution, of B entries: a label for each step, or None
            where a solution has no step rewards. Groups whose step rewards have no weight (`so_far.trust_P`) have none.
        step_fn: takes the place of the algorithm's (rl/algorithms.py).
    """
    rl, loss, solved = so_far.config.rl, so_far.config.generator.loss, so_far.answers["generator"]
    algorithm = so_far.algorithm("generator")
    step_ends = [solution.step_ends for solution in solved.records]
    if (trust_P := so_far.trust_P) is not None:
        labels = [[label if trust_P[b // solved.group_size] > 0 else None for b, label in enumerate(one)]
                  for one in labels]  # fmt: skip
    parts, share, total = [], [], []
    for judgements in labels:
        reward_BT, is_end_BT = step_reward_BT(judgements, step_ends, so_far.is_action_BT.shape[1])
        parts.append((step_fn or algorithm.step_fn)(
            reward_BT, is_end_BT, so_far.is_action_BT, solved.group_size, loss))  # fmt: skip
        share.append(is_end_BT.any(axis=1).mean())
        total.append(reward_BT.sum(axis=1).mean())
    # The grades and not the rewards: a term that varies in every group, such as a length, would hide that the outcomes
    # of a group are all the same.
    is_correct_B = np.array([solution.is_right for solution in solved.records], np.float32)
    one_outcome = float(1 - algorithm.has_signal_P(is_correct_B, solved.group_size).mean())
    step = so_far.turn.generator_step
    alpha = alpha_at(step, rl.generator_steps, rl.alpha_initial, rl.alpha_final, rl.alpha_schedule, one_outcome)
    adv_outcome_BT = so_far.outcome_advantages("generator")
    adv_step_BT = advantages.average_over_verifications(parts)
    alpha_B = alpha if trust_P is None else np.repeat(alpha * trust_P, solved.group_size)
    adv_BT = advantages.blend(adv_outcome_BT, adv_step_BT, alpha_B)
    metrics = {
        "generator/alpha": float(np.max(alpha_B)),
        "generator/reward/step": np.mean(total),
        "generator/step_rewarded_share": np.mean(share),
    }
    terms = (Term("outcome", 1.0 - alpha_B, adv_outcome_BT), Term("steps", alpha_B, adv_step_BT))
    return Credit(adv_BT, so_far.counters, metrics, terms, labels)


REWARDS = MappingProxyType({function.__name__: function for function in (outcome_reward, verdict_reward)})
CREDITS = MappingProxyType({function.__name__: function for function in (
    outcome_credit, verified_majority_credit, judged_steps_credit, strict_steps_credit, gold_steps_credit,
    class_balanced_credit)})  # fmt: skip
