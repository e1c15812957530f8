"""The log of a run: metrics.jsonl, the alarms, and, where the config asks, TensorBoard and Weights & Biases.

In: flat records of scalars, as MetricsWriter takes them. Out: a line of metrics.jsonl with `alarm/<name>` added, the
same names in the other loggers, and alarms on the console. Stage: the end of every step; the first process alone.

metrics.jsonl is the truth and the others follow it, row by row in its order. A killed run leaves them with too few rows
(what they had not sent yet) or too many (turns after the last checkpoint, which are made again). So at its start a run
hands them all rows that it kept, and each leaves out what it has already. The same fills in the rows of before for a
logger that is switched on later.
"""

import importlib.util
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ml_collections import ConfigDict

from tango_jax.config import flatten
from tango_jax.grading import FAILURES
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import write_atomically
from tango_jax.runtime.console import Console
from tango_jax.tracking import alarms
from tango_jax.tracking.metrics import MetricsWriter, make_row, read_metrics
from tango_jax.tracking.run_config import keep_config

# Config key -> (module, what pip installs); imported only where they are asked for.
PACKAGES = {"tensorboard": ("tensorboardX", "tensorboardX>=2.6,<3"), "wandb": ("wandb", "wandb>=0.31,<1")}


def check_installed(loggers: ConfigDict) -> None:
    """ValueError if a logger is asked for whose package is not there, with the command that installs it."""
    for key, (module, requirement) in PACKAGES.items():
        if not loggers[key]:
            continue
        found = importlib.util.find_spec(module)
        # W&B leaves a folder `wandb` behind, which Python takes for a package without files.
        if found is None or found.origin is None:
            raise ValueError(
                f"loggers.{key}={loggers[key]} needs the package {module}: pip install '{requirement}', or switch the "
                "logger off"
            )


class Follower(Protocol):
    """A logger beside metrics.jsonl."""

    name: str

    def write(self, index: int, row: dict[str, Any]) -> None:
        """Log the row with this index in metrics.jsonl, unless it is there."""

    def flush(self) -> None:
        """Send or store what was written, as far as that can be asked for."""

    def close(self, has_failed: bool) -> None:
        """End, noting whether the run ended with an error."""


