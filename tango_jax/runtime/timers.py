"""Time and memory of each phase of a step, and the number of programs that XLA compiles."""

import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax

BACKEND_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts programs handed to XLA in the block, cached ones too. After warm-up there must be none."""

    def __init__(self):
        self.compilations: list[str] = []  # names of the jitted functions
        self._warm_at: int | None = None

    def _on_event(self, event: str, duration: float, **details: Any) -> None:
        if event == BACKEND_COMPILE_EVENT:
            self.compilations.append(str(details.get("fun_name", "unknown")))

    def mark_warm(self) -> None:
        self._warm_at = len(self.compilations)

    def late(self) -> list[str]:
        return [] if self._warm_at is None else self.compilations[self._warm_at:]

    def __enter__(self) -> "CompileCounter":
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *exception) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)


class PhaseTimer:
    """Seconds and peak memory of each phase: `with timer("sample"): ...`, then pop()."""

    def __init__(self):
        self._seconds: dict[str, float] = {}
        self._memory: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Blocks with the same name add up."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)
            self._memory |= {f"memory/{name}_{kind}_gib": gib for kind, gib in memory_gib().items()}

    def add(self, name: str, seconds: float) -> None:
        """For what was measured elsewhere, such as by another thread."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def pop(self) -> dict[str, float]:
        """{"time/<name>_s": seconds since the last pop, "memory/<name>_<kind>_gib": peak as the phase ended}."""
        popped = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()} | self._memory
        self._seconds, self._memory = {}, {}
        return popped


def memory_gib() -> dict[str, float]:
    """Peak since the start: `host` of this process, and `device` of its fullest one, if reported."""
    # KiB on Linux, bytes on macOS.
    unit = 2**30 if sys.platform == "darwin" else 2**20
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [item["peak_bytes_in_use"] / 2**30 for item in stats if "peak_bytes_in_use" in item]
    host = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}
    return host | ({"device": max(peaks)} if peaks else {})
