"""Several runs at a time: shares of the cores, and jobs that fail. What a whole experiment makes of it: test_ablate."""

import io
import os
import subprocess
import sys

import pytest

from support.paths import CONFIGS
from tango_jax.ablation import workers
from tango_jax.ablation.workers import Job, cores_of, run_jobs
from tango_jax.cli.command_line import load_config
from tango_jax.runtime import hosts
from tango_jax.runtime.console import Console

needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no affinity")


@needs_affinity
@pytest.mark.parametrize("cores, count, expected", [
    ({0, 1}, 2, [{0}, {1}]), ({2, 3, 5, 8, 9}, 2, [{2, 3}, {5, 8, 9}]), ({4, 7}, 1, [{4, 7}]),
])
def test_workers_share_the_cores_of_the_process(monkeypatch, cores, count, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: cores)
    assert [cores_of(worker, count) for worker in range(count)] == expected


def test_more_workers_than_cores_have_one_each(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {4, 7}, raising=False)
    shares = [cores_of(worker, 3) for worker in range(3)]
    assert all(len(share) == 1 for share in shares) and set().union(*shares) == {4, 7}


def test_without_affinity_workers_are_not_confined(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cores_of(0, 2) == set()


@needs_affinity
def test_a_child_is_confined_and_its_parent_is_not(tmp_path, monkeypatch):
    told = [sys.executable, "-c", "import os; input(); print(os.sched_getaffinity(0))"]
    start, before = subprocess.Popen, os.sched_getaffinity(0)
    monkeypatch.setattr(workers.subprocess, "Popen",
                        lambda command, **options: start(told, **options | {"stdin": subprocess.PIPE}))
    child = workers._start(job(tmp_path, "one"), {min(before)})
    child.process.communicate(b"\n")  # it looks once it is confined
    assert child.job.log.read_text().splitlines()[-1] == str({min(before)}) and os.sched_getaffinity(0) == before


def job(tmp_path, name: str, command: str = "train", **settings) -> Job:
    config = load_config(str(CONFIGS / "tiny.py"))
    for key, value in settings.items():
        config[key] = value
    return Job(name, command, config, tmp_path / name)


@pytest.mark.long
def test_failed_jobs_are_named_with_the_last_line_of_their_log(tmp_path):
    """Both commands refuse their settings before any work; each is told apart, and neither ends the other."""
    output = io.StringIO()
    jobs = [job(tmp_path, "one", arm="nobody"), job(tmp_path, "two", seed=-1)]
    succeeded = []
    failed = run_jobs("Runs", jobs, 2, Console(stream=output), hosts.Preemption(), lambda: succeeded.append(1))
    assert set(failed) == {"one", "two"} and not succeeded
    assert failed["one"].startswith("error: arm='nobody' is not one of tango")
    assert failed["two"].startswith("error: seed=-1 must lie between 0 and ")
    for name in ("one", "two"):
        log = (tmp_path / name / "train.log").read_text()
        command = f"-m tango_jax.train --config={tmp_path / name / 'config.json'} --workdir={tmp_path / name}"
        assert log.splitlines()[0].endswith(command)
        assert failed[name].endswith(f"({tmp_path / name / 'train.log'})")
        assert f"{name} failed: {failed[name]}" in output.getvalue()
    assert "running two" in output.getvalue() or "running one" in output.getvalue()


def test_a_job_that_is_killed_is_named_with_the_signal(tmp_path, monkeypatch):
    killed = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    start = subprocess.Popen
    monkeypatch.setattr(workers.subprocess, "Popen", lambda command, **options: start(killed, **options))
    failed = run_jobs("Runs", [job(tmp_path, "one")], 1, Console(enabled=False), hosts.Preemption())
    assert failed["one"].startswith("killed by SIGKILL (is there enough memory?)")


def test_nothing_is_started_where_nothing_is_left():
    assert run_jobs("Runs", [], 2, Console(enabled=False), None) == {}
