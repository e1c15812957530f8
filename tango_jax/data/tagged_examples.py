"""Stage-1 examples from a file of tagged solutions (stage 0's, say): rows in, a function of an index out.

A row has `question` (or `problem`), `solution` in the generator's format and, where the verifier has a stage 1 of its
own, `verification` in the verifier's.
"""

from collections.abc import Callable
from typing import NamedTuple

from tango_jax.data.problem_sets import make_problem_order, split_examples
from tango_jax.data.row_fields import BadRow, text_of
from tango_jax.data.rows import read_rows
from tango_jax.data.task import SftExample
from tango_jax.grading import parse_solution, parse_verification
from tango_jax.records import Problem


class TaggedRow(NamedTuple):
    """One example for each role; `verification` is empty where the file has none."""

    problem: Problem
    solution: str
    num_steps: int
    verification: str


def read_tagged_rows(source: str, is_for_verifier: bool) -> list[TaggedRow]:
    """Every row of a file or hub id.

    Raises:
        ValueError: no such file, or a row without question, tagged solution or (for the verifier) verification.
    """
    rows = []
    for row in read_rows(source):
        fields = {str(key).lower(): value for key, value in row.fields.items()}
        try:
            question = text_of(fields, "question" if fields.get("question") is not None else "problem")
            solution = text_of(fields, "solution")
            verification = text_of(fields, "verification") if is_for_verifier else ""
        except BadRow as error:
            wanted = "question, solution" + (", verification" if is_for_verifier else "")
            raise ValueError(f"{row.where}: {error}; keys found: {', '.join(fields)}; keys wanted: {wanted}") from error
        parsed = parse_solution(solution)
        if not parsed.steps or parsed.answer is None:
            raise ValueError(f"{row.where}: the solution is not tagged: it has {len(parsed.steps)} <step> blocks and "
                             f"the answer {parsed.answer!r}; filter such rows, or give worked answers as "
                             "task.stage_one=gsm8k")
        if verification and not parse_verification(verification, len(parsed.steps)).aligned:
            raise ValueError(f"{row.where}: the verification does not judge each of the {len(parsed.steps)} steps; "
                             "filter such rows")
        rows.append(TaggedRow(Problem(row.id, question, parsed.answer), solution, len(parsed.steps), verification))
    return rows


class TaggedExamples(NamedTuple):
    """What a task needs of such a file."""

    sft_example: Callable[[str, str, int], SftExample]
    num_train: int
    num_heldout: int
    num_too_long: int


def make_tagged_examples(
    rows: list[TaggedRow], num_heldout: int, seed: int, tokens_over_fn: Callable[[Problem, str, str], int]
) -> TaggedExamples:
    """Part the rows by seed; those over the limits are left out.

    Raises:
        ValueError: too few rows remain.
    """
    row_of = {row.problem.id: row for row in rows}

    def tokens_over(problem: Problem) -> int:
        row = row_of[problem.id]
        return tokens_over_fn(problem, row.solution, row.verification)

    split = split_examples([row.problem for row in rows], tokens_over, num_heldout, seed)
    order = {"train": make_problem_order(split.train, seed), "heldout": make_problem_order(split.validation, seed)}

    def sft_example(role: str, part: str, index: int) -> SftExample:
        problem, solution, num_steps, verification = row_of[order[part](index).id]
        if role == "generator":
            return SftExample(problem, "", 0, solution)
        return SftExample(problem, solution, num_steps, verification)

    return TaggedExamples(sft_example, len(split.train), len(split.validation), split.num_too_long)
