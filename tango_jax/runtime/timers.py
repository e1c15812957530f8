"""Measures time and memory of each phase of a step, and counts the programs that XLA compiles."""

import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax

BACKEND_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts the programs handed to XLA within the block, also those in the persistent cache. Each means that a new
    shape, dtype or sharding reached a jitted function, which must not happen after warm-up."""

    def __init__(self):
        self.compilations: list[str] = []  # names of the jitted functions
        self._warm_at: int | None = None

    def _on_event(self, event: str, duration: float, **details: Any) -> None:
        if event == BACKEND_COMPILE_EVENT:
            self.compilations.append(str(details.get("fun_name", "unknown")))

    def mark_warm(self) -> None:
        """No compilation should follow."""
        self._warm_at = len(self.compilations)

    def late(self) -> list[str]:
        """The compilations since mark_warm(); none before it."""
        return [] if self._warm_at is None else self.compilations[self._warm_at:]

    def __enter__(self) -> "CompileCounter":
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *exception) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)


class PhaseTimer:
    """Seconds of each phase of a step, and the peak memory after it: `with timer("sample"): ...`, then pop()."""

    def __init__(self):
        self._seconds: dict[str, float] = {}
        self._memory: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block; blocks with the same name add up."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            self._memory |= {f"memory/{name}_{kind}_gib": gib for kind, gib in memory_gib().items()}

    def pop(self) -> dict[str, float]:
        """{"time/<name>_s": seconds since the last pop, "memory/<name>_<kind>_gib": peak as the phase ended}."""
        popped = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()} | self._memory
        self._seconds, self._memory = {}, {}
        return popped


def memory_gib() -> dict[str, float]:
    """Peak memory since the start, in GiB: `host` of this process and, if reported, `device` of its fullest one."""
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    unit = 2**30 if sys.platform == "darwin" else 2**20
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [item["peak_bytes_in_use"] / 2**30 for item in stats if "peak_bytes_in_use" in item]
    host = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}
    return host | ({"device": max(peaks)} if peaks else {})
