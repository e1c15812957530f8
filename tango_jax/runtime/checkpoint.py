"""Checkpoints that survive kills, full disks and flipped bytes.

A save copies the state to host memory. While training goes on, Orbax writes each step, arrays and a JSON record, under
a temporary name; then `<directory>/<step>/` is sealed (sealed.py) and renamed.
"""

import concurrent.futures
import contextlib
import errno
import functools
import itertools
import json
import logging
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from tango_jax.runtime import hosts
from tango_jax.runtime.sealed import (
    ALL_DAMAGED,
    NO_STEP,
    SAVING,
    clean_up,
    commit,
    complete_steps,
    digests_of,
    fingerprint_of_files,
    manifest_text,
    newest_verified,
    parse_manifest,
    remove,
    seal,
)
from tango_jax.runtime.stored_arrays import DATA_FILE_BYTES, read_stored
from tango_jax.runtime.trees import array_table, flatten_names, prefix_of
from tango_jax.runtime.unread import Unread

log = logging.getLogger(__name__)

WRITE_LIMIT_S = 24 * 3600  # Orbax's own limit of 20 minutes is too short for a large state on a slow disk
LISTED_DIFFERENCES = 5
_numbers = itertools.count()  # tell the checkpointers of a job apart, which all processes create in the same order


class CheckpointError(ValueError):
    """A checkpoint cannot be written, or does not fit this run."""


class Restored(NamedTuple):
    step: int
    state: Any  # the arrays; None where only the metadata was read
    meta: dict


