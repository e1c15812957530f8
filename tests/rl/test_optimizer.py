"""Learning rates, clipping and weight decay, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tango_jax.config import role_config
from tango_jax.rl import optimizer as module
from tango_jax.rl.optimizer import learning_rate, make_optimizer


def optimizer_settings(**changes):
    config = role_config().optimizer
    for name, value in ({"lr": 0.1} | changes).items():
        config[name] = value
    return config


@pytest.mark.parametrize(
    "changes, rates",
    [
        ({}, {0: 0.1, 1000: 0.1}),
        ({"warmup_steps": 4}, {0: 0.0, 1: 0.025, 2: 0.05, 4: 0.1, 1000: 0.1}),
        ({"cosine_to": 8}, {0: 0.1, 2: 0.05 * (1 + 2**-0.5), 4: 0.05, 8: 0.0}),
        # Half a cosine from step 2 to step 10: at 4 it is at cos(pi / 4), at 6 half way, at 10 zero.
        ({"warmup_steps": 2, "cosine_to": 10},
         {0: 0.0, 1: 0.05, 2: 0.1, 4: 0.05 * (1 + 2**-0.5), 6: 0.05, 10: 0.0, 1000: 0.0}),
    ],
)
def test_learning_rates(changes, rates):
    schedule = learning_rate(0.1, **({"warmup_steps": 0} | changes))
    for step, rate in rates.items():
        assert float(schedule(step)) == pytest.approx(rate, abs=1e-7), step


@pytest.mark.parametrize("warmup_steps, decay_steps", [(0, 7), (1, 2), (13, 100), (5, 5), (40, 30)])
@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_learning_rates_are_warmup_and_decay_joined(kind, warmup_steps, decay_steps):
    """The schedules of optax are, to float32 rounding, a linear part joined to a constant or to half a cosine."""
    schedule = learning_rate(0.1, warmup_steps, decay_steps if kind == "cosine" else 0)
    rates = jax.vmap(schedule)(jnp.arange(120))
    step = np.arange(120, dtype=np.float64)
    share = np.clip((step - warmup_steps) / max(decay_steps - warmup_steps, 1), 0, 1)
    after_warmup = (1 + np.cos(np.pi * share)) / 2 if kind == "cosine" else np.ones(120)
    expected = 0.1 * np.where(step < warmup_steps, step / max(warmup_steps, 1), after_warmup)
    np.testing.assert_allclose(np.broadcast_to(rates, 120), expected, rtol=1e-6, atol=2e-8)


def test_clipping_and_decoupled_weight_decay(monkeypatch):
    monkeypatch.setattr(module, "EPS", 1.0)
    optimizer = make_optimizer(optimizer_settings(weight_decay=0.5, clip_norm=1.0))
    params = {"a": jnp.array([2.0]), "b": jnp.array([-1.0])}
    update = jax.jit(optimizer.update)
    updates, _ = update({"a": jnp.array([3.0]), "b": jnp.array([4.0])}, optimizer.init(params), params)
    # Norm 5, clipped to 0.6 and 0.8. Adam's first step is g / (|g| + eps) = 0.375 and 0.444444; with half the
    # parameter: 0.375 + 1 and 0.444444 - 0.5; times -0.1.
    np.testing.assert_allclose(updates["a"], [-0.1375], rtol=1e-5)
    np.testing.assert_allclose(updates["b"], [0.00555556], rtol=1e-4)
    # A gradient of norm 0.5 stays: 0.3 / 1.3 and 0.4 / 1.4.
    updates, _ = update({"a": jnp.array([0.3]), "b": jnp.array([0.4])}, optimizer.init(params), params)
    np.testing.assert_allclose(updates["a"], [-0.1 * (0.2307692 + 1)], rtol=1e-5)
    np.testing.assert_allclose(updates["b"], [-0.1 * (0.2857143 - 0.5)], rtol=1e-5)


def test_the_schedules_of_one_policy_count_the_updates_of_each_role():
    settings = optimizer_settings(warmup_steps=2, weight_decay=0.0)
    optimizers = {role: make_optimizer(settings, shared_by=role) for role in ("generator", "verifier")}
    params, gradient = {"a": jnp.zeros(1)}, {"a": jnp.ones(1)}
    state, rates = optimizers["generator"].init(params), []
    for role in ("verifier", "verifier", "verifier", "generator", "verifier", "generator", "generator"):
        updates, state = optimizers[role].update(gradient, state, params)
        rates.append(-float(updates["a"][0]))  # Adam's direction is 1 where all gradients are equal
    np.testing.assert_allclose(rates, [0.0, 0.05, 0.1, 0.0, 0.1, 0.05, 0.1], atol=1e-6)


def test_two_policies_have_the_states_and_updates_of_optax():
    settings = optimizer_settings(warmup_steps=1)
    ours = make_optimizer(settings, cosine_to=4)
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate(0.1, 1, 4), weight_decay=0.01))
    params, gradient = {"a": jnp.array([2.0, -1.0])}, {"a": jnp.array([0.3, -0.1])}
    states = [optimizer.init(params) for optimizer in (ours, theirs)]
    for _ in range(5):
        (one, states[0]), (other, states[1]) = (optimizer.update(gradient, state, params)
                                                for optimizer, state in zip((ours, theirs), states, strict=True))
        assert jax.tree.all(jax.tree.map(np.array_equal, (one, states[0]), (other, states[1])))
