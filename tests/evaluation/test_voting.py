"""Votes and choices over samples against expectations worked by hand: which k of the n, and ties drawn evenly."""

from math import comb

import numpy as np
import pytest

from tango_jax.evaluation.voting import (
    NO_ANSWER,
    RIGHT,
    Ballot,
    answer_classes,
    best_of,
    majority,
    pass_at_k,
    reported_sample_counts,
    selection_accuracies,
    weighted_vote,
)

A, B = 1, 2  # classes of wrong answers
pytestmark = pytest.mark.usefixtures("closed_pool")


def ballot(*classes, **scores) -> Ballot:
    classes = np.array(classes)
    return Ballot(classes, classes == RIGHT, {name: np.array(score, float) for name, score in scores.items()})


def test_every_rule_at_every_k():
    """One right answer (approved), the same wrong one twice (rejected), none (approved).

    k = 2 has the six choices RA RA R- AA A- A-. Majority: 1/2 1/2 1 0 0 0. Best by verdict: 1 1 1/2 0 0 0. Vote by
    verdict: 1 1 1 0 0 0, where A wins against no answer although nothing speaks for it.
    """
    votes = ballot(RIGHT, A, A, NO_ANSWER, verdict=[1, 0, 0, 1])
    one = {"pass": 1 / 4, "majority": 1 / 4, "best_of_by_verdict": 1 / 4, "vote_by_verdict": 1 / 4}
    assert selection_accuracies(votes, 1) == pytest.approx(one)
    two = {"pass": 1 / 2, "majority": 2 / 6, "best_of_by_verdict": 2.5 / 6, "vote_by_verdict": 3 / 6}
    assert selection_accuracies(votes, 2) == pytest.approx(two)
    # RAA RA- RA- AA-: majority 0 1/2 1/2 0; best 1 1/2 1/2 0; vote 1 1 1 0.
    three = {"pass": 3 / 4, "majority": 1 / 4, "best_of_by_verdict": 2 / 4, "vote_by_verdict": 3 / 4}
    assert selection_accuracies(votes, 3) == pytest.approx(three)
    four = {"pass": 1, "majority": 0, "best_of_by_verdict": 1 / 2, "vote_by_verdict": 1}
    assert selection_accuracies(votes, 4) == pytest.approx(four)


def test_weights_add_up_and_frequency_decides_between_equal_sums():
    share = [0.5, 0.5, 0.9, 0.0]  # right twice: 1.0 against 0.9
    votes = ballot(RIGHT, RIGHT, A, A)
    assert weighted_vote(votes, np.array(share), 4) == 1 and best_of(votes, np.array(share), 4) == 0
    assert weighted_vote(ballot(RIGHT, A, A, B), np.array([1.0, 0.5, 0.5, 0.0]), 4) == 0  # 1.0 twice: the more frequent
    assert weighted_vote(ballot(RIGHT, A, B, B), np.array([1.0, 1.0, 0.2, 0.2]), 4) == 1 / 2  # all is equal
    assert weighted_vote(votes, np.zeros(4), 4) == majority(votes, 4) == 1 / 2  # an empty verdict is a plain majority


@pytest.mark.parametrize("steps", [14, 90])
def test_products_of_many_steps_choose_as_well_as_few(steps):
    """0.2 ** 14 is 2e-10, less than any weight that breaks ties."""
    votes, p_M = ballot(A, RIGHT, A, B), np.array([0.15, 0.2, 0.15, 0.16]) ** steps
    assert best_of(votes, p_M, 4) == weighted_vote(votes, p_M, 4) == 1
    assert best_of(votes, p_M, 2) == weighted_vote(votes, p_M, 2) == 3 / 6  # the right one is in three of six choices
    assert best_of(votes, p_M[[1, 1, 0, 0]], 4) == 1 / 2  # equal ones are drawn evenly


def test_without_answers_nothing_is_right():
    votes = ballot(NO_ANSWER, NO_ANSWER, steps=[1, 1])
    assert set(selection_accuracies(votes, 2).values()) == {0.0}


def test_drawn_choices_are_near_the_exact_ones():
    """12 right and 8 equally wrong answers, 9 of them: the majority is right with 5 or more right ones."""
    votes = ballot(*[RIGHT] * 12, *[A] * 8)
    exact = sum(comb(12, j) * comb(8, 9 - j) for j in range(5, 10)) / comb(20, 9)
    assert majority(votes, 9) == pytest.approx(exact, abs=0.03) and majority(votes, 9) == majority(votes, 9)
    assert majority(votes, 20) == 1


def test_equal_answers_share_a_class():
    groups = [
        ["1/2", "3", r"\frac{1}{2}", None, "0.5", "  ", "3.0", "4"],
        ["7", "8"],
        [None],
        ["x", "x", "y"],
    ]
    correct = [[False] * 7 + [True], [True, True], [False], [False] * 3]
    assert answer_classes(groups, correct, "math") == [
        [1, 2, 1, NO_ANSWER, 1, NO_ANSWER, 2, RIGHT], [RIGHT, RIGHT], [NO_ANSWER], [1, 1, 2]]


@pytest.mark.parametrize("kind, answers, classes", [
    ("choice", ["Yes", "true", "(B)", "B. 12"], [1, 1, 2, 2]),
    ("python", ["[1, 2]", "[1,2]", "(1, 2)", "'a'"], [1, 1, 2, 3]),
    ("text", ["1,200", "$1200", "Ada"], [1, 1, 2]),
    ("string", ["tg", "gt", "tg"], [1, 2, 1]),
])
def test_classes_are_those_of_the_set_s_own_grader(kind, answers, classes):
    assert answer_classes([answers], [[False] * len(answers)], kind) == [classes]


@pytest.mark.parametrize("n, c, k, expected", [
    (4, 1, 1, 1 / 4), (4, 1, 2, 1 / 2), (4, 1, 4, 1), (5, 2, 3, 9 / 10), (6, 3, 2, 4 / 5), (8, 0, 8, 0), (3, 3, 1, 1),
    (10, 8, 3, 1),
])
def test_pass_at_k(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected)


def test_the_axis_doubles_and_ends_with_all():
    assert [reported_sample_counts(n) for n in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]
