"""Rewards and credits of the relatives of RL Tango that answer twice, judge twice or have a teacher (arms.py).

In and out as in credit.py. Rows of a turn in which solutions are followed by second tries are those of the solutions,
prompt-major, and then those of the second tries, in the order of the solutions that they follow.
"""

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np
from ml_collections import ConfigDict

from tango_jax.records import Answers, Credit, Responses, Rewards, Rollout, Solution, Term
from tango_jax.rl.credit import TurnSoFar, class_balanced_credit, outcome_reward, verdict_reward

# One token counts at most this much, in nats: the log-ratio of a token that the teacher would never say has no bound.
MAX_NATS = 5.0


def joined_shape(num_calls: int, prompts: int, samples: int) -> tuple[int, int]:
    """(prompts, responses to each) that a batch must have room for: those of one call; of several, a prompt for each
    response, and one response at most of each later call for every response of the first."""
    return (prompts, samples) if num_calls == 1 else (num_calls * prompts * samples, 1)


def joined(answers: Answers, names: Sequence[str]) -> Responses:
    """The responses to the calls of these names as one batch to train on, in which each has a prompt of its own. Calls
    that had nothing to answer are missing among the `answers`. One call alone is what it is."""
    if len(names) == 1:
        return answers[names[0]]
    parts = [answers[name] for name in names if name in answers]
    rollouts = [part.rollout for part in parts]
    rollout = Rollout(
        tokens=sum((one.tokens for one in rollouts), ()),
        logps=sum((one.logps for one in rollouts), ()),
        is_truncated_B=np.concatenate([one.is_truncated_B for one in rollouts]),
        decode_steps=sum(one.decode_steps for one in rollouts),
        row_steps=sum(one.row_steps for one in rollouts),
    )
    prompts = [prompt for part in parts for prompt in part.prompts for _ in range(part.group_size)]
    owners, records = ([one for part in parts for one in getattr(part, name)] for name in ("owners", "records"))
    most, _ = joined_shape(len(names), len(parts[0].prompts), parts[0].group_size)
    return Responses(parts[0].role, owners, prompts, 1, rollout, records, {}, most_prompts=most)


def second_try_reward(answers: Answers, rl: ConfigDict) -> Rewards:
    """The generator's, of both tries: that of `outcome_reward`, and for the second one the improvement as well,

        r_2 = outcome(y_2) + improvement_weight (right(y_2) - right(y_1))

    after PAG (arXiv 2506.10406), whose tries are rewarded each on its own, with a bonus. The verifier has turns of its
    own here, and there it learns in the same rollouts.
    """
    first, second = outcome_reward(answers, rl), answers.get("second_solution")
    if second is None:
        return first
    both = outcome_reward({"generator": joined(answers, ("generator", "second_solution"))}, rl)
    gain_B = [float(after.is_right) - float(before.is_right) for before, after in _pairs(second)]
    gains_B = np.array([0.0] * len(first.reward_B) + gain_B, np.float32)
    reward_B = (both.reward_B + rl.improvement_weight * gains_B).astype(np.float32)
    return Rewards(reward_B, first.metrics, (*both.terms, Term("improvement", rl.improvement_weight, gains_B)))


