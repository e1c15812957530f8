"""Several processes, one program: joining them, what each one works on, and what all of them must know.

Every process samples, parses and grades its own share of a turn's problems. The small records that come out are then
exchanged, so that group statistics, batch-wide statistics, metrics and counters are computed from the whole batch by
every process, with the code of a single one, and are the same everywhere. Arrays on devices never pass through here.
"""

import faulthandler
import os
import pickle
import signal
import struct
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

PREEMPTED = 75  # exit code: the state is saved, start again (EX_TEMPFAIL)
PEER_LOST = 76  # exit code: another process is gone, start all again

_EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_LETTER, _HEADER, _PARCEL = 4096, 8, 2**20  # bytes


class Preempted(Exception):
    """SIGTERM came, and the state is saved."""


class Preemption:
    """Notes SIGTERM, which schedulers send before they take a machine away. Between two steps every process asks
    `is_due`; all then save and stop at the same one."""

    def __init__(self):
        self._is_due = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, signum, frame) -> None:
        self._is_due = True

    def is_due(self) -> bool:
        """Whether any process was told to stop; all of them must ask."""
        return agree_max(self._is_due)[0]


def connect(settings: ConfigDict) -> None:
    """Join the other processes of the job, before the first array is made. Alone, without settings, it does nothing.

    The environment's JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say who is there. Without them, and
    with `distributed.enabled`, jax asks the cluster's manager (SLURM, Cloud TPU, GKE, OpenMPI).

    Raises:
        ValueError: some of the three variables are missing.
    """
    given = [name for name in _EXPLICIT if os.environ.get(name)]
    if not given and not settings.enabled:
        return
    explicit = {}
    if given:
        missing = [name for name in _EXPLICIT if name not in given]
        if missing:
            raise ValueError(f"{', '.join(given)} is set, but {', '.join(missing)} is not: set all three or none")
        explicit = {
            "coordinator_address": os.environ["JAX_COORDINATOR_ADDRESS"],
            "num_processes": int(os.environ["JAX_NUM_PROCESSES"]),
            "process_id": int(os.environ["JAX_PROCESS_ID"]),
        }
    # The abort of a process that has lost its peers then shows what it was doing.
    faulthandler.enable()
    jax.distributed.initialize(
        **explicit,
        heartbeat_timeout_seconds=settings.heartbeat_s,
        initialization_timeout=settings.connect_s,
    )


def is_first() -> bool:
    """Whether this process writes logs and results."""
    return jax.process_index() == 0


def own_part(items: Sequence) -> Sequence:
    """This process's share of what all of them hold: consecutive, in the order of processes, sizes differ by one."""
    start, stop = own_range(len(items))
    return items[start:stop]


def own_range(count: int) -> tuple[int, int]:
    """First and last-plus-one index of this process's share of `count` items."""
    index, processes = jax.process_index(), jax.process_count()
    return count * index // processes, count * (index + 1) // processes


def gather(items: Sequence) -> list:
    """The lists of all processes joined in their order: the inverse of `own_part`. All of them must call it.

    Items are sent as Python objects; keep them small (records and texts, not arrays of a model).
    """
    if jax.process_count() == 1:
        return list(items)
    return [item for part in _exchange(list(items)) for item in part]


def agree_max(*values: int) -> tuple[int, ...]:
    """The largest of the processes' values, for each of them."""
    return tuple(map(max, zip(*gather([values]), strict=True)))


def from_first(value: Any) -> Any:
    """The first process's value, in all of them."""
    return gather([value])[0]


def in_first(work_fn: Callable[[], None]) -> None:
    """Run `work_fn` in the first process alone; all of them must call this.

    Raises:
        ValueError: in all of them, where it raises ValueError or OSError.
    """
    mistake = ""
    if is_first():
        try:
            work_fn()
        except (ValueError, OSError) as error:
            mistake = str(error)
    if mistake := from_first(mistake):
        raise ValueError(mistake)


def warm_up() -> None:
    """Compile both sizes of an exchange."""
    gather([bytes(2 * _LETTER)])


def _exchange(value: Any) -> list:
    """Every process's value, in their order: a letter of fixed size that begins with the length of the message, then
    parcels of fixed size for what did not fit. Two shapes, so that no message compiles anything new."""
    message = pickle.dumps(value)
    first = _allgather(struct.pack("<Q", len(message)) + message[: _LETTER - _HEADER], _LETTER)
    sizes = [struct.unpack("<Q", letter[:_HEADER])[0] for letter in first]
    messages = [letter[_HEADER:] for letter in first]
    for start in range(_LETTER - _HEADER, max(sizes), _PARCEL):
        parcels = _allgather(message[start : start + _PARCEL], _PARCEL)
        messages = [done + parcel for done, parcel in zip(messages, parcels, strict=True)]
    return [pickle.loads(message[:size]) for message, size in zip(messages, sizes, strict=True)]


def _allgather(data: bytes, size: int) -> list[bytes]:
    padded = np.frombuffer(data.ljust(size, b"\0"), np.uint8)
    return [row.tobytes() for row in multihost_utils.process_allgather(padded).reshape(-1, size)]
