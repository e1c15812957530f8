"""A teacher's solutions: `parts/part-00000.jsonl` and so on hold every row of stage 0; `train.parquet` and
`validation.parquet` hold the rows worth imitating, for stage 1 and its held-out loss (`tagged_examples.py`)."""

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
    rows: list[TeacherRow]
    counts: dict[str, int]


def part_path(workdir: Path, shard: int) -> Path:
    return workdir / "parts" / f"part-{shard:05d}.jsonl"


def write_part(path: Path, rows: Sequence[TeacherRow]) -> None:
    write_atomically(path, "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows))


def read_part(path: Path, problems: Sequence[tuple[int, Problem]], samples: int) -> list[TeacherRow] | None:
    """A part of an earlier run, or None if absent or damaged. ValueError: it holds solutions to other problems."""
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
            raise ValueError(f"{path} holds a solution to {row.problem_id}, {row.question[:60]!r}, but its problem "
                             f"is now {problem.id}, {problem.question[:60]!r}: the problem file or the tokenizer has "
                             "changed; restore the old one, or choose another --workdir")
    return rows


def keep_rows(rows: Sequence[TeacherRow]) -> Kept:
    """Drops truncated responses and those without steps or a boxed answer: stage 1 could not read them."""
    whole = [row for row in rows if not row.is_truncated]
    kept = [row for row in whole if (parsed := parse_solution(row.solution)).steps and parsed.answer is not None]
    return Kept(kept, {"truncated": len(rows) - len(whole), "untagged": len(whole) - len(kept)})


def validation_questions(problems: Sequence[Problem], seed: int) -> frozenset[str]:
    """Keys of held-out questions, drawn before any filtering, so that no filter moves a problem to the other file. A
    repeated question is in one file only."""
    questions = list(dict.fromkeys(question_key(problem.question) for problem in problems))
    order = np.random.default_rng((seed, _SPLIT_STREAM)).permutation(len(questions))
    return frozenset(questions[index] for index in order[: round(VALIDATION_SHARE * len(questions))])


def write_files(workdir: Path, rows: Sequence[TeacherRow], validation: frozenset[str]) -> tuple[int, int]:
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
