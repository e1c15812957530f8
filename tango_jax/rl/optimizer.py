"""AdamW with global-norm clipping."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

ADAPTERS_LR = 10  # times that of all parameters
# With an EPS of 0, a parameter that never had a gradient would become 0 / 0.
B1, B2, EPS = 0.9, 0.999, 1e-8


def learning_rate(lr: float, warmup_steps: int, cosine_to: int = 0) -> optax.Schedule:
    """Linear warm-up, then constant, or a cosine down to zero at step `cosine_to`."""
    if cosine_to:
        # Stage 1 may be shorter than its warm-up; optax requires at least one step of decay.
        return optax.warmup_cosine_decay_schedule(0.0, lr, warmup_steps, max(cosine_to, warmup_steps + 1))
    # With no steps optax would hold the initial value, 0.
    return optax.warmup_constant_schedule(0.0 if warmup_steps else lr, lr, warmup_steps)


class RoleCounts(NamedTuple):
    """Updates by turns of each role, int32[]."""

    generator: jax.Array
    verifier: jax.Array


def scale_by_learning_rate_of(role: str, schedule: optax.Schedule) -> optax.GradientTransformation:
    """`optax.scale_by_learning_rate` for one policy with both roles: the schedule counts the updates of `role`."""

    def update(updates: Any, counts: RoleCounts, params: Any = None) -> tuple[Any, RoleCounts]:
        count = getattr(counts, role)
        rate = -schedule(count)
        scaled = jax.tree.map(lambda leaf: jnp.array(rate, leaf.dtype) * leaf, updates)
        return scaled, counts._replace(**{role: optax.safe_increment(count)})

    return optax.GradientTransformation(lambda params: RoleCounts(jnp.int32(0), jnp.int32(0)), update)


def peak_rate(config: ConfigDict, are_adapters: bool) -> tuple[str, float]:
    """(the key that lowers it, the peak learning rate)."""
    return ("lora_lr", config.lora_lr or ADAPTERS_LR * config.lr) if are_adapters else ("lr", config.lr)


def make_optimizer(
    config: ConfigDict, are_adapters: bool = False, shared_by: str = "", cosine_to: int = 0, b2: float = B2
) -> optax.GradientTransformation:
    """Clip to `clip_norm`, then AdamW. Adapters have no weight decay. Where one policy has both roles, the schedule
    counts the updates of `shared_by` alone; the moments are of all updates."""
    schedule = learning_rate(peak_rate(config, are_adapters)[1], config.warmup_steps, cosine_to)
    scale = scale_by_learning_rate_of(shared_by, schedule) if shared_by else optax.scale_by_learning_rate(schedule)
    # Decay acts on all parameters, norms and biases among them, as in verl; TRL's trainer leaves those two out.
    adamw = optax.chain(
        optax.scale_by_adam(b1=B1, b2=b2, eps=EPS),
        optax.add_decayed_weights(0.0 if are_adapters else config.weight_decay),
        scale,
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
