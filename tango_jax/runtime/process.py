"""Process-wide settings made once at start: the memory allocator and the compilation cache."""

import ctypes
import os
import sys
import tempfile
from pathlib import Path

import jax

from tango_jax.runtime import failures

# glibc's mallopt parameters (malloc.h).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory instead of returning it to the system; returns whether that was possible.

    On CPU, XLA allocates large temporaries in every step. With glibc's defaults each step takes a page fault for every
    page of them, which can double its time. Results do not change. The equivalent environment variables
    (MALLOC_MMAP_MAX_ ...) work only if set before the process starts; this works from inside.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**28), (_M_ARENA_MAX, 1))
    return all([libc.mallopt(parameter, value) == 1 for parameter, value in settings])


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
