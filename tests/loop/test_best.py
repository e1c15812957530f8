"""The checkpoint with the best evaluation: kept beside the newest, known to a resumed run, and exported."""

import math
import re
from contextlib import nullcontext

import jax
import numpy as np
import pytest

from support.math_cases import math_config
from support.paths import CONFIGS
from support.policies import policies_of
from support.tiny_checkpoints import write_tiny_folder
from support.tiny_train import StopAtRow, repeatable_rows
from tango_jax import export
from tango_jax.cli.command_line import load_config
from tango_jax.config import ROLES
from tango_jax.loop import run
from tango_jax.loop.best import Best, after_evaluation, check_keep_best, is_over, role_of_best, trained_roles
from tango_jax.method.load import load_method
from tango_jax.method.own_arm import make_schedule
from tango_jax.rl.schedule import generator_steps_after, is_evaluation_due, turns_since_evaluation
from tango_jax.runtime import hosts
from tango_jax.runtime.checkpoint import CheckpointError, peek_meta
from tango_jax.runtime.console import Console
from tango_jax.runtime.sealed import complete_steps
from tango_jax.tasks.registry import make_task
from tango_jax.weights.source import open_source
from tango_jax.weights.workdir import best_step, open_workdir, start_source

SILENT = Console(enabled=False)
ACCURACY = (0.25, 0.125, 0.5, 0.5, 0.375, 0.25, 0.125)  # by the number of the generator's updates
BEST_TURN = 4  # two of the warm-up and two of the generator


def config_of(*overrides: str):
    settings = [f"{role}.{setting}" for role in ROLES for setting in (
        "mesh.fsdp=1", "row_buckets=(8,)", "cache_buckets=()", "max_response=8", "model.num_layers=1", "sft.steps=0")]
    return load_config(str(CONFIGS / "tiny.py"), [
        *settings, "eval.every=1", "eval.pool=2", "eval.problems=2", "checkpoint.every=3", "checkpoint.keep=1",
        "checkpoint.keep_best=generator/accuracy", "rollouts.every=0", *overrides])


@pytest.fixture(scope="module")
def policies():
    return policies_of(config_of())


@pytest.fixture
def train(policies, monkeypatch):
    """`run_or_resume` with the accuracies above."""
    evaluate = run.evaluate_roles

    def measured(context, states, pool):
        result = evaluate(context, states, pool)
        accuracy = ACCURACY[int(states["generator"].step)]
        return result._replace(metrics=result.metrics | {"generator/accuracy": accuracy})

    monkeypatch.setattr(run, "evaluate_roles", measured)
    return lambda config, workdir, preemption=None: run.run_or_resume(config, workdir, SILENT, policies, preemption)


def weights(workdir, only=None) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for role in ROLES
            for leaf in jax.tree.leaves(open_workdir(workdir, role, only=only).load_params())]


@pytest.mark.long
def test_a_resumed_run_keeps_the_same_best_checkpoint(train, tmp_path, capsys):
    train(config_of(), tmp_path / "whole")
    # After a turn without an evaluation, and before and after the best one.
    for row in ((1,), (BEST_TURN, "generator"), (BEST_TURN + 1, "eval")):
        with pytest.raises(hosts.Preempted):
            train(config_of(), tmp_path / "stopped", StopAtRow(tmp_path / "stopped", *row))
    train(config_of(), tmp_path / "stopped")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert repeatable_rows(stopped / "metrics.jsonl") == repeatable_rows(whole / "metrics.jsonl")
    for workdir in (whole, stopped):
        assert complete_steps(workdir / "checkpoints") == [BEST_TURN, 10] and best_step(workdir) == BEST_TURN
        assert Best(*peek_meta(workdir / "checkpoints").meta["best"]) == Best(0.5, BEST_TURN, misses=4)
    assert weights(stopped, BEST_TURN) == weights(whole, BEST_TURN) != weights(whole)

    # Exported with its own figures.
    out = tmp_path / "out"
    assert export.main([f"--workdir={whole}", f"--out={out}", "--best"]) == 0
    best = open_workdir(whole, "generator", only=BEST_TURN).load_params()
    assert jax.tree.all(jax.tree.map(np.array_equal, open_source(str(out)).load_params(), best))
    card = (out / "README.md").read_text()
    assert f"after turn {BEST_TURN}, chosen by generator/accuracy on the task " in card
    assert "| generator/accuracy | 0.5 |" in card

    # Damaged or lost, the newest is not taken in its place.
    data = next((whole / f"checkpoints/{BEST_TURN}/state/d").iterdir())
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"^step {BEST_TURN} in .* is damaged"):
        export.export(whole, "generator", tmp_path / "damaged", is_best=True)
    (whole / f"checkpoints/{BEST_TURN}").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=rf"checkpoints/{BEST_TURN} is gone, .* generator/accuracy=0\.5: put it back"):
        export.export(whole, "generator", tmp_path / "lost", is_best=True)


