"""Rollouts of every k-th turn of each role on disk, as JSON lines, within a size limit.

In: a turn and its TurnResult. Out: WORKDIR/rollouts/turn_000034_generator_000020.jsonl, one rollout a line
(rollout_rows.py), where 34 is the turn (`step` in metrics.jsonl) and 20 the role's own turns before it. Stage: the end
of a turn, before its checkpoint.

A turn's file appears whole or not at all, and a resumed run writes the same file again: nothing is lost or doubled.
When the limit is reached, every second dumped turn of each role is deleted and half as many are written from then on,
so that what is kept always spans the whole run.
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
# A turn may take this share of the limit; groups beyond it are left out. Two roles keep their first turn for ever.
TURN_SHARE = 8


class RolloutDump:
    """Writes the turns that are due; in every process but the first, and with `rollouts.every` 0, it does nothing."""

    def __init__(self, folder: Path, config: ConfigDict, resume_after: int = 0):
        """`resume_after`: turns that the checkpoint knows; files of later ones will be written again, or are stale."""
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
        write_atomically(path, self._lines(turn, result))  # the turn's checkpoint comes later and relies on it
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
            # The new stride first: whatever is deleted before a kill is not wanted after it either.
            write_json_atomic(self._folder / "thinned.json", {"halvings": self._halvings() + 1})
            off_stride = [path for path, _, number in dumped_turns(self._folder) if number % self._stride()]
            for path in off_stride:
                path.unlink()
            if all(number == 0 for *_, number in dumped_turns(self._folder)):
                return  # the first turn of each role: nothing is left to thin out


def dumped_turns(folder: Path) -> list[tuple[Path, int, int]]:
    """(file, turn, the role's own turns before it) of every dumped turn, in order."""
    found = [(path, _FILE.fullmatch(path.name)) for path in sorted(folder.glob("turn_*.jsonl"))]
    return [(path, int(match[1]), int(match[3])) for path, match in found if match]


def read_rollouts(folder: Path) -> Iterator[dict]:
    """Every rollout in a folder, in the order of training.

    Raises:
        ValueError: a line that is not JSON, with its file and number.
    """
    for path, *_ in dumped_turns(folder):
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:  # a run that goes on has thinned out meanwhile
            continue
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} line {number} is not JSON ({error}): delete that file") from error


def _line(row: dict) -> bytes:
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"
