"""Runs with a process reward model as the fixed verifier: its judgements, a resumption, a mesh, and what is refused."""

import dataclasses

import jax
import numpy as np
import pytest

from support.paths import CONFIGS
from support.policies import policies_of
from support.reward_models import write_qwen_folder, write_trl_folder
from support.tiny_train import StopAfter, repeatable_rows
from tango_jax.cli.command_line import load_config
from tango_jax.cli.validation import validate
from tango_jax.config import ROLES
from tango_jax.evaluation.judging import score_solutions
from tango_jax.export import export
from tango_jax.loop import run
from tango_jax.loop.describe import describe_run
from tango_jax.loop.turn import RunContext, respond
from tango_jax.method.arms import ARMS
from tango_jax.method.load import load_method
from tango_jax.method.own_arm import check_fixed, make_schedule
from tango_jax.records import Problem
from tango_jax.runtime import hosts
from tango_jax.runtime.console import Console
from tango_jax.runtime.timers import PhaseTimer
from tango_jax.runtime.user_code import given
from tango_jax.sampling.checkpoint_sampler import CheckpointSamplerSettings, open_checkpoint_sampler
from tango_jax.tasks.registry import make_task
from tango_jax.text.prompts import SECOND_JUDGEMENT, solution_of, verification_of
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.rollout_dump import read_rollouts

