"""Responses in the place of a tiny random model's, whose own are never well formed: what a stage 1 without a teacher
keeps. The problems are those of support/own_problems.py."""

from array import array
from typing import NamedTuple

from tango_jax.grading import parse_solution
from tango_jax.loop.turn import RunContext
from tango_jax.method.texts import make_solution, make_verification
from tango_jax.records import Problem, Solution, Verification
from tango_jax.text.templates import judged


class Response(NamedTuple):
    """What a response is like."""

    is_formed: bool
    is_right: bool  # of a solution: its answer; of a verification: its verdict and its first judgement
    mark: str  # in the text, by which responses differ
    more: str = ""  # what the model goes on with after the format's end


def response(context: RunContext, parent: Problem | Solution, made: Response) -> Solution | Verification:
    if isinstance(parent, Problem):
        text = solution(parent, made.is_right, made.mark) + made.more if made.is_formed else f"It is {parent.answer}."
        return make_solution(context.task, parent, text, array("i", range(len(text))), made.is_right, bool(made.more))
    marks = [True] * len(parent.steps)
    # The gold answer is known here, and the first step's sum is read.
    verdict = f"\\boxed{{{parent.problem.answer}}}" in parent.text
    first = parse_solution(parent.text).steps[0]
    marks[0] = first.endswith(f" {parent.problem.answer}.") == made.is_right
    text = judged([f"{made.mark}{place}" for place in range(len(marks))], marks, is_right=verdict == made.is_right)
    text = f"{text}{made.more}" if made.is_formed else "Right."
    return make_verification(parent, text, array("i", range(len(text))), bool(made.more))


def solution(problem: Problem, is_right: bool, mark: str) -> str:
    a = (int(problem.answer) - 1) // 2
    answer = int(problem.answer) + (not is_right)
    return (f"<think>\n<step>{mark}: {a} + {a + 1} = {answer}.</step>\n<step>So it is {answer}.</step>\n</think>\n"
            f"<answer>\\boxed{{{answer}}}</answer>")
