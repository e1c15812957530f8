"""A run that learns from its own samples, killed in each of its parts and started again: bit for bit as one that was
not. The process kills itself at the moment, so it does not matter how fast the machine is."""

import pytest

from torture.alone import KILL, PROGRAM, small_settings
from torture.kills import SIGKILLED
from torture.runs import difference, finish, make_undisturbed

# The file or folder that is about to get its name; all of it is written by then, and lost.
MOMENTS = {
    "sampling": "self/generator/round_2/part_0001.jsonl",
    "imitation": "self/generator/round_2/sft/generator/checkpoints/2",
    "the end of stage 1": "sft/generator",
    "the verifier's imitation": "self/verifier/round_1/sft/verifier/checkpoints/2",
    "a turn": "rollouts/turn_000002_generator_000000.jsonl",
}
FIRST_UPDATE = "sft/generator/checkpoints/1/manifest.sha256"


@pytest.mark.long
@pytest.mark.release
def test_a_run_killed_in_each_part_of_its_own_stage_one_ends_as_if_nothing_had_happened(tmp_path):
    cache, workdir, sampled, updated = tmp_path / "cache", tmp_path / "killed", {}, None
    undisturbed = make_undisturbed(tmp_path, small_settings(tmp_path), cache, is_compiled=True, program=PROGRAM)
    for moment, name in MOMENTS.items():
        ended = finish(undisturbed.start(workdir, f"{KILL}{workdir / name}"))
        assert ended.code == SIGKILLED, f"{moment}: {ended.stdout}\n{ended.stderr}"
        assert not (workdir / name).exists()
        if moment == "imitation":
            updated = (workdir / "self/generator/round_2" / FIRST_UPDATE).stat().st_mtime_ns
        assert {path: time for path, time in sample_times(workdir).items() if path in sampled} == sampled
        sampled = sample_times(workdir)
    ended = finish(undisturbed.start(workdir))
    assert ended.code == 0, ended.stderr
    assert "resumed after turn 1 of 3" in ended.stdout
    assert sample_times(workdir) == sampled and (workdir / FIRST_UPDATE).stat().st_mtime_ns == updated
    assert difference(workdir, undisturbed.workdir, undisturbed.shapes) == ""


def sample_times(workdir):
    """When each part was written: what is done stays."""
    return {path: path.stat().st_mtime_ns for path in workdir.glob("self/*/*/part_*.jsonl")}
