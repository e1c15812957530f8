"""Checks that another run's stage 1 exists, is finished and passed its gate.

They run at the start, and again when parameters are loaded: a damaged checkpoint falls back to an earlier step.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from tango_jax.config import flatten
from tango_jax.method.load import load_method
from tango_jax.method.own_arm import shares_policy
from tango_jax.runtime.checkpoint import CheckpointError, peek_meta
from tango_jax.runtime.failures import typed_command
from tango_jax.text.prompts import PROMPTS
from tango_jax.tracking.evaluations import OTHER_PROBLEMS
from tango_jax.tracking.provenance import read_provenance
from tango_jax.tracking.run_config import without_folder
from tango_jax.weights.workdir import has_one_policy, prompting_of, settings_of

ROLES = ("generator", "verifier")
UNTRAINED = "untrained"  # in the record of a stage 1 that a role did not need, or had nothing for (self_stage_one.py)


def sft_directory(workdir: Path, role: str) -> Path:
    return Path(workdir).expanduser() / "sft" / role


def check_init_from(config: ConfigDict, roles: Sequence[str] = ROLES) -> None:
    """Raise ValueError if a stage 1 is missing, or trained something else. Reads no parameters."""
    for role in roles:
        source = config[role].init_from
        if not source:
            continue
        found = peek_meta(sft_directory(source, role) / "checkpoints")
        if found is None:
            raise CheckpointError(_what_is_missing(role, source))
        check_stage_one(role, config[role].sft, source, found.step, found.meta)
        _check_continued(config, role, source, found.meta.get("is_full", True))


def _check_continued(config: ConfigDict, role: str, source: str, is_full: bool) -> None:
    settings, here, verifier = settings_of(source), flatten(config), config.verifier
    name, is_shared = f"{role}.init_from={source}", shares_policy(config)
    for key in (f"{role}.model.lora.alpha", f"{role}.model.lora.base_dtype"):
        if not is_full and settings.get(key, here[key]) != here[key]:
            raise ValueError(f"{name}: its adapters were trained with {key}={settings[key]!r}; here it is "
                             f"{here[key]!r}: set it to {settings[key]!r}")
    goes_on = (is_shared or verifier.sft.start == "generator") and verifier.sft.steps and not verifier.init_from
    if role == "generator" and goes_on and is_full == (verifier.model.lora.rank > 0 and not verifier.sft.full):
        held, other = ("all parameters", "adapters") if is_full else ("adapters", "all parameters")
        raise ValueError(f"{name} holds {held}, but the verifier's stage 1, which continues from them, trains {other}: "
                         f"set verifier.sft.full={is_full}")
    if role == "generator" and is_shared and not (verifier.sft.steps or verifier.init_from) and _taught_both(source):
        raise ValueError(f"{name}: in that run one policy learned the generator's texts and then the verifier's: set "
                         f"verifier.init_from={source} as well, to start after both")
    if role == "verifier" and is_shared and settings and not _had_one_policy(source):
        raise ValueError(f"{name}: here both roles are one policy, but that run has two, and its verifier has not "
                         "learned to solve problems: name a run of one policy, or leave generator.init_from and "
                         "verifier.init_from empty")


def check_stage_one(role: str, sft: ConfigDict, source: str, step: int, meta: dict) -> None:
    """Raise ValueError unless a stage 1 has made all its steps, at least `sft.steps`, and passes both runs' gates."""
    name, settings = f"{role}.init_from={source}", settings_of(source)
    steps = settings.get(f"{role}.sft.steps", 0)
    if meta.get(UNTRAINED):
        return
    if step < steps:
        raise ValueError(f"{name}: its stage 1 of the {role} is unfinished, at step {step} of {steps}: run its command "
                         "again to finish it, or name another run")
    if step < sft.steps:
        raise ValueError(f"{name}: its stage 1 of the {role} has {step} steps, but {role}.sft.steps={sft.steps} "
                         f"requires more: name a run with that many, or set {role}.sft.steps={step} here")
    loss, own_gate = meta["heldout_loss"], settings.get(f"{role}.sft.max_heldout_loss", 0.0)
    if not passes_gate(own_gate, loss):
        raise ValueError(f"{name}: its stage 1 of the {role} ended at a held-out loss of {loss:.3f} per token and so "
                         f"failed its own gate, {role}.sft.max_heldout_loss={own_gate}: repeat it with more steps in a "
                         "new workdir")
    if not passes_gate(sft.max_heldout_loss, loss):
        raise ValueError(f"{name}: its stage 1 of the {role} ended at a held-out loss of {loss:.3f} per token; the "
                         f"gate here is {role}.sft.max_heldout_loss={sft.max_heldout_loss}: repeat it with more steps "
                         "in a new workdir, or raise the gate")


