"""A finished run beside what is predicted for it: `plan --measured=RUN`, and the shares that its machine has reached.

In: a run's workdir: config.json, provenance.json and metrics.jsonl. Out: seconds of each phase, predicted and measured;
the shares of the machine's rates with which they would have been predicted. Stage: none of a run; after it.

The run's own lengths of responses are taken, those of prompts are assumed. A run times an update with its scores and
its packing as one, so that both shares are multiplied by the same number; so are those of sampling, of which it does
not say how long prompts took. Nothing is compiled: memory is of no interest here.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.planning.estimates import as_programs, estimates_of
from tango_jax.planning.fitted import reached, solved
from tango_jax.planning.job import Job, sized_job
from tango_jax.planning.plan_tables import between
from tango_jax.planning.programs import Program
from tango_jax.planning.sources import plan_source
from tango_jax.planning.targets import TARGETS, Reached, Shares, Target, machine_of, open_target, target_name
from tango_jax.planning.times import turn_times
from tango_jax.planning.workload import Lengths
from tango_jax.runtime.console import Console
from tango_jax.runtime.process_facts import cpu_model
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.provenance import read_provenance
from tango_jax.tracking.results import is_finished
from tango_jax.weights.workdir import read_config

# Measured phase -> the predicted phases in it.
PHASES = {"reshard": ("reshard",), "sample": ("sample",), "verify": ("verify",), "update": ("score", "update")}
# Shares that are found together, and the phases that tell them.
_TOGETHER = ((("prefill", "read"), ("sample", "verify")), (("update", "score"), ("update",)))


class Run(NamedTuple):
    """What a finished run tells."""

    workdir: Path
    config: ConfigDict
    target: str
    devices: int
    per_process: int
    turns: dict[str, dict[str, float]]  # role that learns -> phase -> median seconds
    lengths: dict[str, dict[str, Lengths]]  # role that learns -> role that responds -> its responses


class Beside(NamedTuple):
    """The run's phases, predicted and measured, and what follows."""

    run: Run
    target: Target
    predicted: dict[str, dict[str, tuple[float, float, float]]]  # turn -> phase -> quickest, likely, slowest
    reached: Reached  # by this run
    after: dict[str, dict[str, float]]  # turn -> phase -> seconds with the shares that the run has reached


