"""The log-probs of a teacher: the reference policy's, of the same tokens to another prompt, however they are packed."""

import numpy as np
import pytest

from support.update_cases import LENGTHS, MODEL, PARAMS, PROMPTS, RESPONSES, plain_logps, tiny_role
from tango_jax.loop import turn
from tango_jax.loop.turn import PolicyWork, RunContext
from tango_jax.records import Responses, Rollout
from tango_jax.rl.policy import make_policy
from tango_jax.runtime.timers import PhaseTimer
from tango_jax.text.prompts import INFORMED
from tango_jax.text.tokenizer import Tokenizer
from tango_jax.weights.source import Source


@pytest.mark.parametrize(
    "minibatches, mesh", [(1, {"fsdp": 1}), (3, {"fsdp": 1}), (1, {"data": 2, "fsdp": 2})]
)
def test_the_teacher_scores_the_same_tokens_under_its_own_prompt(monkeypatch, minibatches, mesh):
    """As the plain forward pass scores them."""
    config = tiny_role()
    config.loss.minibatches = minibatches
    config.mesh.update(mesh)
    tokenizer = Tokenizer(lambda text: [], (b"",) * 20, (), (0,))
    policy = make_policy("verifier", config, Source("", MODEL, tokenizer, None, lambda folder: None, {}))
    rollout = Rollout(tuple(RESPONSES), tuple(np.zeros(n, np.float32) for n in LENGTHS), np.zeros(6, bool), 6, 36)
    learner = Responses("verifier", [None] * 3, [[1], [2], [3]], 2, rollout, [None] * 6, {})
    context = RunContext(None, None, {"verifier": policy}, {"verifier": lambda: PARAMS}, PhaseTimer())
    work = PolicyWork(context, {})
    monkeypatch.setattr(turn, "build_prompts", lambda policy, prompt, parents: (list(PROMPTS), [False] * 3))
    scores_BT = work.reference_logps(learner, INFORMED)
    np.testing.assert_allclose(scores_BT, plain_logps(PARAMS)[1], atol=2e-5)
    assert context.timer.pop()["time/update_s"] > 0  # where plans expect it
    monkeypatch.setattr(turn, "build_prompts", lambda policy, prompt, parents: (list(PROMPTS), [False, True, False]))
    with_cut_BT = work.reference_logps(learner, INFORMED)
    assert np.isnan(with_cut_BT[2:4]).all(), "both responses to the prompt that was cut"
    np.testing.assert_array_equal(with_cut_BT[[0, 1, 4, 5]], scores_BT[[0, 1, 4, 5]])
