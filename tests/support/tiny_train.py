"""`configs/tiny.py` at the settings of the tests that look at whole runs."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from support.paths import ROOT
from support.processes import Finished, finish
from support.xla_settings import on_devices
from tango_jax.runtime import hosts
from tango_jax.tracking.metrics import read_metrics

LAST_TURN = 10  # 2 of the warm-up, 6 generator steps, a verifier turn after each 3 of them


def repeatable_rows(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl without what a clock measured."""
    return [
        {name: value for name, value in row.items() if not name.startswith(("time/", "throughput/", "memory/"))}
        for row in read_metrics(path)
    ]


class TinyTrain:
    """`python -m tango_jax.train --config=configs/tiny.py` in processes of its own, with one compile cache for all."""

    def __init__(self, compile_cache: Path):
        # Short words and a stage 1 long enough for tags and steps: rewards differ, every part of a turn has something
        # to do. Its learning rate ends at zero: on other processors the parameters then agree to six digits.
        stage_one = ("steps=200", "batch_size=12", "eval_every=20", "checkpoint_every=50", "optimizer.schedule=cosine")
        self.overrides = [f"{role}.sft.{setting}" for role in ("generator", "verifier") for setting in stage_one]
        self.overrides += [f"task.{split}_letters=(1,2)" for split in ("sft", "rl", "test")]
        # One layer, and one shape of everything that is sampled: each process of a run that is interrupted traces all.
        # (tests/loop/test_relatives.py has runs with several.)
        self.overrides += ["generator.cache_buckets=()", "generator.row_buckets=(8,)", "verifier.row_buckets=(8,)"]
        self.overrides += ["generator.model.num_layers=1", "verifier.model.num_layers=1"]
        self.overrides += ["rl.format_weight=0.5", f"compile_cache={compile_cache}"]
        self.environment = on_devices(1)

    def start(self, workdir: Path, *overrides: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "tango_jax.train", "--config=configs/tiny.py", f"--workdir={workdir}"]
        command += [f"--config.{item}" for item in [*self.overrides, *overrides]]
        return subprocess.Popen(command, cwd=ROOT, env=self.environment, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE)

    def run(self, workdir: Path, *overrides: str) -> Finished:
        return finish(self.start(workdir, *overrides))


class TinyRun(NamedTuple):
    """The run that nothing interrupted."""

    workdir: Path
    stdout: str


class StopAfter(hosts.Preemption):
    """As if SIGTERM came during a turn."""

    def __init__(self, turns: int):
        super().__init__(is_watching=False)
        self.left = turns

    def is_due(self) -> bool:
        self.left -= 1
        return self.left < 0


class StopAtRow(hosts.Preemption):
    """As if SIGTERM came once a run has written this row of metrics.jsonl, or a later one."""

    def __init__(self, workdir: Path, step: int, phase: str = ""):
        super().__init__(is_watching=False)
        self.path, self.step, self.phase = workdir / "metrics.jsonl", step, phase

    def is_due(self) -> bool:
        rows = read_metrics(self.path) if self.path.exists() else []
        return bool(rows) and rows[-1]["step"] >= self.step and rows[-1]["phase"].startswith(self.phase)
