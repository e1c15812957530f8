"""Settings that every test shares: CPU, eight virtual devices, and an error wherever ranks are promoted silently.

Also the one whole run of `configs/tiny.py` that several tests look at, made when the first of them asks for it.
"""
import os

from support.xla_settings import set_xla_flags

# Before jax is imported: it reads these once, when its backend starts.
set_xla_flags()
os.environ["JAX_PLATFORMS"] = "cpu"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
# A test that would reach for the model hub fails at once instead of waiting for a network.
os.environ["HF_HUB_OFFLINE"] = "1"

import fcntl  # noqa: E402
import gc  # noqa: E402
import signal  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import pytest  # noqa: E402

from support.browser import open_browser  # noqa: E402
from support.small_hub import small_hub  # noqa: E402
from support.tiny_train import TinyRun, TinyTrain  # noqa: E402
from tango_jax.grading import close_pool  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
# Tracing makes many objects and little garbage: with Python's thresholds a tenth of the time goes into looking for it.
gc.set_threshold(50_000, 10, 10)

# A shell that runs the tests in the background makes them, and so the processes they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--refresh-golden", action="store_true", help="write the expected numbers of test_golden.py anew")


# The files that take longest, in part because their processes wait for each other: begun first, they leave no worker
# without work at the end.
LONGEST = ("loop/test_mesh.py", "commands/test_ablate.py", "evaluation/test_evaluate_models.py", "loop/test_resume.py",
           "loop/test_adapters.py", "sampling/test_continuous.py", "models/test_families.py",
           "planning/test_device_check.py",
           "notebook/test_notebooks.py", "viewer/test_report.py", "torture/test_faults.py",
           "tasks/test_math_task.py", "test_readme.py", "planning/test_measured.py",
           "evaluation/test_evaluate_resume.py", "commands/test_sft.py", "commands/test_train.py",
           "weights/test_smollm2.py")


def pytest_collection_modifyitems(items):
    rank = {f"tests/{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.nodeid.split("::")[0], len(rank)))


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """One for all processes that run tests (pytest-xdist gives each a folder below it)."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="module")
def closed_pool():
    """For tests that grade: when a file's are over, so is the pool of workers that they share."""
    yield
    close_pool()


@pytest.fixture(scope="session", autouse=True)
def _compile_cache(shared_folder):
    """One for all processes that run tests: a program that several tests need, or both roles, is compiled once."""
    jax.config.update("jax_compilation_cache_dir", str(shared_folder / "test_compile_cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.fixture(scope="session", autouse=True)
def _all_devices():
    """Start the backend with all of them: a test that plans for fewer CPU devices leaves the others as they are."""
    jax.devices()


@pytest.fixture(autouse=True)
def _ctrl_c_as_python_has_it():
    """What a test leaves installed, such as the handler of a run in this process, is not the next test's."""
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture
def hub(monkeypatch, tmp_path_factory):
    """A hub on this machine, which is what a test downloads from."""
    with small_hub(monkeypatch, tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A page of headless Chromium; skips where that is not installed."""
    with open_browser(tmp_path_factory.mktemp("profile")) as page:
        yield page
