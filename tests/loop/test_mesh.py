"""One program on any number of devices and processes: meshes change no number, checkpoints move between them, and a
job that loses a process ends, says so, and goes on from its last checkpoint.

Every run here is one Tango cycle after a shared stage 1. Those of one process run in this one; those of two processes
are `python -m tango_jax.train`.
"""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from support.paths import CONFIGS, ROOT
from support.policies import policies_of
from support.processes import HANG_S, Finished, finish, free_port, wait_for
from support.xla_settings import on_devices
from tango_jax.cli.command_line import load_config
from tango_jax.loop.run import run_or_resume
from tango_jax.runtime.checkpoint import read_state
from tango_jax.runtime.console import Console
from tango_jax.runtime.hosts import PEER_LOST, PREEMPTED
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.provenance import read_provenance

pytestmark = pytest.mark.long
ROLES = ("generator", "verifier")
# What may differ: wall-clock figures, and how much of a decode batch was padding.
FREE = ("phase", "time/", "throughput/", "memory/", "generator/decode_waste", "verifier/decode_waste",
        "generator/useful_share", "verifier/useful_share")  # shards pad
# name: (data x fsdp x tensor, devices that share decoding weights)
LAYOUTS = {"one_device": ((1, 1, 1), 1), "8x1x1": ((8, 1, 1), 1), "2x2x2": ((2, 2, 2), 2), "1x4x2": ((1, 4, 2), 4)}
TWO_PROCESSES = ((1, 4, 2), 2)  # of four devices each


class MeshTrain:
    """Runs on a layout. Those of this process with equal settings share what is compiled, and processes of their own a
    cache of it."""

    def __init__(self, folder: Path):
        self.folder, self.policies = folder, {}
        self.overrides = ["generator.cache_buckets=()", "rl.warmup_steps=1", "rl.generator_steps=3"]
        self.overrides += ["rl.format_weight=0.5", "checkpoint.every=1", "checkpoint.keep=9"]
        self.overrides += [f"task.{split}_letters=(1,2)" for split in ("sft", "rl", "test")]
        for role in ROLES:
            model = ("num_layers=1", "num_heads=4", "num_kv_heads=4")
            self.overrides += [f"{role}.model.{setting}" for setting in model]
            stage_one = ("steps=200", "batch_size=12", "eval_every=100", "checkpoint_every=200")
            self.overrides += [f"{role}.sft.{setting}" for setting in (*stage_one, "optimizer.schedule=cosine")]
            self.overrides.append(f"{role}.row_buckets=(8,)")
        self.overrides += [f"compile_cache={folder / 'cache'}"]

    def settings(self, layout: tuple, offload: bool = False) -> list[str]:
        """All overrides of configs/tiny.py."""
        axes, decode_tensor = layout
        mesh = dict(zip(("data", "fsdp", "tensor"), axes, strict=True))
        mesh |= {"decode_tensor": decode_tensor, "offload": offload}
        return [*self.overrides, *(f"{role}.mesh.{name}={size}" for role in ROLES for name, size in mesh.items())]

    def run(self, name: str, workdir: Path, *overrides: str) -> None:
        """In this process."""
        offload = name == "2x2x2"  # host memory is a kind of its own on CPU devices, too
        config = load_config(str(CONFIGS / "tiny.py"), [*self.settings(LAYOUTS[name], offload), *overrides])
        key = name, *(setting for setting in overrides if ".init_from=" not in setting)
        if key not in self.policies:
            self.policies[key] = policies_of(config)
        run_or_resume(config, workdir, Console(enabled=False), self.policies[key])

    def start_two(self, workdir: Path, *overrides: str) -> list[subprocess.Popen]:
        command = [sys.executable, "-m", "tango_jax.train", "--config=configs/tiny.py", f"--workdir={workdir}"]
        # What waits in host memory is moved by programs where there are several processes: they belong to the warm-up.
        command += [f"--config.{item}" for item in [*self.settings(TWO_PROCESSES, offload=True), *overrides]]
        together = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
        return [
            subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             env=on_devices(4) | together | {"JAX_PROCESS_ID": str(number)})
            for number in range(2)
        ]

    def run_two(self, workdir: Path, *overrides: str) -> None:
        for process in [finish(process) for process in self.start_two(workdir, *overrides)]:
            assert process.code == 0, process.stderr[-3000:]


