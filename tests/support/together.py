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
        self.count, self._local = count, threading.local()
        self.exchanged: list[list[tuple[int, ...]]] = [[] for _ in range(count)]  # shapes, by process
        self._rounds: dict[int, dict[int, np.ndarray]] = {}  # number of the exchange -> process -> what it gave
        self._is_over, self._changed = False, threading.Condition()
        monkeypatch.setattr(jax, "process_count", lambda: count)
        monkeypatch.setattr(jax, "process_index", lambda: self._local.index)
        monkeypatch.setattr(multihost_utils, "process_allgather", self._gather)

    def _gather(self, array: np.ndarray) -> np.ndarray:
        own = self.exchanged[self._local.index]
        with self._changed:
            given = self._rounds.setdefault(len(own), {})
            given[self._local.index] = array
            own.append(array.shape)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(given) == self.count or self._is_over, HANG_S)
        assert len(given) == self.count, f"exchange {len(own)} of process {self._local.index}: others take no part"
        return np.stack([given[index] for index in range(self.count)])

    def run(self, function: Callable[[int], Any]) -> list:
        """What each returned or raised."""
        found: list = [None] * self.count

        def call(index: int) -> None:
            self._local.index = index
            try:
                found[index] = function(index)
            except Exception as error:
                found[index] = error
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

        threads = [threading.Thread(target=call, args=(index,)) for index in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found
