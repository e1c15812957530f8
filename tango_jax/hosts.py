"""Several processes, one program: joining them, what each one works on, and what all of them must know.

Every process samples, parses and grades its own share of a turn's problems. The small records that come out are then
exchanged, so that group statistics, batch-wide statistics, metrics and counters are computed from the whole batch by
every process, with the code of a single one, and are the same everywhere. Arrays on devices never pass through here.
"""

import os
import pickle
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

_EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


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


def agree_max(value: int) -> int:
    """The largest of the processes' values."""
    return max(gather([value]))


def _exchange(value: Any) -> list:
    """Every process's value, in their order."""
    sent = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.int64(sent.size)).reshape(-1)
    padded = np.zeros((_rounded(int(sizes.max())),), np.uint8)
    padded[: sent.size] = sent
    received = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(received, sizes, strict=True)]


def _rounded(size: int) -> int:
    """The next power of two: each new length would be compiled once more."""
    return 1 << max(size - 1, 1023).bit_length()