def open_run(workdir: str) -> Run:
    """Read a run.

    Raises:
        ValueError: there is none, it has not ended, or it has run on a device whose rates are unknown or on another CPU
            than this one.
    """
    path = Path(workdir)
    if not (path / "metrics.jsonl").is_file() or not (path / "config.json").is_file():
        raise ValueError(f"{workdir} has no metrics.jsonl and config.json: give the workdir of a finished run")
    if not is_finished(path):
        raise ValueError(f"{workdir} holds a run that has not ended: it has no summary.json; start it again to end it")
    config, rows = read_config(path), read_metrics(path)
    turns = {role: [row for row in rows if row["phase"] == role] for role in ROLES}
    turns = {role: found for role, found in turns.items() if found}
    if not turns:
        raise ValueError(f"{workdir} has no turn of either role in its metrics.jsonl: give a run with some")
    target, devices, processes = _machine(path)
    medians = {role: {phase: statistics.median(row.get(f"time/{phase}_s", 0.0) for row in found) for phase in PHASES}
               for role, found in turns.items()}  # fmt: skip
    lengths = {role: _lengths(found) for role, found in turns.items()}
    return Run(path, config, target, devices, max(1, devices // processes), medians, lengths)


def _lengths(rows: list[dict]) -> dict[str, Lengths]:
    """Of the responses of each role: their mean, and the longest of a turn."""
    told = {role: [row for row in rows if f"{role}/length_mean" in row] for role in ROLES}
    return {
        role: Lengths(round(statistics.median(row[f"{role}/length_max"] for row in found)),
                      statistics.median(row[f"{role}/length_mean"] for row in found))
        for role, found in told.items() if found
    }  # fmt: skip


def _machine(workdir: Path) -> tuple[str, int, int]:
    """Name of the target, devices and processes of a run, the same at each of its starts. Raises ValueError."""
    attempts = read_provenance(workdir).get("attempts", [])
    if not attempts:
        raise ValueError(f"{workdir} does not say on what it ran: it has no provenance.json; give a newer run")
    machines = list(dict.fromkeys(map(_described, attempts)))
    if len(machines) > 1:
        raise ValueError(f"{workdir} ran on {', then on '.join(machines)}, and its turns do not say on which: give a "
                         "run that was started and continued on the same machine")
    facts = attempts[-1]
    kinds = list(facts["devices"])
    name = "cpu" if kinds == ["cpu"] else target_name(kinds[0]) if len(kinds) == 1 else None
    if name is None:
        raise ValueError(f"{workdir} ran on {machines[0]}, whose rates are unknown; known are "
                         f"{', '.join(TARGETS)}, cpu")
    if name == "cpu" and facts["cpu"] != (here := cpu_model()):
        raise ValueError(f"{workdir} ran on a {facts['cpu']}, and this machine has a {here}, whose rates say nothing "
                         "of it: run this command there")
    return name, sum(facts["devices"].values()), facts["processes"]


def _described(facts: dict) -> str:
    """The machine of one start, in a few words."""
    devices = " and ".join(f"{count} x {kind}" for kind, count in facts["devices"].items())
    processor = f" ({facts['cpu']})" if "cpu" in facts["devices"] else ""
    return f"{devices}{processor} in {facts['processes']} process(es)"


def beside(run: Run, target: Target | None = None) -> Beside:
    """Predict a run's phases, and find the shares that it has reached.

    Args:
        target: the run's, with as many devices, whose rates were measured already if it is a CPU; None: open it.

    Raises:
        ValueError: a checkpoint of the run whose sizes are unknown here; see `plan_source`.
    """
    target = target or open_target(run.target, run.devices)
    bound = reached(target, run.devices)
    job = job_of(run)
    each = [_predicted(run, job, target.with_shares(shares)) for shares in (bound.quick, bound.likely, bound.slow)]
    predicted = {turn: {phase: tuple(one[turn][phase] for one in each) for phase in phases}
                 for turn, phases in each[1].items()}  # fmt: skip

    likely = bound.likely
    for names, phases in _TOGETHER:
        def seconds(factor: float, names=names, phases=phases, shares=likely) -> float:
            found = _predicted(run, job, target.with_shares(_multiplied(shares, names, factor)))
            return sum(one[phase] for one in found.values() for phase in phases)

        spent = sum(one[phase] for one in run.turns.values() for phase in phases)
        likely = _multiplied(likely, names, solved(seconds, spent))
    after = _predicted(run, job, target.with_shares(likely))
    return Beside(run, target, predicted, _reached(run, likely, after), after)


def _multiplied(shares: Shares, names: tuple[str, ...], factor: float) -> Shares:
    return shares._replace(**{name: factor * getattr(shares, name) for name in names})


def job_of(run: Run) -> Job:
    """Its roles on its machine, as shapes. Raises ValueError."""
    machine = machine_of(run.target, run.devices)._replace(local=run.per_process)
    return sized_job(run.config, {role: plan_source(run.config, role).model_config for role in ROLES}, machine)


def programs_of(job: Job, target: Target) -> dict[str, Program]:
    """Its functions, estimated."""
    found = {}
    for role in ROLES:
        found |= as_programs(role, estimates_of(job, role, target.platform), {})
    return found


def _predicted(run: Run, job: Job, target: Target) -> dict[str, dict[str, float]]:
    programs, found = programs_of(job, target), {}
    for turn in run.turns:
        times = turn_times(job, programs, target, turn, 0.5, run.lengths[turn]).seconds
        found[turn] = {phase: sum(times.get(part, 0.0) for part in parts) for phase, parts in PHASES.items()}
    return found


def _reached(run: Run, likely: Shares, after: Mapping[str, Mapping[str, float]]) -> Reached:
    """The shares, and those that would predict the quickest and the slowest of the run's phases of a kind."""
    quick = slow = likely
    for names, phases in _TOGETHER:
        ratios = [after[turn][phase] / spent[phase] for turn, spent in run.turns.items() for phase in phases
                  if spent[phase]]  # fmt: skip
        quick = _multiplied(quick, names, max([1.0, *ratios]))
        slow = _multiplied(slow, names, min([1.0, *ratios]))
    lines = [f"{what} {getattr(likely, name):.0%} ({getattr(slow, name):.0%} to {getattr(quick, name):.0%})"
             for name, what in (("update", "updates and scores"), ("prefill", "products of sampling"),
                                ("read", "memory"))]  # fmt: skip
    return Reached(likely, quick, slow, (*lines, f"as {run.workdir} has reached"))


def as_json(found: Beside) -> dict:
    """Plain numbers."""
    return {
        "target": found.target.name,
        "devices": found.run.devices,
        "measured_seconds": found.run.turns,
        "predicted_seconds": {turn: {phase: likely for phase, (_, likely, _) in phases.items()}
                              for turn, phases in found.predicted.items()},
        "predicted_seconds_between": {turn: {phase: [quick, slow] for phase, (quick, _, slow) in phases.items()}
                                      for turn, phases in found.predicted.items()},
        "predicted_seconds_with_its_shares": found.after,
        "shares": found.reached.likely._asdict(),
    }  # fmt: skip


def show(found: Beside, console: Console) -> None:
    """Print the phases side by side, and the shares."""
    run, likely = found.run, found.reached.likely
    rows = []
    for turn, phases in found.predicted.items():
        for phase, (quick, middle, slow) in phases.items():
            spent, then = run.turns[turn][phase], found.after[turn][phase]
            if spent or middle:
                rows.append((turn, phase, between(quick, slow), middle, spent, middle / spent if spent else 0.0, then,
                             then / spent if spent else 0.0))
    console.table(f"{run.workdir} on {run.devices} x {found.target.name}: seconds of a turn, the median of its turns",
                  ("turn of the", "phase", "predicted", "most likely", "measured", "ratio", "with its shares", "ratio"),
                  rows)
    console.log(f"reached, of {found.target.flops / 1e12:.3g} TFLOP/s: {likely.update:.1%} in updates and scores, "
                f"{likely.prefill:.1%} in sampling; of {found.target.read / 1e9:.3g} GB/s {likely.read:.1%}; "
                f"--shares={run.workdir} plans with them")
