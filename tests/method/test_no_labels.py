"""Labels by the majority, the solutions that a verifier learns from, and which groups count, worked by hand."""

import dataclasses
import types

import numpy as np
import pytest

from support.turns import PROBLEM, responses_of, settings, solution, task_of, turn_of, verification
from tango_jax.grading import GradeReport, answer_of
from tango_jax.loop import turn as loop_turn
from tango_jax.method.relatives import (
    judge_without_labels,
    majority_labelled,
    one_of_either_label,
    solve_without_labels,
)
from tango_jax.method.rewards import outcome_reward, verdict_reward
from tango_jax.records import Responses, Solution
from tango_jax.runtime.timers import PhaseTimer
from tango_jax.tasks import own_grader

GOLD = PROBLEM.answer


def answered(answer: str | None) -> Solution:
    """A solution with this answer, or with none."""
    text = "" if answer is None else f"<think><step>s</step></think><answer>\\boxed{{{answer}}}</answer>"
    return solution(answer == GOLD, text=text)


def labelled(*groups: list[str | None], task=None) -> tuple[Responses, dict[str, float]]:
    """A group for each list of answers, with the labels of the majority; the gold answer is b."""
    said = {"generator": [answered(answer) for answers in groups for answer in answers]}
    t = turn_of(settings(len(groups), len(groups[0])), "generator", said, task=task)
    return majority_labelled(t, t.sample("generator", t.problems(), len(groups[0])))


def labels_of(responses: Responses) -> list[bool]:
    return [one.label for one in responses]


def test_the_most_frequent_answer_is_taken_for_the_gold_one():
    found, metrics = labelled(["a", " a", "b"], ["c", "d", "c"], [None, None, "b"], [None, None, None],
                              ["d", "b", None])
    assert labels_of(found) == [
        True, True, False,  # not the gold answer, which one sample has
        True, False, True,
        False, False, True,  # of one answer, that one
        False, False, False,
        True, False, False,  # of two as frequent, the first
    ]
    # Labels and grades differ for a, a, b of the first group, c and c of the second, d and b of the last.
    assert metrics["generator/label_accuracy"] == pytest.approx(8 / 15)
    assert metrics["generator/labelled_right"] == pytest.approx(6 / 15)
    assert [one.is_correct for one in found].count(True) == 3  # the grade is kept


def test_answers_are_compared_as_the_task_compares_them():
    assert labels_of(labelled(["1/2", "1/2", "0.5", "2"], task=task_of("math"))[0]) == [True, True, True, False]
    same_length = task_of(is_correct=lambda problem, answer: len(answer) == len(problem.answer))
    assert labels_of(labelled(["aa", "aa", "xy", "x"], task=same_length)[0]) == [True, True, True, False]


def test_labels_take_the_place_of_grades_in_rewards():
    rl, (found, _) = settings(1, 3).rl, labelled(["a", "a", "b"])
    np.testing.assert_array_equal(outcome_reward(found, rl).reward_B, [1, 1, 0])
    said = [verification(verdict, format_score=0.0) for verdict in ("CORRECT", "INCORRECT", "INCORRECT")]
    rewards = verdict_reward(responses_of("verifier", found, 1, said), rl)
    np.testing.assert_allclose(rewards.terms[0].value, [1, 0, 1])
    assert rewards.terms[0].name == "agreement with the label"
    assert rewards.metrics["verifier/reward/correctness"] == pytest.approx(1 / 3)  # by the grade, the second alone


def test_a_verifier_learns_from_one_solution_of_each_problem_of_either_label():
    marks = [False, False, True] + [True, False, False] + [False] * 3 + [True] * 3
    records = [dataclasses.replace(solution(), label=label) for label in marks]
    found = responses_of("generator", [PROBLEM] * 4, 3, records)

    def rows(minibatches: int) -> list[int]:
        chosen = one_of_either_label(found, minibatches)
        return [next(row for row, one in enumerate(found) if one is each) for each in chosen]

    # In turn a right one, a wrong one; the last two problems have solutions of one label only.
    assert rows(1) == [2, 4, 6, 9]
    # Of two minibatches, problems 0 and 2 are one: each has a right one and a wrong one to look for.
    assert rows(2) == [2, 3, 6, 9]


