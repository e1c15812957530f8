"""Labels by the majority, the solutions that a verifier learns from, and which groups count, worked by hand."""

import dataclasses

import numpy as np
import pytest

from tango_jax.config import default_config
from tango_jax.grading import GradeReport
from tango_jax.records import Counters, Problem, Responses, Rollout, Solution, Verification
from tango_jax.rl import labels
from tango_jax.rl.advantages import grpo_outcome_B
from tango_jax.rl.credit import TurnSoFar, outcome_reward, verdict_reward, verified_majority_credit
from tango_jax.rl.labels import majority_labels, one_of_either_label
from tango_jax.rl.schedule import Turn
from tango_jax.tasks.task import Task

GOLD = "b"


def task_of(kind: str = "string", is_correct=None) -> Task:
    return Task("t", kind, min_steps=1, train_problem=None, test_problem=None, is_correct=is_correct)


def solved(*groups: list[str | None]) -> Responses:
    """A group for each list of answers; the gold answer is b."""
    records = []
    for number, answers in enumerate(groups):
        for answer in answers:
            text = "" if answer is None else f"<think><step>s</step></think><answer>\\boxed{{{answer}}}</answer>"
            records.append(Solution(Problem(str(number), "q", GOLD), text, ("s",), (0,), 1.0, answer == GOLD, None))
    count = len(records)
    rollout = Rollout((np.ones(2, np.int32),) * count, (np.zeros(2, np.float32),) * count, np.zeros(count, bool), 2, 2)
    problems = [records[first].problem for first in range(0, count, len(groups[0]))]
    return Responses("generator", problems, [[1]] * len(groups), len(groups[0]), rollout, records, {})


def labels_of(responses: Responses) -> list[bool]:
    return [solution.label for solution in responses.records]


def test_the_most_frequent_answer_is_taken_for_the_gold_one():
    labelled = majority_labels(solved(["a", " a", "b"], ["c", "d", "c"], [None, None, "b"], [None, None, None],
                                      ["d", "b", None]), task_of())  # fmt: skip
    assert labels_of(labelled) == [
        True, True, False,  # not the gold answer, which one sample has
        True, False, True,
        False, False, True,  # of one answer, that one
        False, False, False,
        True, False, False,  # of two as frequent, the first
    ]  # fmt: skip
    # Labels and grades differ for a, a, b of the first group, c and c of the second, d and b of the last.
    assert labelled.metrics["generator/label_accuracy"] == pytest.approx(8 / 15)
    assert labelled.metrics["generator/labelled_right"] == pytest.approx(6 / 15)
    assert [solution.is_correct for solution in labelled.records].count(True) == 3  # the grade is kept


def test_answers_are_compared_as_the_task_compares_them():
    labelled = majority_labels(solved(["1/2", "1/2", "0.5", "2"]), task_of("math"))
    assert labels_of(labelled) == [True, True, True, False]
    same_length = task_of(is_correct=lambda problem, answer: len(answer) == len(problem.answer))
    assert labels_of(majority_labels(solved(["aa", "aa", "xy", "x"]), same_length)) == [True, True, True, False]


def test_labels_take_the_place_of_grades_in_rewards():
    rl, labelled = default_config().rl, majority_labels(solved(["a", "a", "b"]), task_of())
    rewards = outcome_reward({"generator": labelled}, rl)
    np.testing.assert_array_equal(rewards.reward_B, [1, 1, 0])
    said = [Verification("", (True,), verdict, 0.0, True, ("",)) for verdict in ("CORRECT", "INCORRECT", "INCORRECT")]
    judged = dataclasses.replace(labelled, role="verifier", parents=labelled.records, group_size=1, records=said)
    rewards = verdict_reward({"verifier": judged}, rl)
    np.testing.assert_allclose(rewards.terms[0].value, [1, 0, 1])
    assert rewards.terms[0].name == "agreement with the label"
    assert rewards.metrics["verifier/reward/correctness"] == pytest.approx(1 / 3)  # by the grade, the second alone


