"""What settings cost by arithmetic: the time and memory of each part of a role, and of whole plans."""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from ml_collections import ConfigDict

from tango_jax.cli.validation import validate
from tango_jax.config import ROLES
from tango_jax.method.own_arm import make_schedule
from tango_jax.planning import choices
from tango_jax.planning.choices import Settings
from tango_jax.planning.estimates import (
    Factors,
    ProgramEstimate,
    as_programs,
    estimates_of,
    sampling_estimates,
    training_estimates,
)
from tango_jax.planning.job import Job, resized
from tango_jax.planning.memory import PHASES_OF, resident
from tango_jax.planning.run_plan import PlanOptions, RunPlan, plan_of, run_seconds
from tango_jax.planning.times import TimeModel, sampled_requests, trained_seconds
from tango_jax.planning.workload import UpdateWorkload, packed_workload, sampling_workload, update_workload

SHOWN_MESHES = 12
# Share of the time that a setting must be estimated to save: before it is compiled, and before it is preferred to one
# that changes less of the configuration.
LEAST_GAIN = 0.01


class Part(NamedTuple):
    """One way for a role to sample, or to be trained on a mesh."""

    role: str
    kind: str  # sampling or training
    settings: Settings
    job: Job | None  # in these sizes; None: refused
    estimates: dict[str, ProgramEstimate]
    seconds: float  # of the whole run
    reason: str = ""  # why it is refused

    def needs(self, factors: Factors) -> float:
        """Bytes of a device at the fullest moment, beside what is resident."""
        programs = as_programs(self.role, self.estimates, factors)
        base = resident(self.job, "").peak
        return max(phase.peak for phase in PHASES_OF[self.kind](self.job, programs, self.role)) - base


class Candidate(NamedTuple):
    """Settings of both roles, and what is known of them."""

    settings: dict[str, Settings]  # by role
    plan: RunPlan
    is_compiled: bool

    @property
    def peak(self) -> float:
        return max(phase.peak for phase in self.plan.phases)

    @property
    def seconds(self) -> float:
        return run_seconds(self.plan)


def applied(config: ConfigDict, settings: dict[str, Settings]) -> ConfigDict:
    """A copy of the configuration with these settings."""
    config = copy.deepcopy(config)
    for role, values in settings.items():
        for key, value in values.items():
            node, *rest = key.split(".")
            if rest:
                config[role][node][rest[0]] = value
            else:
                config[role][node] = value
    return config


def overrides(config: ConfigDict, settings: dict[str, Settings]) -> list[str]:
    """--config.key=value for each setting that the configuration has otherwise."""
    return [
        f"--config.{role}.{key}={_text(value)}"
        for role, values in settings.items()
        for key, value in values.items()
        if choices.chosen(config[role], (key,))[key] != value
    ]


def _text(value: object) -> str:
    return str(value).replace(" ", "")


