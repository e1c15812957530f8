"""The quickest settings that fit a target: `plan --search`.

In: the options of the command. Out: every setting that was tried with its time and memory, and the best plan. Stage:
none of a run; before it.

How long a role samples depends on nothing but how it samples, and an update on nothing but its mesh and micro-batches;
what they share is a device's memory. So each part is priced alone, by arithmetic (`estimates.py`), and for each pair of
meshes the quickest parts are taken that fit beside what is resident. The best of all is compiled, the configuration
itself before it; what a compiled function needs corrects the estimate of all others, and the next best is asked for,
until that is no quicker than what has been compiled.
"""

import copy
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterable
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from tango_jax.cli.validation import validate
from tango_jax.planning import choices
from tango_jax.planning.choices import Settings
from tango_jax.planning.estimates import Estimate, sampling_estimates, training_estimates
from tango_jax.planning.memory import resident, sampling_phases, training_phases
from tango_jax.planning.planner import Options, Plan, plan_of, run_seconds
from tango_jax.planning.programs import ROLES, Job, Program, compile_job, function_names, make_job
from tango_jax.planning.resized import resized
from tango_jax.planning.targets import Devices, open_devices
from tango_jax.planning.times import TimeModel, sampled_requests, trained_seconds
from tango_jax.planning.workload import UpdateWorkload, packed_workload, sampling_workload, update_workload
from tango_jax.rl.schedule import make_schedule
from tango_jax.runtime.console import Console, format_seconds

MOST_COMPILED = 4  # settings, beside the configuration's own
# No further setting is compiled where it would end later than this, going by the last one. One is in any case.
MOST_SECONDS = 15 * 60
SHOWN_MESHES = 12
# After each compiled setting that did not fit although its estimate did, estimates must stay below so much of what is
# left.
CAUTION = 0.96
# Share of the time that a setting must be estimated to save: before it is compiled, and before it is preferred to one
# that changes less of the configuration.
LEAST_GAIN = 0.01

Factors = dict[str, float]  # function -> by what its estimate of what a compiler needs is multiplied


class Part(NamedTuple):
    """One way for a role to sample, or to be trained on a mesh."""

    role: str
    kind: str  # sampling or training
    settings: Settings
    job: Job | None  # in these sizes; None: refused
    estimates: dict[str, Estimate]
    seconds: float  # of the whole run
    reason: str = ""  # why it is refused

    def needs(self, factors: Factors) -> float:
        """Bytes of a device at the fullest moment, beside what is resident."""
        programs = _programs(self.role, self.estimates, factors)
        phases_of = sampling_phases if self.kind == "sampling" else training_phases
        base = resident(self.job, "").peak
        return max(phase.peak for phase in phases_of(self.job, programs, self.role)) - base


class Candidate(NamedTuple):
    """Settings of both roles, and what is known of them."""

    settings: dict[str, Settings]  # by role
    plan: Plan
    is_compiled: bool

    @property
    def peak(self) -> float:
        return max(phase.peak for phase in self.plan.phases)

    @property
    def seconds(self) -> float:
        return run_seconds(self.plan)


class Search(NamedTuple):
    """All that was found."""

    options: Options
    given: Candidate  # the configuration as it is, compiled
    compiled: list[Candidate]  # in the order in which they were; without `given`
    estimated: list[Candidate]  # one for each pair of meshes that fits, in the order in which they would be compiled
    parts: list[tuple[Part, float]]  # everything that was priced, and the bytes that it needs
    refused: list[tuple[dict[str, Settings], str]]  # settings that validation or a mesh does not allow, with the reason

    @property
    def best(self) -> Candidate | None:
        """The quickest of those that were compiled and fit; None: none does."""
        fitting = [item for item in (self.given, *self.compiled) if item.plan.fits]
        return min(fitting, key=lambda item: item.seconds, default=None)


def search(options: Options, console: Console) -> Search:
    """Price what may be set, and compile the best of it.

    Raises:
        ValueError: see `make_plan`.
    """
    began = time.monotonic()
    devices = open_devices(options.target, options.devices)
    job = make_job(options.config, devices, options.per_process)
    compiler = _Compiler(options, devices, console)
    given = compiler.compiled(options.config, {role: {} for role in ROLES}, job)
    pricing = Pricing(options, devices, job)
    with console.stage("Counting", total=2 * len(ROLES)) as progress:
        parts = {}
        for role, kind in itertools.product(ROLES, ("sampling", "training")):
            parts[role, kind] = pricing.parts(role, kind)
            progress.advance(phase=f"{role}, {kind}")
    compiled, refused = [], []
    while True:
        failed = [item.settings for item in compiled if not item.plan.fits]
        hopeless = [*failed, *(settings for settings, _ in refused)]
        ranking = pricing.ranking(parts, compiler.factors, CAUTION ** len(failed), hopeless)
        ranking = simplest_first(options.config, ranking)
        if not _is_worth_compiling(ranking, given, compiled):
            break
        if (compiled or refused) and time.monotonic() - began + compiler.last_seconds > MOST_SECONDS:
            console.log(f"compiling one more would take longer than {format_seconds(MOST_SECONDS)} in all")
            break
        settings = ranking[0].settings
        config = applied(options.config, settings)
        try:
            validate(config)
            compiled.append(compiler.compiled(config, settings, make_job(config, devices, options.per_process)))
        except ValueError as error:
            refused.append((settings, str(error)))
        except jax.errors.JaxRuntimeError as error:  # a fault of the compiler, which other settings may not run into
            refused.append((settings, f"does not compile: {str(error).splitlines()[0]}"))
    everything = [part for found in parts.values() for part in found]
    refused += [({part.role: part.settings}, part.reason) for part in everything if part.reason]
    priced = [(part, part.needs(compiler.factors)) for part in everything if not part.reason]
    return Search(options, given, compiled, ranking, priced, refused)


