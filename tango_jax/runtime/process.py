"""Process-wide settings made once at start: the memory allocator and the compilation cache."""

import ctypes
import os
import sys
import tempfile
from pathlib import Path

import jax

from tango_jax.runtime import failures

# glibc's mallopt parameters (malloc.h).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -3, -4, -8
KEEPING = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**28), (_M_ARENA_MAX, 1))
RETURNING = ((_M_MMAP_THRESHOLD, 2**20), (_M_TRIM_THRESHOLD, 2**20))

_keeps_freed_memory = True  # as glibc does; see set_allocator


def set_allocator(keeps_freed_memory: bool) -> bool:
    """Make glibc keep freed memory, or return it to the system; returns whether that was possible.

    On CPU, XLA allocates large temporaries in every step. By its defaults glibc takes a page fault for every page of
    them, which can double a small model's step, and holds on to arrays of up to 32 MiB, a fifth of a large model's
    process. Environment variables (MALLOC_MMAP_MAX_ ...) would have to be set before the process starts.
    """
    global _keeps_freed_memory
    libc = _libc("mallopt")
    if libc is None:
        return False
    _keeps_freed_memory = keeps_freed_memory
    settings = KEEPING if keeps_freed_memory else RETURNING
    return all([libc.mallopt(parameter, value) == 1 for parameter, value in settings])


def return_freed_memory() -> None:
    """Return what is free between small allocations to the system, unless it is to be kept: some hundred MiB after the
    programs of a model of 135M have been compiled."""
    libc = None if _keeps_freed_memory else _libc("malloc_trim")
    if libc is not None:
        libc.malloc_trim(0)


def _libc(function: str) -> ctypes.CDLL | None:
    """The C library, if it has this function of glibc's."""
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    return libc if hasattr(libc, function) else None


def use_compile_cache(name: str) -> str:
    """Set the folder of the persistent compilation cache. Returns a warning if it is not writable, else ""."""
    folder = Path(os.path.expanduser(name))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"can this be written?")
    except OSError as error:
        return (f"warning: compile_cache={name} cannot be used ({failures.describe(error)}): this run compiles "
                "everything itself. Name a writable folder, or leave the setting empty")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return ""
