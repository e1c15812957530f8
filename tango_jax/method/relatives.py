"""Relatives of RL Tango: second tries, labels by majority, a teacher, judged verifications.

self_verify, one policy in both roles, is in arms.py: Self-Verification (arXiv 2506.01369), Learning to Self-Verify
(arXiv 2602.07594); RISE (arXiv 2505.13445) has both kinds of rows in one batch.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np

from tango_jax.grading import FAILURES, answer_of
from tango_jax.method import tango
from tango_jax.method.rewards import agreement, graded, outcome_reward, right_B, verdict_reward
from tango_jax.method.turn import Turn, joined
from tango_jax.records import Lesson, Responses, Rewards, Solution, Term
from tango_jax.rl.packing import action_mask
from tango_jax.text.prompts import INFORMED, SECOND_JUDGEMENT, SECOND_TRY

# Most nats of one token: the log-ratio of a token that the teacher would never say has no bound.
MAX_NATS = 5.0
# Weight of a second try's improvement in its reward, and of imitating the informed verifier.
IMPROVEMENT_WEIGHT, TEACHER_WEIGHT = 0.5, 0.5

MAJORITY = "generator/label_accuracy"  # a turn with this metric labels by majority


def solve_twice(t: Turn) -> Lesson:
    """Where the verdict is INCORRECT, the generator solves again, and sees its first try and the verification (PAG,
    arXiv 2506.10406). Both tries are trained on, with rewards normalised over all tries of a problem, as in
    Critique-GRPO (arXiv 2506.03106)."""

    def both_tries(problems: list) -> tuple[Responses, Rewards]:
        first = t.sample("generator", problems, t.rl.samples_per_prompt)
        judged = t.sample("verifier", first)
        rejected = [one for one in judged if one.verdict == "INCORRECT"]
        second = t.sample("generator", rejected, prompt=SECOND_TRY, at_most=len(first))
        both = joined([first, second], most_prompts=2 * len(first))
        reward = second_try_reward(t, both)
        reward = reward._replace(metrics=reward.metrics | second_try_metrics(first, second))
        return both, t.with_own_reward(both, reward)

    tries, reward = t.until_full(both_tries)
    return Lesson(tries, reward, {"outcome": (1.0, t.algorithm.outcome(reward, tries))}, {"generator/alpha": 0.0})


def second_try_reward(t: Turn, tries: Responses) -> Rewards:
    """`rewards.graded` of both tries, plus the improvement for the second one, after PAG (arXiv 2506.10406), whose
    tries are rewarded each alone, with a bonus. The metrics are of first tries.

        r_2 = outcome(y_2) + rl.outcome_weight IMPROVEMENT_WEIGHT (right(y_2) - right(y_1))
    """
    both = outcome_reward(tries, t.rl)
    metrics = outcome_reward([one for one in tries if one.after is None], t.rl).metrics
    gain_B = np.array([0.0 if one.after is None else float(one.is_right) - float(one.after.of.is_right)
                       for one in tries], np.float32)
    weight = t.rl.outcome_weight * IMPROVEMENT_WEIGHT
    reward_B = (both.reward_B + weight * gain_B).astype(np.float32)
    return Rewards(reward_B, metrics, (*both.terms, Term("improvement", weight, gain_B)))


def second_try_metrics(first: Sequence[Solution], second: Sequence[Solution]) -> dict[str, float]:
    """Shares of solutions that were tried again, mended and broken, by the grade."""
    gains = [int(one.is_correct) - int(one.after.of.is_correct) for one in second]
    counts = {"share": len(gains), "mended": gains.count(1), "broken": gains.count(-1),
              "final_accuracy": sum(one.is_correct for one in first) + sum(gains)}
    return {f"second_try/{name}": count / len(first) for name, count in counts.items()}


def solve_without_labels(t: Turn) -> Lesson:
    """No gold answer: the majority's replaces it, in groups where the verifier confirms it (after CoVerRL, arXiv
    2603.17775): where it accepts at least half of the solutions labelled right. Evaluations and metrics keep the
    grade. Metrics of confirmed groups leave out the groups that dynamic sampling dropped."""

    def label_and_grade(problems: list) -> tuple[Responses, Rewards]:
        solutions, label_metrics = majority_labelled(t, t.sample("generator", problems, t.rl.samples_per_prompt))
        solutions, reward = graded(t, solutions)
        return solutions, reward._replace(metrics=reward.metrics | label_metrics)

    solutions, reward = t.until_full(label_and_grade)
    judged = t.sample("verifier", solutions)
    is_right_B = right_B(solutions)
    is_accepted_B = np.array([one.verdict == "CORRECT" for one in judged])
    right_P, accepted_P = (values_B.reshape(-1, solutions.group_size).sum(axis=1)
                           for values_B in (is_right_B, is_accepted_B & is_right_B))
    is_kept_P = (right_P > 0) & (2 * accepted_P >= right_P)
    is_kept_B = np.repeat(is_kept_P, solutions.group_size)
    metrics = {"generator/alpha": 0.0, "generator/confirmed_groups": is_kept_P.mean()}
    if is_kept_P.any():
        agrees_B = np.array([one.is_right == one.is_correct for one in solutions])
        metrics["generator/confirmed_label_accuracy"] = agrees_B[is_kept_B].mean()
    outcome_BT = t.algorithm.outcome(reward, solutions)
    return Lesson(solutions, reward, {"outcome": (is_kept_B.astype(np.float32), outcome_BT)}, metrics)


def judge_without_labels(t: Turn) -> Lesson:
    """tango.judge on one solution of each problem, rewarded for agreement with the majority. Half of the solutions are
    labelled right where possible, and its metrics are of these."""

    def judge_labelled(problems: list) -> tuple[Responses, Rewards]:
        solutions, label_metrics = majority_labelled(t, t.sample("generator", problems, t.rl.samples_per_prompt))
        chosen = one_of_either_label(solutions, t.config[t.role].loss.minibatches)
        judged, reward = agreement(t, t.sample("verifier", chosen, t.rl.samples_per_prompt))
        return judged, reward._replace(metrics=reward.metrics | label_metrics)

    return tango.class_balanced(t, *t.until_full(judge_labelled, "verifier"))


def majority_labelled(t: Turn, solutions: Responses) -> tuple[Responses, dict[str, float]]:
    """A solution is right if its answer is the most frequent one of its problem (TTRL, arXiv 2504.16084). Answers are
    counted by text, then compared with the most frequent one by the task's grader."""
    answers, M = [(answer_of(solution.text) or "").strip() for solution in solutions], solutions.group_size
    counts = [Counter(filter(None, answers[first : first + M])) for first in range(0, len(answers), M)]
    majorities = [count.most_common(1)[0][0] if count else "" for count in counts for _ in range(M)]
    rows = [row for row, majority in enumerate(majorities) if majority]
    report = t.grade([dataclasses.replace(solutions[row].problem, answer=majorities[row]) for row in rows],
                     [solutions[row].text for row in rows])
    label_of = dict(zip(rows, report.correct, strict=True))
    labelled = t.labelled(solutions, [label_of.get(row, False) for row in range(len(solutions))])
    metrics = {f"grader/label_{name}": getattr(report, name) for name in FAILURES} | {
        "generator/labelled_right": np.mean([solution.label for solution in labelled]),
        MAJORITY: np.mean([solution.label == solution.is_correct for solution in labelled]),
    }
    return labelled, metrics


