"""Process settings made once at start: memory allocator, compile cache, and the description of the machine."""

import ctypes
import os
import sys
from pathlib import Path

import jax
from ml_collections import ConfigDict

from tango_jax import hosts

# glibc's mallopt parameters (malloc.h).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory instead of giving it back to the system; True where that was possible.

    XLA takes large temporaries for every step on CPU. With glibc's defaults each step pays a page fault for every page
    of them, which can double its time. Results do not change. Environment variables of the same meaning
    (MALLOC_MMAP_MAX_ ...) work only if set before the process starts; this works from inside.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**28), (_M_ARENA_MAX, 1))
    return all([libc.mallopt(parameter, value) == 1 for parameter, value in settings])


def configure(config: ConfigDict) -> None:
    """Call before the first array is made.

    Raises:
        ValueError: what the environment says of other processes is incomplete.
    """
    hosts.connect(config.distributed)
    # With a published model a step takes seconds or minutes: page faults are nothing, and memory is what is short.
    if jax.default_backend() == "cpu" and not (config.generator.checkpoint or config.verifier.checkpoint):
        keep_freed_memory()
    if config.compile_cache:
        path = Path(os.path.expanduser(config.compile_cache))
        path.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def describe_machine() -> str:
    device = jax.devices()[0]
    # Those that this process may use, where the system tells: containers and launchers give it a part.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{jax.device_count()} x {device.device_kind} ({jax.default_backend()}), {cores} CPU cores"
