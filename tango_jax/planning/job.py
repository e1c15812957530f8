"""What a run computes on a machine, as shapes: states, batches, and what sampling takes."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, NamedSharding
from ml_collections import ConfigDict

from tango_jax.config import ROLES, role_config
from tango_jax.loop.init_from import sft_directory
from tango_jax.method.load import Method, load_method, own_prompts
from tango_jax.method.own_arm import arm_of, shares_policy
from tango_jax.method.rehearsal import Trained
from tango_jax.models import decode_layers
from tango_jax.models.attention import capability_of, resolve_attention
from tango_jax.models.decode_attention import resolve_decode_attention
from tango_jax.models.lora import split
from tango_jax.models.transformer import ModelConfig, init_weights
from tango_jax.planning.machines import Machine
from tango_jax.planning.sources import plan_source
from tango_jax.planning.targets import Devices
from tango_jax.records import Batch, TrainState, with_base
from tango_jax.rl.optimizer import make_optimizer
from tango_jax.rl.packing import (
    batch_shape,
    empty_batch,
    pack_shape,
    prompts_per_minibatch,
    scored_pack_shape,
    sft_pack_shape,
)
from tango_jax.rl.policy import Policy, make_policy, sampler_sizes
from tango_jax.rl.update import init_state
from tango_jax.runtime.checkpoint import peek_meta
from tango_jax.sampling import decode, slots
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.decode import DecodeState
from tango_jax.sampling.given_text import pass_arguments
from tango_jax.sampling.logits import SamplingParams, sampling_params
from tango_jax.sampling.slots import SlotState
from tango_jax.sharding.layouts import batch_sharding, decode_shardings, param_shardings, with_shardings
from tango_jax.sharding.placement import (
    DECODE_AXES,
    TRAIN_AXES,
    Placement,
    check_model,
    check_tensor_groups,
    resolve_axes,
)
from tango_jax.weights.source import kind_of


class SamplingShapes(NamedTuple):
    """Arguments of a sampler's jitted functions, as shapes: the largest batches, with a prompt for each row. A process
    reward model has only the first: a pass over the longest rows."""

    weights: dict
    prompts: tuple[int, int]  # (how many, bucket) of a prompts' pass: for all rows, or a chunk
    prefill: tuple  # all arguments
    states: tuple[DecodeState | SlotState, ...]  # as caches grow, each with the most rows that it may have
    params: SamplingParams


@dataclasses.dataclass(frozen=True)
class SizedPolicy:
    """A `Policy` without its functions: shapes with shardings."""

    role: str
    config: ConfigDict  # the role's part of the config
    model_config: ModelConfig
    placement: Placement  # on meshes of devices, or on abstract ones
    rl: ConfigDict
    processes: int
    rehearses: bool = False  # its stage 1 has as many examples of the generator, whose policy it is
    learner: Trained | None = None  # what its turn trains on; None: it has none
    is_scored: bool = False  # it does not write: its marks are read

    @property
    def sft_examples(self) -> int:
        """Of a process in a step of stage 1."""
        return math.ceil(self.config.sft.batch_size * (2 if self.rehearses else 1) / self.processes)

    @property
    def sampler_config(self) -> SamplerConfig:
        return sampler_sizes(self.config).with_row_multiple(self.placement.row_multiple)

    @functools.cached_property
    def state(self) -> TrainState:
        return self._placed(_state_shapes(dataclasses.replace(self.model_config, remat="none")))

    @functools.cached_property
    def base(self) -> dict:
        return self._placed(split(_weight_shapes(dataclasses.replace(self.model_config, remat="none")))[1])

    @property
    def weights(self) -> dict:
        return with_base(self.base, self.state.params)

    @functools.cached_property
    def in_stage_one(self) -> "SizedPolicy":
        """With `sft.full` its stage 1 trains a model without adapters."""
        if not self.model_config.lora or not self.config.sft.full:
            return self
        model = dataclasses.replace(self.model_config, lora=None, param_dtype=self.config.model.param_dtype)
        return dataclasses.replace(self, model_config=model)

    def _placed(self, tree: Any) -> Any:
        return with_shardings(tree, param_shardings(self.placement.train, tree))

    @functools.cached_property
    def batch(self) -> Batch:
        """The batch of an update in which a prompt has the greatest length allowed."""
        prompts, samples = self.trained_groups
        shards, longest = self.placement.num_local_shards, self.config.max_prompt
        if self.is_scored:
            shape = batch_shape(scored_pack_shape(self.config), prompts * samples, 0, shards, longest)
            return _over_processes(self.placement, empty_batch(shape, has_others=True))
        pack_as = pack_shape(self.config)
        shape = batch_shape(pack_as, prompts * samples, prompts, shards, longest)
        return _over_processes(self.placement, empty_batch(shape, pack_as.joins_prompts))

    @property
    def trained_groups(self) -> tuple[int, int]:
        """(prompts, responses of each) that a minibatch has room for."""
        prompts, M, is_joined, _ = self.learner or Trained(self.rl.prompts_per_step, self.rl.samples_per_prompt)
        return prompts_per_minibatch(prompts, self.processes, self.config.loss.minibatches, is_joined), M

    @functools.cached_property
    def stage_one(self) -> Batch | None:
        if not self.config.sft.steps or self.config.init_from:
            return None
        count, shards = self.sft_examples, self.placement.num_local_shards
        return _over_processes(
            self.placement, empty_batch(batch_shape(sft_pack_shape(self.config), count, 0, shards, longest_prompt=1))
        )

    @functools.cached_property
    def sampling(self) -> SamplingShapes:
        return _sampling_shapes(self)


@dataclasses.dataclass(frozen=True)
class Job:
    config: ConfigDict
    machine: Machine
    policies: dict[str, SizedPolicy]
    functions: dict[str, Policy]  # by role; {}: in these sizes there are none, only shapes
    loaded: Method | None = None  # None: it takes a second to try, and is loaded where it is needed

    @functools.cached_property
    def method(self) -> Method:
        return self.loaded or load_method(self.config)

    def trains(self, role: str) -> bool:
        return role in arm_of(self.config).turns

    @property
    def processes(self) -> int:
        return self.machine.processes

    @property
    def checkpoint_bytes(self) -> int:
        """One policy's state is stored once; what is not trained has no moments."""
        policies = list(self.policies.values())[: 1 if shares_policy(self.config) else None]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves([policy.state for policy in policies]))

    @property
    def stage_one(self) -> list[str]:
        return [role for role, policy in self.policies.items() if policy.stage_one]

    @property
    def prompts(self) -> int:
        return math.ceil(self.config.rl.prompts_per_step / self.processes)

    def shares_base(self, role: str) -> bool:
        """Whether the role's frozen base is the previous role's too (loop/stage_one.py)."""
        before, own = self.policies[ROLES[0]], self.policies[role]
        if role == ROLES[0] or not own.config.checkpoint or self._own_bases:
            return False
        if kind_of(own.config.checkpoint) == "workdir":
            return False
        names = ("checkpoint", "mesh")
        return own.base == before.base and all(own.config[name] == before.config[name] for name in names)

    @functools.cached_property
    def _own_bases(self) -> list[str]:
        """Roles with a base of their own: their stage 1, or that of their `init_from`, trained all parameters."""
        return [role for role, policy in self.policies.items() if _trains_all_first(role, policy.config)]


