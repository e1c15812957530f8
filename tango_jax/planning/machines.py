"""The machine that settings are fitted to: the one that runs, or the target of `plan`."""

import contextlib
import math
import platform
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from tango_jax.models.attention import capability_of
from tango_jax.runtime import hosts
from tango_jax.runtime.machine import device_memory

GIB = 2**30


class Scale(NamedTuple):
    """Defaults that depend on how fast a machine is."""

    response: int  # tokens of a solution, at least
    prompts: int  # problems of a turn
    samples: int  # solutions of each
    passes: int  # how often every problem is drawn in the run, at most
    steps: int  # generator steps
    evaluated: int  # held-out problems, at most
    logits: int  # bytes of the logits that exist at a time
    memory: float  # share of the memory to plan with; compiling and saving take the rest

    def logits_chunk(self, vocab_size: int) -> int:
        return 2 ** int(math.log2(max(self.logits // (4 * vocab_size), 16)))


# A first run on a CPU: 135 M parameters on two cores take under two hours.
CPU = Scale(response=256, prompts=4, samples=4, passes=1, steps=20, evaluated=32, logits=2**25, memory=0.5)
# 300 steps are the published number (arXiv 2505.15034).
ACCELERATOR = Scale(response=1024, prompts=32, samples=8, passes=10, steps=300, evaluated=200, logits=2**28,
                    memory=0.85)


class Machine(NamedTuple):
    platform: str  # cpu, gpu or tpu
    devices: int  # of the job
    memory: int  # bytes that programs may use on each device
    capability: float | None = None  # compute capability of NVIDIA GPUs
    local: int = 0  # devices of one process; 0: all

    @property
    def is_cpu(self) -> bool:
        return self.platform == "cpu"

    @property
    def scale(self) -> Scale:
        return CPU if self.is_cpu else ACCELERATOR

    @property
    def per_process(self) -> int:
        return self.local or self.devices

    @property
    def processes(self) -> int:
        return max(1, self.devices // self.per_process)


# A context variable, since a config file may call `load_shipped`, which fits the shipped configuration.
_planned: ContextVar[Machine | None] = ContextVar("planned", default=None)


@contextlib.contextmanager
def planned_for(machine: Machine) -> Iterator[None]:
    token = _planned.set(machine)
    try:
        yield
    finally:
        _planned.reset(token)


def planned_machine() -> Machine | None:
    return _planned.get()


def this_machine(config: ConfigDict) -> Machine:
    """The devices of the job. Raises ValueError."""
    hosts.connect()
    hosts.check_devices()
    backend = jax.default_backend()
    told = hosts.join_parts([(platform.node(), device_memory(), capability_of(jax.local_devices()[0]))])
    # All processes must derive the same settings, for the smallest machine. CPU processes of one machine share memory.
    processes = Counter(name for name, _, _ in told)
    memory = min(size // processes[name] if backend == "cpu" else size for name, size, _ in told)
    capability = min((known for _, _, known in told if known is not None), default=None)
    return Machine(backend, jax.device_count(), memory, capability, jax.local_device_count())
