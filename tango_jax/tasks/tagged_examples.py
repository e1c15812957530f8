"""Stage-1 examples from a file of tagged solutions (stage 0's, say): rows in, a function of an index out.

A row has `question` (or `problem`), `solution` in the generator's format and, where the verifier has a stage 1 of its
own, `verification` in the verifier's.

`task.stage_one` names a file, or the workdir of stage 0, which stands for the train.parquet in it. Where a
validation.parquet stands beside a train.parquet, the held-out loss is measured on it. Otherwise rows of the file itself
are set aside, whole questions at a time.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tango_jax.data.problem_sets import question_key
from tango_jax.data.row_fields import BadRow, text_of
from tango_jax.data.rows import HUB_PREFIX, read_rows
from tango_jax.data.teacher_rows import FILES
from tango_jax.grading import parse_solution, parse_verification
from tango_jax.records import Problem
from tango_jax.tasks.prompt_lengths import Over
from tango_jax.tasks.splits import make_problem_order, split_examples
from tango_jax.tasks.task import SftExample


class TaggedRow(NamedTuple):
    """One example for each role; `verification` is empty where the file has none."""

    problem: Problem
    solution: str
    num_steps: int
    verification: str

    def example(self, role: str) -> SftExample:
        """What the role is to imitate."""
        if role == "generator":
            return SftExample(self.problem, "", 0, self.solution)
        return SftExample(self.problem, self.solution, self.num_steps, self.verification)


class TaggedRows(NamedTuple):
    """What `task.stage_one` names."""

    rows: list[TaggedRow]
    heldout: list[TaggedRow]  # of a file of their own; empty: some of the rows are to be set aside


def read_stage_one(source: str, is_for_verifier: bool) -> TaggedRows:
    """The rows to imitate and, where they have a file of their own, those of the held-out loss.

    Raises:
        ValueError: see `read_tagged_rows`.
    """
    path = Path(source).expanduser()
    if source.startswith(HUB_PREFIX):
        return TaggedRows(read_tagged_rows(source, is_for_verifier), [])
    if path.is_dir() and (path / FILES[0]).is_file():
        path = path / FILES[0]
    rows, beside = read_tagged_rows(str(path), is_for_verifier), path.with_name(FILES[1])
    if path.name != FILES[0] or not beside.is_file():
        return TaggedRows(rows, [])
    try:
        return TaggedRows(rows, read_tagged_rows(str(beside), is_for_verifier, may_be_empty=True))
    except ValueError as error:
        raise ValueError(f"{error} (read for the held-out loss, since it stands beside {FILES[0]}; move it elsewhere "
                         f"to have rows of {FILES[0]} set aside instead)") from error


def read_tagged_rows(source: str, is_for_verifier: bool, may_be_empty: bool = False) -> list[TaggedRow]:
    """Every row of a file or hub id.

    Raises:
        ValueError: no such file, or a row without question, tagged solution or (for the verifier) verification.
    """
    rows = []
    for row in read_rows(source, may_be_empty):
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
    num_shortened: int  # of them, for the verifier's prompt
    num_excluded: int  # of the rows to imitate
    heldout: frozenset[str]  # `question_key` of the problems of the held-out loss


def make_tagged_examples(
    tagged: TaggedRows,
    num_heldout: int,
    seed: int,
    over_fn: Callable[[str, SftExample], Over],
    excluded: frozenset[str] = frozenset(),
) -> TaggedExamples:
    """Part the rows by seed, unless those held out have a file of their own; those over the limits are left out.

    `over_fn`: see `prompt_lengths.make_over`. `excluded`: `question_key` of what must not be imitated.

    Raises:
        ValueError: too few rows remain.
    """
    row_of = {row.problem.id: row for row in (*tagged.rows, *tagged.heldout)}

    def over(problem: Problem) -> Over:
        row = row_of[problem.id]
        roles = ("generator", "verifier") if row.verification else ("generator",)
        return Over(*map(max, zip(*(over_fn(role, row.example(role)) for role in roles), strict=True)))

    # The held-out loss may be measured on what the generator is evaluated on.
    heldout = [row.problem for row in tagged.heldout]
    set_aside = excluded | {question_key(problem.question) for problem in heldout}
    imitated = [row.problem for row in tagged.rows if question_key(row.problem.question) not in set_aside]
    split = split_examples(imitated, over, num_heldout, seed, heldout)
    order = {"train": make_problem_order(split.train, seed), "heldout": make_problem_order(split.validation, seed)}

    def sft_example(role: str, part: str, index: int) -> SftExample:
        return row_of[order[part](index).id].example(role)

    sizes = len(split.train), len(split.validation), split.num_too_long, split.num_shortened
    measured_on = frozenset(question_key(problem.question) for problem in split.validation)
    return TaggedExamples(sft_example, *sizes, len(tagged.rows) - len(imitated), measured_on)
