"""SIGTERM at any moment of a run, from its first millisecond on: exit code 75 without a traceback, and the same command
then goes on; in the end the run is as one that nothing disturbed, bit for bit.

A run is told to stop again and again until an attempt reaches its end before the signal. An attempt that begins late in
the run is shorter than the first; so signals come at a random moment of what is left.
"""

import shutil
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tango_jax.runtime.termination import PREEMPTED
from torture.outcome import Outcome
from torture.runs import SMALL, Undisturbed, difference, finish, make_undisturbed, start_train


class Attempt(NamedTuple):
    """How one start of the command ended."""

    code: int
    stderr: str
    was_stopped: bool  # whether it was still there to get the signal
    was_watching: bool  # whether it had come as far as the package's first line by then


def terms(count: int, seed: int, folder: Path) -> Outcome:
    """`count` signals, each to a process that is starting, running or finishing."""
    rng, sent, survived, failures = np.random.default_rng(seed), 0, 0, []
    undisturbed = make_undisturbed(folder, SMALL, folder / "cache")
    while sent < count:
        number, problem = stopped_run(undisturbed, count - sent, rng)
        sent += number
        survived += number - bool(problem)
        failures += [f"seed {seed}, signal {sent}: {problem}"] if problem else []
    return Outcome(sent, survived, failures)


def stopped_run(undisturbed: Undisturbed, most: int, rng: np.random.Generator) -> tuple[int, str]:
    """Stop a run at most so many times, until it ends or something is wrong: (signals sent, what is wrong)."""
    workdir, sent = undisturbed.workdir.with_name("stopped"), 0
    shutil.rmtree(workdir, ignore_errors=True)
    while True:
        delay = float(rng.uniform(0, undisturbed.seconds)) if sent < most else None
        attempt = one_attempt(workdir, undisturbed.overrides, delay)
        sent += attempt.was_stopped
        if problem := problem_of(attempt):
            return sent, f"after {delay} s: {problem}"
        if attempt.code == 0:
            return sent, difference(workdir, undisturbed.workdir, undisturbed.shapes)


def one_attempt(workdir: Path, overrides: tuple[str, ...], delay: float | None) -> Attempt:
    """Start the command, and after `delay` seconds tell it to stop; None: let it end."""
    process = start_train(workdir, overrides)
    was_stopped = was_watching = False
    if delay is not None:
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            was_stopped, was_watching = True, is_watching(process.pid)
            process.send_signal(signal.SIGTERM)
    ended = finish(process)
    return Attempt(ended.code, ended.stderr, was_stopped, was_watching)


def problem_of(attempt: Attempt) -> str:
    """What is wrong with an end; empty if nothing is."""
    if "Traceback" in attempt.stderr or "Exception ignored" in attempt.stderr:
        return f"a traceback: {attempt.stderr[-1500:]}"
    if attempt.code in (0, PREEMPTED):
        return ""
    # The interpreter has not run a line of the package yet: nothing can be saved, and launchers start it again as well.
    if attempt.code == -signal.SIGTERM and not attempt.was_watching:
        return ""
    return f"exit code {attempt.code}: {attempt.stderr[-1500:]}"


def is_watching(pid: int) -> bool:
    """Whether the process catches SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1]
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)