class Checkpointer:
    """The only writer of a checkpoint directory. Every process creates one and calls it at the same points.

    As a context manager it waits for its last save at the end.
    """

    def __init__(self, directory: str | os.PathLike, keep: int = 2):
        """Keeps the newest `keep` steps, and removes what an interrupted save left."""
        if keep < 1:
            raise ValueError(f"keep={keep} would leave no checkpoint; set it to 1 or more")
        if "://" in str(directory):
            raise ValueError(f"checkpoint directory {directory} is a bucket address: mount it and give the path")
        self._directory = Path(directory).resolve()  # the tensor store refuses `..`
        self._keep = keep
        self._name = f"tango_jax_checkpoints_{next(_numbers)}"  # among all that processes tell each other
        self._orbax = _make_orbax(self._name)
        self._pending: concurrent.futures.Future | None = None  # the save in the background
        self._verified: tuple[int, tuple] | None = None  # the step chosen by `peek`, and its files' fingerprint then
        self._descriptor: int | None = None  # of the directory, in the first process
        if hosts.is_first() and os.path.lexists(self._directory):  # else the first save makes it
            self._open()
        self._newest = hosts.from_first(max(complete_steps(self._directory), default=NO_STEP))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        """An error of the save does not hide another one. SIGTERM is none: what was saved before it must be whole."""
        if isinstance(error, KeyboardInterrupt):  # the second Ctrl-C
            if self._pending is not None and hosts.is_first():
                clean_up(self._directory)
        elif error is None or isinstance(error, hosts.Preempted):
            self.wait()
        elif not _lost_peer(error):
            self._join()

    def steps(self) -> list[int]:
        """Numbers of the saved steps, ascending; some may be damaged."""
        return complete_steps(self._directory)

    def latest_step(self) -> int | None:
        """With what is being saved, for which this waits."""
        self._join()
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, meta: dict, protected: int | None = None) -> None:
        """Copy the state, and write it in the background. `meta` must be JSON. Raises CheckpointError.

        `protected`: a step, this one or an earlier one, that is kept beside the newest.

        Waits for the save before this one, and raises its error: host memory holds one copy of a state. The state may
        be donated afterwards.
        """
        self.wait()
        if step < self._newest:
            raise CheckpointError(f"cannot save step {step}: {self._directory} already holds the later step "
                                  f"{self._newest}; resume from it or use another directory")
        for name, leaf in flatten_names(state).items():
            assert isinstance(leaf, (jax.Array, np.ndarray)) and leaf.size, f"{name} is not an array to save: {leaf!r}"
        # Fails before the write, not half-way, if a value is not JSON-serialisable; and the caller may change `meta`.
        record = json.loads(json.dumps({"arrays": array_table(state), "meta": meta}))
        if hosts.is_first() and self._descriptor is None:
            self._open()
        self._verified = None
        copied, done = threading.Event(), concurrent.futures.Future()
        arguments = (step, state, record, protected, copied, done)
        # Orbax's threads inherit `daemon`: what a failed save leaves must not keep the process.
        threading.Thread(target=self._run_save, args=arguments, name="save", daemon=True).start()
        self._pending = done
        copied.wait()
        self.check()

    def check(self) -> None:
        """Raises the CheckpointError of a save that has failed; waits for none."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Until what was saved is on disk. Raises CheckpointError."""
        self._join()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _join(self) -> None:
        concurrent.futures.wait([self._pending] if self._pending is not None else [])

    def _run_save(
        self, step: int, state: Any, record: dict, protected: int | None, copied: threading.Event,
        done: concurrent.futures.Future,
    ) -> None:
        try:
            self._write(step, state, record, copied)
            self._newest = step
            if hosts.is_first():
                self._prune(step, protected)
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001 (`wait` raises it)
            done.set_exception(error)
        finally:
            copied.set()

    def _write(self, step: int, state: Any, record: dict, copied: threading.Event) -> None:
        saving, is_committed = self._directory / f"{step}{SAVING}", False
        try:
            arrays = ocp.args.PyTreeSave(flatten_names(state), ocdbt_target_data_file_size=DATA_FILE_BYTES)
            args = ocp.args.Composite(state=arrays, record=ocp.args.JsonSave(record))
            with _quiet_orbax():
                self._orbax.save(saving, force=True, args=args)  # all processes meet on their devices here
                copied.set()
                self._orbax.wait_until_finished()
            self._seal(saving, step)
            is_committed = True
        except (OSError, ValueError, RuntimeError) as error:  # raised by Orbax and tensorstore for a failed write
            if lost := _lost_peer(error):  # nothing is wrong with the disk
                raise lost from error
            raise CheckpointError(self._describe_failure(step, error)) from error
        finally:
            if not is_committed and hosts.is_first():
                clean_up(self._directory)

    def _seal(self, saving: Path, step: int) -> None:
        """Each process hashes what it wrote. The job's coordinator passes the digests on: devices are training."""
        digests, key = digests_of(saving, jax.process_index()), f"{self._name}/{step}"
        client = ocp.multihost.get_jax_distributed_client() if jax.process_count() > 1 else None
        if not hosts.is_first():
            client.key_value_set(f"{key}/{jax.process_index()}", manifest_text(digests))
            client.blocking_key_value_get(f"{key}/committed", WRITE_LIMIT_S * 1000)
            return
        for process in range(1, jax.process_count()):
            digests |= parse_manifest(client.blocking_key_value_get(f"{key}/{process}", WRITE_LIMIT_S * 1000))
            client.key_value_delete(f"{key}/{process}")
        seal(saving, step, digests)
        if self._is_gone():  # Orbax has made it again, without anything that belongs to the run
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._directory))
        commit(saving, self._directory / str(step))
        if client is not None:
            client.key_value_set(f"{key}/committed", "")

    def restore(self, abstract_state: Any) -> Restored | None:
        """The newest intact step, or None. Damaged steps are logged and skipped. Raises CheckpointError.

        `abstract_state`: a jax.ShapeDtypeStruct with a sharding for each array.
        """
        step = self._choose_step()
        self._newest = step  # any later step on disk is damaged, so the next save may replace it
        return None if step == NO_STEP else _load(self._orbax, self._directory, step, abstract_state)

    def peek(self, abstract_state: Any) -> Restored | None:
        """What `restore` would load, without arrays. Verifies all bytes, so that `restore` need not. Raises like
        `restore`."""
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
            # While this is open, no other folder gets its inode, and `st_nlink` shows a removal.
            self._descriptor = os.open(self._directory, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
        except OSError as error:
            raise CheckpointError(f"cannot use checkpoint directory {self._directory}: {error}") from error

    def _choose_step(self) -> int:
        """Does not reread what `peek` has verified."""
        if self._verified is not None:
            step, files = self._verified
            if hosts.from_first(hosts.is_first() and fingerprint_of_files(self._directory / str(step)) == files):
                return step
        step = _choose_step(self._directory)
        files = fingerprint_of_files(self._directory / str(step)) if hosts.is_first() else ()
        self._verified = None if step == NO_STEP else (step, files)
        return step

    def _is_gone(self) -> bool:
        """Whether the opened directory was removed, even if another now has its name."""
        return not self._directory.is_dir() or (
            self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0
        )

    def _prune(self, saved: int, protected: int | None) -> None:
        """Orbax would delete the old step before the new one has a manifest."""
        steps = self.steps()
        kept = [step for step in steps if step <= saved][-self._keep:]
        for step in set(steps) - {*kept, protected}:
            remove(self._directory / str(step))

    def _describe_failure(self, step: int, error: Exception) -> str:
        if self._is_gone():
            return (f"could not save step {step}: {self._directory} no longer exists: was it removed during the run? "
                    "The same command starts afresh")
        free_gib = shutil.disk_usage(self._directory).free / 2**30
        # The newest step on disk may be damaged.
        good = self._newest != NO_STEP
        kept = f"the last good checkpoint (step {self._newest}) is kept" if good else "there is no earlier checkpoint"
        return (f"could not save step {step} in {self._directory} ({free_gib:.2f} GiB free): "
                f"{f'{type(error).__name__}: {error}'.splitlines()[0]}; the half-written step is removed, {kept}. "
                "If the disk is full, free some space or give another directory, then start again to resume")


def _make_orbax(name: str = "") -> ocp.AsyncCheckpointer:
    """`name`: for barriers of a save, one for each checkpointer."""
    # One device writes a replicated array: splitting it would compile slices in the middle of the run.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    # A folder that cannot be made is an error at once: other threads would wait ten minutes for it.
    options = ocp.options.AsyncOptions(timeout_secs=WRITE_LIMIT_S, create_directories_asynchronously=False)
    # On GPUs Orbax would copy to pinned memory, of which XLA grants a process 64 GiB and returns none.
    state = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, enable_pinned_host_transfer=False)
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(async_options=options), state=state, record=ocp.JsonCheckpointHandler())
    return ocp.AsyncCheckpointer(
        handler, async_options=options,
        multiprocessing_options=ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=name))


