"""Stage-1 examples and the verifier's fixed pool from GSM8K rows. Held-out rows are never imitated."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tango_jax.config import ROLES
from tango_jax.data.problem_sets import question_key
from tango_jax.data.row_formats import to_problem
from tango_jax.data.rows import Row
from tango_jax.grading import parse_solution
from tango_jax.records import Problem
from tango_jax.tasks.gsm8k import VerifierExample, gsm8k_solution_text, gsm8k_verifier_example
from tango_jax.tasks.prompt_lengths import Over
from tango_jax.tasks.splits import make_problem_order, split_examples
from tango_jax.tasks.task import SftExample

_POOL = "/pool/"
_POOL_SEED = 1 << 20  # offset that separates the pool's seeds from those of the examples to imitate


class Gsm8kExamples(NamedTuple):
    sft_example: Callable[[str, str, int], SftExample]
    pool_solution: Callable[[int], tuple[Problem, str]]
    gold_steps: Callable[[Problem, tuple[str, ...]], tuple[bool, ...] | None]  # None except for the pool's solutions
    num_train: int
    num_heldout: int
    num_too_long: int
    num_shortened: int  # of those that are too long: their solutions would be cut off in the verifier's prompt
    num_excluded: int  # of the rows with enough lines
    heldout: frozenset[str]  # `question_key` of the problems used for the held-out loss and the pool
    unfit: tuple[Problem, ...]  # drawn to be held out, and too long: another arm may have room for them


def make_gsm8k_examples(
    rows: Sequence[Row],
    num_heldout: int,
    seed: int,
    min_steps: int = 3,
    over_fn: Callable[[str, SftExample], Over] = lambda role, example: Over(),
    excluded: frozenset[str] = frozenset(),
) -> Gsm8kExamples:
    """Make examples from rows with at least `min_steps` lines: shorter solutions lose format score.

    `over_fn`, `excluded`: see `make_tagged_examples`. Raises ValueError: a row is not in the GSM8K format, or too few
    rows remain.
    """
    fields_of, problems, num_excluded = {}, [], 0
    for row in rows:
        problem = to_problem(row, "gsm8k")
        if problem.size < min_steps:
            continue
        if question_key(problem.question) in excluded:
            num_excluded += 1
            continue
        fields_of[problem.id] = row.fields
        problems.append(problem)

    def example_of(role: str, problem: Problem, index: int) -> SftExample:
        fields = fields_of[problem.id]
        if role == "generator":
            return SftExample(problem, "", 0, gsm8k_solution_text(fields))
        example = gsm8k_verifier_example(fields, seed, index)
        return SftExample(problem, example.solution, len(example.is_right), example.verification)

    def over(problem: Problem) -> Over:
        both = (over_fn(role, example_of(role, problem, 0)) for role in ROLES)
        return Over(*map(max, zip(*both, strict=True)))

    split = split_examples(problems, over, num_heldout, seed)
    if not split.validation:
        raise ValueError(f"num_heldout={num_heldout} of {len(problems)} rows; hold out at least 1")
    order = {"train": make_problem_order(split.train, seed), "heldout": make_problem_order(split.validation, seed)}

    def sft_example(role: str, part: str, index: int) -> SftExample:
        return example_of(role, order[part](index), index)

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

    heldout = frozenset(question_key(problem.question) for problem in split.validation)
    sizes = len(split.train), len(split.validation), split.num_too_long, split.num_shortened, num_excluded
    return Gsm8kExamples(sft_example, pool_solution, gold_steps, *sizes, heldout, split.unfit)
