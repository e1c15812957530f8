"""launch/local_multiprocess.sh: two processes that jax joins, what follows when one of them ends, and signals."""

import json
import os
import signal

import pytest

from support.launching import finish, run, scripted, start, starts
from support.paths import LAUNCH
from support.processes import wait_for
from tango_jax.runtime.console import Console
from tango_jax.runtime.lock import locked

JAX_PROGRAM = ["python", "-m", "tests.support.launched_program"]


def launcher(folder, *options: str, processes: int = 2) -> list:
    return ["bash", LAUNCH / "local_multiprocess.sh", processes, f"--logs={folder}", *options]


def environment_of(folder, process: int, start: int = 0) -> dict[str, str]:
    """What the scripted process was given."""
    lines = (folder / f"start_{process}_{start}").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.mark.long
def test_a_killed_process_restarts_both_and_they_join_again(tmp_path):
    (tmp_path / "do_0_0").write_text("wait")
    (tmp_path / "do_1_0").write_text("kill")
    done = run([*launcher(tmp_path, "--devices=2"), *JAX_PROGRAM, tmp_path])
    assert done.returncode == 0, done.stderr
    for name in ("start_0_0", "start_1_0", "start_0_1", "start_1_1"):
        seen = json.loads((tmp_path / f"{name}.json").read_text())
        # 1 + 2 + 3 + 4, one number on each device of both processes.
        assert (seen["processes"], seen["devices"], seen["local_devices"], seen["sum"]) == (2, 4, 2, 10.0)
    assert not (tmp_path / "start_0_2.json").exists()
    assert "process 1 ended with exit code 137: killed" in done.stderr
    assert "process 0 ended with exit code 76: it lost another process" in done.stderr
    assert "restarting all processes (1 of at most 20 times)" in done.stderr
    # Process 0 writes here, the other one into its file.
    assert "process 0 of 2 is up, start 1" in done.stdout and "process 1 of 2" not in done.stdout
    assert "process 1 of 2 is up, start 1" in (tmp_path / "process_1.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_both_save_and_restarts_none(tmp_path, number):
    for process in (0, 1):
        (tmp_path / f"do_{process}_0").write_text("wait")
    launched = start([*launcher(tmp_path), *JAX_PROGRAM, tmp_path])
    log = tmp_path / "process_1.log"
    wait_for(lambda: len(starts(tmp_path)) == 2 and "is up" in log.read_text(), "both started", launched)
    # SIGINT as the terminal sends it: to every process in the foreground.
    os.killpg(launched.pid, number) if number == signal.SIGINT else launched.send_signal(number)
    done = finish(launched)
    assert done.returncode == 75, done.stderr
    for process in (0, 1):
        assert f"process {process} ended with exit code 75: preempted, its state is saved" in done.stderr
    assert "the same command goes on where this one stopped" in done.stderr
    assert starts(tmp_path) == ["start_0_0", "start_1_0"]


def test_a_mistake_ends_all_with_its_code(tmp_path):
    actions = {"do_0_0": "exec sleep infinity", "do_1_0": "await start_0_0; echo wrong learning rate; exit 3"}
    done = run([*launcher(tmp_path), *scripted(tmp_path, **actions)])
    assert done.returncode == 3, done.stderr
    assert "process 1: wrong learning rate" in done.stderr and "Not restarted" in done.stderr
    assert starts(tmp_path) == ["start_0_0", "start_1_0"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_device_ends_all_with_what_it_says(tmp_path, failing):
    """Also a process that waits inside XLA, before the launcher would kill it."""
    (tmp_path / f"do_{failing}_0").write_text("memory")
    (tmp_path / f"do_{1 - failing}_0").write_text("stuck")
    done = run([*launcher(tmp_path), *JAX_PROGRAM, tmp_path])
    assert done.returncode == 1 and "Not restarted" in done.stderr, done.stderr
    for process in (0, 1):
        assert f"process {process} ended with exit code 1" in done.stderr
        written = done.stderr if process == 0 else (tmp_path / "process_1.log").read_text()
        assert "error: sampling from the generator ran out of device memory" in written
    stuck = (tmp_path / "process_1.log").read_text() if failing == 0 else done.stderr
    assert f"ran out of device memory (in process {failing} of 2)" in stuck


def test_a_bug_in_one_process_ends_all_at_once(tmp_path):
    """Left to itself, jax would wait five minutes for the other one, and then look like a process that lost it."""
    (tmp_path / "do_0_0").write_text("wait")
    (tmp_path / "do_1_0").write_text("bug")
    done = run([*launcher(tmp_path), *JAX_PROGRAM, tmp_path])
    assert done.returncode == 1, done.stderr
    assert "TypeError: nobody expected this" in (tmp_path / "process_1.log").read_text()
    assert "error: in process 1 of 2, see above" in done.stderr and "Not restarted" in done.stderr
    assert starts(tmp_path) == ["start_0_0", "start_1_0"]


def test_a_folder_in_use_is_refused_by_all_processes(tmp_path):
    """The first one asks for the lock; the others must not go on without it."""
    with locked(tmp_path, Console(enabled=False)):
        done = run([*launcher(tmp_path), *JAX_PROGRAM, tmp_path])
    assert done.returncode == 2 and "Not restarted" in done.stderr, done.stderr
    refusal = f"error: {tmp_path} is in use by process {os.getpid()} on "
    assert refusal in done.stderr and refusal in (tmp_path / "process_1.log").read_text()
    assert starts(tmp_path) == []


def test_restarts_are_limited(tmp_path):
    always = {f"do_{process}_{n}": f"await start_0_{n} start_1_{n}; exit 76" for process in (0, 1) for n in range(4)}
    done = run([*launcher(tmp_path), *scripted(tmp_path, **always)], TANGO_MAX_RESTARTS="2")
    assert done.returncode == 76, done.stderr
    assert "Not restarted: that was done 2 times already (TANGO_MAX_RESTARTS=2)" in done.stderr
    done = run([*launcher(tmp_path), *scripted(tmp_path, **always)], TANGO_MAX_RESTARTS="some")
    assert done.returncode == 2
    assert done.stderr.strip() == "tango_jax: error: TANGO_MAX_RESTARTS=some is no whole number: set it to 0 or more"
    assert len(starts(tmp_path)) == 6


def test_a_preempted_process_restarts_both_once_the_other_has_saved(tmp_path):
    actions = {"do_0_0": "await gone; sleep 0.5; touch $folder/saved; exit 75", "do_1_0": "touch $folder/gone; exit 75"}
    done = run([*launcher(tmp_path), *scripted(tmp_path, **actions)])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "saved").exists() and len(starts(tmp_path)) == 4


def test_each_process_has_its_own_cores_and_number(tmp_path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core cannot be shared out")
    share = 'python -c "import os; print(sorted(os.sched_getaffinity(0)))" >"$1/cores_$JAX_PROCESS_ID"'
    done = run([*launcher(tmp_path, "--devices=3"), *scripted(tmp_path, do_0_0=share, do_1_0=share)])
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"cores_{process}").read_text()) for process in (0, 1))
    assert set(first) | set(second) == os.sched_getaffinity(0) and not set(first) & set(second)
    seen = [environment_of(tmp_path, process) for process in (0, 1)]
    assert [item["JAX_PROCESS_ID"] for item in seen] == ["0", "1"]
    assert {item["JAX_NUM_PROCESSES"] for item in seen} == {"2"}
    assert len({item["JAX_COORDINATOR_ADDRESS"] for item in seen}) == 1
    assert "--xla_force_host_platform_device_count=3" in seen[0]["XLA_FLAGS"]
    assert "JAX_LOCAL_DEVICE_IDS" not in seen[0]


def test_gpus_are_shared_out_in_their_order(tmp_path):
    done = run([*launcher(tmp_path, "--platform=gpu", "--devices=2"), *scripted(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert [environment_of(tmp_path, process)["JAX_LOCAL_DEVICE_IDS"] for process in (0, 1)] == ["0,1", "2,3"]
    assert environment_of(tmp_path, 0)["JAX_PLATFORMS"] == "cuda,cpu"


WRONG = [[], ["0", "true"], ["2"], ["2", "--device=4", "true"], ["2", "--devices=x", "true"]]


@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_command_prints_the_usage(arguments):
    done = run(["bash", LAUNCH / "local_multiprocess.sh", *arguments])
    assert done.returncode == 2 and "--devices=K" in done.stderr and "set -e" not in done.stderr
