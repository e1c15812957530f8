"""The process: its memory allocator and compilation cache, and facts for the record of a run."""

import ctypes
import datetime
import functools
import hashlib
import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path
from typing import Any

import jax
from jax._src import compiler

import tango_jax
from tango_jax.runtime import failures, hosts

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")
GIT_TIMEOUT_S = 5
_PACKAGE = Path(tango_jax.__file__).parent
# glibc's mallopt parameters (malloc.h).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -3, -4, -8
KEEPING = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**28), (_M_ARENA_MAX, 1))
RETURNING = ((_M_MMAP_THRESHOLD, 2**20), (_M_TRIM_THRESHOLD, 2**20))

_keeps_freed_memory = True  # as glibc does; see set_allocator


def set_allocator(keeps_freed_memory: bool) -> bool:
    """Make glibc keep freed memory or return it; returns whether that was possible.

    On CPU, XLA allocates large temporaries in every step. By default glibc takes a page fault for each of their pages,
    which can double a small model's step, and keeps arrays up to 32 MiB, a fifth of a large model's process.
    """
    global _keeps_freed_memory
    libc = _libc("mallopt")
    if libc is None:
        return False
    _keeps_freed_memory = keeps_freed_memory
    settings = KEEPING if keeps_freed_memory else RETURNING
    return all([libc.mallopt(parameter, value) == 1 for parameter, value in settings])


def return_freed_memory() -> None:
    libc = None if _keeps_freed_memory else _libc("malloc_trim")
    if libc is not None:
        libc.malloc_trim(0)


def _libc(function: str) -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    return libc if hasattr(libc, function) else None


def use_compile_cache(name: str) -> str:
    """Set the persistent compilation cache. Returns a warning if the folder is not writable, else "".

    On GPUs, processes use the entries of process 0 if the folder is shared. Elsewhere each further process has a folder
    of its own in it, since jax writes without a lock.
    """
    folder = Path(os.path.expanduser(name))
    if jax.process_index() > 0 and jax.default_backend() != "gpu":
        folder /= f"process_{jax.process_index()}"
        _write_as_the_first_process()
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


def _write_as_the_first_process() -> None:
    """jax lets process 0 alone write, but only on GPUs do other processes have its keys: elsewhere they would compile
    everything at every start. No setting changes that, so the function that writes is told that this is process 0."""
    state = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
    known = compiler._cache_write.__globals__ | {"distributed": state}
    compiler._cache_write = types.FunctionType(compiler._cache_write.__code__, known)


def process_facts() -> dict[str, Any]:
    """`devices` is {kind: number}. All processes must call this."""
    machines = hosts.join_parts([socket.gethostname()])
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
        **_code(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in LIBRARIES},
        "platform": jax.default_backend(),
        "devices": dict(Counter(device.device_kind for device in jax.devices())),
        "processes": jax.process_count(),
        "hosts": list(dict.fromkeys(machines)),
        "cpu": cpu_model(),
    }


def _command() -> str:
    program = Path(sys.argv[0]) if sys.argv else Path()
    if program.parent == _PACKAGE:
        return shlex.join(["python", "-m", f"{_PACKAGE.name}.{program.stem}", *sys.argv[1:]])
    return shlex.join([program.name, *sys.argv[1:]]) if program.name.startswith("tango-") else "python"


@functools.cache
def _code() -> dict[str, Any]:
    """Version, source digest, `commit`, and `dirty` (the package differs from it): None without a checkout or git."""
    source = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        source.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    # An installed package may lie in another project's checkout, which does not track it.
    is_tracked = _git("ls-files", "--error-unmatch", "__init__.py") is not None
    commit = _git("rev-parse", "HEAD") if is_tracked else None
    changed = _git("status", "--porcelain", "--", ".") if commit else None
    return {
        "tango_jax": tango_jax.__version__,
        "commit": commit,
        "dirty": None if changed is None else bool(changed),
        "source": source.hexdigest()[:12],
    }


def _git(*arguments: str) -> str | None:
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # it only reads
    try:
        done = subprocess.run(["git", "-C", str(_PACKAGE), *arguments], capture_output=True, text=True,
                              timeout=GIT_TIMEOUT_S, env=environment)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
