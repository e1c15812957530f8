"""From sampled token ids back to meaning: text, step ends, parsed and graded records. Comes right after sampling."""

from collections.abc import Sequence

from tango_jax.grading import GradeReport, grade_many, parse_solution, parse_verification
from tango_jax.records import Problem, Rollout, Solution, Verification
from tango_jax.tasks.task import Task
from tango_jax.text.tokenizer import Tokenizer, token_of_character


def read_solutions(
    task: Task, tokenizer: Tokenizer, problems: Sequence[Problem], rollout: Rollout, group_size: int
) -> tuple[list[Solution], GradeReport]:
    """One Solution per response (prompt-major), and how the grading of the batch went."""
    owners = [problem for problem in problems for _ in range(group_size)]
    decoded = [tokenizer.decode_with_ends(tokens) for tokens in rollout.tokens]
    report = grade_many([text for text, _ in decoded], [problem.answer for problem in owners], task.grade_kind)
    solutions = [
        make_solution(task, problem, text, ends, is_correct, is_truncated)
        for problem, (text, ends), is_correct, is_truncated in zip(
            owners, decoded, report.correct, rollout.is_truncated_B, strict=True
        )
    ]
    return solutions, report


def make_solution(
    task: Task, problem: Problem, text: str, ends: Sequence[int], is_correct: bool, is_truncated: bool = False
) -> Solution:
    """Parse one response; `ends` are the characters complete after each token."""
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


def read_verifications(
    tokenizer: Tokenizer, solutions: Sequence[Solution], rollout: Rollout, group_size: int
) -> list[Verification]:
    """One Verification per response, prompt-major: `group_size` of them for each solution."""
    verifications = []
    for b, tokens in enumerate(rollout.tokens):
        solution = solutions[b // group_size]
        text, ends = tokenizer.decode_with_ends(tokens)
        parsed = parse_verification(text, len(solution.steps), solution.format_score)
        verifications.append(
            Verification(
                text=text,
                judgements=parsed.judgements,
                verdict=parsed.verdict,
                format_score=parsed.format_score,
                is_aligned=parsed.aligned,
                blocks=parsed.blocks,
                token_ends=tuple(ends),
                is_truncated=bool(rollout.is_truncated_B[b]),
            )
        )
    return verifications
