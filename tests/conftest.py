"""Settings that every test shares: CPU, eight virtual devices, and an error wherever ranks are promoted silently.

Also the one whole run of `configs/tiny.py` that several tests look at, made when the first of them asks for it.
"""
import os

# Before jax is imported: it reads these once, when its backend starts.
os.environ["JAX_PLATFORMS"] = "cpu"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
# A test that would reach for the model hub fails at once instead of waiting for a network.
os.environ["HF_HUB_OFFLINE"] = "1"

import fcntl  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import NamedTuple  # noqa: E402

import jax  # noqa: E402
import pytest  # noqa: E402
from browser import open_browser  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

# A shell that runs the tests in the background makes them, and so the processes they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent


def pytest_addoption(parser):
    parser.addoption("--refresh-golden", action="store_true", help="write the expected numbers of test_golden.py anew")


class TinyTrain:
    """`python -m tango_jax.train --config=configs/tiny.py` in processes of its own, with one compile cache for all."""

    def __init__(self, compile_cache: Path):
        # Short words and a stage 1 long enough for tags and steps: rewards differ, every part of a turn has something
        # to do. Its learning rate ends at zero: on other processors the parameters then agree to six digits.
        stage_one = ("steps=200", "batch_size=12", "eval_every=20", "checkpoint_every=50", "optimizer.schedule=cosine")
        self.overrides = [f"{role}.sft.{setting}" for role in ("generator", "verifier") for setting in stage_one]
        self.overrides += [f"task.{split}_letters=(1,2)" for split in ("sft", "rl", "test")]
        self.overrides += ["rl.format_weight=0.5", f"compile_cache={compile_cache}"]
        self.compile_cache = compile_cache
        self.environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # one device

    def start(self, workdir: Path, *overrides: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "tango_jax.train", "--config=configs/tiny.py", f"--workdir={workdir}"]
        return self.start_command([*command, *(f"--config.{item}" for item in [*self.overrides, *overrides])])

    def start_command(self, command: list[str]) -> subprocess.Popen:
        return subprocess.Popen(command, cwd=ROOT, env=self.environment, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE)

    def run(self, workdir: Path, *overrides: str) -> "Finished":
        return finish(self.start(workdir, *overrides))


class Finished(NamedTuple):
    """How a process ended."""

    code: int
    stdout: str
    stderr: str


def finish(process: subprocess.Popen) -> Finished:
    """Wait for the end of a process; one that hangs is killed and fails the test."""
    try:
        stdout, stderr = process.communicate(timeout=400)
    finally:
        if process.poll() is None:
            process.kill()
    return Finished(process.returncode, stdout, stderr)


class TinyRun(NamedTuple):
    """The run that nothing interrupted."""

    workdir: Path
    stdout: str


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """One for all processes that run tests (pytest-xdist gives each a folder below it)."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def tiny_train(shared_folder) -> TinyTrain:
    return TinyTrain(shared_folder / "compile_cache")


@pytest.fixture(scope="session")
def tiny_run(tiny_train, shared_folder) -> TinyRun:
    """Made by the first process that asks; nobody changes it."""
    workdir, stdout = shared_folder / "tiny_run", shared_folder / "tiny_run.stdout"
    with open(shared_folder / "tiny_run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stdout.exists():
            done = tiny_train.run(workdir)
            assert done.code == 0, done.stderr
            stdout.write_text(done.stdout)
    return TinyRun(workdir, stdout.read_text())


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A page of headless Chromium; skips where that is not installed."""
    with open_browser(tmp_path_factory.mktemp("profile")) as page:
        yield page
