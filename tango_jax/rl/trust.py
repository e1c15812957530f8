"""How far the verifier is believed, by graded outcomes alone, and which solutions it is asked about.

Takes the grades of a generator turn and the counts of earlier verdicts; returns which solutions are judged and what a
group's step rewards weigh. Stage: after the grades, before the verifier's call. This is an addition to the published
method, which asks about all solutions and believes every judgement (`rl.judge=all`, `rl.trust=()`).

The measure is the likelihood ratio of the verdict CORRECT,

    LR = P(CORRECT | the grader accepts the answer) / P(CORRECT | the grader rejects it)

on the generator's own solutions to its own problems. At a share p of right solutions, a fraction p LR / (p LR + 1 - p)
of the verdicts CORRECT are right. Trust follows the estimate of LR less one standard error, since few right solutions
are there at first: it is 0 up to the lower limit of `rl.trust`, 1 from the upper one on, and linear in between.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from tango_jax.records import Answers, Counters, Responses
from tango_jax.rl.algorithms import algorithm_of

# Per turn, of the counts of the generator's turns and of the verifier's: about the last seven, and five, count.
DECAY, PRACTICE_DECAY = 0.85, 0.8
PRIOR = 3.0  # the verifier's turns count for as much as this many right solutions of the generator's turns
# Right and wrong solutions of a turn on which the measure rests at least, where there are as many and as many depend on
# it. Wrong ones are plentiful, and the share of them that is accepted is the small number by which the ratio divides.
RIGHT_ASKED, WRONG_ASKED = 8, 16


class Evidence(NamedTuple):
    """Verdicts on graded solutions, decayed from turn to turn; saved with every checkpoint."""

    # Of the generator's turns: solutions that the grader accepts, and those of them with the verdict CORRECT; then
    # the same of the solutions that it rejects.
    right: float = 0.0
    right_accepted: float = 0.0
    wrong: float = 0.0
    wrong_accepted: float = 0.0
    # Of the verifier's turns: verdicts on right solutions, those of them that are CORRECT, and the steps of all.
    practised: float = 0.0
    practised_accepted: float = 0.0
    practised_steps: float = 0.0

    def after_solving(self, is_correct_B: np.ndarray, is_accepted_B: np.ndarray) -> "Evidence":
        """The evidence after a generator's turn, with the grades of the solutions that were judged, and verdicts."""
        return self._replace(
            right=DECAY * self.right + float(is_correct_B.sum()),
            right_accepted=DECAY * self.right_accepted + float((is_correct_B & is_accepted_B).sum()),
            wrong=DECAY * self.wrong + float((~is_correct_B).sum()),
            wrong_accepted=DECAY * self.wrong_accepted + float((~is_correct_B & is_accepted_B).sum()),
        )

    def after_practice(
        self, is_correct_B: np.ndarray, is_accepted_B: np.ndarray, num_steps_B: np.ndarray
    ) -> "Evidence":
        """The evidence after a verifier's turn."""
        return self._replace(
            practised=PRACTICE_DECAY * self.practised + float(is_correct_B.sum()),
            practised_accepted=PRACTICE_DECAY * self.practised_accepted + float((is_correct_B & is_accepted_B).sum()),
            practised_steps=PRACTICE_DECAY * self.practised_steps + float((is_correct_B * num_steps_B).sum()),
        )

    def likelihood_ratio(self, num_steps: float) -> tuple[float, float]:
        """Of the verdict CORRECT, on solutions of `num_steps` steps: the estimate, and one standard error (of its
        logarithm, by the delta method) below that.

        Few right solutions are there at first. Until there are, the verifier's turns tell how many it accepts: where a
        share s of right solutions of k steps is accepted, s^(n/k) of those of n steps are, if it reads each step alike.
        Without either, no right solution is expected to be accepted.
        """
        expected = 0.0
        if self.practised_steps > 0:
            share, steps = self.practised_accepted / self.practised, self.practised_steps / self.practised
            expected = share ** max(num_steps / steps, 1.0)
        right, right_accepted = self.right + PRIOR, self.right_accepted + PRIOR * expected
        # Half a wrong verdict is added, so that the ratio is not infinite where none has been seen.
        wrong, wrong_accepted = self.wrong + 1.0, self.wrong_accepted + 0.5
        if right_accepted == 0:
            return 0.0, 0.0
        ratio = right_accepted / right * wrong / wrong_accepted
        variance = 1 / right_accepted - 1 / right + 1 / wrong_accepted - 1 / wrong
        return ratio, ratio * math.exp(-math.sqrt(max(variance, 0.0)))


