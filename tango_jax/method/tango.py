"""RL Tango (arXiv 2505.15034): the two turns that alternate. Equations: rl/advantages.py; rewards: rewards.py."""

import numpy as np

from tango_jax.method.rewards import agreement, graded, judged_steps, right_B, step_metrics
from tango_jax.method.turn import Turn
from tango_jax.records import Lesson, Problem, Responses, Rewards
from tango_jax.rl.advantages import average_over_verifications, class_weights_B, update_label_counts
from tango_jax.rl.schedule import alpha_of

LABEL_COUNT_DECAY = 0.8  # of the moving average of correct and incorrect solutions


def solve(t: Turn) -> Lesson:
    """The generator's turn. It is rewarded for right answers, and for steps that the verifier approves:
    A = (1 - alpha) A_outcome + alpha A_steps, each normalised on its own before."""
    sampled, rewarded_fn = t.until_full_later(
        lambda problems: t.sample("generator", problems, t.rl.samples_per_prompt), graded
    )
    judged = t.sample("verifier", sampled, t.rl.verifications_per_solution)  # while the solutions are graded
    (solutions, reward), steps = rewarded_fn(), judged_steps(t, sampled, judged)
    outcome_BT = t.algorithm.outcome(reward, solutions)
    steps_BT = average_over_verifications([t.algorithm.step(one, solutions) for one in steps])
    alpha = alpha_of(t.generator_step, t.rl, share_of_one_outcome(t, solutions))
    terms = {"outcome": (1 - alpha, outcome_BT), "steps": (alpha, steps_BT)}
    return Lesson(solutions, reward, terms, step_metrics(steps, alpha), step_rewards=steps)


def judge(t: Turn) -> Lesson:
    """The verifier's turn: one solution of each problem, judged several times. It is rewarded for verdicts that agree
    with the grade; rare grades weigh more."""

    def judge_solutions(problems: list[Problem]) -> tuple[Responses, Rewards]:
        solutions = t.sample("generator", problems)
        return agreement(t, t.sample("verifier", solutions, t.rl.samples_per_prompt))

    return class_balanced(t, *t.until_full(judge_solutions, "verifier"))


def class_balanced(t: Turn, judged: Responses, reward: Rewards) -> Lesson:
    """What the verifier learns from rewarded verifications. Classes are counted over those that it is trained on,
    since the weights are theirs."""
    is_right_B = right_B(judged.owners)
    counts = update_label_counts(np.array(t.memory.label_counts), is_right_B, LABEL_COUNT_DECAY)
    # A weight of advantages, not of rewards: all verifications in a group judge solutions of one class, and dividing by
    # the group's deviation would take the weight out again.
    weight_B = class_weights_B(counts, is_right_B)
    terms = {"outcome, by the weight of its class": (weight_B, t.algorithm.outcome(reward, judged))}
    sampled = [solution.is_correct for one in t.everything(judged.name) for solution in one.owners]
    metrics = {"verifier/solutions_correct": np.mean(sampled),
               "verifier/label_count_incorrect": counts[0], "verifier/label_count_correct": counts[1]}
    return Lesson(judged, reward, terms, metrics, t.memory.replace(label_counts=tuple(map(float, counts))))


def share_of_one_outcome(t: Turn, solutions: Responses) -> float:
    """The share of groups whose answers are all right or all wrong. By grades and not by rewards: a term that varies in
    every group, such as a length, would hide that the outcomes of a group are all the same."""
    return float(1 - t.algorithm.has_signal_P(right_B(solutions).astype(np.float32), solutions).mean())
