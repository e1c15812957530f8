"""Compiles the jitted functions of a run (rl/policy.py) for a target's devices, from shapes alone."""

import math
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from tango_jax.config import ROLES
from tango_jax.planning.job import Job
from tango_jax.planning.targets import Devices
from tango_jax.planning.traffic import Collective
from tango_jax.rl.supervised import make_sft
from tango_jax.sharding.layouts import with_shardings

COMPILERS = 2  # programs compiled at a time; a third is no quicker on two cores and takes memory


class Program(NamedTuple):
    argument: int
    output: int
    alias: int  # of the output, in the place of a donated argument
    temp: int
    collectives: list[Collective] = []  # by arithmetic alone (estimates.py)
    error: str = ""  # the compiler's message where memory ran out
    seconds: float = 0.0  # that its compilation took

    @property
    def added(self) -> int:
        return self.temp + self.output - self.alias


def lowered_functions(job: Job, role: str) -> dict[str, Callable]:
    policy, shapes = job.functions[role], job.policies[role]
    state, batch, sampler = shapes.state, shapes.batch, policy.sampler
    sampling = None if shapes.is_scored else shapes.sampling

    def stage_one() -> jax.stages.Lowered:
        sft = make_sft(policy)
        start = with_shardings(jax.eval_shape(sft.init, np.zeros((2,), np.uint32)), sft.shardings)
        return sft.update.lower(start, shapes.stage_one, shapes.base if policy.trains_adapters else {})

    functions = {} if shapes.is_scored else {"layout": lambda: sampler.layout_fn.lower(shapes.weights)}
    if shapes.model_config.score_head:  # a pass over the longest rows is all
        functions["prefill"] = lambda: policy.reader.logits_fn.lower(*sampling.prefill)
    elif not shapes.is_scored:
        functions["prefill"] = lambda: sampler.driver.prefill_fn.lower(*sampling.prefill)
        functions["decode"] = lambda: sampler.driver.decode_fn.lower(
            sampling.weights, sampling.states[-1], sampling.params, np.int32(0)
        )
    if job.trains(role):
        functions["update"] = lambda: policy.update.lower(state, batch, shapes.base)
    if job.trains(role) or shapes.is_scored:
        functions["score"] = lambda: policy.score.lower(shapes.weights, batch)
    return functions | ({"sft": stage_one} if shapes.stage_one else {})


def compile_job(job: Job, devices: Devices, report: Callable[[str, float], None]) -> dict[str, Program]:
    """{"generator/update": Program, ...}; `report(name, seconds)` is called as each is done."""

    def compiled(name: str, lowered: jax.stages.Lowered) -> Program:
        began = time.monotonic()
        program = compile_one(lowered, devices.compiler_options)
        report(name, seconds := time.monotonic() - began)
        return program._replace(seconds=seconds)

    with ThreadPoolExecutor(COMPILERS) as pool:
        pending = {
            f"{role}/{name}": pool.submit(compiled, f"{role}/{name}", lower())
            for role in ROLES
            for name, lower in lowered_functions(job, role).items()
        }
        return {name: future.result() for name, future in pending.items()}


def compile_one(lowered: jax.stages.Lowered, options: dict) -> Program:
    try:
        compiled = lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        asked = re.search(r"(?:Used|required for HLO temporaries \()\s*([\d.]+)([GM])", str(error))
        needed = float(asked.group(1)) * {"G": 2**30, "M": 2**20}[asked.group(2)] if asked else math.inf
        return Program(0, 0, 0, needed, error=str(error).splitlines()[0])
    return examine(compiled)


def examine(compiled: jax.stages.Compiled) -> Program:
    memory = compiled.memory_analysis()
    return Program(
        argument=memory.argument_size_in_bytes,
        output=memory.output_size_in_bytes,
        alias=memory.alias_size_in_bytes,
        temp=memory.temp_size_in_bytes,
    )
