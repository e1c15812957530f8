"""Whole runs in processes of their own: interrupted anywhere and started again they end as if nothing had happened."""

import csv
import json
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from support.paths import ROOT
from support.processes import finish, wait_for
from support.tiny_train import TinyTrain
from tango_jax.ablate import mean_over_training
from tango_jax.arms import ARMS
from tango_jax.cli.command_line import load_config
from tango_jax.rl.policy import make_policies
from tango_jax.runtime.checkpoint import read_state, tree_fingerprint
from tango_jax.tracking.metrics import read_metrics

ROLES = ("generator", "verifier")
LAST_TURN = 10  # 2 of the warm-up, 6 generator steps, a verifier turn after each 3 of them


def repeatable_rows(path: Path) -> list[dict]:
    """The rows without what a clock measured."""
    return [
        {name: value for name, value in row.items() if not name.startswith(("time/", "throughput/", "memory/"))}
        for row in read_metrics(path)
    ]


@pytest.fixture(scope="module")
def abstract_states(tiny_train) -> dict:
    """Shapes of what a checkpoint holds."""
    policies = make_policies(load_config(str(ROOT / "configs/tiny.py"), tiny_train.overrides))
    return {role: jax.eval_shape(policy.init, np.zeros(2, np.uint32)) for role, policy in policies.items()}


def assert_same_results(workdir: Path, expected: Path, abstract_states: dict) -> None:
    for name in ("metrics.jsonl", "sft/generator/metrics.jsonl", "sft/verifier/metrics.jsonl"):
        assert repeatable_rows(workdir / name) == repeatable_rows(expected / name)
    assert (workdir / "transcripts.md").read_text() == (expected / "transcripts.md").read_text()
    dumped, wanted = ({path.name: path.read_bytes() for path in (folder / "rollouts").iterdir()}
                      for folder in (workdir, expected))
    assert dumped == wanted and len(wanted) == 3  # the first turn of each role, and its sixth
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (workdir, expected)]
    assert summaries[0] | {"wall_seconds": 0} == summaries[1] | {"wall_seconds": 0}
    saved = [read_state(folder / "checkpoints", abstract_states) for folder in (workdir, expected)]
    assert saved[0].step == saved[1].step == LAST_TURN
    for name in ("turn", "cursor", "label_counts", "source_fingerprint"):
        assert saved[0].meta[name] == saved[1].meta[name]
    for (path, array), other in zip(jax.tree_util.tree_leaves_with_path(saved[0].state),
                                    jax.tree.leaves(saved[1].state), strict=True):
        assert np.asarray(array).tobytes() == np.asarray(other).tobytes(), jax.tree_util.keystr(path)


