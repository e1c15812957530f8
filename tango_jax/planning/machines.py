"""The machine that settings are fitted to: the one that runs, or the target of `plan`.

In: for a run, the devices of its processes; for a plan, what its command says. Out: a `Machine`. Stage: while a
configuration is read; configs/own_problems.py asks for it.
"""

import contextlib
import platform
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar

import jax
from ml_collections import ConfigDict

from tango_jax.models.attention import capability_of
from tango_jax.planning.rough_sizes import Machine
from tango_jax.runtime import hosts
from tango_jax.runtime.machine import device_memory

# No argument: a config file of the user's may call `load_shipped`, which completes the shipped one.
_planned: ContextVar[Machine | None] = ContextVar("planned", default=None)


@contextlib.contextmanager
def planned_for(machine: Machine) -> Iterator[None]:
    """While configurations are read for a plan: fit them to this machine, which need not be here."""
    token = _planned.set(machine)
    try:
        yield
    finally:
        _planned.reset(token)


def planned_machine() -> Machine | None:
    """The machine of the plan that is being made; None: a run is started here."""
    return _planned.get()


def this_machine(config: ConfigDict) -> Machine:
    """The devices of the job, of which there must be one. Raises ValueError."""
    hosts.connect(config.distributed)
    hosts.check_devices()
    backend = jax.default_backend()
    told = hosts.gather([(platform.node(), device_memory(), capability_of(jax.local_devices()[0]))])
    # All processes must derive the same settings, although the machines they run on may not be quite alike: those that
    # fit the smallest. CPU processes of one machine share its memory.
    processes = Counter(name for name, _, _ in told)
    memory = min(size // processes[name] if backend == "cpu" else size for name, size, _ in told)
    capability = min((known for _, _, known in told if known is not None), default=None)
    return Machine(backend, jax.device_count(), memory, capability)