@pytest.mark.long
def test_evaluations_without_a_better_one_end_the_training(train, tmp_path, capsys):
    config, run_dir = config_of("checkpoint.patience=3"), tmp_path / "run"
    for row in ((7, "generator"), (8, "eval")):
        with pytest.raises(hosts.Preempted):
            train(config, run_dir, StopAtRow(run_dir, *row))
    for _ in range(2):  # also where the run is killed while it ends
        summary = train(config, run_dir)
        assert summary["generator"] == {"accuracy_initial": 0.25, "accuracy_final": 0.25}
        rows = repeatable_rows(run_dir / "metrics.jsonl")
        assert [row["step"] for row in rows if row["phase"] == "eval"] == [0, 2, 3, 4, 5, 7, 8]
        assert rows[-1]["step"] == 8 and complete_steps(run_dir / "checkpoints") == [BEST_TURN, 8]
        (run_dir / "summary.json").unlink()
    run.run_or_resume(config, run_dir, Console(), policies_of(config))
    assert ("training ends after turn 8 of 10: since turn 4, 3 evaluations after turns that train the generator were "
            "not better" in capsys.readouterr().out)


def test_the_start_is_kept_where_nothing_was_better(train, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ACCURACY", (0.5, 0.25))
    train(config_of("rl.generator_steps=1", "rl.warmup_steps=0"), tmp_path / "run")
    assert complete_steps(tmp_path / "run/checkpoints") == [0, 1] and best_step(tmp_path / "run") == 0


@pytest.mark.parametrize("name", ["generator/accuracies", "generator/truncation_rate", "generator/loss",
                                  "second_try/eval_final_accuracy", "verifier/live/outcome_f1"])
def test_a_metric_that_cannot_choose_is_refused_before_anything_is_written(policies, tmp_path, name):
    with pytest.raises(ValueError) as error:
        run.run_or_resume(config_of(f"checkpoint.keep_best={name}"), tmp_path / "run", SILENT, policies)
    said = str(error.value)
    assert re.match(rf"checkpoint\.keep_best={name} cannot choose .*: choose from generator/accuracy, generator/form"
                    r"at, .*verifier/pool/outcome_f1, .*verifier/pool/step_f1", said)
    assert "\n" not in said
    assert ("(did you mean generator/accuracy?)" in said) == (name == "generator/accuracies")
    assert not (tmp_path / "run/metrics.jsonl").exists()


def check(config) -> None:
    tokenizers = {role: start_source(config, role).tokenizer for role in ROLES}
    check_keep_best(config, make_task(config, tokenizers), load_method(config))


@pytest.mark.parametrize("arm, is_accepted", [
    ("tango", {"generator/accuracy": True, "verifier/pool/step_f1": True, "verifier/live/step_f1": False}),
    ("grpo", {"generator/accuracy": True, "verifier/pool/step_f1": False, "verifier/live/step_f1": False}),
    # A generator that does not learn has the same solutions in every evaluation.
    ("fixed_generator", {"generator/accuracy": False, "verifier/pool/step_f1": True, "verifier/live/step_f1": True}),
])
def test_only_what_evaluations_measure_alike_of_a_trained_role_may_choose(arm, is_accepted):
    for name, is_right in is_accepted.items():
        with nullcontext() if is_right else pytest.raises(ValueError, match="of a role that the run trains"):
            check(config_of(f"arm={arm}", f"checkpoint.keep_best={name}"))


@pytest.mark.parametrize("arm, name", [("grpo", "verifier/pool/step_f1"), ("fixed_generator", "generator/accuracy")])
def test_with_one_policy_the_turns_of_one_role_train_both(arm, name):
    config = config_of(f"arm={arm}", "verifier.adapter=generator", f"checkpoint.keep_best={name}")
    check(config)
    schedule, best = make_schedule(config), Best(0.5, 0)
    is_trained = role_of_best(config) in trained_roles(
        config, turns_since_evaluation(config, schedule, schedule.num_turns))
    assert after_evaluation(best, {name: 0.5}, name, schedule.num_turns, is_trained) == Best(0.5, 0, misses=1)


HELPED = """
import dataclasses
import numpy as np
from tango_jax.method.arms import ARMS
from tango_jax.records import Lesson, Rewards
from tango_jax.text.prompts import SECOND_TRY

def judge(t):
    judged = t.sample("verifier", t.sample("generator", t.problems("verifier")), t.rl.samples_per_prompt)
    tried = t.sample("generator", judged, prompt=SECOND_TRY)
    reward = Rewards(np.array([one.is_correct for one in tried], np.float32), {"verifier/reward/helped": 0.5})
    return Lesson(judged, reward, {"outcome": (1.0, t.algorithm.outcome(reward, judged))})

fixed = dataclasses.replace(ARMS["fixed_generator"], turns={"verifier": judge})
both = dataclasses.replace(ARMS["tango"], turns=ARMS["tango"].turns | {"verifier": judge})
"""


@pytest.mark.parametrize("arm, role", [("fixed", "verifier"), ("both", "generator")])
def test_second_tries_are_the_verifiers_where_the_generator_is_fixed(arm, role, tmp_path):
    """Its verdicts choose them. Where both roles are trained, an evaluation after the warm-up does not count."""
    (tmp_path / "own.py").write_text(HELPED)
    config = config_of(f"arm={tmp_path}/own.py:{arm}", "checkpoint.keep_best=second_try/eval_final_accuracy",
                       "generator.max_prompt=200", "rl.warmup_steps=2", "rl.generator_steps=2")
    check(config)
    assert role_of_best(config) == role
    warm_up = trained_roles(config, turns_since_evaluation(config, make_schedule(config), 2))
    assert (role_of_best(config) in warm_up) == (arm == "fixed")


@pytest.mark.parametrize("arm", ["tango", "self_verify"])
def test_an_evaluation_after_the_warm_up_ends_no_run_by_the_generators_accuracy(arm):
    config = config_of(f"arm={arm}", "rl.warmup_steps=2")
    assert trained_roles(config, turns_since_evaluation(config, make_schedule(config), 2)) == {"verifier"}


def test_a_pool_with_step_labels_gives_none_to_the_test_problems(tmp_path):
    config = math_config(write_tiny_folder(tmp_path / "model"))
    for name in ("verifier/pool/step_f1", "generator/step_accuracy"):
        config.checkpoint.keep_best = name
        with nullcontext() if "pool" in name else pytest.raises(ValueError, match="must be measured in every evaluat"):
            check(config)


def test_first_errors_need_a_pool_of_both_kinds():
    config = config_of("checkpoint.keep_best=verifier/pool/first_error_f1", "eval.pool=1")
    with pytest.raises(ValueError, match="must be measured in every evaluation"):
        check(config)
    config.eval.pool = 20
    check(config)


@pytest.mark.parametrize("name", ["step_f1", "step_f1_incorrect", "step_balanced_accuracy"])
def test_scores_of_all_steps_choose_no_verifier_that_stops_at_its_first_error(name):
    """Its perfect verifications leave steps out, which these scores count as missed."""
    settings = ("eval.pool=20", f"checkpoint.keep_best=verifier/pool/{name}")
    check(config_of(*settings))
    with pytest.raises(ValueError, match="learns to stop, .*: choose from .*verifier/pool/first_error_f1") as error:
        check(config_of(*settings, "verifier.stop_at_first_error=True"))
    assert "pool/step_" not in str(error.value).partition("choose from")[2]
    check(config_of("eval.pool=20", "verifier.stop_at_first_error=True",
                    "checkpoint.keep_best=verifier/pool/first_error_f1"))


@pytest.mark.parametrize("patience, ends", [(1, 6), (2, 12), (3, 42)])
def test_arms_of_one_curve_end_at_the_same_generator_step(patience, ends):
    curve = (.03, .03, .03, .2, .5, .7, .8, .9)  # every six generator steps
    for arm in ("tango", "grpo"):
        config = config_of(f"arm={arm}", "rl.generator_steps=42", "rl.warmup_steps=2", "eval.every=6")
        schedule, steps, best = make_schedule(config), 0, Best(curve[0], 0)
        for index in range(schedule.num_turns):
            steps = generator_steps_after(schedule, index)
            if is_evaluation_due(config, schedule, index):
                trained = trained_roles(config, turns_since_evaluation(config, schedule, index + 1))
                best = after_evaluation(best, {"generator/accuracy": curve[steps // 6]}, "generator/accuracy",
                                        index + 1, "generator" in trained)
                if is_over(best, patience):
                    break
        assert steps == ends


def test_without_a_best_checkpoint_there_is_none_to_export(train, tmp_path, capsys):
    train(config_of("checkpoint.keep_best=", "rl.generator_steps=1", "rl.warmup_steps=0"), tmp_path / "run")
    assert complete_steps(tmp_path / "run/checkpoints") == [1]
    with pytest.raises(SystemExit) as stopped:
        export.main([f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}", "--best"])
    assert "holds no best checkpoint: it was trained without checkpoint.keep_best" in str(stopped.value)


def test_the_first_of_equal_values_is_the_best_and_nan_is_none():
    best = None
    for turn, value in enumerate([math.nan, 0.25, math.nan, 0.5, 0.5]):
        best = after_evaluation(best, {"generator/x": value}, "generator/x", turn, True)
    assert best == Best(0.5, 3, misses=1)
    assert after_evaluation(best, {}, "generator/x", 5, True) == Best(0.5, 3, misses=2)
    assert after_evaluation(best, {}, "generator/x", 5, False) == best


def test_the_best_checkpoint_has_the_newest_of_a_role_that_the_metric_does_not_measure():
    """The warm-up leaves the generator's accuracy as it was: the checkpoint after it has the verifier that learned."""
    best, name = Best(0.5, 0), "generator/accuracy"
    best = after_evaluation(best, {name: 0.5}, name, 20, False)
    assert best == Best(0.5, 20)
    worse = after_evaluation(best, {name: 0.25}, name, 30, True)
    assert worse == Best(0.5, 20, misses=1)
    assert after_evaluation(worse, {name: 0.5}, name, 31, False) == worse  # another generator with the same accuracy
