"""Compares the phases of a finished run with its prediction (`plan --measured=RUN`), by the run's response lengths."""

import statistics
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.planning.assumed_lengths import Even
from tango_jax.planning.estimates import estimated_programs
from tango_jax.planning.job import sized_job
from tango_jax.planning.plan_tables import between
from tango_jax.planning.sources import plan_source
from tango_jax.planning.targets import TARGETS, machine_of, open_target, target_name
from tango_jax.planning.times import turn_times
from tango_jax.planning.workload import Lengths
from tango_jax.runtime.console import Console
from tango_jax.runtime.process import cpu_model
from tango_jax.text.prompts import PROMPTS, SECOND_JUDGEMENT
from tango_jax.tracking.alarm_rules import recent_turns
from tango_jax.tracking.metrics import TURN_PHASES, read_metrics
from tango_jax.tracking.provenance import read_provenance
from tango_jax.tracking.results import is_finished
from tango_jax.weights.workdir import read_config

# Measured phase -> its predicted phases: a run times an update with its scores as one.
PHASES = {"reshard": ("reshard",), "sample": ("sample",), "verify": ("verify",), "update": ("score", "update")}

PROMPTS_OF_A_RUN = Even(0.5)  # metrics have the lengths of responses alone


class Run(NamedTuple):
    workdir: Path
    config: ConfigDict
    target: str
    devices: int
    per_process: int
    turns: dict[str, dict[str, float]]  # updated role -> phase -> median seconds
    lengths: dict[str, dict[str, Lengths]]  # updated role -> sampling role -> its responses


class PhaseTimes(NamedTuple):
    role: str
    phase: str
    predicted: tuple[float, float, float]  # quickest, likely, slowest
    measured: float


