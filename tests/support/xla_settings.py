"""Settings of XLA for tests: it compiles for the CPU in a sixth of its usual time, and waits for slow machines.

Most of what tests do is compiling, and programs as small as theirs run no slower for it. To compile as users do, set
JAX_DISABLE_MOST_OPTIMIZATIONS=0 and XLA_FLAGS=--xla_cpu_use_fusion_emitters=true before the test command.
"""

import importlib.util
import mmap
import os
from pathlib import Path

from support.processes import HANG_S

DEVICE_COUNT = "xla_force_host_platform_device_count"
FLAGS = {
    "xla_cpu_use_fusion_emitters": "false",
    "xla_cpu_parallel_codegen_split_count": "1",
    # How long devices wait for each other: by default less than a machine under load may take.
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": str(HANG_S),
    "xla_cpu_collective_call_terminate_timeout_seconds": str(HANG_S),
    "xla_cpu_collective_timeout_seconds": str(HANG_S),
}


def set_xla_flags() -> None:
    """Change the environment of this process and of those that it starts. To be called before jax is imported."""
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    given = os.environ.get("XLA_FLAGS", "")
    added = [f"--{name}={value}" for name, value in FLAGS.items() if name not in given and _is_known(name)]
    os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()


def on_devices(count: int) -> dict[str, str]:
    """The environment with so many virtual devices, whatever this process has."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if DEVICE_COUNT not in flag]
    return os.environ | {"XLA_FLAGS": " ".join([*flags, f"--{DEVICE_COUNT}={count}"])}


def _is_known(flag: str) -> bool:
    """Whether jaxlib has it: XLA aborts at a flag that it does not know, and its flags come and go."""
    (folder,) = importlib.util.find_spec("jaxlib").submodule_search_locations
    for library in (*Path(folder).glob("libjax_common.so"), *Path(folder).glob("xla_extension*.so")):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            # A string of its own, as names of flags are: in other places, one that was removed may still be reserved.
            if content.find(b"\0%s\0" % flag.encode()) >= 0:
                return True
    return False
