"""Verifiers that do not write: what is read is the plain forward pass, on any mesh, and whole runs of both arms."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.evaluation_cases import CLAIM
from support.paths import CONFIGS
from support.policies import policies_of
from support.tiny_checkpoints import write_tiny_folder
from support.tiny_train import StopAfter, repeatable_rows
from tango_jax.cli.command_line import load_config
from tango_jax.data.rows import Row
from tango_jax.evaluation.judging import JudgeSettings, judge_rows, open_verifier
from tango_jax.loop import run
from tango_jax.loop.breakdown import Broken
from tango_jax.loop.scoring import read_marks
from tango_jax.method.scored import judge_exactly
from tango_jax.models import transformer
from tango_jax.models.attention import make_packed_attention
from tango_jax.records import Problem
from tango_jax.rl.packing import action_mask, pack_minibatch
from tango_jax.rl.policy import loss_config
from tango_jax.rl.update import make_policy_loss
from tango_jax.runtime import hosts
from tango_jax.runtime.checkpoint import peek_meta
from tango_jax.runtime.console import Console
from tango_jax.sampling.checkpoint_sampler import CheckpointSamplerSettings
from tango_jax.sharding.layouts import fetch
from tango_jax.text.mark_rows import mark_row
from tango_jax.text.prompts import SCORED, solution_of
from tango_jax.tracking.evaluations import evaluations_of, read_tables, sources_of, write_table
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.rollout_dump import read_rollouts

SILENT, KEY = Console(enabled=False), np.array([3, 4], np.uint32)


def config_of(*overrides: str):
    settings = ("generator.mesh.fsdp=1", "verifier.mesh.fsdp=1", "generator.cache_buckets=()",
                "generator.row_buckets=(8,)", "verifier.max_response=64", "verifier.temperature=0.7",
                "rl.generator_steps=3", "eval.every=3", "rollouts.every=1", "task.test_words=(1,3)")
    return load_config(str(CONFIGS / "tiny.py"), [*settings, *overrides])


def solutions(*counts: int):
    """With so many steps, not all of the same length."""
    problems = [Problem(f"p{number}", "abc#1 de#2"[: 5 + number].strip(), "x") for number in range(len(counts))]
    texts = ["".join(f"<step>#{k} ends in {'abcdefgh'[(k + number) % 8]}</step>" for k in range(1, count + 1))
             for number, count in enumerate(counts)]
    return [solution_of(*parts) for parts in zip(problems, texts, counts, strict=True)]


SOLUTIONS = solutions(2, 1, 3, 0, 2, 4, 1, 3)


def verifier_of(*overrides: str):
    """A policy with random weights, large enough for marks that differ."""
    policy = policies_of(config_of("arm=scored_exact", *overrides))["verifier"]
    state, rng = policy.init(KEY), np.random.default_rng(5)
    params = jax.tree.map(lambda leaf: leaf + 0.2 * rng.normal(size=leaf.shape).astype(np.float32), state.params)
    return policy, state.replace(params=fetch(jax.device_get(params), policy.shardings.params))


def read(policy, state, parents=SOLUTIONS, samples=1):
    return read_marks(policy, state.weights, SCORED, parents, samples, KEY, most=max(len(SOLUTIONS), len(parents)))


def probabilities(responses) -> list[np.ndarray]:
    rollout = responses.rollout
    return [np.exp(logp_T[other_T >= 0]) for logp_T, other_T in zip(rollout.logps, rollout.others, strict=True)]


def two_words(policy, params, prompt, row) -> jax.Array:
    """Log-odds of CORRECT at each mark, by a forward pass over this text alone."""
    token_BT = jnp.asarray([[*prompt, *row.tokens]])
    position_BT = jnp.arange(token_BT.shape[1])[None]
    x_BTD = transformer.forward(policy.model_config, params, token_BT, position_BT,
                                make_packed_attention(jnp.ones_like(token_BT)))
    head_DV = transformer.head_matrix(policy.model_config, params)
    logits_TV = transformer.logits_from_hidden(policy.model_config, params["final_norm"], head_DV, x_BTD)[0]
    marks = np.flatnonzero(row.other >= 0)
    at, words = len(prompt) + marks - 1, (row.tokens[marks], row.other[marks])
    return (logits_TV[at, words[0]] - logits_TV[at, words[1]]) / policy.config.temperature


def plain(policy, params, responses) -> list[np.ndarray]:
    rows = [mark_row(policy.tokenizer, len(one.steps), policy.config.max_response) for one in responses.parents]
    return [np.asarray(jax.nn.sigmoid(two_words(policy, params, prompt, row))) for prompt, row in
            zip(responses.prompts, rows, strict=True)]


@pytest.fixture(scope="module")
def verifier():
    return verifier_of()


@pytest.mark.parametrize("overrides", [
    (), ("verifier.logp_chunk=16",), ("verifier.pack_length=500", "verifier.loss.minibatches=2")])
def test_a_judgement_that_is_read_is_the_plain_forward_pass(overrides):
    policy, state = verifier_of(*overrides)
    responses = read(policy, state)
    found, expected = probabilities(responses), plain(policy, state.params, responses)
    assert list(map(len, found)) == [len(one.steps) for one in SOLUTIONS]
    for mine, its in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, its, rtol=2e-4, atol=1e-6)
    values = np.concatenate(found)
    assert values.min() < 0.35 and values.max() > 0.65
    for record, p in zip(responses, found, strict=True):
        verdict = ("CORRECT" if (p >= 0.5).all() else "INCORRECT") if len(p) else "INVALID"
        assert record.judgements == tuple(p >= 0.5) and record.verdict == verdict
        assert record.is_aligned == (len(p) > 0) and record.p_steps == tuple(map(float, p))
    assert responses.metrics["verifier/tokens_sampled"] == 0
    assert responses.metrics["verifier/tokens_scored"] == sum(
        len(prompt) + len(tokens) for prompt, tokens in zip(responses.prompts, responses.rollout.tokens, strict=True))


def test_a_judgement_does_not_depend_on_the_solutions_beside_it(verifier):
    policy, state = verifier
    together, alone = probabilities(read(policy, state)), probabilities(read(policy, state, SOLUTIONS[2:3]))
    np.testing.assert_allclose(alone[0], together[2], rtol=1e-5)


def test_it_is_what_judge_scored_reads(tmp_path):
    folder = write_tiny_folder(tmp_path / "model")
    settings = [f"{role}.{setting}" for role in ("generator", "verifier") for setting in (
        f"checkpoint={folder}", "sft.steps=0", "max_prompt=200", "max_response=300", "temperature=1.0")]
    policy = policies_of(config_of("arm=scored", *settings))["verifier"]
    state = policy.restart(policy.load_params())
    found = probabilities(read(policy, state))
    rows = [Row(one.problem.id, one.problem.id, {"problem": one.problem.question, "solution": one.text})
            for one in SOLUTIONS if one.steps]
    sampler = CheckpointSamplerSettings(CLAIM, max_prompt=200, max_new=300, rows=4)
    judged = judge_rows(rows, str(folder), JudgeSettings(scored=True, sampler=sampler), SILENT)
    for mine, its in zip([p for p in found if len(p)], judged, strict=True):
        np.testing.assert_allclose(mine, its["verifications"][0]["p_steps"], rtol=1e-4, atol=2e-6)


def test_draws_take_one_pass_and_follow_the_marks(verifier):
    policy, state = verifier
    passes = []
    counted = dataclasses.replace(policy, score=lambda *args: passes.append(1) or policy.score(*args))
    responses = read(counted, state, SOLUTIONS[2:3], samples=400)
    assert len(passes) == 1 and len(responses) == 400
    [p, *others] = probabilities(responses)
    assert all(np.array_equal(one, p) for one in others)
    share = np.mean([record.judgements for record in responses], axis=0)
    assert (np.abs(share - p) < 4 * np.sqrt(p * (1 - p) / 400)).all()
    judgements = np.array([record.judgements for record in responses], float)
    assert np.abs(np.corrcoef(judgements.T)[~np.eye(3, dtype=bool)]).max() < 0.2  # each mark by itself
    again = read(counted, state, SOLUTIONS[2:3], samples=400)
    assert [one.text for one in again] == [one.text for one in responses]
    assert responses.metrics == read(policy, state, SOLUTIONS[2:3]).metrics


def test_marks_without_room_are_not_read():
    policy, state = verifier_of("verifier.max_response=17")
    responses = read(policy, state)
    assert [one.is_truncated for one in responses] == [len(one.steps) > 1 for one in SOLUTIONS]
    assert [one.verdict == "INVALID" and not one.judgements for one in responses] == [
        len(one.steps) != 1 for one in SOLUTIONS]
    assert responses.metrics["verifier/truncation_rate"] == 5 / 8
    assert action_mask(policy.config, responses.rollout).sum() == 2


def test_logits_that_are_not_finite_are_named(verifier):
    policy, state = verifier
    params = state.params | {"final_norm": state.params["final_norm"] * np.nan}
    with pytest.raises(Broken, match="cannot score with the verifier: the logits are NaN or infinite"):
        read(policy, state.replace(params=params))


def lesson_of(policy, state, is_right: np.ndarray):
    """A turn of scored_exact about the solutions."""
    parents = [dataclasses.replace(one, is_correct=bool(right))
               for one, right in zip(SOLUTIONS, is_right, strict=True)]
    config = config_of("arm=scored_exact")
    turn = SimpleNamespace(config=config, rl=config.rl, problems=lambda stream: None)
    turn.sample = lambda role, *_: parents if role == "generator" else read(policy, state, parents)
    return judge_exactly(turn)


def batch_of(policy, lesson):
    [(weight, adv_BT)] = lesson.terms.values()
    responses = lesson.responses
    return pack_minibatch(policy.config, policy.placement, 0, responses, weight * adv_BT,
                          action_mask(policy.config, responses.rollout))


IS_RIGHT = np.array([True, False, False, True, True, False, True, False])


def test_an_update_has_the_gradient_of_the_likelihood_of_the_grades(verifier):
    """Through the whole model: of the mean over marks of the loss of the solutions, as token_mean takes it."""
    policy, state = verifier
    lesson = lesson_of(policy, state, IS_RIGHT)
    config = dataclasses.replace(loss_config("verifier", policy.config), kl_coef=0.0, entropy_coef=0.0)
    batch = jax.tree.map(lambda leaf: leaf[0] if np.ndim(leaf) else leaf, batch_of(policy, lesson))
    found = jax.grad(lambda params: make_policy_loss(policy.model_config, config)(params, batch)[0])(state.params)
    rows = [mark_row(policy.tokenizer, len(one.steps), 64) for one in SOLUTIONS]

    def plain_loss(params):
        total = 0.0
        for row, prompt, right in zip(rows, lesson.responses.prompts, IS_RIGHT, strict=True):
            if (row.other >= 0).any():
                log_P = jax.nn.log_sigmoid(two_words(policy, params, prompt, row)).sum()
                total -= log_P if right else jnp.log1p(-jnp.exp(log_P))
        return total / sum(len(one.steps) for one in SOLUTIONS)

    expected = jax.grad(plain_loss)(state.params)
    assert batch_of(policy, lesson).num_micro == 1
    for mine, its in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, its, rtol=2e-3, atol=2e-4 * np.abs(its).max())


@pytest.mark.parametrize("mesh", ["fsdp=2", "tensor=2"])
def test_two_devices_read_and_learn_the_same(mesh):
    def after(policy, state):
        responses = read(policy, state)
        batch = batch_of(policy, lesson_of(policy, state, IS_RIGHT))
        state, metrics = policy.update(state.replace(base={}), policy.with_scores(
            batch, state.weights, lambda: state.weights), {})
        return responses, jax.device_get(state.params), jax.device_get(metrics)

    heads = "verifier.model.num_kv_heads=2"
    one, params, metrics = after(*verifier_of(heads))
    other, its_params, its_metrics = after(*verifier_of(heads, f"verifier.mesh.{mesh}"))
    for mine, its in zip(probabilities(one), probabilities(other), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-6)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6) and metrics["logprob_gap_max"] < 1e-4
    for name in ("loss", "grad_norm", "entropy", "tokens"):
        assert its_metrics[name] == pytest.approx(metrics[name], rel=1e-3)
    for mine, its in zip(jax.tree.leaves(params), jax.tree.leaves(its_params), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-3, atol=1e-4)


ADAPTERS = [f"{role}.{setting}" for role in ("generator", "verifier")
            for setting in ("model.lora.rank=2", "sft.full=true", "optimizer.lora_lr=0.01")]
RUNS = {
    "scored": ("arm=scored", "rl.verifications_per_solution=2"),
    "scored_exact": ("arm=scored_exact", "rl.step_reward=probability", "rl.trust=(0.4,0.55)", "rl.judge=failed",
                     "rl.alpha_schedule=none"),
    "adapters": ("arm=scored_exact", *ADAPTERS),
    "one policy": ("arm=scored", "verifier.adapter=generator"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", [name if name == "scored" else pytest.param(name, marks=pytest.mark.release)
                                  for name in RUNS])
def test_a_resumed_run_is_the_same_to_the_bit(name, tmp_path):
    config = config_of(*RUNS[name])
    policies = policies_of(config)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run.run_or_resume(config, whole, SILENT, policies)
    shutil.copytree(whole / "sft", stopped / "sft")
    shutil.copy(whole / "config.json", stopped)
    with pytest.raises(hosts.Preempted):
        run.run_or_resume(config, stopped, SILENT, policies, preemption=StopAfter(8))
    assert 0 < peek_meta(stopped / "checkpoints").step < 6
    run.run_or_resume(config, stopped, SILENT, policies)
    rows = repeatable_rows(whole / "metrics.jsonl")
    assert repeatable_rows(stopped / "metrics.jsonl") == rows
    assert json.loads((whole / "summary.json").read_text())["compiles_after_warmup"] == 0
    check_metrics(config, whole)


def check_metrics(config, folder):
    assert open_verifier(str(folder), CheckpointSamplerSettings()).reads_marks
    rows = read_metrics(folder)
    trained = [row for row in rows if row["phase"] in ("warmup", "verifier")]
    assert all(row["verifier/tokens_sampled"] == 0 < row["verifier/tokens_scored"] for row in trained)
    assert all(row["verifier/logprob_gap_max"] < 1e-4 for row in trained)
    assert all(row["flops/rollout"] > 0 < row["flops/training"] for row in rows if row["phase"] != "eval")
    assert all(not value for row in rows if row["phase"] != "eval" for key, value in row.items()
               if key == "verifier/decode_waste")
    evaluations = evaluations_of(rows, config, "", sources_of(folder))
    write_table(evaluations, folder / "table.csv")
    last = read_tables([folder / "table.csv"])[-1]
    of_turns = [row for row in rows if row["phase"] != "eval"]
    assert last.scored_tokens == sum(row["verifier/tokens_scored"] for row in of_turns)
    assert last.sampled_tokens == sum(row["generator/tokens_sampled"] for row in of_turns)
    assert last.flops == pytest.approx(sum(row["flops/rollout"] + row["flops/training"] for row in of_turns), rel=1e-5)
    rollouts = list(read_rollouts(folder / "rollouts"))
    formulas = {row["formula"] for row in rollouts if row["role"] == "verifier"}
    assert all(("P / (1 - P)" in one) == (config.arm == "scored_exact") for one in formulas) and len(formulas) == 1
    shown = [one for row in rollouts for one in row["verifications"]]
    assert shown and all(" \\boxed{" in one["text"] or not one["judgements"] for one in shown)
