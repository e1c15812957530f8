"""A job in other sizes, without tracing any of its functions.

In: a job that `make_job` has made, and new settings of a role. Out: the job as it would be with them, as far as shapes
go: enough for memory and times by arithmetic. Its functions are those of the old settings, and must not be compiled.
"""

import dataclasses
import functools
from collections.abc import Collection

import jax
from ml_collections import ConfigDict

from tango_jax.models import transformer
from tango_jax.models.decode_attention import decode_attention_of
from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.programs import ROLES, Job, abstract_batch, abstract_stage_one, sampling_shapes
from tango_jax.planning.targets import Devices
from tango_jax.rl.policy import Policy, sampler_sizes
from tango_jax.sharding.layouts import param_shardings, with_shardings
from tango_jax.sharding.placement import check_model, make_placement
from tango_jax.weights.hf_layout import abstract_params


def resized(
    job: Job,
    config: ConfigDict,
    devices: Devices,
    per_process: int,
    roles: Collection[str] = ROLES,
    has_sampling: bool = True,
    has_training: bool = True,
) -> Job:
    """The job with these settings, which may differ from its own in meshes, in `model.remat`, and in how many rows are
    sampled and trained at once.

    Args:
        roles: whose settings differ.
        has_sampling: how they sample is worked out again, and likewise `has_training`.

    Raises:
        ValueError: a mesh that fits neither the devices nor the model; see `SamplerConfig.check_cache_tokens`.
    """
    policies, states = dict(job.policies), dict(job.states)
    batches, sampling, stage_one = dict(job.batches), dict(job.sampling), dict(job.stage_one)
    for role in roles:
        policy = policies[role] = _resized_policy(job.policies[role], config[role], devices, per_process)
        if has_training:
            states[role] = with_shardings(states[role], param_shardings(policy.placement.train, states[role]))
            batches[role] = abstract_batch(policy, config.rl, job.processes)
            stage_one |= abstract_stage_one({role: policy}, job.processes)
        if has_sampling:
            sampling[role] = sampling_shapes(policy, _decode_weights(policy))
    return Job(config, policies, job.processes, states, batches, sampling, stage_one)


def _resized_policy(policy: Policy, config: ConfigDict, devices: Devices, per_process: int) -> Policy:
    try:
        placement = make_placement(config.mesh, devices.devices, per_process)
        check_model(policy.model_config, config.mesh, placement)
        sizes = sampler_sizes(config).with_row_multiple(placement.row_multiple)
        sizes.check_cache_tokens()
        # Chosen anew, since it depends on cache_tokens.
        numerics = {"remat": config.model.remat, "decode_attention": config.model.decode_attention}
        model, device = dataclasses.replace(policy.model_config, **numerics), placement.train.devices.flat[0]
        decode_attention = decode_attention_of(model, sizes.buckets, sizes.cache_tokens, device)
    except ValueError as error:
        raise ValueError(f"{policy.role}: {error}") from error
    return dataclasses.replace(
        policy,
        config=config,
        model_config=dataclasses.replace(model, decode_attention=decode_attention),
        placement=placement,
        sampler=dataclasses.replace(policy.sampler, config=sizes, placement=placement),
    )


def _decode_weights(policy: Policy) -> dict:
    model = dataclasses.replace(policy.model_config, remat="none")  # on which no shape depends
    return _weight_shapes(model, policy.placement.local.shape["tensor"] == 1)


@functools.cache
def _weight_shapes(model: ModelConfig, join: bool) -> dict:
    return jax.eval_shape(functools.partial(transformer.split_layers, model, join), abstract_params(model))
