"""Runs of random arms and settings that are killed at random moments, half of them in the middle of a save; started
again until they end, they end as runs that nothing interrupted, bit for bit.
"""

import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
from torture.outcome import Outcome
from torture.runs import (
    ROLES,
    SMALL,
    Ended,
    difference,
    finish,
    make_undisturbed,
    policies_of,
    shapes_of,
    start_train,
)

from tango_jax.config import ARMS

KILLS_PER_RUN = 10  # most of the time goes into compiling what new settings need
SAVE_S = 0.03  # about what a save of so small a state takes
SIGKILLED = -9


def kills(count: int, seed: int, folder: Path) -> Outcome:
    """`count` kills, each of a process that is starting, running, saving or finishing."""
    rng, tried, survived, failures = np.random.default_rng(seed), 0, 0, []
    while tried < count:
        overrides = (*SMALL, *random_settings(rng))
        number = min(KILLS_PER_RUN, count - tried)
        problem = killed_run(folder / f"run_{tried}", folder / "cache", overrides, number, rng)
        tried += number
        survived += 0 if problem else number
        failures += [f"seed {seed}, {' '.join(overrides[len(SMALL):])}: {problem}"] if problem else []
    return Outcome(tried, survived, failures)


def random_settings(rng: np.random.Generator) -> tuple[str, ...]:
    """An arm, and settings that change what a turn computes and when it is saved."""
    settings = [f"arm={rng.choice(list(ARMS))}", f"seed={rng.integers(100)}", f"checkpoint.every={rng.integers(1, 4)}"]
    for role in ROLES:
        loss = f"{role}.loss"
        settings += [
            f"{loss}.algorithm={rng.choice(['grpo', 'rloo', 'reinforce_pp'])}",
            f"{loss}.aggregation={rng.choice(['token_mean', 'seq_mean', 'seq_sum_norm'])}",
            f"{loss}.minibatches={rng.integers(1, 3)}",
            f"{loss}.kl_coef={rng.choice([0.0, 0.001])}",
            f"{role}.share_prompts={rng.choice([True, False])}",
        ]
    return tuple(settings)


def killed_run(folder: Path, cache: Path, overrides: tuple[str, ...], number: int, rng: np.random.Generator) -> str:
    """Kill a run `number` times and let it end; what is wrong then, or an empty text."""
    overrides = (*overrides, f"compile_cache={cache}")
    expected, workdir, done = folder / "undisturbed", folder / "killed", 0
    seconds = make_undisturbed(expected, overrides)
    while done < number:
        process = start_train(workdir, overrides)
        # Compiling, which only the undisturbed run had to do, is a large part of its time.
        wait_for_save(process, workdir, rng) if done % 2 else wait_for_moment(process, rng.uniform(0, seconds / 2))
        process.kill()
        ended = finish(process)
        if ended.code == SIGKILLED:
            done += 1
        elif ended.code == 0:  # it was over before the moment came
            shutil.rmtree(workdir)
        else:
            return f"it ended by itself with code {ended.code}: {last_line(ended)}"
    ended = finish(start_train(workdir, overrides))
    if ended.code != 0:
        return f"after {number} kills it does not go on, code {ended.code}: {last_line(ended)}"
    problem = difference(workdir, expected, shapes_of(policies_of(overrides)))
    if not problem:
        shutil.rmtree(folder)
    return problem


def wait_for_moment(process: subprocess.Popen, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


def wait_for_save(process: subprocess.Popen, workdir: Path, rng: np.random.Generator) -> None:
    """Wait until one of the next saves has begun, and a little longer."""
    place, seen = int(rng.integers(1, 5)), set()
    while process.poll() is None and len(seen) < place:
        seen.update(workdir.glob("checkpoints/*.saving"), workdir.glob("sft/*/checkpoints/*.saving"))
        time.sleep(0.0005)
    time.sleep(rng.uniform(0, SAVE_S))


def last_line(ended: Ended) -> str:
    return (ended.stderr.strip().splitlines() or ["nothing was said"])[-1]