def make_job(config: ConfigDict, devices: Devices, per_process: int) -> Job:
    """Both policies on these devices, `per_process` in each process. Raises ValueError."""
    functions = {
        role: make_policy(role, config[role], plan_source(config, role), devices.devices, per_process)
        for role in ROLES
    }
    for role, policy in functions.items():
        if len(devices.devices) > max(per_process, policy.placement.train.size):
            raise ValueError(f"{role}: the mesh takes {policy.placement.train.size} of {len(devices.devices)} devices, "
                             "and several processes need a mesh of all: set one axis to -1")
    first = devices.devices[0]
    machine = Machine(first.platform, len(devices.devices), 0, capability_of(first), per_process)
    method = load_method(config)
    policies = {role: dataclasses.replace(sized(policy, config.rl, machine.processes, rehearses(config, role)),
                                          learner=rehearsal and rehearsal.learner,
                                          is_scored=method.own[role].is_scored)
                for role, policy in functions.items() for rehearsal in [method.rehearsals.get(role)]}
    return Job(config, machine, policies, functions, method)


def sized_job(config: ConfigDict, models: dict[str, ModelConfig], machine: Machine) -> Job:
    """The roles with these models on a machine that need not be here. Raises ValueError where a mesh, sizes or an
    attention do not fit the machine or the model."""
    policies = {role: _sized_policy(role, config, model, machine) for role, model in models.items()}
    return Job(config, machine, policies, functions={})


def sized(policy: Policy, rl: ConfigDict, processes: int, rehearses: bool = False) -> SizedPolicy:
    return SizedPolicy(policy.role, policy.config, policy.model_config, policy.placement, rl, processes, rehearses)


def _trains_all_first(role: str, own: ConfigDict) -> bool:
    if not own.init_from:
        return own.sft.full and own.sft.steps > 0
    found = peek_meta(sft_directory(own.init_from, role) / "checkpoints")
    return found is None or found.meta["is_full"]  # where that run is not here, count the memory of two bases


def rehearses(config: ConfigDict, role: str) -> bool:
    return role == "verifier" and shares_policy(config)


