"""What the tests of the launchers share: the environment that scripts run in, and how to start them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT
from support.processes import HANG_S


def environment(**changes: str) -> dict[str, str]:
    """That of this process without its settings for jax. The scripts use this interpreter and make no .venv."""
    dropped = ("JAX_", "XLA_", "TANGO_", "TPU_", "SLURM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | {"TANGO_PYTHON": sys.executable, **changes}


def start(command: list, **changes: str) -> subprocess.Popen:
    """In a session of its own, as from a terminal that does not ignore Ctrl-C."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen([str(part) for part in command], cwd=ROOT, env=environment(**changes), text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, handler)


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
    """Wait for its end; with a process that hangs everything it started is killed, and the test fails."""
    try:
        stdout, stderr = process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"no end after {HANG_S} s\n{stdout}\n{stderr}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run(command: list, **changes: str) -> subprocess.CompletedProcess:
    return finish(start(command, **changes))


# A process without jax, in bash: notes its start in the folder $1 as start_<process>_<n>, and then does what the file
# do_<process>_<n> says, in bash; without that file it is done. `await NAME...` waits for such files in the folder.
SCRIPTED = """
    folder=$1
    await() { for name in "$@"; do until [[ -e "$folder/$name" ]]; do sleep 0.05; done; done; }
    start=$(ls "$1" | grep -c "^start_${JAX_PROCESS_ID}_") || true
    env >"$1/start_${JAX_PROCESS_ID}_$start"
    if [[ -e "$1/do_${JAX_PROCESS_ID}_$start" ]]; then source "$1/do_${JAX_PROCESS_ID}_$start"; fi
"""


def scripted(folder: Path, **actions: str) -> list:
    """The command of such processes; actions by name, such as `do_0_1="exit 75"`."""
    for name, action in actions.items():
        (folder / name).write_text(action)
    return ["bash", "-c", SCRIPTED, "scripted", folder]


def starts(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("start_*"))
