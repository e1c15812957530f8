"""launch/slurm.sbatch under a real slurmctld and slurmd: two tasks on one node, joined, restarted and queued again."""

import json
import time

import pytest

from support import slurm_cluster
from support.launching import scripted, starts
from support.paths import LAUNCH
from support.processes import wait_for

pytestmark = pytest.mark.skipif(
    not slurm_cluster.is_installed(), reason="needs slurmctld and slurmd (on Debian: apt-get install slurmctld slurmd)"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = slurm_cluster.start_cluster(tmp_path_factory.mktemp("slurm"))
    yield made
    made.stop()


def submit(cluster, folder, command: list, *options: str, **changes: str) -> str:
    """Two tasks on the CPU, unless the options say otherwise; the job's number."""
    exported = {"TANGO_PLATFORM": "cpu", "LOCAL_DEVICES": "2", **changes}
    variables = ",".join(["ALL", *(f"{name}={value}" for name, value in exported.items())])
    usual = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", f"--output={folder}/output"]
    script = [LAUNCH / "slurm.sbatch", *command]
    return cluster.command("sbatch", "--parsable", f"--export={variables}", *usual, *options, *script)


def start_again(cluster, number: str) -> None:
    """SLURM lets two minutes pass before it starts a job that was queued again. Two seconds are needed."""
    cluster.wait_for_state(number, "PENDING")
    time.sleep(2)  # slurmd refuses a job whose last start was revoked within the same second
    cluster.command("scontrol", "update", f"jobid={number}", "StartTime=now")


def test_two_tasks_join_are_queued_again_restarted_and_finish(cluster, tmp_path):
    # The first start is preempted; of the second one a process is lost; the third is done.
    for name, action in {"do_0_0": "wait", "do_1_0": "wait", "do_0_1": "wait", "do_1_1": "kill"}.items():
        (tmp_path / name).write_text(action)
    number = submit(cluster, tmp_path, ["python", "-m", "tests.support.launched_program", tmp_path])
    output = tmp_path / "output"
    wait_for(lambda: output.exists() and output.read_text().count("of 2 is up, start 0") == 2, "both are up")
    # What --signal does before the time limit, and a preemption: SIGTERM to all processes of the job's steps.
    cluster.command("scancel", "--signal=TERM", number)
    start_again(cluster, number)
    job = cluster.wait_for_state(number, "COMPLETED", "FAILED", "CANCELLED")
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), output.read_text()
    assert starts(tmp_path) == [f"start_{process}_{n}" for process in (0, 1) for n in (0, 1, 2)]
    for process in (0, 1):
        seen = json.loads((tmp_path / f"start_{process}_2.json").read_text())
        # 1 + 2 + 3 + 4, one number on each device of both processes.
        assert (seen["processes"], seen["devices"], seen["sum"]) == (2, 4, 10.0)
        assert seen["environment"]["JAX_PROCESS_ID"] == str(process)
    said = output.read_text()
    assert f"job {number} was preempted and has saved its state; it is queued again" in said
    assert "process 1 ended with exit code 137: killed" in said
    assert "restarting all processes (1 of at most 20 times)" in said


def test_a_mistake_ends_the_job(cluster, tmp_path):
    number = submit(cluster, tmp_path, scripted(tmp_path, do_0_0="await start_1_0; exit 76", do_1_0="exit 1"))
    job = cluster.wait_for_state(number, "FAILED", "COMPLETED")
    assert job["JobState"] == "FAILED" and job["Restarts"] == "0"
    assert "process 1 ended with exit code 1: a mistake" in (tmp_path / "output").read_text()
    assert starts(tmp_path) == ["start_0_0", "start_1_0"]


def test_scancel_ends_the_job_after_a_save(cluster, tmp_path):
    saving = 'trap "echo saved >$1/saved_$JAX_PROCESS_ID; exit 75" TERM; while true; do sleep 0.1; done'
    number = submit(cluster, tmp_path, scripted(tmp_path, do_0_0=saving, do_1_0=saving))
    wait_for(lambda: len(starts(tmp_path)) == 2, "both started")
    cluster.command("scancel", number)
    job = cluster.wait_for_state(number, "CANCELLED")
    assert sorted(path.name for path in tmp_path.glob("saved_*")) == ["saved_0", "saved_1"]
    # Saved and 75, as after a preemption; but whoever cancels a job does not want it back.
    wait_for(lambda: not cluster.command("squeue", "--noheader"), "the queue is empty")
    assert job["Restarts"] == "0" and len(starts(tmp_path)) == 2


def test_requeues_are_limited(cluster, tmp_path):
    actions = {f"do_{process}_0": "exit 75" for process in (0, 1)}
    number = submit(cluster, tmp_path, scripted(tmp_path, **actions), TANGO_MAX_REQUEUES="0")
    assert cluster.wait_for_state(number, "FAILED", "COMPLETED")["JobState"] == "FAILED"
    assert "not queued again: that was done 0 times already" in (tmp_path / "output").read_text()



@pytest.mark.parametrize(("tasks", "gpus", "ids"), [(2, "2", ["0", "1"]), (1, "a100:2", ["0,1"])])
def test_a_process_per_gpu_or_per_node(cluster, tmp_path, tasks, gpus, ids):
    options = [f"--gpus-per-node={gpus}", f"--ntasks-per-node={tasks}"]
    number = submit(cluster, tmp_path, scripted(tmp_path), *options, TANGO_PLATFORM="gpu")
    job = cluster.wait_for_state(number, "COMPLETED", "FAILED")
    assert job["JobState"] == "COMPLETED", (tmp_path / "output").read_text()
    assert starts(tmp_path) == [f"start_{process}_0" for process in range(tasks)]
    for process, own in enumerate(ids):
        seen = (tmp_path / f"start_{process}_0").read_text().splitlines()
        assert {f"JAX_LOCAL_DEVICE_IDS={own}", f"JAX_NUM_PROCESSES={tasks}", "JAX_PLATFORMS=cuda,cpu"} <= set(seen)


def test_gpus_that_cannot_be_shared_out_are_named(cluster, tmp_path):
    number = submit(cluster, tmp_path, scripted(tmp_path), "--gpus-per-node=1", TANGO_PLATFORM="gpu")
    assert cluster.wait_for_state(number, "COMPLETED", "FAILED")["JobState"] == "FAILED"
    assert "1 GPUs per node cannot be shared by 2 processes: --ntasks-per-node" in (tmp_path / "output").read_text()
