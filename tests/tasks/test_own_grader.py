"""Graders of users: what they decide, when they are tried, and how they fail."""

import pytest

from tango_jax.cli.task_validation import check_task
from tango_jax.config import default_config
from tango_jax.grading import GradeReport
from tango_jax.loop.measure import fixed_pool
from tango_jax.method import load
from tango_jax.method.load import load_method
from tango_jax.records import Problem
from tango_jax.runtime import hosts, user_code
from tango_jax.runtime.checks import Mistakes
from tango_jax.tasks.own_grader import Grading, grade_solutions, grader_of, try_grader
from tango_jax.tasks.registry import make_task
from tango_jax.tasks.task import Task

PROBLEM = Problem("p7", "Name an even number.", "2")
EVEN = "def f(problem, answer):\n    return answer.isdigit() and int(answer) % 2 == 0\n"


def solved(answer: str) -> str:
    return f"<think><step>a</step></think><answer>\\boxed{{{answer}}}</answer>"


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = default_config()
    config.task.grader = "own.py:f"
    for role in ("generator", "verifier"):
        config[role].template, config[role].sft.steps = "plain", 0
    return config


@pytest.fixture
def task(config, tmp_path):
    """A task whose answers are graded by this text of own.py."""

    def make(text: str) -> Task:
        (tmp_path / "own.py").write_text(text)
        return Task("own", "string", 1, lambda index: PROBLEM, lambda index: PROBLEM, is_correct=grader_of(config.task),
                    pool_solution=lambda index: (PROBLEM, solved(str(index))))

    return make


def test_labels_need_a_grader_that_goes_by_the_answer(config, tmp_path):
    """Labels put the majority's answer in the place of the problem's, where not every grader looks."""
    config.arm = "no_labels"
    (tmp_path / "own.py").write_text("def f(problem, answer):\n    return answer == problem.answer\n")
    method = load_method(config)
    load.check_task(config, method, make_task(config, {}))
    (tmp_path / "own.py").write_text("ANSWERS = {}\n\ndef f(problem, answer):\n"
                                     "    return answer == ANSWERS.setdefault(problem.id, problem.answer)\n")
    forgetful = make_task(config, {})
    config.arm = "grpo"
    load.check_task(config, load_method(config), forgetful)
    config.arm = "no_labels"
    with pytest.raises(ValueError, match="arm=no_labels puts the majority's answer into problem.answer, and the grader "
                                         "does not use it: with problem.answer=.* it rejects this answer to"):
        load.check_task(config, method, make_task(config, {}))  # the function remembers the answers of the first call


def test_it_decides_in_place_of_the_comparison(task):
    texts = [solved("4"), solved("3"), solved("2"), "no box", solved("six"), "<answer>4</answer>"]
    report = grade_solutions(task(EVEN), [PROBLEM] * len(texts), texts)
    assert report.correct == (True, False, True, False, False, False)
    assert (report.errors, report.timeouts, report.overlong, set(report.failures)) == (0, 0, 0, {""})
    compared = grade_solutions(task(EVEN)._replace(is_correct=None), [PROBLEM] * len(texts), texts)
    assert compared.correct == (False, False, True, False, False, False)


def test_solutions_and_the_fixed_pool_are_graded_by_it(task):
    graded = task("import numpy\ndef f(problem, answer): return numpy.bool_(problem.id == 'p7' and answer > '1')\n")
    report = Grading(graded, [PROBLEM] * 4, [solved(answer) for answer in "0123"]).report()
    assert report == GradeReport((False, False, True, True), errors=0, timeouts=0, overlong=0)
    assert [solution.is_correct for solution in fixed_pool(graded, 4)] == [False, False, True, True]


def test_without_a_name_answers_are_compared():
    assert grader_of(default_config().task) is None


def test_any_task_is_graded_by_it(config, tmp_path):
    (tmp_path / "own.py").write_text(EVEN)
    made = make_task(config, {})
    assert (made.is_correct(PROBLEM, "4"), made.is_correct(PROBLEM, "5")) == (True, False)
    # The answer to a problem of last_letter is letters.
    assert made.notes[-1].startswith("warning: the grader rejects the gold answer of problem ")
    (tmp_path / "own.py").write_text("def f(problem, answer): return answer == problem.answer")
    assert not any("grader" in note for note in make_task(config, {}).notes)
    config.task.grader = ""
    assert make_task(config, {}).is_correct is None


# own.py, and the end of the error.
MISTAKES = {
    "other parameters": ("def f(answer): return True", "line 1: too many positional arguments; it is called as "
                         "f(problem, answer)"),
    "a number": ("def f(problem, answer):\n    return 1.0",
                 "line 1: it returned 1.0; it must return True or False (for "
                 "the answer '2' to problem 'p7'); the answer was made up to try the function before the run"),
    "an answer that is no number": ("def f(problem, answer):\n    return int(answer) == 2",
                                    "line 2: invalid literal for int() with base 10: '?' (for the answer '?' to "
                                    "problem 'p7'); the answer was made up to try the function before the run"),
    "an empty answer": ("def f(problem, answer):\n    return answer[0] == '2'",
                        "line 2: IndexError: string index out of range (for the answer '' to problem 'p7'); the answer "
                        "was made up to try the function before the run"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_found_before_the_run(task, what):
    text, message = MISTAKES[what]
    with pytest.raises(ValueError) as error:
        try_grader(task(text), PROBLEM)
    assert str(error.value) == f"task.grader=own.py:f: own.py, {message}"


def test_a_file_that_is_missing_is_one_of_the_mistakes_of_a_config(config):
    mistakes = Mistakes()
    check_task(config, mistakes, None)
    assert mistakes.messages[0].startswith("task.grader=own.py:f: there is no file own.py; ")


def test_a_grader_that_hangs_is_interrupted(task, monkeypatch):
    monkeypatch.setattr(user_code, "CALL_LIMIT_S", 1)
    graded = task("def f(problem, answer):\n    while True:\n        pass\n")
    with pytest.raises(ValueError, match=r"line [23]: TimeoutError: not done after 1 seconds"):
        grade_solutions(graded, [PROBLEM], [solved("2")])


def test_a_mistake_in_one_process_is_raised_in_all(task, monkeypatch):
    other = GradeReport((), 0, 0, 0), "the other one failed"
    monkeypatch.setattr(hosts, "join_parts", lambda items: [other, *items])
    with pytest.raises(ValueError, match=r"^the other one failed\. Once that is mended, the same command resumes from"):
        Grading(task(EVEN), [], []).report()
