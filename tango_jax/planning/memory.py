"""Memory of a device in every phase of a run, split by what the bytes are for.

The states of both policies and their references stay on a device in every phase except stage 1.
"""

from typing import NamedTuple

import jax.numpy as jnp

from tango_jax.config import ROLES
from tango_jax.method.own_arm import shares_policy
from tango_jax.planning.costs import micro_batch_shape
from tango_jax.planning.job import Job, SizedPolicy, device_bytes
from tango_jax.planning.programs import Program
from tango_jax.records import Batch
from tango_jax.sampling.slots import SlotState


class Phase(NamedTuple):
    name: str  # generator/update
    parameters: float = 0  # of both policies and their references
    optimizer: float = 0  # moments of both
    weights: float = 0  # a copy of the parameters in the layout of sampling
    cache: float = 0  # keys and values
    gradients: float = 0
    activations: float = 0
    temporaries: float = 0  # the batch and the compiler's scratch memory
    error: str = ""

    @property
    def peak(self) -> float:
        return sum(self[1:-1])


def phases(job: Job, programs: dict[str, Program]) -> list[Phase]:
    roles = dict.fromkeys(name.split("/")[0] for name in programs)
    return [phase for role in roles for phases_of in PHASES_OF.values() for phase in phases_of(job, programs, role)]


def sampling_phases(job: Job, programs: dict[str, Program], role: str) -> list[Phase]:
    return [] if job.policies[role].is_scored else [_reshard(job, programs, role), _sample(job, programs, role)]


def training_phases(job: Job, programs: dict[str, Program], role: str) -> list[Phase]:
    stage_one = [_stage_one(job, programs, role)] if role in job.stage_one else []
    scored = [_score(job, programs, role)] if job.trains(role) or job.policies[role].is_scored else []
    updated = [_update(job, programs, role)] if job.trains(role) else []
    return [*scored, *updated, *stage_one]


PHASES_OF = {"sampling": sampling_phases, "training": training_phases}


def resident(job: Job, name: str, busy: str = "", with_reference: bool = False, with_moments: bool = False) -> Phase:
    """Bytes that are always on a device. With `mesh.offload`, moments and references only of the `busy` role. One
    policy has one reference, if either role's loss has a KL term."""
    parameters, optimizer, is_shared = 0, 0, shares_policy(job.config)
    for role, policy in job.policies.items():
        if is_shared and role != ROLES[0]:
            continue
        state, config = policy.state, policy.config
        own, is_busy = device_bytes(state.params), busy == role or (is_shared and bool(busy))
        parameters += own + (0 if job.shares_base(role) else device_bytes(policy.base))
        roles = job.policies if is_shared else (role,)
        is_trainable = not policy.model_config.score_head
        compared = [one for one in roles if job.policies[one].config.loss.kl_coef > 0 and is_trainable]
        if compared if not config.mesh.offload else with_reference and busy in compared:
            parameters += own
        if not config.mesh.offload or (is_busy and with_moments):
            optimizer += device_bytes(state.opt_state)
    return Phase(name, parameters=parameters, optimizer=optimizer)


def _reshard(job: Job, programs: dict[str, Program], role: str) -> Phase:
    layout = programs[f"{role}/layout"]
    phase = resident(job, f"{role}/reshard")
    return phase._replace(weights=layout.output, temporaries=layout.temp, error=layout.error)


