"""The interface of a task."""

from collections.abc import Callable
from typing import NamedTuple

from tango_jax.records import Problem

# Streams of training problems. The curriculum reaches from the size of the verifier's problems to the generator's.
STREAMS = ("train", "verifier", "curriculum")


class SftExample(NamedTuple):
    problem: Problem
    solution: str  # the solution that the verifier judges; empty for the generator
    num_steps: int  # number of steps in that solution
    response: str
    prompt: str = ""  # the name of what it answers (text/prompts.py); empty: the role's own
    verification: str = ""  # of the solution, in the prompts of a second try and of a second judgement


class Task(NamedTuple):
    """Everything that depends on the task. Functions of an index are pure, so the data cursor is one integer."""

    name: str
    grade_kind: str  # how answers are compared, tango_jax.grading.grade's `kind`: math, string, python, choice or text
    min_steps: int  # a solution with fewer step blocks loses format score
    train_problem: Callable[[int], Problem]  # number of problems taken since the start of training -> the next one
    test_problem: Callable[[int], Problem]
    num_test: int | None = None  # number of test problems; None: unlimited
    # Fixed solutions on which the verifier is evaluated.
    pool_solution: Callable[[int], tuple[Problem, str]] | None = None
    # (problem, steps) -> one label per step, or None if unknown.
    gold_steps: Callable[[Problem, tuple[str, ...]], tuple[bool, ...] | None] | None = None
    # (role, "train" or "heldout", index) -> text to imitate in stage 1
    sft_example: Callable[[str, str, int], SftExample] | None = None
    # (name of a further prompt (text/prompts.py), "train" or "heldout", index) -> text to imitate
    further_example: Callable[[str, str, int], SftExample] | None = None
    sft_roles: tuple[str, ...] = ()  # roles for which there are examples; of a user's task, empty means both
    notes: tuple[str, ...] = ()  # lines to log at the start, such as how many problems were left out
    # As `train_problem`, for the verifier's turns; None: they take `train_problem`.
    verifier_problem: Callable[[int], Problem] | None = None
    curriculum_problem: Callable[[int], Problem] | None = None  # None: there is no curriculum
    # (problem, steps) -> the kind of each step or mistake, such as "two letters exchanged", for the report.
    step_kinds: Callable[[Problem, tuple[str, ...]], tuple[str, ...]] | None = None
    # (problem, answer in the last box) -> whether it is right; None: compared by `grade_kind`. `task.grader` replaces
    # it.
    is_correct: Callable[[Problem, str], bool] | None = None
    fingerprint: str = ""  # of problems that are read: a run resumes only with the same ones; empty: they are made here
    sft_fingerprint: str = ""  # the same of the text to imitate
    num_pool: int | None = None  # number of different solutions of `pool_solution`, from index 0; None: unlimited

    def stream(self, name: str) -> Callable[[int], Problem] | None:
        """None if the task does not have this stream."""
        if name == "curriculum":
            return self.curriculum_problem
        return (self.verifier_problem if name == "verifier" else None) or self.train_problem
