"""The optimizer of either role: AdamW with global-norm clipping, from its config."""

import optax

SCHEDULES = ("constant", "cosine")


def learning_rate(config) -> optax.Schedule:
    """Linear warm-up over `warmup_steps`, then constant, or a cosine down to zero at `decay_steps`."""
    if config.schedule == "cosine":
        after_warmup = optax.cosine_decay_schedule(config.lr, max(1, config.decay_steps - config.warmup_steps))
    else:
        after_warmup = optax.constant_schedule(config.lr)
    if not config.warmup_steps:
        return after_warmup
    warmup = optax.linear_schedule(0.0, config.lr, config.warmup_steps)
    return optax.join_schedules([warmup, after_warmup], [config.warmup_steps])


def make_optimizer(config) -> optax.GradientTransformation:
    """Clip to `clip_norm`, then AdamW. Moments are float32, like the parameters they belong to."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config), b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay
        ),
    )
