"""The log of a run: metrics.jsonl with its alarms, and optionally TensorBoard and Weights & Biases.

metrics.jsonl is the source of truth. After a kill the other loggers may have too few rows or too many: each start
replays all rows, and each logger skips those that it has.
"""

import importlib.util
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tango_jax.config import flatten
from tango_jax.grading import FAILURES
from tango_jax.method.own_arm import arm_name
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import write_atomically
from tango_jax.runtime.console import Console
from tango_jax.tracking import alarms
from tango_jax.tracking.metrics import TURN_PHASES, MetricsWriter, make_row, read_metrics
from tango_jax.tracking.provenance import Provenance
from tango_jax.tracking.run_config import keep_config

PACKAGES = {"tensorboard": ("tensorboardX", "tensorboardX>=2.6,<3"), "wandb": ("wandb", "wandb>=0.31,<1")}
SHARED_WITH_TURNS = ("generator_step", "time/", "memory/")  # beginnings of names in rows of all phases
# Ends of names of what may be sampled in turns of both roles, about other problems.
SAMPLED_FOR_BOTH = ("/length_mean", "/length_max", "/truncation_rate", "/tokens_sampled", "/tokens_scored",
                    "/decode_waste", "/prompts_shortened", "/shortened_rate", "/labelled_right", "/label_accuracy")


def check_installed(loggers: ConfigDict) -> None:
    """Raises ValueError, with the install command, if the package of a requested logger is missing."""
    for key, (module, requirement) in PACKAGES.items():
        if not loggers[key]:
            continue
        found = importlib.util.find_spec(module)
        # W&B creates a folder named `wandb`, which Python treats as a namespace package without files.
        if found is None or found.origin is None:
            raise ValueError(
                f"loggers.{key}={loggers[key]} needs the package {module}: pip install '{requirement}', or switch the "
                "logger off"
            )


class RunLog:
    """The log of a run, or of a role's stage 1. It does nothing except in the first process."""

    def __init__(
        self, directory: Path, config: ConfigDict, console: Console, resume_at: int, stage: str = "rl",
        settings_file: Path | None = None, provenance: Provenance | None = None,
    ):
        """Truncates metrics.jsonl to `resume_at` bytes. Raises ValueError if it does not match the checkpoint, or
        Weights & Biases does not start."""
        self._console, self._followers = console, []
        self._config, self._settings_file = config, settings_file or directory / "config.json"
        self._provenance, self._has_begun = provenance, False
        if not hosts.is_first():
            return
        self._writer = MetricsWriter(directory / "metrics.jsonl", resume_at)
        rows = read_metrics(directory / "metrics.jsonl")
        self._num_rows = len(rows)
        self._turns = [row for row in rows if row["phase"] in TURN_PHASES]
        self._ringing = alarms.ringing_at(self._turns[-1]) if self._turns else frozenset()
        if config.loggers.tensorboard:
            self._followers.append(_TensorBoard(directory))
        if config.loggers.wandb:
            self._followers.append(_WeightsAndBiases(directory, config, console, stage))
        for index, row in enumerate(rows):
            self._follow(index, row)
        if self._ringing:
            console.log(f"alarms still active from before: {', '.join(sorted(self._ringing))}")

    def write(self, step: int, phase: str, metrics: dict[str, Any]) -> None:
        if not hosts.is_first():
            return
        row = make_row(step, phase, metrics)
        if phase in TURN_PHASES:
            row = self._judge(row)
        elif failed := {name: row[f"grader/eval_{name}"] for name in FAILURES if row.get(f"grader/eval_{name}")}:
            counts = ", ".join(f"{count} {name}" for name, count in failed.items())
            self._console.log(f"warning: the grader could not judge some answers of the evaluation after turn {step}; "
                              f"they count as wrong: {counts}")
        self._begin()
        self._writer.append(row)
        self._follow(self._num_rows, row)
        self._num_rows += 1

    def _begin(self) -> None:
        """Store the settings with the first row: a run that fails earlier does not bind the next one to them."""
        if not self._has_begun:
            if self._provenance is not None:
                self._provenance.keep(self._settings_file.parent)
            keep_config(self._config, self._settings_file)
            self._has_begun = True

    def _judge(self, row: dict) -> dict:
        found = alarms.check([*self._turns, row], self._ringing)
        row |= alarms.as_metrics(found, self._ringing)
        self._turns.append(row)
        for line in alarms.messages(self._ringing, self._turns, found):
            self._console.log(line)
        self._ringing = alarms.ringing_at(row)
        return row

    def position(self) -> int:
        """Bytes of metrics.jsonl, after an fsync, for the checkpoint."""
        if not hosts.is_first():
            return 0
        self._begin()
        return self._writer.position()

    def close(self, has_failed: bool = False) -> None:
        """Raises ValueError if metrics.jsonl was changed since the last checkpoint. A second call does nothing."""
        if not hosts.is_first() or self._writer.is_closed:
            return
        try:
            if not has_failed:
                self._writer.position()
        finally:
            self._writer.close()
            self._each(lambda follower: follower.close(has_failed))
            self._followers = []

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind, *exception) -> None:
        self.close(has_failed=kind is not None)

    def _follow(self, index: int, row: dict) -> None:
        self._each(lambda follower: follower.write(index, row))

    def _each(self, call: Callable[[Any], None]) -> None:
        """Call every other logger. One that fails is dropped: it must not end hours of training."""
        for follower in list(self._followers):
            try:
                call(follower)
            except Exception as error:  # a library raises anything if its service is down or the disk is full
                self._followers.remove(follower)
                self._console.log(
                    f"warning: logging to {follower.name} failed and is now off ({type(error).__name__}: {error}); "
                    "metrics.jsonl is still written, and a resumed run catches up from it"
                )


