"""The jitted functions of a run, compiled for devices that need not be here, from shapes alone.

In: the config, a target's devices. Out: for each function its memory on a device and its collectives. Stage: `plan`.
The functions are those that a run builds (rl/policy.py); neither weights nor tokenizers are read.
"""

import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.hlo import Collective, collectives
from tango_jax.planning.targets import Devices
from tango_jax.records import Batch, TrainState
from tango_jax.rl.packing import (
    BatchShape,
    batch_shape,
    empty_batch,
    pack_shape,
    prompts_per_minibatch,
    sft_pack_shape,
)
from tango_jax.rl.policy import Policy, make_policy
from tango_jax.rl.supervised import make_sft
from tango_jax.sampling import decode
from tango_jax.sampling.decode import DecodeState
from tango_jax.sampling.logits import SamplingParams, sampling_params
from tango_jax.sampling.slots import empty_state
from tango_jax.sharding.layouts import batch_sharding, decode_shardings, with_shardings
from tango_jax.sharding.placement import Placement
from tango_jax.text.tokenizer import Tokenizer
from tango_jax.weights.source import NUMERICS, Source, kind_of, published_model
from tango_jax.weights.workdir import read_config, start_source

ROLES = ("generator", "verifier")
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


class SamplingShapes(NamedTuple):
    """Arguments of a sampler's jitted functions, as shapes: the largest batches that it runs, each row with its own
    prompt."""

    weights: dict
    prefill: tuple  # all three arguments, for all rows or for a chunk of them
    states: tuple[DecodeState, ...]  # in each cache bucket, with the most rows that it may have there
    params: SamplingParams


@dataclasses.dataclass(frozen=True)
class Job:
    """What is planned: both policies on the target's devices, and how the processes share the work."""

    config: ConfigDict
    policies: dict[str, Policy]
    processes: int
    states: dict[str, TrainState]  # by role, as shapes with shardings; so are the next three
    batches: dict[str, Batch]
    sampling: dict[str, SamplingShapes]
    stage_one: dict[str, Batch]  # of roles that have one, here or in the run that `init_from` names

    @property
    def prompts(self) -> int:
        """Problems of a turn that the busiest process works on."""
        return math.ceil(self.config.rl.prompts_per_step / self.processes)

    def minibatch_prompts(self, role: str) -> int:
        """Those of them that are in one minibatch of the role."""
        minibatches = self.policies[role].config.loss.minibatches
        return prompts_per_minibatch(self.config.rl.prompts_per_step, self.processes, minibatches)


def plan_source(config: ConfigDict, role: str) -> Source:
    """What a role starts from, as far as shapes go: the sizes of its model and of its vocabulary.

    Raises:
        ValueError: a checkpoint whose sizes neither a file here nor the table of presets tells.
    """
    name = config[role].checkpoint
    if not name:
        return start_source(config, role)
    numerics = {key: config[role].model[key] for key in NUMERICS}
    if kind_of(name) == "workdir":
        source = plan_source(read_config(Path(name).expanduser()), role)
        return dataclasses.replace(source, model_config=dataclasses.replace(source.model_config, **numerics))
    model = published_model(name, **numerics)
    return Source(name, model, blank_tokenizer(model), None, lambda folder: None, {})


def blank_tokenizer(model: ModelConfig) -> Tokenizer:
    """As many ids as the model has, and nothing behind them: no text is read or written."""
    return Tokenizer(lambda text: [0], (b"",) * model.vocab_size, bos_ids=(), stop_ids=(0,))