class RunLog:
    """MetricsWriter for a whole run, with its interface. In every process but the first it does nothing."""

    def __init__(
        self, directory: Path, config: ConfigDict, console: Console, resume_at: int, stage: str = "rl",
        settings_file: Path | None = None,
    ):  # fmt: skip
        """Open <directory>/metrics.jsonl, cut to `resume_at` bytes, and bring all that follows it to the same row.

        `settings_file` (by default <directory>/config.json) gets the config together with the first row or position:
        a start that comes to nothing must not bind the next one to its settings.

        Raises:
            ValueError: the file is not as the checkpoint says, or Weights & Biases refuses.
        """
        self._writer = MetricsWriter(directory / "metrics.jsonl", resume_at, enabled=hosts.is_first())
        self._limits, self._console, self._followers = config.alarms, console, []
        self._config, self._settings_file = config, settings_file or directory / "config.json"
        self._has_begun = False
        if not hosts.is_first():
            return
        rows = read_metrics(directory / "metrics.jsonl")
        self._num_rows = len(rows)
        self._turns = [row for row in rows if row["phase"] in alarms.TURN_PHASES]
        self._ringing = alarms.ringing_at(self._turns[-1]) if self._turns else frozenset()
        if config.loggers.tensorboard:
            self._followers.append(_TensorBoard(directory))
        if config.loggers.wandb:
            self._followers.append(_WeightsAndBiases(directory, config, console, stage))
        for index, row in enumerate(rows):
            self._follow(index, row)
        if self._ringing:
            console.log(f"alarms that go on from before: {', '.join(sorted(self._ringing))}")

    def write(self, step: int, phase: str, metrics: dict[str, Any]) -> None:
        """Write one row everywhere; that of a turn is judged first."""
        if not hosts.is_first():
            return
        row = make_row(step, phase, metrics)
        if phase in alarms.TURN_PHASES:
            row = self._judge(row)
        elif failed := {name: row[f"grader/eval_{name}"] for name in FAILURES if row.get(f"grader/eval_{name}")}:
            counts = ", ".join(f"{count} {name}" for name, count in failed.items())
            self._console.log(f"warning: the evaluation after turn {step} counts answers as wrong that the grader "
                              f"could not judge: {counts}")
        self._begin()
        self._writer.append(row)
        self._follow(self._num_rows, row)
        self._num_rows += 1

    def _begin(self) -> None:
        if not self._has_begun:
            keep_config(self._config, self._settings_file)
            self._has_begun = True

    def _judge(self, row: dict) -> dict:
        """The row with its alarms; says which of them start or end with it."""
        found = alarms.check([*self._turns, row], self._limits, self._ringing)
        row |= alarms.as_metrics(found)
        self._turns.append(row)
        for line in alarms.messages(self._ringing, self._turns, found):
            self._console.log(line)
        self._ringing = alarms.ringing_at(row)
        return row

    def position(self) -> int:
        """Bytes of metrics.jsonl, forced to disk, for the checkpoint."""
        if hosts.is_first():
            self._begin()
        self._each(lambda follower: follower.flush())
        return self._writer.position()

    def close(self, has_failed: bool = False) -> None:
        """Close everything; a second call does nothing.

        Raises:
            ValueError: metrics.jsonl was removed or changed since the last checkpoint, which nobody would notice later.
        """
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

    def _each(self, call: Callable[[Follower], None]) -> None:
        """Call every follower. One that fails is left behind: it must not end hours of training."""
        for follower in list(self._followers):
            try:
                call(follower)
            except Exception as error:  # whatever a library raises when its service dies or its disk is full
                self._followers.remove(follower)
                self._console.log(
                    f"warning: logging to {follower.name} failed and is off now ({type(error).__name__}: {error}); "
                    "metrics.jsonl goes on, and a resumed run catches up from there"
                )


class _TensorBoard:
    """Event files, made anew from the first row whenever a run starts: rows are never missing there, nor twice."""

    name = "TensorBoard"

    def __init__(self, directory: Path):
        from tensorboardX import SummaryWriter

        folder = directory / "tensorboard"
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        # A TensorBoard that is looking on forgets what it read before, from this step on.
        self._writer = SummaryWriter(str(folder), purge_step=0, flush_secs=20)

    def write(self, index: int, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if name != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, row["step"])

    def flush(self) -> None:
        self._writer.flush()

    def close(self, has_failed: bool) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """One W&B run for the run's whole life; its id is kept in the folder.

    W&B takes every step once, in rising order, and two rows share a turn where an evaluation follows it. So W&B's own
    step is the number of the row, and `step`, the turn, is the x axis of all charts. Offline there is nothing to
    resume: each start writes a folder with all rows, and the newest one is the one to sync.
    """

    name = "W&B"

    def __init__(self, directory: Path, config: ConfigDict, console: Console, stage: str):
        import wandb

        id_file = directory / "wandb_id.txt"
        if not id_file.exists():
            write_atomically(id_file, f"{uuid.uuid4().hex[:12]}\n")
        name = f"{config.task.name} {config.arm} seed {config.seed}"
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
        self._next_row = self._run.starting_step  # `step` is 0 until the first row is logged, also when resumed
        folder = Path(self._run.dir).parent
        console.log(f"W&B: {f'offline in {folder}' if self._run.offline else self._run.url or 'disabled'}")

    def write(self, index: int, row: dict[str, Any]) -> None:
        if index < self._next_row:
            return
        self._run.log({name: value for name, value in row.items() if value is not None}, step=index, commit=True)

    def flush(self) -> None:
        pass  # it sends in the background; what a kill keeps from it is sent again at the next start

    def close(self, has_failed: bool) -> None:
        self._run.finish(exit_code=int(has_failed))
