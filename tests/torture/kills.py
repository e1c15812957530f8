"""Runs of random arms and settings that are killed at random moments, half of them in the middle of a save; started
again until they end, they end as runs that nothing interrupted, bit for bit.
"""

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tango_jax.method.arms import ARMS
from torture.outcome import Outcome
from torture.runs import ROLES, SMALL, TRAIN, Ended, Undisturbed, difference, finish, make_undisturbed

KILLS_PER_RUN = 25  # most of the time goes into compiling what new settings need
SAVE_S = 0.03  # about what a save of so small a state takes
SAVES = ("checkpoints", "sft/*/checkpoints", "self/*/*/sft/*/checkpoints")
SIGKILLED = -9
ADAPTERS = tuple(f"{role}.{key}" for role in ROLES for key in ("model.lora.rank=2", "sft.full=true"))
ONE_POLICY = ("verifier.adapter=generator",)
TRAINED = ((), ADAPTERS, ONE_POLICY, ADAPTERS + ONE_POLICY)  # two policies in full, or what takes their place


def kills(count: int, seed: int, folder: Path) -> Outcome:
    """`count` kills, each of a process that is starting, running, saving or finishing."""
    return killed_runs(count, seed, folder, lambda rng: (*SMALL, *random_settings(rng)))


def killed_runs(count: int, seed: int, folder: Path, settings_fn: Callable[[np.random.Generator], tuple[str, ...]],
                program: str = TRAIN) -> Outcome:
    """`settings_fn`: the overrides of a run."""
    rng, tried, survived, failures = np.random.default_rng(seed), 0, 0, []
    while tried < count:
        settings, number = settings_fn(rng), min(KILLS_PER_RUN, count - tried)
        undisturbed = make_undisturbed(folder / f"run_{tried}", settings, folder / "cache", program=program)
        problem = killed_run(undisturbed, number, rng)
        tried += number
        survived += 0 if problem else number
        failures += [f"seed {seed}, {' '.join(settings)}: {problem}"] if problem else []
    return Outcome(tried, survived, failures)


def random_settings(rng: np.random.Generator) -> tuple[str, ...]:
    """An arm, and settings that change what a turn computes and when it is saved."""
    settings = (f"arm={rng.choice(list(ARMS))}", f"seed={rng.integers(100)}", f"checkpoint.every={rng.integers(1, 4)}")
    return (*settings, *random_losses(rng), *TRAINED[rng.integers(len(TRAINED))])


def random_losses(rng: np.random.Generator) -> tuple[str, ...]:
    settings = []
    for role in ROLES:
        loss = f"{role}.loss"
        settings += [
            f"{loss}.algorithm={rng.choice(['grpo', 'rloo', 'reinforce_pp'])}",
            f"{loss}.aggregation={rng.choice(['token_mean', 'seq_mean', 'seq_sum_norm'])}",
            f"{loss}.minibatches={rng.integers(1, 3)}",
            f"{loss}.kl_coef={rng.choice([0.0, 0.001])}",
        ]
    return tuple(settings)


def killed_run(undisturbed: Undisturbed, number: int, rng: np.random.Generator) -> str:
    """Kill a run `number` times and let it end; what is wrong then, or an empty text."""
    workdir, seconds, done = undisturbed.workdir.with_name("killed"), undisturbed.seconds, 0
    while done < number:
        process, began = undisturbed.start(workdir), time.monotonic()
        if done % 2:
            wait_for_save(process, workdir, rng)
        else:
            wait_for_moment(process, rng.uniform(0, seconds))
        process.kill()
        ended = finish(process)
        if ended.code == SIGKILLED:
            done += 1
        elif ended.code == 0:  # it was over before the moment came: the machine is less busy than it was
            seconds = min(seconds, time.monotonic() - began)
            shutil.rmtree(workdir)
        else:
            return f"it ended by itself with code {ended.code}: {last_line(ended)}"
    ended = finish(undisturbed.start(workdir))
    if ended.code != 0:
        return f"after {number} kills it does not go on, code {ended.code}: {last_line(ended)}"
    problem = difference(workdir, undisturbed.workdir, undisturbed.shapes)
    if not problem:
        shutil.rmtree(workdir)
    return problem


def wait_for_moment(process: subprocess.Popen, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


def wait_for_save(process: subprocess.Popen, workdir: Path, rng: np.random.Generator) -> None:
    """Wait until the next save or the one after it has begun, and a little longer."""
    place, seen = int(rng.integers(1, 3)), set()
    while process.poll() is None and len(seen) < place:
        found = [path for folder in SAVES for path in workdir.glob(f"{folder}/*.saving*")]
        seen.update(path.with_name(path.name.split(".")[0]) for path in found)
        time.sleep(0.0005)
    time.sleep(rng.uniform(0, SAVE_S))


def last_line(ended: Ended) -> str:
    return (ended.stderr.strip().splitlines() or ["nothing was said"])[-1]
