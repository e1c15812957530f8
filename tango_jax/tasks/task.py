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
    grade_kind: str  # tango_jax.grading.grade's `kind`: math, string, python or choice
    min_steps: int  # a solution with fewer step blocks loses format score
    train_problem: Callable[[int], Problem]  # number of problems seen since the start of training -> the next one
    test_problem: Callable[[int], Problem]
    num_test: int | None = None  # test problems there are; None: as many as one asks for
    # Fixed solutions that the verifier is measured on; None: there are none.
    pool_solution: Callable[[int], tuple[Problem, str]] | None = None
    # (problem, steps) -> a label for each step, or None where it has none; None: the task has no step labels.
    gold_steps: Callable[[Problem, tuple[str, ...]], tuple[bool, ...] | None] | None = None
    # (role, "train" or "heldout", index) -> text to imitate in stage 1
    sft_example: Callable[[str, str, int], SftExample] | None = None
    sft_roles: tuple[str, ...] = ()  # roles that there are examples for
    notes: tuple[str, ...] = ()  # what to tell at start: how many problems, how many left out
