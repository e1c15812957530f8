"""A small program for the tests of the launchers: it joins the job as `tango_jax.train` does and keeps its exit codes.

    python -m tests.launched_program FOLDER

Every start of process P writes FOLDER/start_<P>_<n>.json (n = 0, 1, ...), and then does what FOLDER/do_<P>_<n> says:
`exit CODE`, `kill` (SIGKILL to itself) or `wait` (exchange values with the others until SIGTERM, then exit with 75).
Without that file it exits with 0.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tango_jax import hosts
from tango_jax.config import default_config


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


def wait_for_signal(preemption: hosts.Preemption) -> int:
    """Like the turns of a run: all agree on whether one of them was asked to end."""
    try:
        while not preemption.is_due():
            time.sleep(0.05)
    except jax.errors.JaxRuntimeError as error:
        print(f"lost another process: {str(error)[:200]}", flush=True)
        return hosts.PEER_LOST
    return hosts.PREEMPTED


def main(folder: Path) -> int:
    config = default_config()
    config.distributed.heartbeat_s = 10
    hosts.connect(config.distributed)
    preemption = hosts.Preemption()
    process = jax.process_index()
    start = len(list(folder.glob(f"start_{process}_*.json")))
    write_start(folder, start)
    hosts.warm_up()  # connects the processes: from here on the loss of one is an error to the others at once
    print(f"process {process} of {jax.process_count()} is up, start {start}", flush=True)
    todo = folder / f"do_{process}_{start}"
    words = todo.read_text().split() if todo.exists() else ["exit", "0"]
    if words[0] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return wait_for_signal(preemption) if words[0] == "wait" else int(words[1])


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    if code:
        os._exit(code)  # without jax's barrier at exit, which waits for the others