def _names_apart(row: dict[str, Any]) -> dict[str, Any]:
    """Loggers draw one curve for each name, so what is measured on other problems gets another name: eval/ before
    what turns also log, and generator_turn/ or verifier_turn/ before lengths and the like of responses to all prompts
    but the trained role's own, which turns of both roles may sample."""
    if row["phase"] in TURN_PHASES:
        trained = "generator" if row["phase"] == "generator" else "verifier"
        return {f"{trained}_turn/{name}" if _is_apart(name, trained) else name: value for name, value in row.items()}
    if row["phase"] != "eval":
        return row
    return {f"eval/{name}" if name.startswith(SHARED_WITH_TURNS) else name: value for name, value in row.items()}


def _is_apart(name: str, trained: str) -> bool:
    if name.startswith("grader/"):
        return trained == "verifier"
    return name.endswith(SAMPLED_FOR_BOTH) and not name.startswith(f"{trained}/")


class _TensorBoard:
    name = "TensorBoard"

    def __init__(self, directory: Path):
        from tensorboardX import SummaryWriter

        folder = directory / "tensorboard"
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = SummaryWriter(str(folder), purge_step=0, flush_secs=5)

    def write(self, index: int, row: dict[str, Any]) -> None:
        for name, value in _names_apart(row).items():
            if name != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, row["step"])

    def close(self, has_failed: bool) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """One W&B run, whose id is stored in the workdir.

    W&B logs each step once, but a turn and its evaluation share a turn number: the W&B step is the row index, and
    `step`, the turn, is the x axis. Offline, each start writes a new folder with all rows: sync the newest.
    """

    name = "W&B"

    def __init__(self, directory: Path, config: ConfigDict, console: Console, stage: str):
        import wandb

        id_file = directory / "wandb_id.txt"
        if not id_file.exists():
            write_atomically(id_file, f"{uuid.uuid4().hex[:12]}\n")
        name = f"{config.task.name} {arm_name(config.arm)} seed {config.seed}"
        try:
            self._run = wandb.init(
                project=config.loggers.wandb,
                id=id_file.read_text().strip(),
                resume="allow",
                dir=str(directory),
                name=name if stage == "rl" else f"{name} {stage}",
                job_type=stage,
                config=json.loads(json.dumps(flatten(config), default=list)),
                settings=wandb.Settings(console="off", silent=True),
            )
        except (wandb.Error, OSError) as error:
            raise ValueError(
                f"loggers.wandb={config.loggers.wandb}: W&B did not start ({' '.join(str(error).split())}): run `wandb "
                "login`, or set WANDB_MODE=offline, or switch the logger off"
            ) from error
        self._run.define_metric("*", step_metric="step")
        self._next_row = self._run.starting_step
        folder = Path(self._run.dir).parent
        console.log(f"W&B: {f'offline in {folder}' if self._run.offline else self._run.url or 'disabled'}")

    def write(self, index: int, row: dict[str, Any]) -> None:
        if index >= self._next_row:
            logged = {name: value for name, value in _names_apart(row).items() if value is not None}
            self._run.log(logged, step=index, commit=True)

    def close(self, has_failed: bool) -> None:
        self._run.finish(exit_code=int(has_failed))
