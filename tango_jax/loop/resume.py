"""Starts or resumes a run, and saves its checkpoints."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.loop.best import Best
from tango_jax.loop.describe import describe_results
from tango_jax.loop.fork import REFERENCE, read_fork
from tango_jax.method.own_arm import shares_policy
from tango_jax.models.lora import split
from tango_jax.records import Memory, States
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
from tango_jax.weights.workdir import BASE


@dataclasses.dataclass(frozen=True)
class RunState:
    states: States
    memory: Memory = Memory()
    metrics_bytes: int = 0  # of metrics.jsonl; later rows belong to turns that will be repeated
    seconds: float = 0.0  # duration of the run so far
    owes_evaluation: bool = True  # the evaluation after the last turn has not been written yet
    best: Best | None = None  # with `checkpoint.keep_best`
    fingerprints: Mapping[str, str] = dataclasses.field(default_factory=dict)  # see `fingerprints_of`


def peek(checkpointer: Checkpointer, policies: dict[str, Policy]) -> Restored | None:
    """The newest checkpoint without its states. Raises ValueError if all are damaged, or of another model."""
    return checkpointer.peek(abstract_states(policies))


def start_or_resume(
    policies: dict[str, Policy], start_params: dict, newest: Restored | None, fingerprints: dict[str, str],
    checkpointer: Checkpointer, config: ConfigDict, fork: Mapping[str, Any] | None = None,
) -> RunState:
    """The newest checkpoint, or that of the run that is forked (`fork`, as in provenance.json), or train states
    initialised from `start_params`, which is emptied, so that devices do not hold it twice. Raises ValueError: the
    checkpoint has a different start or model."""
    bases = {role: split(weights)[1] for role, weights in start_params.items()}
    if newest is not None or fork:
        start_params.clear()  # before the states are read
    restored = checkpointer.restore(abstract_states(policies))
    check_start(restored, fingerprints, config)
    if is_new_fork := restored is None and bool(fork):
        restored = read_fork(config, fork, abstract_states(policies), fingerprints)
    if restored is None:
        states = {role: policies[role].offloaded(policies[role].restart(start_params.pop(role)))
                  for role in saved_roles(policies)}
        start_params.clear()  # one policy is in it by the names of both roles
        return RunState(with_shared(policies, states), fingerprints=fingerprints)
    meta = restored.meta
    states = {role: policies[role].offloaded(state).replace(base=bases[role])
              for role, state in restored.state.items()}
    states = with_shared(policies, states)
    best = meta.get("best")
    fingerprints = _of_fork(fingerprints, states) if is_new_fork else {**fingerprints, **meta["source_fingerprint"]}
    return RunState(states, Memory.restored(meta), meta["metrics_bytes"], meta["seconds"], meta["owes_evaluation"],
                    best and Best(*best), fingerprints)


def saved_roles(policies: dict[str, Policy]) -> list[str]:
    return ["generator"] if policies["verifier"].is_shared else list(policies)


def with_shared(policies: dict[str, Policy], states: States) -> States:
    return {role: states.get(role, states["generator"]) for role in policies}


def references_of(
    policies: dict[str, Policy], start_params: dict, config: ConfigDict
) -> dict[str, Callable[[], dict]]:
    """{role: () -> reference weights}, of the roles whose loss has a KL term."""
    roles = [role for role in policies if config[role].loss.kl_coef > 0 and not policies[role].model_config.score_head]
    if roles and policies["verifier"].is_shared:  # with `mesh.offload`, one copy in host memory
        return dict.fromkeys(roles, policies[roles[0]].reference_fn(start_params[roles[0]]))
    return {role: policies[role].reference_fn(start_params[role]) for role in roles}


def save(checkpointer: Checkpointer, run_state: RunState, policies: dict[str, Policy]) -> None:
    """Begin to write a checkpoint, see `Checkpointer.save`. Raises CheckpointError."""
    meta = run_state.memory.stored() | {
        "metrics_bytes": run_state.metrics_bytes,
        "seconds": run_state.seconds,
        "source_fingerprint": dict(run_state.fingerprints),
        "owes_evaluation": run_state.owes_evaluation,
        "best": run_state.best,
    }
    saved = {role: run_state.states[role].replace(base={}) for role in saved_roles(policies)}
    checkpointer.save(run_state.memory.turn, saved, meta, run_state.best and run_state.best.turn)


def abstract_states(policies: dict[str, Policy]) -> States:
    return {role: policies[role].abstract_state() for role in saved_roles(policies)}


def fingerprints_of(policies: dict[str, Policy], start_params: dict, task: Task) -> dict[str, str]:
    """{what: digest}: the weights with which reinforcement learning begins, by role; bases of adapters; problems and
    prompts."""
    bases = {f"{role}{BASE}": tree_fingerprint(split(start_params[role])[1])
             for role, policy in policies.items() if policy.model_config.lora}
    return bases | {role: tree_fingerprint(start_params[role]) for role in policies} | {
        "problems": task.fingerprint,
        "templates": templates_digest({role: policy.template for role, policy in policies.items()}),
    }


def _of_fork(fingerprints: Mapping[str, str], states: States) -> dict[str, str]:
    """Of a run whose reinforcement learning begins with these states: its start parameters are only the reference."""
    references = {f"{role}{REFERENCE}": fingerprints[role] for role in states}
    return {**fingerprints, **references} | {role: tree_fingerprint(state.weights) for role, state in states.items()}


def check_start(restored: Restored | None, fingerprints: dict[str, str], config: ConfigDict) -> None:
    """Raise ValueError if a checkpoint's run had other start parameters, problems or prompts."""
    saved = fingerprints if restored is None else restored.meta["source_fingerprint"]
    changed = [name for name, now in fingerprints.items()
               if saved.get(f"{name}{REFERENCE}", saved.get(name, now)) != now]
    changed = [name for name in changed if f"{name}{BASE}" not in changed]  # which says it of the role as well
    if shares_policy(config):  # stored for both roles
        changed = [name for name in changed if not name.startswith("verifier")]
    if changed:
        raise ValueError(f"{' and '.join(_changed(name, config) for name in changed)} since the checkpoint of turn "
                         f"{restored.step} was saved, and the run would go on as another one: put back what was there, "
                         "or choose another --workdir")


