"""The cells of an experiment: one configuration for each combination of the values in `ablation.grid`.

An axis of the grid is a config key with a list of values, or a name with labelled settings:

    {"task.rl_words": [(4, 4), (8, 8)]}
    {"words": {"4": {"task.rl_words": (4, 4), "task.test_words": (4, 4)},
               "8": {"task.rl_words": (8, 8), "task.test_words": (8, 8)}}}

A label may set `ablation.arms` and `ablation.seeds`, and `seed` for stage 1. A cell's folder is `words=8,data_seed=3`;
an empty label adds nothing. Axes of starts (START_KEYS) are no part of the setting, `words=8`, over which results are
averaged. Cells share a stage 1 where the tokenizer and all settings but NOT_IN_STAGE_ONE are equal.
"""

import dataclasses
import fnmatch
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from tango_jax.cli.config_file import did_you_mean, with_settings
from tango_jax.config import ROLES, default_config, flatten
from tango_jax.defaults import KEYS
from tango_jax.runtime.checks import require, shortened
from tango_jax.tasks.registry import tokenizer_model
from tango_jax.tracking.run_config import ANY_TIME

START_KEYS = {"task.data_seed", "seed", "generator.init_from", "verifier.init_from"}
# Patterns of fnmatch.
NOT_IN_STAGE_ONE = (
    "arm", "checkpoint.*", "eval.*", "generate.*", "rl.*", "task.rl_*", "task.test_*", "task.verifier_*",
    "task.grader", *(key for key, declared in KEYS.items() if declared.change in ANY_TIME),
    *(f"{role}.{name}" for role in ROLES for name in (
        "cache_buckets", "cache_tokens", "loss.*", "model.sample_*", "optimizer.*", "pack_length", "prompt_buckets",
        "prompts_per_micro_batch", "reward_weights", "rewards", "row_buckets", "rows_per_micro_batch", "temperature",
        "top_k", "top_p",
    )),
)
OF_SAMPLES = ("grader", "temperature", "top_k", "top_p")  # what a stage 1 of own samples depends on as well
SHORTENED = ("task.", "rl.")  # left out of the names of cells
LABEL = re.compile(r"[\w.+-]+")
MAX_NAME = 200  # characters; file systems allow 255 bytes


@dataclasses.dataclass(frozen=True)
class Cell:
    name: str  # of its folder; empty: the experiment's folder
    setting: str  # the name without what makes a start
    config: ConfigDict  # arms and seeds of its runs are in `ablation`
    stage_one: str | None  # name of its stage 1, shared by cells; None: no stage 1


@dataclasses.dataclass(frozen=True)
class Axis:
    name: str
    labels: dict[str, dict[str, Any]]  # label -> {config key: value}

    @property
    def is_start(self) -> bool:
        keys = {key for settings in self.labels.values() for key in settings}
        return bool(keys) and keys <= START_KEYS


def make_cells(config: ConfigDict) -> list[Cell]:
    """The cells of the grid, not validated; without a grid one cell with an empty name. Raises ValueError."""
    axes = [_axis(key, values) for key, values in config.ablation.grid.items()]
    _check_axes(axes)
    choices = list(itertools.product(*(axis.labels for axis in axes)))
    configs = {choice: _cell_config(config, axes, choice) for choice in choices}
    facts = {choice: stage_one_facts(configs[choice]) for choice in choices}
    in_stage_one = [axis for index, axis in enumerate(axes) if _changes_stage_one(index, facts)]
    in_setting = [axis for axis in axes if not axis.is_start]
    cells = []
    for choice in choices:
        name = _name(axes, choice)
        require(len(name) <= MAX_NAME, f"ablation.grid: the cell name {shortened(name)} has {len(name)} "
                f"characters, and a folder's name may have {MAX_NAME}; give its values short labels")
        stage_one = None
        if facts[choice] is not None:
            first = next(other for other in choices if facts[other] == facts[choice])
            stage_one = _name(axes, first, in_stage_one) or "shared"
        cells.append(Cell(name, _name(axes, choice, in_setting), configs[choice], stage_one))
    _check_starts(cells)
    return cells


