"""The compile cache of several processes."""

import json

from support.launching import run
from support.paths import LAUNCH


def test_a_second_start_of_two_processes_compiles_nothing(tmp_path):
    found = []
    for number in (0, 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        done = run(["bash", LAUNCH / "local_multiprocess.sh", 2, "--devices=2", f"--logs={folder}", "python", "-m",
                    "tests.support.cached_program", tmp_path / "cache", folder])
        assert done.returncode == 0, done.stderr
        found.append([json.loads((folder / f"{process}.json").read_text()) for process in (0, 1)])
    # A program for the devices of the process, and one for all.
    counts = [(result["requests"], result["compiled"]) for result in (*found[0], *found[1])]
    assert counts == [(2, 2), (2, 2), (2, 0), (2, 0)]
    assert found[0] == [first | {"compiled": 2} for first in found[1]]  # with the same sums
