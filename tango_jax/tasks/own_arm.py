"""The arm of a run: a name of ARMS, or a record of the user's, as FILE.py:name or package.module:name.

    import dataclasses
    from tango_jax.arms import ARMS, Look, TurnPlan
    tango = ARMS["tango"]
    solve = dataclasses.replace(tango.turns["generator"], credit="my.py:min_form")   # or the function itself
    min_form = dataclasses.replace(tango, label="min-form credit", turns=tango.turns | {"generator": solve})

`--config.arm=my.py:min_form` trains it. Its record is stored with the run, and read from there by whatever draws or
compares runs. Takes the setting; returns the record. Used wherever a run's turns are looked up.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from tango_jax.arms import ARMS, Arm, Call, Look, TurnPlan
from tango_jax.config import ROLES
from tango_jax.runtime.checks import Mistakes, cut, meant, shortened
from tango_jax.runtime.user_code import is_user_code, load_object
from tango_jax.tasks.task import STREAMS

SAMPLES = ("", "samples_per_prompt", "verifications_per_solution")
# Names of functions of rl/labels.py, by the role that is called, and by the name of a call in turns of a role.
LABELS = {"generator": ("", "majority"), "verifier": ("",)}
ABOUT = {("generator", "second_solution"): ("rejected",), ("verifier", "verifier"): ("", "one_of_either_label")}
TEXTS = {"generator": ("", "second_solution"), "verifier": ("", "second_judgement")}


def arm_name(text: str) -> str:
    """The name of an arm in tables and folders: `min_form` of `my.py:min_form`."""
    return text.rpartition(":")[2]


def arm_of(config: ConfigDict) -> Arm:
    """The record of a run's arm. Raises ValueError, see `load_arm`."""
    return load_arm(config.arm)


def load_arm(text: str, key: str = "arm") -> Arm:
    """The record that a setting names.

    Raises:
        ValueError: there is no such arm; or the user's record has calls, problems or roles that there are not.
    """
    if text in ARMS:
        return ARMS[text]
    if not is_user_code(text):
        raise ValueError(f"{key}={shortened(text)} is not one of {', '.join(ARMS)}{meant(text, ARMS)}; one of your own "
                         "is FILE.py:name")
    arm = load_object(key, text, Arm)
    _check(f"{key}={cut(text)}", arm_name(text), arm)
    return arm


def arm_or_none(config: ConfigDict) -> Arm | None:
    """The record of a run's arm; None if the setting is mistaken, which another check says."""
    try:
        return arm_of(config)
    except ValueError:
        return None


def _check(shown: str, name: str, arm: Arm) -> None:
    mistakes = Mistakes()
    mistakes.require(name not in ARMS, f"{shown} has the name of an arm that is built in: choose another")
    mistakes.require(isinstance(arm.label, str) and isinstance(arm.help, str) and isinstance(arm.look, Look),
                     f"{shown}: help and label must be texts, and look a Look (tango_jax/arms.py)")
    is_turns = isinstance(arm.turns, Mapping) and bool(arm.turns) and set(arm.turns) <= set(ROLES)
    mistakes.require(is_turns, f"{shown}: turns must be a mapping from {' or '.join(ROLES)} to a TurnPlan, and is "
                     f"{shortened(arm.turns)}")
    for role, plan in arm.turns.items() if is_turns else ():
        place = f"{shown}, turns[{role!r}]"
        if not mistakes.require(isinstance(plan, TurnPlan), f"{place} must be a TurnPlan, and is {shortened(plan)}"):
            continue
        calls = [call for call in plan.calls if isinstance(call, Call)]
        names = [call.name for call in calls]
        orders = [["generator"], ["generator", "verifier"], ["generator", "verifier", "second_solution"],
                  ["generator", "verifier", "second_judgement"]]  # fmt: skip
        mistakes.require(len(calls) == len(plan.calls) and role in names and names in orders,
                         f"{place}: calls must be Calls of the generator, then perhaps of the verifier, and then "
                         f"perhaps for a second try or a second judgement, that of the {role} among them, and are "
                         f"{shortened(plan.calls)}")
        is_twice = names[-1:] == ["second_solution"] and any(call.samples for call in calls[1:])
        mistakes.require(not is_twice, f"{place}: a second solution follows one verification of each solution: leave "
                         "the samples of both calls empty")
        for call in calls:
            mistakes.one_of(f"{place}, samples of the {call.name}", call.samples, ("",) if call.text else SAMPLES)
            mistakes.one_of(f"{place}, labels of the {call.role}", call.labels, LABELS[call.role])
            mistakes.one_of(f"{place}, about of the {call.name}", call.about, ABOUT.get((role, call.name), ("",)))
            mistakes.one_of(f"{place}, text of the {call.role}", call.text, TEXTS[call.role])
        mistakes.require(not plan.learns or (plan.learns[0] == role and set(plan.learns) <= set(names)),
                         f"{place}: learns must name calls, that of the {role} first, and is {shortened(plan.learns)}")
        mistakes.one_of(f"{place}, teacher", plan.teacher, ("", "informed") if role == "verifier" else ("",))
        mistakes.one_of(f"{place}, problems", plan.problems, STREAMS)
        for kind in ("reward", "credit"):
            value = getattr(plan, kind)
            mistakes.require(isinstance(value, str) or callable(value), f"{place}: {kind} must be a name, "
                             f"FILE.py:name or a function, and is {shortened(value)}")
    mistakes.raise_all()


def stored_arm(text: str) -> dict[str, Any] | None:
    """What a run stores of an arm of the user's: the record, with functions by their names. None: it is built in."""
    if text in ARMS:
        return None
    return {"name": arm_name(text)} | _plain(load_arm(text))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return getattr(value, "__name__", repr(value)) if callable(value) else value


def read_arm(stored: Mapping[str, Any]) -> Arm:
    """The record that `stored_arm` made a mapping of; its functions are names.

    Raises:
        ValueError: it lacks something.
    """
    try:
        turns = {role: TurnPlan(**plan | {"calls": tuple(Call(**call) for call in plan["calls"]),
                                         "learns": tuple(plan.get("learns", ()))})
                 for role, plan in stored["turns"].items()}  # fmt: skip
        others = {field.name: stored[field.name] for field in dataclasses.fields(Arm) if field.name in stored}
        return Arm(**others | {"look": Look(**stored["look"]), "turns": turns})
    except (KeyError, TypeError) as error:
        raise ValueError(f"the stored record of an arm is damaged ({error!r})") from error
