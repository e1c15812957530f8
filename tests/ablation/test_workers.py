"""Several runs at a time: shares of the cores, and jobs that fail. What a whole experiment makes of it: test_ablate."""

import io
import os
import subprocess
import sys

import pytest

from support.paths import CONFIGS
from tango_jax.ablation import workers
from tango_jax.ablation.workers import Job, cores_of_workers, run_jobs
from tango_jax.cli.command_line import load_config
from tango_jax.runtime import hosts
from tango_jax.runtime.console import Console

needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no affinity")


@needs_affinity
@pytest.mark.parametrize("cores, count, expected", [
    ({0, 1}, 2, [{0}, {1}]), ({2, 3, 5, 8, 9}, 2, [{2, 3}, {5, 8, 9}]), ({4, 7}, 3, [{4}, {7}, {4}]),
    ({0, 1, 2, 3}, 1, [{0, 1, 2, 3}]),
])  # fmt: skip
def test_workers_share_the_cores_of_the_process(monkeypatch, cores, count, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: cores)
    assert cores_of_workers(count) == expected


def test_without_affinity_workers_are_not_confined(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cores_of_workers(2) == [None, None]


@needs_affinity
def test_a_child_is_confined_and_its_parent_is_not():
    before = os.sched_getaffinity(0)
    one = {min(before)}
    with workers._confined_to(one):
        done = subprocess.run([sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"], capture_output=True,
                              text=True, check=True)  # fmt: skip
    assert done.stdout.strip() == str(one) and os.sched_getaffinity(0) == before


def job(tmp_path, name: str, command: str = "train", is_finished: bool = False, **settings) -> Job:
    config = load_config(str(CONFIGS / "tiny.py"))
    for key, value in settings.items():
        config[key] = value
    return Job(name, command, config, tmp_path / name, {tmp_path / name / "metrics.jsonl": 10}, is_finished)


def test_failed_jobs_are_named_with_the_last_line_of_their_log(tmp_path):
    """Both commands refuse their settings before any work; each is told apart, and neither ends the other."""
    output = io.StringIO()
    jobs = [job(tmp_path, "one", arm="nobody"), job(tmp_path, "two", seed=-1),
            job(tmp_path, "old", is_finished=True)]  # fmt: skip
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
    assert not (tmp_path / "old").exists()


def test_a_job_that_is_killed_is_named_with_the_signal(tmp_path, monkeypatch):
    killed = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    start = subprocess.Popen
    monkeypatch.setattr(workers.subprocess, "Popen", lambda command, **options: start(killed, **options))
    failed = run_jobs("Runs", [job(tmp_path, "one")], 1, Console(enabled=False), hosts.Preemption())
    assert failed["one"].startswith("killed by SIGKILL (is there enough memory?)")


def test_nothing_is_started_where_all_is_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(workers.subprocess, "Popen", None)
    assert run_jobs("Runs", [job(tmp_path, "old", is_finished=True)], 2, Console(enabled=False), None) == {}
    assert run_jobs("Runs", [], 2, Console(enabled=False), None) == {}


def test_progress_is_the_step_of_the_last_whole_row(tmp_path):
    one = job(tmp_path, "one")
    assert (one.done(), one.total, one.log.name) == (0, 10, "train.log")
    one.folder.mkdir()
    [metrics] = one.steps
    metrics.write_text('{"step": 1}\n{"step": 2}\n{"step": 3')
    assert one.done() == 2
    metrics.write_text('{"step": 1}\n' * 10_000 + '{"step": 12}\n')  # more than the part that is read
    assert one.done() == 10  # an evaluation after the last turn may have any number


def test_one_line_shows_what_runs(tmp_path):
    output, jobs = io.StringIO(), [job(tmp_path, "one"), job(tmp_path, "two")]
    for made in jobs:
        made.folder.mkdir()
        next(iter(made.steps)).write_text('{"step": 4}\n')
    with Console(stream=output, interval_s=0.0).stage("Runs", 20) as stage:
        shown = workers._Shown(stage, 0)
        shown.update([workers._Child(made, None) for made in jobs])
    assert "8/20" in output.getvalue() and "running one 4/10, two 4/10" in output.getvalue()