def make_job(config: ConfigDict, devices: Devices, per_process: int) -> Job:
    """Both policies of a run on these devices, `per_process` of them in each process.

    Raises:
        ValueError: see `plan_source` and `make_policy`; a mesh that leaves devices of several processes unused.
    """
    policies = {
        role: make_policy(role, config[role], plan_source(config, role), devices.devices, per_process)
        for role in ROLES
    }
    for role, policy in policies.items():
        if len(devices.devices) > max(per_process, policy.placement.train.size):
            raise ValueError(f"{role}: the mesh takes {policy.placement.train.size} of {len(devices.devices)} devices, "
                             "and several processes need a mesh of all: set one axis to -1")
    processes = max(1, len(devices.devices) // per_process)
    return Job(
        config=config,
        policies=policies,
        processes=processes,
        states={role: policy.abstract_state() for role, policy in policies.items()},
        batches={role: abstract_batch(policy, config.rl, processes) for role, policy in policies.items()},
        sampling={role: abstract_sampling(policy) for role, policy in policies.items()},
        stage_one=abstract_stage_one(policies, processes),
    )


def abstract_batch(policy: Policy, rl: ConfigDict, processes: int) -> Batch:
    """Shapes and shardings of the batch that an update of the role gets, the longest prompt among its sequences."""
    config, shards = policy.config, policy.placement.num_local_shards
    prompts = prompts_per_minibatch(rl.prompts_per_step, processes, config.loss.minibatches)
    sizes = batch_shape(pack_shape(config), prompts * rl.samples_per_prompt, prompts, shards, config.max_prompt)
    return _over_processes(policy.placement, sizes)


def abstract_stage_one(policies: dict[str, Policy], processes: int) -> dict[str, Batch]:
    """By role, where it has a stage 1: shapes and shardings of the batch of a step."""
    found = {}
    for role, policy in policies.items():
        if policy.config.sft.steps:
            count, shards = math.ceil(policy.config.sft.batch_size / processes), policy.placement.num_local_shards
            sizes = batch_shape(sft_pack_shape(policy.config), count, 0, shards, longest_prompt=1)
            found[role] = _over_processes(policy.placement, sizes)
    return found


def _over_processes(placement: Placement, sizes: BatchShape) -> Batch:
    """A batch on the devices of all processes; `sizes` are those of one."""

    def over_processes(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
        shape = (leaf.shape[0], placement.num_shards, *leaf.shape[2:]) if leaf.ndim else ()
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=batch_sharding(placement, leaf))

    return jax.tree.map(over_processes, empty_batch(sizes))


def abstract_sampling(policy: Policy) -> SamplingShapes:
    """Shapes and shardings of the largest decode batch that the role can sample."""
    return sampling_shapes(policy, jax.eval_shape(policy.sampler.layout_fn, policy.abstract_state().params))


def sampling_shapes(policy: Policy, weights: dict) -> SamplingShapes:
    """The same, with the weights as the sampler's layout has them."""
    placement, sizes = policy.placement, policy.sampler.config
    weights, longest = with_shardings(weights, decode_shardings(placement.local, weights)), sizes.prompt_buckets[-1]
    if sizes.cache_tokens:
        prompts = sizes.prompts_per_chunk(longest, 1)
        rows = [sizes.rows_within(longest, bucket)[-1] for bucket in sizes.cache_buckets]
    else:
        prompts = sizes.row_buckets[-1]
        rows = [prompts] * len(sizes.cache_buckets)

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32)

    batch = decode.PromptBatch(
        token_PS=ints(prompts, longest),
        length_P=ints(prompts),
        limit_B=ints(prompts),
        number_B=ints(prompts),
        key_data=jax.ShapeDtypeStruct((2,), np.uint32),
    )
    sampling = sampling_params(policy.config.temperature)
    arguments = (weights, batch, sampling)
    places = decode.shardings_of(placement.local, decode.state_specs())
    states = []
    for count, bucket in zip(rows, sizes.cache_buckets, strict=True):
        state = _state_shapes(policy.model_config, sizes.cache_buckets[-1], count, longest, bucket)
        states.append(jax.tree.map(_placed, places, state, is_leaf=lambda node: isinstance(node, NamedSharding)))
    return SamplingShapes(weights, arguments, tuple(states), sampling)


def _state_shapes(model: ModelConfig, max_new: int, rows: int, prompt_bucket: int, cache_bucket: int) -> DecodeState:
    """Rows come first in every array of a state."""
    state = _state_of_one_row(dataclasses.replace(model, remat="none"), max_new, prompt_bucket, cache_bucket)
    return jax.tree.map(lambda leaf: leaf.update(shape=(rows, *leaf.shape[1:])) if leaf.ndim else leaf, state)


@functools.cache
def _state_of_one_row(model: ModelConfig, max_new: int, prompt_bucket: int, cache_bucket: int) -> DecodeState:
    return jax.eval_shape(functools.partial(empty_state, model, max_new, 1, prompt_bucket, cache_bucket))


def _placed(place: NamedSharding, tree: Any) -> Any:
    """A sharding stands for all that hangs below it, such as the layers of a cache."""
    return jax.tree.map(lambda leaf: leaf.update(sharding=place), tree)


def device_bytes(tree: Any) -> int:
    """Bytes of a device, of arrays given as shapes with shardings."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def lowered_functions(job: Job, role: str) -> dict[str, Callable]:
    """{name: () -> jax's lowered function} of one role."""
    policy, state, batch, sampling = job.policies[role], job.states[role], job.batches[role], job.sampling[role]
    sampler = policy.sampler

    def stage_one() -> jax.stages.Lowered:
        sft = make_sft(policy)
        start = with_shardings(jax.eval_shape(sft.init, np.zeros((2,), np.uint32)), sft.shardings)
        return sft.update.lower(start, job.stage_one[role])

    functions = {
        "update": lambda: policy.update.lower(state, batch),
        "score": lambda: policy.score.lower(state.params, batch),
        "layout": lambda: sampler.layout_fn.lower(state.params),
        "prefill": lambda: sampler.driver.prefill_fn.lower(*sampling.prefill),
        "decode": lambda: sampler.driver.decode_fn.lower(
            sampling.weights, sampling.states[-1], sampling.params, np.int32(0)
        ),
    }
    return functions | ({"sft": stage_one} if role in job.stage_one else {})


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
