"""launch/tpu_vm.sh with a stand-in for gcloud: what it asks for, restarts, a preempted slice, signals.

Where the real gcloud is installed, it parses every command that the stand-in was given (it needs no account for that).
"""

import json
import re
import shutil
import signal
import subprocess
import sys

import pytest

from support.launching import environment, finish, run, start
from support.paths import LAUNCH, TESTS
from support.processes import wait_for

# On each worker: notes the start in the folder $1, which all share, and does what do_<worker>_<n> says.
SCRIPTED = """
    start=$(ls "$1" | grep -c "^start_${WORKER}_") || true
    echo "TANGO_DISTRIBUTED=$TANGO_DISTRIBUTED$2" >"$1/start_${WORKER}_$start"
    echo "worker $WORKER is up, start $start"
    if [[ -e "$1/do_${WORKER}_$start" ]]; then source "$1/do_${WORKER}_$start"; fi
"""


class Cloud:
    """A folder for the stand-in, one that the workers share, and the launcher's command."""

    def __init__(self, folder):
        self.folder, self.shared = folder / "cloud", folder / "shared"
        bin_folder = folder / "bin"
        for made in (self.folder, self.shared, bin_folder):
            made.mkdir()
        fake = bin_folder / "gcloud"
        fake.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{TESTS}/support/fake_gcloud.py" "$@"\n')
        fake.chmod(0o755)
        self.variables = {
            "FAKE_CLOUD": str(self.folder), "TPU_LOGS": str(folder / "logs"), "TPU_POLL_S": "0.1",
            "PATH": f"{bin_folder}:{environment()['PATH']}",
        }

    def start(self, **actions: str) -> subprocess.Popen:
        for name, action in actions.items():
            (self.shared / name).write_text(action)
        return start(["bash", LAUNCH / "tpu_vm.sh", "bash", "-c", SCRIPTED, "scripted", self.shared], **self.variables)

    def run(self, **actions: str) -> subprocess.CompletedProcess:
        return finish(self.start(**actions))

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls.jsonl").read_text().splitlines()]

    def commands(self) -> list[str]:
        """Without `describe`, which is asked often."""
        return [call[3] for call in self.calls() if call[3] != "describe"]

    def starts(self) -> list[str]:
        return sorted(path.name for path in self.shared.glob("start_*"))


@pytest.fixture
def cloud(tmp_path) -> Cloud:
    return Cloud(tmp_path)


def test_a_slice_is_made_and_the_command_runs_on_every_worker(cloud):
    done = cloud.run()
    assert done.returncode == 0, done.stderr
    assert cloud.commands() == ["create", "scp", "ssh", "ssh"]
    assert cloud.starts() == ["start_0_0", "start_1_0"]
    # jax is told to look for the others, and the command is as it was given.
    assert (cloud.shared / "start_1_0").read_text() == "TANGO_DISTRIBUTED=1\n"
    assert "worker 0 is up" in done.stdout and "worker 1" not in done.stdout
    assert (cloud.folder / "worker_1" / "tango_jax" / "tango_jax" / "train.py").exists()


def test_a_lost_worker_restarts_all(cloud):
    # Worker 1 is gone without a last line: the wrapper that would write it is killed as well.
    done = cloud.run(do_0_0="exit 76", do_1_0="kill -KILL $PPID; exit 1")
    assert done.returncode == 0, done.stderr
    assert "worker 0: exit code 76: it lost another process of the job" in done.stderr
    assert "worker 1: exit code 137: killed" in done.stderr
    assert "restarting all processes (1 of at most 20 times)" in done.stderr
    assert cloud.starts() == ["start_0_0", "start_0_1", "start_1_0", "start_1_1"]
    assert cloud.commands() == ["create", "scp", "ssh", "ssh", "scp", "ssh", "ssh"]


@pytest.mark.long
def test_a_preempted_slice_is_made_anew_when_there_is_room(cloud):
    taken = 'echo -n PREEMPTED >"$FAKE_CLOUD/state"; touch "$FAKE_CLOUD/no_capacity"; kill -KILL $PPID; exit 1'
    done = cloud.run(do_0_0="exit 75", do_1_0=taken)
    assert done.returncode == 0, done.stderr
    assert "the slice is PREEMPTED: deleting it" in done.stderr
    # The first attempt to make it again finds no capacity, and does not end the job.
    assert cloud.commands() == ["create", "scp", "ssh", "ssh", "delete", "create", "create", "scp", "ssh", "ssh"]
    assert cloud.starts() == ["start_0_0", "start_0_1", "start_1_0", "start_1_1"]
    assert check_with_gcloud(cloud) in (None, {"describe", "create", "delete", "scp", "ssh"})


def test_a_mistake_ends_the_job(cloud):
    done = cloud.run(do_0_0="exit 76", do_1_0="exit 2")
    assert done.returncode == 2, done.stderr
    assert "worker 1: exit code 2: a mistake" in done.stderr and len(cloud.starts()) == 2


