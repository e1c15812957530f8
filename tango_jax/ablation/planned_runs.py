"""What an experiment consists of: every stage 1 and every run, with its folder.

A run is in DIR/<cell>/<arm>/seed_<n>, its stage 1 in DIR/stage_one/<name>/sft; without a grid in DIR/<arm>/seed_<n>,
and DIR/sft.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tango_jax.ablation.grid import Cell, make_cells, stage_one_facts
from tango_jax.cli.config_file import stored_config
from tango_jax.cli.validation import validate
from tango_jax.config import ROLES, default_config
from tango_jax.loop.best import check_trains_best
from tango_jax.loop.init_from import UNTRAINED, check_init_from, sft_directory
from tango_jax.method.load import stage_one_kind
from tango_jax.method.own_arm import arm_name, load_arm, read_arm
from tango_jax.runtime import hosts
from tango_jax.runtime.checkpoint import peek_meta
from tango_jax.runtime.checks import Mistakes, differences, require
from tango_jax.tracking.provenance import check_method
from tango_jax.tracking.results import is_finished
from tango_jax.tracking.run_config import ANY_PLACE, check_config
from tango_jax.weights.workdir import has_two_policies


@dataclasses.dataclass(frozen=True)
class StageOne:
    folder: Path
    config: ConfigDict

    @property
    def roles(self) -> list[str]:
        return [role for role in ROLES if self.config[role].sft.steps and not self.config[role].init_from]

    def is_finished(self) -> bool:
        found = {role: peek_meta(sft_directory(self.folder, role) / "checkpoints") for role in self.roles}
        return all(one is not None and (one.step >= self.config[role].sft.steps or one.meta.get(UNTRAINED))
                   for role, one in found.items())


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    cell: Cell
    arm: str  # its name; config.arm has that of its file, too
    seed: int
    folder: Path
    config: ConfigDict
    stage_one: StageOne | None

    @property
    def name(self) -> str:
        return "/".join(part for part in (self.cell.name, self.arm, f"seed_{self.seed}") if part)

    def is_finished(self) -> bool:
        return is_finished(self.folder)


@dataclasses.dataclass(frozen=True)
class Plan:
    config: ConfigDict
    workdir: Path
    cells: list[Cell]
    runs: list[PlannedRun]  # in the order in which they are made

    @property
    def may_change(self) -> tuple[str, ...]:
        """Keys that a stage 1 in the experiment's folder stores with another value: `arm`, if no run has it."""
        own = self.config.ablation
        return () if own.grid or self.config.arm in own.arms else ("arm",)

    def unfinished(self) -> list[PlannedRun]:
        is_finished = hosts.from_first([run.is_finished() for run in self.runs])
        return [run for run, is_done in zip(self.runs, is_finished, strict=True) if not is_done]


def stage_ones_of(runs: Sequence[PlannedRun]) -> list[StageOne]:
    return list({run.stage_one.folder: run.stage_one for run in runs if run.stage_one}.values())


def make_plan(config: ConfigDict, workdir: Path) -> Plan:
    """Runs are ordered by seed: an interrupted experiment has whole comparisons. Raises ValueError for a mistake in the
    grid, or in the settings of a cell."""
    cells = make_cells(config)
    for cell in cells:
        _validate(cell)
    stage_ones, runs = {}, []
    for seeds in itertools.zip_longest(*(cell.config.ablation.seeds for cell in cells)):
        for cell, seed in zip(cells, seeds, strict=True):
            if seed is not None:
                runs += [_planned(cell, arm, seed, workdir, stage_ones) for arm in cell.config.ablation.arms]
    return Plan(config, workdir, cells, runs)


def check_plan(plan: Plan) -> None:
    """Check the folders of the runs and the starts of the cells. All processes must call this. Raises ValueError for
    runs with other settings or another method, and for an unusable checkpoint."""
    check_config(plan.config, plan.workdir / "config.json", plan.may_change)
    for run in plan.runs:
        if (run.folder / "metrics.jsonl").exists():
            check_config(run.config, run.folder / "config.json", may_move=ANY_PLACE)
            check_method(run.config, run.folder)
    for cell in plan.cells:
        for arm in cell.config.ablation.arms:
            check_init_from(_of_a_run(cell.config, arm, cell.config.seed))


def _validate(cell: Cell) -> None:
    config, mistakes = cell.config.copy_and_resolve_references(), Mistakes()
    place, asked = _place(cell), tuple(config.ablation.arms) or (config.arm,)
    for arm in asked:
        config.arm = arm
        with mistakes.collected(place and f"{place}{f', arm {arm}' * (arm != asked[0])}: "):
            validate(config)
            check_trains_best(config)
        mistakes.raise_all()
    check_pairs(cell, asked)


def _place(cell: Cell) -> str:
    return f"ablation.grid, cell {cell.name}" if cell.name else ""


