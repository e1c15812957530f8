"""Whole runs in processes of their own: interrupted anywhere and started again they end as if nothing had happened."""

import json
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from support.paths import CONFIGS
from support.policies import policies_of
from support.processes import finish, wait_for
from support.tiny_checkpoints import full_disk
from support.tiny_train import LAST_TURN, TinyTrain, repeatable_rows
from tango_jax import train
from tango_jax.cli.command_line import load_config
from tango_jax.loop.resume import RunState
from tango_jax.loop.run import run_turns
from tango_jax.loop.turn import RunContext
from tango_jax.records import Memory
from tango_jax.runtime import checkpoint as checkpoint_lib
from tango_jax.runtime.checkpoint import read_state
from tango_jax.runtime.termination import PREEMPTED
from tango_jax.tracking.metrics import read_metrics

ROLES = ("generator", "verifier")


@pytest.fixture(scope="module")
def abstract_states(tiny_train) -> dict:
    """Shapes of what a checkpoint holds."""
    policies = policies_of(load_config(str(CONFIGS / "tiny.py"), tiny_train.overrides))
    return {role: jax.eval_shape(policy.init, np.zeros(2, np.uint32)) for role, policy in policies.items()}


def assert_same_results(workdir: Path, expected: Path, abstract_states: dict) -> None:
    for name in ("metrics.jsonl", "sft/generator/metrics.jsonl", "sft/verifier/metrics.jsonl"):
        assert repeatable_rows(workdir / name) == repeatable_rows(expected / name)
    assert (workdir / "transcripts.md").read_text() == (expected / "transcripts.md").read_text()
    dumped, wanted = ({path.name: path.read_bytes() for path in (folder / "rollouts").iterdir()}
                      for folder in (workdir, expected))
    assert dumped == wanted and len(wanted) == 8
    assert sum(not name.startswith("evaluation") for name in wanted) == 3  # the first turn of each role, and its sixth
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (workdir, expected)]
    assert summaries[0] | {"wall_seconds": 0} == summaries[1] | {"wall_seconds": 0}
    saved = [read_state(folder / "checkpoints", abstract_states) for folder in (workdir, expected)]
    assert saved[0].step == saved[1].step == LAST_TURN
    for name in ("turn", "cursors", "label_counts", "evidence", "passes", "own", "source_fingerprint"):
        assert saved[0].meta[name] == saved[1].meta[name]
    for (path, array), other in zip(jax.tree_util.tree_leaves_with_path(saved[0].state),
                                    jax.tree.leaves(saved[1].state), strict=True):
        assert np.asarray(array).tobytes() == np.asarray(other).tobytes(), jax.tree_util.keystr(path)


# -------------------------------------------------------------------------------------------------- interruptions


def turns_done(workdir: Path) -> int:
    path = workdir / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    return rows[-1]["step"] if rows else 0


def interrupt(train: TinyTrain, workdir: Path, number: signal.Signals, is_reached, delay: float):
    """Start the run, send the signal some time after the moment, and wait for the end."""
    process = train.start(workdir)
    try:
        wait_for(is_reached, "the moment of the interruption", process)
        time.sleep(delay)
        process.send_signal(number)
    finally:
        done = finish(process)
    assert done.code != 0, f"the run was over before it could be interrupted:\n{done.stdout}"
    return done


@pytest.fixture(scope="module")
def interrupted(tiny_train, tmp_path_factory):
    """The run, killed in both stages, once stopped with Ctrl-C and once with SIGTERM: its folder and how each attempt
    ended. (The torture suite does each of these many times, at random moments.)"""
    workdir = tmp_path_factory.mktemp("interrupted") / "run"
    rng = np.random.default_rng(0)
    ends = [interrupt(tiny_train, workdir, signal.SIGKILL, (workdir / "sft/verifier/checkpoints/50").exists,
                      rng.uniform(0, 0.4))]
    for number, least in ((signal.SIGINT, 0), (signal.SIGTERM, 2), (signal.SIGKILL, 4)):
        # One or two turns further than the attempt before came, whose rows stay in the file until this one cuts it.
        # Before the last one a checkpoint is complete, which is saved after every second turn.
        target = min(max(turns_done(workdir) + int(rng.integers(1, 3)), least), LAST_TURN - 2)
        ends.append(interrupt(tiny_train, workdir, number, lambda t=target: turns_done(workdir) >= t,
                              rng.uniform(0, 0.1)))
        assert not (workdir / "summary.json").exists()
    ends.append(tiny_train.run(workdir))
    return workdir, ends


@pytest.mark.long
def test_a_run_killed_anywhere_ends_as_if_nothing_had_happened(interrupted, tiny_run, abstract_states):
    workdir, ends = interrupted
    assert [end.code for end in ends] == [-signal.SIGKILL, 130, PREEMPTED, -signal.SIGKILL, 0]
    assert any("resumed after turn" in end.stdout for end in ends)
    assert "told to stop (SIGTERM): saved" in ends[2].stdout
    assert not any("Traceback" in end.stderr for end in ends)
    assert_same_results(workdir, tiny_run.workdir, abstract_states)


