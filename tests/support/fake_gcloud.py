"""Acts for gcloud in test_tpu_vm.py: a slice with two workers, which are folders of $FAKE_CLOUD.

Arguments are noted in $FAKE_CLOUD/calls.jsonl. The file `state` holds the slice's state; there is none without it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

WORKERS = (0, 1)


def option(name: str) -> str | None:
    prefix = f"--{name}="
    return next((item.removeprefix(prefix) for item in sys.argv if item.startswith(prefix)), None)


def ssh(cloud: Path) -> int:
    folder = option("output-directory")
    running = []
    for worker in WORKERS:
        home = cloud / f"worker_{worker}"
        variables = os.environ | {"HOME": str(home), "WORKER": str(worker), "TANGO_PLATFORM": "cpu"}
        log = open(Path(folder) / f"{worker}.log", "w") if folder else None
        command = ["bash", "-c", option("command")]
        running.append(subprocess.Popen(command, cwd=home, env=variables, stdout=log, stderr=log))
    return next((code for code in [process.wait() for process in running] if code), 0)


def main() -> int:
    cloud = Path(os.environ["FAKE_CLOUD"])
    state = cloud / "state"
    with open(cloud / "calls.jsonl", "a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    command = sys.argv[4]  # compute tpus tpu-vm COMMAND
    if command == "describe":
        if state.exists():
            print(state.read_text())
        return 0 if state.exists() else 1
    if command == "create":
        if (cloud / "no_capacity").exists():
            (cloud / "no_capacity").unlink()
            print("ERROR: no more capacity in the zone", file=sys.stderr)
            return 1
        for worker in WORKERS:
            (cloud / f"worker_{worker}").mkdir()
        state.write_text("READY")
    if command == "delete":
        state.unlink()
        for worker in WORKERS:
            shutil.rmtree(cloud / f"worker_{worker}")
    if command == "scp":
        for worker in WORKERS:
            shutil.copy(sys.argv[5], cloud / f"worker_{worker}" / sys.argv[6].partition(":")[2])
    return ssh(cloud) if command == "ssh" else 0


if __name__ == "__main__":
    sys.exit(main())