def stage_one_facts(config: ConfigDict) -> dict[str, str] | None:
    """All that the result of stage 1 depends on; None if no role has one."""
    if not any(config[role].sft.steps and not config[role].init_from for role in ROLES):
        return None
    patterns = [pattern for pattern in NOT_IN_STAGE_ONE
                if config.task.stage_one != "self" or pattern.rpartition(".")[2] not in OF_SAMPLES]
    for role in ROLES:
        if config[role].sft.full or not config[role].model.lora.rank:
            patterns += [f"{role}.model.lora.*", f"{role}.sft.full"]
    facts = {
        key: json.dumps(value, default=list) for key, value in flatten(config).items()
        if not any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
    }
    if any(not config[role].checkpoint for role in ROLES):  # the sizes of all problems decide on its symbols
        facts["tokenizer"] = hashlib.sha256(tokenizer_model(config)).hexdigest()[:12]
    return facts


def _axis(name: str, values: Any) -> Axis:
    shown = f"ablation.grid[{shortened(name)}]"
    if isinstance(values, Mapping):
        require(isinstance(name, str) and LABEL.fullmatch(name) is not None,
                f"{shown}: the name of an axis consists of letters, digits, and _ . + -")
        for label, settings in values.items():
            require(isinstance(label, str) and (label == "" or LABEL.fullmatch(label) is not None),
                    f"{shown}: label {shortened(label)} must be a text of letters, digits, and _ . + -")
            require(isinstance(settings, Mapping),
                    f"{shown}[{label!r}]={shortened(settings)} must be a mapping from config keys to values")
            require(label != "" or not settings, f"{shown}['']={shortened(settings)} must be empty: the empty label "
                    "stands for the unchanged configuration; give these settings a name")
        labels = {label: dict(settings) for label, settings in values.items()}
    else:
        require(name in flatten(default_config()), f"{shown}: unknown config key{did_you_mean(str(name))} (an axis "
                "with another name maps labels to settings, {label: {key: value}})")
        require(isinstance(values, (list, tuple)), f"{shown}={shortened(values)} must be a list of values")
        labels = {_label(value): {name: value} for value in values}
        for label, settings in labels.items():
            require(LABEL.fullmatch(label) is not None, f"{shown}: value {shortened(settings[name])} cannot name "
                    "a folder; give it a label: {label: {key: value}}")
        require(len(labels) == len(values), f"{shown}={shortened(values)} names a value twice: take it out")
        name = next((name.removeprefix(start) for start in SHORTENED if name.startswith(start)), name)
    require(len(labels) > 0, f"{shown} is empty: give it values, or take it out")
    return Axis(name, labels)


def _label(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _check_axes(axes: list[Axis]) -> None:
    setter = {}
    for axis in axes:
        require([other.name for other in axes].count(axis.name) == 1,
                f"ablation.grid has two axes named {axis.name}: rename one")
        for key in dict.fromkeys(key for settings in axis.labels.values() for key in settings):
            shown = f"ablation.grid[{axis.name!r}] sets {shortened(key)}"
            require(key != "arm", f"{shown}: name the arms in ablation.arms")
            require(not str(key).startswith("ablation.") or key in ("ablation.arms", "ablation.seeds"),
                    f"{shown}: a cell may set only ablation.arms and ablation.seeds of these keys; take it out")
            require(setter.setdefault(key, axis.name) == axis.name,
                    f"{shown}, and so does the axis {setter.get(key)!r}: take it out of one of them")


def _cell_config(config: ConfigDict, axes: list[Axis], choice: tuple[str, ...]) -> ConfigDict:
    for axis, label in zip(axes, choice, strict=True):
        try:
            config = with_settings(config, axis.labels[label])
        except ValueError as error:
            raise ValueError(f"ablation.grid, cell {_name(axes, choice)}: {error}") from error
    return config


def _changes_stage_one(index: int, facts: Mapping[tuple[str, ...], Any]) -> bool:
    first = {}
    return any(first.setdefault(choice[:index] + choice[index + 1 :], own) != own for choice, own in facts.items())


def _name(axes: Sequence[Axis], choice: Sequence[str], parts: Sequence[Axis] | None = None) -> str:
    return ",".join(f"{axis.name}={label}" for axis, label in zip(axes, choice, strict=True)
                    if label and (parts is None or axis in parts))


def _check_starts(cells: list[Cell]) -> None:
    named = {}
    for cell in cells:
        start = (cell.setting, cell.config.task.data_seed)
        other = named.setdefault(start, cell)
        require(other is cell, f"ablation.grid: the cells {other.name} and {cell.name} have the same setting and the "
                f"same start, task.data_seed={start[1]}, and results could not tell them apart: give each its own "
                "data_seed")
