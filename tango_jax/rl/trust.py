"""How far the verifier is believed, by graded outcomes alone, and which solutions it is asked about.

Takes the grades of a generator turn and the counts of earlier verdicts; returns which solutions are judged and what a
group's step rewards weigh. Stage: after the grades, before the verifier's call. This is an addition to the published
method, which asks about all solutions and believes every judgement (`rl.judge=all`, `rl.trust=()`).

The measure is the F1 score of accepting a solution, that is, of rejecting none of its steps, if one solution in twenty
were right. It is high only where the verifier accepts most right solutions and hardly any wrong one, and it does not
depend on how many the generator gets right. Only grades are needed: steps of a solution that the grader accepts are
taken to be right. Trust is 0 up to the lower limit of `rl.trust`, 1 from the upper one on, and linear in between.
The same measure, on the solutions of the verifier's own turns, tells when its warm-up is done (`rl.warmup_until`).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from tango_jax.records import Answers, Counters, Responses
from tango_jax.rl.algorithms import algorithm_of
from tango_jax.rl.schedule import Turn

# Per turn, of the counts of the generator's turns and of the verifier's: about the last seven, and five, count.
DECAY, PRACTICE_DECAY = 0.85, 0.8
PRIOR = 24.0  # the verifier's turns count for as much as so many steps of right solutions in the generator's turns
# Right and wrong solutions of a turn on which the measure rests at least, where there are as many and as many depend on
# it.
RIGHT_ASKED, WRONG_ASKED = 8, 16
SHARE_RIGHT = 0.05  # of solutions, for the F1 score


class Evidence(NamedTuple):
    """Judgements of graded solutions, decayed from turn to turn; saved with every checkpoint."""

    # Of the generator's turns: steps of solutions that the grader accepts, and those that are rejected.
    right_steps: float = 0.0
    right_rejected: float = 0.0
    # Solutions that the grader rejects, and those of which no step is rejected.
    wrong: float = 0.0
    wrong_accepted: float = 0.0
    # Of the verifier's turns: the same four, and the right solutions.
    practised_steps: float = 0.0
    practised_rejected: float = 0.0
    practised_wrong: float = 0.0
    practised_accepted: float = 0.0
    practised_right: float = 0.0

    def after_solving(self, is_correct_B: np.ndarray, num_steps_B: np.ndarray, rejected_B: np.ndarray) -> "Evidence":
        """The evidence after a generator's turn, with the grades of the solutions that were judged, and how many of
        their steps were rejected."""
        return Evidence(*_faded(self[:4], _counts(is_correct_B, num_steps_B, rejected_B), DECAY), *self[4:])

    def after_practice(self, is_correct_B: np.ndarray, num_steps_B: np.ndarray, rejected_B: np.ndarray) -> "Evidence":
        """The evidence after a verifier's turn."""
        new = (*_counts(is_correct_B, num_steps_B, rejected_B), is_correct_B.sum())
        return Evidence(*self[:4], *_faded(self[4:], new, PRACTICE_DECAY))

    def rates(self, num_steps: float) -> tuple[float, float]:
        """(share of right solutions that are accepted, of wrong ones), of solutions of `num_steps` steps.

        A right solution is accepted if none of its steps is rejected, which a verifier does to each alike. Until there
        are right solutions, those of the verifier's turns tell how often; without any, all steps are taken to be
        rejected. The share of wrong ones is one standard error above its estimate.
        """
        rejected = (self.right_rejected + PRIOR * self._expected()) / (self.right_steps + PRIOR)
        return (1.0 - rejected) ** num_steps, _upper_share(self.wrong_accepted, self.wrong)

    def practised_rates(self) -> tuple[float, float]:
        """The same of the solutions of the verifier's turns, which have as many steps as their problems ask for."""
        num_steps = self.practised_steps / self.practised_right if self.practised_right else 1.0
        return (1.0 - self._expected()) ** num_steps, _upper_share(self.practised_accepted, self.practised_wrong)

    def _expected(self) -> float:
        """Share of the steps of right solutions that are rejected in the verifier's turns; without any, all."""
        return self.practised_rejected / self.practised_steps if self.practised_steps else 1.0


def _counts(is_correct_B: np.ndarray, num_steps_B: np.ndarray, rejected_B: np.ndarray) -> tuple[int, ...]:
    """Steps of right solutions, those that are rejected, wrong solutions, those of which no step is rejected."""
    wrong_B = ~is_correct_B
    right_steps, right_rejected = (is_correct_B * num_steps_B).sum(), (is_correct_B * rejected_B).sum()
    return right_steps, right_rejected, wrong_B.sum(), (wrong_B & (rejected_B == 0)).sum()


def _faded(counts: Sequence[float], more: Sequence[int], decay: float) -> list[float]:
    return [decay * old + float(new) for old, new in zip(counts, more, strict=True)]


def _upper_share(accepted: float, count: float) -> float:
    """One standard error above the share that is accepted, to which half a solution is added, so that it is not 0
    where none has been."""
    count, share = count + 1.0, (accepted + 0.5) / (count + 1.0)
    return min(share + math.sqrt(share * (1.0 - share) / count), 1.0)


def f1_of(rates: tuple[float, float], share_right: float = SHARE_RIGHT) -> float:
    """F1 score of acceptance, 2 p s / (p s + (1 - p) b + p), where shares s of right and b of wrong solutions are
    accepted, and a share p is right."""
    of_right, of_wrong = rates
    accepted = share_right * of_right + (1.0 - share_right) * of_wrong
    return 2.0 * share_right * of_right / (accepted + share_right)


