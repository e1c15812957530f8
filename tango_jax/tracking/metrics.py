"""Numbers of a run on their way to disk.

In: flat records of scalars, one per step of the loop. Out: `<workdir>/metrics.jsonl`, one JSON object a line, which a
resumed run continues at the byte its checkpoint names. Stage: the end of every step.
"""

import json
import os
from pathlib import Path
from typing import Any

from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import json_value, write_atomically
from tango_jax.runtime.checkpoint import Restored


class MetricsWriter:
    """Appends one JSON object a line; with `enabled` false (every process but the first) it does nothing.

    A checkpoint names a position in the file. So each write makes sure that the file is still the one that was opened,
    and as long: what others do to it meanwhile must not become a gap that nobody notices.
    """

    def __init__(self, path: str | os.PathLike, resume_at: int | None = None, enabled: bool = True):
        """Open for appending, after cutting the file to `resume_at` bytes (0 starts afresh) if that is given."""
        self._file = None
        if not enabled:
            return
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer: what could not be written shall not be tried again when the file is closed.
        self._file = open(self._path, "a+b", buffering=0)
        self._size = _whole_lines(self._path) if resume_at is None else check_resume(self._path, resume_at)
        self._file.truncate(self._size)

    def write(self, step: int, phase: str, metrics: dict[str, Any]) -> None:
        """Write one line, see `make_row`."""
        self.append(make_row(step, phase, metrics))

    def append(self, row: dict[str, Any]) -> None:
        """Write a row of `make_row`; it is with the operating system when this returns.

        Raises:
            OSError: it cannot be written.
            ValueError: the file was removed, replaced or changed since the row before.
        """
        if self._file is None:
            return
        self._check()
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            while line:  # a disk that fills up takes a part
                written = self._file.write(line)
                self._size += written
                line = line[written:]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def position(self) -> int:
        """Bytes written so far, forced to disk: a checkpoint that names this position can rely on it. Raises like
        `append`."""
        if self._file is None:
            return 0
        self._check()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        return self._size

    def _check(self) -> None:
        """Raises ValueError if the file is not as this writer left it. One that was removed is put back before."""
        own = os.fstat(self._file.fileno())
        try:
            found = os.stat(self._path)
        except FileNotFoundError as error:
            if not self._path.parent.is_dir():
                raise ValueError(f"{self._path.parent} was removed while the run was going on: nothing of it is left. "
                                 "The same command starts afresh") from error
            write_atomically(self._path, os.pread(self._file.fileno(), self._size, 0))
            raise ValueError(f"{self._path} was removed while the run was going on. Its rows are back: the same "
                             "command goes on from the last checkpoint") from error
        if not os.path.samestat(own, found) or found.st_size != self._size:
            raise ValueError(f"{self._path} was replaced or changed while the run was going on: it has {found.st_size} "
                             f"bytes, and the run had written {self._size}. Restore it from a copy; the same command "
                             "then goes on from the last checkpoint")

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def make_row(step: int, phase: str, metrics: dict[str, Any]) -> dict[str, Any]:
    """One flat object: 0-d arrays become numbers, and NaN and infinity, which JSON lacks, become null."""
    return {"step": int(step), "phase": phase} | {name: _scalar(name, value) for name, value in metrics.items()}


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """All rows of a metrics file; the half line of a run that is still writing, or was killed, is left out."""
    data = Path(path).read_bytes()
    rows = []
    for number, line in enumerate(data[:data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path} line {number} is not JSON ({error}): {line[:80]!r}; remove it") from error
    return rows


def check_resume(path: str | os.PathLike, resume_at: int) -> int:
    """`resume_at`, the bytes that a metrics file had when a checkpoint was saved, if a run can go on from there.

    Raises:
        ValueError: the file is missing, shorter, or was edited.
    """
    path = Path(path)
    data = path.read_bytes() if path.exists() else b""
    mend = "put back a copy of the file, or start with another workdir"
    if len(data) < resume_at:
        has = f"has {len(data)} bytes" if path.exists() else "is missing"
        raise ValueError(f"{path} {has}, but the checkpoint was saved when it had {resume_at}; rows of turns before it "
                         f"are lost: {mend}")
    if resume_at and data[resume_at - 1:resume_at] != b"\n":
        raise ValueError(f"{path}: byte {resume_at}, where the checkpoint resumes, is inside a line; the file was "
                         f"edited: {mend}")
    return resume_at


def _scalar(name: str, value: Any) -> Any:
    value = json_value(value)
    assert value is None or isinstance(value, (bool, int, float, str)), f"metric {name} is no scalar: {value!r}"
    return value


def _whole_lines(path: Path) -> int:
    """Bytes up to the last newline: a line cut off by a kill must not be joined with the next one."""
    return path.read_bytes().rfind(b"\n") + 1


def check_log(directory: Path, restored: Restored | None, save_every: int) -> None:
    """Insist that metrics.jsonl and checkpoints of a directory belong together, before any work; nothing is written.

    `restored`: the newest checkpoint. `save_every`: steps, or turns, between two of them. All processes must call it.

    Raises:
        ValueError: rows that the checkpoint relies on are missing, or the rows tell of checkpoints that are gone.
    """
    hosts.in_first(lambda: _check_log(directory / "metrics.jsonl", restored, save_every))


def _check_log(path: Path, restored: Restored | None, save_every: int) -> None:
    if restored is not None:
        check_resume(path, restored.meta["metrics_bytes"])
    rows = read_metrics(path) if path.exists() else []
    # Its checkpoint is complete before the next row is written.
    if restored is None and rows and rows[-1]["step"] > save_every:
        raise ValueError(
            f"{path} reaches step {rows[-1]['step']}, but there is no checkpoint beside it, and one is saved every "
            f"{save_every} steps: put {path.parent / 'checkpoints'} back, or move {path} away to start afresh"
        )
