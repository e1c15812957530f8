"""How tests wait for processes and for what they write.

No test depends on how fast the machine is: every wait is for an event, and its only limit is HANG_S.
"""

import socket
import subprocess
import time
from collections.abc import Callable
from typing import NamedTuple

# So long that only what hangs reaches it, even where other programs keep every core busy.
HANG_S = 1800


class Finished(NamedTuple):
    """How a process ended."""

    code: int
    stdout: str
    stderr: str


def finish(process: subprocess.Popen) -> Finished:
    """Wait for the end of a process; one that hangs is killed and fails the test."""
    try:
        stdout, stderr = process.communicate(timeout=HANG_S)
    finally:
        if process.poll() is None:
            process.kill()
    return Finished(process.returncode, stdout, stderr)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def wait_for(condition: Callable[[], bool], what: str, process: subprocess.Popen | None = None) -> None:
    """Wait until a condition holds. A `process` that ends before that fails the test at once, with its output."""
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {HANG_S} s"
        if process is not None and process.poll() is not None and not condition():
            stdout, stderr = process.communicate()
            raise AssertionError(f"{what}: the process ended with code {process.returncode}\n{stdout}\n{stderr}")
        time.sleep(0.02)
