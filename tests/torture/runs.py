"""Small whole runs in processes of their own, and whether two of them ended with the same results."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from tango_jax.checkpoint import read_state
from tango_jax.config import ARMS, load_config
from tango_jax.metrics import read_metrics
from tango_jax.workdir import make_policies

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 900  # a run takes seconds; one that hangs must not hang the suite
# What a clock or the machine measured, and so may differ between two runs with the same results.
MEASURED = ("time/", "throughput/", "memory/")
# Both roles in every stage, in as few turns as have a save, an evaluation and a turn of each kind after another save.
SMALLEST = ("rl.generator_steps=4", "rl.generator_turns_per_cycle=2", "rl.warmup_steps=1", "eval.every=2")


class Outcome(NamedTuple):
    """How a process ended."""

    code: int
    stdout: str
    stderr: str


class Runs:
    """Runs of `python -m tango_jax.train --config=configs/tiny.py` that share one cache of compiled programs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._undisturbed: dict[tuple[str, ...], Path] = {}
        self.environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        self.environment |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}

    def start(self, workdir: Path, settings: tuple[str, ...] = ()) -> subprocess.Popen:
        command = [sys.executable, "-m", "tango_jax.train", "--config=configs/tiny.py", f"--workdir={workdir}"]
        command += [f"--config.{setting}" for setting in self.overrides(settings)]
        return subprocess.Popen(command, cwd=ROOT, env=self.environment, text=True, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, workdir: Path, settings: tuple[str, ...] = ()) -> Outcome:
        return finish(self.start(workdir, settings))

    def overrides(self, settings: tuple[str, ...]) -> list[str]:
        return [*SMALLEST, f"compile_cache={self.folder / 'compiled'}", *settings]

    def undisturbed(self, settings: tuple[str, ...] = ()) -> Path:
        """The workdir of a run with these settings that nothing interrupted; made when first asked for."""
        if settings not in self._undisturbed:
            workdir = self.folder / f"undisturbed_{len(self._undisturbed)}"
            outcome = self.run(workdir, settings)
            assert outcome.code == 0, f"the run that nothing disturbs failed ({settings}):\n{outcome.stderr}"
            self._undisturbed[settings] = workdir
        return self._undisturbed[settings]

    def differences(self, workdir: Path, settings: tuple[str, ...] = ()) -> list[str]:
        """What of a finished run is not as in the undisturbed one, to the bit."""
        expected = self.undisturbed(settings)
        try:
            return [*different_files(workdir, expected), *self._different_states(workdir, expected, settings)]
        except (OSError, ValueError) as error:
            return [f"results cannot be read: {error}"]

    def _different_states(self, workdir: Path, expected: Path, settings: tuple[str, ...]) -> list[str]:
        policies = make_policies(load_config(str(ROOT / "configs/tiny.py"), self.overrides(settings)))
        shapes = {role: jax.eval_shape(policy.init, np.zeros(2, np.uint32)) for role, policy in policies.items()}
        saved, wanted = (read_state(folder / "checkpoints", shapes) for folder in (workdir, expected))
        names = [name for name in ("turn", "cursor", "label_counts") if saved.meta[name] != wanted.meta[name]]
        pairs = zip(jax.tree_util.tree_leaves_with_path(saved.state), jax.tree.leaves(wanted.state), strict=True)
        return names + [
            jax.tree_util.keystr(path)
            for (path, array), other in pairs
            if np.asarray(array).tobytes() != np.asarray(other).tobytes()
        ]


def random_settings(rng: np.random.Generator) -> tuple[str, ...]:
    """An arm, and settings that change what a turn computes and when it is saved."""
    settings = [f"arm={rng.choice(list(ARMS))}", f"seed={rng.integers(100)}", f"checkpoint.every={rng.integers(1, 4)}"]
    for role in ("generator", "verifier"):
        loss = f"{role}.loss"
        settings += [
            f"{loss}.algorithm={rng.choice(['grpo', 'rloo', 'reinforce_pp'])}",
            f"{loss}.aggregation={rng.choice(['token_mean', 'seq_mean', 'seq_sum_norm'])}",
            f"{loss}.minibatches={rng.integers(1, 3)}",
            f"{loss}.kl_coef={rng.choice([0.0, 0.001])}",
            f"{role}.share_prompts={rng.choice([True, False])}",
        ]
    return tuple(settings)


def finish(process: subprocess.Popen) -> Outcome:
    """Wait for the end of a process, and kill one that hangs."""
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        stderr += f"\nkilled: it had not ended after {TIMEOUT_S} s"
    return Outcome(process.returncode, stdout, stderr)


def repeatable_rows(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl without what a clock or the machine measured."""
    return [{name: value for name, value in row.items() if not name.startswith(MEASURED)} for row in read_metrics(path)]


def different_files(workdir: Path, expected: Path) -> list[str]:
    """The files of a finished run that differ from those of another with the same settings."""
    tables = [path.relative_to(expected) for path in expected.rglob("metrics.jsonl")]
    names = [str(name) for name in tables if repeatable_rows(workdir / name) != repeatable_rows(expected / name)]
    if (workdir / "transcripts.md").read_bytes() != (expected / "transcripts.md").read_bytes():
        names.append("transcripts.md")
    dumps, wanted = ({path.name: path.read_bytes() for path in (folder / "rollouts").iterdir()}
                     for folder in (workdir, expected))
    names += [f"rollouts/{name}" for name in sorted(dumps.keys() | wanted.keys())
              if dumps.get(name) != wanted.get(name)]  # fmt: skip
    if not (workdir / "curves.png").read_bytes().startswith(b"\x89PNG"):
        names.append("curves.png")
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (workdir, expected)]
    if summaries[0] | {"wall_seconds": 0} != summaries[1] | {"wall_seconds": 0}:
        names.append("summary.json")
    return names
