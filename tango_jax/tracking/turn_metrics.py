"""The metrics of a turn's responses, verdicts and updates, for metrics.jsonl."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tango_jax.method.dynamic_sampling import over_calls
from tango_jax.method.rewards import step_count_metrics
from tango_jax.method.turn import Turn
from tango_jax.records import Lesson, Responses, Solution
from tango_jax.runtime.checks import require
from tango_jax.tracking.scores import verifier_scores

LARGEST_OF_UPDATES = ("logprob_gap_max", "update_ratio")
MEANS_OF_UPDATES = ("loss", "grad_norm", "useful_share")
OF_UPDATES = (*LARGEST_OF_UPDATES, *MEANS_OF_UPDATES, "clip_fraction", "entropy", "kl", "kl_first", "logprob_gap_mean",
              "logprob_gap_share", "tokens")
# Names that a row has besides, some of them only in some turns.
TAKEN = re.compile(r"step|phase|generator_step|generator/step_count_corr|"
                   r"verifier/(live_|judged_)?(accept_gap|first_error_f1)|grader/(errors|timeouts|overlong)|"
                   r"(alarm|flops|memory|throughput|time)/.*")


def check_names(t: Turn, lesson: Lesson) -> None:
    """Raise ValueError if a rehearsed lesson has metrics with names that a turn's row has anyway."""
    turn_metrics(t, lesson, {f"{t.role}/{name}": 0.0 for name in OF_UPDATES})
    taken = [name for name in {**lesson.reward.metrics, **lesson.metrics} if TAKEN.fullmatch(name)]
    require(not taken, f"arm={t.config.arm}, the {t.role}'s turn returns metrics that are measured anyway, "
            f"{' and '.join(taken)}: rename them")


def turn_metrics(t: Turn, lesson: Lesson, updates: Mapping[str, float]) -> dict[str, float]:
    """All metrics of a turn. Raises ValueError if two of them have a name in common.

    Steps, and verdicts in the verifier's turns, are of everything sampled: dynamic sampling would hide that all
    verdicts agree. In a generator's turn: `verifier/live_` where all solutions are judged, else `verifier/judged_`.
    """
    by_name: dict[str, list[Responses]] = {}
    for responses in t.everything():
        by_name.setdefault(responses.name, []).append(responses)
    own = {}
    if t.role == "generator" and (solved := t.solutions()):
        own["generator/steps_mean"] = np.mean([len(solution.steps) for solution in solved])
    verifications = [one for one in t.sampled if one.role == "verifier" and len(one)]
    judged = t.judgements() if t.role == "verifier" else [one for one in verifications if one.name == "verifier"] or [
        one for one in verifications if _about_solutions(one)]
    records = [one for each in judged for one in each.records]
    if t.role == "generator":  # of first tries, and of several verifications of a solution the first
        firsts = set(map(id, t.solutions()))
        records = [one for one in records if id(one.of) in firsts] or records
        records = list({id(one.of): one for one in reversed(records)}.values())[::-1]
    if records and all(map(_about_solutions, judged)):
        is_all = {id(one.of) for one in records} >= set(map(id, t.solutions()))  # a custom turn may judge a part
        calls = [call for call in t.calls.values() if call.prompt.name in {one.name for one in judged}]
        may_be_part = bool(calls) and all(call.at_most for call in calls)
        is_part = t.rl.dynamic_sampling > 0 or may_be_part or not is_all
        prefix = "verifier/" if t.role == "verifier" else "verifier/judged_" if is_part else "verifier/live_"
        scores = verifier_scores([one.of for one in records], records)
        own |= {f"{prefix}{name}": value for name, value in scores.items()}
        if prefix == "verifier/judged_":
            own["verifier/judged_solutions_correct"] = np.mean([one.of.is_correct for one in records])
    own |= step_count_metrics(lesson, t.config[t.role].loss.mask_overlong)
    metrics: dict[str, float] = {}
    of_responses = [over_calls(same) for same in by_name.values()]
    for part in (*of_responses, own, t.metrics, lesson.reward.metrics, lesson.metrics, updates):
        twice = sorted(metrics.keys() & part.keys())
        require(not twice, f"two parts of a turn have metrics named {' and '.join(twice)}: rename those that "
                "your method returns")
        metrics |= part
    return metrics


def _about_solutions(verifications: Responses) -> bool:
    return all(isinstance(one.of, Solution) for one in verifications.records)


def over_updates(updates: list[dict], epochs: int) -> dict[str, float]:
    """One figure for all updates of a batch.

    `loss`, `grad_norm` and `useful_share`: means over updates. `tokens`: those trained on. `logprob_gap_max` and
    `update_ratio`: the largest. All others: means over the tokens trained on, and absent if there are none
    (`loss.mask_overlong`). `kl_first`: of the first update with tokens, 0 before any training.
    """
    tokens = np.array([metrics.get("tokens", 0) for metrics in updates], np.float64)
    share = tokens / max(tokens.sum(), 1)
    figures = {}
    for name in updates[0]:
        values = np.array([metrics[name] for metrics in updates], np.float64)
        if name == "tokens":
            figures[name] = values.sum() / epochs
        elif name in LARGEST_OF_UPDATES:
            figures[name] = values.max()
        elif name in MEANS_OF_UPDATES:
            figures[name] = values.mean()
        elif tokens.any():
            figures[name] = np.sum(share * values)
    if "kl" in figures:
        figures["kl_first"] = updates[int(np.flatnonzero(tokens)[0])]["kl"]
    return {name: float(value) for name, value in figures.items()}


def tokens_sampled(metrics: Mapping[str, Any]) -> float:
    return sum(value or 0 for name, value in metrics.items() if name.endswith("/tokens_sampled"))


def tokens_scored(metrics: Mapping[str, Any]) -> float:
    """Of verifiers that do not write: prompts and marks."""
    return sum(value or 0 for name, value in metrics.items() if name.endswith("/tokens_scored"))


def sampled_per_second(metrics: dict[str, float], timing: dict[str, float]) -> float:
    """Of the time of sampling; what a verifier takes that does not write is none."""
    phases = ("sample",) if tokens_scored(metrics) else ("sample", "verify")
    seconds = sum(timing.get(f"time/{phase}_s", 0.0) for phase in phases)
    return tokens_sampled(metrics) / seconds if seconds else 0.0