@pytest.fixture(scope="module")
def mesh_train(tmp_path_factory) -> MeshTrain:
    return MeshTrain(tmp_path_factory.mktemp("mesh"))


@pytest.fixture(scope="module")
def base(mesh_train) -> Path:
    """Stage 1 and one cycle on a single device."""
    workdir = mesh_train.folder / "one_device"
    mesh_train.run("one_device", workdir)
    return workdir


def from_base(base: Path) -> list[str]:
    return [f"{role}.init_from={base}" for role in ROLES]


@pytest.fixture(scope="module")
def laid_out(mesh_train, base):
    """(layout) -> workdir of a run of the same cycle on several devices."""

    @functools.cache
    def run(layout: str) -> Path:
        workdir = mesh_train.folder / layout
        mesh_train.run(layout, workdir, *from_base(base))
        return workdir

    return run


@pytest.fixture(scope="module")
def abstract_states(mesh_train) -> dict:
    policies = policies_of(load_config(str(CONFIGS / "tiny.py"), mesh_train.settings(LAYOUTS["one_device"])))
    return {role: policy.abstract_state() for role, policy in policies.items()}


def assert_same_run(workdir: Path, base: Path, abstract_states: dict) -> None:
    rows, expected = (read_metrics(folder / "metrics.jsonl") for folder in (workdir, base))
    assert [row["phase"] for row in rows] == [row["phase"] for row in expected]
    assert [row["phase"] for row in rows] == ["eval", "warmup", "eval", *["generator"] * 3, "eval", "verifier", "eval"]
    for row, other in zip(rows, expected, strict=True):
        kept = {name: value for name, value in row.items() if not name.startswith(FREE)}
        wanted = {name: value for name, value in other.items() if not name.startswith(FREE)}
        assert kept == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    state, wanted = (read_state(folder / "checkpoints", abstract_states) for folder in (workdir, base))
    for role in ROLES:
        for ours, theirs in zip(*(jax.tree.leaves(s.state[role].params) for s in (state, wanted)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    assert json.loads((workdir / "summary.json").read_text())["compiles_after_warmup"] == 0


def test_the_cycle_has_something_to_learn_from(base, abstract_states):
    """Else equal numbers would say nothing: rewards differ inside groups, and the parameters move."""
    turns = [row for row in read_metrics(base / "metrics.jsonl") if row["phase"] in ROLES]
    assert any(row.get("generator/groups_without_signal", 1) < 1 for row in turns)
    assert any(row.get("verifier/groups_without_signal", 1) < 1 for row in turns)
    after = read_state(base / "checkpoints", abstract_states).state
    for role in ROLES:
        start = read_state(base / "sft" / role / "checkpoints", abstract_states[role].params, part=("params",)).state
        moved = [np.abs(a - b).max() for a, b in
                 zip(jax.tree.leaves(after[role].params), jax.tree.leaves(start), strict=True)]
        assert min(moved) > 1e-4


@pytest.mark.parametrize("layout", ["8x1x1", "2x2x2"])  # the third goes on below from what the second saved
def test_a_mesh_changes_no_number(layout, laid_out, base, abstract_states):
    assert_same_run(laid_out(layout), base, abstract_states)


def test_a_mesh_changes_no_number_of_adapters(mesh_train, base, tmp_path):
    """On the parameters of stage 1; matrices are split over fsdp and tensor, decoding weights over two devices. One
    base is float32, the other int8."""
    adapters = [f"{role}.{setting}" for role in ROLES for setting in (
        "model.lora.rank=4", "sft.full=True", "optimizer.lora_lr=3e-3")]
    settings = [*from_base(base), *adapters, "verifier.model.lora.base_dtype=int8"]
    for layout in ("one_device", "2x2x2"):
        mesh_train.run(layout, tmp_path / layout, *settings)
    config = load_config(str(CONFIGS / "tiny.py"), [*mesh_train.settings(LAYOUTS["one_device"]), *settings])
    states = {role: policy.abstract_state() for role, policy in policies_of(config).items()}
    assert_same_run(tmp_path / "2x2x2", tmp_path / "one_device", states)
    after = read_state(tmp_path / "2x2x2/checkpoints", states).state
    assert all(np.abs(leaf).max() > 1e-3 for role in ROLES for leaf in jax.tree.leaves(after[role].params))


def second_turn_of(run: Path, workdir: Path, abstract_states: dict) -> Path:
    """A copy of a finished run as it was when its second turn was saved."""
    shutil.copytree(run, workdir)
    (workdir / "summary.json").unlink()
    for folder in (workdir / "checkpoints").iterdir():
        if int(folder.name) > 2:
            shutil.rmtree(folder)
    written = read_state(workdir / "checkpoints", abstract_states).meta["metrics_bytes"]
    os.truncate(workdir / "metrics.jsonl", written)
    return workdir


def test_a_checkpoint_resumes_on_another_mesh(laid_out, mesh_train, base, tmp_path, abstract_states):
    """What two processes wrote, and what they read, is part of the tests below."""
    workdir = second_turn_of(laid_out("2x2x2"), tmp_path / "run", abstract_states)
    mesh_train.run("1x4x2", workdir, *from_base(base))
    assert_same_run(workdir, base, abstract_states)


def interrupted(mesh_train, workdir: Path, base: Path, number: int, how: int) -> list[Finished]:
    """Start the cycle on two processes and send one of them a signal after a turn: how both ended."""
    processes, metrics = mesh_train.start_two(workdir, *from_base(base)), workdir / "metrics.jsonl"
    rows = len(read_metrics(metrics)) if metrics.exists() else 2  # two come before the first turn is saved
    wait_for(lambda: metrics.exists() and len(read_metrics(metrics)) > rows, "a turn is made", processes[0])
    processes[number].send_signal(how)
    return [finish(process) for process in processes]


def assert_lost(ends: list[Finished], number: int, workdir: Path) -> None:
    survivor = ends[1 - number]
    assert ends[number].code == -signal.SIGKILL
    # Either the next exchange fails and is caught, or jax aborts the process.
    assert survivor.code in (PEER_LOST, -signal.SIGABRT), survivor.stderr[-3000:]
    if survivor.code == PEER_LOST:
        assert "lost another process during Stage 2: reinforcement learning" in survivor.stderr
    else:  # the trace that the abort leaves names the function
        assert "loop/turn.py" in survivor.stderr or "loop/run.py" in survivor.stderr
    assert not (workdir / "summary.json").exists()


def test_a_lost_coordinator_ends_the_job_and_a_restart_resumes(mesh_train, laid_out, base, tmp_path, abstract_states):
    """Two processes go on from what one wrote on eight devices, and then from what they wrote themselves."""
    workdir = second_turn_of(laid_out("8x1x1"), tmp_path / "run", abstract_states)
    assert_lost(interrupted(mesh_train, workdir, base, 0, signal.SIGKILL), 0, workdir)
    mesh_train.run_two(workdir, *from_base(base))
    assert_same_run(workdir, base, abstract_states)
    attempts = read_provenance(workdir)["attempts"]  # one record a start, whatever the number of processes
    assert [attempt["processes"] for attempt in attempts] == [1, 2, 2]
    assert all(sum(attempt["devices"].values()) == 8 for attempt in attempts)
    assert attempts[-1]["command"].startswith("python -m tango_jax.train --config=configs/tiny.py")


@pytest.mark.release
def test_another_lost_process_ends_the_job_and_one_process_resumes(mesh_train, base, tmp_path, abstract_states):
    workdir = tmp_path / "run"
    assert_lost(interrupted(mesh_train, workdir, base, 1, signal.SIGKILL), 1, workdir)
    mesh_train.run("8x1x1", workdir, *from_base(base))
    assert_same_run(workdir, base, abstract_states)


def test_one_process_told_to_stop_saves_and_stops_all(mesh_train, base, tmp_path, abstract_states):
    workdir = tmp_path / "run"
    ends = interrupted(mesh_train, workdir, base, 1, signal.SIGTERM)
    assert [end.code for end in ends] == [PREEMPTED] * 2, ends[0].stderr[-3000:]
    assert f"saved; the same command resumes in {workdir}" in ends[0].stdout
    saved = max(int(folder.name) for folder in (workdir / "checkpoints").iterdir())
    assert saved == read_metrics(workdir / "metrics.jsonl")[-1]["step"]
    mesh_train.run("one_device", workdir, *from_base(base))
    assert_same_run(workdir, base, abstract_states)


def test_processes_that_are_only_half_described_are_an_error():
    environment = os.environ | {"JAX_NUM_PROCESSES": "2"}
    command = [sys.executable, "-m", "tango_jax.train", "--config=configs/tiny.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "error: JAX_NUM_PROCESSES is set, but JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID is not: set all three or none"
    )