SILENT = Console(enabled=False)
STEPS = ["#1 ends in o", "#2 ends in x", "so it is ox"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_trl_folder(tmp_path_factory.mktemp("prm") / "model", seed=10)


def config_of(folder, *overrides: str):
    return load_config(str(CONFIGS / "tiny.py"), [
        "arm=fixed_verifier", f"verifier.checkpoint={folder}", "verifier.template=trl_prm", "verifier.sft.steps=0",
        "verifier.max_prompt=160", "verifier.max_response=1", "rollouts.every=1", "rl.generator_steps=4",
        "generator.sft.steps=60", "generator.model.num_layers=1", "generator.row_buckets=(8,)",
        "generator.cache_buckets=()", *(f"{role}.mesh.fsdp=1" for role in ROLES), *overrides])


def solution(steps=STEPS):
    text = "".join(f"<step>{step}</step>" for step in steps)
    return solution_of(Problem("p", "foo#1 box#2", "ox"), f"<think>{text}</think>", len(steps))


@pytest.mark.long
def test_a_run_with_a_reward_model(folder, tmp_path):
    config = config_of(folder)
    policies = policies_of(config)
    summary = run.run_or_resume(config, tmp_path / "whole", SILENT, policies)
    assert summary["compiles_after_warmup"] == 0
    rows = [row for row in read_metrics(tmp_path / "whole/metrics.jsonl") if row["phase"] == "generator"]
    assert len(rows) == 4 and all(row["verifier/tokens_sampled"] == 0 < row["verifier/tokens_scored"] for row in rows)
    assert len({row["generator/steps_approved"] for row in rows if "generator/steps_approved" in row}) > 1
    [pool] = {row["verifier/pool/step_f1"] for row in read_metrics(tmp_path / "whole/metrics.jsonl")
              if row["phase"] == "eval"}  # it never changes
    assert 0 < pool < 1

    sampler = open_checkpoint_sampler("verifier", str(folder), CheckpointSamplerSettings(max_prompt=160)).with_weights()
    judged = 0
    for row in read_rollouts(tmp_path / "whole/rollouts"):
        [verification], given = row["verifications"], row["solution"]
        steps = len(given["steps"])
        question = Problem("p", row["problem"]["question"], "")
        [alone] = score_solutions(sampler, [solution_of(question, given["text"], steps)])
        assert verification["judgements"] == list(alone.judgements) and verification["verdict"] == alone.verdict
        assert verification["tokens"] == 0 and verification["is_aligned"] == (steps > 0)
        if row["role"] == "generator" and steps:
            assert row["step_rewards"] == [[pytest.approx((1 if right else -1) / steps, abs=1e-6)
                                            for right in verification["judgements"]]]
            judged += 1
    assert judged > 4

    # The run brings its template and its limit; what it was given is not exported.
    of_run = open_checkpoint_sampler("verifier", str(tmp_path / "whole"), CheckpointSamplerSettings()).with_weights()
    assert (of_run.template, of_run.max_prompt) == (sampler.template, 160)
    [ours], [theirs] = (score_solutions(one, [solution()]) for one in (of_run, sampler))
    assert ours == theirs
    with pytest.raises(ValueError, match=f"is a process reward model, which no run changes: copy {folder}"):
        export(tmp_path / "whole", "verifier", tmp_path / "out")

    with pytest.raises(hosts.Preempted):
        run.run_or_resume(config, tmp_path / "stopped", SILENT, policies, StopAfter(2))
    run.run_or_resume(config, tmp_path / "stopped", SILENT, policies)
    ours, theirs = (repeatable_rows(tmp_path / name / "metrics.jsonl") for name in ("stopped", "whole"))
    assert ours == theirs


def judged_by(config, solutions, group_size=1, **changes):
    """(verifications, metrics) of the configured verifier, with the weights of its checkpoint."""
    policies = policies_of(config)
    policy = dataclasses.replace(policies["verifier"], **changes)
    states = {"verifier": policy.restart(policy.load_params())}
    context = RunContext(config, None, {"verifier": policy}, {}, PhaseTimer())
    return respond(context, states, "verifier", solutions, group_size, np.zeros(2, np.uint32))


def test_the_start_of_a_run_says_that_a_reward_model_reads(folder, capsys):
    config = config_of(folder, "rl.prompts_per_step=2", "rl.samples_per_prompt=2", "rl.dynamic_sampling=3")
    policies, method = policies_of(config), load_method(config)
    task = make_task(config, {role: policy.tokenizer for role, policy in policies.items()})
    describe_run(Console(), config, policies, task, make_schedule(config), method)
    said = " ".join(capsys.readouterr().out.split())
    # Only the solutions that are chosen are judged.
    assert "of each): generator 2 x 2 in each of up to 4 batches, verifier 4 x 1, read in one pass" in said


@pytest.mark.parametrize("mesh", [("fsdp=8",), ("fsdp=4", "tensor=2", "decode_tensor=2")])
def test_a_mesh_judges_as_one_device(folder, mesh):
    solutions = [solution(STEPS[:count]) for count in (3, 1, 0, 2, 3)]
    one = judged_by(config_of(folder), solutions)
    settings = [f"verifier.mesh.{setting}" for setting in mesh]
    other = judged_by(config_of(folder, *settings), solutions)
    assert [len(judged.p_steps) for judged in one] == [3, 1, 0, 2, 3]
    for ours, theirs in zip(other, one, strict=True):
        np.testing.assert_allclose(ours.p_steps, theirs.p_steps, atol=1e-5)
        assert ours.judgements == theirs.judgements and ours.verdict == theirs.verdict


def test_samples_of_a_solution_are_alike_and_without_tokens(folder):
    judged = judged_by(config_of(folder), [solution(), solution(["#1 ends in x"])], group_size=3)
    assert len(judged) == 6 and judged.records[0] is not judged.records[1]
    assert judged[0] == judged[1] == judged[2] != judged[3]
    assert all(one.of is parent for one, parent in zip(judged, judged.owners, strict=True))
    assert judged.metrics["verifier/tokens_sampled"] == judged.metrics["verifier/shortened_rate"] == 0
    assert [len(tokens) for tokens in judged.rollout.tokens] == [0] * 6


def test_steps_that_do_not_fit_are_not_judged(folder):
    whole = judged_by(config_of(folder), [solution()])[0]
    lengths = [len(judged_by(config_of(folder), [solution(STEPS[:count])]).prompts[0]) for count in (2, 3)]
    judged = judged_by(config_of(folder, f"verifier.max_prompt={lengths[1] - 1}"), [solution()])
    assert len(judged.prompts[0]) == lengths[0] and judged.metrics["verifier/prompts_shortened"] == 1
    [cut] = judged
    np.testing.assert_allclose(cut.p_steps, whole.p_steps[:2], atol=1e-6)
    assert not cut.is_aligned and cut.verdict == ("INVALID" if all(cut.judgements) else "INCORRECT")


def test_broken_weights_end_the_turn(folder):
    config = config_of(folder)
    policy = policies_of(config)["verifier"]
    broken = jax.tree.map(lambda leaf: leaf * np.nan, policy.load_params())
    context = RunContext(config, None, {"verifier": policy}, {}, PhaseTimer())
    with pytest.raises(Exception, match="cannot score with the verifier: the logits are NaN"):
        respond(context, {"verifier": policy.restart(broken)}, "verifier", [solution()], 1, np.zeros(2, np.uint32))


def test_only_solutions_are_judged(folder):
    config = config_of(folder)
    policy = policies_of(config)["verifier"]
    context = RunContext(config, None, {"verifier": policy}, {}, PhaseTimer())
    with pytest.raises(ValueError, match="is a process reward model, which has no prompt second_judgement"):
        respond(context, {"verifier": policy.restart(policy.load_params())}, "verifier",
                [verification_of(Problem("p", "a", "b"), "s", "v")], 1, np.zeros(2, np.uint32), prompt=SECOND_JUDGEMENT)


@pytest.mark.parametrize("overrides, message", [
    (["arm=tango"], "; arm=tango trains the verifier$"),
    (["arm=fixed_verifier_warm"], "; arm=fixed_verifier_warm trains the verifier$"),
    (["arm=self_verify"], "arm=self_verify trains the verifier"),
    (["verifier.sft.steps=3"], r"; leave out verifier.sft.steps=3$"),
    (["verifier.model.lora.rank=4"], r"; leave out verifier.model.lora.rank=4$"),
    (["verifier.stop_at_first_error=True"], r"; leave out verifier.stop_at_first_error=True$"),
    (["rl.verifications_per_solution=2"], r"; rl.verifications_per_solution=2 would repeat .*: set it to 1$"),
])
def test_only_a_fixed_verifier_is_a_reward_model(folder, overrides, message):
    with pytest.raises(ValueError, match=f"verifier.checkpoint={folder} is a process reward model, .*{message}"):
        check_fixed(config_of(folder, *overrides), {"generator": "", "verifier": "linear"})
    with pytest.raises(ValueError, match="is a process reward model, which judges steps and writes no text"):
        validate(config_of(folder, *overrides))


def test_a_reward_model_has_no_marks_to_read(folder):
    read = dataclasses.replace(ARMS["fixed_verifier"], is_scored=True, label="mine")
    with given({"arm": read}) as named:
        with pytest.raises(ValueError, match=r"is a process reward model, .*; is_scored=True of arm=\S+ is for a "
                           "verifier that has learned to write marks: leave it out$"):
            check_fixed(config_of(folder, f"arm={named['arm']}"), {"generator": "", "verifier": "linear"})
        with pytest.raises(ValueError, match="is_scored=True of arm="):
            validate(config_of(folder, f"arm={named['arm']}"))


@pytest.mark.parametrize("arm", ["fixed_verifier", "grpo", "gold_steps"])
def test_arms_that_do_not_train_the_verifier_take_one(folder, arm):
    assert "verifier" not in ARMS[arm].turns
    validate(config_of(folder, f"arm={arm}"))


def test_templates_belong_to_their_models(folder, tmp_path):
    with pytest.raises(ValueError, match="^verifier.template=math is for a model that writes, .*: set it to trl_prm"):
        policies_of(config_of(folder, "verifier.template=math"))
    with pytest.raises(ValueError, match=r"^verifier.template=qwen_prm has \{step\}, as for a process reward model"):
        policies_of(load_config(str(CONFIGS / "tiny.py"), ["verifier.template=qwen_prm"]))
    unmarked = write_qwen_folder(tmp_path / "unmarked", has_mark=False)
    with pytest.raises(ValueError, match="^verifier.template=qwen_prm judges each step at <extra_0>, which the token"):
        policies_of(config_of(unmarked, "verifier.template=qwen_prm"))
    with pytest.raises(ValueError, match="^generator.checkpoint=.* is a process reward model"):
        validate(config_of(folder, f"generator.checkpoint={folder}", "generator.sft.steps=0"))
