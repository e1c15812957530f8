"""The best evaluation of a run by `checkpoint.keep_best`; checkpoints store it, so that a resumed run knows it.

The metric must compare the weights of a role that the run trains: every evaluation measures it on the same problems or
solutions. Only evaluations after turns that train that role count for `checkpoint.patience`, so that arms which also
train the other role do not end earlier.
"""

import math
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.loop.measure import measured_names
from tango_jax.method.load import Method
from tango_jax.method.own_arm import make_schedule, shares_policy
from tango_jax.rl.schedule import Place
from tango_jax.runtime.checks import meant, require
from tango_jax.tasks.task import Task

HIGHER_IS_BETTER = re.compile(r".*(accuracy|format|_f1|_f1_correct|_f1_incorrect)")
OF_ALL_STEPS = re.compile(r"verifier/\w+/step_.*")  # a step without a judgement counts as missed


class Best(NamedTuple):
    value: float
    turn: int  # turns before the evaluation
    misses: int = 0  # evaluations since then, each after turns that train the role


def role_of(name: str, trained: Collection[str]) -> str:
    """Whose weights the metric compares. `trained`: the roles that the run trains. Second tries depend on both roles:
    the verifier chooses them and is in their prompt."""
    is_verifiers = name.startswith("verifier/") or (name.startswith("second_try/") and "generator" not in trained)
    return "verifier" if is_verifiers else "generator"


def role_of_best(config: ConfigDict) -> str:
    return role_of(config.checkpoint.keep_best, trained_roles(config, make_schedule(config).turns()))


def trained_roles(config: ConfigDict, turns: Collection[Place]) -> set[str]:
    """Any turn of one policy trains both of its roles. A warm-up counts for the verifier alone: `checkpoint.patience`
    must not end a run before the generator's first turn."""
    both = ROLES if shares_policy(config) and any(turn.phase != "warmup" for turn in turns) else ()
    return {turn.role for turn in turns}.union(both)


def after_evaluation(
    best: Best | None, metrics: Mapping[str, float], name: str, turn: int, is_trained: bool
) -> Best | None:
    """Of equal values the first is the best; NaN is none. `is_trained`: the turns since the evaluation before trained
    the metric's role. While none did, the newest is the best: its value is the same, and the other role may have
    learned, as a verifier does in its warm-up."""
    value = float(metrics.get(name, math.nan))
    if best is None:
        return None if math.isnan(value) else Best(value, turn)
    is_same = not is_trained and best.misses == 0 and value == best.value
    return Best(value, turn) if value > best.value or is_same else best._replace(misses=best.misses + is_trained)


def is_over(best: Best | None, patience: int) -> bool:
    """Whether `checkpoint.patience` ends the training; 0: never."""
    return best is not None and 0 < patience <= best.misses


def check_trains_best(config: ConfigDict) -> None:
    """Raise ValueError for a metric of a role that the arm does not train. Arms of an experiment share the metric."""
    name, trained = config.checkpoint.keep_best, trained_roles(config, make_schedule(config).turns())
    role = role_of(name, trained)
    require(not name or role in trained, f"checkpoint.keep_best={name} measures the {role}, which arm={config.arm} "
            "does not train: leave this arm out of ablation.arms, or checkpoint.keep_best empty")


def check_keep_best(config: ConfigDict, task: Task, method: Method) -> None:
    """Raise ValueError for a metric that cannot choose among the checkpoints of this run."""
    name = config.checkpoint.keep_best
    if not name:
        return
    trained = trained_roles(config, make_schedule(config).turns())
    # Solutions of a generator that learns differ between evaluations.
    is_live_fixed = "generator" not in trained and not shares_policy(config)
    names = [one for one in filter(HIGHER_IS_BETTER.fullmatch, measured_names(config, task, method))
             if role_of(one, trained) in trained and (is_live_fixed or not one.startswith("verifier/live/"))]
    if config.verifier.stop_at_first_error:
        names = [one for one in names if not OF_ALL_STEPS.fullmatch(one)]
        require(not OF_ALL_STEPS.fullmatch(name), f"checkpoint.keep_best={name} falls as a verifier with "
                "verifier.stop_at_first_error=True learns to stop, because steps after its first error count as "
                f"missed: choose from {', '.join(names)}")
    require(name in names, f"checkpoint.keep_best={name} cannot choose among the checkpoints of this run: it must be "
            "measured in every evaluation, on the same problems or solutions, of a role that the run trains, and "
            f"higher must be better: choose from {', '.join(names)}{meant(name, names)}")
