"""Updates of packed batches against a plain loss over one sequence at a time."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from support.update_cases import (
    CHUNK,
    IS_ACTION_BN,
    LENGTHS,
    MODEL,
    N_MAX,
    PARAMS,
    SHAPE,
    TEMPERATURE,
    TOKENS,
    B,
    by_response,
    make_batch,
    make_data,
    plain_logps,
    score_fn,
)
from tango_jax.rl.losses import token_weights_BT
from tango_jax.rl.packing import PackShape
from tango_jax.rl.score import make_score, micro_batch
from tango_jax.rl.supervised import make_nll_loss
from tango_jax.rl.update import LossConfig, init_state, make_policy_loss, make_update
from tango_jax.tracking import alarms
from tango_jax.tracking.turn_metrics import over_updates

LOSS = LossConfig(
    temperature=TEMPERATURE, clip_low=0.2, clip_high=0.3, ratio="token", kl_coef=0.3, kl_kind="k3", entropy_coef=0.05,
    importance_cap=1.1, has_old_logp=True, logp_chunk=0,
)
SEQUENCE_LOSS = dataclasses.replace(
    LOSS, ratio="sequence", kl_coef=0.0, entropy_coef=0.0, clip_low=0.02, clip_high=0.03
)
ON_POLICY_LOSS = dataclasses.replace(LOSS, kl_coef=0.5, entropy_coef=0.0, importance_cap=0.0, has_old_logp=False)


@pytest.fixture(scope="module")
def data():
    return make_data()


def plain_loss(params, data, config):
    """The policy loss as the papers write it, on rows of one response; (loss, what the metrics are made of)."""
    logps_BNV, logp = plain_logps(params)
    entropy = -(jnp.exp(logps_BNV) * logps_BNV).sum(-1)
    old = data["old"] if config.has_old_logp else jax.lax.stop_gradient(logp)
    log_ratio = logp - old
    if config.ratio == "sequence":
        log_ratio = jnp.broadcast_to(log_ratio.sum(1, keepdims=True) / np.array(LENGTHS)[:, None], logp.shape)
    ratio = jnp.exp(log_ratio)
    limited = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    gain = jnp.minimum(ratio * data["adv"], limited * data["adv"])
    if config.importance_cap:
        gain *= jax.lax.stop_gradient(jnp.minimum(jnp.exp(old - data["sampler"]), config.importance_cap))
    kl = jnp.exp(data["ref"] - logp) - (data["ref"] - logp) - 1
    total = jnp.sum(data["weight"] * (-gain + config.kl_coef * kl - config.entropy_coef * entropy))
    seen = {"logp": logp, "entropy": entropy, "kl": kl, "is_clipped": limited * data["adv"] < ratio * data["adv"]}
    return total, {name: value[IS_ACTION_BN] for name, value in seen.items()}


plain_fn = jax.jit(jax.value_and_grad(plain_loss, has_aux=True), static_argnums=2)


@functools.cache
def update_fn(config, chunk=CHUNK):
    """The update with plain gradient descent: new parameters = old ones - gradient."""
    config = dataclasses.replace(config, logp_chunk=chunk)
    return make_update(optax.sgd(1.0), make_policy_loss(MODEL, config))


def run_update(config, batch, params=PARAMS, chunk=CHUNK):
    """(loss, gradient, metrics) of one update."""
    state = init_state(optax.sgd(1.0), jax.tree.map(jnp.array, params))
    state, metrics = update_fn(config, chunk)(state, batch)
    assert int(state.step) == 1
    grads = jax.tree.map(lambda old, new: old - np.asarray(new), params, state.params)
    return float(metrics["loss"]), grads, {name: float(value) for name, value in metrics.items()}


def norm_of(tree):
    return math.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(tree)))


def assert_same_gradient(got, expected):
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 0.05
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


@pytest.fixture(scope="module")
def expected(data):
    (loss, seen), grads = plain_fn(PARAMS, data, LOSS)
    assert 0 < seen["is_clipped"].sum() < TOKENS
    return float(loss), grads, seen


LAYOUTS = {  # name: (shape, one sequence a row, tokens scored at a time)
    "packed": (SHAPE, False, CHUNK),
    "one_sequence_a_row": (PackShape(row_length=12, rows=1), True, 0),
    "one_micro_batch": (PackShape(row_length=24, rows=3), False, 5),
    "a_shared_prompt": (PackShape(8, rows=2, prompts=1, prompt_buckets=(6,)), False, 0),
    "two_shared_prompts": (PackShape(13, rows=3, prompts=2, prompt_buckets=(2, 7)), False, 6),
    "prompts_in_rows": (PackShape(30, rows=1, joins_prompts=True), False, 4),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_packing_and_micro_batches_change_neither_loss_nor_gradient(data, expected, name):
    shape, one_a_row, chunk = LAYOUTS[name]
    batch = make_batch(data, shape, one_a_row=one_a_row)
    micros = {"packed": 2, "one_sequence_a_row": 6, "one_micro_batch": 1, "a_shared_prompt": 3, "two_shared_prompts": 2,
              "prompts_in_rows": 2}
    assert batch.num_micro == micros[name]
    loss, grads, _ = run_update(LOSS, batch, chunk=chunk)
    assert loss == pytest.approx(expected[0], rel=1e-5, abs=1e-5)
    assert_same_gradient(grads, expected[1])


def test_metrics_are_means_over_action_tokens(data, expected):
    batch = make_batch(data)
    _, grads, metrics = run_update(LOSS, batch)
    seen = {name: np.asarray(values) for name, values in expected[2].items()}
    gap = np.abs(data["old"] - data["sampler"])[data["weight"] > 0]
    assert metrics == pytest.approx({
        "loss": expected[0],
        "grad_norm": norm_of(grads),
        "update_ratio": norm_of(grads) / norm_of(PARAMS),  # the learning rate is 1
        "tokens": TOKENS,
        "entropy": seen["entropy"].mean(),
        "kl": seen["kl"].mean(),
        "clip_fraction": seen["is_clipped"].mean(),
        "logprob_gap_mean": gap.mean(),
        "logprob_gap_max": gap.max(),
        "logprob_gap_share": (np.exp(gap) > 1.1).mean(),
        "useful_share": (batch.segment_NZRT > 0).sum() / (2 * 2 * 14),  # two micro-batches of two rows
    }, rel=1e-4)
    assert 0 < metrics["logprob_gap_share"] < 1


@pytest.mark.parametrize("name", ["packed", "two_shared_prompts"])
def test_padding_and_prompt_tokens_have_no_loss(data, name):
    shape, _, chunk = LAYOUTS[name]
    batch = make_batch(data, shape)
    rng = np.random.default_rng(2)
    is_padding, is_silent = batch.segment_NZRT == 0, ~batch.is_action_NZRT
    assert is_padding[: batch.num_micro].any() and batch.num_micro < len(is_padding)

    def noise(values, where):
        return np.where(where, rng.normal(size=values.shape), values).astype(np.float32)

    changed = batch.replace(
        token_NZRT=np.where(is_padding, rng.integers(0, 20, is_padding.shape), batch.token_NZRT).astype(np.int32),
        adv_NZRT=noise(batch.adv_NZRT, is_silent),
        sampler_logp_NZRT=noise(batch.sampler_logp_NZRT, is_silent),
        old_logp_NZRT=noise(batch.old_logp_NZRT, is_silent),
        ref_logp_NZRT=noise(batch.ref_logp_NZRT, is_silent),
    )
    if shape.prompts:
        ids = batch.prefix_token_NZQX
        is_filler = np.arange(ids.shape[-1])[None, None, None, :] >= batch.prefix_length_NZQ[..., None]
        assert is_filler[: batch.num_micro].any()
        ids = np.where(is_filler, rng.integers(0, 20, ids.shape), ids).astype(np.int32)
        changed = changed.replace(prefix_token_NZQX=ids)
    changed.weight_NZRT[batch.num_micro :] = 1.0
    before, after = run_update(LOSS, batch, chunk=chunk), run_update(LOSS, changed, chunk=chunk)
    assert after[0] == pytest.approx(before[0], rel=1e-6)
    assert after[2] == pytest.approx(before[2], rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), after[1], before[1])


def entropy_and_kl(tokens):
    """The two terms of LOSS as a user might write them."""
    chex.assert_equal_shape(list(tokens))
    log_ratio_BT = tokens.ref_logp_BT - tokens.logp_BT
    return 0.3 * (jnp.exp(log_ratio_BT) - log_ratio_BT - 1) - 0.05 * tokens.entropy_BT


def test_a_term_of_the_users_is_weighted_and_summed_as_the_loss_is(data):
    own = dataclasses.replace(LOSS, kl_coef=0.0, entropy_coef=0.0, term_fn=entropy_and_kl)
    (loss, grads, _), (built_in, expected, _) = (run_update(config, make_batch(data)) for config in (own, LOSS))
    assert loss == pytest.approx(built_in, rel=1e-5)
    assert_same_gradient(grads, expected)


def test_sequence_ratios_with_importance_weights(data):
    (loss, seen), grads = plain_fn(PARAMS, data, SEQUENCE_LOSS)
    assert 0 < seen["is_clipped"].sum() < TOKENS
    got_loss, got_grads, metrics = run_update(SEQUENCE_LOSS, make_batch(data))
    assert got_loss == pytest.approx(float(loss), rel=1e-5)
    assert metrics["clip_fraction"] == pytest.approx(float(seen["is_clipped"].mean()))
    assert "kl" not in metrics
    assert_same_gradient(got_grads, grads)


def on_policy_batch(data, **changes):
    """A batch whose reference is the policy itself, so that the KL term vanishes."""
    batch = make_batch(data | changes)
    return batch.replace(ref_logp_NZRT=np.asarray(score_fn()(PARAMS, batch)))


def test_one_step_on_policy_is_the_policy_gradient(data):
    loss, grads, metrics = run_update(ON_POLICY_LOSS, on_policy_batch(data))

    def surrogate(params):
        return -jnp.sum(data["weight"] * data["adv"] * plain_logps(params)[1])

    assert_same_gradient(grads, jax.jit(jax.grad(surrogate))(PARAMS))
    assert loss == pytest.approx(-(data["weight"] * data["adv"]).sum(), rel=1e-4)  # every ratio is 1
    assert metrics["clip_fraction"] == 0


def test_no_kl_and_no_gradient_towards_a_reference_that_is_the_policy(data):
    silent = {"adv": np.zeros((B, N_MAX), np.float32)}
    loss, grads, metrics = run_update(ON_POLICY_LOSS, on_policy_batch(data, **silent))
    assert abs(loss) < 1e-6 and abs(metrics["kl"]) < 1e-6
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(grads)) < 1e-6
    # Against another reference the same update moves.
    loss, grads, metrics = run_update(ON_POLICY_LOSS, make_batch(data | silent))
    assert loss > 1e-3 and metrics["kl"] > 1e-3 and metrics["grad_norm"] > 1e-2


# The advantage of sequence b is b: with ratios of 1 the loss is minus the weighted mean of 0, 1, 2, 3, 4, 5.
@pytest.mark.parametrize(
    "kind, expected",
    [
        ("token_mean", (2 * 1 + 6 * 2 + 1 * 3 + 3 * 4 + 5 * 5) / 21),
        ("seq_mean", 2.5),
        ("seq_sum_norm", (2 * 1 + 6 * 2 + 1 * 3 + 3 * 4 + 5 * 5) / (6 * 8)),
    ],
)
def test_aggregations_reach_the_loss(data, kind, expected):
    weight_BT = token_weights_BT(IS_ACTION_BN, kind, max_length=8)
    adv_BT = np.tile(np.arange(B, dtype=np.float32)[:, None], (1, N_MAX))
    loss, *_ = run_update(ON_POLICY_LOSS, on_policy_batch(data, weight=weight_BT, adv=adv_BT))
    assert loss == pytest.approx(-expected, rel=1e-5)


def test_a_batch_without_action_tokens_changes_nothing(data):
    """As when every response is masked for its length."""
    masked = {"weight": np.zeros((B, N_MAX), np.float32)}
    loss, grads, metrics = run_update(ON_POLICY_LOSS, make_batch(data | masked))
    assert loss == 0 and metrics["tokens"] == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(grads))
    assert all(math.isfinite(value) for value in metrics.values()), metrics


def test_the_second_minibatch_is_measured_against_the_policy_before_the_first(data):
    halves = (range(0, 3), range(3, 6))
    old = by_response(plain_fn(PARAMS, data, LOSS)[0][1]["logp"])
    state = init_state(optax.sgd(1.0), jax.tree.map(jnp.array, PARAMS))
    batches = [make_batch(data, chosen=chosen) for chosen in halves]
    batches = [batch.replace(old_logp_NZRT=np.asarray(score_fn()(state.params, batch))) for batch in batches]
    for number, (batch, chosen) in enumerate(zip(batches, halves, strict=True)):
        params = jax.tree.map(np.array, state.params)
        weight = np.where(np.isin(np.arange(B), chosen)[:, None], data["weight"], 0.0)
        (loss, seen), _ = plain_fn(params, data | {"old": old, "weight": weight.astype(np.float32)}, LOSS)
        state, metrics = update_fn(LOSS)(state, batch)
        assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-4)
        drift = np.abs(np.asarray(seen["logp"]) - old[data["weight"] > 0]).max()
        assert drift > 0.01 if number else drift < 1e-5
        assert (float(metrics["clip_fraction"]) > 0) == bool(number)
    assert int(state.step) == 2


def test_update_donates_its_state(data):
    state = init_state(optax.sgd(1.0), jax.tree.map(jnp.array, PARAMS))
    update_fn(LOSS)(state, make_batch(data))
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(state.params["embed"])


def test_nll_is_minus_the_weighted_log_likelihood_at_temperature_one(data):
    batch = make_batch(data, PackShape(row_length=24, rows=3))
    assert batch.num_micro == 1
    loss, _ = jax.jit(lambda params: make_nll_loss(MODEL, 5)(params, micro_batch(batch, 0)))(PARAMS)
    logps = make_score(MODEL, 1.0, 0)(PARAMS, batch)
    places = zip(*np.nonzero(batch.is_action_NZRT), strict=True)
    expected = -sum(float(batch.weight_NZRT[place]) * float(logps[place]) for place in places)
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_figures_over_tokens_are_of_those_trained_on():
    """By hand: none in the first update, as where all of its responses are truncated and masked."""
    none = {"loss": 0.0, "grad_norm": 0.0, "tokens": 0, "entropy": 0.0, "kl": 0.0, "update_ratio": 0.0}
    some = {"loss": 2.0, "grad_norm": 1.0, "tokens": 6, "entropy": 1.5, "kl": 0.5, "update_ratio": 0.1}
    assert over_updates([none, some], epochs=1) == {
        "loss": 1.0, "grad_norm": 0.5, "tokens": 6, "entropy": 1.5, "kl": 0.5, "update_ratio": 0.1, "kl_first": 0.5}
    assert over_updates([none, none], epochs=1) == {"loss": 0.0, "grad_norm": 0.0, "tokens": 0, "update_ratio": 0.0}


def test_several_updates_of_a_batch_leave_the_gap_as_it_is(data):
    """Four epochs that move the policy far: the sampler agreed with the policy that it sampled from, and still does."""
    old = by_response(np.asarray(plain_fn(PARAMS, data, LOSS)[0][1]["logp"]))  # what a sampler without fault reports
    batch = make_batch(data | {"sampler": old})
    scored = np.asarray(score_fn()(PARAMS, batch))
    batch = batch.replace(old_logp_NZRT=scored, ref_logp_NZRT=scored)
    state, updates = init_state(optax.sgd(1.0), jax.tree.map(jnp.array, PARAMS)), []
    for _ in range(4):
        state, metrics = update_fn(LOSS)(state, batch)
        updates.append(jax.device_get(metrics))
    metrics = over_updates(updates, epochs=4)
    assert 0 < metrics["logprob_gap_mean"] <= metrics["logprob_gap_max"] < 1e-5 and metrics["logprob_gap_share"] == 0
    assert abs(metrics["kl_first"]) < 1e-6 and metrics["kl"] > 0.01
    assert 0 < metrics["clip_fraction"] < 1 and metrics["tokens"] == TOKENS
    row = {"step": 1, "phase": "generator"} | {f"generator/{name}": value for name, value in metrics.items()}
    assert alarms.check([row]) == []
