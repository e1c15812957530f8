"""Verifiers that do not write: the marks of a solution's K steps are read in one pass (text/mark_rows.py).

p_k is the probability of CORRECT at step k's mark, with CORRECT at the marks before it, among the two words. The
solution is right if all its steps are:

    P = p_1 p_2 ... p_K

which is the probability that the same verifier, writing its marks one after the other, writes CORRECT at each. Both
turns judge all M solutions of P problems: a pass costs little beside a solution.

The text that is trained on has CORRECT at each mark, and its marks are the actions. So whatever is learned is an
advantage A_k of CORRECT's token, and the update (rl/update.py), whose gradient is A_k times that of log p_k, needs no
loss of its own. Its KL and entropy are those of the choice between the two words.
"""

import dataclasses

import numpy as np

from tango_jax.method import tango
from tango_jax.method.rewards import agreement, right_B, verdict_reward
from tango_jax.method.turn import Turn
from tango_jax.records import Lesson, Problem, Responses, Rewards, Term
from tango_jax.rl.packing import action_mask
from tango_jax.runtime.checks import require

EXACT = "1 where the solution is right, else -P / (1 - P)"
MIN_DOUBT = 1e-30  # of 1 - p, so that quotients stay finite


def judge_exactly(t: Turn) -> Lesson:
    """The verifier's turn: minus the log-likelihood of the grade is the loss, and nothing is drawn.

        right: L = -log P          A_k = -dL / d log p_k = 1
        wrong: L = -log(1 - P)     A_k = -P / (1 - P)

    In the log-odds of step k the gradient of a wrong solution's loss is P (1 - p_k) / (1 - P), between 0 and 1: the
    share of the blame that falls on the step. Classes are not weighted: that would move the probabilities.
    """
    solutions = t.sample("generator", t.problems("verifier"), t.rl.samples_per_prompt)
    judged = t.sample("verifier", solutions)
    is_right_B, log_right_B = right_B(judged.owners), _log_right_B(judged)
    adv_B = np.where(is_right_B, 1.0, -np.exp(log_right_B) / _doubt(log_right_B))
    adv_BT = (adv_B[:, None] * action_mask(t.config.verifier, judged.rollout)).astype(np.float32)
    likelihood_B = np.where(is_right_B, np.exp(log_right_B), _doubt(log_right_B)).astype(np.float32)
    reward = Rewards(likelihood_B, verdict_reward(judged, t.rl).metrics,
                     (Term("likelihood of the grade", 1.0, likelihood_B),))
    is_read_B = np.array([one.is_aligned for one in judged])
    metrics = {"verifier/solutions_correct": np.mean([one.is_correct for one in judged.owners])}
    if is_read_B.any():
        metrics["verifier/log_likelihood"] = np.log(np.maximum(likelihood_B[is_read_B], MIN_DOUBT)).mean()
    return Lesson(judged, reward, {"likelihood of the grade, for CORRECT": (1.0, adv_BT)}, metrics, formula=EXACT)


def judge_drawn(t: Turn) -> Lesson:
    """tango.judge with M verifications of a solution whose marks are drawn from one pass, each by its p_k alone."""
    require(t.rl.samples_per_prompt > 1, f"rl.samples_per_prompt={t.rl.samples_per_prompt}, and several verifications "
            "of a solution are compared: raise it")

    def judge_solutions(problems: list[Problem]) -> tuple[Responses, Rewards]:
        solutions = t.sample("generator", problems, t.rl.samples_per_prompt)
        return agreement(t, t.sample("verifier", solutions, t.rl.samples_per_prompt))

    return on_one_text(t, tango.class_balanced(t, *t.until_full(judge_solutions, "verifier")))


def on_one_text(t: Turn, lesson: Lesson) -> Lesson:
    """The lesson of M draws from each text as one of the text, with the same gradient. With advantages A_mk, which
    tokens of INCORRECT get for log(1 - p_k), since d log(1 - p) = -p / (1 - p) d log p:

        A_k = 1/M sum_m A_mk (1 if draw m has CORRECT at step k, else -p_k / (1 - p_k))

    Where a batch has several updates, ratios are clipped by CORRECT's probability. In the report a row has the first
    draw, and its reward and advantage are the means, as their names say.
    """
    judged, M = lesson.responses, lesson.responses.group_size
    is_mark_BT = action_mask(t.config.verifier, judged.rollout)
    factor_BT = np.zeros(is_mark_BT.shape)
    for b, (is_mark_T, logp_T, record) in enumerate(zip(is_mark_BT, judged.rollout.logps, judged, strict=True)):
        if is_mark_T.any():
            logp_marks = logp_T[is_mark_T[: len(logp_T)]].astype(np.float64)
            factor_BT[b, is_mark_T] = np.where(record.judgements, 1.0, -np.exp(logp_marks) / _doubt(logp_marks))

    def mean(values: np.ndarray) -> np.ndarray:
        return np.reshape(values, (-1, M, *np.shape(values)[1:])).mean(axis=1, dtype=np.float64).astype(np.float32)

    terms = {f"{name}, for CORRECT": (1.0, mean(np.reshape(weight, (-1, 1)) * adv_BT * factor_BT))
             for name, (weight, adv_BT) in lesson.terms.items()}
    reward = lesson.reward
    reward_terms = tuple(Term(f"{term.name}, mean of {M} draws", 1.0, mean(term.weight * term.value))
                         for term in reward.terms)
    reward = Rewards(mean(reward.reward_B), reward.metrics, reward_terms)
    once = judged.replace(group_size=1, rollout=judged.rollout.rows(slice(None, None, M)), records=judged.records[::M])
    of_a_draw = lesson.formula or t.algorithm.algorithm.formula
    formula = (f"mean of {M} draws, of which the first is shown: for each mark the advantage of its draw"
               f"{f', {of_a_draw},' * bool(of_a_draw)} if the draw has CORRECT, else that times -p / (1 - p)")
    return dataclasses.replace(lesson, responses=once, reward=reward, terms=terms, formula=formula)


def _log_right_B(judged: Responses) -> np.ndarray:
    """log P of each solution, float64; 0 where no mark is read."""
    return np.array([logp_T[other_T >= 0].sum(dtype=np.float64)
                     for logp_T, other_T in zip(judged.rollout.logps, judged.rollout.others, strict=True)])


def _doubt(logp: np.ndarray) -> np.ndarray:
    """1 - p, exact where p is nearly 1."""
    return np.maximum(-np.expm1(logp), MIN_DOUBT)
