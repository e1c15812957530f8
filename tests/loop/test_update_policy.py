"""What a role's policy is updated with: minibatches, epochs, and the log-probs that they need."""

import dataclasses

import numpy as np
import pytest

from support.update_cases import LENGTHS, MODEL, PARAMS, PROMPTS, RESPONSES, make_data, random_params, tiny_role
from tango_jax.loop.turn import RunContext, update_policy
from tango_jax.records import Problem, Responses, Rollout, TrainState
from tango_jax.rl import policy as policy_module
from tango_jax.rl.packing import action_mask, pack_minibatch
from tango_jax.rl.policy import make_policy
from tango_jax.runtime.timers import PhaseTimer
from tango_jax.text.tokenizer import Tokenizer
from tango_jax.weights.source import Source


def test_a_policy_gets_old_and_reference_log_probs_before_its_first_update():
    """Two minibatches, two epochs: four updates on two batches that were scored once, before any of them."""
    config, data = tiny_role(), make_data()
    config.loss.minibatches, config.loss.epochs = 2, 2
    config.loss.mask_overlong = True
    config.mesh.fsdp = 1
    tokenizer = Tokenizer(lambda text: [], (b"",) * 20, (), (0,))
    policy = make_policy("generator", config, Source("", MODEL, tokenizer, None, lambda folder: None, {}))
    assert policy.updates_per_batch == 4 and policy.model_config == dataclasses.replace(MODEL, attention="xla")
    calls = []
    kls, gaps = (0.0, 1.0, 2.0, 4.0), (1e-6, 9e-6, 2e-6, 3e-6)
    seen = [{"tokens": tokens, "kl": np.float32(kl), "logprob_gap_max": gap}
            for tokens, kl, gap in zip((14, 7, 14, 7), kls, gaps, strict=True)]

    def record(state, batch, base):
        calls.append((state, batch))
        assert base == {}
        return TrainState(random_params(8), (), np.int32(0)), {"loss": np.float32(len(calls)), **seen[len(calls) - 1]}

    reference = random_params(9)
    # A fourth prompt, so that both minibatches hold whole groups, every second one; response 2 ran into the limit.
    prompts, order = (*PROMPTS, [3, 4]), [0, 1, 2, 3, 4, 5, 0, 1]
    rollout = Rollout(
        tokens=tuple(RESPONSES[b] for b in order),
        logps=tuple(data["sampler"][b, : LENGTHS[b]] for b in order),
        is_truncated_B=np.array(order) == 2,
        decode_steps=6,
        row_steps=48,
    )
    state = TrainState(PARAMS, (), np.int32(0))
    policy = dataclasses.replace(policy, update=record)
    references = {"generator": lambda: reference}
    context = RunContext(None, None, {"generator": policy}, references, PhaseTimer())
    is_action_BT = action_mask(policy.config, rollout)
    assert is_action_BT.sum(axis=1).tolist() == [4, 2, 0, 1, 3, 5, 4, 2]
    learner = Responses("generator", (), prompts, 2, rollout, [None] * 8, {})
    _, metrics = update_policy(context, state, learner, data["adv"][order])

    # Two minibatches of 14 and 7 tokens, twice: every token counts alike.
    assert metrics == pytest.approx({
        "generator/loss": 2.5, "generator/tokens": 21.0, "generator/kl": (0 * 14 + 1 * 7 + 2 * 14 + 4 * 7) / 42,
        "generator/kl_first": 0.0, "generator/logprob_gap_max": 9e-6,
    })
    first, second = calls[0][1], calls[1][1]
    assert calls[0][0].params is PARAMS and calls[1][0].params is not PARAMS
    assert calls[2][1] is first and calls[3][1] is second
    assert [int(batch.is_action_NZRT.sum()) for batch in (first, second)] == [4 + 2 + 3 + 5, 0 + 1 + 4 + 2]
    for batch in (first, second):
        mask = batch.is_action_NZRT
        np.testing.assert_allclose(batch.weight_NZRT[mask], 1 / mask.sum(), rtol=1e-6)  # token_mean of each
        np.testing.assert_allclose(batch.old_logp_NZRT, policy.score(PARAMS, batch), atol=1e-6)
        np.testing.assert_allclose(batch.ref_logp_NZRT, policy.score(reference, batch), atol=1e-6)
        assert np.abs(batch.old_logp_NZRT - batch.ref_logp_NZRT)[mask].max() > 0.1


@pytest.mark.parametrize("mesh", [{"fsdp": 1}, {"data": 2, "fsdp": 2}])
def test_the_tries_of_a_problem_stay_in_one_minibatch(mesh):
    """Two first tries of each of three problems, and second tries of two of those, each with a prompt of its own."""
    config = tiny_role()
    config.loss.minibatches = 2
    config.mesh.update(mesh)
    tokenizer = Tokenizer(lambda text: [], (b"",) * 20, (), (0,))
    policy = make_policy("generator", config, Source("", MODEL, tokenizer, None, lambda folder: None, {}))
    problems = [Problem(name, "", "") for name in "abc"]
    records = [problems[number] for number in (0, 0, 1, 1, 2, 2, 0, 2)]
    rollout = Rollout(tuple(np.full(2, b + 1, np.int32) for b in range(8)), (np.zeros(2, np.float32),) * 8,
                      np.zeros(8, bool), 2, 16)
    learner = Responses("generator", records, [[b] for b in range(8)], 1, rollout, records, {}, "", 12, True)
    adv_BT = np.repeat(np.arange(1, 9, dtype=np.float32)[:, None], config.max_response, axis=1)
    seen, shapes = [], set()
    for number in range(2):
        batch = pack_minibatch(config, policy.placement, number, learner, adv_BT, action_mask(config, rollout))
        adv_NZRT, is_action_NZRT, weight_NZRT = (np.asarray(one) for one in (
            batch.adv_NZRT, batch.is_action_NZRT, batch.weight_NZRT))
        seen.append(sorted({int(value) - 1 for value in adv_NZRT[is_action_NZRT]}))
        shapes.add(adv_NZRT.shape)
        np.testing.assert_allclose(weight_NZRT[is_action_NZRT].sum(), 1.0, rtol=1e-6)  # token_mean of the minibatch
    assert seen == [[0, 1, 4, 5, 6, 7], [2, 3]]  # problems a and c, then b
    assert len(shapes) == 1


@pytest.mark.parametrize("length, prompts, has_room", [(16_384, 0, True), (16_385, 0, False), (16_385, 2, True),
                                                       (32_769, 2, False)])
def test_rows_that_splash_attention_cannot_tell_apart_are_refused_before_stage_one(
        length, prompts, has_room, monkeypatch):
    monkeypatch.setattr(policy_module, "attention_of", lambda model, device: "splash")
    config, tokenizer = tiny_role(), Tokenizer(lambda text: [], (b"",) * 20, (), (0,))
    config.pack_length, config.prompts_per_micro_batch, config.mesh.fsdp = length, prompts, 1
    source = Source("", MODEL, tokenizer, None, lambda folder: None, {})
    if has_room:
        assert make_policy("generator", config, source).model_config.attention == "splash"
    else:
        with pytest.raises(ValueError, match=f"^generator: a row of {length} tokens is longer than the .* lower pack"):
            make_policy("generator", config, source)
