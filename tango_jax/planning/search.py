"""The quickest settings that fit a target: `plan --search`.

In: the options of the command. Out: every setting that was tried with its time and memory, and the best plan. Stage:
none of a run; before it.

How long a role samples depends on nothing but how it samples, and an update on nothing but its mesh and micro-batches;
what they share is a device's memory. So each part is priced alone, by arithmetic (`estimates.py`), and for each pair of
meshes the quickest parts are taken that fit beside what is resident. The best of all is compiled, the configuration
itself before it; what a compiled function needs corrects the estimate of all others, and the next best is asked for,
until that is no quicker than what has been compiled.
"""

import itertools
import math
import time
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from tango_jax.cli.validation import validate
from tango_jax.config import ROLES
from tango_jax.planning import choices
from tango_jax.planning.choices import Settings
from tango_jax.planning.estimates import Factors, estimates_of
from tango_jax.planning.job import Job, make_job
from tango_jax.planning.pricing import LEAST_GAIN, Candidate, Part, Pricing, applied, overrides
from tango_jax.planning.programs import Program, compile_job, function_names
from tango_jax.planning.run_plan import PlanOptions, plan_of
from tango_jax.planning.targets import Devices, open_devices
from tango_jax.runtime.console import Console, format_seconds

MOST_COMPILED = 4  # settings, beside the configuration's own
# No further setting is compiled where it would end later than this, going by the last one. One is in any case.
MOST_SECONDS = 15 * 60
# After each compiled setting that did not fit although its estimate did, estimates must stay below so much of what is
# left.
CAUTION = 0.96


class Search(NamedTuple):
    """All that was found."""

    options: PlanOptions
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


def search(options: PlanOptions, console: Console) -> Search:
    """Price what may be set, and compile the best of it.

    Raises:
        ValueError: see `make_plan`.
    """
    began = time.monotonic()
    devices = open_devices(options.target, options.devices)
    job = make_job(options.config, devices, options.per_process)
    compiler = _Compiler(options, devices, console)
    given = compiler.compiled(options.config, {role: {} for role in ROLES}, job)
    pricing = Pricing(options, job, devices.is_target)
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


def simplest_first(config: ConfigDict, ranking: list[Candidate]) -> list[Candidate]:
    """The same, but at the head the one that changes least, of all that are about as quick as the quickest."""
    near = [item for item in ranking if item.seconds <= (1 + LEAST_GAIN) * ranking[0].seconds]
    near.sort(key=lambda item: (len(overrides(config, item.settings)), item.peak))
    return near[:1] + [item for item in ranking if item is not near[0]]


class _Compiler:
    """Compiles settings, each function once for each of its shapes, and learns the factors."""

    def __init__(self, options: PlanOptions, devices: Devices, console: Console):
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
            for name, estimate in estimates_of(job, role, self.options.target.platform).items():
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
