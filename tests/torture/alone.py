"""Runs whose models learn the format from their own samples (task.stage_one=self), killed like others.

A run's process is this module's. It is `tango_jax.train` with a tiny random model that samples; of its samples, most
are then written anew, since it would never keep to the format itself. They name what was sampled, so that a run in
which that differs ends otherwise.
"""

import fnmatch
import hashlib
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from support.own_problems import write_problems
from support.own_samples import Response, response
from support.tiny_checkpoints import write_tiny_folder
from tango_jax import train
from tango_jax.loop import self_sampling
from tango_jax.text.prompts import OWN
from torture.kills import TRAINED, killed_runs, random_losses
from torture.outcome import Outcome
from torture.runs import ROLES

PROGRAM = "torture.alone"
KILL = "--kill="  # a pattern of paths: the process kills itself just before such a path gets its file or folder
PART = 4  # problems of a file of samples

_OF_A_ROLE = (
    "sft.steps=2", "sft.batch_size=2", "sft.eval_every=1", "sft.eval_examples=2", "sft.checkpoint_every=1",
    "sft.rows_per_micro_batch=2", "sft.pack_length=900", "max_prompt=600", "max_response=250", "row_buckets=(16,)",
    "cache_buckets=()",
)


def kills_alone(count: int, seed: int, folder: Path) -> Outcome:
    """As `kills`, with stage 1 of the run's own samples."""
    small = small_settings(folder)
    return killed_runs(count, seed, folder, lambda rng: (*small, *random_settings(rng)), PROGRAM)


def random_settings(rng: np.random.Generator) -> tuple[str, ...]:
    return (f"seed={rng.integers(100)}", *random_losses(rng), *TRAINED[rng.integers(len(TRAINED))])


def small_settings(folder: Path) -> tuple[str, ...]:
    """Two rounds of the generator's, one of the verifier's, a step of its warm-up, and a turn of each role."""
    folder.mkdir(parents=True, exist_ok=True)
    model, problems = write_tiny_folder(folder / "model"), write_problems(folder / "sums.jsonl", count=12)
    return (
        *(f"{role}.{setting}" for role in ROLES for setting in (*_OF_A_ROLE, f"checkpoint={model}")),
        "task.name=math", f"task.train={problems}", "task.stage_one=self", "task.validation=2", "task.min_steps=2",
        "self.problems=8", "self.samples=4", "self.keep=2", "self.rounds=3",
        "rl.prompts_per_step=2", "rl.samples_per_prompt=2", "rl.generator_steps=1", "rl.warmup_steps=1",
        "rl.generator_turns_per_cycle=1", "checkpoint.every=1", "eval.problems=2", "eval.pool=2", "eval.every=1",
    )


# --------------------------------------------------------------------------------------------- inside the run's process


def main(argv: list[str]) -> None:
    patterns = [argument.removeprefix(KILL) for argument in argv if argument.startswith(KILL)]
    for pattern in patterns:
        kill_before(pattern)
    argv = [argument for argument in argv if not argument.startswith(KILL)]
    workdir = next(argument.partition("=")[2] for argument in argv if argument.startswith("--workdir="))
    self_sampling.PART, self_sampling.respond = PART, Rewriting(Path(workdir), self_sampling.respond)
    train.main(argv)


def kill_before(pattern: str) -> None:
    def hear(event: str, arguments: tuple) -> None:
        if event == "os.rename" and fnmatch.fnmatch(str(arguments[1]), pattern):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hear)


class Rewriting:
    """Samples, and writes the responses anew: more are well formed with each training, which the files of kept rows
    count, so that a process that is started again goes on alike."""

    def __init__(self, workdir: Path, respond):
        self.workdir, self.respond = workdir, respond

    def __call__(self, context, states, role, parents, group_size, key_data, prompt):
        sampled = self.respond(context, states, role, parents, group_size, key_data, prompt=prompt).records
        trainings = len(list((self.workdir / "self" / role).glob("kept_*.jsonl")))
        is_plain = prompt is OWN[role]
        formed = 2 * (trainings + (role == "verifier")) + (not is_plain)  # of 4
        records = []
        for place, one in enumerate(sampled):
            number = place % group_size
            is_right = role == "verifier" or (place // group_size + number) % 4 < 3
            mark = hashlib.sha256(one.text.encode()).hexdigest()[:8]
            more = "" if is_plain else "\n\nProblem:\nWhat"  # examples are gone on with
            made = Response(place % 4 < formed, is_right, mark, more)
            records.append(response(context, parents[place // group_size], made))
        return SimpleNamespace(records=records)


if __name__ == "__main__":
    main(sys.argv[1:])