def one_of_either_label(solutions: Responses, minibatches: int) -> list[Solution]:
    """One solution of each problem, labelled right and wrong alternately: a verifier that saw only majority answers
    would learn to accept. Minibatches alternate, too."""
    label_PM = right_B(solutions).reshape(-1, solutions.group_size)
    is_wanted_P = np.arange(len(label_PM)) // minibatches % 2 == 0
    sample_P = np.argmax(label_PM == is_wanted_P[:, None], axis=1)  # the first; sample 0 where there is none
    return [solutions[row] for row in np.arange(len(label_PM)) * solutions.group_size + sample_P]


def judge_informed(t: Turn) -> Lesson:
    """The verifier also imitates its initial self with the gold answer in the prompt (self-trained verification, arXiv
    2605.30290), token by token on its own samples (on-policy self-distillation, arXiv 2601.18734):

        A_t = A_t(verdict) + TEACHER_WEIGHT clip(log p_0(y_t | answer shown) - log p(y_t), -c, c)

    c = MAX_NATS; p_0 is the reference policy, the verifier at the start of reinforcement learning. This is the policy
    gradient of each next token's reverse KL to the teacher, clipped. The teacher does not move, as the code of
    2601.18734 recommends. The metrics are of the tokens trained on.
    """
    lesson = tango.judge(t)
    judged, is_action_BT = lesson.responses, action_mask(t.config.verifier, lesson.responses.rollout)
    teacher_logp_BT = t.reference_logps(judged, INFORMED)
    logp_BT = np.zeros(is_action_BT.shape, np.float32)
    for row_T, logp_T in zip(logp_BT, judged.rollout.logps, strict=True):
        row_T[: len(logp_T)] = logp_T
    is_known_BT = is_action_BT & ~np.isnan(teacher_logp_BT)
    log_ratio_BT = np.where(is_known_BT, np.clip(teacher_logp_BT - logp_BT, -MAX_NATS, MAX_NATS), 0.0)
    num_known, num_actions = max(is_known_BT.sum(), 1), max(is_action_BT.sum(), 1)
    metrics = dict(lesson.metrics) | {
        # An estimate of the reverse KL to the teacher, clipped, in nats a token; how often a token would be unlikely.
        "verifier/teacher_kl": float(-log_ratio_BT.sum() / num_known),
        "verifier/teacher_objects": float((log_ratio_BT < -1.0).sum() / num_known),
        "verifier/teacher_silent": float(1.0 - is_known_BT.sum() / num_actions),  # no room for the solution
    }
    terms = dict(lesson.terms) | {"what the informed verifier would rather say": (TEACHER_WEIGHT, log_ratio_BT)}
    return dataclasses.replace(lesson, terms=terms, metrics=metrics)


