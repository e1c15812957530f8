"""Detects NaN, infinity and updates that destroy the parameters, after every turn and before every save."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from ml_collections import ConfigDict

from tango_jax.runtime.trees import BROKEN_VALUES, first_not_finite

# Norm of an update over the norm of the parameters. In healthy training it is near 1e-3. Above 10 nothing learned is
# left, although the update's own loss and gradient, computed before it, look normal.
MAX_UPDATE_RATIO = 10.0


class Broken(FloatingPointError):
    """A role's numbers are not finite; the message continues a sentence that names the operation."""

    def __init__(self, role: str, message: str):
        super().__init__(message)
        self.role = role


def check_metrics(role: str, metrics: dict[str, float]) -> None:
    """Raise Broken if a metric is not finite, or an update was absurdly large."""
    bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    if bad:
        raise Broken(role, f"produced values that are not finite: {bad}")
    for name, value in metrics.items():
        if name.endswith("/update_ratio") and value > MAX_UPDATE_RATIO:
            raise Broken(role, f"replaced the parameters: {name} (norm of the update / norm of the changed parameters) "
                         f"is {value:.3g}, and the limit is {MAX_UPDATE_RATIO:g}")


def check_params(states: dict[str, Any]) -> None:
    for role, state in states.items():
        broken = first_not_finite(state.params)
        if broken is not None:
            raise Broken(role, f"found {BROKEN_VALUES} in {role}/params/{broken}")


@contextlib.contextmanager
def explained(
    doing: str, config: ConfigDict, workdir: Any, newest_fn: Callable[[], int | None]
) -> Iterator[None]:
    """Turns a `Broken` into a FloatingPointError with advice. `doing`: the message's subject; `newest_fn`: turn of
    the newest checkpoint."""
    try:
        yield
    except Broken as error:
        raise FloatingPointError(f"{doing} {error}. {_advice(config, error.role, workdir, newest_fn())}") from error


def _advice(config: ConfigDict, role: str, workdir: Any, newest: int | None) -> str:
    """Only settings that can be changed: a workdir cannot be resumed with others."""
    optimizer = config[role].optimizer
    kept = "there is no checkpoint yet" if newest is None else (
        f"the newest checkpoint, of turn {newest}, holds finite parameters"
    )
    stage_one = [
        f"--config.{name}.init_from={workdir}"
        for name in ("generator", "verifier")
        if config[name].sft.steps and not config[name].init_from
    ]
    saves = f" ({' '.join(stage_one)} reuses its stage 1)" if stage_one else ""
    return (
        f"Nothing of it is saved; {kept}. {workdir} can only be resumed with its own settings: choose a new "
        f"--workdir{saves} with a lower {role}.optimizer.lr (it is {optimizer.lr:g}) or {role}.optimizer.clip_norm "
        f"({optimizer.clip_norm:g})"
    )
