"""One program on any number of devices and processes: meshes change no number, checkpoints move between them, and a
job that loses a process ends, says so, and goes on from its last checkpoint.

Every run here is `python -m tango_jax.train` in processes of its own: one Tango cycle after a shared stage 1.
"""

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from support.paths import ROOT
from support.processes import HANG_S, Finished, finish, wait_for
from support.quick_compile import on_devices
from tango_jax.cli.command_line import load_config
from tango_jax.rl.policy import make_policies
from tango_jax.runtime.checkpoint import read_state
from tango_jax.runtime.hosts import PEER_LOST, PREEMPTED
from tango_jax.tracking.metrics import read_metrics

ROLES = ("generator", "verifier")
HEARTBEAT_S = 10
# What may differ: wall-clock figures, and how much of a decode batch was padding.
FREE = ("phase", "time/", "throughput/", "memory/", "generator/decode_waste", "verifier/decode_waste")
# name: (processes, devices of each, data x fsdp x tensor, devices that share decoding weights)
LAYOUTS = {
    "one_device": (1, 1, (1, 1, 1), 1),
    "8x1x1": (1, 8, (8, 1, 1), 1),
    "2x2x2": (1, 8, (2, 2, 2), 2),
    "1x4x2": (1, 8, (1, 4, 2), 4),
    "two_processes": (2, 4, (1, 4, 2), 2),
}


class MeshTrain:
    """Starts runs on a layout; all share one compile cache."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.overrides = ["generator.cache_buckets=()", "rl.warmup_steps=1", "rl.generator_steps=3"]
        self.overrides += ["rl.format_weight=0.5", "checkpoint.every=1", "checkpoint.keep=9", "transcripts=1"]
        self.overrides += [f"task.{split}_letters=(1,2)" for split in ("sft", "rl", "test")]
        for role in ROLES:
            model = ("num_layers=1", "num_heads=4", "num_kv_heads=4", "head_dim=8")
            self.overrides += [f"{role}.model.{setting}" for setting in model]
            stage_one = ("steps=200", "batch_size=12", "eval_every=100", "checkpoint_every=200")
            self.overrides += [f"{role}.sft.{setting}" for setting in (*stage_one, "optimizer.schedule=cosine")]
            self.overrides.append(f"{role}.row_buckets=(8,)")
        self.overrides += [f"compile_cache={folder / 'cache'}", f"distributed.heartbeat_s={HEARTBEAT_S}"]

    def start(self, layout: str, workdir: Path, *overrides: str) -> list[subprocess.Popen]:
        processes, devices, axes, decode_tensor = LAYOUTS[layout]
        mesh = dict(zip(("data", "fsdp", "tensor"), axes, strict=True)) | {"decode_tensor": decode_tensor}
        mesh["offload"] = layout == "2x2x2"  # host memory is a kind of its own on CPU devices, too
        overrides = [*overrides, *(f"{role}.mesh.{name}={size}" for role in ROLES for name, size in mesh.items())]
        command = [sys.executable, "-m", "tango_jax.train", "--config=configs/tiny.py", f"--workdir={workdir}"]
        command += [f"--config.{item}" for item in [*self.overrides, *overrides]]
        environment = on_devices(devices)
        if processes > 1:
            environment |= {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": str(processes)}
        return [
            subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             env=environment | ({"JAX_PROCESS_ID": str(number)} if processes > 1 else {}))
            for number in range(processes)
        ]  # fmt: skip

    def run(self, layout: str, workdir: Path, *overrides: str) -> None:
        for process in [finish(process) for process in self.start(layout, workdir, *overrides)]:
            assert process.code == 0, process.stderr[-3000:]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


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
    one_device = [f"{role}.mesh.fsdp=1" for role in ROLES]
    policies = make_policies(load_config(str(ROOT / "configs/tiny.py"), [*mesh_train.overrides, *one_device]))
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


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one_device"])
def test_a_mesh_changes_no_number(layout, laid_out, base, abstract_states):
    assert_same_run(laid_out(layout), base, abstract_states)


@pytest.mark.parametrize("written, read", [("8x1x1", "two_processes"), ("2x2x2", "1x4x2")])
def test_a_checkpoint_resumes_on_another_mesh(written, read, laid_out, mesh_train, base, tmp_path, abstract_states):
    """That of the second turn. What two processes wrote is read by others in the tests below."""
    workdir = tmp_path / "run"
    shutil.copytree(laid_out(written), workdir)
    (workdir / "summary.json").unlink()
    for folder in (workdir / "checkpoints").iterdir():
        if int(folder.name) > 2:
            shutil.rmtree(folder)
    mesh_train.run(read, workdir, *from_base(base))
    assert_same_run(workdir, base, abstract_states)


def interrupted(mesh_train, workdir: Path, base: Path, number: int, how: int) -> list[Finished]:
    """Start the cycle on two processes and send one of them a signal in its second turn: how both ended."""
    processes, metrics = mesh_train.start("two_processes", workdir, *from_base(base)), workdir / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(read_metrics(metrics)) >= 3, "the first turn", processes[0])
    processes[number].send_signal(how)
    return [finish(process) for process in processes]


@pytest.mark.parametrize("number, restart", [(0, "two_processes"), (1, "8x1x1")], ids=["coordinator", "other"])
def test_a_lost_process_ends_the_job_and_a_restart_resumes(
    number, restart, mesh_train, base, tmp_path, abstract_states
):
    workdir = tmp_path / "run"
    ends = interrupted(mesh_train, workdir, base, number, signal.SIGKILL)
    survivor = ends[1 - number]
    assert ends[number].code == -signal.SIGKILL
    # Either the next exchange fails and is caught, or jax aborts the process for want of a heartbeat.
    assert survivor.code in (PEER_LOST, -signal.SIGABRT), survivor.stderr[-3000:]
    if survivor.code == PEER_LOST:
        assert "lost another one during Stage 2: reinforcement learning" in survivor.stderr
    else:  # the trace that the abort leaves names the function
        assert "loop/turn.py" in survivor.stderr or "loop/run.py" in survivor.stderr
    assert not (workdir / "summary.json").exists()
    mesh_train.run(restart, workdir, *from_base(base))
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
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "error: JAX_NUM_PROCESSES is set, but JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID is not: set all three or none"
    )