def trust_of(evidence: Evidence, limits: Sequence[float], num_steps: float) -> float:
    """Trust in [0, 1] by the verdicts so far, for solutions of `num_steps` steps; 1 if `limits`, those of `rl.trust`,
    are empty."""
    if not limits:
        return 1.0
    low, high = limits
    _, ratio = evidence.likelihood_ratio(num_steps)
    return float(np.clip((ratio - low) / (high - low), 0.0, 1.0))


class Asked(NamedTuple):
    """Which solutions of a generator turn the verifier judges, and how far it is believed."""

    is_asked_B: np.ndarray  # bool, the solutions that it judges
    trust_P: np.ndarray  # float64 in [0, 1]: `trust` in the groups whose step rewards count, 0 in the others
    trust: float
    likelihood_ratio: float  # the estimate

    def metrics(self) -> dict[str, float]:
        return {
            "generator/trust": self.trust,
            "generator/judged_share": self.is_asked_B.mean(),
            "verifier/likelihood_ratio": self.likelihood_ratio,
        }


def asked_about(config: ConfigDict, solved: Responses, counters: Counters) -> Asked | None:
    """Which of the generator's solutions are judged, given the verdicts of earlier turns; None: all of them are, and
    all judgements count, as published."""
    rl = config.rl
    if rl.judge == "all" and not rl.trust:
        return None
    is_correct_B = np.array([solution.is_correct for solution in solved.records])
    algorithm = algorithm_of(config.generator.loss.algorithm, "generator.loss.algorithm")
    has_signal_P = algorithm.has_signal_P(is_correct_B.astype(np.float32), solved.group_size)
    num_steps = float(np.mean([len(solution.steps) for solution in solved.records]))
    return ask_about(rl, is_correct_B, has_signal_P, num_steps, Evidence(*counters.evidence))


def ask_about(
    rl: ConfigDict, is_correct_B: np.ndarray, has_signal_P: np.ndarray, num_steps: float, evidence: Evidence
) -> Asked:
    """The solutions of a turn that the verifier judges: those of the groups whose step rewards count, and, where trust
    is measured, some more for the measure alone, though never more than there are solutions to which trust matters.

    Args:
        rl: the settings `rl.*`.
        is_correct_B: bool, the grades, P groups of M.
        has_signal_P: bool, whether the outcomes of a group give an advantage.
        num_steps: mean steps of a solution.
        evidence: the verdicts of earlier turns.
    """
    trust = trust_of(evidence, rl.trust, num_steps)
    group_size = len(is_correct_B) // len(has_signal_P)
    has_right_P = is_correct_B.reshape(-1, group_size).any(axis=1)
    counts_P = {"all": np.ones_like(has_signal_P), "silent": ~has_signal_P, "failed": ~has_right_P}[rl.judge]
    is_asked_B = np.repeat(counts_P & (trust > 0), group_size)
    if rl.trust:
        needed = min(counts_P.sum() * group_size / (RIGHT_ASKED + WRONG_ASKED), 1.0)
        for is_kind_B, least in ((is_correct_B, RIGHT_ASKED), (~is_correct_B, WRONG_ASKED)):
            missing = max(math.ceil(least * needed) - int((is_asked_B & is_kind_B).sum()), 0)
            is_asked_B[_spread(np.flatnonzero(is_kind_B & ~is_asked_B), missing)] = True
    return Asked(is_asked_B, trust * counts_P, trust, evidence.likelihood_ratio(num_steps)[0])


def with_verdicts(counters: Counters, rl: ConfigDict, role: str, answers: Answers) -> Counters:
    """The counters with the evidence of a turn of `role`: its verdicts, beside the grades of what they are about."""
    if not rl.trust or "verifier" not in answers:
        return counters
    judged, evidence = answers["verifier"], Evidence(*counters.evidence)
    is_correct_B = np.array([solution.is_correct for solution in judged.owners])
    is_accepted_B = np.array([verification.verdict == "CORRECT" for verification in judged.records])
    if role == "generator":
        evidence = evidence.after_solving(is_correct_B, is_accepted_B)
    else:
        num_steps_B = np.array([len(solution.steps) for solution in judged.owners])
        evidence = evidence.after_practice(is_correct_B, is_accepted_B, num_steps_B)
    return dataclasses.replace(counters, evidence=tuple(evidence))


def _spread(rows: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of the rows, at even distances: neighbours answer the same problem."""
    count = min(count, len(rows))
    return rows[np.arange(count) * len(rows) // max(count, 1)]
