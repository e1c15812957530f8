"""Dynamic sampling (DAPO, arXiv 2503.14476): groups in which all rewards are equal give way to those of other problems.

In: a function that samples a batch with its rewards. Out: one batch of the usual size, and metrics of lengths and
rewards over everything that was sampled; what a turn logs beside them (steps, verdicts, F1) is of the chosen groups.
Stage: the first calls of a turn, up to that of the role that learns.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tango_jax.config import ROLES
from tango_jax.grading import FAILURES
from tango_jax.records import Answers, Responses, Rewards, Term
from tango_jax.rl.algorithms import Algorithm
from tango_jax.rl.family import groups_with_second

# How the metrics of several batches of the same size become one; the others are averaged.
SUMMED = {"verifier/prompts_shortened", *(f"{role}/tokens_sampled" for role in ROLES),
          *(f"grader/{kind}{name}" for kind in ("", "label_") for name in FAILURES)}  # fmt: skip
LARGEST = {f"{role}/length_max" for role in ROLES}


def sample_until_full(
    sample_batch: Callable[[int], tuple[Answers, Rewards]], role: str, algorithm: Algorithm, max_batches: int
) -> tuple[Answers, Rewards, dict[str, float]]:
    """Sample batches of P problems until P of them have a signal for `role`, or up to `max_batches`; one batch alone is
    taken as it is.

    Args:
        sample_batch: number of the batch in this turn, from 0 -> the answers to the next P problems, and their rewards.

    Returns:
        The answers to P problems: those with a signal in the order in which they were sampled, filled up with others if
        there are too few. A problem has a signal if any of its groups has one (`Algorithm.has_signal_fn`). Then the
        rewards of these answers, with metrics over everything that was sampled, and metrics of the sampling itself.
    """
    batches, rewards, useful, useless, num_problems = [], [], [], [], 1
    while len(useful) < num_problems and len(batches) < max_batches:
        answers, reward = sample_batch(len(batches))
        num_problems = len(next(iter(answers.values())).parents)
        responses, second = answers[role], answers.get("second_solution")
        if second is None:
            has_signal = algorithm.has_signal_P(reward.reward_B, responses.group_size)
        else:
            groups = groups_with_second(reward.reward_B, responses, second)
            has_signal = np.array([algorithm.has_signal_fn(group[None])[0] for group in groups])
        if max_batches == 1:
            return answers, reward, {f"{role}/groups_without_signal": 1.0 - float(has_signal.mean())}
        has_signal = has_signal.reshape(num_problems, -1).any(axis=1)
        for place in range(num_problems):
            (useful if has_signal[place] else useless).append((len(batches), place))
        batches.append(answers)
        rewards.append(reward)
    chosen = (useful + useless)[:num_problems]
    answers, before = {}, 0
    for name in batches[0]:
        answers[name] = _choose([batch[name] for batch in batches], chosen, num_problems, before)
        before = len(answers[name].records) // num_problems
    metrics = {
        f"{role}/groups_without_signal": len(useless) / (len(useful) + len(useless)),
        f"{role}/groups_filled_up": max(num_problems - len(useful), 0) / num_problems,
        f"{role}/batches_sampled": len(batches),
    }
    return answers, _choose_rewards(rewards, chosen, num_problems), metrics


def _choose_rewards(batches: Sequence[Rewards], chosen: Sequence[tuple[int, int]], num_problems: int) -> Rewards:
    def choose(parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.split(parts[batch], num_problems)[place] for batch, place in chosen])

    def choose_term(same: Sequence[Term]) -> Term:
        # A weight may differ from row to row, or from batch to batch.
        weights = [np.broadcast_to(term.weight, np.shape(term.value)) for term in same]
        return Term(same[0].name, choose(weights), choose([term.value for term in same]))

    return Rewards(
        choose([batch.reward_B for batch in batches]),
        _over_batches([batch.metrics for batch in batches]),
        tuple(choose_term(same) for same in zip(*(batch.terms for batch in batches), strict=True)),
    )


def _choose(
    batches: Sequence[Responses], chosen: Sequence[tuple[int, int]], num_problems: int, before: int
) -> Responses:
    """Return one role's responses to the chosen problems, each given by its batch and its place in it; `before` is the
    number of records of a problem in the call before, among which are the places of what they are about."""

    def choose(columns: Sequence[Sequence]) -> list:
        each = len(columns[0]) // num_problems  # entries of a problem: one prompt or several, with all their responses
        return [entry for batch, place in chosen for entry in columns[batch][place * each : (place + 1) * each]]

    rollouts = [batch.rollout for batch in batches]
    rollout = dataclasses.replace(
        rollouts[0],
        tokens=tuple(choose([rollout.tokens for rollout in rollouts])),
        logps=tuple(choose([rollout.logps for rollout in rollouts])),
        is_truncated_B=np.array(choose([rollout.is_truncated_B for rollout in rollouts])),
        decode_steps=sum(rollout.decode_steps for rollout in rollouts),
        row_steps=sum(rollout.row_steps for rollout in rollouts),
    )
    places = None
    if batches[0].places is not None:
        split = [np.split(np.asarray(batch.places), num_problems) for batch in batches]
        places = np.concatenate([split[batch][old] + before * (new - old) for new, (batch, old) in enumerate(chosen)])
    return dataclasses.replace(
        batches[0],
        parents=choose([batch.parents for batch in batches]),
        prompts=choose([batch.prompts for batch in batches]),
        rollout=rollout,
        records=choose([batch.records for batch in batches]),
        metrics=_over_batches([batch.metrics for batch in batches]),
        places=places,
    )


def _over_batches(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of all batches together."""

    def together(name: str) -> float:
        values = [one[name] for one in metrics if name in one]  # a user's function may leave one out
        return sum(values) if name in SUMMED else max(values) if name in LARGEST else float(np.mean(values))

    return {name: together(name) for name in dict.fromkeys(name for one in metrics for name in one)}
