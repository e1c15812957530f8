"""Two starts of the same command in one workdir: one of them wins, the other is refused in one line that names it, and
the run ends as one that nothing disturbed, bit for bit.
"""

import re
import shutil
import time
from pathlib import Path

import numpy as np
from torture.outcome import Outcome
from torture.runs import SMALL, difference, finish, make_undisturbed, policies_of, shapes_of, start_train


def two_starts(count: int, seed: int, folder: Path) -> Outcome:
    """`count` pairs; every second pair starts at the same moment, the others at random ones."""
    rng, failures = np.random.default_rng(seed), []
    overrides = (*SMALL, f"compile_cache={folder / 'cache'}")
    expected, workdir = folder / "undisturbed", folder / "started_twice"
    make_undisturbed(expected, overrides)  # compiles
    shutil.rmtree(expected)
    seconds, shapes = make_undisturbed(expected, overrides), shapes_of(policies_of(overrides))
    for number in range(count):
        delay = 0.0 if number % 2 == 0 else float(rng.uniform(0, 0.8 * seconds))
        problem = started_twice(workdir, overrides, delay) or difference(workdir, expected, shapes)
        if problem:
            failures.append(f"seed {seed}, pair {number}, {delay:.1f} s apart: {problem}")
        shutil.rmtree(workdir)
    return Outcome(count, count - len(failures), failures)


def started_twice(workdir: Path, overrides: tuple[str, ...], delay: float) -> str:
    """What is wrong with how the two ended, or an empty text."""
    first = start_train(workdir, overrides)
    time.sleep(delay)
    ends = [finish(process) for process in (start_train(workdir, overrides), first)]
    refused = [ended for ended in ends if ended.code != 0]
    if not refused and any("holds a finished run" in ended.stdout for ended in ends):
        return ""  # the second one came when all was done
    if len(refused) != 1:
        return f"{len(refused)} of 2 were refused: {[ended.stderr for ended in ends]}"
    error = refused[0].stderr
    is_one_line = error.startswith("error: ") and error.count("\n") == 1
    return "" if is_one_line and re.search(r"process \d+ on \S+, since", error) else f"not a clear line: {error}"
