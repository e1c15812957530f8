"""The ablation: every arm from one stage 1, what each of them trains, the table and the figure; grids of it in workers,
stopped and gone on with; and figures drawn again from the table."""

import csv
import functools
import json
import signal
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from support.ablation_cases import OWN_ARMS, finished_rows, run_rows
from support.paths import CONFIGS, ROOT
from support.policies import policies_of
from support.processes import Finished, finish, wait_for
from support.tiny_train import repeatable_rows
from tango_jax import ablate
from tango_jax.ablation import experiment
from tango_jax.ablation.experiment import run_experiment
from tango_jax.ablation.planned_runs import Plan, PlannedRun, make_plan
from tango_jax.cli.command_line import load_config
from tango_jax.method.arms import ARMS
from tango_jax.method.load import load_method
from tango_jax.method.own_arm import stored_arm
from tango_jax.runtime.checkpoint import read_state
from tango_jax.runtime.console import Console
from tango_jax.runtime.lock import LOCK_FILE, locked
from tango_jax.runtime.trees import tree_fingerprint
from tango_jax.tracking.evaluations import write_table
from tango_jax.tracking.metrics import MetricsWriter, read_metrics
from tango_jax.viewer.lines import lines_of
from tango_jax.viewer.runs import find_runs

ROLES = ("generator", "verifier")
# Those of an experiment by default; the others need settings that configs/tiny.py does not have.
METHODS = {name: load_method(load_config(str(CONFIGS / "tiny.py"), [f"arm={name}"])) for name in ARMS}
COMPARED = tuple(name for name, method in METHODS.items()
                 if "curriculum" not in method.streams and not method.stage_one_kind())
TWO = ("tango", "grpo")  # those with two seeds
# One shape of everything that is sampled, and stage 1 evaluated and saved at its end alone: less to compile and to do.
FEW_PROGRAMS = ["generator.cache_buckets=()", *(f"{role}.{setting}" for role in ROLES for setting in (
    "row_buckets=(8,)", "model.num_layers=1", "sft.eval_every=200", "sft.checkpoint_every=200"))]


@pytest.fixture(scope="module")
def config(tiny_train):
    overrides = [*tiny_train.overrides, *FEW_PROGRAMS, *(f"{role}.mesh.fsdp=1" for role in ROLES),
                 "rl.generator_steps=3", f"ablation.arms={TWO}", "ablation.seeds=(0, 1)"]
    return load_config(str(CONFIGS / "tiny.py"), overrides)


@pytest.fixture(scope="module")
def abstract_states(config) -> dict:
    """Shapes of what a checkpoint holds."""
    return {role: jax.eval_shape(policy.init, np.zeros(2, np.uint32)) for role, policy in policies_of(config).items()}


@pytest.fixture(scope="module")
def ablation(config, tmp_path_factory) -> Path:
    """An ablation of every arm with three generator steps, to which a second seed of two arms is added."""
    folder = tmp_path_factory.mktemp("ablation")
    every_arm = config.copy_and_resolve_references()
    every_arm.ablation.arms, every_arm.ablation.seeds = COMPARED, (0,)
    with pytest.MonkeyPatch.context() as patch:
        # What is compiled for the first is there for the second.
        patch.setattr(experiment, "_SharedPolicies", functools.cache(experiment._SharedPolicies))
        assert run_experiment(make_plan(every_arm, folder), Console(enabled=False)).failed == {}
        plan = make_plan(config, folder)
        outcome = run_experiment(plan, Console(enabled=False))
    assert outcome.failed == {}
    assert [path.name for path in ablate.write_results(plan, outcome.rows)] == [
        "ablation.csv", "ablation.md", "curves_last_letter.png"
    ]
    return folder


def metrics_of(ablation: Path, arm: str, seed: int = 0) -> list[dict]:
    return repeatable_rows(ablation / arm / f"seed_{seed}" / "metrics.jsonl")


@pytest.mark.long
def test_ablation_trains_stage_one_once_and_every_arm_starts_from_it(ablation):
    assert {path.parent for path in ablation.rglob("sft")} == {ablation}
    runs = [(arm, 0) for arm in COMPARED] + [(arm, 1) for arm in TWO]
    first_evaluations = [metrics_of(ablation, arm, seed)[0] for arm, seed in runs]
    assert all(row == first_evaluations[0] for row in first_evaluations)


