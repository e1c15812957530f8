"""FLOPs of a turn, by hand."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from support.turns import PROBLEM, responses_of, settings, solution, turn_of, verification
from tango_jax.models.lora import LoraConfig
from tango_jax.models.transformer import ModelConfig
from tango_jax.records import Lesson, Rewards
from tango_jax.tracking.turn_flops import turn_flops

MODEL = ModelConfig(vocab_size=20, width=4, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, mlp_width=8)
# A token: 2 x 4 x 2 x (2 + 2) + 2 x 2 x 2 x 4 + 6 x 4 x 8 = 64 + 32 + 192. A pair: 4 x 2 x 2. Logits: 2 x 4 x 20.
TOKEN, PAIR, HEAD = 288, 16, 160


def turn_with(sampled, learner, model=MODEL, kl_coef=0.0, epochs=1):
    config = settings(1, 2)
    loss = config.verifier.loss
    loss.kl_coef, loss.epochs = kl_coef, epochs
    t = turn_of(config, "verifier", {})
    t._everything = sampled
    policies = {role: SimpleNamespace(model_config=model, config=config[role], updates_per_batch=epochs)
                for role in ("generator", "verifier")}
    lesson = Lesson(learner, Rewards(np.zeros(len(learner), np.float32), {}), {})
    return turn_flops(t, lesson, policies)


@pytest.fixture
def sampled():
    """Two solutions of 2 tokens to a prompt of 3, and two verifications of 4 to a prompt of 5."""
    solved = responses_of("generator", [PROBLEM], 2, [solution(tokens=2)] * 2).replace(prompts=[[1] * 3])
    judged = responses_of("verifier", [solved[0]], 2, [verification(tokens=4)] * 2).replace(prompts=[[1] * 5])
    return solved, judged


def test_a_prompt_counts_once_and_padding_never(sampled):
    solved, judged = sampled
    found = turn_with(sampled, judged)
    # Pairs: the prompt's 6, and for each response 2 x 3 + 3; 15 and 4 x 5 + 10.
    of_solved = 7 * TOKEN + (6 + 2 * 9) * PAIR + 4 * HEAD
    of_judged = 13 * TOKEN + (15 + 2 * 30) * PAIR + 8 * HEAD
    assert found == {"flops/rollout": of_solved + of_judged, "flops/training": 3 * of_judged}
    # A reference, the policy before two updates, two updates.
    assert turn_with(sampled, judged, kl_coef=0.1, epochs=2)["flops/training"] == (2 + 6) * of_judged
    joined = judged.replace(group_size=1, prompts=judged.prompts * 2, is_joined=True)
    assert turn_with(sampled, joined)["flops/training"] == 3 * of_judged


def test_marks_are_read_once_whatever_is_drawn(sampled):
    solved, judged = sampled
    others = (np.array([-1, 3, -1, -1]),) * 2
    read = judged.replace(rollout=dataclasses.replace(judged.rollout, others=others))
    once = read.replace(group_size=1, rollout=read.rollout.rows(slice(None, None, 2)), records=read.records[::2])
    of_read = 9 * TOKEN + (15 + 30) * PAIR + 1 * HEAD
    found = turn_with([read], once)
    assert found == {"flops/rollout": of_read, "flops/training": 3 * of_read}


def test_equal_prompts_are_computed_one_by_one(sampled):
    solved, judged = sampled
    twice = judged.replace(group_size=1, prompts=judged.prompts * 2)
    of_twice = (2 * 5 + 8) * TOKEN + (2 * 15 + 2 * 30) * PAIR + 8 * HEAD
    assert turn_with([twice], twice) == {"flops/rollout": of_twice, "flops/training": 3 * of_twice}


def test_frozen_matrices_have_no_gradient(sampled):
    lora = dataclasses.replace(MODEL, lora=LoraConfig(rank=1, alpha=1.0, targets=(), base_dtype="float32"))
    _, judged = sampled
    found = turn_with([judged], judged, lora)
    # Adapters of rank 1 of a token: 2 x (D + HE of q, twice D + KE of k and v, HE + D of o, three times D + F).
    adapters = 13 * 2 * ((4 + 4) + 2 * (4 + 2) + (4 + 4) + 3 * (4 + 8))
    forward = 13 * TOKEN + (15 + 2 * 30) * PAIR + 8 * HEAD + adapters
    assert found["flops/rollout"] == forward
    assert found["flops/training"] == 3 * forward - 13 * TOKEN - 8 * HEAD