def _sized_policy(role: str, config: ConfigDict, model: ModelConfig, machine: Machine) -> SizedPolicy:
    own, sizes = config[role], sampler_sizes(config[role])
    try:
        placement = counted_placement(own.mesh, machine)
        check_model(model, own.mesh, placement)
        sizes.with_row_multiple(placement.row_multiple).check_cache_tokens()
        numerics = (machine.platform, model.compute_dtype, model.head_dim)
        model = dataclasses.replace(
            model,
            attention=resolve_attention(model.attention, *numerics, machine.capability),
            decode_attention=resolve_decode_attention(
                model.decode_attention, *numerics, sizes.buckets, machine.capability,
                model.sample_cache_dtype, max(model.windows),
            ),
            grad_reduce_dtype=own.mesh.grad_reduce_dtype,
        )
    except ValueError as error:
        raise ValueError(f"{role}: {error}") from error
    return SizedPolicy(role, own, model, placement, config.rl, machine.processes, rehearses(config, role),
                       is_scored=own_prompts(arm_of(config))[role].is_scored)


def counted_placement(settings: ConfigDict, machine: Machine) -> Placement:
    """`make_placement` on a number of devices. Raises ValueError."""
    axes, decode_tensor = resolve_axes(settings, machine.devices), settings.decode_tensor
    size = math.prod(axes)
    local = min(machine.per_process, size)
    check_tensor_groups(axes[-1], decode_tensor, local)
    decode, mine = (AbstractMesh((count // decode_tensor, decode_tensor), DECODE_AXES) for count in (size, local))
    return Placement(AbstractMesh(axes, TRAIN_AXES), decode, mine)


@functools.cache
def _state_shapes(model: ModelConfig) -> TrainState:
    """No shape depends on the optimizer's settings."""
    optimizer = optax.set_to_zero() if model.score_head else make_optimizer(role_config().optimizer)
    return jax.eval_shape(functools.partial(init_state, optimizer), split(_weight_shapes(model))[0])


@functools.cache
def _weight_shapes(model: ModelConfig) -> dict:
    return jax.eval_shape(lambda: init_weights(model, jax.random.key(0)))


def _over_processes(placement: Placement, batch: Batch) -> Batch:
    """The shapes of a batch on the devices of all processes, from one process's part."""

    def over_processes(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
        shape = (leaf.shape[0], placement.num_shards, *leaf.shape[2:]) if leaf.ndim else ()
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=batch_sharding(placement, leaf))

    return jax.tree.map(over_processes, batch)


def _sampling_shapes(policy: SizedPolicy) -> SamplingShapes:
    local, sizes = policy.placement.local, policy.sampler_config
    model = dataclasses.replace(policy.model_config, remat="none")  # no shape depends on it
    weights = _layout_shapes(model, local.shape["tensor"] == 1)
    weights, longest = with_shardings(weights, decode_shardings(local, weights)), sizes.prompt_buckets[-1]
    if model.score_head:
        prefill = pass_arguments(weights, longest, policy.placement.row_multiple)
        return SamplingShapes(weights, prefill[1].shape, prefill, (), sampling_params(policy.config.temperature))
    count = sizes.prompts_per_chunk if sizes.cache_tokens else sizes.row_buckets[-1]
    token_PX, length_P = (jax.ShapeDtypeStruct(shape, np.int32) for shape in ((count, longest), (count,)))
    sampling, max_new = sampling_params(policy.config.temperature), sizes.cache_buckets[-1]
    if sizes.cache_tokens:
        specs, prefill = slots.slot_specs(), (weights, token_PX, length_P)
        empty_fns = [functools.partial(slots.empty_slots, model, max_new, shape)
                     for shape in sizes.shapes[: len(sizes.columns)]]
    else:
        key_data = jax.ShapeDtypeStruct((2,), np.uint32)
        specs = decode.state_specs()
        prefill = weights, decode.PromptBatch(token_PX, length_P, decode.RowStart(length_P, length_P, key_data))
        empty_fns = [functools.partial(decode.empty_state, model, max_new, count, longest, bucket)
                     for bucket in sizes.cache_buckets]
    places = decode.shardings_of(local, specs)
    placed = tuple(
        jax.tree.map(_placed, places, jax.eval_shape(fn), is_leaf=lambda node: isinstance(node, NamedSharding))
        for fn in empty_fns
    )
    return SamplingShapes(weights, (count, longest), prefill, placed, sampling)


@functools.cache
def _layout_shapes(model: ModelConfig, is_joined: bool) -> dict:
    return jax.eval_shape(functools.partial(decode_layers.split_layers, model, is_joined), _weight_shapes(model))


def _placed(place: NamedSharding, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.update(sharding=place), tree)


def device_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
