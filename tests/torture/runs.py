"""The smallest run that has everything a run can have, and whether two of them ended alike.

Two steps of stage 1 for each role with a checkpoint in between, a step of the verifier's warm-up, two turns of each
role, evaluations between them and a checkpoint after every turn.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from support.paths import CONFIGS, ROOT, TESTS
from support.policies import policies_of
from support.processes import HANG_S
from support.xla_settings import on_devices
from tango_jax.cli.command_line import load_config
from tango_jax.runtime.checkpoint import read_state
from tango_jax.runtime.trees import tree_fingerprint
from tango_jax.tracking.metrics import read_metrics

ROLES = ("generator", "verifier")
TRAIN = "tango_jax.train"
METRICS = ("metrics.jsonl", "sft/generator/metrics.jsonl", "sft/verifier/metrics.jsonl")

_OF_A_ROLE = (
    "sft.steps=2", "sft.batch_size=2", "sft.eval_every=1", "sft.eval_examples=2", "sft.checkpoint_every=1",
    "row_buckets=(4,)", "cache_buckets=()", "model.num_layers=1", "model.width=16", "model.mlp_width=16",
    "model.num_heads=1",
)
SMALL = (
    *(f"{role}.{setting}" for role in ROLES for setting in _OF_A_ROLE),
    "rl.prompts_per_step=2", "rl.generator_steps=2", "rl.generator_turns_per_cycle=1", "rl.warmup_steps=1",
    "checkpoint.every=1", "eval.problems=2", "eval.pool=2", "eval.every=1",
    *(f"task.{split}_words=(1,1)" for split in ("sft", "rl", "verifier", "test")),
)


class Ended(NamedTuple):
    """How a process ended."""

    code: int
    stdout: str
    stderr: str


def environment() -> dict[str, str]:
    """One device of the CPU, and this checkout, wherever the process starts."""
    return on_devices(1) | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"}


def start_train(workdir: Path, overrides: tuple[str, ...], program: str = TRAIN, more: tuple[str, ...] = ()
                ) -> subprocess.Popen:
    """`python -m tango_jax.train --config=configs/tiny.py` in a process of its own.

    Args:
        program: another module that takes these arguments.
        more: arguments of that module.
    """
    command = [sys.executable, "-m", program, "--config=configs/tiny.py", f"--workdir={workdir}", *more]
    return subprocess.Popen([*command, *(f"--config.{item}" for item in overrides)], cwd=ROOT, env=environment(),
                            text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen) -> Ended:
    """Wait for the end of a process, and kill one that hangs."""
    try:
        stdout, stderr = process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        stderr += f"\nkilled: it had not ended after {HANG_S} s"
    return Ended(process.returncode, stdout, stderr)


class Undisturbed(NamedTuple):
    """A run to the end without any trouble."""

    overrides: tuple[str, ...]  # of configs/tiny.py, the cache of compiled programs among them
    workdir: Path
    seconds: float  # that it takes where all is compiled
    shapes: dict  # of what its checkpoints hold
    program: str  # as in start_train

    def start(self, workdir: Path, *more: str) -> subprocess.Popen:
        return start_train(workdir, self.overrides, self.program, more)


def make_undisturbed(
    folder: Path, overrides: tuple[str, ...], cache: Path, is_compiled: bool = False, program: str = TRAIN
) -> Undisturbed:
    """Make the run in `folder`; what it compiles stays in `cache`, unless that has all of it already."""
    overrides, workdir = (*overrides, f"compile_cache={cache}"), folder / "undisturbed"
    for place in (workdir,) if is_compiled else (workdir.with_name("compiling"), workdir):
        began = time.monotonic()
        ended = finish(start_train(place, overrides, program))
        assert ended.code == 0, f"the run that nothing disturbs failed ({' '.join(overrides)}):\n{ended.stderr}"
        seconds = time.monotonic() - began
    policies = policies_of(load_config(str(CONFIGS / "tiny.py"), list(overrides)))
    return Undisturbed(overrides, workdir, seconds, shapes_of(policies), program)


def difference(workdir: Path, expected: Path, abstract_states: dict) -> str:
    """What a finished run has otherwise than one that nothing disturbed, clocks apart; empty if nothing."""
    for name in METRICS:
        if _repeatable_rows(workdir / name) != _repeatable_rows(expected / name):
            return f"{name} differs"
    if (workdir / "transcripts.md").read_bytes() != (expected / "transcripts.md").read_bytes():
        return "transcripts.md differs"
    if not (workdir / "curves.png").read_bytes().startswith(b"\x89PNG"):
        return "curves.png is no picture"
    for part in ("rollouts", "self"):
        written, wanted = (_texts(folder / part) for folder in (workdir, expected))
        if written != wanted:
            names = sorted(name for name in written.keys() | wanted if written.get(name) != wanted.get(name))
            return f"{part} differ: {', '.join(names)}"
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (workdir, expected)]
    if summaries[0] | {"wall_seconds": 0} != summaries[1] | {"wall_seconds": 0}:
        return f"summary.json differs: {summaries}"
    saved = [read_state(folder / "checkpoints", abstract_states) for folder in (workdir, expected)]
    if saved[0].step != saved[1].step or tree_fingerprint(saved[0].state) != tree_fingerprint(saved[1].state):
        return f"the checkpoints of steps {saved[0].step} and {saved[1].step} differ"
    left = [path.name for path in workdir.rglob("*") if path.suffix in (".partial", ".saving", ".replaced", ".removed")]
    return f"left behind: {left}" if left else ""


def _texts(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.json*")}


def _repeatable_rows(path: Path) -> list[dict]:
    """The rows without what a clock or the system measured; none where there is no such stage."""
    rows = read_metrics(path) if path.exists() else []
    return [
        {name: value for name, value in row.items() if not name.startswith(("time/", "throughput/", "memory/"))}
        for row in rows
    ]


def shapes_of(policies: dict) -> dict:
    """What a checkpoint of stage 2 holds, for `difference`."""
    own = {role: policy for role, policy in policies.items() if policy.roles[0] == role}  # each state is saved once
    states = {role: jax.eval_shape(policy.init, np.zeros(2, np.uint32)) for role, policy in own.items()}
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), states)  # on one device
