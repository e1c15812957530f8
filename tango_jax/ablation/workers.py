"""Several runs at a time, each in a process of its own with its share of the CPU cores.

A job is an ordinary command, `python -m tango_jax.train --config=FOLDER/config.json --workdir=FOLDER`, which anybody
can repeat: it stands at the top of its log, FOLDER/train.log. XLA and BLAS start as many threads as there are cores
that their process may use, so that runs which are confined to a core each do not disturb one another.
"""

import contextlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

import tango_jax
from tango_jax.runtime import hosts
from tango_jax.runtime.console import Console, Stage
from tango_jax.runtime.termination import PARENT_VARIABLE
from tango_jax.tracking.run_config import keep_config

POLL_S = 0.5
TAIL_BYTES = 2**16  # in which the last line of a file is looked for


class Job(NamedTuple):
    """A command that works in a folder of its own."""

    name: str
    command: str  # a module of tango_jax
    config: ConfigDict
    folder: Path
    steps: Mapping[Path, int]  # metrics.jsonl -> the `step` of its last row when the job is finished
    is_finished: bool = False  # by an earlier start: it only counts

    @property
    def log(self) -> Path:
        return self.folder / f"{self.command}.log"

    @property
    def total(self) -> int:
        return sum(self.steps.values())

    def done(self) -> int:
        """Steps made by now."""
        return sum(min(int(_last_row(path).get("step", 0)), most) for path, most in self.steps.items())


class _Child(NamedTuple):
    job: Job
    process: subprocess.Popen


def run_jobs(
    title: str, jobs: Sequence[Job], workers: int, console: Console, preemption: hosts.Preemption,
    done_fn: Callable[[], object] = lambda: None,
) -> dict[str, str]:
    """Run the jobs, `workers` at a time, in their order. Returns {name of a failed job: the last line of its log}.

    A job that fails does not end the others. `done_fn` is called after every job that succeeded.

    Raises:
        Preempted: SIGTERM was received. It and Ctrl-C (KeyboardInterrupt) are passed on as SIGTERM: the children save
            and end before this returns.
    """
    waiting = [job for job in jobs if not job.is_finished]
    if not waiting:
        return {}
    failed, children, cores = {}, {}, cores_of_workers(workers)
    finished = sum(job.total for job in jobs if job.is_finished)
    # SIGTERM is noted, and passed on.
    with preemption.held(), console.stage(title, sum(job.total for job in jobs), finished) as stage:
        shown = _Shown(stage, finished)
        try:
            while waiting or children:
                for worker in [worker for worker in range(workers) if worker not in children][: len(waiting)]:
                    children[worker] = _start(waiting.pop(0), cores[worker])
                    shown.update(children.values(), is_changed=True)
                for worker, child in [item for item in children.items() if item[1].process.poll() is not None]:
                    del children[worker]
                    shown.ended += child.job.done()
                    if problem := _problem(child):
                        failed[child.job.name] = f"{problem} ({child.job.log})"
                        console.log(f"{child.job.name} failed: {failed[child.job.name]}")
                    else:
                        done_fn()
                if preemption.is_due():
                    raise hosts.Preempted
                shown.update(children.values())
                time.sleep(POLL_S)
        finally:
            _stop(children.values(), console)
    return failed


def cores_of_workers(workers: int) -> list[set[int] | None]:
    """The cores that each worker may use: equal shares of those of this process, or one in turn if they are fewer.

    None where the system does not tell.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [None] * workers
    cores = sorted(os.sched_getaffinity(0))
    if workers > len(cores):
        return [{cores[worker % len(cores)]} for worker in range(workers)]
    ends = [len(cores) * worker // workers for worker in range(workers + 1)]
    return [set(cores[first:last]) for first, last in itertools.pairwise(ends)]


def _start(job: Job, cores: set[int] | None) -> _Child:
    """Start a job in a session of its own, which a terminal's Ctrl-C does not reach."""
    settings = job.folder / "config.json"
    keep_config(job.config, settings)
    command = [sys.executable, "-m", f"tango_jax.{job.command}", f"--config={settings}", f"--workdir={job.folder}"]
    package = str(Path(tango_jax.__file__).parents[1])  # which the child finds, whatever folder it is started in
    paths = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {PARENT_VARIABLE: str(os.getpid()), "PYTHONPATH": paths}
    with open(job.log, "ab") as log, _confined_to(cores):
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} $ {shlex.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                   env=environment, start_new_session=True)  # fmt: skip
    return _Child(job, process)


@contextlib.contextmanager
def _confined_to(cores: set[int] | None) -> Iterator[None]:
    """Confine this thread to the cores for a moment: a process that it starts inherits that before it has threads."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _problem(child: _Child) -> str:
    """What went wrong with a child that has ended; empty: nothing."""
    code = child.process.returncode
    if code == 0:
        return ""
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + " (is there enough memory?)" * (name == "SIGKILL")
    lines = [line.strip() for line in _tail(child.job.log).decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"ended with code {code}"


def _stop(children: Iterable[_Child], console: Console) -> None:
    """Tell the children to save, and wait until they have. A second Ctrl-C kills them."""
    left = [child for child in children if child.process.poll() is None]
    if not left:
        return
    console.log(f"waiting for {', '.join(child.job.name for child in left)} to save")
    for child in left:
        child.process.terminate()
    try:
        for child in left:
            child.process.wait()
    except KeyboardInterrupt:
        for child in left:
            child.process.kill()
        raise


class _Shown:
    """The progress of all jobs, as a stage of the console shows it."""

    def __init__(self, stage: Stage, ended: int):
        self.ended = ended  # steps of the jobs that have ended
        self._stage, self._shown = stage, ended

    def update(self, children: Iterable[_Child], is_changed: bool = False) -> None:
        done = [(child.job, child.job.done()) for child in children]
        made = max(self.ended + sum(steps for _, steps in done) - self._shown, 0)  # a resumed job may fall back
        if made or is_changed:
            self._stage.advance(made, running=", ".join(f"{job.name} {steps}/{job.total}" for job, steps in done))
            self._shown += made


def _last_row(path: Path) -> dict:
    """The last whole row of a metrics.jsonl; empty if there is none."""
    *_, last, _ = b"\n", *_tail(path).split(b"\n")
    try:
        return json.loads(last)
    except ValueError:
        return {}


def _tail(path: Path) -> bytes:
    """The last TAIL_BYTES of a file; empty if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
            return file.read()
    except OSError:
        return b""
