"""Shards of work that survive an interruption.

A shard's file appears complete or not at all, so a kill costs only the current shard. Processes share the missing
shards; all have all rows afterwards.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from tango_jax.data.teacher_rows import write_part
from tango_jax.runtime import hosts
from tango_jax.runtime.console import Console

GREEDY = -1  # the number of the greedy attempt among a problem's samples


@dataclasses.dataclass(frozen=True)
class SolvedRow:
    number: int  # of the problem in its source
    sample: int  # GREEDY, or from 0
    problem_id: str
    question: str
    gold: str
    size: int
    text: str
    answer: str | None
    answer_class: int  # of this problem's sampled answers, see voting.py
    is_correct: bool
    format_score: float
    num_steps: int
    is_truncated: bool
    num_tokens: int
    is_too_long: bool  # the prompt was over the limit: counted as wrong
    grader: str  # empty, or why the answer was not read: error, timeout, overlong (wrong)
    graded_by: str = ""  # digest of the user's grader; empty: answers were compared

    shown: ClassVar = {"correct": "is_correct", "truncated": "is_truncated", "tokens": "num_tokens"}  # means


@dataclasses.dataclass(frozen=True)
class JudgedRow:
    number: int
    sample: int
    vote: int  # from 0
    claim: str  # digest of the question and the solution
    text: str
    verdict: str
    judgements: tuple[bool | None, ...]
    is_aligned: bool
    format_score: float
    is_truncated: bool
    num_tokens: int
    is_shortened: bool  # the solution was cut to fit the prompt
    is_too_long: bool  # not even the problem fits, or there is nothing to judge: no verdict
    num_prompt: int  # tokens of the prompt of what is written
    num_scored: int  # tokens of the pass that reads marks or steps, with their prompt
    # P(CORRECT) as `judge` gives it: of the verdict that is written, and of the steps read in one pass. None: there is
    # no verdict. Of a verifier that writes, both are read only of sampled solutions, which compete.
    p_verdict: float | None
    p_scored: float | None

    shown: ClassVar = {"format": "format_score", "aligned": "is_aligned", "tokens": "num_tokens"}


class Shard(NamedTuple):
    set: Any  # SolveSet or JudgeSet
    items: Sequence  # problems or claims
    out: Path
    stage: str  # solved or judged
    index: int

    @property
    def path(self) -> Path:
        return self.out / "parts" / self.set.name / f"{self.stage}-{self.index:05d}.jsonl"


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def read_shard(path: Path, row_class: type) -> list | None:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        return [row_class(**{name: tuple(value) if isinstance(value, list) else value
                             for name, value in json.loads(line).items()}) for line in lines]
    except (OSError, ValueError, TypeError, AttributeError):  # not there; no text or JSON; other fields
        return None


def complete_shards(
    title: str,
    shards: Sequence[Shard],
    read_fn: Callable[[Shard], list | None],
    open_fn: Callable[[], Any],
    work_fn: Callable[[Any, Shard], list],
    console: Console,
) -> list[list]:
    """The rows of every shard: from its file (`read_fn`), or computed (`work_fn`) with what `open_fn` opens once."""
    # The first process decides: others may see a file earlier or later, or have a local disk.
    found = hosts.from_first([read_fn(shard) for shard in shards])
    missing = [index for index, rows in enumerate(found) if rows is None]
    if not missing:
        return found
    ready, own = open_fn(), hosts.own_part(missing)
    done = sum(len(shard.items) for shard, rows in zip(shards, found, strict=True) if rows is not None)
    with console.stage(title, done + sum(len(shards[index].items) for index in own), done) as progress:
        for index in own:
            shard = shards[index]
            rows = found[index] = work_fn(ready, shard)
            write_part(shard.path, rows)
            shown = rows[0].shown.items()
            means = {name: sum(getattr(row, field) for row in rows) / len(rows) for name, field in shown}
            progress.advance(len(shard.items), phase=shard.set.name, **means)
    for index, rows in hosts.join_parts([(index, found[index]) for index in own]):
        found[index] = rows
    return found
