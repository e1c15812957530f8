"""Detects NaN, infinity and updates that destroy the parameters, after every turn and before every save; says what to
lower where a device's memory is full."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

from tango_jax.defaults import KEYS
from tango_jax.method.load import own_prompts
from tango_jax.method.own_arm import alike, arm_of
from tango_jax.rl.less_memory import less_memory
from tango_jax.rl.optimizer import peak_rate
from tango_jax.rl.policy import Policy
from tango_jax.runtime.device_memory import names_what_is_full
from tango_jax.runtime.failures import OutOfMemory, typed_command
from tango_jax.runtime.trees import BROKEN_VALUES, first_not_finite
from tango_jax.tracking.run_config import ANY_TIME

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


def names_memory(
    doing: str, phases: Sequence[str], config: ConfigDict, *policies: Policy
) -> contextlib.AbstractContextManager:
    """Where a device's memory is full: raises OutOfMemory, which says what lowers it in these phases."""
    return names_what_is_full(doing, lambda: _advice_on_memory(dict.fromkeys(
        change for policy in policies for phase in phases for change in less_memory(
            policy, phase, alike(config), own_prompts(arm_of(config))[policy.role].is_scored))))


def _advice_on_memory(changes: Iterable[str]) -> str:
    here = [change for change in changes if KEYS[change.partition("=")[0]].change in ANY_TIME]
    there = [change for change in changes if change not in here]
    parts = [f"{place}: {'; or '.join(own)}" for place, own in (
        ("Resume this run with", here), ("Start a new --workdir with", there)) if own]
    return f"{'. '.join(parts) or 'Use more devices'}. `{typed_command('plan')}` shows what each phase needs"


@contextlib.contextmanager
def explained(
    doing: str, config: ConfigDict, workdir: Any, newest_fn: Callable[[], int | None]
) -> Iterator[None]:
    """Turns a `Broken` into a FloatingPointError with advice. `doing`: the message's subject, also of an OutOfMemory;
    `newest_fn`: turn of the newest checkpoint."""
    try:
        yield
    except Broken as error:
        raise FloatingPointError(f"{doing} {error}. {_advice(config, error.role, workdir, newest_fn())}") from error
    except OutOfMemory as error:
        raise OutOfMemory(f"{doing}: {error}") from error


def _advice(config: ConfigDict, role: str, workdir: Any, newest: int | None) -> str:
    """Only settings that can be changed: a workdir cannot be resumed with others."""
    optimizer = config[role].optimizer
    name, rate = peak_rate(optimizer, config[role].model.lora.rank > 0)
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
        f"--workdir{saves} with a lower {role}.optimizer.{name} (it is {rate:g}) or {role}.optimizer.clip_norm "
        f"({optimizer.clip_norm:g})"
    )
