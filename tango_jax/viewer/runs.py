"""Finds the runs of a report: settings, metrics and place of every run in the given folders."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tango_jax.method.own_arm import arm_name
from tango_jax.runtime.checks import local_path, read_json_object
from tango_jax.runtime.failures import typed_command
from tango_jax.tasks.self_text import SELF
from tango_jax.tracking.metrics import TURN_PHASES, read_metrics
from tango_jax.tracking.provenance import read_provenance


class Run(NamedTuple):
    """A run as it is on disk now; it may still be in progress."""

    name: str  # unique: the folder, relative to the common parent of all runs
    workdir: Path
    settings: dict  # config.json: {"rl.gamma": 0.8, ...}
    rows: list[dict]  # metrics.jsonl
    is_finished: bool
    provenance: dict = {}  # provenance.json; empty if there is none
    start: dict = {}  # of a finished run: {role or "problems": digest} (loop/resume.py fingerprints_of)

    @property
    def arm(self) -> str:
        return arm_name(self.settings["arm"])

    @property
    def turns_made(self) -> int:
        """Of both roles; the last turn's number is higher where the warm-up ended early."""
        return sum(row["phase"] in TURN_PHASES for row in self.rows)

    @property
    def rollouts(self) -> Path:
        return self.workdir / "rollouts"


def find_runs(folders: Sequence[str | os.PathLike]) -> list[Run]:
    """`folders`: workdirs, or folders of several. Raises ValueError if one has none."""
    workdirs = []
    for folder in folders:
        settings = local_path("run", folder).resolve().rglob("config.json")
        found = sorted(path.parent for path in settings if (path.parent / "metrics.jsonl").exists())
        if not found:
            raise ValueError(f"{folder} holds no run with metrics (config.json and metrics.jsonl): give the --workdir "
                             f"of {typed_command('train')}, once its first turn is done, or of "
                             f"{typed_command('ablate')}")
        workdirs += [workdir for workdir in found if workdir not in workdirs]
    common = workdirs[0].parent if len(workdirs) == 1 else Path(os.path.commonpath(workdirs))
    return [_read_run(workdir, workdir.relative_to(common)) for workdir in workdirs]


def own_samples(workdir: Path, settings: Mapping[str, Any]) -> list[str]:
    """A line on each role's stage 1 of its own samples (loop/self_stage_one.py), if it had one."""
    lines = []
    for path in sorted((workdir / SELF).glob("*/rounds.json")):
        balanced = ", as many of right as of wrong solutions" * (path.parent.name == "verifier")
        stored = read_json_object(path, "leave this run out, or restore the file")
        first, *rounds = stored["rounds"]
        told = "".join(
            f"; round {row['round']}: {row['samples']} samples, {row['well_formed_share']:.0%} well formed up "
            f"to the closing tag and {row['kept_share']:.0%} kept (right and well formed, at most "
            f"self.keep={settings[f'{SELF}.keep']} of a prompt{balanced})"
            + (f"; after it, {row['plain_share']:.0%} of the whole plain ones" if "plain_share" in row else "")
            for row in rounds)
        result = f"it starts from round {stored['result']}" if stored["result"] else "it has no stage 1"
        lines.append(f"stage 1 of the {path.parent.name} by its own samples: before it, {first['plain_share']:.0%} of "
                     f"its responses to the plain prompt were well formed{told}; {result}")
    return lines


def _read_run(workdir: Path, place: Path) -> Run:
    name = workdir.name if place == Path() else place.as_posix()  # a run's workdir may be the parent of the others
    path = workdir / "config.json"
    settings = read_json_object(path, "leave this run out, or restore the file")
    metrics = workdir / "metrics.jsonl"
    leave_out = "it is no run of this project, or damaged: leave it out"
    if not isinstance(settings.get("arm"), str):
        raise ValueError(f"{path} holds no settings with an arm; {leave_out}")
    rows = read_metrics(metrics)
    for index, row in enumerate(rows, 1):
        if not (isinstance(row, dict) and isinstance(row.get("phase"), str) and isinstance(row.get("step"), int)):
            raise ValueError(f"{metrics}, row {index} lacks a phase or a step; {leave_out}")
    path = workdir / "summary.json"
    start = read_json_object(path, leave_out).get("provenance", {}).get("start", {}) if path.exists() else {}
    return Run(name, workdir, settings, rows, path.exists(), read_provenance(workdir), start)