def trust_of(rates: tuple[float, float], limits: Sequence[float]) -> float:
    """Trust in [0, 1] at these rates of acceptance; 1 if `limits`, those of `rl.trust`, are empty."""
    if not limits:
        return 1.0
    low, high = limits
    return float(np.clip((f1_of(rates) - low) / (high - low), 0.0, 1.0))


def warmup_metrics(rl: ConfigDict, turn: Turn, counters: Counters) -> dict[str, float]:
    """Of a warm-up that may end sooner: trust by the verifier's own turns, of which `turn` is the last."""
    if turn.phase != "warmup" or not rl.warmup_until:
        return {}
    return {"verifier/warmup_trust": trust_of(Evidence(*counters.evidence).practised_rates(), rl.trust)}


def turns_done(rl: ConfigDict, turn: Turn, counters: Counters) -> int:
    """The number of turns of the schedule that are over with `turn`, given the counters after it. They include the rest
    of a warm-up that has done its work: turns of the generator keep their numbers, and so draw what they would have
    drawn."""
    reached = warmup_metrics(rl, turn, counters).get("verifier/warmup_trust", 0.0)
    return rl.warmup_steps if rl.warmup_until and reached >= rl.warmup_until else turn.index + 1


class Asked(NamedTuple):
    """Which solutions of a generator turn the verifier judges, and how far it is believed."""

    is_asked_B: np.ndarray  # bool, the solutions that it judges
    trust_P: np.ndarray  # float64 in [0, 1]: `trust` in the groups whose step rewards count, 0 in the others
    trust: float
    rates: tuple[float, float]  # from which it follows

    def metrics(self, rl: ConfigDict) -> dict[str, float]:
        share = {"generator/judged_share": self.is_asked_B.mean()}
        if not rl.trust:  # nothing is measured
            return share
        names = ("generator/trust", "verifier/right_accepted", "verifier/wrong_accepted")
        return share | dict(zip(names, (self.trust, *self.rates), strict=True))


def asked_about(config: ConfigDict, solved: Responses, counters: Counters) -> Asked | None:
    """Which of the generator's solutions are judged, given the verdicts of earlier turns; None: all of them are, and
    all judgements count, as published."""
    rl = config.rl
    if rl.judge == "all" and not rl.trust:
        return None
    is_correct_B = np.array([solution.is_right for solution in solved.records])
    algorithm = algorithm_of(config.generator.loss.algorithm, "generator.loss.algorithm")
    has_signal_P = algorithm.has_signal_P(is_correct_B.astype(np.float32), solved.group_size)
    num_steps = float(np.mean([len(solution.steps) for solution in solved.records]))
    return ask_about(rl, is_correct_B, has_signal_P, Evidence(*counters.evidence).rates(num_steps))


def ask_about(
    rl: ConfigDict, is_correct_B: np.ndarray, has_signal_P: np.ndarray, rates: tuple[float, float]
) -> Asked:
    """The solutions of a turn that the verifier judges: those of the groups whose step rewards count, and, where trust
    is measured, some more for the measure alone, though never more than there are solutions to which trust matters.

    Args:
        rl: the settings `rl.*`.
        is_correct_B: bool, the grades, P groups of M.
        has_signal_P: bool, whether the outcomes of a group give an advantage.
        rates: shares of right and of wrong solutions that the verifier has accepted so far (`Evidence.rates`).
    """
    trust = trust_of(rates, rl.trust)
    group_size = len(is_correct_B) // len(has_signal_P)
    has_right_P = is_correct_B.reshape(-1, group_size).any(axis=1)
    counts_P = {"all": np.ones_like(has_signal_P), "silent": ~has_signal_P, "failed": ~has_right_P}[rl.judge]
    is_asked_B = np.repeat(counts_P & (trust > 0), group_size)
    if rl.trust:
        needed = min(counts_P.sum() * group_size / (RIGHT_ASKED + WRONG_ASKED), 1.0)
        for is_kind_B, least in ((is_correct_B, RIGHT_ASKED), (~is_correct_B, WRONG_ASKED)):
            missing = max(math.ceil(least * needed) - int((is_asked_B & is_kind_B).sum()), 0)
            is_asked_B[_spread(np.flatnonzero(is_kind_B & ~is_asked_B), missing)] = True
    return Asked(is_asked_B, trust * counts_P, trust, rates)


def with_verdicts(counters: Counters, rl: ConfigDict, role: str, answers: Answers) -> Counters:
    """The counters with the evidence of a turn of `role`: its judgements, beside the grades of what they are about."""
    if not rl.trust or "verifier" not in answers:
        return counters
    # Judgements that do not match the steps give no step reward, and so say nothing of those that do.
    judged, evidence = answers["verifier"], Evidence(*counters.evidence)
    pairs = [(solution, verification.judgements) for solution, verification
             in zip(judged.owners, judged.records, strict=True) if verification.is_aligned]  # fmt: skip
    is_correct_B = np.array([solution.is_right for solution, _ in pairs], bool)
    num_steps_B = np.array([len(solution.steps) for solution, _ in pairs], int)
    rejected_B = np.array([sum(approved is False for approved in judgements) for _, judgements in pairs], int)
    after_fn = evidence.after_solving if role == "generator" else evidence.after_practice
    evidence = after_fn(is_correct_B, num_steps_B, rejected_B)
    return dataclasses.replace(counters, evidence=tuple(evidence))


def _spread(rows: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of the rows, at even distances: neighbours answer the same problem."""
    count = min(count, len(rows))
    return rows[np.arange(count) * len(rows) // max(count, 1)]