def _lost_peer(error: BaseException) -> BaseException | None:
    """The error of a process that others have left. Orbax raises a TimeoutError from it."""
    found = error.__cause__ if isinstance(error, TimeoutError) else error
    return found if isinstance(found, jax.errors.JaxRuntimeError) and jax.process_count() > 1 else None


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Silence the traceback for every array that cannot be written, also after an error: threads may fail later."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels, hook = [logger.level for logger in loggers], sys.unraisablehook
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    # From writes that nothing awaits once Orbax has given up.
    sys.unraisablehook = lambda one: str(one.exc_value) == "Event loop is closed" or sys.__unraisablehook__(one)
    yield
    sys.unraisablehook = hook
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def read_state(
    directory: str | os.PathLike, abstract_state: Any, part: tuple[str, ...] = (), only: int | None = None
) -> Restored:
    """The newest intact step, or else CheckpointError. `part`, e.g. ("generator", "params"): the branch to read.
    `only`: the step to read."""
    directory = Path(directory).resolve()
    return _load(_make_orbax(), directory, _existing_step(directory, only=only), abstract_state, part)


def open_state(
    directory: str | os.PathLike, abstract_state: Any, part: tuple[str, ...] = (), only: int | None = None
) -> Restored:
    """As `read_state`, but the arrays are `Unread`: each is read alone. Files without arrays of `part` are not
    verified."""
    directory = Path(directory).resolve()
    path = directory / str(step := _existing_step(directory, part, only))
    record = _read_record(_make_orbax(), path)
    prefix = _saved_arrays(path, record, abstract_state, part)
    leaves = [Unread(leaf.shape, leaf.dtype, functools.partial(read_stored, path, prefix + name, leaf))
              for name, leaf in flatten_names(abstract_state).items()]
    return Restored(step, jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), record["meta"])


def _existing_step(directory: Path, part: tuple[str, ...] = (), only: int | None = None) -> int:
    step = _choose_step(directory, part=part, only=only)
    if step == NO_STEP:
        raise CheckpointError(f"{directory} holds no complete checkpoint; give the directory whose folders are named "
                              "by step numbers")
    return step


def peek_meta(
    directory: str | os.PathLike, abstract_state: Any = None, part: tuple[str, ...] = ()
) -> Restored | None:
    """Step and metadata of the newest checkpoint (`state` is None); None: no step. Verifies only the record.

    Raises CheckpointError if no step has an intact record, or one lacks the arrays of `abstract_state`.
    """
    directory = Path(directory).resolve()
    step = _choose_step(directory, below="record")
    if step == NO_STEP:
        return None
    record = _read_record(_make_orbax(), directory / str(step))
    if abstract_state is not None:
        _saved_arrays(directory / str(step), record, abstract_state, part)
    return Restored(step, None, record["meta"])


def _load(orbax: ocp.AsyncCheckpointer, directory: Path, step: int, abstract_state: Any,
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
    prefix = prefix_of(part)
    saved = {name.removeprefix(prefix): array for name, array in record["arrays"].items() if name.startswith(prefix)}
    if not saved:
        roots = sorted({name.split("/")[0] for name in record["arrays"]})
        raise CheckpointError(f"checkpoint {path} has no part {prefix!r}; its top-level names are {', '.join(roots)}")
    _check_same_arrays(path, saved, array_table(abstract_state))
    return prefix


def _read_record(orbax: ocp.AsyncCheckpointer, path: Path) -> dict:
    """{"arrays": name -> dtype and shape, "meta": metadata}."""
    return orbax.restore(path, args=ocp.args.Composite(record=ocp.args.JsonRestore())).record


def _check_same_arrays(path: Path, saved: dict[str, str], wanted: dict[str, str]) -> None:
    """Orbax would cast a wrong dtype silently."""
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


def _choose_step(directory: Path, below: str = "", part: tuple[str, ...] = (), only: int | None = None) -> int:
    step = hosts.from_first(newest_verified(directory, below, part, only) if hosts.is_first() else NO_STEP)
    if step == ALL_DAMAGED:
        which = "every checkpoint" if only is None else f"step {only}"
        raise CheckpointError(f"{which} in {directory} is damaged (the log names the files); restore the "
                              "directory from a copy, or move it away to start afresh")
    return step


def _with_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        assert jax.process_count() == 1, f"with {jax.process_count()} processes every array needs a sharding: {leaf}"
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