@pytest.mark.long
def test_ctrl_c_ends_with_one_line(interrupted):
    workdir, ends = interrupted
    stopped = ends[1]
    assert stopped.stderr.splitlines()[-1] in (  # without and with unsaved work, which is finished and saved first
        f"interrupted; the same command resumes from what is saved in {workdir}",
        f"interrupted: saved; the same command resumes in {workdir}",
    )
    assert "Traceback" not in stopped.stderr + stopped.stdout


@pytest.mark.long
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tiny_train, tiny_run, tmp_path, abstract_states):
    workdir = tmp_path / "run"
    shutil.copytree(tiny_run.workdir, workdir)
    (workdir / "summary.json").unlink()  # as if it had been killed before it wrote its results
    data = next((workdir / "checkpoints" / str(LAST_TURN) / "state" / "d").iterdir())
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    done = tiny_train.run(workdir)
    assert done.code == 0, done.stderr
    assert f"checkpoints/{LAST_TURN}" in done.stderr and f"falling back to step {LAST_TURN - 2}" in done.stderr
    assert f"resumed after turn {LAST_TURN - 2} of {LAST_TURN}" in done.stdout
    assert_same_results(workdir, tiny_run.workdir, abstract_states)


def test_a_checkpoint_that_could_not_be_written_ends_the_run_before_its_next_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_lib, "seal", full_disk)
    output = SimpleNamespace(checkpointer=checkpoint_lib.Checkpointer(tmp_path))
    output.checkpointer.save(1, {"weight": np.ones(1)}, {})
    output.checkpointer.latest_step()  # waits
    context = RunContext(load_config(str(CONFIGS / "tiny.py"), []), None, {}, {}, None)
    start = RunState({}, Memory(turn=1), owes_evaluation=False)
    with pytest.raises(checkpoint_lib.CheckpointError, match="could not save step 1 .*No space left"):
        run_turns(context, SimpleNamespace(num_turns=2), [], start, output, None)


@pytest.fixture
def train_here(tiny_train, monkeypatch, capsys):
    """(workdir, overrides) -> (what the command ends with, what it prints), in this process."""
    monkeypatch.setattr("tango_jax.cli.session.configure", lambda config: None)

    def run(workdir: Path, *overrides: str) -> tuple[str | None, str]:
        settings = [*tiny_train.overrides, *(f"{role}.mesh.fsdp=1" for role in ROLES), *overrides]
        code = None
        try:
            train.main([f"--config={CONFIGS / 'tiny.py'}", f"--workdir={workdir}",
                        *(f"--config.{setting}" for setting in settings)])
        except SystemExit as stopped:
            code = str(stopped)
        return code, capsys.readouterr().out

    return run


def test_a_finished_run_is_left_alone(train_here, tiny_run):
    before = {path: path.stat().st_mtime_ns for path in tiny_run.workdir.rglob("*.jsonl")}
    summary = (tiny_run.workdir / "summary.json").read_bytes()
    code, said = train_here(tiny_run.workdir)
    assert code is None and "holds a finished run" in said
    assert (tiny_run.workdir / "summary.json").read_bytes() == summary
    assert {path: path.stat().st_mtime_ns for path in tiny_run.workdir.rglob("*.jsonl")} == before


def test_the_start_of_a_finished_run_may_have_moved(train_here, tiny_run, tmp_path):
    workdir = tmp_path / "copy"
    shutil.copytree(tiny_run.workdir, workdir)
    settings = json.loads((workdir / "config.json").read_text()) | {"generator.init_from": "runs/then"}
    (workdir / "config.json").write_text(json.dumps(settings))
    code, said = train_here(workdir, "generator.init_from=runs/now")
    assert code is None and "holds a finished run" in said


@pytest.mark.parametrize("start", ["init_from", "resume"])
def test_a_checkpoint_of_another_architecture_gives_one_error(train_here, tiny_run, tmp_path, start):
    overrides = ["generator.model.num_layers=2"]
    if start == "init_from":
        workdir = tmp_path / "run"
        overrides += [f"{role}.init_from={tiny_run.workdir}" for role in ROLES]
    else:
        workdir = tmp_path / "copy"
        shutil.copytree(tiny_run.workdir, workdir)
        (workdir / "summary.json").unlink()
        # Or the settings would be refused before, with the name of the one that differs.
        settings = json.loads((workdir / "config.json").read_text()) | {"generator.model.num_layers": 2}
        (workdir / "config.json").write_text(json.dumps(settings))
    error, said = train_here(workdir, *overrides)
    assert error.startswith("error: ") and "\n" not in error and "error: " not in said
    assert "is a checkpoint of another model or optimizer" in error and "Compiling" not in said
    assert re.search(r"layers/\w+: checkpoint float32\[1,.*\], this run float32\[2,", error)
