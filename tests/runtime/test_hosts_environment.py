"""What the environment says of other processes, where it cannot be so: one line, and jax is not asked."""

import os
import re
import subprocess
import sys

import jax
import pytest

from support.paths import ROOT
from support.processes import HANG_S
from tango_jax.runtime import hosts

RIGHT = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.fixture
def asked(monkeypatch):
    """The arguments that jax would have been started with."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: calls.append(arguments))
    monkeypatch.setattr(hosts.faulthandler, "enable", lambda: None)
    return calls


@pytest.mark.parametrize("name, value, message", [
    ("JAX_NUM_PROCESSES", "abc", "JAX_NUM_PROCESSES='abc' must be a whole number"),
    ("JAX_NUM_PROCESSES", "2.0", "JAX_NUM_PROCESSES='2.0' must be a whole number"),
    ("JAX_NUM_PROCESSES", "-1", "JAX_NUM_PROCESSES='-1' must be a whole number"),
    ("JAX_NUM_PROCESSES", "0", "JAX_PROCESS_ID=1 must be below JAX_NUM_PROCESSES=0"),
    ("JAX_NUM_PROCESSES", "9" * 5000, "must be a whole number"),
    ("JAX_PROCESS_ID", "2", "JAX_PROCESS_ID=2 must be below JAX_NUM_PROCESSES=2: the first process is 0"),
    ("JAX_PROCESS_ID", " ", "JAX_PROCESS_ID=' ' must be a whole number"),
    ("JAX_COORDINATOR_ADDRESS", "10.0.0.1", "JAX_COORDINATOR_ADDRESS='10.0.0.1' must be the first process's HOST:PORT"),
    ("JAX_COORDINATOR_ADDRESS", ":1234", "HOST:PORT"),
    ("JAX_COORDINATOR_ADDRESS", "host:port", "HOST:PORT"),
    ("JAX_COORDINATOR_ADDRESS", "host:0", "HOST:PORT"),
    ("JAX_COORDINATOR_ADDRESS", "host:65536", "HOST:PORT"),
    ("JAX_PROCESS_ID", "", "is set, but JAX_PROCESS_ID is not: set all three or none"),
])
def test_a_mistake_in_the_environment_is_one_line(monkeypatch, asked, name, value, message):
    for variable, text in (RIGHT | {name: value}).items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        hosts.connect()
    assert "\n" not in str(error.value) and asked == []


@pytest.mark.parametrize("address", ["10.0.0.1:1234", "node-0.cluster:65535", "[::1]:80"])
def test_what_may_be_is_handed_on(monkeypatch, asked, address):
    for variable, text in (RIGHT | {"JAX_COORDINATOR_ADDRESS": address}).items():
        monkeypatch.setenv(variable, text)
    hosts.connect()
    [arguments] = asked
    assert (arguments["coordinator_address"], arguments["num_processes"], arguments["process_id"]) == (address, 2, 1)


@pytest.mark.parametrize("value, is_asked", [("1", True), ("", False), ("0", False)])
def test_a_launcher_may_ask_for_the_other_processes(monkeypatch, asked, value, is_asked):
    monkeypatch.setenv("TANGO_DISTRIBUTED", value)
    hosts.connect()
    assert len(asked) == is_asked


def test_a_platform_that_is_not_there_is_one_line(tmp_path):
    command = [sys.executable, "-m", "tango_jax.train", "--config=configs/tiny.py", f"--workdir={tmp_path / 'run'}"]
    environment = os.environ | {"JAX_PLATFORMS": "abacus"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
                          timeout=HANG_S)
    assert done.returncode == 2 and done.stderr.startswith("error: jax finds no device of JAX_PLATFORMS=abacus")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "run").exists()
