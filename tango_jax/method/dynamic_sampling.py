"""Dynamic sampling (DAPO, arXiv 2503.14476): groups whose rewards are all equal are replaced by others."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tango_jax.grading import FAILURES
from tango_jax.records import Problem, Responses, Rewards, Term, problem_of

# These metrics are summed over batches, all others averaged.
_SUMMED = ("/prompts_shortened", "/tokens_sampled", "/tokens_scored")
_LARGEST = "/length_max"

Chosen = Sequence[tuple[int, int]]  # (batch, place of a problem in it)


class Batch(NamedTuple):
    """All responses that go back to the same P problems, by calls; and those to train on."""

    problems: list[Problem]
    sampled: list[Responses]
    responses: Responses
    reward: Rewards
    has_signal: np.ndarray  # bool [P], whether any group of a problem has one
    group_signals: np.ndarray  # bool, of every group

    @classmethod
    def of(
        cls, problems: list[Problem], sampled: list[Responses], responses: Responses, reward: Rewards,
        signal_P: np.ndarray,
    ) -> "Batch":
        places, has_signal = _places(problems), np.zeros(len(problems), bool)
        for rows, has_one in zip(responses.groups(), signal_P, strict=True):
            has_signal[places[id(problem_of(responses[rows[0]]))]] |= bool(has_one)
        return cls(problems, sampled, responses, reward, has_signal, signal_P)


def chosen_batch(batches: Sequence[Batch], role: str) -> tuple[Batch, dict[str, float]]:
    """The problems with a signal, filled up with others if there are too few; and metrics."""
    num_problems = len(batches[0].problems)
    everyone = [(number, place) for number in range(len(batches)) for place in range(num_problems)]
    useful = [(number, place) for number, place in everyone if batches[number].has_signal[place]]
    useless = [(number, place) for number, place in everyone if not batches[number].has_signal[place]]
    chosen = (useful + useless)[:num_problems]
    problems = [batch.problems for batch in batches]
    by_call = zip(*(batch.sampled for batch in batches), strict=True)
    sampled = [_choose(same, problems, chosen) for same in by_call]
    responses = _choose([batch.responses for batch in batches], problems, chosen)
    # Groups are counted, as without dynamic sampling: a problem may have several.
    group_signals = np.concatenate([batch.group_signals for batch in batches])
    metrics = {
        f"{role}/groups_without_signal": float(np.logical_not(group_signals).mean()),
        f"{role}/groups_filled_up": max(num_problems - len(useful), 0) / num_problems,
        f"{role}/batches_sampled": len(batches),
    }
    batch = Batch([problems[number][place] for number, place in chosen], sampled, responses,
                  _choose_rewards(batches, chosen), np.ones(num_problems, bool),
                  np.ones(len(responses.groups()), bool))
    return batch, metrics


def _places(problems: Sequence[Problem]) -> dict[int, int]:
    return {id(problem): place for place, problem in enumerate(problems)}


def _indices(items: Sequence, problems: Sequence[Problem]) -> list[list[int]]:
    places, found = _places(problems), [[] for _ in problems]
    for index, item in enumerate(items):
        found[places[id(problem_of(item))]].append(index)
    return found


def _choose(same: Sequence[Responses], problems: Sequence[Sequence[Problem]], chosen: Chosen) -> Responses:
    """`same`: one call's responses in each batch."""
    of_parents = [_indices(one.parents, own) for one, own in zip(same, problems, strict=True)]
    of_records = [_indices(one.records, own) for one, own in zip(same, problems, strict=True)]

    def choose(columns: Sequence[Sequence], indices: Sequence[list[list[int]]]) -> list:
        return [columns[number][index] for number, place in chosen for index in indices[number][place]]

    rollouts = [one.rollout for one in same]
    rollout = dataclasses.replace(
        rollouts[0],
        tokens=tuple(choose([rollout.tokens for rollout in rollouts], of_records)),
        logps=tuple(choose([rollout.logps for rollout in rollouts], of_records)),
        others=(None if rollouts[0].others is None
                else tuple(choose([rollout.others for rollout in rollouts], of_records))),
        is_truncated_B=np.array(choose([rollout.is_truncated_B for rollout in rollouts], of_records), bool),
        decode_steps=sum(rollout.decode_steps for rollout in rollouts),
        row_steps=sum(rollout.row_steps for rollout in rollouts),
    )
    return same[0].replace(
        parents=choose([one.parents for one in same], of_parents),
        prompts=choose([one.prompts for one in same], of_parents),
        rollout=rollout,
        records=choose([one.records for one in same], of_records),
        metrics={},  # those of everything sampled are `over_calls`
    )


def _choose_rewards(batches: Sequence[Batch], chosen: Chosen) -> Rewards:
    rows = [_indices(batch.responses.records, batch.problems) for batch in batches]

    def choose(parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.asarray(parts[number])[rows[number][place]] for number, place in chosen])

    def choose_term(same: Sequence[Term]) -> Term:
        # A weight may differ from row to row, or from batch to batch.
        weights = [np.broadcast_to(term.weight, np.shape(term.value)) for term in same]
        return Term(same[0].name, choose(weights), choose([term.value for term in same]))

    rewards = [batch.reward for batch in batches]
    return Rewards(
        choose([reward.reward_B for reward in rewards]),
        over_batches([reward.metrics for reward in rewards]),
        tuple(choose_term(same) for same in zip(*(reward.terms for reward in rewards), strict=True)),
    )


def over_batches(
    metrics: Sequence[dict[str, float]], count_fn: Callable[[int, str], int] = lambda number, name: 1
) -> dict[str, float]:
    """`count_fn`: (place in `metrics`, name) -> how many values a mean is of."""
    def together(name: str) -> float:
        numbers = [number for number, one in enumerate(metrics) if name in one]
        values, counts = [metrics[number][name] for number in numbers], [count_fn(number, name) for number in numbers]
        if name.endswith(_SUMMED) or (name.startswith("grader/") and name.endswith(FAILURES)):
            return sum(values)
        if name.endswith(_LARGEST):
            return max(values)
        return float(np.mean(values) if len(set(counts)) == 1 else np.average(values, weights=counts))

    return {name: together(name) for name in dict.fromkeys(name for one in metrics for name in one)}


def over_calls(calls: Sequence[Responses]) -> dict[str, float]:
    """The metrics of all responses to one prompt, whole calls and not what was chosen from them."""
    def count(number: int, name: str) -> int:
        call = calls[number]
        if name.endswith("/decode_waste"):
            return max(1, call.rollout.row_steps)
        return len(call.prompts if name.endswith("/shortened_rate") else call)

    return over_batches([one.metrics for one in calls], count)
