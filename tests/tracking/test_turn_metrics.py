"""The metrics of a turn that calls the verifier more than once."""

import dataclasses

import numpy as np
import pytest

from support.turns import settings, solution, turn_of, verification
from tango_jax.records import Lesson, Rewards
from tango_jax.text.prompts import JUDGE, SECOND_TRY
from tango_jax.tracking.turn_metrics import turn_metrics


@pytest.mark.parametrize("again", [0, 2])
def test_every_solution_counts_once_over_all_calls_of_the_verifier(again):
    """Wrong solutions are judged first, then right ones; the first `again` of them once more, and then misjudged."""
    said = {"generator": [solution(False), solution(False), solution(True), solution(True)],
            "verifier": [verification("INCORRECT", (False,))] * 2 + [verification()] * (2 + again)}
    t = turn_of(settings(2, 2), "generator", said)
    solutions = t.sample("generator", t.problems("train"), 2)
    for rows in (range(0, 2), range(2, 4), range(again)):
        t.sample("verifier", [solutions[row] for row in rows], 1)
    metrics = turn_metrics(t, Lesson(solutions, Rewards(np.zeros(4, np.float32), {}), {}), {})
    assert metrics["verifier/live_outcome_f1"] == metrics["verifier/live_accept_gap"] == 1.0
    assert metrics["verifier/live_rate_correct"] == 0.5


@pytest.mark.parametrize("order", [1, -1])
def test_the_verifiers_own_prompt_is_measured_and_not_a_critics(order):
    critic = dataclasses.replace(JUDGE, name="critic")
    said = {"generator": [solution(False), solution(True)], "critic": [verification()] * 2,
            "verifier": [verification("INCORRECT", (False,)), verification()]}
    t = turn_of(settings(2, 1), "generator", said)
    solutions = t.sample("generator", t.problems("train"), 1)
    for prompt in (JUDGE, critic)[::order]:
        t.sample("verifier", solutions, 1, prompt=prompt)
    metrics = turn_metrics(t, Lesson(solutions, Rewards(np.zeros(2, np.float32), {}), {}), {})
    assert (metrics["verifier/live_outcome_f1"], metrics["verifier/live_rate_correct"]) == (1.0, 0.5)


def test_verdicts_are_of_first_tries_where_second_tries_are_judged_as_well():
    said = {"generator": [solution(True), solution(False)], "second_try": [solution(False)],
            "verifier": [verification(), verification("INCORRECT", (False,)), verification()]}
    t = turn_of(settings(1, 2), "generator", said)
    first = t.sample("generator", t.problems("train"), 2)
    judged = t.sample("verifier", first, 1)
    second = t.sample("generator", [judged[1]], 1, prompt=SECOND_TRY, at_most=2)
    t.sample("verifier", second, 1, at_most=2)
    metrics = turn_metrics(t, Lesson(first, Rewards(np.zeros(2, np.float32), {}), {}), {})
    assert (metrics["verifier/live_outcome_f1"], metrics["verifier/live_rate_correct"]) == (1.0, 0.5)
    assert not any("verifier/judged_" in name for name in metrics)


@pytest.mark.parametrize("judged", [[0], [0, 1]])
def test_a_call_whose_number_depends_on_the_data_names_a_part(judged):
    """Also in a turn in which it happens to be everything: a series is of one name."""
    t = turn_of(settings(2, 1), "generator", {"generator": [solution(False)] * 2,
                                              "verifier": [verification("INCORRECT", (False,))] * 2})
    solutions = t.sample("generator", t.problems("train"), 1)
    t.sample("verifier", [solutions[row] for row in judged], 1, at_most=2)
    metrics = turn_metrics(t, Lesson(solutions, Rewards(np.zeros(2, np.float32), {}), {}), {})
    assert "verifier/judged_outcome_f1" in metrics and "verifier/live_outcome_f1" not in metrics


def test_a_part_that_another_prompt_is_about_leaves_the_verdicts_whole():
    critic = dataclasses.replace(JUDGE, name="critic")
    said = {"generator": [solution(False), solution(True)], "critic": [verification()],
            "verifier": [verification("INCORRECT", (False,)), verification()]}
    t = turn_of(settings(2, 1), "generator", said)
    solutions = t.sample("generator", t.problems("train"), 1)
    t.sample("verifier", solutions, 1)
    t.sample("verifier", [solutions[0]], 1, prompt=critic, at_most=2)
    metrics = turn_metrics(t, Lesson(solutions, Rewards(np.zeros(2, np.float32), {}), {}), {})
    assert "verifier/live_outcome_f1" in metrics and "verifier/judged_outcome_f1" not in metrics


def test_solutions_are_labelled_before_they_are_judged():
    t = turn_of(settings(2, 1), "generator", {"generator": [solution(False)] * 2, "verifier": [verification()] * 2})
    solutions = t.sample("generator", t.problems("train"), 1)
    labelled = t.labelled(solutions, [True, False])
    t.sample("verifier", labelled, 1)
    with pytest.raises(ValueError, match="label them first"):
        t.labelled(labelled, [False, False])
