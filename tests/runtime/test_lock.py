"""One run at a time in a workdir: who is refused, and what is left behind."""

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from support.processes import wait_for
from tango_jax.runtime.console import Console
from tango_jax.runtime.lock import LOCK_FILE, locked

SILENT = Console(enabled=False)
HOLDER = """
    import sys, time
    from pathlib import Path
    from tango_jax.runtime.console import Console
    from tango_jax.runtime.lock import locked

    folder, go, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    (go.parent / f"ready_{name}").touch()
    while not go.exists():
        time.sleep(0.001)
    try:
        with locked(folder, Console(enabled=False)):
            (go.parent / f"holds_{name}").touch()
            while not (go.parent / "end").exists():
                time.sleep(0.01)
    except ValueError as error:
        sys.exit(f"error: {error}")
"""


def start_holder(workdir, notes, name) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(workdir), str(notes / "go"), name]
    return subprocess.Popen(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, stderr=subprocess.PIPE, text=True)


def owner_of(workdir) -> int:
    return int((workdir / LOCK_FILE).read_text().split()[1])


def refused(workdir) -> str:
    with pytest.raises(ValueError) as error, locked(workdir, SILENT):
        pytest.fail("it was not refused")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def workdir(tmp_path):
    return tmp_path / "run"


def test_of_starts_at_the_same_moment_one_gets_it_and_a_kill_frees_it(workdir, tmp_path):
    started = {name: start_holder(workdir, tmp_path, name) for name in "abc"}
    try:
        wait_for(lambda: all((tmp_path / f"ready_{name}").exists() for name in started), "all are up")
        (tmp_path / "go").touch()
        wait_for(lambda: sum(process.poll() is not None for process in started.values()) == 2, "two are refused")
        [(name, winner)] = [(name, process) for name, process in started.items() if process.poll() is None]
        wait_for((tmp_path / f"holds_{name}").exists, "one holds it")
        for process in set(started.values()) - {winner}:
            assert process.returncode == 1
            [line] = process.stderr.read().splitlines()
            assert line.startswith(f"error: {workdir} is in use by process {winner.pid} on "), line
        assert refused(workdir) == (f"{workdir} is in use by process {winner.pid} on {socket.gethostname()}: let it "
                                    "end, or choose another folder")
        winner.send_signal(signal.SIGKILL)
        winner.wait()
        assert owner_of(workdir) == winner.pid  # what a kill leaves needs nobody to remove it
        with locked(workdir, SILENT):
            assert owner_of(workdir) == os.getpid()
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


def test_it_is_gone_when_the_run_is_and_so_is_a_folder_that_was_made_for_nothing(workdir):
    with locked(workdir, SILENT):
        assert [path.name for path in workdir.iterdir()] == [LOCK_FILE]
    assert not workdir.exists()
    workdir.mkdir()
    with pytest.raises(KeyError), locked(workdir, SILENT):
        (workdir / "metrics.jsonl").touch()
        raise KeyError
    assert [path.name for path in workdir.iterdir()] == ["metrics.jsonl"]
    with locked(workdir, SILENT):
        shutil.rmtree(workdir)  # by somebody who does not see that the run goes on
    assert not workdir.exists()


def test_another_run_in_this_process_is_refused_and_takes_no_lock_away(workdir, tmp_path):
    (tmp_path / "link").symlink_to(workdir, target_is_directory=True)
    with locked(workdir, SILENT):
        for name in (workdir, tmp_path / "link", workdir / ".." / workdir.name):
            expected = f"{name} is in use by another run in this process: let it end, or choose another folder"
            assert refused(name) == expected
            with ThreadPoolExecutor(1) as other:
                assert other.submit(refused, name).result() == expected
        assert owner_of(workdir) == os.getpid()
    with locked(workdir, SILENT):
        pass


def test_a_lock_that_cannot_be_removed_hides_no_error_and_blocks_no_start(workdir, monkeypatch):
    def fail(path, *_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with pytest.raises(KeyError), locked(workdir, SILENT):
        for name in ("unlink", "remove", "rename", "replace"):
            monkeypatch.setattr(os, name, fail)
        raise KeyError
    monkeypatch.undo()
    assert (workdir / LOCK_FILE).exists()
    with locked(workdir, SILENT):
        assert owner_of(workdir) == os.getpid()
    assert not (workdir / LOCK_FILE).exists()


def test_the_lock_of_another_run_is_not_removed(workdir):
    """Somebody has removed the file of the first run, and a second one has begun."""
    with locked(workdir, SILENT):
        (workdir / LOCK_FILE).unlink()
        (workdir / LOCK_FILE).write_text("process 12 on node7")
    assert owner_of(workdir) == 12


# ------------------------------------------------------------------------------------------------ what cannot be


def test_a_folder_that_cannot_be_locked_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    assert refused(tmp_path / "file") == (
        f"{tmp_path / 'file'} cannot be locked (File exists): choose a folder that can be written")


def test_a_file_system_without_locks_is_a_warning(workdir, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", fail)
    said = []
    with locked(workdir, SimpleNamespace(log=said.append)):
        (workdir / "metrics.jsonl").touch()
    assert said == [f"warning: {workdir} cannot be locked (Function not implemented): start no second run in it, or "
                    "they would damage each other's files"]
