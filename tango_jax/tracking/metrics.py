"""Writes and reads metrics.jsonl of a run: one JSON object of scalars per line."""

import json
import os
from pathlib import Path
from typing import Any

from tango_jax.config import ROLES
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import json_value, write_atomically
from tango_jax.runtime.checkpoint import Restored

TURN_PHASES = ("warmup", *ROLES)  # of the rows of turns; those of evaluations are `eval`
VERIFIER_TURNS = ("warmup", "verifier")


class MetricsWriter:
    """Appends rows. Checkpoints refer to positions in the file: each write checks that nothing else has changed it."""

    def __init__(self, path: str | os.PathLike, resume_at: int | None = None):
        """Open for appending, after truncating to `resume_at` bytes if given (0: start afresh)."""
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: a failed write is not retried when the file is closed.
        self._file = open(self._path, "a+b", buffering=0)
        # Up to the last newline: a line cut off by a kill must not be joined with the next one.
        whole_lines = self._path.read_bytes().rfind(b"\n") + 1
        self._size = whole_lines if resume_at is None else check_resume(self._path, resume_at)
        self._file.truncate(self._size)

    def write(self, step: int, phase: str, metrics: dict[str, Any]) -> None:
        self.append(make_row(step, phase, metrics))

    def append(self, row: dict[str, Any]) -> None:
        """Write a row of `make_row`. Raises OSError, and ValueError if the file is not as the last row left it."""
        self._check()
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            while line:  # a nearly full disk may accept only a part
                written = self._file.write(line)
                self._size += written
                line = line[written:]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def position(self) -> int:
        """Bytes written so far, after an fsync. Raises like `append`."""
        self._check()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        return self._size

    def _check(self) -> None:
        """Raise ValueError if the file is not as this writer left it. A removed file is restored first."""
        own = os.fstat(self._file.fileno())
        try:
            found = os.stat(self._path)
        except FileNotFoundError as error:
            if not self._path.parent.is_dir():
                raise ValueError(f"{self._path.parent} was removed during the run: nothing of it is left. "
                                 "The same command starts afresh") from error
            write_atomically(self._path, os.pread(self._file.fileno(), self._size, 0))
            raise ValueError(f"{self._path} was removed during the run. Its rows have been restored: the "
                             "same command resumes from the last checkpoint") from error
        if not os.path.samestat(own, found) or found.st_size != self._size:
            raise ValueError(f"{self._path} was replaced or changed during the run: it has {found.st_size} bytes, but "
                             f"the run had written {self._size}. Restore it from a copy; the same command then "
                             "resumes from the last checkpoint")

    @property
    def is_closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def make_row(step: int, phase: str, metrics: dict[str, Any]) -> dict[str, Any]:
    """One flat object: 0-d arrays become numbers; NaN and infinity, which JSON lacks, become null."""
    return {"step": int(step), "phase": phase} | {name: _scalar(name, value) for name, value in metrics.items()}


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """The rows of a metrics file or workdir, without an incomplete last line. Raises ValueError, FileNotFoundError."""
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    data = path.read_bytes()
    rows = []
    for number, line in enumerate(data[:data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path} line {number} is not JSON ({error}): {line[:80]!r}; remove it") from error
    return rows


def check_resume(path: str | os.PathLike, resume_at: int) -> int:
    """Return `resume_at`, the bytes at the checkpoint. Raises ValueError if rows before it are lost or edited."""
    path = Path(path)
    data = path.read_bytes() if path.exists() else b""
    mend = "restore the file from a copy, or choose another workdir"
    if len(data) < resume_at:
        has = f"has {len(data)} bytes" if path.exists() else "is missing"
        raise ValueError(f"{path} {has}, but the checkpoint was saved when it had {resume_at}; earlier rows are "
                         f"lost: {mend}")
    if resume_at and data[resume_at - 1:resume_at] != b"\n":
        raise ValueError(f"{path}: byte {resume_at}, where the checkpoint resumes, is inside a line; the file was "
                         f"edited: {mend}")
    return resume_at


def _scalar(name: str, value: Any) -> Any:
    value = json_value(value)
    assert value is None or isinstance(value, (bool, int, float, str)), f"metric {name} is not a scalar: {value!r}"
    return value


def check_log(directory: Path, restored: Restored | None, save_every: int) -> None:
    """Raises ValueError unless metrics.jsonl and the newest checkpoint match. All processes must call this."""
    hosts.in_first(lambda: _check_log(directory / "metrics.jsonl", restored, save_every))


def _check_log(path: Path, restored: Restored | None, save_every: int) -> None:
    if restored is not None:
        check_resume(path, restored.meta["metrics_bytes"])
    rows = read_metrics(path) if path.exists() else []
    # A checkpoint is complete before the one after it begins, so rows from after that prove that one existed. An
    # evaluation is written before the checkpoint, and after a warm-up that ends early it has a later step.
    steps = [row["step"] for row in rows if row.get("phase") != "eval"]
    begun = len({(step - 1) // save_every for step in steps}) - 1
    if restored is None and begun > 1:
        raise ValueError(
            f"{path} reaches step {max(steps)}, but there is no checkpoint beside it, although one is saved every "
            f"{save_every} steps: restore {path.parent / 'checkpoints'}, or move {path} away to start afresh"
        )
