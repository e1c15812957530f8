"""Parallel runs, each in a process with its share of the CPU cores.

Each job's command, `python -m tango_jax.train --config=FOLDER/config.json --workdir=FOLDER`, stands at the top of its
log, FOLDER/train.log.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

import tango_jax
from tango_jax.runtime import hosts
from tango_jax.runtime.console import Console
from tango_jax.runtime.termination import PARENT_VARIABLE
from tango_jax.tracking.run_config import keep_config

POLL_S = 0.5


class Job(NamedTuple):
    name: str
    command: str  # a module of tango_jax
    config: ConfigDict
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / f"{self.command}.log"


class _Child(NamedTuple):
    job: Job
    process: subprocess.Popen


def run_jobs(
    title: str, jobs: Sequence[Job], workers: int, console: Console, preemption: hosts.Preemption,
    done_fn: Callable[[], object] = lambda: None,
) -> dict[str, str]:
    """Run the jobs in order, `workers` at a time. Returns {name of a failed job: the last line of its log}.

    `done_fn` is called after every job that succeeded. SIGTERM (Preempted) and Ctrl-C are passed on as SIGTERM: the
    children save and end before this returns.
    """
    if not jobs:
        return {}
    waiting, failed, children = list(jobs), {}, {}
    with preemption.held(), console.stage(title, len(jobs)) as stage:
        try:
            while waiting or children:
                for worker in [worker for worker in range(workers) if worker not in children][: len(waiting)]:
                    children[worker] = _start(waiting.pop(0), cores_of(worker, workers))
                    stage.advance(0, running=", ".join(child.job.name for child in children.values()))
                for worker, child in [item for item in children.items() if item[1].process.poll() is not None]:
                    del children[worker]
                    stage.advance(1, running=", ".join(other.job.name for other in children.values()))
                    if problem := _problem(child):
                        failed[child.job.name] = f"{problem} ({child.job.log})"
                        console.log(f"{child.job.name} failed: {failed[child.job.name]}")
                    else:
                        done_fn()
                if preemption.is_due():
                    raise hosts.Preempted
                time.sleep(POLL_S)
        finally:
            _stop(children.values(), console)
    return failed


def cores_of(worker: int, workers: int) -> set[int]:
    """A worker's share of the cores of this process: XLA and BLAS start as many threads. Empty: not known."""
    if not hasattr(os, "sched_getaffinity"):
        return set()
    cores = sorted(os.sched_getaffinity(0))
    if workers > len(cores):
        return {cores[worker % len(cores)]}
    return set(cores[len(cores) * worker // workers : len(cores) * (worker + 1) // workers])


def _start(job: Job, cores: set[int]) -> _Child:
    """In a session that a terminal's Ctrl-C does not reach."""
    settings = job.folder / "config.json"
    keep_config(job.config, settings)
    command = [sys.executable, "-m", f"tango_jax.{job.command}", f"--config={settings}", f"--workdir={job.folder}"]
    package = str(Path(tango_jax.__file__).parents[1])  # the child finds it from any folder
    paths = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {PARENT_VARIABLE: str(os.getpid()), "PYTHONPATH": paths}
    with open(job.log, "ab") as log:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} $ {shlex.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                   env=environment, start_new_session=True)
    if cores:
        os.sched_setaffinity(process.pid, cores)  # before the process imports what starts threads
    return _Child(job, process)


def _problem(child: _Child) -> str:
    code = child.process.returncode
    if code == 0:
        return ""
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + " (is there enough memory?)" * (name == "SIGKILL")
    lines = [line.strip() for line in child.job.log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1]


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
