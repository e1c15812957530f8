"""What a task is: where problems come from, how answers are graded and, where it has them, step labels and SFT text."""

from collections.abc import Callable
from typing import NamedTuple

from tango_jax.records import Problem


class SftExample(NamedTuple):
    """Text to imitate: the prompt's material and the response."""

    problem: Problem
    solution: str  # the generator's response, or, for the verifier, the solution that it judges
    num_steps: int
    response: str


class Task(NamedTuple):
    """Everything that depends on the task. Functions of an index are pure, so a data cursor is one integer."""

    name: str
    grade_kind: str  # tango_jax.grading.grade's `kind`
    min_steps: int
    train_problem: Callable[[int], Problem]
    test_problem: Callable[[int], Problem]
    num_test: int | None  # test problems there are; None: as many as one asks for
    pool_solution: Callable[[int], tuple[Problem, str]] | None  # fixed solutions that the verifier is measured on
    gold_steps: Callable[[Problem, tuple[str, ...]], tuple[bool, ...] | None] | None  # None: no labels for this one
    sft_example: Callable[[str, str, int], SftExample]  # (role, "train" or "heldout", index)
    sft_roles: tuple[str, ...]  # roles that there are examples for
    notes: tuple[str, ...] = ()  # what to tell at start: how many problems, how many left out
