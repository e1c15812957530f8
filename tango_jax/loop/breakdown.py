"""Runs whose numbers break down: NaN, infinity, or an update that throws the parameters away.

In: what a turn returns, states that are about to be saved, arrays that were loaded. Out: nothing, or one error with
what to do. Stage: after every turn of reinforcement learning, before every save, and where parameters are loaded. The
sampler (sampling/sampler.py) does the same for logits.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from tango_jax.runtime.finite import BROKEN_VALUES, first_not_finite

# Norm of an update over the norm of the parameters that it changes. Training at its best is near 1e-3; above 10 nothing
# is left of what was learned, while loss and gradient of that update, measured before it, look as ever.
MAX_UPDATE_RATIO = 10.0


class Broken(FloatingPointError):
    """Numbers of a role that are no longer finite; the message goes on from the name of what was being done."""

    def __init__(self, role: str, message: str):
        super().__init__(message)
        self.role = role


def check_metrics(role: str, metrics: dict[str, float]) -> None:
    """Raises Broken where a metric of a turn of `role` is not finite, or an update was absurdly large."""
    bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    if bad:
        raise Broken(role, f"gave values that are not finite: {bad}")
    large = {
        name: value
        for name, value in metrics.items()
        if name.endswith("/update_ratio") and value > MAX_UPDATE_RATIO
    }
    for name, value in large.items():
        raise Broken(
            role,
            f"replaced the parameters: {name} is {value:.3g}, the norm of an update over the norm of what it changed, "
            f"and the limit is {MAX_UPDATE_RATIO:g}",
        )


def check_params(states: dict[str, Any]) -> None:
    """Raises Broken where parameters of a role must not be saved; `states` is role -> TrainState."""
    for role, state in states.items():
        broken = first_not_finite(state.params)
        if broken is not None:
            raise Broken(role, f"found {BROKEN_VALUES} in {role}/params/{broken}")


@contextlib.contextmanager
def explained(doing: str, config: ConfigDict, workdir: Any, newest: int | None) -> Iterator[None]:
    """A block in which numbers may break: the error then says what was being done and what to do about it.

    Args:
        doing: what the block does, as the subject of the message.
        newest: turn of the newest checkpoint in the workdir, None without one.

    Raises:
        FloatingPointError: for a `Broken` in the block.
    """
    try:
        yield
    except Broken as error:
        raise FloatingPointError(f"{doing} {error}. {_advice(config, error.role, workdir, newest)}") from error


def _advice(config: ConfigDict, role: str, workdir: Any, newest: int | None) -> str:
    """It never names a setting that the workdir would refuse: a run goes on with its own alone."""
    optimizer = config[role].optimizer
    kept = "there is no checkpoint yet" if newest is None else (
        f"the newest checkpoint, of turn {newest}, holds finite parameters"
    )
    stage_one = [
        f"--config.{name}.init_from={workdir}"
        for name in ("generator", "verifier")
        if config[name].sft.steps and not config[name].init_from
    ]
    saves = f" ({' '.join(stage_one)} takes over its stage 1)" if stage_one else ""
    return (
        f"Nothing of it is saved; {kept}. {workdir} goes on with its own settings only: choose a new --workdir"
        f"{saves} with a lower {role}.optimizer.lr (it is {optimizer.lr:g}) or {role}.optimizer.clip_norm "
        f"({optimizer.clip_norm:g})"
    )