def _sample(job: Job, programs: dict[str, Program], role: str) -> Phase:
    """The fullest of: the prompts' pass, the steps in each cache bucket, and copying a cache to another, by layer."""
    prefill = programs[f"{role}/prefill"]
    if job.policies[role].model_config.score_head:
        phase = resident(job, f"{role}/sample")._replace(weights=device_bytes(job.policies[role].sampling.weights))
        return phase._replace(temporaries=prefill.added, error=prefill.error)
    decode = programs[f"{role}/decode"]
    shapes = job.policies[role].sampling
    caches = [device_bytes((state.k, state.v) if isinstance(state, SlotState) else (state.prefix, state.suffix))
              for state in shapes.states]
    rests = [device_bytes(state) - cache for state, cache in zip(shapes.states, caches, strict=True)]
    phase = resident(job, f"{role}/sample")._replace(weights=device_bytes(shapes.weights))
    sizes, num_layers = job.policies[role].sampler_config, job.policies[role].model_config.num_layers
    # With a budget, a chunk of prompts is read before it enters the cache; else what was read is a part of the cache.
    counted = 0 if sizes.cache_tokens else device_bytes(shapes.states[0].prefix)
    read = phase._replace(cache=caches[0], temporaries=prefill.added - counted + rests[0], error=prefill.error)
    # The loop is compiled in the last bucket. Its scratch memory grows with the rows, mostly by logits.
    rows = [state.rows.token_B.shape[0] for state in shapes.states]
    moments = [read]
    moments += [
        phase._replace(cache=cache, temporaries=decode.temp * count / rows[-1] + rest, error=decode.error)
        for count, cache, rest in zip(rows, caches, rests, strict=True)
    ]
    if len(caches) > 1 or len(sizes.row_buckets) > 1:
        moments.append(phase._replace(cache=max(caches) * (1 + 1 / num_layers), temporaries=2 * max(rests)))
    failed = [moment for moment in moments if moment.error]
    return max(failed or moments, key=lambda moment: moment.peak)


def _score(job: Job, programs: dict[str, Program], role: str) -> Phase:
    score = programs[f"{role}/score"]
    phase = resident(job, f"{role}/score", role, with_reference=True)
    return phase._replace(temporaries=score.added + _batches(job, role), error=score.error)


def _update(job: Job, programs: dict[str, Program], role: str) -> Phase:
    """Gradients have the parameters' type. A second copy by the compiler counts as temporary."""
    update = programs[f"{role}/update"]
    gradients = device_bytes(job.policies[role].state.params)
    kept = saved_activations(job.policies[role], job.policies[role].batch)
    phase = resident(job, f"{role}/update", role, with_moments=True)
    return phase._replace(
        gradients=gradients,
        activations=kept,
        temporaries=max(0, update.added - gradients - kept) + _batches(job, role),
        error=update.error,
    )


def _stage_one(job: Job, programs: dict[str, Program], role: str) -> Phase:
    """An update of stage 1, without references. Earlier roles have their parameters there."""
    policy, update = job.policies[role], programs[f"{role}/sft"]
    state, batch = policy.in_stage_one.state, policy.stage_one
    roles = list(job.policies)
    # One policy hands the generator's parameters on, unless they are of another run's stage 1.
    is_handed_on = shares_policy(job.config) and not job.config.generator.init_from
    before = [] if is_handed_on else roles[: roles.index(role)]
    gradients, base = device_bytes(state.params), 0 if policy.config.sft.full else device_bytes(policy.base)
    kept = saved_activations(job.policies[role], batch)
    return Phase(
        f"{role}/sft",
        parameters=gradients + (0 if before and job.shares_base(role) else base)
        + sum(device_bytes(job.policies[other].weights) for other in before),
        optimizer=device_bytes(state.opt_state),
        gradients=gradients,
        activations=kept,
        temporaries=max(0, update.added - gradients - kept) + device_bytes(batch),
        error=update.error,
    )


def _batches(job: Job, role: str) -> int:
    return device_bytes(job.policies[role].batch) * job.policies[role].config.loss.minibatches


def saved_activations(policy: SizedPolicy, batch: Batch) -> float:
    """remat=full keeps layers' inputs, dots also the results of products; with none, all of it counts as temporary."""
    model, tensor = policy.model_config, policy.placement.train.shape["tensor"]
    width = {"none": 0, "full": model.width}.get(model.remat)
    if width is None:
        heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        width = 3 * model.width + (heads + 2 * model.mlp_width) / tensor
    size = jnp.dtype(model.compute_dtype).itemsize
    return model.num_layers * micro_batch_shape(batch).total * width * size
