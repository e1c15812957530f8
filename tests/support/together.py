"""Threads that take the place of a job's processes."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from support.processes import HANG_S


class Together:
    """`run` calls a function in each of several threads, which jax then takes for its processes. Only they can
    exchange: a thread that one of them starts fails where it tries to."""

    def __init__(self, monkeypatch, count: int):
        self.count, self._local, self._slots = count, threading.local(), [None] * count
        self.exchanged: list[list[tuple[int, ...]]] = [[] for _ in range(count)]  # shapes, by process
        self._barrier = threading.Barrier(count, timeout=HANG_S)
        monkeypatch.setattr(jax, "process_count", lambda: count)
        monkeypatch.setattr(jax, "process_index", lambda: self._local.index)
        monkeypatch.setattr(multihost_utils, "process_allgather", self._gather)

    def _gather(self, array: np.ndarray) -> np.ndarray:
        self._slots[self._local.index] = array
        self.exchanged[self._local.index].append(array.shape)
        self._barrier.wait()
        gathered = np.stack(self._slots)
        self._barrier.wait()
        return gathered

    def run(self, function: Callable[[int], Any]) -> list:
        """What each returned or raised."""
        found: list = [None] * self.count

        def call(index: int) -> None:
            self._local.index = index
            try:
                found[index] = function(index)
            except Exception as error:
                found[index] = error
                if not isinstance(error, ValueError):  # which all raise together
                    self._barrier.abort()

        threads = [threading.Thread(target=call, args=(index,)) for index in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found
