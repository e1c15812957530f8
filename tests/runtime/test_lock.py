"""One run at a time in a workdir: who is refused, who takes over, and what is left behind."""

import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from filelock import SoftFileLease

from support.processes import wait_for
from tango_jax.runtime import lock
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


def owner_of(workdir):
    return SoftFileLease(workdir / LOCK_FILE).owner


def leave_record(workdir, **changes) -> None:
    """A lock as another process left it, or holds it where nobody can ask."""
    workdir.mkdir(exist_ok=True)
    with locked(workdir, SILENT):
        text = (workdir / LOCK_FILE).read_text()
    for name, value in changes.items():
        text, count = re.subn(f"^{name}=.*$", f"{name}={value}", text, flags=re.MULTILINE)
        assert count == 1, text
    (workdir / LOCK_FILE).write_text(text)


def refused(workdir) -> str:
    with pytest.raises(ValueError) as error, locked(workdir, SILENT):
        pytest.fail("it was not refused")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def workdir(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def quick(monkeypatch):
    """Heartbeats and patience a hundred times as short."""
    for name, seconds in {"HEARTBEAT_S": 0.1, "HEARTBEAT_TIMEOUT_S": 1.0, "POLL_S": 0.02}.items():
        monkeypatch.setattr(lock, name, seconds)


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
        assert owner_of(workdir).pid == winner.pid  # what a kill leaves needs nobody to remove it
        with locked(workdir, SILENT):
            assert owner_of(workdir).pid == os.getpid()
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


def test_a_holder_on_another_host_that_is_at_work_is_seen(workdir, quick, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_TIMEOUT_S", 1e6)  # it is refused as soon as the file is touched
    leave_record(workdir, host="node7?pidns-f0000123", pid=12)
    beats = subprocess.Popen(["sh", "-c", f"while sleep 0.05; do touch {workdir / LOCK_FILE}; done"])
    try:
        assert refused(workdir) == (f"{workdir} is in use by process 12 on node7: let it end, or choose another folder")
    finally:
        beats.kill()
        beats.wait()


def test_a_holder_on_another_host_that_is_silent_is_gone(workdir, quick, capsys):
    leave_record(workdir, host="node7", pid=12)
    with locked(workdir, Console()):
        assert owner_of(workdir).pid == os.getpid()
    said = " ".join(capsys.readouterr().out.split())
    assert "was taken by process 12 on node7: watching for up to 1 s whether it is still at work" in said
    assert "was left by process 12 on node7, which is gone" in said


def test_a_process_that_has_the_number_of_a_dead_one_is_another(workdir):
    leave_record(workdir, start="12")
    with locked(workdir, SILENT):
        assert owner_of(workdir).start != 12


def test_another_run_in_this_process_is_refused_and_takes_no_lock_away(workdir, tmp_path):
    (tmp_path / "link").symlink_to(workdir, target_is_directory=True)
    with locked(workdir, SILENT):
        for name in (workdir, tmp_path / "link", workdir / ".." / workdir.name):
            expected = f"{name} is in use by another run in this process: let it end, or choose another folder"
            assert refused(name) == expected
            with ThreadPoolExecutor(1) as other:
                assert other.submit(refused, name).result() == expected
        assert owner_of(workdir).pid == os.getpid()
    with locked(workdir, SILENT):
        pass


def test_a_run_of_this_process_that_could_not_remove_its_lock_is_gone(workdir):
    leave_record(workdir)
    with locked(workdir, SILENT):
        assert owner_of(workdir).pid == os.getpid()
    assert list(workdir.iterdir()) == []


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
        assert owner_of(workdir).pid == os.getpid()


def test_the_heartbeat_moves_the_time_of_the_file(workdir, quick):
    with locked(workdir, SILENT):
        first = (workdir / LOCK_FILE).stat().st_mtime_ns
        wait_for(lambda: (workdir / LOCK_FILE).stat().st_mtime_ns > first, "a heartbeat")
        assert (workdir / LOCK_FILE).stat().st_mtime_ns > first


def test_a_run_whose_lock_is_taken_away_says_so(workdir, quick):
    said = []
    with locked(workdir, SimpleNamespace(log=said.append)):
        (workdir / LOCK_FILE).unlink()
        wait_for(lambda: said, "a warning")
    assert said == [f"warning: {workdir / LOCK_FILE} was removed, or another run has taken it over: two runs in one "
                    "folder would damage each other's files"]


# ------------------------------------------------------------------------------------------------ what cannot be


def test_a_folder_that_cannot_be_locked_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    assert refused(tmp_path / "file") == (
        f"{tmp_path / 'file'} cannot be locked (File exists): choose a folder that can be written")


def test_a_lock_without_a_name_names_the_file_to_delete(workdir, quick):
    """Of a process that was killed between making the file and writing its name: nobody can ask for it."""
    workdir.mkdir()
    (workdir / LOCK_FILE).write_text("")
    assert refused(workdir) == (f"{workdir} is locked, and cannot be taken over: if it is certain that nothing runs "
                                f"there, delete {workdir / LOCK_FILE} and start again")
