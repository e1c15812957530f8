"""The metrics of a turn that calls the verifier more than once."""

import numpy as np
import pytest

from support.turns import settings, solution, turn_of, verification
from tango_jax.records import Lesson, Rewards
from tango_jax.tracking.turn_metrics import turn_metrics


@pytest.mark.parametrize("again", [0, 2])
def test_every_solution_counts_once_over_all_calls_of_the_verifier(again):
    """Wrong solutions are judged first, then right ones; the first `again` of them once more, and then misjudged."""
    said = {"generator": [solution(False), solution(False), solution(True), solution(True)],
            "verifier": [verification("INCORRECT", (False,))] * 2 + [verification()] * (2 + again)}
    t = turn_of(settings(2, 2), "generator", said)
    solutions = t.sample("generator", t.problems("train"), 2)
    for rows in (range(0, 2), range(2, 4), range(again)):
        t.sample("verifier", [solutions[row] for row in rows], 1, at_most=4)
    metrics = turn_metrics(t, Lesson(solutions, Rewards(np.zeros(4, np.float32), {}), {}), {})
    assert metrics["verifier/live_outcome_f1"] == metrics["verifier/live_accept_gap"] == 1.0
    assert metrics["verifier/live_rate_correct"] == 0.5
