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

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

# Per turn, of the counts of the generator's turns and of the verifier's: about the last seven, and five, count.
DECAY, PRACTICE_DECAY = 0.85, 0.8
PRIOR = 3.0  # right solutions that what the verifier's turns lead to expect is worth
# Right and wrong solutions of a turn on which the measure rests at least, where there are as many. Wrong ones are
# plentiful, and the share of them that is accepted is the small number by which the ratio divides.
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

    def likelihood_ratio(self, num_steps: float) -> float:
        """Of the verdict CORRECT, on solutions of `num_steps` steps.

        Few right solutions are there at first. Until there are, the verifier's turns tell how many it accepts: where a
        share s of right solutions of k steps is accepted, s^(n/k) of those of n steps are, if it reads each step alike.
        Without either, no right solution is expected to be accepted.
        """
        expected = 0.0
        if self.practised_steps > 0:
            share, steps = self.practised_accepted / self.practised, self.practised_steps / self.practised
            expected = share ** max(num_steps / steps, 1.0)
        sensitivity = (self.right_accepted + PRIOR * expected) / (self.right + PRIOR)
        # Half a wrong verdict is added, so that the ratio is not infinite where none has been seen.
        return sensitivity * (self.wrong + 1.0) / (self.wrong_accepted + 0.5)


def trust_of(evidence: Evidence, limits: Sequence[float], num_steps: float) -> float:
    """Trust in [0, 1] by the verdicts so far, for solutions of `num_steps` steps; 1 if `limits`, those of `rl.trust`,
    are empty."""
    if not limits:
        return 1.0
    low, high = limits
    return float(np.clip((evidence.likelihood_ratio(num_steps) - low) / (high - low), 0.0, 1.0))


class Asked(NamedTuple):
    """Whom the verifier is asked about in a generator turn, and how far it is believed."""

    is_asked_B: np.ndarray  # bool, solutions that it judges
    trust_P: np.ndarray  # float64 in [0, 1], the factor of a group's step rewards; 0 where they do not count
    trust: float  # what that is where they count
    likelihood_ratio: float  # which it follows from


def ask_about(
    rl: ConfigDict, is_correct_B: np.ndarray, is_silent_P: np.ndarray, num_steps: float, evidence: Evidence
) -> Asked:
    """The solutions of a turn that the verifier judges: those of the groups whose step rewards count, and, where trust
    is measured, some more for the measure alone.

    Args:
        rl: the settings `rl.*`.
        is_correct_B: bool, the grades, P groups of M.
        is_silent_P: bool, the groups without an advantage by their outcomes.
        num_steps: mean steps of a solution.
        evidence: the verdicts of earlier turns.
    """
    trust = trust_of(evidence, rl.trust, num_steps)
    group_size = len(is_correct_B) // len(is_silent_P)
    has_right_P = is_correct_B.reshape(-1, group_size).any(axis=1)
    is_meant_P = {"all": np.ones_like(is_silent_P), "silent": is_silent_P, "failed": ~has_right_P}[rl.judge]
    is_asked_B = np.repeat(is_meant_P & (trust > 0), group_size)
    if rl.trust:
        for is_kind_B, least in ((is_correct_B, RIGHT_ASKED), (~is_correct_B, WRONG_ASKED)):
            missing = max(least - int((is_asked_B & is_kind_B).sum()), 0)
            is_asked_B[_spread(np.flatnonzero(is_kind_B & ~is_asked_B), missing)] = True
    return Asked(is_asked_B, trust * is_meant_P, trust, evidence.likelihood_ratio(num_steps))


def _spread(rows: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of the rows, at even distances: neighbours answer the same problem."""
    count = min(count, len(rows))
    return rows[np.arange(count) * len(rows) // max(count, 1)]