def test_a_verifier_learns_from_one_solution_of_each_problem_of_either_label():
    groups = solved(*[["?"] * 3] * 4)
    marks = [False, False, True] + [True, False, False] + [False] * 3 + [True] * 3
    records = [dataclasses.replace(solution, label=label)
               for solution, label in zip(groups.records, marks, strict=True)]  # fmt: skip
    # In turn a right one, a wrong one; the last two problems have solutions of one label only.
    labelled = dataclasses.replace(groups, records=records)
    np.testing.assert_array_equal(one_of_either_label(labelled, 1), [2, 4, 6, 9])
    # Of two minibatches, problems 0 and 2 are one: each has a right one and a wrong one to look for.
    np.testing.assert_array_equal(one_of_either_label(labelled, 2), [2, 3, 6, 9])


def test_every_process_labels_its_share_and_all_have_the_same(monkeypatch):
    """Of two processes, each grades its own part of the solutions, and is sent what the other found."""
    groups, whole = (solved(["a", "a", "b"], ["c", None, "c"]) for _ in range(2))
    parts, graded = [(True, True), (False, True, False, True)], []
    monkeypatch.setattr(labels.hosts, "join_parts", lambda own: [*own, *parts[1]] if len(own) == 2 else list(own))
    monkeypatch.setattr(labels.hosts, "own_part", lambda items: items[:2])
    monkeypatch.setattr(labels, "grade_own_solutions",
                        lambda task, problems, texts: graded.extend(texts) or GradeReport((True, True), 1, 2, 0))
    labelled = majority_labels(groups, task_of())
    assert len(graded) == 2
    assert labelled.metrics["grader/label_errors"] == 1 and labelled.metrics["grader/label_timeouts"] == 2
    monkeypatch.undo()
    assert labels_of(labelled) == labels_of(majority_labels(whole, task_of())) == [True, True, False, True, False, True]


def test_groups_count_whose_majority_the_verifier_confirms():
    labelled = majority_labels(solved(["a", "a", "b"], ["b", "b", "c"], [None, None, None], ["b", "c", "b"]), task_of())
    verdicts = ["INCORRECT", "INVALID", "CORRECT",  # none of the two of the majority
                "CORRECT", "INCORRECT", "INCORRECT",  # half of them
                "CORRECT", "CORRECT", "CORRECT",  # there is no majority
                "CORRECT", "INCORRECT", "CORRECT"]  # fmt: skip
    said = [Verification("", (True,), verdict, 0.0, True, ("",)) for verdict in verdicts]
    judged = dataclasses.replace(labelled, role="verifier", parents=labelled.records, group_size=1, records=said)
    config = default_config()
    rewards = outcome_reward({"generator": labelled}, config.rl)
    assert rewards.metrics["generator/reward/outcome"] == 5 / 12, "the grade, not the label"
    assert rewards.terms[0].name == "label" and list(rewards.terms[0].value) == labels_of(labelled)
    reward_B = rewards.reward_B
    answers, is_action_BT = {"generator": labelled, "verifier": judged}, np.ones((12, 2), bool)
    turn = Turn(0, "generator", "generator", 0)
    credit = verified_majority_credit(TurnSoFar(config, turn, answers, reward_B, is_action_BT, Counters()))
    kept_B = np.repeat([False, True, False, True], 3)
    expected_B = np.where(kept_B, grpo_outcome_B(reward_B, 3), 0.0)
    np.testing.assert_allclose(credit.adv_BT, np.repeat(expected_B[:, None], 2, axis=1), rtol=1e-6)
    assert credit.metrics["generator/confirmed_groups"] == 0.5
    assert credit.metrics["generator/confirmed_label_accuracy"] == 1.0
    term = credit.terms[0]
    np.testing.assert_allclose(term.weight[:, None] * term.value, credit.adv_BT)
