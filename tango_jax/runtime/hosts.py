"""Several processes, one program.

Each process samples and grades its share of a turn's problems. They exchange records, so that each computes metrics
from the whole batch. Arrays on devices never pass through here.
"""

import contextlib
import faulthandler
import os
import pickle
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tango_jax.runtime import termination

PREEMPTED = termination.PREEMPTED
PEER_LOST = 76  # exit code: another process is gone, start all again

_EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
HEARTBEAT_S = 60  # the job ends if a process is silent for so long
CONNECT_S = 300  # seconds to wait for the other processes at the start
# jax's assertion fails for a named platform whose package is missing.
_NO_DEVICE = (RuntimeError, AssertionError)
_FIRST_MESSAGE_BYTES, _CHUNK_BYTES, _LENGTH_BYTES = 4096, 2**20, 8


class Preempted(Exception):
    """SIGTERM came, and the state is saved."""


class Preemption:
    """SIGTERM and Ctrl-C in a run that saves.

    In a `held` block a signal sets a flag, read between two steps and while sampling. Outside, it ends the process at
    once. Several processes must end at the same place: with them a signal always sets the flag.
    """

    def __init__(self, is_watching: bool = True):
        """`is_watching` False: the calling program keeps the signals."""
        self._is_watching = is_watching
        if is_watching:
            termination.watch()
            self._release()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        if self._is_watching:
            termination.hold()
        yield
        if self._is_watching:
            self._release()

    def _release(self) -> None:
        if jax.process_count() > 1:
            termination.hold()
        else:
            termination.release()

    def is_due(self) -> bool:
        """Whether any process was told to stop; all must call this."""
        return max_over_processes(termination.is_requested())[0]

    def check(self) -> None:
        """Raises Preempted if any process was told to stop; all must call this."""
        if self.is_due():
            raise Preempted

    def ends_sampling(self, show_fn: Callable[[str], None]) -> Callable[[str], None]:
        """`show_fn`, called while sampling; raises Preempted on a signal. Several processes end between turns."""

        def show(part: str) -> None:
            if self._is_watching and termination.is_requested() and jax.process_count() == 1:
                raise Preempted
            show_fn(part)

        return show


def connect() -> None:
    """Join the job's other processes, before the first array is made. Raises ValueError for wrong variables.

    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID describe the job. Without them, TANGO_DISTRIBUTED=1
    lets jax ask the cluster's manager (SLURM, Cloud TPU, GKE, OpenMPI).
    """
    given = [name for name in _EXPLICIT if os.environ.get(name)]
    is_asked_for = os.environ.get("TANGO_DISTRIBUTED") == "1"
    if jax.distributed.is_initialized() or (not given and not is_asked_for):
        return
    explicit = _explicit_settings(given) if given else {}
    faulthandler.enable()  # the abort of a process that has lost its peers then shows what it was doing
    jax.distributed.initialize(
        **explicit,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        initialization_timeout=CONNECT_S,
    )


def _explicit_settings(given: Sequence[str]) -> dict[str, str | int]:
    """Over a wrong variable jax would wait for minutes, or end the process."""
    if missing := [name for name in _EXPLICIT if name not in given]:
        raise ValueError(f"{', '.join(given)} is set, but {', '.join(missing)} is not: set all three or none")
    address = os.environ["JAX_COORDINATOR_ADDRESS"]
    host, _, port = address.rpartition(":")
    if not host or host != host.strip() or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
        raise ValueError(f"JAX_COORDINATOR_ADDRESS={address!r} must be the first process's HOST:PORT, such as "
                         "10.0.0.1:1234")
    numbers = {}
    for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        if not re.fullmatch(r"[0-9]{1,9}", os.environ[name]):
            raise ValueError(f"{name}={os.environ[name]!r} must be a whole number that is not negative")
        numbers[name] = int(os.environ[name])
    count, index = numbers.values()
    if not index < count:
        raise ValueError(f"JAX_PROCESS_ID={index} must be below JAX_NUM_PROCESSES={count}: the first process is 0")
    return {"coordinator_address": address, "num_processes": count, "process_id": index}


