"""Which published models fit a machine in both roles, and how long a turn takes: `plan --target=NAME:DEVICES`.

Memory and times are by arithmetic, in the sizes that own_problems chooses.
"""

from collections import Counter
from typing import NamedTuple

from ml_collections import ConfigDict

from tango_jax.config import ROLES, default_config
from tango_jax.method.own_arm import make_schedule
from tango_jax.planning.assumed_lengths import AssumedLengths
from tango_jax.planning.costs import num_parameters
from tango_jax.planning.estimates import estimated_programs
from tango_jax.planning.job import sized_job
from tango_jax.planning.machines import GIB, Machine
from tango_jax.planning.memory import phases
from tango_jax.planning.own_batches import ADAPTER_RANK, set_batches
from tango_jax.planning.own_problems import set_turns
from tango_jax.planning.plan_tables import between
from tango_jax.planning.sources import OpenSettings
from tango_jax.planning.targets import Target
from tango_jax.planning.times import turn_times
from tango_jax.runtime.checks import Mistakes
from tango_jax.runtime.console import Console
from tango_jax.runtime.failures import typed_command
from tango_jax.weights.presets import CONFIG_JSON, preset_model
from tango_jax.weights.source import fields_of

PROMPT, RESPONSE = 256, 1024  # tokens of a problem and of a solution, at most
PROBLEMS = 1000  # in the file; they change the number of turns, but no turn


class Fit(NamedTuple):
    name: str
    rank: int  # of the adapters; 0: full training
    peak: float  # bytes of a device at the fullest moment; 0: not even the states fit
    turn_seconds: float  # mean over the turns of both roles
    turn_seconds_between: tuple[float, float]  # at the quickest and the slowest measurements of such work
    fits: bool


def which_models(target: Target, machine: Machine, lengths: AssumedLengths) -> list[Fit]:
    lengths.check(models_config(next(iter(CONFIG_JSON)), 0, machine))
    found = [_fit(name, rank, target, machine, lengths) for name in CONFIG_JSON for rank in (0, ADAPTER_RANK)]
    sizes = {name: num_parameters(preset_model(name)) for name in CONFIG_JSON}
    return sorted(found, key=lambda fit: (sizes[fit.name], fit.name, fit.rank))


def _fit(name: str, rank: int, target: Target, machine: Machine, lengths: AssumedLengths) -> Fit:
    config = models_config(name, rank, machine)
    models = {role: preset_model(name, **fields_of(config[role])) for role in ROLES}
    try:
        set_batches(OpenSettings(config, ()), models, machine, Mistakes())
    except ValueError:
        return Fit(name, rank, 0.0, 0.0, (0.0, 0.0), False)
    job = sized_job(config, models, machine)
    programs = estimated_programs(job, machine.platform)
    peak = max(phase.peak for phase in phases(job, programs))
    turns, reached = Counter(turn.role for turn in make_schedule(config).turns()), target.reached
    quick, likely, slow = (
        sum(count * turn_times(job, programs, target.with_shares(shares), role, lengths).total
            for role, count in turns.items()) / turns.total()
        for shares in (reached.quick, reached.likely, reached.slow)
    )
    return Fit(name, rank, peak, likely, (quick, slow), peak <= machine.memory)


def models_config(name: str, rank: int, machine: Machine) -> ConfigDict:
    config, scale = default_config(), machine.scale
    settings = OpenSettings(config, ())
    for role in ROLES:
        own = config[role]
        own.checkpoint, own.model.lora.rank = name, rank
        if not machine.is_cpu:
            own.model.compute_dtype, own.model.head_precision = "bfloat16", "bfloat16_x3"
    config.generator.max_prompt, config.generator.max_response = PROMPT, RESPONSE
    config.verifier.max_prompt, config.verifier.max_response = PROMPT + RESPONSE + 64, RESPONSE + RESPONSE // 4
    for role in ROLES:
        config[role].cache_buckets = (config[role].max_response // 2,)
    set_turns(settings, scale, PROBLEMS, scale.evaluated)
    return config


def show_models(found: list[Fit], target: Target, machine: Machine, console: Console) -> None:
    def cell(fit: Fit) -> tuple[str, str]:
        if not fit.peak:
            return "no", ""
        seconds = between(*fit.turn_seconds_between) if fit.fits else ""
        return f"{fit.peak / GIB:.1f}{'' if fit.fits else ' (no)'}", seconds

    by_name: dict[str, list[Fit]] = {}
    for fit in found:
        by_name.setdefault(fit.name, []).append(fit)
    title = (f"Both roles on {machine.devices} x {target.name} of {machine.memory / GIB:.1f} GiB: GiB of a device at "
             "the fullest moment, and seconds of a mean turn, by arithmetic")
    columns = ("model", "all parameters", "s", f"adapters of rank {ADAPTER_RANK}", "s")
    console.table(title, columns, [(name, *cell(full), *cell(adapted)) for name, (full, adapted) in by_name.items()])
    rl = models_config(next(iter(by_name)), 0, machine).rl
    console.log(f"assumed: {rl.prompts_per_step} problems x {rl.samples_per_prompt} solutions a turn, problems of up "
                f"to {PROMPT} tokens, solutions of up to {RESPONSE}; {typed_command('plan')} --config=own_problems "
                "plans for your file")
