"""A fork: a run that begins with the newest policies of another run. Its settings may differ."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.method.own_arm import arm_of, shares_policy
from tango_jax.records import Memory, States
from tango_jax.rl.policy import Policy
from tango_jax.runtime.checkpoint import Restored, peek_meta, read_state
from tango_jax.runtime.checks import require
from tango_jax.runtime.sealed import complete_steps
from tango_jax.weights.source import NUMERICS
from tango_jax.weights.workdir import BASE, has_one_policy, read_config, start_source

REFERENCE = "_reference"  # after a role, in the fingerprints of a fork: the weights that its KL term refers to


def check_fork(config: ConfigDict, policies: dict[str, Policy], abstract_states: States) -> None:
    """Raise ValueError if the policies of the other run do not fit these. Reads no parameters."""
    name, workdir = f"fork_of={config.fork_of}", Path(config.fork_of).expanduser()
    checkpoints = workdir / "checkpoints"
    require(bool(complete_steps(checkpoints)), f"{name}: there is no checkpoint of stage 2 in {checkpoints}: name the "
            "workdir of a run that has saved one")
    settings, is_one = read_config(workdir), has_one_policy(workdir)
    count = {True: "one policy for both roles", False: "two policies"}
    require(is_one == shares_policy(config), f"{name}: that run has {count[is_one]}, and this one would have "
            f"{count[not is_one]} (verifier.adapter, arm): fork it with as many")
    for role, policy in policies.items():
        there, here = start_source(settings, role, is_one_policy=is_one).model_config, policy.model_config
        fields = [field.name for field in dataclasses.fields(here) if field.name not in NUMERICS]
        differing = [f"{field} {getattr(there, field)} there, {getattr(here, field)} here" for field in fields
                     if getattr(there, field) != getattr(here, field)]
        require(not differing, f"{name}: the {role} is another model than in that run ({'; '.join(differing)}): a fork "
                "keeps the models")
    peek_meta(checkpoints, abstract_states)


def read_fork(
    config: ConfigDict, fork: Mapping[str, Any], abstract_states: States, fingerprints: dict[str, str]
) -> Restored:
    """The policies of the other run, with their moments, as the checkpoint of a run without turns. If the problems are
    the same ones, they go on where it was. Other statistics go on if the arm is the same one as well: the measured
    accuracy of the verifier if it also judges as there, and the counts of labels if turns are as large. `fork`: as in
    provenance.json.

    Raises ValueError: adapters of another base, a KL term that would refer to other weights than there, or a role that
    is not trained and whose settings name other weights than there.
    """
    place = Path(config.fork_of).expanduser()
    found = read_state(place / "checkpoints", abstract_states, only=fork["turn"])
    theirs = found.meta["source_fingerprint"]
    others = [name for name, now in fingerprints.items() if name.endswith(BASE) and theirs.get(name, now) != now]
    require(not others, f"fork_of={config.fork_of}: its adapters were trained on other weights than this run loads "
            f"({', '.join(others)}): name the checkpoint of that run, and its stage 1 in init_from")
    trained = arm_of(config).turns
    others = [role for role in ROLES if role in fingerprints
              and theirs.get(f"{role}{REFERENCE}", theirs.get(role)) != fingerprints[role]
              and not _is_fresh_adapter(config, role, fingerprints)]
    compared = [role for role in others if role in trained and config[role].loss.kl_coef > 0]
    require(not compared, f"fork_of={config.fork_of}: the KL term of the {' and of the '.join(compared)} would refer "
            f"to other weights than there: keep that run's seed, checkpoints and stage 1, or set "
            f"{' and '.join(f'{role}.loss.kl_coef=0' for role in compared)}")
    kept = () if shares_policy(config) else [role for role in others if role not in trained]
    named = [role for role in kept if _names_weights(config[role])]
    require(not named, f"fork_of={config.fork_of}: a fork keeps the policies of that run, and here the "
            f"{' and the '.join(named)}, which arm={config.arm} does not train, would start from other weights than "
            f"there: keep that run's {' and '.join(f'{role}.checkpoint and {role}.init_from' for role in named)}, or "
            "begin a new run without --from")
    memory, there = Memory(), Memory.restored(found.meta)
    if fork["is_task"] and theirs["problems"] == fingerprints["problems"]:
        memory = there.replace(turn=0) if fork["is_arm"] else Memory(cursors=there.cursors)
    if not fork["is_judge"]:
        memory = memory.replace(evidence=())
    if not fork["is_batch"]:
        memory = memory.replace(label_counts=Memory().label_counts)
    begun = {"metrics_bytes": 0, "seconds": 0.0, "owes_evaluation": True}
    return found._replace(step=0, meta=memory.stored() | begun)


def _is_fresh_adapter(config: ConfigDict, role: str, fingerprints: Mapping[str, str]) -> bool:
    """Such a reference is its base, whose digest is compared, whatever the seed has drawn."""
    own = config[role]
    return f"{role}{BASE}" in fingerprints and not (own.sft.steps or own.init_from or own.adapter)


def _names_weights(own: ConfigDict) -> bool:
    """Whether settings name the weights that it starts from. No seed and no stage 1 of this run decides them then."""
    return bool(own.init_from or (own.checkpoint and not own.sft.steps))