def is_first() -> bool:
    return jax.process_index() == 0


def check_devices() -> None:
    """Raises ValueError if jax finds no device; among several processes, jax's error."""
    try:
        jax.devices()
    except _NO_DEVICE as error:
        if jax.distributed.is_initialized():
            raise  # the other processes may be the cause
        platforms = os.environ.get("JAX_PLATFORMS")
        wanted = f" of JAX_PLATFORMS={platforms}" if platforms else ""
        reason = " ".join(str(error).split()) or "its package is not installed"
        raise ValueError(f"jax finds no device{wanted} ({reason}): install jax for it, such as jax[cuda12] or "
                         "jax[tpu], see that the driver runs, or choose another with JAX_PLATFORMS") from error


def is_alone() -> bool:
    """Whether this is the only process; works without a device."""
    try:
        return jax.process_count() == 1
    except _NO_DEVICE:
        return not jax.distributed.is_initialized()


def own_part(items: Sequence) -> Sequence:
    """This process's consecutive share of the items."""
    start, stop = own_range(len(items))
    return items[start:stop]


def own_range(count: int) -> tuple[int, int]:
    """Indices [start, stop) of this process's share."""
    index, processes = jax.process_index(), jax.process_count()
    return count * index // processes, count * (index + 1) // processes


def join_parts(items: Sequence) -> list:
    """All processes' items in order: the inverse of `own_part`. All must call this. Items are pickled."""
    if jax.process_count() == 1:
        return list(items)
    return [item for part in _exchange(list(items)) for item in part]


ONCE_MENDED = (". Once that is mended, the same command resumes from the last checkpoint; if a file was edited for "
               "that, the command first says how to accept the change")


def raise_mistake(mistake: str) -> None:
    """Raise ValueError in all processes if one has a text; all must call this."""
    raise_first(join_parts([mistake]))


def raise_first(mistakes: Iterable[str]) -> None:
    """Raise ValueError if there is a text among those of all processes."""
    if first := next(filter(None, mistakes), ""):
        raise ValueError(f"{first}{ONCE_MENDED}")


def max_over_processes(*values: int) -> tuple[int, ...]:
    """The maximum over processes of each value; all must call this."""
    return tuple(map(max, zip(*join_parts([values]), strict=True)))


def from_first(value: Any) -> Any:
    """The first process's value; all must call this."""
    return join_parts([value])[0]


def in_first(work_fn: Callable[[], None]) -> None:
    """Run `work_fn` in the first process; all must call this, and raise its ValueError or OSError as ValueError."""
    mistake = ""
    if is_first():
        try:
            work_fn()
        except (ValueError, OSError) as error:
            mistake = str(error)
    if mistake := from_first(mistake):
        raise ValueError(mistake)


def compile_exchange() -> None:
    join_parts([bytes(2 * _FIRST_MESSAGE_BYTES)])


def _exchange(value: Any) -> list:
    """All processes' values. One message has the pickled length and beginning, chunks the rest: two compiled shapes."""
    pickled = pickle.dumps(value)
    own = struct.pack("<Q", len(pickled)) + pickled
    first = _allgather(own[:_FIRST_MESSAGE_BYTES], _FIRST_MESSAGE_BYTES)
    ends = [_LENGTH_BYTES + struct.unpack("<Q", row[:_LENGTH_BYTES])[0] for row in first]
    chunks = [_allgather(own[start : start + _CHUNK_BYTES], _CHUNK_BYTES)
              for start in range(_FIRST_MESSAGE_BYTES, max(ends), _CHUNK_BYTES)]
    received = np.concatenate([first, *chunks], axis=1)
    return [pickle.loads(row[_LENGTH_BYTES:end]) for row, end in zip(received, ends, strict=True)]


def _allgather(data: bytes, size: int) -> np.ndarray:
    """uint8 [processes, size]"""
    padded = np.frombuffer(data.ljust(size, b"\0"), np.uint8)
    return multihost_utils.process_allgather(padded).reshape(-1, size)
