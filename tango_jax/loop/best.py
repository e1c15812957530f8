"""The best evaluation of a run by `checkpoint.keep_best`; checkpoints store it, so that a resumed run knows it."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from ml_collections import ConfigDict

from tango_jax.loop.measure import measured_names
from tango_jax.method.load import Method
from tango_jax.runtime.checks import meant, require
from tango_jax.tasks.task import Task

HIGHER_IS_BETTER = re.compile(r".*(accuracy|format|_f1|_f1_correct|_f1_incorrect)")


class Best(NamedTuple):
    value: float
    turn: int  # turns before the evaluation
    misses: int = 0  # evaluations since then


def after_evaluation(best: Best | None, metrics: Mapping[str, float], name: str, turn: int) -> Best | None:
    """Of equal values the first is the best; NaN is none."""
    value = float(metrics.get(name, math.nan))
    if best is None:
        return None if math.isnan(value) else Best(value, turn)
    return Best(value, turn) if value > best.value else best._replace(misses=best.misses + 1)


def is_over(best: Best | None, patience: int) -> bool:
    """Whether `checkpoint.patience` ends the training; 0: never."""
    return best is not None and 0 < patience <= best.misses


def check_keep_best(config: ConfigDict, task: Task, method: Method) -> None:
    """Raise ValueError for a metric that no evaluation of this run measures, or of which less is better."""
    name = config.checkpoint.keep_best
    if name:
        names = list(filter(HIGHER_IS_BETTER.fullmatch, measured_names(config, task, method)))
        require(name in names, f"checkpoint.keep_best={name} is not measured by the evaluations of this run, or less "
                f"of it is better: choose from {', '.join(names)}{meant(name, names)}")