def runs_before(config: ConfigDict) -> dict[str, dict]:
    """{workdir: settings} of the runs whose weights this one goes on from, if they took the same file of problems."""
    places = [config.fork_of, *(place for role in ROLES for place in (config[role].init_from, config[role].checkpoint))]
    found = {place: settings_of(place) for place in dict.fromkeys(places)
             if place and not Path(place).expanduser().is_file()}
    train = without_folder(config.task.train)
    return {place: settings for place, settings in found.items() if config.task.name == "math" and train
            and settings.get("task.name") == "math" and without_folder(settings.get("task.train", "")) == train}


def trained_on_before(config: ConfigDict, fingerprint: str) -> list[str]:
    """Warnings of runs that may have been trained on problems that this one is evaluated on. `fingerprint`: of this
    run's problems."""
    lines = []
    for place, settings in runs_before(config).items():
        asked = ("test",) if config.task.test else ("test", "validation", "data_seed")
        differing = [f"task.{name} is {settings.get(f'task.{name}')!r} there, {config.task[name]!r} here"
                     for name in asked if settings.get(f"task.{name}", config.task[name]) != config.task[name]]
        with contextlib.suppress(ValueError):  # a damaged checkpoint, which this run need not read
            found = peek_meta(Path(place).expanduser() / "checkpoints")
            theirs = found.meta.get("source_fingerprint", {}).get("problems", fingerprint) if found else fingerprint
            differing = differing or [OTHER_PROBLEMS] * (theirs != fingerprint)
        if differing:
            lines.append(f"warning: {place} set other problems of {config.task.train} aside "
                         f"({'; '.join(differing)}), so it may have been trained on problems of this run's evaluation, "
                         "and accuracy may be too high: set the same here, or name other problems as task.test")
    return lines


def what_it_lacks(config: ConfigDict, role: str, source: str) -> str:
    """The end of a line: what the stage 1 that this role starts from lacks for this run; or "". A shared policy learns
    the generator's texts first. Its stage 1 as the verifier follows, and holds the texts of both roles."""
    arm = read_provenance(Path(source).expanduser()).get("arm") or {}
    theirs, method, is_shared = arm.get("further_prompts"), load_method(config), shares_policy(config)
    held = ROLES if role == "verifier" and _had_one_policy(source) else (role,)
    needed = ROLES if is_shared and (role == "verifier" or not config.verifier.sft.steps) else (role,)
    known = {name for one in held for name in (theirs or {}).get(one, ())}
    # Nobody has written examples of a user's prompt, also where it has the name of another.
    missing = {prompt.name for name in needed for prompt in method.further_prompts(name)
               if theirs is not None and (prompt.name not in known or PROMPTS.get(prompt.name) != prompt)}
    told = f", which has no examples of {', '.join(sorted(missing))}" if missing else ""
    if role == "verifier" and arm:
        told += _other_form(bool(arm.get("is_scored")), method.arm.is_scored)
    if role == "generator" and not is_shared and _taught_both(source):
        told += (". In that run one policy then learned the verifier's texts: to start after both, set "
                 f"verifier.adapter=generator and verifier.init_from={source}")
    return told


def _taught_both(source: str) -> bool:
    """Whether that run's stage 1 taught one policy the generator's texts and then the verifier's."""
    learned = peek_meta(sft_directory(source, "verifier") / "checkpoints")
    return bool(learned) and not learned.meta.get(UNTRAINED) and _had_one_policy(source)


def _had_one_policy(source: str) -> bool:
    return bool(settings_of(source)) and has_one_policy(Path(source).expanduser())


def how_it_judged(config: ConfigDict, checkpoint: str) -> str:
    """The end of a line: a verifier without a stage 1 here was trained to write, and is to be read, or the other way
    round; or ""."""
    own = prompting_of(checkpoint, "verifier", download=True)
    return _other_form(own.is_scored, load_method(config).arm.is_scored) if own else ""


def _other_form(was_scored: bool, is_scored: bool) -> str:
    return f", whose verifications have {'' if is_scored else 'no '}remarks" if was_scored != is_scored else ""


def passes_gate(limit: float, loss: float) -> bool:
    """0: no gate. NaN fails every gate."""
    return limit == 0 or loss <= limit


def _what_is_missing(role: str, source: str) -> str:
    start = f"{role}.init_from={source}: there is no stage-1 checkpoint of the {role} in {sft_directory(source, role)}"
    settings = settings_of(source)
    if settings.get(f"{role}.init_from"):
        return f"{start}: that run took its own from {settings[f'{role}.init_from']}, so name that run"
    if settings.get(f"{role}.sft.steps") == 0:
        return (f"{start}: that run had no stage 1 of the {role} ({role}.sft.steps=0). To start from its newest "
                f"parameters, set {role}.checkpoint={source} and {role}.sft.steps=0, and leave {role}.init_from empty")
    return f"{start}: run {typed_command('sft')} with --workdir={source} first, or name another run"
