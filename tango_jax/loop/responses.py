"""Parses responses: the text of a response and what it answers in, a Solution or a Verification out.

Runs after sampling and grading, before the rewards.
"""

from collections.abc import Sequence

from tango_jax.grading import parse_solution, parse_verification
from tango_jax.records import Problem, Solution, Verification
from tango_jax.tasks.task import Task
from tango_jax.text.tokenizer import token_of_character


def make_solution(
    task: Task, problem: Problem, text: str, ends: Sequence[int], is_correct: bool, is_truncated: bool = False
) -> Solution:
    """Parse one generator response; `ends` holds the number of characters complete after each token."""
    parsed = parse_solution(text, task.min_steps)
    return Solution(
        problem=problem,
        text=text,
        steps=parsed.steps,
        step_ends=tuple(token_of_character(ends, end - 1) for _, end in parsed.step_spans),
        format_score=parsed.format_score,
        is_correct=bool(is_correct),
        gold_steps=task.gold_steps(problem, parsed.steps) if task.gold_steps else None,
        token_ends=tuple(ends),
        is_truncated=bool(is_truncated),
    )


def make_verification(solution: Solution, text: str, ends: Sequence[int], is_truncated: bool) -> Verification:
    """Parse one verifier response; `ends` holds the number of characters complete after each token."""
    parsed = parse_verification(text, len(solution.steps), solution.format_score)
    return Verification(
        text=text,
        judgements=parsed.judgements,
        verdict=parsed.verdict,
        format_score=parsed.format_score,
        is_aligned=parsed.aligned,
        blocks=parsed.blocks,
        token_ends=tuple(ends),
        is_truncated=bool(is_truncated),
    )