def groups_with_second(values_B: np.ndarray, solved: Responses, second: Responses | None) -> list[np.ndarray]:
    """The values of each problem's rows: those of its solutions, and then those of its second tries."""
    problem_B = np.arange(len(solved.records)) // solved.group_size
    if second is not None:
        problem_B = np.concatenate([problem_B, problem_B[list(second.places)]])
    return [values_B[problem_B == problem] for problem in range(len(solved.records) // solved.group_size)]


def second_try_credit(so_far: TurnSoFar) -> Credit:
    """The rewards of both tries, normalised over all tries of a problem, as in Critique-GRPO (arXiv 2506.03106), which
    only centres them and weighs right second tries by how unlikely they are; here they count alike."""
    solved, second = so_far.answers["generator"], so_far.answers.get("second_solution")
    normalise_fn, adv_B = so_far.algorithm("generator").normalise_fn, np.zeros(len(so_far.reward_B), np.float64)
    for rows in groups_with_second(np.arange(len(adv_B)), solved, second):
        adv_B[rows] = normalise_fn(so_far.reward_B[rows].astype(np.float64), so_far.config.generator.loss)
    adv_BT = (adv_B[:, None] * so_far.is_action_BT).astype(np.float32)
    metrics = {"generator/alpha": 0.0} | second_try_metrics(solved.records, second)
    return Credit(adv_BT, so_far.counters, metrics, (Term("outcome", 1.0, adv_BT),))


def second_try_metrics(solutions: Sequence[Solution], second: Responses | None) -> dict[str, float]:
    """How many solutions are tried again, what becomes of them, and the accuracy when second tries take their place;
    by the grade, whatever training takes for it."""
    pairs = _pairs(second) if second else []
    gains = [int(after.is_correct) - int(before.is_correct) for before, after in pairs]
    right = sum(solution.is_correct for solution in solutions)
    counts = {"share": len(pairs), "mended": gains.count(1), "broken": gains.count(-1),
              "final_accuracy": right + sum(gains)}  # fmt: skip
    return {f"second_solution/{name}": count / len(solutions) for name, count in counts.items()}


def _pairs(second: Responses) -> list[tuple[Solution, Solution]]:
    """(solution, second try) of each second try."""
    return [(owner.solution, record) for owner, record in zip(second.owners, second.records, strict=True)]


def twice_judged_reward(answers: Answers, rl: ConfigDict) -> Rewards:
    """The verifier's, correctness_weight x format x correctness x quality (DeepSeekMath-V2, arXiv 2511.22570, its
    equation of R_V with the meta-verification).

    The quality of a verification is the share of its remarks that the second judgement accepts, and 0 where that does
    not judge each of them. There a meta-verifier is trained on ratings by people; here the verifier judges its own
    verification, as stage 1 taught it to, and is not trained on that.
    """
    judged, rated = answers["verifier"], answers["second_judgement"]
    correctness_B = verdict_reward(answers, rl).terms[0].value
    format_B = np.array([verification.format_score for verification in judged.records], np.float32)
    quality_B = np.array([np.mean(one.judgements) if one.is_aligned else 0.0 for one in rated.records], np.float32)
    product_B = format_B * correctness_B * quality_B
    is_right_B = correctness_B > 0
    metrics = {
        "verifier/reward/correctness": correctness_B.mean(), "verifier/reward/format": format_B.mean(),
        "verifier/reward/quality": quality_B.mean(),
    }  # fmt: skip
    if 0 < is_right_B.sum() < len(is_right_B):  # by how much better verifications with a right verdict are rated
        metrics["second_judgement/separation"] = quality_B[is_right_B].mean() - quality_B[~is_right_B].mean()
    terms = (Term("format x agreement with the grade x quality", rl.correctness_weight, product_B),)
    return Rewards(rl.correctness_weight * product_B, metrics, terms)


def informed_credit(so_far: TurnSoFar) -> Credit:
    """The verifier's advantages, and for every token by how much the informed verifier would rather have said it,

        A_t = A_t(verdict) + teacher_weight clip(log p_0(y_t | answer shown) - log p(y_t), -c, c)

    with c = MAX_NATS and p_0 the reference policy, the verifier at the start of reinforcement learning: beside its
    reward, the policy gradient of each next token's reverse KL to the teacher, clipped, on the verifier's own samples
    (as in arXiv 2601.18734); what a token does to the KL of later ones is left out. That the teacher is the verifier
    itself, shown the reference, is from self-trained verification (arXiv 2605.30290).
    """
    credit, judged = class_balanced_credit(so_far), so_far.answers["verifier"]
    logp_BT = np.zeros(so_far.is_action_BT.shape, np.float32)
    for row_T, logp_T in zip(logp_BT, judged.rollout.logps, strict=True):
        row_T[: len(logp_T)] = logp_T
    is_known_BT = so_far.is_action_BT & ~np.isnan(so_far.teacher_logp_BT)
    log_ratio_BT = np.where(is_known_BT, np.clip(so_far.teacher_logp_BT - logp_BT, -MAX_NATS, MAX_NATS), 0.0)
    weight, num_actions = so_far.config.rl.teacher_weight, max(so_far.is_action_BT.sum(), 1)
    metrics = credit.metrics | {
        # An estimate of the reverse KL to the teacher, clipped, in nats a token; how often a token would be unlikely.
        "verifier/teacher_kl": float(-log_ratio_BT.sum() / num_actions),
        "verifier/teacher_objects": float((log_ratio_BT < -1.0).sum() / num_actions),
        "verifier/teacher_silent": float(1.0 - is_known_BT.sum() / num_actions),  # no room for the solution
    }
    terms = (*credit.terms, Term("what the informed verifier would rather say", weight, log_ratio_BT))
    adv_BT = (credit.adv_BT + weight * log_ratio_BT).astype(np.float32)
    return credit._replace(adv_BT=adv_BT, metrics=metrics, terms=terms)


REWARDS = MappingProxyType({function.__name__: function for function in (second_try_reward, twice_judged_reward)})
CREDITS = MappingProxyType({function.__name__: function for function in (second_try_credit, informed_credit)})