def _is_worth_compiling(ranking: list[Candidate], given: Candidate, compiled: list[Candidate]) -> bool:
    """Whether the first of the ranking may be quicker than what has been compiled and fits."""
    quickest = min((item.seconds for item in (given, *compiled) if item.plan.fits), default=math.inf)
    return (
        len(compiled) < MOST_COMPILED
        and bool(ranking)
        and ranking[0].settings not in [item.settings for item in compiled]
        and ranking[0].seconds <= (1 - LEAST_GAIN) * quickest
    )


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


def simplest_first(config: ConfigDict, ranking: list[Candidate]) -> list[Candidate]:
    """The same, but at the head the one that changes least, of all that are about as quick as the quickest."""
    near = [item for item in ranking if item.seconds <= (1 + LEAST_GAIN) * ranking[0].seconds]
    near.sort(key=lambda item: (len(overrides(config, item.settings)), item.peak))
    return near[:1] + [item for item in ranking if item is not near[0]]


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


def _programs(role: str, estimates: dict[str, Estimate], factors: Factors) -> dict[str, Program]:
    return {f"{role}/{name}": estimate.program(factors.get(f"{role}/{name}", 1.0))
            for name, estimate in estimates.items()}


def all_estimates(job: Job, role: str, platform: str) -> dict[str, Estimate]:
    """Of all functions of a role."""
    return training_estimates(job, role, platform) | sampling_estimates(job, role)


class _Compiler:
    """Compiles settings, each function once for each of its shapes, and learns the factors."""

    def __init__(self, options: Options, devices: Devices, console: Console):
        self.options, self.devices, self.console = options, devices, console
        self.factors: Factors = {}
        self.last_seconds = 0.0
        self._known: dict[tuple, Program] = {}

    def compiled(self, config: ConfigDict, settings: dict[str, Settings], job: Job) -> Candidate:
        keys = {name: self._key(config, name) for name in function_names(job)}
        missing = [name for name, key in keys.items() if key not in self._known]
        title = " ".join(overrides(self.options.config, settings)) or "the configuration as it is"
        self.console.log(f"compiling {title}")
        began = time.monotonic()
        with self.console.stage("Compiling", total=len(missing)) as progress:
            found = compile_job(job, self.devices, lambda name, seconds: progress.advance(phase=name, seconds=seconds),
                                missing)
        self.last_seconds = time.monotonic() - began
        self._known |= {keys[name]: program for name, program in found.items()}
        programs = {name: self._known[key] for name, key in keys.items()}
        for role in ROLES:
            for name, estimate in all_estimates(job, role, self.options.target.platform).items():
                factor = estimate.factor(programs[f"{role}/{name}"])
                self.factors |= {} if factor is None else {f"{role}/{name}": factor}
        options = self.options._replace(config=config)
        return Candidate(settings, plan_of(options, job, programs, self.devices.is_target), is_compiled=True)

    @staticmethod
    def _key(config: ConfigDict, name: str) -> tuple:
        """What the shapes of a function depend on, of all that a search changes."""
        role, function = name.split("/")
        mesh = tuple(choices.chosen(config[role], choices.MESH_KEYS[:3]).items())
        keys = {"update": choices.MICRO_BATCH_KEYS, "score": choices.MICRO_BATCH_KEYS, "sft": ("model.remat",),
                "layout": choices.SAMPLING_KEYS[:1]}.get(function, choices.SAMPLING_KEYS)
        is_sampling = function in ("prefill", "decode")
        return (name, *(() if is_sampling else mesh), *choices.chosen(config[role], keys).items())


class Pricing:
    """Prices of parts, and of whole settings, by arithmetic alone."""

    def __init__(self, options: Options, devices: Devices, job: Job):
        self.options, self.devices, self.job = options, devices, job
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
        job = resized(self.job, config, self.devices, self.options.per_process, (role,), has_training=False)
        seconds = 0.0
        for turn, count in self.counts.items():
            request = sampled_requests(job, turn).get(role)
            if count and request:
                done = sampling_workload(job, role, *request, self.options.filled)
                seconds += count * self.times.sampling_seconds(job.policies[role], done)
        return Part(role, "sampling", settings, job, sampling_estimates(job, role), seconds)

    def _training_part(self, role: str, settings: Settings) -> Part:
        config = applied(self.options.config, {role: settings})
        job = resized(self.job, config, self.devices, self.options.per_process, (role,), has_sampling=False)
        estimates = training_estimates(job, role, self.options.target.platform)
        seconds = 0.0
        if self.counts[role]:
            passes = self._workload(job, role)
            target = self.options.target
            seconds = self.counts[role] * sum(
                trained_seconds(job, _programs(role, estimates, {}), target, role, passes).values()
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
        job = resized(self.job, config, self.devices, self.options.per_process)
        programs = {}
        for role in ROLES:
            programs |= _programs(role, all_estimates(job, role, self.options.target.platform), factors)
        options = self.options._replace(config=config)
        return Candidate(settings, plan_of(options, job, programs, self.devices.is_target), is_compiled=False)


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
    states = {role: part.job.states[role] for role, part in trained.items()}
    return resident(dataclasses.replace(job, policies=policies, states=states), "").peak
