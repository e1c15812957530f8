"""What a role's policy is updated with: minibatches, epochs, and the log-probs that they need."""

import dataclasses

import numpy as np
import pytest

from support.update_cases import LENGTHS, MODEL, PARAMS, PROMPTS, RESPONSES, make_data, random_params, tiny_role
from tango_jax.loop.turn import RunContext, action_mask, update_policy
from tango_jax.records import Responses, Rollout, TrainState
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
    is_action_BT = action_mask(policy, rollout)
    assert is_action_BT.sum(axis=1).tolist() == [4, 2, 0, 1, 3, 5, 4, 2]
    learner = Responses("generator", (), prompts, 2, rollout, [], {})
    _, metrics = update_policy(context, state, learner, data["adv"][order], is_action_BT)

    # Two minibatches of 14 and 7 tokens, twice: every token counts alike.
    assert metrics == pytest.approx({
        "generator/loss": 2.5, "generator/tokens": 21.0, "generator/kl": (0 * 14 + 1 * 7 + 2 * 14 + 4 * 7) / 42,
        "generator/kl_first": 0.0, "generator/logprob_gap_max": 9e-6,
    })  # fmt: skip
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