def judge_and_be_judged(t: Turn) -> Lesson:
    """tango.judge, in which the verifier also judges its verifications, and is rewarded for the product
    (DeepSeekMath-V2, arXiv 2511.22570, its equation of R_V with the meta-verification)."""

    def judge_twice(problems: list) -> tuple[Responses, Rewards]:
        judged = t.sample("verifier", t.sample("generator", problems), t.rl.samples_per_prompt)
        rated = t.sample("verifier", judged, prompt=SECOND_JUDGEMENT)
        return judged, t.with_own_reward(judged, twice_judged_reward(t, judged, rated))

    return tango.class_balanced(t, *t.until_full(judge_twice, "verifier"))


def twice_judged_reward(t: Turn, judged: Responses, rated: Responses) -> Rewards:
    """format x correctness x quality (DeepSeekMath-V2, arXiv 2511.22570). Quality is the share of remarks that the
    second judgement accepts, 0 where it does not judge each. Only stage 1 trains second judgements."""
    correctness_B = verdict_reward(judged, t.rl).terms[0].value
    format_B = np.array([verification.format_score for verification in judged], np.float32)
    accepted = [one.judgements.count(True) / len(one.judgements) if one.is_aligned else 0.0 for one in rated]
    quality_B = np.array(accepted, np.float32)
    product_B = format_B * correctness_B * quality_B
    is_right_B = correctness_B > 0
    metrics = {
        "verifier/reward/correctness": correctness_B.mean(), "verifier/reward/format": format_B.mean(),
        "verifier/reward/quality": quality_B.mean(),
    }
    if 0 < is_right_B.sum() < len(is_right_B):  # by how much better verifications with a right verdict are rated
        metrics["second_judgement/separation"] = quality_B[is_right_B].mean() - quality_B[~is_right_B].mean()
    terms = (Term("format x agreement with the grade x quality", 1.0, product_B),)
    return Rewards(product_B, metrics, terms)