@pytest.mark.long
def test_ablation_reports_every_arm_and_seed(ablation):
    with open(ablation / "ablation.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    # The second plan does not name the other arms; the table keeps them.
    runs = {(arm, "0") for arm in COMPARED} | {(arm, "1") for arm in TWO}
    assert {(row["arm"], row["seed"]) for row in rows} == runs
    table = (ablation / "ablation.md").read_text()
    for arm in TWO:
        last = [metrics_of(ablation, arm, seed)[-1]["generator/accuracy"] for seed in (0, 1)]
        line = next(line for line in table.splitlines() if line.startswith(f"| {arm} |"))
        assert f"{np.mean(last):.3f} ({last[0]:.2f}, {last[1]:.2f})" in line


@pytest.mark.long
def test_the_table_counts_tokens_and_seconds_of_training(ablation):
    with open(ablation / "ablation.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["arm"], row["seed"]) == ("tango", "1")]
    metrics = read_metrics(ablation / "tango" / "seed_1" / "metrics.jsonl")
    turns = [row for row in metrics if row["phase"] != "eval"]
    assert len(rows) == sum(row["phase"] == "eval" for row in metrics) == 4
    for row in rows:
        made = turns[:int(row["turn"])]
        assert int(row["sampled_tokens"]) == sum(
            turn["generator/tokens_sampled"] + turn["verifier/tokens_sampled"] for turn in made
        )
        assert float(row["seconds"]) == pytest.approx(sum(turn["time/turn_s"] for turn in made), rel=1e-5)
    assert [int(row["turn"]) for row in rows] == [0, 2, 5, 6]
    assert float(rows[-1]["verifier_live_step_f1"]) == pytest.approx(turns[4]["verifier/live_step_f1"], rel=1e-5)


@pytest.mark.long
def test_ablation_draws_its_figure(ablation):
    assert (ablation / "figures" / "curves_last_letter.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_a_finished_ablation_is_not_run_again(ablation, config, monkeypatch):
    for name in ("make_policies", "run_or_resume", "run_stage_one"):
        monkeypatch.setattr(experiment, name, None)
    before = (ablation / "ablation.csv").read_bytes()
    run_experiment(make_plan(config, ablation), Console(enabled=False))
    assert (ablation / "ablation.csv").read_bytes() == before


@pytest.mark.long
def test_runs_that_were_made_with_other_settings_are_refused(ablation, config, tmp_path):
    other = config.copy_and_resolve_references()
    other.rl.gamma = 0.5
    with pytest.raises(ValueError, match=r"holds a run with other settings \(rl\.gamma: 0\.8 -> 0\.5\)"):
        run_experiment(make_plan(other, ablation), Console(enabled=False))


WARMUP, GENERATOR, VERIFIER = ["warmup"] * 2, ["generator"] * 3, ["verifier"]


@pytest.mark.long
@pytest.mark.parametrize("arm, phases, trained", [
    ("tango", WARMUP + GENERATOR + VERIFIER, {"generator", "verifier"}),
    ("grpo", GENERATOR, {"generator"}),
    ("fixed_verifier", GENERATOR, {"generator"}),
    ("fixed_verifier_warm", WARMUP + GENERATOR, {"generator", "verifier"}),
    ("fixed_generator", WARMUP + VERIFIER, {"verifier"}),
    ("gold_steps", GENERATOR, {"generator"}),
])
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


@pytest.mark.long
def test_where_each_arms_step_rewards_come_from(ablation):
    assert len(COMPARED) == 6
    for arm in set(COMPARED) - {"fixed_generator"}:
        row = next(row for row in metrics_of(ablation, arm) if row["phase"] == "generator")
        has_labels = "generator/reward/step" in row
        assert has_labels == (arm != "grpo")
        assert (row["generator/alpha"] > 0) == has_labels
        assert ("verifier/live_step_f1" in row) == (arm in ("tango", "fixed_verifier", "fixed_verifier_warm"))


@pytest.mark.long
def test_arms_that_never_train_the_verifier_start_alike(ablation):
    """The same seed, problems and start: the first turn samples the same tokens, whatever the labels."""
    first = [next(row for row in metrics_of(ablation, arm) if row["phase"] == "generator")
             for arm in ("grpo", "fixed_verifier", "gold_steps")]
    for name in ("tokens_sampled", "entropy", "reward/format", "reward/outcome"):
        assert len({row[f"generator/{name}"] for row in first}) == 1, name


# ------------------------------------------------------------------------------------- a grid, in two workers


# This arm trains one role, so each of the four processes compiles half as many programs.
GRID = {"task.data_seed": [0, 1], "alpha": {"": {}, "none": {"rl.alpha_schedule": "none", "ablation.seeds": (5,)}}}
RUNS = ("data_seed=0/gold_steps/seed_4", "data_seed=0,alpha=none/gold_steps/seed_5", "data_seed=1/gold_steps/seed_4",
        "data_seed=1,alpha=none/gold_steps/seed_5")


def start_grid(tiny_train, workdir: Path, *overrides: str) -> subprocess.Popen:
    settings = ("ablation.workers=2", "ablation.arms=('gold_steps',)", "ablation.seeds=(4,)", f"ablation.grid={GRID}",
                "rl.generator_steps=6", "checkpoint.every=1", "verifier.sft.steps=4", "generator.sft.steps=4")
    command = [sys.executable, "-m", "tango_jax.ablate", "--config=configs/tiny.py", f"--workdir={workdir}"]
    command += [f"--config.{item}" for item in (*tiny_train.overrides, *FEW_PROGRAMS, *settings, *overrides)]
    return subprocess.Popen(command, cwd=ROOT, env=tiny_train.environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def is_held(lock_file: Path) -> bool:
    """Whether the process that has locked a workdir is still there; its file may outlive it."""
    try:
        with locked(lock_file.parent, Console(enabled=False)):
            return False
    except ValueError:
        return True


class Grid:
    """A grid that was told to stop after the first turn of a run, and started again."""

    def __init__(self, tiny_train, workdir: Path):
        self.workdir = workdir
        first = start_grid(tiny_train, workdir)
        wait_for(lambda: any(workdir.glob("data_seed*/gold_steps/*/checkpoints/1")), "the first turn of a run", first)
        first.send_signal(signal.SIGTERM)
        self.stopped: Finished = finish(first)
        self.held = [path for path in workdir.rglob(LOCK_FILE) if is_held(path)]
        metrics = workdir.glob("data_seed*/gold_steps/*/metrics.jsonl")
        self.turns = {path.parent: len(read_metrics(path)) for path in metrics}
        self.resumed: Finished = finish(start_grid(tiny_train, workdir))


@pytest.fixture(scope="module")
def grid(tiny_train, tmp_path_factory) -> Grid:
    return Grid(tiny_train, tmp_path_factory.mktemp("grid"))


@pytest.mark.long
def test_a_stopped_grid_saves_its_runs(grid):
    assert grid.stopped.code == 75, grid.stopped
    assert "told to stop (SIGTERM): saved; the same command resumes in" in grid.stopped.stdout
    assert grid.held == [] and grid.turns  # every child has ended
    logs = [(folder / "train.log").read_text() for folder in grid.turns]
    assert any("told to stop (SIGTERM)" in log for log in logs)


@pytest.mark.long
def test_the_same_command_goes_on_with_it(grid):
    assert grid.resumed.code == 0, grid.resumed
    finished = {path.parent.relative_to(grid.workdir).as_posix() for path in grid.workdir.rglob("summary.json")}
    assert finished == set(RUNS)
    for name in RUNS:
        rows = read_metrics(grid.workdir / name / "metrics.jsonl")
        assert [row["step"] for row in rows if row["phase"] != "eval"] == [1, 2, 3, 4, 5, 6]  # none twice
    begun = [folder for folder in grid.turns if grid.turns[folder] > 1]
    assert any("resumed after turn" in (folder / "train.log").read_text() for folder in begun)


@pytest.mark.long
def test_each_start_has_one_stage_one(grid):
    folders = {path.parent.relative_to(grid.workdir).as_posix() for path in grid.workdir.rglob("sft")}
    assert folders == {"stage_one/data_seed=0", "stage_one/data_seed=1"}
    fingerprints = {}
    for name in RUNS:
        first = repeatable_rows(grid.workdir / name / "metrics.jsonl")[0]
        fingerprints.setdefault(name.split("/")[0].split(",")[0], []).append(first)
    assert len(fingerprints) == 2 and all(one == other for one, other in fingerprints.values())


@pytest.mark.long
def test_the_table_of_a_grid_tells_settings_from_starts(grid):
    with open(grid.workdir / "ablation.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["setting"], row["start"], row["seed"]) for row in rows} == {
        ("", "0", "4"), ("", "1", "4"), ("alpha=none", "0", "5"), ("alpha=none", "1", "5")
    }
    assert {float(row["alpha"]) for row in rows if row["setting"]} == {0.5}
    assert "## last_letter, alpha=none: 2 starts (0, 1), 1 seed (5)" in (grid.workdir / "ablation.md").read_text()
    assert (grid.workdir / "figures" / "curves_last_letter_alpha=none.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_each_run_had_its_own_cores_and_log(grid, tiny_train):
    for name in RUNS:
        log = (grid.workdir / name / "train.log").read_text()
        assert f"-m tango_jax.train --config={grid.workdir / name}/config.json --workdir={grid.workdir / name}" in log
    stored = json.loads((grid.workdir / RUNS[-1] / "config.json").read_text())
    settings = [stored[key] for key in ("arm", "seed", "task.data_seed", "ablation.grid")]
    assert settings == ["gold_steps", 5, 1, {}]


@pytest.mark.long
def test_its_runs_are_reported_by_cell(grid):
    runs = find_runs([grid.workdir])
    assert {run.name for run in runs} == set(RUNS)
    lines = lines_of(runs)
    assert all("data_seed=" in line.label for line in lines)
    cells = [{run.name.split("/")[0] for run in line.runs} for line in lines]
    assert sorted(map(list, cells)) == sorted([cell] for cell in {name.split("/")[0] for name in RUNS})


@pytest.mark.long
@pytest.mark.release
def test_cells_can_be_added_and_what_fails_does_not_lose_the_others(grid, tiny_train):
    """The new cell diverges in its first turn. (A learning rate of 1e30 in the generator's update.)"""
    bad = {"generator.optimizer.lr": 1e30, "ablation.seeds": (4,)}
    more = {"task.data_seed": [0], "alpha": GRID["alpha"] | {"bad": bad}}
    before = (grid.workdir / RUNS[0] / "metrics.jsonl").read_bytes()
    done = finish(start_grid(tiny_train, grid.workdir, f"ablation.grid={more}"))
    assert done.code == 2
    assert done.stderr.startswith("error: 1 of 3 runs failed (")
    assert "alpha=bad/gold_steps/seed_4: error: turn 1 (generator, update of the " in done.stderr
    assert "the same command tries them again" in done.stderr and done.stderr.count("\n") == 1
    assert (grid.workdir / RUNS[0] / "metrics.jsonl").read_bytes() == before
    table = (grid.workdir / "ablation.csv").read_text()
    assert "alpha=none" in table and "alpha=bad" not in table


# -------------------------------------------------------------------------------------------- parts in one folder


def test_the_table_keeps_the_runs_of_other_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(PlannedRun, "is_finished", lambda run: (run.folder / "metrics.jsonl").exists())

    def plan_of(cell: str, accuracy: float, *settings: str) -> Plan:
        grid = {"trust": {cell: {}}, "task.data_seed": [7]}
        plan = make_plan(load_config(str(CONFIGS / "last_letter.py"), [f"ablation.grid={grid}", *settings]), tmp_path)
        for run in plan.runs:
            run.folder.mkdir(parents=True, exist_ok=True)
            (run.folder / "summary.json").write_text("{}")
            with MetricsWriter(run.folder / "metrics.jsonl", resume_at=0) as writer:
                writer.write(0, "eval", {"generator_step": 0, "generator/accuracy": accuracy})
        return plan

    def table() -> list[tuple]:
        with open(tmp_path / "ablation.csv", newline="") as file:
            return sorted((row["setting"], row["arm"], row["seed"], row["accuracy"]) for row in csv.DictReader(file))

    experiment.write_results_table(plan_of("off", 0.25, "ablation.arms=('grpo',)", "ablation.seeds=(0,)"))
    rows = experiment.write_results_table(plan_of("on", 0.5, "ablation.arms=('tango',)", "ablation.seeds=(0,)"))
    parts = [("trust=off", "grpo", "0", "0.25"), ("trust=on", "tango", "0", "0.5")]
    assert table() == parts and [row.accuracy for row in rows] == [0.25, 0.5]
    again = plan_of("off", 0.75, "ablation.arms=('grpo',)", "ablation.seeds=(0, 1)")  # a run that was made anew
    experiment.write_results_table(again)
    assert table() == [*((*parts[0][:2], seed, "0.75") for seed in "01"), parts[1]]
    (again.runs[0].folder / "metrics.jsonl").unlink()  # and one that is not finished
    experiment.write_results_table(again)
    assert table() == [("trust=off", "grpo", "1", "0.75"), parts[1]]
    grid = {"trust": {"on": {}}, "task.data_seed": [7]}
    reads = load_config(str(CONFIGS / "last_letter.py"), [f"ablation.grid={grid}", "ablation.arms=('scored',)"])
    with pytest.raises(ValueError, match="tango and scored learn different texts in stage 1, so their runs are no"):
        run_experiment(make_plan(reads, tmp_path), Console(enabled=False))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "ablation.csv").write_text("no table\n")
    with pytest.raises(ValueError, match="ablation.csv lacks the columns task, setting"):  # before runs are made
        run_experiment(make_plan(again.config, tmp_path / "damaged"), Console(enabled=False))


@pytest.mark.parametrize("like, further, pair, other", [
    ("scored", [], "scored_exact", "tango"), ("self_verify", [], "no_labels", "grpo"),
    ("taught_verifier", ["informed"], "taught_verifier", "tango"),
])
def test_arms_are_no_pairs_with_ones_own_arm_of_another_part(like, further, pair, other, tmp_path):
    def check(arm: str) -> None:
        experiment._check_other_parts(make_plan(load_config("tiny", [f"ablation.arms=('{arm}',)"]), tmp_path))

    record = stored_arm(like) | {"name": "mine", "further_prompts": {"generator": [], "verifier": further}}
    write_table(run_rows("mine", (0.5,), arm_record=json.dumps(record)), tmp_path / "ablation.csv")
    check(pair)
    with pytest.raises(ValueError, match=rf"FILE\.py:mine and {other} .*, so their runs are no pairs"):
        check(other)


# -------------------------------------------------------------------------------------------- from a table alone


def test_runs_on_different_problems_are_not_summarised(tmp_path):
    rows = [row for arm in ("tango", "grpo") for row in run_rows(arm, (0.0, 0.5), problems=f"before {arm}")]
    write_table(rows, tmp_path / "ablation.csv")
    with pytest.raises(ValueError, match="had other problems or prompts: their files differ, or others"):
        ablate.write_results(types.SimpleNamespace(workdir=tmp_path, runs=[]), rows)


def test_figures_are_drawn_from_a_table_alone(tmp_path, capsys):
    rows = [row for arm in ("tango", "grpo") for row in run_rows(arm, (0.0, 0.5, 0.9))]
    write_table(rows, tmp_path / "a.csv")
    write_table([row._replace(setting="words=4") for row in rows], tmp_path / "b.csv")
    ablate.main(["--figures", str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), f"--out={tmp_path / 'out'}",
                 "--against=grpo:words=4"])
    summary = (tmp_path / "out" / "summary.md").read_text()
    printed = capsys.readouterr().out
    assert summary in printed and "| tango / grpo | 1 | 20 | 1.000 |" in summary
    assert "all arms against grpo, words=4" in summary
    for name in ("curves_last_letter", "curves_last_letter_words=4", "against"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"{name}.png" in printed


def test_a_table_says_what_its_readers_need_of_arms_that_are_not_built_in(tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN_ARMS)
    runs = {"tango": (0.0, 0.5, 0.9), f"{tmp_path}/own.py:my_judge": (0.0, 0.0, 0.0),
            f"{tmp_path}/own.py:my_baseline": (0.0, 0.1, 0.2)}
    # The baseline has no use for a verifier, and its start is no obstacle.
    rows = [row for number, (arm, accuracy) in enumerate(runs.items()) for row in finished_rows(
        tmp_path / str(number), arm, accuracy, {"verifier": "ab"[arm.endswith("my_baseline")] * 64})]
    write_table(rows, tmp_path / "a.csv")
    (tmp_path / "own.py").unlink()
    ablate.main([f"--figures={tmp_path / 'a.csv'}", f"--out={tmp_path / 'out'}", "--against=my_baseline"])
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "| tango / my_baseline | 1 | 20 |" in summary and "all arms against my_baseline" in summary
    assert "my_judge / " not in summary and "/ my_judge" not in summary
    [judge] = [line for line in summary.splitlines() if line.startswith("| my_judge |")]
    assert " of 1" not in judge  # it has no level to reach


def test_a_damaged_record_of_an_arm_is_named(tmp_path):
    write_table(run_rows("mine", (0.0, 0.5), arm_record="{"), tmp_path / "a.csv")
    with pytest.raises(SystemExit, match="error: arm_record of arm mine in the table cannot be read"):
        ablate.main([f"--figures={tmp_path / 'a.csv'}", f"--out={tmp_path / 'out'}"])


@pytest.mark.parametrize("arguments, message", [
    (["--figures"], "error: argument --figures: expected at least one argument"),
    (["--figures=none.csv"], "error: none.csv cannot be read (No such file or directory)"),
    (["--figures={table}", "--config=tiny"], "error: unknown argument '--config=tiny'"),
    (["--figures={table}", "--out={table}"], "is a file; name a folder"),
    (["--figures={table}", "--against=tango"], "error: --against=tango matches none of the arms and settings: "),
])
def test_a_mistake_in_drawing_is_one_line(tmp_path, arguments, message):
    write_table(run_rows("grpo", (0.0, 0.5)), tmp_path / "a.csv")
    with pytest.raises(SystemExit) as stopped:
        ablate.main([argument.format(table=tmp_path / "a.csv") for argument in arguments])
    assert message in str(stopped.value) and "\n" not in str(stopped.value)
