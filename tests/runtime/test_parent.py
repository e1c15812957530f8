"""A process that another one started ends with it, even if that is killed."""

import os
import signal
import subprocess
import sys
import time

from support.processes import HANG_S, wait_for
from tango_jax.runtime.parent import PARENT_VARIABLE

CHILD = """
import os, time
from tango_jax.runtime import parent, termination
termination.watch()
parent.end_with_parent()
assert parent.PARENT_VARIABLE not in os.environ
print(os.getpid(), flush=True)
time.sleep(1000)
"""
PARENT = """
import os, subprocess, sys, time
environment = os.environ | {%r: str(os.getpid())}
subprocess.Popen([sys.executable, "-c", %r], env=environment, stderr=open(sys.argv[1], "w"))
time.sleep(1000)
"""


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_ends_when_its_parent_is_killed(tmp_path):
    program = PARENT % (PARENT_VARIABLE, CHILD)
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "stderr")], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    assert is_alive(child)
    parent.kill()
    parent.wait()
    wait_for(lambda: not is_alive(child), "the end of the child")
    assert (tmp_path / "stderr").read_text().startswith("told to stop (SIGTERM)")


def test_a_process_that_nobody_else_started_goes_on():
    """Without the variable there is nothing to end with."""
    environment = {name: value for name, value in os.environ.items() if name != PARENT_VARIABLE}
    process = subprocess.Popen([sys.executable, "-c", CHILD], env=environment, stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        time.sleep(1.5)  # longer than it would take to notice
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 75
    finally:
        process.kill()
