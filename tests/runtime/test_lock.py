"""One run at a time in a workdir: who is refused, who takes over, and what is left behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from support.processes import wait_for
from tango_jax.runtime import lock
from tango_jax.runtime.console import Console
from tango_jax.runtime.lock import LOCK_FILE, hold

SILENT = Console(enabled=False)
HOLDER = """
    import sys, time
    from pathlib import Path
    from tango_jax.runtime.console import Console
    from tango_jax.runtime.lock import hold

    folder, go, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    (go.parent / f"ready_{name}").touch()
    while not go.exists():
        time.sleep(0.001)
    try:
        with hold(folder, Console(enabled=False)):
            (go.parent / f"holds_{name}").touch()
            while not (go.parent / "end").exists():
                time.sleep(0.01)
    except ValueError as error:
        sys.exit(f"error: {error}")
"""


def start_holder(workdir, notes, name) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(workdir), str(notes / "go"), name]
    return subprocess.Popen(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, stderr=subprocess.PIPE, text=True)


def record_of(workdir) -> dict:
    return json.loads((workdir / LOCK_FILE).read_text())


def write_record(workdir, **changes) -> None:
    """A lock as another process left it, or holds it where nobody can ask."""
    workdir.mkdir(exist_ok=True)
    holder = lock._this_process()._replace(token="other", since="2026-01-02 03:04:05 UTC", **changes)
    (workdir / LOCK_FILE).write_text(json.dumps(holder._asdict()))


def refused(workdir) -> str:
    with pytest.raises(ValueError) as error, hold(workdir, SILENT):
        pytest.fail("it was not refused")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def workdir(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def quick(monkeypatch):
    """Heartbeats and patience a hundred times as short."""
    quick = {"HEARTBEAT_S": 0.1, "HEARTBEAT_TIMEOUT_S": 1.0, "POLL_S": 0.02, "CONFLICT_WAIT_S": 0.05}
    for name, seconds in quick.items():
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
        assert f"process {winner.pid} on" in refused(workdir) and "since 20" in refused(workdir)
        winner.send_signal(signal.SIGKILL)
        winner.wait()
        assert record_of(workdir)["pid"] == winner.pid  # what a kill leaves needs nobody to remove it
        with hold(workdir, SILENT):
            assert record_of(workdir)["pid"] == os.getpid()
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


def test_it_is_gone_when_the_run_is_and_so_is_a_folder_that_was_made_for_nothing(workdir):
    with hold(workdir, SILENT):
        assert [path.name for path in workdir.iterdir()] == [LOCK_FILE]
        assert record_of(workdir).keys() == set(lock.Holder._fields)
    assert not workdir.exists()
    workdir.mkdir()
    with pytest.raises(KeyError), hold(workdir, SILENT):
        (workdir / "metrics.jsonl").touch()
        raise KeyError
    assert [path.name for path in workdir.iterdir()] == ["metrics.jsonl"]


def test_a_holder_on_another_host_that_is_at_work_is_seen(workdir, quick, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_TIMEOUT_S", 1e6)  # it is refused as soon as the file is touched
    write_record(workdir, machine="another boot", host="node7", pid=12)
    beats = subprocess.Popen(["sh", "-c", f"while sleep 0.05; do touch {workdir / LOCK_FILE}; done"])
    try:
        text = refused(workdir)
    finally:
        beats.kill()
        beats.wait()
    assert text == (f"{workdir} is in use by process 12 on node7, since 2026-01-02 03:04:05 UTC: let it end, or choose "
                    "another folder")


@pytest.mark.parametrize("age", [0, 3600])
def test_a_holder_on_another_host_that_is_silent_is_gone(workdir, quick, monkeypatch, capsys, age):
    if age:
        monkeypatch.setattr(lock, "HEARTBEAT_TIMEOUT_S", 1e6)  # so old that nobody waits for a heartbeat
    write_record(workdir, machine="another boot", host="node7", pid=12)
    os.utime(workdir / LOCK_FILE, (time.time() - age,) * 2)
    with hold(workdir, Console()):
        assert record_of(workdir)["pid"] == os.getpid()
    said = capsys.readouterr().out
    assert "was left by process 12 on node7, since 2026-01-02 03:04:05 UTC, which is gone" in " ".join(said.split())
    assert ("watching for up to" in said) == (age == 0)


def test_a_lock_of_a_silent_host_that_stays_names_the_file_to_delete(workdir, quick, monkeypatch):
    monkeypatch.setattr(lock, "_try_lock", lambda descriptor: "taken")
    write_record(workdir, machine="another boot", host="node7")
    assert f"silent for 1 s: if it is certain that nothing runs there, delete {workdir / LOCK_FILE}" in refused(workdir)
    (workdir / LOCK_FILE).write_text("")  # it has the lock and never writes its name
    assert "in use by a process that has just started" in refused(workdir)


def test_another_thread_of_this_process_is_refused_and_takes_no_lock_away(workdir, tmp_path):
    (tmp_path / "link").symlink_to(workdir, target_is_directory=True)
    with hold(workdir, SILENT):
        for name in (workdir, tmp_path / "link", workdir / ".." / workdir.name):
            expected = f"{name} is in use by another run in this process: let it end, or choose another folder"
            assert refused(name) == expected
        program = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        command = [sys.executable, "-c", program, str(workdir / LOCK_FILE)]
        done = subprocess.run(command, capture_output=True, check=False)
        assert b"BlockingIOError" in done.stderr
    with hold(workdir, SILENT):
        pass


def test_the_heartbeat_moves_the_time_of_the_file(workdir, quick):
    with hold(workdir, SILENT):
        first = (workdir / LOCK_FILE).stat().st_mtime_ns
        wait_for(lambda: (workdir / LOCK_FILE).stat().st_mtime_ns > first, "a heartbeat")
        assert (workdir / LOCK_FILE).stat().st_mtime_ns > first


# ------------------------------------------------------------------------------------ file systems without locks


@pytest.fixture
def no_locks(monkeypatch, quick):
    def lockf(descriptor, how):
        raise OSError(lock.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", lockf)


def test_without_locks_a_live_process_is_found_by_its_number_and_its_start(workdir, no_locks, monkeypatch):
    with hold(workdir, SILENT), monkeypatch.context() as patch:
        patch.setattr(lock, "_held_here", set())  # as if it were another process
        assert f"process {os.getpid()} on" in refused(workdir)
    dead = 2**22 + 1  # no system gives such a number
    for changes in ({"pid": dead}, {"began": "12"}, {"machine": "another boot", "namespace": "n"}):
        write_record(workdir, **changes)
        with hold(workdir, SILENT):
            assert record_of(workdir)["token"] != "other"


def test_without_locks_the_last_of_two_to_write_stays(workdir, no_locks, monkeypatch):
    sleep = time.sleep

    def overtaken(seconds):
        if seconds == lock.CONFLICT_WAIT_S:
            write_record(workdir, pid=12)
        sleep(seconds)

    monkeypatch.setattr(lock.time, "sleep", overtaken)
    assert "in use by process 12 on" in refused(workdir)


# ------------------------------------------------------------------------------------------------ what cannot be


def test_a_folder_that_cannot_be_locked_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    assert refused(tmp_path / "file") == (
        f"{tmp_path / 'file'} cannot be locked (Not a directory): choose a folder that can be written")


@pytest.mark.parametrize("content", ["", "{", '{"host": 1}', "[]", "\0\0"])
def test_a_record_that_a_kill_cut_off_is_none(workdir, content):
    workdir.mkdir()
    (workdir / LOCK_FILE).write_text(content)
    with hold(workdir, SILENT):
        assert record_of(workdir)["pid"] == os.getpid()
