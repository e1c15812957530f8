"""The jitted functions of a run, compiled for devices that need not be here, from shapes alone.

In: a job, a target's devices. Out: for each function its memory on a device and its collectives. Stage: `plan`. The
functions are those that a run builds (rl/policy.py).
"""

import math
import re
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from tango_jax.config import ROLES
from tango_jax.planning.hlo import Collective, collectives
from tango_jax.planning.job import Job
from tango_jax.planning.targets import Devices
from tango_jax.rl.supervised import make_sft
from tango_jax.sharding.layouts import with_shardings

COMPILERS = 2  # programs compiled at a time; a third would not be quicker on two cores and takes memory


class Program(NamedTuple):
    """One compiled function; bytes of a device."""

    argument: int
    output: int
    alias: int  # of the output, what takes the place of a donated argument
    temp: int
    collectives: list[Collective]
    error: str = ""  # the compiler's message, where it found too little memory

    @property
    def added(self) -> int:
        """What it needs beside its arguments."""
        return self.temp + self.output - self.alias


def lowered_functions(job: Job, role: str) -> dict[str, Callable]:
    """{name: () -> jax's lowered function} of one role."""
    policy, shapes = job.functions[role], job.policies[role]
    state, batch, sampling, sampler = shapes.state, shapes.batch, shapes.sampling, policy.sampler

    def stage_one() -> jax.stages.Lowered:
        sft = make_sft(policy)
        start = with_shardings(jax.eval_shape(sft.init, np.zeros((2,), np.uint32)), sft.shardings)
        return sft.update.lower(start, shapes.stage_one, shapes.base if policy.trains_adapters else {})

    functions = {
        "update": lambda: policy.update.lower(state, batch, shapes.base),
        "score": lambda: policy.score.lower(shapes.weights, batch),
        "layout": lambda: sampler.layout_fn.lower(shapes.weights),
        "prefill": lambda: sampler.driver.prefill_fn.lower(*sampling.prefill),
        "decode": lambda: sampler.driver.decode_fn.lower(
            sampling.weights, sampling.states[-1], sampling.params, np.int32(0)
        ),
    }
    return functions | ({"sft": stage_one} if shapes.stage_one else {})


def function_names(job: Job) -> tuple[str, ...]:
    """"generator/update" and so on: everything of both roles that is compiled."""
    return tuple(f"{role}/{name}" for role in ROLES
                 for name in ("update", "score", "layout", "prefill", "decode", *(["sft"] * (role in job.stage_one))))


def compile_job(
    job: Job, devices: Devices, report: Callable[[str, float], None], names: Collection[str] | None = None
) -> dict[str, Program]:
    """{"generator/update": Program, ...} for these names, by default all; `report(name, seconds)` hears of each as it
    is done."""
    names = function_names(job) if names is None else names

    def compiled(name: str, lowered: jax.stages.Lowered) -> Program:
        began = time.monotonic()
        program = compile_one(lowered, devices.compiler_options, len(devices.devices))
        report(name, time.monotonic() - began)
        return program

    with ThreadPoolExecutor(COMPILERS) as pool:
        pending = {
            f"{role}/{name}": pool.submit(compiled, f"{role}/{name}", lower())
            for role in ROLES
            for name, lower in lowered_functions(job, role).items()
            if f"{role}/{name}" in names
        }
        return {name: future.result() for name, future in pending.items()}


def compile_one(lowered: jax.stages.Lowered, options: dict, num_devices: int) -> Program:
    """Compile and examine; a program that the compiler finds no memory for becomes its message."""
    try:
        compiled = lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        asked = re.search(r"(?:Used|required for HLO temporaries \()\s*([\d.]+)([GM])", str(error))
        needed = float(asked.group(1)) * {"G": 2**30, "M": 2**20}[asked.group(2)] if asked else math.inf
        return Program(0, 0, 0, needed, [], str(error).splitlines()[0])
    return examine(compiled, num_devices)


def examine(compiled: jax.stages.Compiled, num_devices: int) -> Program:
    """What an executable says of itself."""
    memory = compiled.memory_analysis()
    return Program(
        argument=memory.argument_size_in_bytes,
        output=memory.output_size_in_bytes,
        alias=memory.alias_size_in_bytes,
        temp=memory.temp_size_in_bytes,
        collectives=collectives(compiled.as_text(), num_devices),
    )
