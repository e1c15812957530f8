"""The interface of a task: its problems, how answers are graded and, where available, step labels and SFT text."""

from collections.abc import Callable
from typing import NamedTuple

from tango_jax.records import Problem

# Streams of training problems, which turns draw from: the generator's, the verifier's, and a
# curriculum, which reaches from the size of the verifier's problems to the size of the generator's.
STREAMS = ("train", "verifier", "curriculum")


class SftExample(NamedTuple):
    """One example to imitate: the contents of the prompt, and the response."""

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
    # Fixed solutions on which the verifier is evaluated; None: there are none.
    pool_solution: Callable[[int], tuple[Problem, str]] | None = None
    # (problem, steps) -> one label per step, or None if they are not known; None: the task has no step labels.
    gold_steps: Callable[[Problem, tuple[str, ...]], tuple[bool, ...] | None] | None = None
    # (role, "train" or "heldout", index) -> text to imitate in stage 1
    sft_example: Callable[[str, str, int], SftExample] | None = None
    # (name of a prompt, "train" or "heldout", index) -> the same for a prompt beside the roles' own (text/prompts.py)
    further_example: Callable[[str, str, int], SftExample] | None = None
    sft_roles: tuple[str, ...] = ()  # roles for which there are examples; of a user's task, empty means both
    notes: tuple[str, ...] = ()  # lines to log at the start, such as how many problems were left out
    # Like `train_problem`, for the verifier's turns; None: they take the problems of `train_problem`.
    verifier_problem: Callable[[int], Problem] | None = None
    curriculum_problem: Callable[[int], Problem] | None = None  # None: there is no curriculum
    # (problem, steps) -> a name for the kind of each step or mistake, by which the report counts the verifier's errors,
    # such as "two letters exchanged"; None: the task does not name any.
    step_kinds: Callable[[Problem, tuple[str, ...]], tuple[str, ...]] | None = None
    # (problem, answer) -> whether the answer, the text in a solution's last box, is right; None: it is compared with
    # the problem's own, as `grade_kind` says. The setting `task.grader` takes its place.
    is_correct: Callable[[Problem, str], bool] | None = None
    fingerprint: str = ""  # of problems that are read: a run resumes only with the same ones; empty: they are made here
    sft_fingerprint: str = ""  # the same of the text to imitate

    def stream(self, name: str) -> Callable[[int], Problem] | None:
        """The problems of one of STREAMS; None if the task does not have them."""
        if name == "curriculum":
            return self.curriculum_problem
        return (self.verifier_problem if name == "verifier" else None) or self.train_problem
