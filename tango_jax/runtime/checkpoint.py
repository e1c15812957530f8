"""Checkpoints that survive kills, full disks and flipped bytes.

Each step of a run has a folder, `<directory>/<step>/`, with all arrays and a JSON record. Orbax writes it under a
temporary name, then it is sealed with a manifest of sha256 sums, and only then renamed. So a folder named by a number
is complete, and a restore that detects a changed byte falls back to the previous step.
"""

import contextlib
import errno
import json
import logging
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from tango_jax.runtime.manifest import (
    ALL_DAMAGED,
    NO_STEP,
    SAVING,
    clean_up,
    commit,
    complete_steps,
    fingerprint_of_files,
    newest_verified,
    remove,
    seal,
)
from tango_jax.runtime.trees import array_table, flatten_names

LISTED_DIFFERENCES = 5


class CheckpointError(ValueError):
    """A checkpoint could not be written, or the one on disk cannot be used by this run."""


class Restored(NamedTuple):
    """What a checkpoint holds."""

    step: int
    state: Any  # the arrays; None where only the metadata was read
    meta: dict


class Checkpointer:
    """The only writer of a checkpoint directory. Every process creates one and calls it at the same points."""

    def __init__(self, directory: str | os.PathLike, keep: int = 2):
        """Open `directory`, keeping the newest `keep` steps. Leftovers of an interrupted save are removed."""
        if keep < 1:
            raise ValueError(f"keep={keep} would leave no checkpoint; set it to 1 or more")
        if "://" in str(directory):
            raise ValueError(f"checkpoint directory {directory} is a bucket address: mount it and give the path")
        self._directory = Path(directory).absolute()
        self._keep = keep
        self._orbax = _make_orbax()
        self._verified: tuple[int, tuple] | None = None  # the step chosen by `peek`, and its files' fingerprint then
        self._descriptor: int | None = None  # of the directory, in the first process
        if _is_first_process() and os.path.lexists(self._directory):  # else the first save makes it
            self._open()
        # All processes must agree on this number. The first collective also compiles: better here than in the training
        # loop.
        self._newest = _from_first_process(max(complete_steps(self._directory), default=NO_STEP))
        _barrier("checkpoint_open")

    def steps(self) -> list[int]:
        """Steps on disk, oldest first. Each was complete when saved, but may turn out to be damaged."""
        return complete_steps(self._directory)

    def latest_step(self) -> int | None:
        """The newest step on disk, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, meta: dict) -> None:
        """Write one step and wait until it is on disk.

        `meta` is stored as JSON, which turns keys into strings and tuples into lists. Raises CheckpointError if the
        write fails (e.g. the disk is full) or the directory holds a later step of another run.
        """
        if step < self._newest:
            raise CheckpointError(f"cannot save step {step}: {self._directory} already holds the later step "
                                  f"{self._newest}; resume from it or use another directory")
        for name, leaf in flatten_names(state).items():
            assert isinstance(leaf, (jax.Array, np.ndarray)) and leaf.size, f"{name} is not an array to save: {leaf!r}"
        record = {"arrays": array_table(state), "meta": meta}
        json.dumps(record)  # fail before the write, not half-way, if a value is not JSON-serialisable
        if _is_first_process() and self._descriptor is None:
            self._open()
        committed, self._verified = False, None
        try:
            self._write(step, state, record)
            committed = True
        except (OSError, ValueError, RuntimeError) as error:  # raised by Orbax and tensorstore for a failed write
            if isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1:
                raise  # another process died: nothing is wrong with the disk
            raise CheckpointError(self._describe_failure(step, error)) from error
        finally:
            if committed:
                self._newest = step
            elif _is_first_process():  # also after a second Ctrl-C
                clean_up(self._directory)
        if _is_first_process():
            self._prune(step)
        _barrier(f"checkpoint_{step}")

    def restore(self, abstract_state: Any) -> Restored | None:
        """Load the newest intact step, or return None if there is none. Damaged steps are logged and skipped.

        `abstract_state` holds one jax.ShapeDtypeStruct per array, with the desired sharding. Raises CheckpointError if
        steps exist but all are damaged, or if names, shapes or dtypes differ from `abstract_state`.
        """
        step = self._choose_step()
        self._newest = step  # any later step on disk is damaged, so the next save may replace it
        return None if step == NO_STEP else _load(self._orbax, self._directory, step, abstract_state)

    def peek(self, abstract_state: Any) -> Restored | None:
        """Step and metadata of the checkpoint that `restore` would load, for a check before long work. All of its bytes
        are verified, and `restore` does not verify them again. Raises CheckpointError like `restore`.
        """
        step = self._choose_step()
        if step == NO_STEP:
            return None
        record = _read_record(self._orbax, self._directory / str(step))
        _check_same_arrays(self._directory / str(step), record["arrays"], array_table(abstract_state))
        return Restored(step, None, record["meta"])

    def _open(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            clean_up(self._directory)
            # While it is open, nothing else gets its inode, and it can be asked whether it was removed.
            self._descriptor = os.open(self._directory, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
        except OSError as error:
            raise CheckpointError(f"cannot use checkpoint directory {self._directory}: {error}") from error

    def _choose_step(self) -> int:
        """Like the function, but bytes that `peek` has verified are not read again for `restore`."""
        if self._verified is not None:
            step, files = self._verified
            is_untouched = _is_first_process() and fingerprint_of_files(self._directory / str(step)) == files
            if _from_first_process(int(is_untouched)):
                return step
        step = _choose_step(self._directory)
        files = fingerprint_of_files(self._directory / str(step)) if _is_first_process() else ()
        self._verified = None if step == NO_STEP else (step, files)
        return step

    def _write(self, step: int, state: Any, record: dict) -> None:
        saving = self._directory / f"{step}{SAVING}"
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(flatten_names(state)), record=ocp.args.JsonSave(record))
        with _quiet_orbax():
            _in_daemon_thread(lambda: self._orbax.save(saving, force=True, args=args))
        if _is_first_process():
            seal(saving, step)
            if self._is_gone():  # Orbax has made it again, without anything that belongs to the run
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._directory))
            commit(saving, self._directory / str(step))

    def _is_gone(self) -> bool:
        """Whether the directory that was opened is no longer there, although another may have its name."""
        return not self._directory.is_dir() or (
            self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0
        )

    def _prune(self, saved: int) -> None:
        """Delete steps older than the newest `keep`, and damaged steps later than the one just saved.

        Orbax's own policy would delete the old step before the manifest of the new one is written.
        """
        steps = self.steps()
        kept = [step for step in steps if step <= saved][-self._keep:]
        for step in set(steps) - set(kept):
            remove(self._directory / str(step))

    def _describe_failure(self, step: int, error: Exception) -> str:
        if self._is_gone():
            return (f"could not save step {step}: {self._directory} no longer exists: was it removed during the run? "
                    "The same command starts afresh")
        free_gib = shutil.disk_usage(self._directory).free / 2**30
        # Not the newest step on disk: a later step that was found to be damaged may still be there.
        good = self._newest != NO_STEP
        kept = f"the last good checkpoint (step {self._newest}) is kept" if good else "there is no earlier checkpoint"
        return (f"could not save step {step} in {self._directory} ({free_gib:.2f} GiB free): "
                f"{f'{type(error).__name__}: {error}'.splitlines()[0]}; the half-written step is removed, {kept}. "
                "If the disk is full, free some space or give another directory, then start again to resume")


def _make_orbax() -> ocp.Checkpointer:
    # Replicated arrays are written by one device: splitting the work would compile slices in the middle of the run.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(type_handler_registry=registry), record=ocp.JsonCheckpointHandler()))


def _in_daemon_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread that does not keep the process alive, and wait for it.

    The threads that Orbax starts inherit this. After a failed save they wait ten minutes for folders that nobody makes.
    """
    errors = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (raised again below)
            errors.append(error)

    thread = threading.Thread(target=run, name="save", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Silence the tracebacks that Orbax, asyncio and the writer threads print for every array that cannot be written:
    the error raised here says the same in one line. The threads may fail after it, so they stay silent then."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels, hook = [logger.level for logger in loggers], sys.unraisablehook
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    # Writes that finish after Orbax has given up the others: nothing awaits their result.
    sys.unraisablehook = lambda one: str(one.exc_value) == "Event loop is closed" or sys.__unraisablehook__(one)
    yield
    sys.unraisablehook = hook
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def read_state(directory: str | os.PathLike, abstract_state: Any, part: tuple[str, ...] = ()) -> Restored:
    """Load the newest intact step of a directory that another run may be writing to; nothing on disk is modified.

    With `part`, e.g. ("generator", "params"), only that branch of the saved tree is read, and `abstract_state`
    describes the branch. Raises CheckpointError like Checkpointer.restore, and if there is no complete step.
    """
    directory = Path(directory).absolute()
    step = _choose_step(directory)
    if step == NO_STEP:
        raise CheckpointError(f"{directory} holds no complete checkpoint; give the directory whose folders are named "
                              "by step numbers")
    return _load(_make_orbax(), directory, step, abstract_state, part)


def peek_meta(directory: str | os.PathLike) -> Restored | None:
    """Return step and metadata of another run's newest checkpoint (`state` is None), or None if there is no step.

    Only the record's bytes are verified, so this is quick enough for a check before long work. Raises CheckpointError
    if steps exist but none has an intact record.
    """
    directory = Path(directory).absolute()
    step = _choose_step(directory, below="record")
    return None if step == NO_STEP else Restored(step, None, _read_record(_make_orbax(), directory / str(step))["meta"])


def check_arrays(directory: str | os.PathLike, abstract_state: Any, part: tuple[str, ...] = ()) -> None:
    """Check, before long work, that `read_state` will find arrays of these shapes: raises CheckpointError like it."""
    directory = Path(directory).absolute()
    step = _choose_step(directory, below="record")
    if step != NO_STEP:  # `read_state` says what is missing
        path = directory / str(step)
        _saved_arrays(path, _read_record(_make_orbax(), path), abstract_state, part)


def _load(orbax: ocp.Checkpointer, directory: Path, step: int, abstract_state: Any,
          part: tuple[str, ...] = ()) -> Restored:
    path = directory / str(step)
    record = _read_record(orbax, path)
    prefix = _saved_arrays(path, record, abstract_state, part)
    wanted = {prefix + name: _with_sharding(leaf) for name, leaf in flatten_names(abstract_state).items()}
    arrays = orbax.restore(path, args=ocp.args.Composite(state=ocp.args.PyTreeRestore(
        item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True))).state
    state = jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[name] for name in wanted])
    return Restored(step, state, record["meta"])


