"""Dumps the rollouts of every k-th turn of each role to disk as JSON lines, within a size limit.

Takes a turn and its TurnResult and writes WORKDIR/rollouts/turn_000034_generator_000020.jsonl, one rollout per line
(rollout_rows.py), where 34 is the turn (`step` in metrics.jsonl) and 20 the number of the role's own turns before it.
Runs at the end of a turn, before its checkpoint. Of every evaluation it writes the first few problems, always the same
ones, to evaluation_000034_000003.jsonl, where 34 is the number of turns before it and 3 that of evaluations.

The file of a turn appears whole or not at all, and a resumed run writes the same file again, so nothing is lost or
duplicated. When the size limit is reached, every second dumped turn of each role, and every second evaluation, is
deleted and the interval between dumps doubles, so that the remaining dumps always span the whole run.
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
from tango_jax.runtime.atomic import write_atomically, write_json_atomic
from tango_jax.tracking.rollout_rows import StepKinds, evaluation_rows, turn_rows

_TURN = re.compile(r"turn_(\d+)_(?:generator|verifier)_(\d+)\.jsonl")
_EVALUATION = re.compile(r"evaluation_(\d+)_(\d+)\.jsonl")
EVAL_PROBLEMS = 12  # dumped at every evaluation, always the first ones, to be compared over a run and between runs
# A turn may use 1 / TURN_SHARE of the limit; groups beyond that are left out. Each role's first turn is always kept.
TURN_SHARE = 8
# Of a run. When it is reached, every second dump is deleted, and half as many are written from then on.
LIMIT_BYTES = 200_000_000


class RolloutDump:
    """Writes the turns that are due; does nothing except in the first process, or if `rollouts.every` is 0."""

    def __init__(
        self, folder: Path, config: ConfigDict, resume_after: int = 0, step_kinds_fn: StepKinds = None
    ):
        """`resume_after` is the turn of the checkpoint; files of later turns are stale and are deleted."""
        self._folder, self._config, self._step_kinds_fn = folder, config, step_kinds_fn
        self._enabled = config.rollouts.every > 0 and hosts.is_first()
        self._limit = LIMIT_BYTES
        if not self._enabled:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.partial"):
            path.unlink()
        for path, turn, _ in self._dumped():
            if turn > resume_after:
                path.unlink()

    def write(self, place: Place, result: TurnResult, formula: str = "") -> None:
        """Write the turn if it is due. `result` holds the whole batch; `formula`: of the outcome advantage."""
        role_turn = place.role_step
        if not self._enabled or role_turn % self._stride():
            return
        path = self._folder / f"turn_{place.index + 1:06d}_{place.role}_{role_turn:06d}.jsonl"
        rows = turn_rows(self._config, place, result, formula, self._step_kinds_fn)
        groups = (list(members) for _, members in itertools.groupby(rows, key=lambda row: row["group"]))
        write_atomically(path, self._lines(groups))  # the turn's checkpoint is saved later and relies on it
        self._keep_within_limit()

    def write_evaluation(
        self, number: int, turns_done: int, generator_step: int, solutions: Sequence[Solution],
        verifications: Sequence[Verification], second_tries: Mapping[int, Solution],
    ) -> None:  # fmt: skip
        """Write the first problems of evaluation `number`, counted from 0; see `evaluation_rows`."""
        if not self._enabled or number % (1 << self._halvings()):
            return
        solutions, verifications = solutions[:EVAL_PROBLEMS], verifications[:EVAL_PROBLEMS]
        rows = evaluation_rows(turns_done, generator_step, solutions, verifications, second_tries, self._step_kinds_fn)
        path = self._folder / f"evaluation_{turns_done:06d}_{number:06d}.jsonl"
        write_atomically(path, self._lines([row] for row in rows))
        self._keep_within_limit()

    def _lines(self, groups: Iterable[list[dict]]) -> bytes:
        """Whole groups, as many as fit into a file's share of the limit, but at least one."""
        kept, size = [], 0
        for rows in groups:
            group = b"".join(map(_line, rows))
            size += len(group)
            if kept and size > self._limit / TURN_SHARE:
                break
            kept.append(group)
        return b"".join(kept)

    def _stride(self) -> int:
        return self._config.rollouts.every << self._halvings()

    def _halvings(self) -> int:
        path = self._folder / "thinned.json"
        return json.loads(path.read_text())["halvings"] if path.exists() else 0

    def _keep_within_limit(self) -> None:
        while sum(path.stat().st_size for path, *_ in self._dumped()) > self._limit:
            # Store the new stride first: if a kill interrupts the deletions, the next start continues with the same
            # stride.
            write_json_atomic(self._folder / "thinned.json", {"halvings": self._halvings() + 1})
            off_stride = [path for path, _, number in dumped_turns(self._folder) if number % self._stride()]
            off_stride += [path for path, _, number in dumped_evaluations(self._folder)
                           if number % (1 << self._halvings())]  # fmt: skip
            for path in off_stride:
                path.unlink()
            if all(number == 0 for *_, number in self._dumped()):
                return  # only the first of each kind is left, which is always kept

    def _dumped(self) -> list[tuple[Path, int, int]]:
        return [*dumped_turns(self._folder), *dumped_evaluations(self._folder)]


def dumped_turns(folder: Path) -> list[tuple[Path, int, int]]:
    """(file, turn, number of the role's own turns before it) of every dumped turn, in order."""
    return _files(folder, _TURN)


def dumped_evaluations(folder: Path) -> list[tuple[Path, int, int]]:
    """(file, number of turns before it, number of evaluations before it) of every dumped evaluation, in order."""
    return _files(folder, _EVALUATION)


def _files(folder: Path, pattern: re.Pattern) -> list[tuple[Path, int, int]]:
    found = [(path, pattern.fullmatch(path.name)) for path in sorted(folder.glob("*.jsonl"))]
    return [(path, int(match[1]), int(match[2])) for path, match in found if match]


def read_rollouts(folder: Path, with_evaluations: bool = False) -> Iterator[dict]:
    """Yield every rollout in a folder, in the order of training; an evaluation comes after the turn before it.

    Raises:
        ValueError: a line is not JSON; the message names the file and the line.
    """
    files = dumped_turns(folder) + (dumped_evaluations(folder) if with_evaluations else [])
    for path, *_ in sorted(files, key=lambda file: file[1]):  # stable: evaluations stay behind the turn
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:  # a run in progress has deleted it while thinning out
            continue
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} line {number} is not JSON ({error}): delete that file") from error


def _line(row: dict) -> bytes:
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"
