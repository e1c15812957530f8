"""A program for tests of the compile cache: compiles one function for its own devices and one for those of all
processes, and writes how many it had to compile.

    python -m tests.support.cached_program CACHE FOLDER
"""

import json
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tango_jax.runtime import hosts, process


def compiled_sum(devices: list[jax.Device]) -> float:
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    by_device, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    values = np.arange(1, len(devices) + 1, dtype=np.float32)
    values_B = jax.make_array_from_callback(values.shape, by_device, lambda index: values[index])
    return float(jax.jit(lambda x: jnp.sum(jnp.sin(x) ** 2 + x), out_shardings=everywhere)(values_B))


def main(cache: Path, folder: Path) -> None:
    hosts.connect()
    warning = process.use_compile_cache(str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # these are quick
    counts = Counter()
    jax.monitoring.register_event_listener(lambda event, **details: counts.update([event.rpartition("/")[2]]))
    sums = [compiled_sum(devices) for devices in (jax.local_devices(), jax.devices())]
    requests, hits = counts["compile_requests_use_cache"], counts["cache_hits"]
    result = {"sums": sums, "requests": requests, "compiled": requests - hits, "warning": warning}
    (folder / f"{jax.process_index()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
