"""What a process is, for the record of a run: when and how it was started, which code it runs, and on what."""

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
from collections import Counter
from pathlib import Path
from typing import Any

import jax

import tango_jax
from tango_jax.runtime import hosts

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")
GIT_TIMEOUT_S = 5
_PACKAGE = Path(tango_jax.__file__).parent


def process_facts() -> dict[str, Any]:
    """What this process is; `time` is UTC, `devices` are {kind: number} and `hosts` names over all processes.

    All processes must call this.
    """
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
    """The command line; `python` where the package is used by another program, such as a notebook."""
    program = Path(sys.argv[0]) if sys.argv else Path()
    if program.parent == _PACKAGE:
        return shlex.join(["python", "-m", f"{_PACKAGE.name}.{program.stem}", *sys.argv[1:]])
    return shlex.join([program.name, *sys.argv[1:]]) if program.name.startswith("tango-") else "python"


@functools.cache
def _code() -> dict[str, Any]:
    """Version and source of this package. `commit` and `dirty` (whether the package differs from it) are those of the
    checkout that it lies in; None where it lies in none, as pip installs it, or git does not tell."""
    source = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        source.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    # A package that pip has installed may lie in the checkout of another project, which does not track it.
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
    """What git says of the package's folder; None where it is missing, refuses, or takes too long."""
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # it only reads
    try:
        done = subprocess.run(["git", "-C", str(_PACKAGE), *arguments], capture_output=True, text=True,
                              timeout=GIT_TIMEOUT_S, env=environment)  # fmt: skip
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cpu_model() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
