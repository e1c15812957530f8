"""Two starts of the same command in one workdir: one of them wins, the other is refused in one line that names it, and
the run ends as one that nothing disturbed, bit for bit.
"""

import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from torture.outcome import Outcome
from torture.runs import SMALL, Ended, Undisturbed, difference, finish, make_undisturbed, start_train


def two_starts(count: int, seed: int, folder: Path) -> Outcome:
    """`count` pairs; every second pair starts at the same moment, the others at random ones."""
    rng, failures = np.random.default_rng(seed), []
    undisturbed = make_undisturbed(folder, SMALL, folder / "cache")
    for number in range(count):
        delay = 0.0 if number % 2 == 0 else float(rng.uniform(0, undisturbed.seconds))
        if problem := started_twice(undisturbed, delay):
            failures.append(f"seed {seed}, pair {number}, {delay:.1f} s apart: {problem}")
    return Outcome(count, count - len(failures), failures)


def started_twice(undisturbed: Undisturbed, delay: float) -> str:
    """Start the run, and again after `delay` seconds; what is wrong then, or an empty text."""
    workdir = undisturbed.workdir.with_name("started_twice")
    shutil.rmtree(workdir, ignore_errors=True)
    first = start_train(workdir, undisturbed.overrides)
    time.sleep(delay)
    ends = [finish(process) for process in (start_train(workdir, undisturbed.overrides), first)]
    refused = [ended for ended in ends if ended.code != 0]
    if len(refused) > 1 or not (refused or any("holds a finished run" in ended.stdout for ended in ends)):
        return f"{len(refused)} of 2 were refused: {[ended.stderr for ended in ends]}"
    if problem := problem_of_refusals(refused):
        return problem
    return difference(workdir, undisturbed.workdir, undisturbed.shapes)


def problem_of_refusals(refused: Sequence[Ended]) -> str:
    """What is wrong with how the later start ended, or an empty text."""
    for ended in refused:
        is_one_line = ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
        if not is_one_line or not re.search(r"in use by process \d+ on \S+: let it end", ended.stderr):
            return f"not a clear line: {ended.stderr}"
    return ""