def test_the_verifiers_turn_is_rewarded_by_the_label_of_what_it_judges():
    said = {"generator": [answered(answer) for answer in ("a", "a", "b", "b", "c", "b")],
            "verifier": [verification(verdict) for verdict in ("CORRECT", "INCORRECT", "CORRECT") * 2]}
    t = turn_of(settings(2, 3), "verifier", said, phase="warmup")
    lesson = judge_without_labels(t)
    # Of the first problem a right solution by the label, a, which the grade rejects; of the second a wrong one, c.
    assert [(answer_of(one.text), one.label, one.is_correct) for one in lesson.responses.parents] == [
        ("a", True, False), ("c", False, False)]
    np.testing.assert_array_equal(lesson.reward.terms[0].value, [1, 0, 1, 0, 1, 0])
    assert lesson.memory.label_counts == (3.0, 3.0)  # the first batch, as it is


def test_every_process_labels_its_share_and_all_have_the_same(monkeypatch):
    """Of two processes, each grades its own part of the solutions, and is sent what the other found."""
    answers = (["a", "a", "b"], ["c", None, "c"])
    other, graded = GradeReport((False, True, False, True), 0, 0, 0, ("",) * 4), []
    monkeypatch.setattr(loop_turn.hosts, "join_parts", lambda own: [*own, (other, "")])
    monkeypatch.setattr(loop_turn.hosts, "own_part", lambda items: items[:2])
    monkeypatch.setattr(own_grader, "grade_solutions", lambda task, problems, texts: graded.extend(texts) or (
        GradeReport((True, True), 1, 2, 0, ("", ""))))
    context = types.SimpleNamespace(timer=PhaseTimer(), task=task_of())
    t = turn_of(settings(2, 3), "generator", {"generator": [answered(one) for group in answers for one in group]})
    monkeypatch.setattr(t._work, "grade", loop_turn.PolicyWork(context, {}).grade)
    found, metrics = majority_labelled(t, t.sample("generator", t.problems(), 3))
    assert len(graded) == 2
    assert metrics["grader/label_errors"] == 1 and metrics["grader/label_timeouts"] == 2
    monkeypatch.undo()
    assert labels_of(found) == labels_of(labelled(*answers)[0]) == [True, True, False, True, False, True]


def test_groups_count_whose_majority_the_verifier_confirms():
    groups = ["a", "a", "b"], ["b", "b", "c"], [None, None, None], ["b", "c", "b"]
    verdicts = ["INCORRECT", "INVALID", "CORRECT",  # none of the two of the majority
                "CORRECT", "INCORRECT", "INCORRECT",  # half of them
                "CORRECT", "CORRECT", "CORRECT",  # there is no majority
                "CORRECT", "INCORRECT", "CORRECT"]
    said = {"generator": [answered(answer) for group in groups for answer in group],
            "verifier": [verification(verdict, format_score=0.0) for verdict in verdicts]}
    t = turn_of(settings(4, 3), "generator", said)
    lesson = solve_without_labels(t)
    rewards = lesson.reward
    assert rewards.metrics["generator/reward/outcome"] == 5 / 12, "the grade, not the label"
    assert rewards.terms[0].name == "label" and list(rewards.terms[0].value) == labels_of(lesson.responses)
    [(weight_B, outcome_BT)] = lesson.terms.values()
    np.testing.assert_array_equal(weight_B, np.repeat([False, True, False, True], 3))
    # Labels 1 1 0 of a group have mean 2/3 and sample deviation 1/sqrt(3); where none is right, there is no advantage.
    kept = np.array([[1, 1, -2], [1, 1, -2], [0, 0, 0], [1, -2, 1]]).reshape(-1) / 3 * np.sqrt(3)
    np.testing.assert_allclose(outcome_BT[:, 0], kept, rtol=1e-4)
    np.testing.assert_array_equal(outcome_BT[:, :2], np.repeat(outcome_BT[:, :1], 2, axis=1))
    assert lesson.metrics["generator/confirmed_groups"] == 0.5
    assert lesson.metrics["generator/confirmed_label_accuracy"] == 1.0
