"""What to change where a plan does not fit, in numbers."""

from tango_jax.method.own_arm import shares_policy
from tango_jax.planning.job import Job, SizedPolicy
from tango_jax.planning.memory import Phase
from tango_jax.planning.targets import GIB, Target


def advice(job: Job, phases: list[Phase], target: Target) -> list[str]:
    """A line for each phase that is too large and for each change that helps; none where everything fits."""
    lines, available = [], target.memory
    for phase in phases:
        if phase.error:
            lines.append(f"{phase.name} does not compile for this memory: {phase.error}")
        elif phase.peak > available:
            lines.append(f"{phase.name} needs {phase.peak / GIB:.1f} GiB of {available / GIB:.1f} GiB")
    full = [phase for phase in phases if phase.error or phase.peak > available]
    changes = dict.fromkeys(change for phase in full for change in _changes(job, phase, target))
    lines += [f"try {change}" for change in changes]
    if shares_policy(job.config) and any(".mesh." in change or ".model." in change for change in changes):
        lines.append("one policy has both roles: give both roles the same model and mesh")
    return lines


def _changes(job: Job, phase: Phase, target: Target) -> list[str]:
    role, name = phase.name.split("/")
    policy, config = job.policies[role], job.policies[role].config
    if name in ("reshard", "sample"):
        changes = _sampling_changes(policy)
    else:
        changes = _training_changes(policy, "sft." if name == "sft" else "")
    if name == "sample" and job.processes > 1 and policy.placement.local.size < target.per_host:
        changes.insert(0, f"one process for the {target.per_host} devices of a host: they share the rows of a batch")
    if not config.mesh.offload and phase.optimizer and name != "sft":  # in stage 1 nothing is offloaded
        changes.append(f"generator.mesh.offload=True and verifier.mesh.offload=True: moments and references wait in "
                       f"host memory, of the {(phase.parameters + phase.optimizer) / GIB:.1f} GiB that states and "
                       "references take now")
    shape = policy.placement.train.shape
    if shape["data"] > 1:
        changes.append(f"{role}.mesh.data=1 and {role}.mesh.fsdp={shape['fsdp'] * shape['data']}: its state is split "
                       f"over {shape['data']} times as many devices")
    return [*changes, "more devices of the target"]


def _training_changes(policy: SizedPolicy, stage: str) -> list[str]:
    role, config, model = policy.role, policy.config, policy.model_config
    tensor = policy.placement.train.shape["tensor"]
    rows, changes = (config.sft if stage else config).rows_per_micro_batch, []
    if model.remat != "full":
        changes.append(f"{role}.model.remat=full: only each layer's input is kept for the backward pass")
    if not config.logp_chunk:
        changes.append(f"{role}.logp_chunk=512: the logits of 512 tokens exist at a time")
    if rows > 1:
        changes.append(f"{role}.{stage}rows_per_micro_batch={rows // 2}: half the activations")
    if not stage and config.prompts_per_micro_batch > 1:
        changes.append(f"{role}.prompts_per_micro_batch={config.prompts_per_micro_batch // 2}")
    if model.num_kv_heads % (2 * tensor) == 0 and policy.placement.local.size > tensor:
        changes.append(f"{role}.mesh.tensor={2 * tensor}: a layer's parameters and most activations are split")
    return changes


def _sampling_changes(policy: SizedPolicy) -> list[str]:
    role, config, model = policy.role, policy.config, policy.model_config
    tensor, changes = config.mesh.decode_tensor, []
    if model.num_kv_heads % (2 * tensor) == 0 and policy.placement.local.size >= 2 * tensor:
        changes.append(f"{role}.mesh.decode_tensor={2 * tensor}: each copy of the weights is split over them")
    least = config.row_buckets[0] // policy.placement.row_multiple * (config.max_prompt + config.max_response)
    if config.cache_tokens // 2 >= max(1, least):
        changes.append(f"{role}.cache_tokens={config.cache_tokens // 2}: half the keys and values")
    elif len(config.row_buckets) > 1:
        rows = config.row_buckets[:-1]
        changes.append(f"{role}.row_buckets={rows}: decode batches of {rows[-1]} rows instead of "
                       f"{config.row_buckets[-1]}")
    if model.head_dtype == "float32" and model.compute_dtype != "float32":
        changes.append(f"{role}.model.head_precision=bfloat16: half the head, at some precision of log-probs")
    return changes
