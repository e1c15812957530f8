"""The ablation: every arm from one stage 1, what each of them trains, the table and the figure."""

import csv
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from support.paths import CONFIGS
from support.tiny_train import repeatable_rows
from tango_jax.ablate import ablate, mean_over_training
from tango_jax.arms import ARMS
from tango_jax.cli.command_line import load_config
from tango_jax.rl.policy import make_policies
from tango_jax.runtime.checkpoint import read_state, tree_fingerprint
from tango_jax.runtime.console import Console

ROLES = ("generator", "verifier")


@pytest.fixture(scope="module")
def config(tiny_train):
    overrides = [*tiny_train.overrides, *(f"{role}.mesh.fsdp=1" for role in ROLES), "rl.generator_steps=3",
                 "ablation.seeds=(0, 1)"]  # fmt: skip
    return load_config(str(CONFIGS / "tiny.py"), overrides)


@pytest.fixture(scope="module")
def abstract_states(config) -> dict:
    """Shapes of what a checkpoint holds."""
    return {role: jax.eval_shape(policy.init, np.zeros(2, np.uint32)) for role, policy in make_policies(config).items()}


@pytest.fixture(scope="module")
def ablation(config, tmp_path_factory) -> Path:
    """An ablation of every arm: three generator steps, two seeds, one stage 1."""
    folder = tmp_path_factory.mktemp("ablation")
    ablate(config, folder, Console(enabled=False))
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
