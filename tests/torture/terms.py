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
from torture.outcome import Outcome
from torture.runs import SMALL, difference, finish, make_undisturbed, policies_of, shapes_of, start_train

from tango_jax.termination import PREEMPTED


class Attempt(NamedTuple):
    """How one start of the command ended."""

    code: int
    stderr: str
    was_watching: bool  # whether the process had come as far as the package's first line when it got the signal


def terms(count: int, seed: int, folder: Path, overrides: tuple[str, ...] = SMALL) -> Outcome:
    """`count` signals, each to a process that is starting, running or finishing."""
    overrides = (*overrides, f"compile_cache={folder / 'cache'}")
    expected, rng, failures, survived, runs = folder / "undisturbed", np.random.default_rng(seed), [], 0, 0
    make_undisturbed(expected, overrides)  # compiles
    shutil.rmtree(expected)
    length, shapes = make_undisturbed(expected, overrides), shapes_of(policies_of(overrides))
    sent = 0
    while sent < count:
        workdir, problem, is_over = folder / f"run_{runs}", "", False
        runs += 1
        while not is_over and not problem:
            delay = float(rng.uniform(0, length)) if sent < count else None
            attempt = one_attempt(workdir, overrides, delay)
            is_over = attempt.code == 0
            problem = problem_of(attempt) or (difference(workdir, expected, shapes) if is_over else "")
            sent += delay is not None
            survived += delay is not None and not problem
            if problem:
                failures.append(f"seed {seed}, signal {sent} after {delay} of {length:.1f} s, run {runs}: {problem}")
        if not problem:
            shutil.rmtree(workdir)
    return Outcome(sent, survived, failures)


def one_attempt(workdir: Path, overrides: tuple[str, ...], delay: float | None) -> Attempt:
    """Start the command, and after `delay` seconds tell it to stop; None: let it end."""
    process = start_train(workdir, overrides)
    was_watching = True
    if delay is not None:
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            was_watching = is_watching(process.pid)
            process.send_signal(signal.SIGTERM)
    ended = finish(process)
    return Attempt(ended.code, ended.stderr, was_watching)


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