class Pricing:
    """Prices of parts, and of whole settings, by arithmetic alone."""

    def __init__(self, options: PlanOptions, job: Job, is_target: bool):
        self.options, self.job, self.is_target = options, job, is_target
        self.times = TimeModel(options.target)
        self.counts = {role: 0 for role in ROLES}
        for turn in make_schedule(options.config).turns():
            self.counts[turn.role] += 1
        self._workloads: dict[tuple, UpdateWorkload] = {}

    def parts(self, role: str, kind: str) -> list[Part]:
        """Everything that one role may do in one of the two ways; of training, on each mesh."""
        make = self._sampling_part if kind == "sampling" else self._training_part
        found = []
        for settings in self._settings(role, kind):
            try:
                found.append(make(role, settings))
            except ValueError as error:
                found.append(Part(role, kind, settings, None, {}, 0.0, str(error)))
        return sorted(found, key=lambda part: part.seconds)

    def _settings(self, role: str, kind: str) -> list[Settings]:
        options, policy = self.options, self.job.policies[role]
        config, model, local = options.config[role], policy.model_config, min(options.per_process, options.devices)
        if kind == "sampling":
            samples = max(options.config.rl.samples_per_prompt, 1)
            return choices.sampling_choices(config, model, local, self._most_rows(role), samples)
        meshes = choices.mesh_choices(config, model, options.devices, local, options.target.platform != "cpu")
        sequences = -(-self.job.minibatch_prompts(role) * options.config.rl.samples_per_prompt
                      // policy.placement.num_local_shards)
        micro_batches = choices.micro_batch_choices(config, sequences, functools.partial(self._padded_tokens, role))
        return [mesh | micro for mesh, micro in itertools.product(meshes, micro_batches)]

    def _padded_tokens(self, role: str, rows: int, prompts: int) -> float:
        config, shards = copy.deepcopy(self.options.config[role]), self.job.policies[role].placement.num_local_shards
        config.rows_per_micro_batch, config.prompts_per_micro_batch = rows, prompts
        samples = self.options.config.rl.samples_per_prompt
        passes = packed_workload(config, self.job.minibatch_prompts(role), samples, shards, self.options.filled)
        return passes.micro_batches * passes.tokens.total

    def _most_rows(self, role: str) -> int:
        requests = [sampled_requests(self.job, turn).get(role, (1, 1)) for turn in ROLES if self.counts[turn]]
        return max(prompts * samples for prompts, samples in requests)

    def _sampling_part(self, role: str, settings: Settings) -> Part:
        config = applied(self.options.config, {role: settings})
        validate(config)
        job = resized(self.job, config, (role,))
        seconds = 0.0
        for turn, count in self.counts.items():
            request = sampled_requests(job, turn).get(role)
            if count and request:
                done = sampling_workload(job, role, *request, self.options.filled)
                seconds += count * self.times.sampling_seconds(job.policies[role], done)
        return Part(role, "sampling", settings, job, sampling_estimates(job, role), seconds)

    def _training_part(self, role: str, settings: Settings) -> Part:
        config = applied(self.options.config, {role: settings})
        job = resized(self.job, config, (role,))
        estimates = training_estimates(job, role, self.options.target.platform)
        seconds = 0.0
        if self.counts[role]:
            passes = self._workload(job, role)
            target = self.options.target
            seconds = self.counts[role] * sum(
                trained_seconds(job, as_programs(role, estimates, {}), target, role, passes).values()
            )
        return Part(role, "training", settings, job, estimates, seconds)

    def _workload(self, job: Job, role: str) -> UpdateWorkload:
        """Of a turn; the same for all meshes whose shards have the same rows."""
        policy = job.policies[role]
        shape = choices.chosen(policy.config, choices.MICRO_BATCH_KEYS[1:])
        key = (role, policy.placement.num_local_shards, *shape.items())
        if key not in self._workloads:
            self._workloads[key] = update_workload(job, role, self.options.filled)
        return self._workloads[key]

    def ranking(
        self, parts: dict[tuple[str, str], list[Part]], factors: Factors, caution: float,
        hopeless: Iterable[dict[str, Settings]],
    ) -> list[Candidate]:
        """The quickest settings for each pair of meshes that fit, the quickest first, without those in `hopeless`.

        Args:
            parts: by role and kind, the quickest first.
            caution: share of the memory that may be used.
        """
        needs = {id(part): part.needs(factors) for found in parts.values() for part in found if not part.reason}
        by_mesh = {role: _by_mesh(parts[role, "training"]) for role in ROLES}
        changes = {id(part): len(overrides(self.options.config, {part.role: part.settings}))
                   for found in parts.values() for part in found}
        memory, found = caution * self.options.target.memory, []
        for meshes in itertools.product(*(by_mesh[role] for role in ROLES)):
            trained = dict(zip(ROLES, meshes, strict=True))
            room = memory - _resident(self.job, {role: by_mesh[role][mesh][0] for role, mesh in trained.items()})
            picked = {}
            for role, mesh in trained.items():
                for kind, items in (("sampling", parts[role, "sampling"]), ("training", by_mesh[role][mesh])):
                    fitting = [part for part in items if not part.reason and needs[id(part)] <= room]
                    near = [part for part in fitting if part.seconds <= (1 + LEAST_GAIN) * fitting[0].seconds]
                    picked[role, kind] = min(near, key=lambda part: (changes[id(part)], needs[id(part)]), default=None)
            if all(picked.values()):
                settings = {role: picked[role, "sampling"].settings | picked[role, "training"].settings
                            for role in ROLES}
                if settings not in hopeless:
                    found.append((sum(part.seconds for part in picked.values()), settings))
        found.sort(key=lambda item: item[0])
        shown = [self.estimated(settings, factors) for _, settings in found[:SHOWN_MESHES]]
        return sorted(shown, key=lambda item: item.seconds)

    def estimated(self, settings: dict[str, Settings], factors: Factors) -> Candidate:
        """A whole plan by arithmetic."""
        config = applied(self.options.config, settings)
        job = resized(self.job, config)
        programs = {}
        for role in ROLES:
            programs |= as_programs(role, estimates_of(job, role, self.options.target.platform), factors)
        options = self.options._replace(config=config)
        return Candidate(settings, plan_of(options, job, programs, self.is_target), is_compiled=False)


def _by_mesh(parts: list[Part]) -> dict[tuple, list[Part]]:
    """Parts of training by their mesh, in their order."""
    found = {}
    for part in parts:
        if not part.reason:
            found.setdefault(tuple(part.settings[key] for key in choices.MESH_KEYS), []).append(part)
    return found


def _resident(job: Job, trained: dict[str, Part]) -> float:
    """Bytes that are on a device whatever runs, with these meshes."""
    policies = {role: part.job.policies[role] for role, part in trained.items()}
    return resident(dataclasses.replace(job, policies=policies), "").peak
