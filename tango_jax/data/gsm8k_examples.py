"""Stage-1 examples and the verifier's fixed pool from GSM8K rows: raw rows in, pure functions of an index out.

Stage of the loop: SFT of both roles, and the evaluation of the verifier. The rows are parted once by seed: what is held
out for the loss and for the pool is never imitated.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tango_jax.data.gsm8k import VerifierExample, gsm8k_solution_text, gsm8k_verifier_example
from tango_jax.data.problem_sets import make_problem_order, split_examples
from tango_jax.data.row_formats import to_problem
from tango_jax.data.rows import Row
from tango_jax.grading import parse_solution
from tango_jax.records import Problem

_POOL = "/pool/"
_POOL_SEED = 1 << 20  # apart from the examples that are imitated


class Gsm8kExamples(NamedTuple):
    """The functions that a task needs of worked answers (see `problems.Task`)."""

    sft_example: Callable[[str, str, int], tuple[Problem, str, int, str]]  # the fields of problems.SftExample
    pool_solution: Callable[[int], tuple[Problem, str]]
    gold_steps: Callable[[Problem, tuple[str, ...]], tuple[bool, ...] | None]  # None but for the pool's solutions
    num_train: int
    num_heldout: int
    num_too_long: int
    heldout_ids: frozenset[str]  # problems of the held-out loss and the pool


def make_gsm8k_examples(
    rows: Sequence[Row],
    num_heldout: int,
    seed: int,
    min_steps: int = 3,
    tokens_over_fn: Callable[[Problem, str, str], int] = lambda problem, solution, verification: 0,
) -> Gsm8kExamples:
    """Examples of rows that have at least `min_steps` lines, so that none shows a solution that loses format score.

    `tokens_over_fn` (see `prompt_lengths.make_tokens_over`): rows for which it is above 0 are left out.

    Raises:
        ValueError: a row is not GSM8K's, or too few rows have that many lines.
    """
    fields_of, problems = {}, []
    for row in rows:
        problem = to_problem(row, "gsm8k")
        if problem.size >= min_steps:
            fields_of[problem.id] = row.fields
            problems.append(problem)

    def tokens_over(problem: Problem) -> int:
        fields = fields_of[problem.id]
        verification = gsm8k_verifier_example(fields, seed, 0).verification
        return tokens_over_fn(problem, gsm8k_solution_text(fields), verification)

    split = split_examples(problems, tokens_over, num_heldout, seed)
    if not split.validation:
        raise ValueError(f"num_heldout={num_heldout} of {len(problems)} rows; hold out at least 1")
    order = {"train": make_problem_order(split.train, seed), "heldout": make_problem_order(split.validation, seed)}

    def sft_example(role: str, part: str, index: int) -> tuple[Problem, str, int, str]:
        problem = order[part](index)
        if role == "generator":
            return problem, "", 0, gsm8k_solution_text(fields_of[problem.id])
        example = gsm8k_verifier_example(fields_of[problem.id], seed, index)
        return problem, example.solution, len(example.is_right), example.verification

    def pool_example(index: int) -> tuple[Problem, VerifierExample]:
        problem = order["heldout"](index)
        return problem, gsm8k_verifier_example(fields_of[problem.id], seed + _POOL_SEED, index)

    def pool_solution(index: int) -> tuple[Problem, str]:
        problem, example = pool_example(index)
        return dataclasses.replace(problem, id=f"{problem.id}{_POOL}{index}"), example.solution

    def gold_steps(problem: Problem, steps: tuple[str, ...]) -> tuple[bool, ...] | None:
        _, is_pool, index = problem.id.rpartition(_POOL)
        if not is_pool:
            return None
        example = pool_example(int(index))[1]
        return example.is_right if parse_solution(example.solution).steps == steps else None

    heldout_ids = frozenset(problem.id for problem in split.validation)
    sizes = len(split.train), len(split.validation), split.num_too_long
    return Gsm8kExamples(sft_example, pool_solution, gold_steps, *sizes, heldout_ids)