def check_pairs(cell: Cell, asked: Sequence[str], stored: Mapping[str, Mapping[str, Any]] = {}) -> None:
    """Raise ValueError for arms whose roles start from different weights in a cell. `stored`: by name, the record of an
    arm of `asked` that is known from a table alone."""
    place = _place(cell)
    # By the kinds of the generator's start and the verifier's. An arm without a verifier goes with any other.
    groups: dict[tuple[str, ...], list[str]] = {}
    kinds: dict[str, tuple[str, ...]] = {}
    for arm in asked:
        record = read_arm(stored[arm]) if arm in stored else load_arm(arm)
        kinds[arm] = tuple(_start_kind(cell, stored.get(arm, arm), role) for role in ROLES[: 1 + record.uses_verifier])
    for arm, kind in sorted(kinds.items(), key=lambda item: -len(item[1])):
        groups.setdefault(next((key for key in groups if key[: len(kind)] == kind), kind), []).append(arm)
    found = sorted((sorted(arms, key=asked.index) for arms in groups.values()), key=lambda arms: asked.index(arms[0]))
    axis = {"stage_one": {arm_name(arms[0]): {"ablation.arms": tuple(arms)} for arms in found}}
    is_one = any("one_policy" in kind for key in groups for kind in key)
    differ = "start from different weights" if is_one else "learn different texts in stage 1"
    require(len(found) <= 1, f"{place and f'{place}: '}ablation.arms: {' and '.join(arms[0] for arms in found)} "
            f"{differ}, so their runs are no pairs: add the axis {axis} to ablation.grid, and compare them with "
            "--figures and --against")


def _start_kind(cell: Cell, arm: str | Mapping[str, Any], role: str) -> str:
    """Arms in which a role starts from the same weights have the same kind."""
    generator, verifier = (cell.config[name] for name in ROLES)
    kind = stage_one_kind(cell.config, arm, (role,)).split(",")
    # One policy's generator goes on with the verifier's stage 1, and its verifier starts where its generator does.
    differs = bool(verifier.sft.steps or verifier.init_from)
    if role == "verifier":
        differs |= bool(generator.sft.steps or generator.init_from) or not generator.checkpoint
        differs |= generator.adapter != verifier.adapter or has_two_policies(generator.checkpoint)
    further = [name for name in kind if name != "one_policy" and cell.stage_one is not None]
    return ",".join(["one_policy"] * (differs and "one_policy" in kind) + further)


def _planned(cell: Cell, arm: str, seed: int, workdir: Path, stage_ones: dict[str, StageOne]) -> PlannedRun:
    config, stage_one = _of_a_run(cell.config, arm, seed), None
    if cell.stage_one is not None:
        stage_name = ",".join(filter(None, (cell.stage_one, stage_one_kind(cell.config, arm))))
        if stage_name not in stage_ones:
            stage_ones[stage_name] = _stage_one(cell, arm, stage_name, workdir)
        stage_one = stage_ones[stage_name]
    for role in stage_one.roles if stage_one else ():
        config[role].init_from = str(stage_one.folder)
    name = arm_name(arm)
    return PlannedRun(cell, name, seed, workdir / cell.name / name / f"seed_{seed}", config, stage_one)


def _of_a_run(config: ConfigDict, arm: str, seed: int) -> ConfigDict:
    run = config.copy_and_resolve_references()
    run.arm, run.seed, run.ablation, run.compare_with = arm, seed, default_config().ablation, ""
    return run


def _stage_one(cell: Cell, arm: str, name: str, workdir: Path) -> StageOne:
    """A stage 1 with its stored settings, since another cell may have begun it. Raises ValueError if those that it
    depends on have changed."""
    # Of config.arm it may be another, if the experiment does not have that arm.
    is_own_kind = name != cell.stage_one or bool(stage_one_kind(cell.config, cell.config.arm))
    if not is_own_kind and cell.config.arm in cell.config.ablation.arms:
        arm = cell.config.arm  # the same one if the order of the arms changes
    if not cell.config.ablation.grid and not is_own_kind:
        config = cell.config.copy_and_resolve_references()
        config.arm = arm
        return StageOne(workdir, config)
    folder, config = workdir / "stage_one" / name, _of_a_run(cell.config, arm, cell.config.seed)
    path = folder / "config.json"
    if not path.exists() or not any(folder.glob("sft/*/metrics.jsonl")):
        return StageOne(folder, config)
    stored = stored_config(str(path))
    then, now = stage_one_facts(stored) or {}, stage_one_facts(config)
    if changed := differences(then, now):
        raise ValueError(f"{folder} holds a stage 1 with other settings ({'; '.join(changed[:5])}): resume with the "
                         "same ones, or choose another --workdir")
    return StageOne(folder, stored)
