"""Runs of random arms and settings that are killed at random moments, half of them in the middle of a save."""

import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
from torture.runs import Outcome, Runs, finish, random_settings

KILLS_PER_RUN = 10  # most of the time goes into compiling what settings need that no run had before
SIGKILLED = -9


def kills(count: int = 100, seed: int = 0, folder: Path = Path("torture")) -> tuple[int, int, list[str]]:
    """(kills tried, kills survived, what went wrong): each run is started again until it ends, and must end like one
    that nothing interrupted."""
    rng, runs = np.random.default_rng(seed), Runs(folder)
    tried, survived, failures = 0, 0, []
    while tried < count:
        settings = random_settings(rng)
        number = min(KILLS_PER_RUN, count - tried)
        problems = killed_run(runs, settings, number, rng)
        tried += number
        survived += 0 if problems else number
        failures += [f"{' '.join(settings)}: {problem}" for problem in problems]
    return tried, survived, failures


def killed_run(runs: Runs, settings: tuple[str, ...], number: int, rng: np.random.Generator) -> list[str]:
    """Kill a run `number` times, let it end, and tell how its results differ."""
    began = time.monotonic()
    expected = runs.undisturbed(settings)
    duration, workdir = time.monotonic() - began, runs.folder / "killed"
    shutil.rmtree(workdir, ignore_errors=True)
    done = 0
    while done < number:
        process = runs.start(workdir, settings)
        wait = wait_for_save if done % 2 else wait_for_moment
        wait(process, workdir, duration, rng)
        process.kill()
        outcome = finish(process)
        if outcome.code == SIGKILLED:
            done += 1
        elif outcome.code == 0:  # the moment came after the end: once more from the start
            shutil.rmtree(workdir)
        else:
            return [f"ended with code {outcome.code} before it was killed: {last_line(outcome)}"]
    outcome = runs.run(workdir, settings)
    if outcome.code != 0:
        return [f"did not go on after {number} kills, code {outcome.code}: {last_line(outcome)}"]
    leftovers = [path.name for path in workdir.rglob("*") if path.suffix in (".saving", ".partial", ".replaced")]
    differences = [f"differs from {expected.name}: {name}" for name in runs.differences(workdir, settings)]
    return differences + [f"left behind: {name}" for name in leftovers]


def wait_for_moment(process: subprocess.Popen, workdir: Path, duration: float, rng: np.random.Generator) -> None:
    deadline = time.monotonic() + rng.uniform(0, duration)
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


def wait_for_save(process: subprocess.Popen, workdir: Path, duration: float, rng: np.random.Generator) -> None:
    """Wait until one of the next saves has begun, and a little longer."""
    skipped, seen = int(rng.integers(0, 4)), set()
    while process.poll() is None and len(seen) <= skipped:
        seen |= {path for path in saves_under_way(workdir)}
        time.sleep(0.0005)
    time.sleep(rng.uniform(0, 0.03))  # about as long as a save of so small a state takes


def saves_under_way(workdir: Path) -> list[Path]:
    parents = (workdir / "checkpoints", *(workdir / "sft" / role / "checkpoints" for role in ("generator", "verifier")))
    return [path for parent in parents for path in parent.glob("*.saving")]


def last_line(outcome: Outcome) -> str:
    return (outcome.stderr.strip().splitlines() or ["nothing was said"])[-1]
