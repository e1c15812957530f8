"""The optimizer of either role: AdamW with global-norm clipping, from its config."""

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


def make_optimizer(config: ConfigDict, are_adapters: bool = False) -> optax.GradientTransformation:
    """Clip to `clip_norm`, then AdamW. Moments are float32, like the parameters they belong to.

    With `are_adapters`, the learning rate and the decay are those that the settings name for adapters.
    """
    if are_adapters:
        config = config.copy_and_resolve_references()
        config.lr, config.weight_decay = config.lora_lr or ADAPTERS_LR * config.lr, config.lora_weight_decay
    # Decay acts on all parameters, norms and biases among them, as in verl; TRL's trainer leaves those two out.
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config), b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay
        ),
    )
