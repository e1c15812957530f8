"""Files with the solutions of a teacher: the parts that stage 0 writes as it goes, and its two final files.

Takes the sampled rows, each with its grade. Writes `parts/part-00000.jsonl` and so on with every row, and
`train.parquet` and `validation.parquet` with the rows worth imitating: stage 1 trains on the former and measures its
held-out loss on the latter (`tagged_examples.py`).
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tango_jax.data.problem_sets import question_key
from tango_jax.grading import parse_solution
from tango_jax.records import Problem
from tango_jax.runtime.atomic import write_atomically
from tango_jax.runtime.keys import MAX_SAMPLES

MAX_PROBLEMS = 2**31 // MAX_SAMPLES  # the number of a row is an int32
FILES = ("train.parquet", "validation.parquet")
VALIDATION_SHARE = 0.02  # of questions, on which stage 1 measures its loss
_SPLIT_STREAM = 2


@dataclasses.dataclass(frozen=True)
class TeacherRow:
    """One solution that was sampled from the teacher."""

    number: int  # index of the problem in its file, from 0, counting the problems that were left out
    sample: int  # from 0
    problem_id: str
    question: str
    answer: str  # gold answer
    solution: str
    is_correct: bool
    format_score: float
    is_truncated: bool
    num_tokens: int  # length of the response, stop token included
    graded_by: str = ""  # digest of the user's grader that decided `is_correct`; empty: answers were compared


class Kept(NamedTuple):
    """The rows that are kept, and how many others were dropped for each reason."""

    rows: list[TeacherRow]
    counts: dict[str, int]


def part_path(workdir: Path, shard: int) -> Path:
    return workdir / "parts" / f"part-{shard:05d}.jsonl"


def write_part(path: Path, rows: Sequence[TeacherRow]) -> None:
    """Write a part atomically: the file is either complete on disk or absent."""
    write_atomically(path, "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows))


def read_part(path: Path, problems: Sequence[tuple[int, Problem]], samples: int) -> list[TeacherRow] | None:
    """Read a part of an earlier run; return None if it does not exist, or is damaged and must be rewritten.

    Raises:
        ValueError: the part is complete but contains solutions to other problems.
    """
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        rows = [TeacherRow(**json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError):  # absent; not text or JSON; other fields
        return None
    wanted = [(number, sample) for number, _ in problems for sample in range(samples)]
    if len(rows) != len(wanted):
        return None
    for row, (number, sample), problem in zip(
        rows, wanted, (problem for _, problem in problems for _ in range(samples)), strict=True
    ):
        found = (row.number, row.sample, row.problem_id, row.question, row.answer)
        if found != (number, sample, problem.id, problem.question, problem.answer):
            raise ValueError(f"{path} holds a solution to {row.problem_id}, {row.question[:60]!r}, where the problem "
                             f"is now {problem.id}, {problem.question[:60]!r}: the problem file or the tokenizer has "
                             "changed since then; restore the old one, or choose another --workdir")
    return rows


def keep_rows(rows: Sequence[TeacherRow]) -> Kept:
    """Select the rows worth imitating, in order.

    A response that was truncated, or that has no steps or no boxed answer, is never kept: stage 1 could not read it.
    """
    whole = [row for row in rows if not row.is_truncated]
    kept = [row for row in whole if (parsed := parse_solution(row.solution)).steps and parsed.answer is not None]
    return Kept(kept, {"truncated": len(rows) - len(whole), "untagged": len(whole) - len(kept)})


def validation_questions(problems: Sequence[Problem], seed: int) -> frozenset[str]:
    """Return the `question_key` of the questions that are held out.

    They are drawn before any filtering, so that no filter moves a problem to the other file. A question that occurs
    twice in the problem file is in only one of the two files.
    """
    questions = list(dict.fromkeys(question_key(problem.question) for problem in problems))
    order = np.random.default_rng((seed, _SPLIT_STREAM)).permutation(len(questions))
    return frozenset(questions[index] for index in order[: round(VALIDATION_SHARE * len(questions))])


def write_files(workdir: Path, rows: Sequence[TeacherRow], validation: frozenset[str]) -> tuple[int, int]:
    """Write both files; return their numbers of rows."""
    parts = [[], []]
    for row in rows:
        parts[question_key(row.question) in validation].append(row)
    for name, part in zip(FILES, parts, strict=True):
        write_atomically(workdir / name, _parquet(part))
    return len(parts[0]), len(parts[1])


def _parquet(rows: Sequence[TeacherRow]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    types = {
        "question": pyarrow.string(),
        "answer": pyarrow.string(),
        "solution": pyarrow.string(),
        "is_correct": pyarrow.bool_(),
        "format_score": pyarrow.float64(),
        "problem_id": pyarrow.string(),
        "sample": pyarrow.int32(),
    }
    columns = {name: pyarrow.array([getattr(row, name) for row in rows], kind) for name, kind in types.items()}
    file = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue().to_pybytes()
