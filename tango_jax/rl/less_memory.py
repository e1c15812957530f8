"""What lowers the memory of a policy's phases, in settings: for a plan, and for an error."""

from collections.abc import Collection
from typing import Any

from tango_jax.config import ROLES


def less_memory(
    policy: Any, phase: str, alike: Collection[str], is_scored: bool, offloaded: str | None = ""
) -> list[str]:
    """Each as "setting=value: effect". `policy`: a Policy or a planned one. `phase`: sample, reshard, sft, init or
    one of an update. `alike`: see `method.own_arm.alike`. `is_scored`: its marks are read, and no prompt is shared.
    `offloaded`: about moments and references that `mesh.offload` would move; None: there are none."""
    config, shape = policy.config, policy.placement.train.shape
    if phase in ("reshard", "sample"):
        changes = _sampling_changes(policy)
    elif phase == "init":
        rank = f"{policy.role}.model.lora.rank=32: adapters have fewer moments and gradients than all parameters"
        changes = [] if policy.model_config.lora or policy.model_config.score_head else [rank]
    else:
        changes = _training_changes(policy, "sft." if phase == "sft" else "", is_scored)
    if shape["data"] > 1:
        changes.append(f"{policy.role}.mesh.data=1 and {policy.role}.mesh.fsdp={shape['fsdp'] * shape['data']}: its "
                       f"state is split over {shape['data']} times as many devices")
    changes = [_of_both(policy.role, change, alike) for change in changes]
    if not config.mesh.offload and offloaded is not None and phase != "sft":  # in stage 1 nothing is offloaded
        changes.append("generator.mesh.offload=True and verifier.mesh.offload=True: moments and references wait in "
                       f"host memory{offloaded}")
    return changes


def _of_both(role: str, change: str, alike: Collection[str]) -> str:
    settings, *effect = change.split(": ", 1)
    if not any(f"{role}.{name}." in settings for name in alike):
        return change
    return ": ".join([" and ".join(settings.replace(role, name) for name in ROLES), *effect])


def _training_changes(policy: Any, stage: str, is_scored: bool) -> list[str]:
    role, config, model = policy.role, policy.config, policy.model_config
    tensor = policy.placement.train.shape["tensor"]
    rows, changes = (config.sft if stage else config).rows_per_micro_batch, []
    if model.remat != "full":
        changes.append(f"{role}.model.remat=full: only each layer's input is kept for the backward pass")
    if not config.logp_chunk:
        changes.append(f"{role}.logp_chunk=512: the logits of 512 tokens exist at a time")
    if rows > 1:
        changes.append(f"{role}.{stage}rows_per_micro_batch={rows // 2}: half the activations")
    if not stage and not is_scored and config.prompts_per_micro_batch > 1:
        changes.append(f"{role}.prompts_per_micro_batch={config.prompts_per_micro_batch // 2}")
    if model.num_kv_heads % (2 * tensor) == 0 and policy.placement.local.size > tensor:
        changes.append(f"{role}.mesh.tensor={2 * tensor}: a layer's parameters and most activations are split")
    return changes


def _sampling_changes(policy: Any) -> list[str]:
    role, config, model = policy.role, policy.config, policy.model_config
    tensor, changes = config.mesh.decode_tensor, []
    if model.num_kv_heads % (2 * tensor) == 0 and policy.placement.local.size >= 2 * tensor:
        changes.append(f"{role}.mesh.decode_tensor={2 * tensor}: each copy of the weights is split over them")
    if model.score_head:  # it decodes nothing, and its head is small
        return changes
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
