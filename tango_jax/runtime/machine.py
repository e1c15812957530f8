"""The machine: its memory, and its measured matmul and memory rates."""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_machine() -> str:
    device = jax.devices()[0]
    processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    cores = f"{num_cpus()} CPU core{'s' * (num_cpus() != 1)}"
    return f"{jax.device_count()} x {device.device_kind} ({jax.default_backend()}){processes}, {cores}"


def host_memory() -> int:
    """Bytes of this machine or container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in CONTAINER_LIMITS:
        try:
            memory = min(memory, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return memory


def device_memory() -> int:
    """Bytes per device; CPU devices share the machine's memory."""
    devices = jax.local_devices()
    stats = devices[0].memory_stats() if devices[0].platform != "cpu" else None
    return stats["bytes_limit"] if stats else host_memory() // len(devices)


def median_seconds(
    fn: Callable[[Any], object], runs: int, prepare_fn: Callable[[int], object] = lambda i: i
) -> float:
    """Median over `runs` calls of `fn(prepare_fn(i))`, without `prepare_fn`, after two warm-up calls."""
    return medians_of_alternating_runs([fn], runs, prepare_fn)[0]


def medians_of_alternating_runs(
    fns: list[Callable[[Any], object]], runs: int, prepare_fn: Callable[[int], object] = lambda i: i
) -> list[float]:
    """Calls alternate, so that a slowdown affects all functions alike."""
    times = [[] for _ in fns]
    for i in range(runs + 2):
        for fn, seconds in zip(fns, times, strict=True):
            argument = jax.block_until_ready(prepare_fn(i))
            start = time.perf_counter()
            jax.block_until_ready(fn(argument))
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds[2:]) for seconds in times]


def machine_rates() -> dict[str, float]:
    """Rates of a float32 matmul at 2048^3, and of reading a large array once."""
    x = jnp.ones((2048, 2048), jnp.float32)
    matmul = jax.jit(jnp.matmul)
    big = jnp.ones((2**28,), jnp.float32)
    total = jax.jit(jnp.sum)
    matmul_s, read_s = median_seconds(lambda _: matmul(x, x), 5), median_seconds(lambda _: total(big), 5)
    return {"matmul_gflops": 2 * 2048**3 / matmul_s / 1e9, "read_gb_s": big.nbytes / read_s / 1e9}
