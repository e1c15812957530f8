"""Starts or resumes a run, and saves its checkpoints.

Takes the parameters that the run starts from and its checkpoint directory; returns train states with the matching
counters. Runs before the first turn, and after every turn that saves.
"""

import dataclasses
import json
from pathlib import Path

from ml_collections import ConfigDict

from tango_jax.loop.describe import describe_results
from tango_jax.records import Counters, States
from tango_jax.rl.policy import Policy
from tango_jax.runtime import hosts
from tango_jax.runtime.checkpoint import Checkpointer, Restored
from tango_jax.runtime.console import Console
from tango_jax.runtime.trees import tree_fingerprint
from tango_jax.tasks.task import Task
from tango_jax.text.templates import templates_digest
from tango_jax.tracking.provenance import check_method
from tango_jax.tracking.results import is_finished
from tango_jax.tracking.run_config import ANY_PLACE, check_config


@dataclasses.dataclass(frozen=True)
class Start:
    """The state from which a run starts or resumes."""

    states: States
    counters: Counters = Counters()
    metrics_bytes: int = 0  # of metrics.jsonl; later rows belong to turns that will be repeated
    seconds: float = 0.0  # duration of the run so far
    owes_evaluation: bool = True  # the evaluation after the last turn has not been written yet


def start_or_resume(
    policies: dict[str, Policy],
    start_params: dict,
    abstract_states: States,
    fingerprints: dict[str, str],
    checkpointer: Checkpointer,
    config: ConfigDict,
) -> Start:
    """Return the newest checkpoint, or train states initialised from `start_params`, which are needed only without one.

    Raises:
        ValueError: the checkpoint has a different start or a different model.
    """
    restored = checkpointer.restore(abstract_states)
    check_start(restored, fingerprints, config)
    if restored is None:
        return Start({role: policy.offloaded(policy.restart(start_params[role])) for role, policy in policies.items()})
    meta = restored.meta
    counters = Counters(meta["turn"], meta["cursors"], tuple(meta["label_counts"]))
    states = {role: policy.offloaded(restored.state[role]) for role, policy in policies.items()}
    return Start(states, counters, meta["metrics_bytes"], meta["seconds"], meta["owes_evaluation"])


def save_checkpoint(
    checkpointer: Checkpointer, counters: Counters, states: States, metrics_bytes: int, seconds: float,
    fingerprints: dict[str, str], owes_evaluation: bool,
) -> None:
    """Save what `start_or_resume` reads: the states, the counters and the other fields of `Start`."""
    meta = dataclasses.asdict(counters) | {
        "metrics_bytes": metrics_bytes,
        "seconds": seconds,
        "source_fingerprint": fingerprints,
        "owes_evaluation": owes_evaluation,
    }
    checkpointer.save(counters.turn, states, meta)


def fingerprints_of(policies: dict[str, Policy], start_params: dict, task: Task) -> dict[str, str]:
    """What a run depends on beside its settings, {what: digest}: the parameters that each role starts from, and what is
    in the files of problems and of prompts."""
    return {role: tree_fingerprint(start_params[role]) for role in policies} | {
        "problems": task.fingerprint,
        "templates": templates_digest({role: policy.template for role, policy in policies.items()}),
    }


def check_start(restored: Restored | None, fingerprints: dict[str, str], config: ConfigDict) -> None:
    """Raise ValueError if a checkpoint belongs to a run that started from other parameters, problems or prompts."""
    saved = fingerprints if restored is None else restored.meta["source_fingerprint"]
    changed = [name for name, now in fingerprints.items() if saved[name] != now]
    if changed:
        raise ValueError(f"{' and '.join(_changed(name, config) for name in changed)} since the checkpoint of turn "
                         f"{restored.step} was saved, and the run would go on as another one: put back what was there, "
                         "or choose another --workdir")


def _changed(name: str, config: ConfigDict) -> str:
    if name == "problems":
        return f"the problems of {' or '.join(filter(None, [config.task.train, config.task.test]))} have changed"
    if name == "templates":
        return "a template file has changed"
    role = config[name]
    if role.sft.steps or role.init_from:
        return f"the stage 1 of the {name}{f' in {role.init_from}' if role.init_from else ''} has changed"
    return f"{name}.checkpoint={role.checkpoint} has changed"


def read_finished(config: ConfigDict, workdir: Path, console: Console) -> dict | None:
    """Log and return the summary of a finished run, or return None if it is not finished.

    Raises:
        ValueError: it was made with other settings, or another method.
    """
    if not hosts.from_first(is_finished(workdir)):
        return None
    check_config(config, workdir / "config.json", may_move=ANY_PLACE)
    check_method(config, workdir)
    console.log(f"{workdir} holds a finished run; choose another --workdir for a new one")
    summary = json.loads((workdir / "summary.json").read_text())
    describe_results(console, config, workdir, summary)
    return summary
