"""Dumps the rollouts of every k-th turn of each role to disk as JSON lines.

WORKDIR/rollouts/turn_000034_generator_000020.jsonl is turn 34 (`step` in metrics.jsonl), after 20 turns of that role.
evaluation_000034_000003.jsonl has the first problems of an evaluation, after 34 turns and 3 evaluations. Files appear
whole or not at all, and a resumed run writes the same files again.
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from tango_jax.records import Solution, TurnResult, Verification
from tango_jax.rl.schedule import Place
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import write_atomically
from tango_jax.tracking.rollout_rows import StepKinds, evaluation_rows, turn_rows

_TURN = re.compile(r"turn_(\d+)_(?:generator|verifier)_(\d+)\.jsonl")
_EVALUATION = re.compile(r"evaluation_(\d+)_(\d+)\.jsonl")
EVAL_PROBLEMS = 12  # always the first problems, to compare within and between runs
MAX_BYTES = 25_000_000  # of a file; further groups are left out


class RolloutDump:
    """Writes the turns that are due. Does nothing except in the first process, or if `rollouts.every` is 0."""

    def __init__(
        self, folder: Path, config: ConfigDict, resume_after: int = 0, step_kinds_fn: StepKinds = None
    ):
        """`resume_after`: the turn of the checkpoint. Files of later turns are deleted."""
        self._folder, self._config, self._step_kinds_fn = folder, config, step_kinds_fn
        self._enabled = config.rollouts.every > 0 and hosts.is_first()
        if not self._enabled:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.partial"):
            path.unlink()
        for path, turn, _ in (*dumped_turns(folder), *dumped_evaluations(folder)):
            if turn > resume_after:
                path.unlink()

    def write(self, place: Place, result: TurnResult, formula: str = "") -> None:
        """Write the turn if it is due. `formula`: the outcome advantage."""
        if not self._enabled or place.role_step % self._config.rollouts.every:
            return
        path = self._folder / f"turn_{place.index + 1:06d}_{place.role}_{place.role_step:06d}.jsonl"
        rows = turn_rows(self._config, place, result, formula, self._step_kinds_fn)
        groups = (list(members) for _, members in itertools.groupby(rows, key=lambda row: row["group"]))
        write_atomically(path, _lines(groups))  # the turn's checkpoint is saved later and relies on it

    def write_evaluation(
        self, number: int, turns_done: int, generator_step: int, solutions: Sequence[Solution],
        verifications: Sequence[Verification], second_tries: Mapping[int, Solution],
    ) -> None:
        if not self._enabled:
            return
        solutions, verifications = solutions[:EVAL_PROBLEMS], verifications[:EVAL_PROBLEMS]
        rows = evaluation_rows(turns_done, generator_step, solutions, verifications, second_tries, self._step_kinds_fn)
        path = self._folder / f"evaluation_{turns_done:06d}_{number:06d}.jsonl"
        write_atomically(path, _lines([row] for row in rows))


def _lines(groups: Iterable[list[dict]]) -> bytes:
    """Whole groups, as many as fit into a file, but at least one."""
    kept, size = [], 0
    for rows in groups:
        group = b"".join(map(_line, rows))
        size += len(group)
        if kept and size > MAX_BYTES:
            break
        kept.append(group)
    return b"".join(kept)


def dumped_turns(folder: Path) -> list[tuple[Path, int, int]]:
    """(file, turn, earlier turns of the role) of every dumped turn, in order."""
    return _files(folder, _TURN)


def dumped_evaluations(folder: Path) -> list[tuple[Path, int, int]]:
    """(file, turns before it, evaluations before it) of every dumped evaluation, in order."""
    return _files(folder, _EVALUATION)


def _files(folder: Path, pattern: re.Pattern) -> list[tuple[Path, int, int]]:
    found = [(path, pattern.fullmatch(path.name)) for path in sorted(folder.glob("*.jsonl"))]
    return [(path, int(match[1]), int(match[2])) for path, match in found if match]


def read_rollouts(folder: Path, with_evaluations: bool = False) -> Iterator[dict]:
    """Every rollout in a folder, in the order of training. Raises ValueError where a line is not JSON."""
    files = dumped_turns(folder) + (dumped_evaluations(folder) if with_evaluations else [])
    for path, *_ in sorted(files, key=lambda file: file[1]):  # stable: evaluations stay behind the turn
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:  # a resumed run has deleted it meanwhile
            continue
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} line {number} is not JSON ({error}): delete that file") from error


def _line(row: dict) -> bytes:
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"