def test_the_run_ends_with_its_results(tiny_run):
    workdir, stdout = tiny_run
    summary = json.loads((workdir / "summary.json").read_text())
    assert {name: set(value) if isinstance(value, dict) else None for name, value in summary.items()} == {
        "arm": None, "seed": None, "wall_seconds": None, "compiles_after_warmup": None, "logprob_gap_max": None,
        "generator": {"accuracy_initial", "accuracy_final"},
        "verifier": {"step_f1_initial", "step_f1_final", "outcome_f1_initial", "outcome_f1_final"},
    }  # fmt: skip
    assert (summary["arm"], summary["seed"], summary["compiles_after_warmup"]) == ("tango", 0, 0)
    assert 0 < summary["logprob_gap_max"] < 1e-4
    listed = {Path(line.strip()) for line in stdout.split("\nfiles:\n")[1].splitlines()}
    assert listed == {workdir / name for name in ("metrics.jsonl", "summary.json", "curves.png", "transcripts.md",
                                                  "rollouts", "checkpoints", "sft")}
    assert all(path.exists() for path in listed)
    assert (workdir / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(re.findall("^## `last_letter/test/", (workdir / "transcripts.md").read_text(), re.MULTILINE)) == 3


def test_both_roles_take_their_turns(tiny_run):
    rows = read_metrics(tiny_run.workdir / "metrics.jsonl")
    turns = [(row["step"], row["phase"]) for row in rows if row["phase"] != "eval"]
    phases = ["warmup"] * 2 + (["generator"] * 3 + ["verifier"]) * 2
    assert turns == list(enumerate(phases, 1))
    assert [(row["step"], row["generator_step"]) for row in rows if row["phase"] == "eval"] == [
        (0, 0), (2, 0), (5, 3), (9, 6), (LAST_TURN, 6),
    ]  # fmt: skip
    assert None not in [value for row in rows for value in row.values()]


def test_a_policy_starts_at_its_reference(tiny_run):
    rows = read_metrics(tiny_run.workdir / "metrics.jsonl")
    for role in ROLES:
        kl = [row[f"{role}/kl"] for row in rows if f"{role}/kl" in row]
        assert kl[0] == pytest.approx(0.0, abs=1e-6)
        assert max(kl) > 1e-4  # and leaves it


def test_sampler_and_trainer_agree_at_every_turn(tiny_run):
    gaps = [value for row in read_metrics(tiny_run.workdir / "metrics.jsonl") for name, value in row.items()
            if name.endswith("/logprob_gap_max")]
    assert len(gaps) == LAST_TURN
    assert 0 < max(gaps) < 1e-4


# -------------------------------------------------------------------------------------------------- interruptions


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


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
    """The run, killed in both stages and once stopped with Ctrl-C: its folder and how each attempt ended."""
    workdir = tmp_path_factory.mktemp("interrupted") / "run"
    rng = np.random.default_rng(0)
    stage_one = workdir / "sft"
    ends = [
        interrupt(tiny_train, workdir, signal.SIGKILL, is_reached, rng.uniform(0, delay))
        for is_reached, delay in (
            (lambda: lines(stage_one / "generator/metrics.jsonl"), 0.01),  # before the first checkpoint
            (lambda: (stage_one / "generator/checkpoints/50").exists(), 0.4),
            (lambda: (stage_one / "verifier/checkpoints/50").exists(), 0.4),
        )
    ]
    for number in (signal.SIGINT, signal.SIGKILL, signal.SIGKILL):
        # One or two turns further than the attempt before came, whose rows stay in the file until this one cuts it.
        target = min(turns_done(workdir) + int(rng.integers(1, 3)), LAST_TURN - 2)
        ends.append(interrupt(tiny_train, workdir, number, lambda t=target: turns_done(workdir) >= t,
                              rng.uniform(0, 0.1)))
        assert not (workdir / "summary.json").exists()
    ends.append(tiny_train.run(workdir))
    return workdir, ends


def test_a_run_killed_anywhere_ends_as_if_nothing_had_happened(interrupted, tiny_run, abstract_states):
    workdir, ends = interrupted
    assert [end.code for end in ends] == [-signal.SIGKILL] * 3 + [1] + [-signal.SIGKILL] * 2 + [0]
    assert any("resumed after turn" in end.stdout for end in ends)
    assert not any("Traceback" in end.stderr for end in ends)
    assert_same_results(workdir, tiny_run.workdir, abstract_states)


def test_ctrl_c_ends_with_one_line(interrupted):
    workdir, ends = interrupted
    stopped = ends[3]
    assert stopped.stderr.splitlines()[-1] == (
        f"interrupted; the same command resumes from the last checkpoint in {workdir}"
    )
    assert "Traceback" not in stopped.stderr + stopped.stdout


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


def test_a_finished_run_is_left_alone(tiny_train, tiny_run):
    before = {path: path.stat().st_mtime_ns for path in tiny_run.workdir.rglob("*.jsonl")}
    summary = (tiny_run.workdir / "summary.json").read_bytes()
    done = tiny_train.run(tiny_run.workdir)
    assert done.code == 0, done.stderr
    assert "holds a finished run" in done.stdout
    assert (tiny_run.workdir / "summary.json").read_bytes() == summary
    assert {path: path.stat().st_mtime_ns for path in tiny_run.workdir.rglob("*.jsonl")} == before


@pytest.mark.parametrize("start", ["init_from", "resume"])
def test_a_checkpoint_of_another_architecture_gives_one_error(tiny_train, tiny_run, tmp_path, start):
    overrides = ["generator.model.num_layers=1"]
    if start == "init_from":
        workdir = tmp_path / "run"
        overrides += [f"{role}.init_from={tiny_run.workdir}" for role in ROLES]
    else:
        workdir = tmp_path / "copy"
        shutil.copytree(tiny_run.workdir, workdir)
        (workdir / "summary.json").unlink()
        # Or the settings would be refused before, with the name of the one that differs.
        settings = json.loads((workdir / "config.json").read_text()) | {"generator.model.num_layers": 1}
        (workdir / "config.json").write_text(json.dumps(settings))
    done = tiny_train.run(workdir, *overrides)
    assert done.code == 1
    assert "Traceback" not in done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: ") and done.stderr.count("error: ") == 1
    assert "is the checkpoint of another model/optimizer" in error and "Compiling" not in done.stdout
    assert re.search(r"layers/\w+: checkpoint float32\[2,.*\], this run float32\[1,", error)


def test_stage_one_alone_is_what_another_run_starts_from(tiny_train, tmp_path):
    overrides = [*tiny_train.overrides, *(f"{role}.sft.{name}=2" for role in ROLES
                                          for name in ("steps", "eval_every", "checkpoint_every"))]  # fmt: skip
    command = [sys.executable, "-m", "tango_jax.sft", "--config=configs/tiny.py", f"--workdir={tmp_path / 'sft'}"]
    done = finish(tiny_train.start_command([*command, *(f"--config.{override}" for override in overrides)]))
    assert done.code == 0, done.stderr
    for role in ROLES:
        assert f"{role}: {tmp_path / 'sft' / 'sft' / role}" in done.stdout
        assert (tmp_path / "sft" / "sft" / role / "checkpoints" / "2").is_dir()
    assert json.loads((tmp_path / "sft" / "config.json").read_text())["generator.sft.steps"] == 2
    overrides += [f"{role}.init_from={tmp_path / 'sft'}" for role in ROLES]
    done = tiny_train.run(tmp_path / "run", *overrides, "rl.warmup_steps=0", "rl.generator_steps=1")
    assert done.code == 0, done.stderr
    assert not (tmp_path / "run" / "sft").exists()


# --------------------------------------------------------------------------------------------- the arms, the ablation

@pytest.fixture(scope="module")
def ablation(tiny_train, tmp_path_factory) -> Path:
    """An ablation of every arm: three generator steps, two seeds, one stage 1."""
    folder = tmp_path_factory.mktemp("ablation")
    overrides = [*tiny_train.overrides, "rl.generator_steps=3", "ablation.seeds=(0, 1)"]
    flags = ["--config=configs/tiny.py", f"--workdir={folder}", *(f"--config.{override}" for override in overrides)]
    done = finish(tiny_train.start_command([sys.executable, "-m", "tango_jax.ablate", *flags]))
    assert done.code == 0, done.stderr
    return folder


def metrics_of(ablation: Path, arm: str, seed: int = 0) -> list[dict]:
    return repeatable_rows(ablation / arm / f"seed_{seed}" / "metrics.jsonl")


def test_ablation_trains_stage_one_once_and_every_arm_starts_from_it(ablation):
    assert {path.parent for path in ablation.rglob("sft")} == {ablation}
    first_evaluations = [metrics_of(ablation, arm, seed)[0] for arm in ARMS for seed in (0, 1)]
    assert all(row == first_evaluations[0] for row in first_evaluations)


def test_ablation_reports_every_arm_and_seed(ablation):
    with open(ablation / "ablation.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["arm"], row["seed"]) for row in rows} == {(arm, seed) for arm in ARMS for seed in "01"}
    table = (ablation / "ablation.md").read_text()
    for arm in ARMS:
        last = [metrics_of(ablation, arm, seed)[-1]["generator/accuracy"] for seed in (0, 1)]
        line = next(line for line in table.splitlines() if line.startswith(f"| {arm} |"))
        assert f"{np.mean(last):.3f} ({last[0]:.2f}, {last[1]:.2f})" in line


def test_ablation_draws_its_figure(ablation):
    assert (ablation / "ablation.png").read_bytes().startswith(b"\x89PNG")


def test_mean_over_training_counts_a_step_once():
    points = [(0, 0.0), (0, 0.1), (6, 0.4), (12, 0.6), (12, 0.8)]  # twice before the first step, twice after the last
    rows = [{"generator_step": step, "generator/accuracy": value} for step, value in points]
    assert mean_over_training(rows) == pytest.approx(0.6)
    assert mean_over_training(rows[:2]) == pytest.approx(0.1)  # an arm whose generator stands still


WARMUP, GENERATOR, VERIFIER = ["warmup"] * 2, ["generator"] * 3, ["verifier"]


@pytest.mark.parametrize("arm, phases, trained", [
    ("tango", WARMUP + GENERATOR + VERIFIER, {"generator", "verifier"}),
    ("grpo", GENERATOR, {"generator"}),
    ("fixed_verifier", GENERATOR, {"generator"}),
    ("fixed_verifier_warm", WARMUP + GENERATOR, {"generator", "verifier"}),
    ("fixed_generator", WARMUP + VERIFIER, {"verifier"}),
    ("gold_steps", GENERATOR, {"generator"}),
])  # fmt: skip
def test_every_arm_trains_what_it_should(ablation, abstract_states, arm, phases, trained):
    rows = metrics_of(ablation, arm)
    assert [row["phase"] for row in rows if row["phase"] != "eval"] == phases
    values = [value for row in rows for name, value in row.items() if name != "phase"]
    assert None not in values and np.isfinite(values).all()
    saved = read_state(ablation / arm / "seed_0" / "checkpoints", abstract_states)
    for role in ROLES:
        is_as_before = tree_fingerprint(saved.state[role].params) == saved.meta["source_fingerprint"][role]
        assert is_as_before == (role not in trained)
    summary = json.loads((ablation / arm / "seed_0" / "summary.json").read_text())
    assert (summary["arm"], summary["compiles_after_warmup"]) == (arm, 0)


def test_where_each_arms_step_rewards_come_from(ablation):
    assert len(ARMS) == 6
    for arm in set(ARMS) - {"fixed_generator"}:
        row = next(row for row in metrics_of(ablation, arm) if row["phase"] == "generator")
        has_labels = "generator/reward/step" in row
        assert has_labels == (arm != "grpo")
        assert (row["generator/alpha"] > 0) == has_labels
        assert ("verifier/live_step_f1" in row) == (arm in ("tango", "fixed_verifier", "fixed_verifier_warm"))


def test_arms_that_never_train_the_verifier_start_alike(ablation):
    """The same seed, problems and start: the first turn samples the same tokens, whatever the labels."""
    first = [next(row for row in metrics_of(ablation, arm) if row["phase"] == "generator")
             for arm in ("grpo", "fixed_verifier", "gold_steps")]
    for name in ("tokens_sampled", "entropy", "reward/format", "reward/outcome"):
        assert len({row[f"generator/{name}"] for row in first}) == 1, name
