"""Adapters and batches of own problems: as many rows as the memory has room for, in every arm that is asked for."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence

from tango_jax.config import ROLES
from tango_jax.method.arms import Arm
from tango_jax.method.own_arm import load_arm
from tango_jax.models.lora import narrowest_side
from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.costs import num_parameters
from tango_jax.planning.estimates import estimated_phases
from tango_jax.planning.job import Job, sized_job
from tango_jax.planning.machines import GIB, Machine
from tango_jax.planning.memory import PHASES_OF, resident
from tango_jax.planning.sources import OpenSettings
from tango_jax.runtime.checks import Mistakes
from tango_jax.weights.source import fields_of

ADAPTER_RANK = 32


def asked_arms(settings: OpenSettings) -> dict[str, Arm]:
    """Those of a given experiment and of the cells of its grid; else the arm of the run. First the one that trains and
    samples most."""
    own, found = settings.config.ablation, {}
    axes = [list(axis.values()) for axis in own.grid.values() if isinstance(axis, Mapping)]
    axes = [[isinstance(label, Mapping) and label.get("ablation.arms") for label in axis] for axis in axes]
    is_asked = "ablation.arms" in settings.given and not any(map(all, axes))  # an axis may set the arms of all cells
    asked = [own.arms if is_asked else (), *(arms for axis in axes for arms in axis)]
    names = [name for names in asked if isinstance(names, (list, tuple)) for name in names if isinstance(name, str)]
    for name in names or [settings.config.arm]:
        with contextlib.suppress(ValueError):  # another check says so
            found[name] = load_arm(name)
    return dict(sorted(found.items(), key=lambda item: _size(item[1]), reverse=True))


def _size(arm: Arm) -> tuple[int, ...]:
    return len(arm.turns), arm.uses_verifier, not arm.is_scored, not arm.is_one_policy


def sized_jobs(settings: OpenSettings, models: dict[str, ModelConfig], machine: Machine) -> list[Job]:
    """Of every arm, as two may train different roles. Raises as `sized_job`."""
    config, jobs = settings.config, []
    for name in asked_arms(settings) or [config.arm]:
        config = config.copy_and_resolve_references()
        config.arm = name
        jobs.append(sized_job(config, models, machine))
    return jobs


def trained_roles(jobs: Sequence[Job]) -> list[str]:
    return [role for role in ROLES if any(job.trains(role) for job in jobs)]


def choose_adapters(
    settings: OpenSettings, models: dict[str, ModelConfig], machine: Machine
) -> tuple[dict[str, ModelConfig], list[str]]:
    """The models, with adapters where training all parameters does not fit, and a line that says so."""
    trained = {role: model for role, model in models.items() if not model.score_head}
    keys = [f"{role}.model.lora.rank" for role in trained]
    if settings.given.intersection(keys):
        return models, []
    try:
        set_batches(settings, models, machine, Mistakes())
        fits = planned_peak(sized_jobs(settings, models, machine)) <= machine.memory
    except ValueError:  # not even the states fit, or another mistake, which is found again
        fits = False
    rank = min(ADAPTER_RANK, *(1 << int(math.log2(narrowest_side(model))) for model in trained.values()))
    if fits:
        return models, []
    for key in keys:
        settings.put(key, rank)
    whose = "both roles" if len(trained) > 1 else f"the {', '.join(trained)}"
    adapted = {role: dataclasses.replace(model, **fields_of(settings.config[role])) for role, model in models.items()}
    return adapted, [f"adapters of rank {rank} on frozen models (model.lora.rank): training all parameters of "
                     f"{whose} does not fit in {machine.memory / GIB:.1f} GiB"]


def set_batches(
    settings: OpenSettings, models: dict[str, ModelConfig], machine: Machine, mistakes: Mistakes
) -> None:
    """Set how many rows are decoded and trained on at a time, as many as the memory has room for."""
    config, M = settings.config, settings.config.rl.samples_per_prompt
    rows_tried = [tuple(sorted({max(rows // 2, 1), rows})) for rows in halved(config.rl.prompts_per_step * M, M)]
    tried = {("sampling", "row_buckets"): rows_tried,
             ("training", "rows_per_micro_batch"): [4, 2, 1] if machine.is_cpu else [8, 4, 2, 1]}
    for role, model in models.items():
        chunk = machine.scale.logits_chunk(model.vocab_size)  # small vocabularies need no chunks
        settings.put(f"{role}.logp_chunk", chunk if chunk < 4 * config[role].max_response else 0)
        settings.put(f"{role}.prompts_per_micro_batch", int(machine.is_cpu))  # kernels attend to long rows
        for (_, key), values in tried.items():
            settings.put(f"{role}.{key}", values[-1])
        mistakes.require(len(config[role].row_buckets) > 0, f"{role}.row_buckets=() names no number of rows to decode: "
                         "name at least one, or leave the setting out to fit it to the memory")
    mistakes.raise_all()
    with mistakes.collected():
        jobs = sized_jobs(settings, models, machine)
    mistakes.raise_all()
    held = max(resident(job, "").peak for job in jobs)
    names = ", ".join(dict.fromkeys(config[role].checkpoint for role in ROLES))
    mistakes.require(
        held < machine.memory,
        f"{names}: parameters, optimizer states and references of both roles take {held / GIB:.1f} GiB of each "
        f"device, which has {machine.memory / GIB:.1f} GiB: choose a smaller model or more devices, or set "
        "generator.mesh.offload=true and verifier.mesh.offload=true, or generator.loss.kl_coef=0 and "
        "verifier.loss.kl_coef=0 for no references",
    )
    for role in models:
        for (kind, key), values in tried.items():
            for value in values:
                settings.put(f"{role}.{key}", value)
                if has_room(settings, models, machine, role, kind):
                    break


def has_room(
    settings: OpenSettings, models: dict[str, ModelConfig], machine: Machine, role: str, kind: str
) -> bool:
    try:
        jobs = sized_jobs(settings, models, machine)
    except ValueError:  # cache_tokens have no room for the smallest batch of these row_buckets
        return False
    # Fewer rows would not help where the weights are laid out.
    return all(phase.peak <= machine.scale.memory * machine.memory
               for job in jobs for phase in estimated_phases(job, role, kind) if not phase.name.endswith("/reshard"))


def planned_peak(jobs: Sequence[Job]) -> float:
    return max(phase.peak for job in jobs for role in ROLES for kind in PHASES_OF
               for phase in estimated_phases(job, role, kind))


def halved(most: int, multiple: int) -> list[int]:
    """`most`, halved again and again, as multiples, the largest first."""
    found = []
    while most >= multiple:
        found.append(most // multiple * multiple)
        most //= 2
    return found


def describe_batches(jobs: Sequence[Job]) -> str:
    job = jobs[0]
    config, rl, machine = job.config, job.config.rl, job.machine
    sizes = dict.fromkeys(f"{num_parameters(policy.model_config) / 1e6:.3g} M parameters"
                          for policy in job.policies.values())
    decoded = " and ".join(f"{policy.config.row_buckets[-1]} rows of the {role}"
                           for role, policy in job.policies.items()
                           if not (policy.is_scored or policy.model_config.score_head))
    trained = " and ".join(f"{config[role].rows_per_micro_batch} of the {role}" for role in trained_roles(jobs))
    return (f"batches: {rl.prompts_per_step} problems x {rl.samples_per_prompt} solutions a turn; at a time, {decoded} "
            f"are decoded, and {trained} are trained on; for {' and '.join(sizes)} on "
            f"{machine.devices} x {machine.platform} of {machine.memory / GIB:.1f} GiB, of which about "
            f"{planned_peak(jobs) / GIB:.1f} GiB are planned")