def _changed(name: str, config: ConfigDict) -> str:
    if name == "problems":
        return f"the problems of {' or '.join(filter(None, [config.task.train, config.task.test]))} have changed"
    if name == "templates":
        return "a template file has changed"
    is_base, name = name.endswith(BASE), name.removesuffix(BASE)
    if shares_policy(config):  # it starts from the last stage 1
        name = next((role for role in reversed(ROLES) if config[role].sft.steps or config[role].init_from), name)
    role = config[name]
    if (role.sft.steps or role.init_from) and not (is_base and role.checkpoint and not role.sft.full):
        return f"the stage 1 of the {name}{f' in {role.init_from}' if role.init_from else ''} has changed"
    has_folder = role.adapter not in ("", "generator") and not is_base
    changed = f"adapter={role.adapter}" if has_folder else f"checkpoint={role.checkpoint}"
    return f"{name}.{changed} has changed"


def read_finished(config: ConfigDict, workdir: Path, console: Console) -> dict | None:
    """Log and return the summary of a finished run, or None. Raises ValueError for other settings."""
    if not hosts.from_first(is_finished(workdir)):
        return None
    check_config(config, workdir / "config.json", may_move=ANY_PLACE)
    check_method(config, workdir)
    console.log(f"{workdir} holds a finished run; choose another --workdir for a new one")
    summary = json.loads((workdir / "summary.json").read_text())
    describe_results(console, config, workdir, summary)
    return summary
