"""Two starts of the same command in one workdir: one of them must win, and the other must leave it alone."""

import shutil
import time
from pathlib import Path

import numpy as np
from torture.runs import Runs, finish


def two_starts(count: int = 10, seed: int = 0, folder: Path = Path("torture")) -> tuple[int, int, list[str]]:
    """(tried, survived, what went wrong): every second pair starts at the same moment, the others at random ones."""
    rng, runs = np.random.default_rng(seed), Runs(folder)
    began = time.monotonic()
    runs.undisturbed()
    duration, failures, survived = time.monotonic() - began, [], 0
    for number in range(count):
        problems = started_twice(runs, 0.0 if number % 2 == 0 else rng.uniform(0, 0.8 * duration))
        survived += not problems
        failures += problems
    return count, survived, failures


def started_twice(runs: Runs, delay_s: float) -> list[str]:
    workdir = runs.folder / "started_twice"
    shutil.rmtree(workdir, ignore_errors=True)
    first = runs.start(workdir)
    time.sleep(delay_s)
    over_already = first.poll() is not None
    outcomes = [finish(process) for process in (runs.start(workdir), first)]
    if over_already:  # the second one finds a finished run and says so
        refused = []
    else:
        refused = [outcome for outcome in outcomes if outcome.code not in (0,)]
        if len(refused) != 1 and not any("finished run" in outcome.stdout for outcome in outcomes):
            return [f"{len(refused)} of two starts {delay_s:.1f} s apart were refused, not one"]
    problems = [
        f"{delay_s:.1f} s apart: the refusal was not one line: {outcome.stderr.strip()}"
        for outcome in refused
        if outcome.stderr.count("error: ") != 1 or "Traceback" in outcome.stderr or "pid" not in outcome.stderr
    ]
    return problems + [f"{delay_s:.1f} s apart: differs: {name}" for name in runs.differences(workdir)]
