"""Stage 1 of another run as a start: whether it is there, finished and good enough to begin reinforcement learning.

In: `init_from` of a role, the record that the other run keeps beside its stage-1 checkpoint, and its settings. Out:
nothing, or one error that says what to do. Stage: the start of a run, before data is read or anything compiled, and
once more when the parameters are loaded, since a damaged checkpoint falls back to an earlier step.

What a run did not record yet (its settings, a held-out loss) is not held against it.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from tango_jax.runtime.checkpoint import CheckpointError, peek_meta

ROLES = ("generator", "verifier")


def sft_directory(workdir: Path, role: str) -> Path:
    return Path(workdir).expanduser() / "sft" / role


def check_init_from(config: ConfigDict, roles: Sequence[str] = ROLES) -> None:
    """Look at what every role starts from, without reading parameters.

    Raises:
        ValueError: there is no stage 1 of the role, or see `check_stage_one`.
    """
    for role in roles:
        source = config[role].init_from
        if not source:
            continue
        found = peek_meta(sft_directory(source, role) / "checkpoints")
        if found is None:
            raise CheckpointError(_what_is_missing(role, source))
        check_stage_one(role, config[role].sft, source, found.step, found.meta)


def check_stage_one(role: str, sft: ConfigDict, source: str, step: int, meta: dict) -> None:
    """`step` and `meta` are those of the checkpoint; `sft` are this run's settings of the role.

    The stage 1 must have made all steps of the run that it belongs to, and no fewer than this run's settings say it
    has; its held-out loss must be within the gates of both.

    Raises:
        ValueError: it is unfinished, shorter than this run's settings say, or failed a gate.
    """
    name, settings = f"{role}.init_from={source}", _settings(source)
    steps = settings.get(f"{role}.sft.steps", 0)
    if step < steps:
        raise ValueError(f"{name}: its stage 1 of the {role} is unfinished, at step {step} of {steps}: start the "
                         "command that began it again, which goes on from there, or name another run")
    if step < sft.steps:
        raise ValueError(f"{name}: its stage 1 of the {role} has {step} steps, and {role}.sft.steps={sft.steps} says "
                         f"more: name a run with so many, or set {role}.sft.steps={step} here")
    loss, own_gate = meta.get("heldout_loss", 0.0), settings.get(f"{role}.sft.max_heldout_loss", 0.0)
    if math.isnan(loss):
        raise ValueError(f"{name}: its stage 1 of the {role} ended at a held-out loss of nan, so its parameters are of "
                         f"no use: repeat it in a new workdir with a lower {role}.sft.optimizer.lr")
    if not passes_gate(own_gate, loss):
        raise ValueError(f"{name}: its stage 1 of the {role} ended at a held-out loss of {loss:.3f} per token and so "
                         f"failed its own gate, {role}.sft.max_heldout_loss={own_gate}: repeat it with more steps in a "
                         "new workdir")
    if not passes_gate(sft.max_heldout_loss, loss):
        raise ValueError(f"{name}: its stage 1 of the {role} ended at a held-out loss of {loss:.3f} per token; the "
                         f"gate here is {role}.sft.max_heldout_loss={sft.max_heldout_loss}: repeat it with more steps "
                         "in a new workdir, or raise the gate")


def passes_gate(limit: float, loss: float) -> bool:
    """Whether a held-out loss is within `sft.max_heldout_loss`; 0 is no gate. A loss that is not a number is not."""
    return limit == 0 or loss <= limit


def _what_is_missing(role: str, source: str) -> str:
    start = f"{role}.init_from={source}: there is no stage-1 checkpoint of the {role} in {sft_directory(source, role)}"
    settings = _settings(source)
    if settings.get(f"{role}.init_from"):
        return f"{start}: that run took its own from {settings[f'{role}.init_from']}, so name that"
    if settings.get(f"{role}.sft.steps") == 0:
        return (f"{start}: that run had no stage 1 of the {role} ({role}.sft.steps=0). To start from its newest "
                f"parameters, set {role}.checkpoint={source} and leave {role}.init_from empty")
    return f"{start}: run python -m tango_jax.sft with --workdir={source} first, or name another run"


def _settings(source: str) -> dict:
    """The settings that the other run was started with; none where they are not there or cannot be read."""
    try:
        settings = json.loads((Path(source).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}
