"""User graders. `task.grader` names a function, as FILE.py:name or package.module:name:

    name(problem, answer) -> bool

`problem` is a `records.Problem`, and `answer` the text in the last box; without a box a solution is wrong. The grader
replaces the comparison with `problem.answer` everywhere; `python -m tango_jax.evaluate` takes it as --grader. Stage 0
and that command store a digest of its file with every grade, and grade again when it differs.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
from ml_collections import ConfigDict

from tango_jax.grading import FAILURES, GradeReport, answer_of, grade_many
from tango_jax.records import Problem
from tango_jax.runtime import hosts, user_code
from tango_jax.runtime.checks import cut, shortened
from tango_jax.runtime.user_code import UserFunction, load_function, source_digest

PARAMETERS = ("problem", "answer")
MADE_UP = ("?", "")  # models write anything


class Graded(Protocol):
    grade_kind: str
    is_correct: Callable[[Problem, str], bool] | None


@dataclasses.dataclass(frozen=True)
class OwnGrader:
    """A user's (problem, answer) -> bool, with errors and results checked."""

    function: UserFunction
    digest: str  # of its source, which tells grades that an earlier version gave

    @property
    def name(self) -> str:
        return self.function.name

    def __call__(self, problem: Problem, answer: str) -> bool:
        about = f"for the answer {cut(repr(answer))} to problem {cut(repr(problem.id))}"
        result = self.function.call(problem, answer, about=about, limit_s=user_code.CALL_LIMIT_S)
        if not is_grade(result):
            self.function.refuse(f"it returned {shortened(result)}; it must return True or False", about)
        return result


def load_grader(key: str, name: str) -> OwnGrader | None:
    """None if the name is empty. Raises ValueError: `name` cannot be loaded, or takes other parameters."""
    return OwnGrader(load_function(key, name, PARAMETERS), source_digest(name)) if name else None


def version_of(grader: OwnGrader | None) -> str:
    return grader.digest if grader else ""


def grader_of(task: ConfigDict) -> OwnGrader | None:
    return load_grader("task.grader", task.grader)


def is_grade(result: object) -> bool:
    return isinstance(result, (bool, np.bool_))


def try_grader(graded: Graded, problem: Problem) -> list[str]:
    """Call a user's grader on made-up answers; returns warnings. Raises ValueError: it failed or returned no bool."""
    if graded.is_correct is None:
        return []
    try:
        accepts_own, *_ = [graded.is_correct(problem, answer) for answer in (problem.answer, *MADE_UP)]
    except ValueError as error:
        raise ValueError(f"{error}; the answer was made up to try the function before the run") from error
    if accepts_own:
        return []
    return [f"warning: the grader rejects the gold answer of problem {problem.id}, {shortened(problem.answer)}"]


def check_goes_by_answer(graded: Graded, problems: Sequence[Problem], shown: str) -> None:
    """Raise ValueError if a user's grader ignores `problem.answer`, which majority labels replace."""
    first = problems[0]
    other = next((problem.answer for problem in problems if problem.answer != first.answer), "")
    if other and graded.is_correct and not graded.is_correct(dataclasses.replace(first, answer=other), other):
        raise ValueError(f"{shown} puts the majority's answer into problem.answer, and the grader does not use it: "
                         f"with problem.answer={shortened(other)} it rejects this answer to problem {first.id}. Choose "
                         "another arm, or a grader that compares with problem.answer")


class Grading:
    """Grades one solution text per problem: each process its own, then all exchange what they found.

    The math library's worker processes grade while this process goes on. What this process does by itself, comparisons
    of text and users' functions, is done when the constructor returns: it would slow down what goes on, and the time
    limit of a function interrupts the main thread alone.
    """

    def __init__(self, graded: Graded, problems: Sequence[Problem], texts: Sequence[str]):
        self.beside_s = 0.0  # seconds of grading beside this process's other work, until the report was wanted
        self._began, self._thread = time.perf_counter(), None
        if graded.is_correct is None and graded.grade_kind == "math":
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grade")
            self._own = self._thread.submit(_graded_or_mistake, graded, problems, texts)
            self._thread.shutdown(wait=False)
        else:
            self._own = Future()
            self._own.set_result(_graded_or_mistake(graded, problems, texts))

    def report(self) -> GradeReport:
        """Of all processes' solutions, in order. All must call this, and at the same place: it exchanges. Raises
        ValueError, in all processes: a user's grader failed in one, or its workers cannot start."""
        wanted = time.perf_counter()
        own, mistake, ended = self._own.result()
        if self._thread is not None:
            self.beside_s = min(ended, wanted) - self._began
        parts = hosts.join_parts([(own, mistake)])
        hosts.raise_first(mistake for _, mistake in parts)
        reports = [report for report, _ in parts]
        return GradeReport(
            tuple(bool(correct) for one in reports for correct in one.correct),
            **{name: sum(getattr(one, name) for one in reports) for name in FAILURES},
            failures=tuple(failure for one in reports for failure in one.failures),
        )


def _graded_or_mistake(
    graded: Graded, problems: Sequence[Problem], texts: Sequence[str]
) -> tuple[GradeReport, str, float]:
    """Also the time at the end (time.perf_counter())."""
    report, mistake = GradeReport((), 0, 0, 0), ""
    try:
        report = grade_solutions(graded, problems, texts)
    except (ValueError, RuntimeError) as error:
        mistake = str(error)
    return report, mistake, time.perf_counter()


def grade_solutions(graded: Graded, problems: Sequence[Problem], texts: Sequence[str]) -> GradeReport:
    """Grade one solution text per problem. Raises ValueError: the user's function failed; RuntimeError: the worker
    processes of the math library cannot start."""
    if graded.is_correct is None:
        return grade_many(texts, [problem.answer for problem in problems], graded.grade_kind)
    answers = [answer_of(text) for text in texts]
    correct = tuple(
        answer is not None and bool(graded.is_correct(problem, answer))
        for problem, answer in zip(problems, answers, strict=True)
    )
    return GradeReport(correct, errors=0, timeouts=0, overlong=0, failures=("",) * len(correct))
