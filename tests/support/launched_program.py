"""A small program for the tests of the launchers: it joins the job as `tango_jax.train` does and keeps its exit codes.

    python -m tests.support.launched_program FOLDER

Every start of process P writes FOLDER/start_<P>_<n>.json (n = 0, 1, ...), and then does what FOLDER/do_<P>_<n> says:
`kill` (SIGKILL to itself), `bug` (an exception that nobody expects), `memory` (a device's memory is full), `stuck` (in
a call that no signal and no exception ends) or `wait` (exchange values with the others until one gets SIGTERM). Without
that file it is done.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tango_jax.cli import session as runtime
from tango_jax.config import default_config
from tango_jax.runtime import hosts
from tango_jax.runtime.failures import OutOfMemory
from tango_jax.runtime.lock import locked


def sum_over_devices() -> float:
    """1 + 2 + ... over all devices of all processes, added up by the devices."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    values = np.arange(1, jax.device_count() + 1, dtype=np.float32)
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    values_B = jax.make_array_from_callback(values.shape, sharded, lambda index: values[index])
    return float(jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(values_B))


def write_start(folder: Path, start: int) -> None:
    result = {
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "local_devices": jax.local_device_count(),
        "sum": sum_over_devices(),
        "cores": sorted(os.sched_getaffinity(0)),
        "pid": os.getpid(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_"))},
    }
    path = folder / f"start_{jax.process_index()}_{start}.json"
    path.with_suffix(".tmp").write_text(json.dumps(result))
    path.with_suffix(".tmp").rename(path)


def act(folder: Path, start: int, preemption: hosts.Preemption) -> None:
    todo = folder / f"do_{jax.process_index()}_{start}"
    action = todo.read_text() if todo.exists() else "finish"
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "bug":
        raise TypeError("nobody expected this")
    if action == "memory":
        raise OutOfMemory("sampling from the generator ran out of device memory")
    if action == "stuck":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Event().wait()
    while action == "wait":
        if preemption.is_due():
            raise hosts.Preempted
        time.sleep(0.05)


def main(folder: Path) -> None:
    config = default_config()
    config.compile_cache = ""
    with runtime.session(config, folder) as console, locked(folder, console):
        preemption, process = hosts.Preemption(), jax.process_index()
        start = len(list(folder.glob(f"start_{process}_*.json")))
        write_start(folder, start)
        # Connects the processes: from here on the loss of one is an error to the others at once.
        hosts.compile_exchange()
        print(f"process {process} of {jax.process_count()} is up, start {start}", flush=True)
        act(folder, start, preemption)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
