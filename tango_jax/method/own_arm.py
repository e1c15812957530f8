"""The arm of a run: a name of ARMS, or a user's record, as FILE.py:name or package.module:name.

    import dataclasses
    from tango_jax.method import tango
    from tango_jax.method.arms import ARMS
    def solve(t):
        lesson = tango.solve(t)   # or its lines, copied and changed
        return lesson
    mine = dataclasses.replace(ARMS["tango"], label="mine", turns=ARMS["tango"].turns | {"generator": solve})

`--config.arm=my.py:mine` trains it. Figures and comparisons read the look and the roles stored with each run.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.method.arms import ARMS, Arm, Look
from tango_jax.rl.schedule import Schedule
from tango_jax.runtime.checks import Mistakes, cut, meant, require, shortened
from tango_jax.runtime.user_code import is_user_code, load_object
from tango_jax.weights.source import ONLY_JUDGES


def arm_name(text: str) -> str:
    """In tables and folders: `mine` of `my.py:mine`."""
    return text.rpartition(":")[2]


def arm_of(config: ConfigDict) -> Arm:
    """The arm that `config.arm` names. Raises as `load_arm`."""
    return load_arm(config.arm)


def load_arm(text: str, key: str = "arm") -> Arm:
    """Raises ValueError if there is no such record, or a user's is mistaken."""
    if text in ARMS:
        return ARMS[text]
    if not is_user_code(text):
        raise ValueError(f"{key}={shortened(text)} is not one of {', '.join(ARMS)}{meant(text, ARMS)}; your own arm "
                         "is FILE.py:name")
    arm = load_object(key, text, Arm)
    _check(f"{key}={cut(text)}", arm_name(text), arm)
    return arm


def arm_or_none(config: ConfigDict) -> Arm | None:
    """None if the setting is mistaken, which another check says."""
    try:
        return arm_of(config)
    except ValueError:
        return None


def shares_policy(config: ConfigDict) -> bool:
    arm = arm_or_none(config)
    return config.verifier.adapter == "generator" or (arm is not None and arm.is_one_policy)


def alike(config: ConfigDict) -> tuple[str, ...]:
    """Settings of a role that must be the same in both."""
    if shares_policy(config):
        return "model", "checkpoint", "mesh"
    return ("model", "checkpoint") if config.verifier.sft.start == "generator" else ()


def check_fixed(config: ConfigDict, score_heads: Mapping[str, str]) -> None:
    """Raise ValueError if a role with a `ModelConfig.score_head`, a process reward model, would write or be trained."""
    require(not score_heads["generator"], f"generator.checkpoint={config.generator.checkpoint} {ONLY_JUDGES}")
    arm, own = arm_or_none(config), config.verifier
    if not score_heads["verifier"] or arm is None:
        return
    said = f"verifier.checkpoint={own.checkpoint} {ONLY_JUDGES}"
    require("verifier" not in arm.turns and not shares_policy(config), f"{said}; arm={config.arm} trains the verifier")
    require(not arm.is_scored, f"{said}; is_scored=True of arm={config.arm} is for a verifier that has learned to "
            "write marks: leave it out")
    count = config.rl.verifications_per_solution  # copies would be counted as cases
    require(count == 1, f"{said}, the same each time; rl.verifications_per_solution={count} would repeat its "
            "judgement: set it to 1")
    without_use = {"sft.steps": own.sft.steps, "init_from": own.init_from, "adapter": own.adapter,
                   "model.lora.rank": own.model.lora.rank, "stop_at_first_error": own.stop_at_first_error}
    given = ", ".join(f"verifier.{name}={value}" for name, value in without_use.items() if value)
    require(not given, f"{said}; leave out {given}")


def role_of_weights(config: ConfigDict, role: str) -> str:
    """The role whose weights are read from a checkpoint that has both: one policy takes the generator's."""
    return "generator" if shares_policy(config) else role


def make_schedule(config: ConfigDict) -> Schedule:
    rl, arm = config.rl, arm_of(config)
    return Schedule(
        warmup_turns=rl.warmup_steps,
        generator_turns_per_cycle=rl.generator_turns_per_cycle,
        verifier_turns_per_cycle=rl.verifier_turns_per_cycle if arm.is_interleaved else 0,
        generator_turns=rl.generator_steps,
        train_generator="generator" in arm.turns,
        train_verifier="verifier" in arm.turns,
    )


def _check(shown: str, name: str, arm: Arm) -> None:
    mistakes = Mistakes()
    mistakes.require(name not in ARMS, f"{shown} has the name of an arm that is built in: choose another")
    mistakes.require(isinstance(arm.label, str) and isinstance(arm.help, str) and isinstance(arm.look, Look),
                     f"{shown}: help and label must be texts, and look a Look (tango_jax/method/arms.py)")
    is_turns = isinstance(arm.turns, Mapping) and bool(arm.turns) and set(arm.turns) <= set(ROLES)
    mistakes.require(is_turns and all(map(callable, arm.turns.values())), f"{shown}: turns must be a mapping from "
                     f"{' or '.join(ROLES)} to a function of a Turn, not {shortened(arm.turns)}")
    mistakes.raise_all()


def stored_arm(text: str) -> dict[str, Any]:
    """All but the functions, whose source is stored with the user files."""
    arm = load_arm(text)
    fields = {field.name: getattr(arm, field.name) for field in dataclasses.fields(arm)}
    return {"name": arm_name(text)} | fields | {"look": dataclasses.asdict(arm.look), "turns": list(arm.turns)}


def read_arm(stored: Mapping[str, Any]) -> Arm:
    """An arm that `stored_arm` stored: it can be drawn and compared, not run. Raises ValueError if it is damaged."""
    try:
        fields = {field.name: stored[field.name] for field in dataclasses.fields(Arm) if field.name in stored}
        return Arm(**fields | {"look": Look(**stored["look"]), "turns": dict.fromkeys(stored["turns"], _not_stored)})
    except (KeyError, TypeError) as error:
        raise ValueError(f"the stored record of an arm is damaged ({error!r})") from error


def _not_stored(t: Any) -> None:
    raise ValueError("the turns of a stored arm cannot be run: name the file that defines it")