def open_run(workdir: str) -> Run:
    """Raises ValueError where there is no finished run on one machine of known rates, or its turns sample with prompts
    of a user: how many responses these may have is unknown."""
    path = Path(workdir)
    if not (path / "metrics.jsonl").is_file() or not (path / "config.json").is_file():
        raise ValueError(f"{workdir} has no metrics.jsonl and config.json: give the workdir of a finished run")
    if not is_finished(path):
        raise ValueError(f"{workdir} holds an unfinished run: it has no summary.json; start it again to finish it")
    config, rows = read_config(path), [row for row in read_metrics(path) if row["phase"] in TURN_PHASES]
    turns = {role: found for role in ROLES if (found := recent_turns(rows, role, len(rows)))}
    if not turns:
        raise ValueError(f"{workdir} has no turn of either role in its metrics.jsonl: give a run with some")
    names = {name.removesuffix("/length_mean") for row in rows for name in row if name.endswith("/length_mean")}
    if own := sorted(names - PROMPTS.keys()):
        raise ValueError(f"{workdir} has responses to {', '.join(own)}, and --measured knows the responses to built-in "
                         f"prompts alone ({', '.join(PROMPTS)}): give the workdir of a run without prompts of your own")
    target, devices, processes = _machine(path)
    medians = {role: {phase: statistics.median(row.get(f"time/{phase}_s", 0.0) for row in found) for phase in PHASES}
               for role, found in turns.items()}
    lengths = {role: _lengths(role, found, config[role].loss.mask_overlong) for role, found in turns.items()}
    return Run(path, config, target, devices, max(1, devices // processes), medians, lengths)


def _lengths(updated: str, rows: list[dict], mask_overlong: bool = False) -> dict[str, Lengths]:
    """In turns of the `updated` role, of all prompts of a role. With dynamic sampling only the chosen solutions are
    judged and trained on; second tries need a verdict in every batch. A user's turns are taken to do the same, with the
    most responses that they can have where no share of them is known. With `mask_overlong` the tokens trained on leave
    out responses that are computed, and of texts that are read they are the marks alone: then the update has the mean
    of all batches."""
    told = {role: [row for row in rows if f"{role}/length_mean" in row] for role in ROLES}
    names = {role: [name for name, prompt in PROMPTS.items() if prompt.role == role] for role in ROLES}

    def length(role: str, row: dict) -> float:
        shares = {name: row.get(f"{name}/share", 1.0) for name in names[role] if f"{name}/length_mean" in row}
        return sum(share * row[f"{name}/length_mean"] for name, share in shares.items()) / sum(shares.values())

    judged, tried, batches = (statistics.median(row.get(name, 1.0) for row in rows) for name in (
        "generator/judged_share", "second_try/share", f"{updated}/batches_sampled"))
    chooses = {f"{updated}/batches_sampled", f"{updated}/tokens"} <= rows[-1].keys() and not mask_overlong
    chooses = chooses and f"{updated}/tokens_scored" not in rows[-1]
    share = {"generator": (1 + tried) / 2, "verifier": judged if updated == "generator" else 1.0}
    return {
        role: Lengths(round(statistics.median(max(row.get(f"{name}/length_max", 0) for name in names[role])
                                              for row in found)),
                      statistics.median(length(role, row) for row in found),
                      share[role],
                      batches if role in ("generator", updated) or "second_try/share" in rows[-1] else 1.0,
                      # Judgements of judgements are not trained on.
                      statistics.median(row[f"{role}/length_mean"] for row in found)
                      if f"{SECOND_JUDGEMENT.name}/length_mean" in rows[-1] and role == "verifier" else None,
                      statistics.median(row.get(f"{updated}/tokens", 0.0) for row in rows)
                      if chooses and role == updated else None)
        for role, found in told.items() if found
    }


def _machine(workdir: Path) -> tuple[str, int, int]:
    """(target, devices, processes), the same at each start of the run. Raises ValueError."""
    attempts = read_provenance(workdir).get("attempts", [])
    if not attempts:
        raise ValueError(f"{workdir} does not say on which machine it ran: it has no provenance.json; give a newer run")
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
        raise ValueError(f"{workdir} ran on a {facts['cpu']}, and this machine has a {here} with other rates: run this "
                         "command there")
    return name, sum(facts["devices"].values()), facts["processes"]


def _described(facts: dict) -> str:
    devices = " and ".join(f"{count} x {kind}" for kind, count in facts["devices"].items())
    processor = f" ({facts['cpu']})" if "cpu" in facts["devices"] else ""
    return f"{devices}{processor} in {facts['processes']} process(es)"


def beside(run: Run) -> list[PhaseTimes]:
    """Every phase that took any time. Raises ValueError; see `plan_source`."""
    target, machine = open_target(run.target, run.devices), machine_of(run.target, run.devices, run.per_process)
    models = {role: plan_source(run.config, role).model_config for role in ROLES}
    job = sized_job(run.config, models, machine)
    programs, found = estimated_programs(job, target.platform), []
    for role, spent in run.turns.items():
        ends = [turn_times(job, programs, target.with_shares(shares), role, PROMPTS_OF_A_RUN, run.lengths[role]).seconds
                for shares in (target.reached.quick, target.reached.likely, target.reached.slow)]
        for phase, parts in PHASES.items():
            predicted = tuple(sum(end.get(part, 0.0) for part in parts) for end in ends)
            if spent[phase]:
                found.append(PhaseTimes(role, phase, predicted, spent[phase]))
    return found


def show(run: Run, found: list[PhaseTimes], console: Console) -> None:
    rows = [(one.role, one.phase, between(quick, slow), likely, one.measured, likely / one.measured,
             "yes" if quick <= one.measured <= slow else "no")
            for one in found for quick, likely, slow in [one.predicted]]
    console.table(f"{run.workdir} on {run.devices} x {run.target}: seconds of a turn, the median of its turns",
                  ("turn of the", "phase", "predicted", "most likely", "measured", "likely / measured", "as predicted"),
                  rows)
