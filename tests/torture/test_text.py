"""The torture of the parsers and the grader in small; in full it runs with the other parts of `tests/torture`."""
import pytest

from tango_jax.grading import steps
from torture import answers, mutations


def test_mutated_outputs_survive():
    assert mutations.mutated_outputs(count=600, seed=1) == (600, 600, [])


def test_hostile_answers_survive():
    tried, survived, failures = answers.hostile_answers(count=5, seed=2)
    assert (survived, failures) == (tried, []) and tried == 10


@pytest.mark.parametrize("broken", [
    lambda text, tag: ((0, 4),), lambda text, tag: 1 / 0, lambda text, tag: ((5, 3), (1, 2)),
])
def test_what_does_not_survive_is_described(monkeypatch, broken):
    monkeypatch.setattr(steps, "find_blocks", broken)
    tried, survived, failures = mutations.mutated_outputs(count=4, seed=0)
    assert (tried, survived) == (4, 0)
    assert all(failure.startswith(f"output {index} of seed 0: ") for index, failure in enumerate(failures))


def test_an_answer_that_is_graded_otherwise_is_described(monkeypatch):
    case = answers.Case("7", "7", is_right=False)
    assert answers.grade_batch([case]) == ["graded right (read): '7' for '7'"]
    monkeypatch.setattr(answers, "grade_many", lambda texts, golds: 1 / 0)
    assert answers.grade_batch([case])[0].startswith("ZeroDivisionError")
