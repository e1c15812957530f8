"""The optimizer of either role: AdamW with global-norm clipping, from its config."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

ADAPTERS_LR = 10  # times that of all parameters
SCHEDULES = ("constant", "cosine")


def learning_rate(config: ConfigDict) -> optax.Schedule:
    """Linear warm-up over `warmup_steps`, then constant, or a cosine down to zero at `decay_steps`."""
    warmup_steps = config.warmup_steps
    if config.schedule == "cosine":
        # Stage 1 may be shorter than its warm-up; optax requires at least one step of decay.
        decay_steps = max(config.decay_steps, warmup_steps + 1)
        return optax.warmup_cosine_decay_schedule(0.0, config.lr, warmup_steps, decay_steps)
    # With no steps optax would hold the initial value, 0.
    return optax.warmup_constant_schedule(0.0 if warmup_steps else config.lr, config.lr, warmup_steps)


class RoleCounts(NamedTuple):
    """Updates by turns of each role, int32[]."""

    generator: jax.Array
    verifier: jax.Array


def scale_by_learning_rate_of(role: str, schedule: optax.Schedule) -> optax.GradientTransformation:
    """`optax.scale_by_learning_rate` for one policy that has both roles: the schedule counts the updates of `role`."""

    def update(updates: Any, counts: RoleCounts, params: Any = None) -> tuple[Any, RoleCounts]:
        count = getattr(counts, role)
        rate = -schedule(count)
        scaled = jax.tree.map(lambda leaf: jnp.array(rate, leaf.dtype) * leaf, updates)
        return scaled, counts._replace(**{role: optax.safe_increment(count)})

    return optax.GradientTransformation(lambda params: RoleCounts(jnp.int32(0), jnp.int32(0)), update)


def make_optimizer(
    config: ConfigDict, are_adapters: bool = False, shared_by: str = ""
) -> optax.GradientTransformation:
    """Clip to `clip_norm`, then AdamW. Moments are float32, like the parameters they belong to.

    With `are_adapters`, the learning rate and the decay are those that the settings name for adapters. Where one policy
    has both roles, `shared_by` is the role whose settings these are: its schedule counts its updates alone, as if there
    were two policies, and the moments are those of all updates.
    """
    if are_adapters:
        config = config.copy_and_resolve_references()
        config.lr, config.weight_decay = config.lora_lr or ADAPTERS_LR * config.lr, config.lora_weight_decay
    schedule = learning_rate(config)
    scale = scale_by_learning_rate_of(shared_by, schedule) if shared_by else optax.scale_by_learning_rate(schedule)
    # Decay acts on all parameters, norms and biases among them, as in verl; TRL's trainer leaves those two out.
    adamw = optax.chain(
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay),
        scale,
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