def test_a_setup_that_fails_is_a_mistake(cloud):
    cloud.variables["TPU_SETUP"] = "cd /nowhere"
    done = cloud.run()
    assert done.returncode == 1 and "No such file or directory" in done.stdout
    assert "worker 1: exit code 1: TPU_SETUP failed, see " in done.stderr
    assert cloud.starts() == []


def test_a_setup_that_fails_on_a_slice_made_anew_is_tried_again(cloud):
    setups = '"$FAKE_CLOUD/setups_$WORKER"'
    cloud.variables["TPU_SETUP"] = f"echo >>{setups}; [[ $WORKER == 0 || $(wc -l <{setups}) != 2 ]]"
    done = cloud.run(do_0_0="exit 76", do_1_0='echo -n PREEMPTED >"$FAKE_CLOUD/state"; exit 76')
    assert done.returncode == 0, done.stderr
    assert "worker 1: exit code 137: TPU_SETUP failed, see " in done.stderr
    assert "restarting all processes (2 of at most 20 times)" in done.stderr
    # In the second attempt worker 1 did not come as far as its command.
    assert cloud.starts() == ["start_0_0", "start_0_1", "start_0_2", "start_1_0", "start_1_1"]


def test_the_example_of_a_setup_waits_for_the_lock_of_the_packages():
    text = (LAUNCH / "tpu_vm.sh").read_text()
    example = re.search(r"Example[^:]*:\n((?:#   .*\n)+)", text)[1].replace("#   ", "")
    done = run(["bash", "-c", f'sudo() {{ echo "$@"; }}; mountpoint() {{ false; }}; {example}'])
    installs, *others = done.stdout.splitlines()
    assert installs.startswith("apt-get install ") and " -o DPkg::Lock::Timeout=600 " in installs
    assert others == ["mkdir -p /mnt/share", "mount FILESTORE_IP:/share /mnt/share"]


def test_an_environment_that_cannot_be_made_is_a_mistake(cloud):
    cloud.variables["TANGO_PYTHON"] = "/nowhere/python"
    done = cloud.run()
    assert done.returncode == 1 and "TANGO_PYTHON=/nowhere/python is not a Python" in done.stdout
    assert cloud.starts() == []


@pytest.mark.parametrize(("flags", "options"), [
    (None, ["--spot"]), ("", []), ("--reserved --network=mine", ["--reserved", "--network=mine"]),
])
def test_a_slice_that_cannot_be_made_at_first_is_a_mistake(cloud, flags, options):
    if flags is not None:
        cloud.variables["TPU_CREATE_FLAGS"] = flags
    (cloud.folder / "no_capacity").touch()
    done = cloud.run()
    assert done.returncode == 1
    [create] = [call for call in cloud.calls() if call[3] == "create"]
    assert [item for item in create[5:] if not re.match("--(accelerator-type|version|zone)=", item)] == options
    assert "no more capacity in the zone" in done.stderr and "gcloud could not make the slice" in done.stderr


def test_a_signal_lets_the_workers_save(cloud):
    saving = 'trap "exit 75" TERM; while true; do sleep 0.1; done'
    launched = cloud.start(do_0_0=saving, do_1_0=saving)
    wait_for(lambda: len(cloud.starts()) == 2, "both workers run", launched)
    launched.send_signal(signal.SIGTERM)
    done = finish(launched)
    assert done.returncode == 75, done.stderr
    assert "worker 1: exit code 75: preempted, its state is saved" in done.stderr
    assert len(cloud.starts()) == 2


def test_what_a_lost_connection_left_behind_saves_and_all_start_again(cloud):
    """gcloud runs a command again on a worker that it lost; the command may still run there, and holds the chips."""
    again = 'exec 9>&-; setsid bash "$HOME/tango_jax/launch/_tpu_worker.sh" true >"$1/again" 2>&1 &'
    saving = 'trap "exit 75" TERM; while true; do sleep 0.1; done'
    once_it_ended = 'until grep -qs "exit code" "$1/again"; do sleep 0.1; done; exit 76'
    done = cloud.run(do_0_0=saving.replace("while", f"{again} while"), do_1_0=once_it_ended)
    assert done.returncode == 0, done.stderr
    assert "ending the process that an earlier connection left behind" in (cloud.shared / "again").read_text()
    assert "ended with exit code 143" in (cloud.shared / "again").read_text()
    assert "worker 0: exit code 75" in done.stderr and len(cloud.starts()) == 4


def check_with_gcloud(cloud: Cloud) -> set[str] | None:
    """The commands that the real one parsed: it refuses options that it does not know before it asks for an account."""
    real = shutil.which("gcloud")
    if real is None:
        return None
    known = environment(CLOUDSDK_CONFIG=str(cloud.folder), CLOUDSDK_CORE_PROJECT="tango")
    parsed = set()
    for call in {call[3]: call for call in cloud.calls()}.values():
        done = subprocess.run([real, *call], env=known, capture_output=True, text=True, check=False)
        assert "do not currently have an active account" in done.stderr
        parsed.add(call[3])
    return parsed
