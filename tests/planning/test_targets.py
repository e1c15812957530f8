"""Targets of a plan: which there are, their devices, and the machine that settings are fitted to."""

import math
import os
import subprocess
import sys

import jax
import pytest

from support.paths import ROOT
from support.processes import HANG_S
from tango_jax.config import default_config
from tango_jax.planning import machines
from tango_jax.planning.machines import GIB, Machine, planned_for, planned_machine, this_machine
from tango_jax.planning.targets import TARGETS, machine_of, missing_compilers, open_devices, open_target, parse_target

V5E = (1, 4, 8, 16, 32, 64, 128, 256)
V5P = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 6144)


@pytest.mark.parametrize("name, count", [("tpu-v5e", count) for count in V5E] + [("tpu-v5p", count) for count in V5P])
def test_every_slice_that_exists(name, count):
    assert parse_target(f"{name}:{count}") == (name, count)
    target = open_target(name, count)
    assert math.prod(map(int, dict(target.shapes)[count].split("x"))) == count
    assert target.per_host == ({1: 1, 8: 8} if name == "tpu-v5e" else {}).get(count, 4)
    assert (target.memory, target.platform) == (TARGETS[name].memory, "tpu")


def test_no_other_slice():
    assert [size for size in range(1, 257) if size in dict(TARGETS["tpu-v5e"].shapes)] == list(V5E)
    with pytest.raises(ValueError, match="tpu-v5e:2: tpu-v5e comes in slices of 1, 4, 8, 16, 32, 64, 128, 256 chips"):
        parse_target("tpu-v5e:2")


@pytest.mark.compilers
@pytest.mark.parametrize("name, count, hosts", [
    ("tpu-v5e", 1, 1), ("tpu-v5e", 8, 1), ("tpu-v5e", 16, 4), ("tpu-v5p", 4, 1), ("tpu-v5p", 8, 2),
    ("tpu-v5p", 6144, 1536),
])
def test_the_compiler_knows_the_slice(name, count, hosts, monkeypatch):
    target = open_target(name, count)
    if missing := missing_compilers(target):
        pytest.skip(f"needs {' and '.join(missing)}")
    for variable in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD", "LIBTPU_INIT_ARGS"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))  # and as it was after the test
    found = open_devices(target, count)
    assert (found.is_target, len(found.devices)) == (True, count)
    assert len({device.process_index for device in found.devices}) == hosts


def test_this_machine_as_a_target(monkeypatch):
    monkeypatch.setattr("tango_jax.planning.targets.machine_rates", lambda: {"matmul_gflops": 100.0, "read_gb_s": 20.0})
    assert parse_target("cpu") == ("cpu", 1) and parse_target("cpu:2") == ("cpu", 2)
    target = open_target("cpu", 2)
    assert (target.platform, target.flops, target.read, target.per_host) == ("cpu", 50e9, 10e9, 2)
    assert target.memory == pytest.approx(machine_of("cpu", 2).memory) and target.memory > 2**29


def test_the_machine_of_a_target():
    assert machine_of("h100", 16) == Machine("gpu", 16, int(TARGETS["h100"].memory), 9.0, local=8)
    assert machine_of("a100-80gb", 1).capability == 8.0
    assert machine_of("tpu-v5e", 4) == Machine("tpu", 4, int(15.75 * GIB), None, local=4)
    with planned_for(machine_of("h100", 16)):
        assert planned_machine().devices == 16
    assert planned_machine() is None


def test_a_config_file_that_asks_for_devices_finds_those_of_the_plan(tmp_path):
    """A process of its own, in which none has been asked for."""
    (tmp_path / "mine.py").write_text(
        "import jax\ndef get_config(argument):\n    raise ValueError(f'{jax.device_count()} devices')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "tango_jax.plan", "--config=mine.py", "--target=cpu:3"], cwd=tmp_path,
                          env=environment, text=True, capture_output=True, timeout=HANG_S)
    assert done.returncode == 2 and "3 devices" in done.stderr, done.stderr


@pytest.mark.parametrize("backend, memory", [("cpu", 6 * GIB), ("gpu", 7 * GIB)])
def test_cpu_processes_of_one_machine_share_its_memory(monkeypatch, backend, memory):
    told = [("first", 12 * GIB, None), ("first", 12 * GIB, 9.0), ("second", 7 * GIB, 8.0)]
    monkeypatch.setattr(machines.hosts, "join_parts", lambda items: told)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    machine = this_machine(default_config())
    assert (machine.platform, machine.memory, machine.capability) == (backend, memory, 8.0)
