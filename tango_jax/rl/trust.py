"""How far the verifier is believed, by graded outcomes alone, and which solutions it is asked about.

Takes the grades of a generator turn and the counts of earlier verdicts; returns which solutions are judged and what a
group's step rewards weigh. Stage: after the grades, before the verifier's call. This is an addition to the published
method, which asks about all solutions and believes every judgement (`rl.judge=all`, `rl.trust=()`).

The measure is the likelihood ratio of the verdict CORRECT,

    LR = P(CORRECT | the grader accepts the answer) / P(CORRECT | the grader rejects it)

on the generator's own solutions to its own problems. At a share p of right solutions, a fraction p LR / (p LR + 1 - p)
of the verdicts CORRECT are right. Trust is 0 up to the lower limit of `rl.trust`, 1 from the upper one on, and linear
in between.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

JUDGE_KINDS = ("all", "silent", "failed")
DECAY = 0.85  # of the counts, per generator turn: about the last seven turns count
# Right and wrong solutions of a turn on which the measure rests at least, where there are as many. Wrong ones are
# plentiful, and the share of them that is accepted is the small number by which the ratio divides.
RIGHT_ASKED, WRONG_ASKED = 8, 16


class VerdictCounts(NamedTuple):
    """Verdicts on the generator's solutions in its own turns, decayed; saved with every checkpoint."""

    right: float = 0.0  # solutions that the grader accepts
    right_accepted: float = 0.0  # those of them with the verdict CORRECT
    wrong: float = 0.0
    wrong_accepted: float = 0.0

    def after(self, is_correct_B: np.ndarray, is_accepted_B: np.ndarray) -> "VerdictCounts":
        """The counts after a turn, of which the verdicts on these solutions are known."""
        right, wrong = is_correct_B.sum(), (~is_correct_B).sum()
        return VerdictCounts(
            DECAY * self.right + float(right),
            DECAY * self.right_accepted + float((is_correct_B & is_accepted_B).sum()),
            DECAY * self.wrong + float(wrong),
            DECAY * self.wrong_accepted + float((~is_correct_B & is_accepted_B).sum()),
        )

    @property
    def likelihood_ratio(self) -> float:
        """Of the verdict CORRECT, with half a verdict added to each count, so that it is 1 without any."""
        sensitivity, false_accepts = self._rates
        return sensitivity / false_accepts

    @property
    def surely(self) -> float:
        """A lower bound of the ratio, by one standard error of its logarithm: a few verdicts prove little."""
        sensitivity, false_accepts = self._rates
        variance = (1 - sensitivity) / (sensitivity * (self.right + 1.0))
        variance += (1 - false_accepts) / (false_accepts * (self.wrong + 1.0))
        return self.likelihood_ratio * math.exp(-math.sqrt(variance))

    @property
    def _rates(self) -> tuple[float, float]:
        """The shares of right and of wrong solutions that are accepted."""
        return (self.right_accepted + 0.5) / (self.right + 1.0), (self.wrong_accepted + 0.5) / (self.wrong + 1.0)


def trust_of(counts: VerdictCounts, limits: Sequence[float]) -> float:
    """Trust in [0, 1] by the verdicts so far; 1 if `limits`, those of `rl.trust`, are empty."""
    if not limits:
        return 1.0
    low, high = limits
    return float(np.clip((counts.surely - low) / (high - low), 0.0, 1.0))


class Asked(NamedTuple):
    """Whom the verifier is asked about in a generator turn, and how far it is believed."""

    is_asked_B: np.ndarray  # bool, solutions that it judges
    trust_P: np.ndarray  # float64 in [0, 1], the factor of a group's step rewards; 0 where they do not count


def ask_about(rl: ConfigDict, is_correct_B: np.ndarray, is_silent_P: np.ndarray, counts: VerdictCounts) -> Asked:
    """The solutions of a turn that the verifier judges: those of the groups whose step rewards count, and, where trust
    is measured, some more for the measure alone.

    Args:
        rl: the settings `rl.*`.
        is_correct_B: bool, the grades, P groups of M.
        is_silent_P: bool, the groups without an advantage by their outcomes.
        counts: the verdicts of earlier turns.
    """
    trust = trust_of(counts, rl.trust)
    group_size = len(is_correct_B) // len(is_silent_P)
    has_right_P = is_correct_B.reshape(-1, group_size).any(axis=1)
    is_meant_P = {"all": np.ones_like(is_silent_P), "silent": is_silent_P, "failed": ~has_right_P}[rl.judge]
    is_asked_B = np.repeat(is_meant_P & (trust > 0), group_size)
    if rl.trust:
        for is_kind_B, least in ((is_correct_B, RIGHT_ASKED), (~is_correct_B, WRONG_ASKED)):
            missing = max(least - int((is_asked_B & is_kind_B).sum()), 0)
            is_asked_B[_spread(np.flatnonzero(is_kind_B & ~is_asked_B), missing)] = True
    return Asked(is_asked_B, trust * is_meant_P)


def _spread(rows: np.ndarray, count: int) -> np.ndarray:
    """So many of the rows, or all, at even distances: neighbours answer the same problem."""
    count = min(count, len(rows))
    return rows[np.arange(count) * len(rows) // max(count, 1)]
