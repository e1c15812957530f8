"""Dumps the rollouts of every k-th turn of each role to disk as JSON lines, within a size limit.

Takes a turn and its TurnResult and writes WORKDIR/rollouts/turn_000034_generator_000020.jsonl, one rollout per line
(rollout_rows.py), where 34 is the turn (`step` in metrics.jsonl) and 20 the number of the role's own turns before it.
Runs at the end of a turn, before its checkpoint.

The file of a turn appears whole or not at all, and a resumed run writes the same file again, so nothing is lost or
duplicated. When the size limit is reached, every second dumped turn of each role is deleted and the interval between
dumps doubles, so that the remaining dumps always span the whole run.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from ml_collections import ConfigDict

from tango_jax.records import TurnResult
from tango_jax.rl.schedule import Turn
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import write_atomically, write_json_atomic
from tango_jax.tracking.rollout_rows import turn_rows

_FILE = re.compile(r"turn_(\d+)_(generator|verifier)_(\d+)\.jsonl")
# A turn may use 1 / TURN_SHARE of the limit; groups beyond that are left out. Each role's first turn is always kept.
TURN_SHARE = 8


class RolloutDump:
    """Writes the turns that are due; does nothing except in the first process, or if `rollouts.every` is 0."""

    def __init__(self, folder: Path, config: ConfigDict, resume_after: int = 0):
        """`resume_after` is the turn of the checkpoint; files of later turns are stale and are deleted."""
        self._folder, self._config = folder, config
        self._enabled = config.rollouts.every > 0 and hosts.is_first()
        self._limit = int(config.rollouts.max_mb * 1e6)
        if not self._enabled:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.partial"):
            path.unlink()
        for path, turn, _ in dumped_turns(folder):
            if turn > resume_after:
                path.unlink()

    def write(self, turn: Turn, result: TurnResult) -> None:
        """Write the turn if it is due. `result` holds the whole batch."""
        role_turn = turn.generator_step if turn.role == "generator" else turn.index - turn.generator_step
        if not self._enabled or role_turn % self._stride():
            return
        path = self._folder / f"turn_{turn.index + 1:06d}_{turn.role}_{role_turn:06d}.jsonl"
        write_atomically(path, self._lines(turn, result))  # the turn's checkpoint is saved later and relies on it
        self._keep_within_limit()

    def _lines(self, turn: Turn, result: TurnResult) -> bytes:
        """Whole groups, as many as fit into a turn's share of the limit, but at least one."""
        kept, size = [], 0
        M = self._config.rl.samples_per_prompt
        rows = turn_rows(self._config, turn, result)
        for start in range(0, len(rows), M):
            group = b"".join(_line(row) for row in rows[start : start + M])
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
        while sum(path.stat().st_size for path, *_ in dumped_turns(self._folder)) > self._limit:
            # Store the new stride first: if a kill interrupts the deletions, the next start continues with the same
            # stride.
            write_json_atomic(self._folder / "thinned.json", {"halvings": self._halvings() + 1})
            off_stride = [path for path, _, number in dumped_turns(self._folder) if number % self._stride()]
            for path in off_stride:
                path.unlink()
            if all(number == 0 for *_, number in dumped_turns(self._folder)):
                return  # only the first turn of each role is left, which is always kept


def dumped_turns(folder: Path) -> list[tuple[Path, int, int]]:
    """(file, turn, number of the role's own turns before it) of every dumped turn, in order."""
    found = [(path, _FILE.fullmatch(path.name)) for path in sorted(folder.glob("turn_*.jsonl"))]
    return [(path, int(match[1]), int(match[3])) for path, match in found if match]


def read_rollouts(folder: Path) -> Iterator[dict]:
    """Yield every rollout in a folder, in the order of training.

    Raises:
        ValueError: a line is not JSON; the message names the file and the line.
    """
    for path, *_ in dumped_turns(folder):
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