def _saved_arrays(path: Path, record: dict, abstract_state: Any, part: tuple[str, ...]) -> str:
    """Check that a part of the saved tree has these arrays, and return what their names begin with."""
    prefix = "".join(f"{name}/" for name in part)
    saved = {name.removeprefix(prefix): array for name, array in record["arrays"].items() if name.startswith(prefix)}
    if not saved:
        roots = sorted({name.split("/")[0] for name in record["arrays"]})
        raise CheckpointError(f"checkpoint {path} has no part {prefix!r}; its top-level names are {', '.join(roots)}")
    _check_same_arrays(path, saved, array_table(abstract_state))
    return prefix


def _read_record(orbax: ocp.Checkpointer, path: Path) -> dict:
    """{"arrays": name -> dtype and shape, "meta": the metadata saved beside them}."""
    return orbax.restore(path, args=ocp.args.Composite(record=ocp.args.JsonRestore())).record


def _check_same_arrays(path: Path, saved: dict[str, str], wanted: dict[str, str]) -> None:
    """Compare names, shapes and dtypes before any bytes are read: Orbax would cast a wrong dtype silently."""
    names = sorted(saved.keys() | wanted.keys())
    differing = [name for name in names if saved.get(name) != wanted.get(name)]
    if not differing:
        return
    clauses = [f"{name}: checkpoint {saved.get(name, 'has none')}, this run {wanted.get(name, 'has none')}"
               for name in differing[:LISTED_DIFFERENCES]]
    if len(differing) > LISTED_DIFFERENCES:
        clauses.append(f"and {len(differing) - LISTED_DIFFERENCES} more")
    raise CheckpointError(f"{path} is a checkpoint of another model or optimizer: {len(differing)} of {len(names)} "
                          f"arrays differ ({'; '.join(clauses)}). Start with the config it was saved with, or give "
                          "another directory")


def _choose_step(directory: Path, below: str = "") -> int:
    """The newest intact step, as read by the first process. For `below` see `manifest.find_damage`."""
    step = _from_first_process(newest_verified(directory, below) if _is_first_process() else NO_STEP)
    if step == ALL_DAMAGED:
        raise CheckpointError(f"every checkpoint in {directory} is damaged (the log names the files); restore the "
                              "directory from a copy, or move it away to start afresh")
    return step


def _with_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        assert jax.process_count() == 1, f"with {jax.process_count()} processes every array needs a sharding: {leaf}"
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _is_first_process() -> bool:
    return jax.process_index() == 0


def _from_first_process(value: int) -> int:
    return value if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
