"""Stage-1 examples from tagged solutions, such as the output of stage 0.

A row has `question` (or `problem`), `solution` and, if the verifier has its own stage 1, `verification`.
`task.stage_one` names a file, or the workdir of stage 0 with its train.parquet. A validation.parquet beside it gives
the held-out loss; otherwise whole questions of the file are held out.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tango_jax.data.problem_sets import question_key
from tango_jax.data.row_fields import BadRow, check_keys, text_of
from tango_jax.data.rows import HUB_PREFIX, read_rows
from tango_jax.data.teacher_rows import FILES
from tango_jax.grading import parse_solution, parse_verification
from tango_jax.records import Problem
from tango_jax.tasks.prompt_lengths import Over
from tango_jax.tasks.splits import make_problem_order, split_examples
from tango_jax.tasks.task import SftExample


class TaggedRow(NamedTuple):
    problem: Problem
    solution: str
    num_steps: int
    verification: str

    def example(self, role: str) -> SftExample:
        if role == "generator":
            return SftExample(self.problem, "", 0, self.solution)
        return SftExample(self.problem, self.solution, self.num_steps, self.verification)

    def over(self, over_fn: Callable[[str, SftExample], Over], roles: Sequence[str]) -> Over:
        """`roles`: those that imitate it."""
        return Over(*map(max, zip(*(over_fn(role, self.example(role)) for role in roles), strict=True)))


class TaggedRows(NamedTuple):
    rows: list[TaggedRow]
    heldout: list[TaggedRow]  # from a file of their own; if empty, some of `rows` are held out


def read_stage_one(source: str, is_for_verifier: bool, stops: bool = False) -> TaggedRows:
    """Rows to imitate and, if they have their own file, held-out rows. Raises ValueError as `read_tagged_rows`."""
    path = Path(source).expanduser()
    if source.startswith(HUB_PREFIX):
        return TaggedRows(read_tagged_rows(source, is_for_verifier, stops), [])
    if path.is_dir() and (path / FILES[0]).is_file():
        path = path / FILES[0]
    rows, beside = read_tagged_rows(str(path), is_for_verifier, stops), path.with_name(FILES[1])
    if path.name != FILES[0] or not beside.is_file():
        return TaggedRows(rows, [])
    try:
        return TaggedRows(rows, read_tagged_rows(str(beside), is_for_verifier, stops, may_be_empty=True))
    except ValueError as error:
        raise ValueError(f"{error} (read for the held-out loss because it is beside {FILES[0]}; move it elsewhere to "
                         f"hold out rows of {FILES[0]} instead)") from error


def read_tagged_rows(
    source: str, is_for_verifier: bool, stops: bool = False, may_be_empty: bool = False
) -> list[TaggedRow]:
    """Read a file or hub id. Raises ValueError: it does not exist, or a row lacks its question, a tagged solution or
    (for the verifier) a verification with a judgement of each step and a verdict. `stops`: judgements may end at the
    first INCORRECT."""
    rows = []
    for row in read_rows(source, may_be_empty):
        fields = {str(key).lower(): value for key, value in row.fields.items()}
        try:
            check_keys(row.fields)
            question = text_of(fields, "question" if fields.get("question") is not None else "problem")
            solution = text_of(fields, "solution")
            verification = text_of(fields, "verification") if is_for_verifier else ""
        except BadRow as error:
            wanted = "question, solution" + (", verification" if is_for_verifier else "")
            found = ", ".join(map(str, row.fields))
            raise ValueError(f"{row.where}: {error}; keys found: {found}; keys wanted: {wanted}") from error
        parsed = parse_solution(solution)
        if not parsed.steps or parsed.answer is None:
            raise ValueError(f"{row.where}: the solution is not tagged: it has {len(parsed.steps)} <step> blocks and "
                             f"the answer {parsed.answer!r}; filter out such rows, or use task.stage_one=gsm8k for "
                             "worked answers")
        judged = parse_verification(verification, len(parsed.steps), stops=stops)
        if verification and not judged.aligned:
            raise ValueError(f"{row.where}: the verification does not judge each of the {len(parsed.steps)} steps; "
                             "filter out such rows")
        if verification and judged.verdict == "INVALID":
            raise ValueError(f"{row.where}: the verification lacks <final_verification>\\boxed{{CORRECT}}"
                             "</final_verification>, or the same with INCORRECT; filter out such rows")
        rows.append(TaggedRow(Problem(row.id, question, parsed.answer), solution, len(parsed.steps), verification))
    return rows


class TaggedExamples(NamedTuple):
    sft_example: Callable[[str, str, int], SftExample]
    num_train: int
    num_heldout: int
    num_too_long: int
    num_shortened: int  # of those that are too long: their solutions would be cut off in the verifier's prompt
    num_excluded: int  # of the rows to imitate
    heldout: frozenset[str]  # `question_key` of the problems used for the held-out loss
    unfit: tuple[Problem, ...]  # drawn to be held out, and too long: another arm may have room for them


def make_tagged_examples(
    tagged: TaggedRows,
    num_heldout: int,
    seed: int,
    over_fn: Callable[[str, SftExample], Over],
    roles: Sequence[str],
    excluded: frozenset[str] = frozenset(),
) -> TaggedExamples:
    """Split the rows by seed, unless held-out rows have their own file.

    Args:
        over_fn: see `prompt_lengths.make_over`; rows over a limit are left out.
        roles: those that imitate the rows.
        excluded: `question_key` of problems that must not be imitated.

    Raises ValueError: too few rows remain.
    """
    row_of = {row.problem.id: row for row in (*tagged.rows, *tagged.heldout)}

    # The held-out loss may be measured on evaluation problems.
    heldout = [row.problem for row in tagged.heldout]
    set_aside = excluded | {question_key(problem.question) for problem in heldout}
    imitated = [row.problem for row in tagged.rows if question_key(row.problem.question) not in set_aside]
    split = split_examples(
        imitated, lambda problem: row_of[problem.id].over(over_fn, roles), num_heldout, seed, heldout
    )
    order = {"train": make_problem_order(split.train, seed), "heldout": make_problem_order(split.validation, seed)}

    def sft_example(role: str, part: str, index: int) -> SftExample:
        return row_of[order[part](index).id].example(role)

    sizes = len(split.train), len(split.validation), split.num_too_long, split.num_shortened
    measured_on = frozenset(question_key(problem.question) for problem in split.validation)
    return TaggedExamples(sft_example, *sizes, len(tagged.rows) - len(imitated), measured_on, split.unfit)
