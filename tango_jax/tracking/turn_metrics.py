"""What a turn shows beside its rewards: the metrics of its responses, of its verdicts and of its updates.

In: the responses of a turn, device metrics of its updates. Out: flat metrics for metrics.jsonl.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tango_jax.records import Responses, Rollout
from tango_jax.runtime.checks import require
from tango_jax.tracking.scores import verifier_scores

# Metrics of the updates of a batch, see `over_updates`.
LARGEST_OF_UPDATES = ("logprob_gap_max", "update_ratio")
MEANS_OF_UPDATES = ("loss", "grad_norm")


def rollout_metrics(role: str, rollout: Rollout) -> dict[str, float]:
    length_B = np.array([len(tokens) for tokens in rollout.tokens])
    return {
        f"{role}/length_mean": length_B.mean(),
        f"{role}/length_max": length_B.max(),
        f"{role}/truncation_rate": rollout.is_truncated_B.mean(),
        f"{role}/tokens_sampled": length_B.sum(),
        f"{role}/decode_waste": 1.0 - length_B.sum() / rollout.row_steps,
    }


def turn_metrics(role: str, answers: dict[str, Responses], *parts: dict[str, float]) -> dict[str, float]:
    """All metrics of a turn: those of its responses, the agreement of verdicts with the grades, and the `parts`, which
    are those of sampling, reward, credit and update.

    Raises:
        ValueError: two of them have a name in common.
    """
    own = {}
    if role == "generator":
        own["generator/steps_mean"] = np.mean([len(solution.steps) for solution in answers[role].records])
    if "verifier" in answers:
        judged = answers["verifier"]
        # In a generator turn only the first of several verifications of a solution counts.
        every, prefix = (judged.group_size, "verifier/live_") if role == "generator" else (1, "verifier/")
        scores = verifier_scores(judged.owners[::every], judged.records[::every])
        own |= {f"{prefix}{name}": value for name, value in scores.items()}
    metrics: dict[str, float] = {}
    for part in (*(responses.metrics for responses in answers.values()), own, *parts):
        twice = sorted(metrics.keys() & part.keys())
        require(not twice, f"two parts of a turn have metrics of the name {' and '.join(twice)}: rename those that "
                "your reward or credit function returns")
        metrics |= part
    return metrics


def over_updates(updates: list[dict], epochs: int) -> dict[str, float]:
    """One figure for all updates that a batch got; with a single update each is that update's own.

    `loss` and `grad_norm` are means over updates, each of which counts alike; `tokens` are the action tokens of the
    batch; `logprob_gap_max` and `update_ratio` are the largest; all others are means over tokens, so that minibatches
    weigh as many as they have. `kl_first` is the KL of the first update alone, which is 0 where the policy has not
    moved before (loop/turn.py keeps it there).
    """
    tokens = np.array([metrics.get("tokens", 0) for metrics in updates], np.float64)
    share = tokens / tokens.sum() if tokens.any() else np.full(len(updates), 1 / len(updates))
    figures = {}
    for name in updates[0]:
        values = np.array([metrics[name] for metrics in updates], np.float64)
        if name == "tokens":
            figures[name] = values.sum() / epochs
        elif name in LARGEST_OF_UPDATES:
            figures[name] = values.max()
        else:
            figures[name] = values.mean() if name in MEANS_OF_UPDATES else np.sum(share * values)
    if "kl" in figures:
        figures["kl_first"] = updates[0]["kl"]
    return {name: float(value) for name, value in figures.items()}


def tokens_sampled(metrics: Mapping[str, Any]) -> float:
    """Tokens that all calls of a turn sampled."""
    return sum(value or 0 for name, value in metrics.items() if name.endswith("/tokens_sampled"))


def sampled_per_second(metrics: dict[str, float], timing: dict[str, float]) -> float:
    """Tokens sampled in a turn by both roles, per second of sampling."""
    return tokens_sampled(metrics) / sum(timing.get(name, 0.0) for name in ("time/sample_s", "time/verify_s"))
