"""One call of a role: what becomes of a sampler that fails."""

import types

import jax.numpy as jnp
import pytest

from tango_jax.loop import turn
from tango_jax.loop.breakdown import Broken
from tango_jax.loop.turn import RunContext, respond
from tango_jax.runtime.rng import step_key
from tango_jax.runtime.timers import PhaseTimer


def test_a_role_that_cannot_be_sampled_from_is_named(monkeypatch):
    def sample(weights, request):
        raise FloatingPointError("the logits are NaN or infinite at new token 1 of row 0")

    sampler = types.SimpleNamespace(layout=lambda params: params, sample=sample)
    config = types.SimpleNamespace(temperature=1.0, top_p=1.0, top_k=0)
    policy = types.SimpleNamespace(role="verifier", config=config, sampler=sampler,
                                   model_config=types.SimpleNamespace(score_head=""))
    monkeypatch.setattr(turn, "build_prompts", lambda policy, prompt, parents: ([[30]] * len(parents), [False]))
    context = RunContext(None, None, {"verifier": policy}, {}, PhaseTimer())
    states = {"verifier": types.SimpleNamespace(weights=jnp.ones(1))}
    with pytest.raises(Broken, match="cannot sample from the verifier: the logits are NaN or infinite") as found:
        respond(context, states, "verifier", ["a solution"], 1, step_key(0), is_greedy=True)
    assert found.value.role == "verifier"
