"""Scoring, packing and updates against a plain loss over one sequence at a time; optimizer numbers by hand."""
import dataclasses
import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tango_jax.config import default_config, optimizer_config
from tango_jax.loop.rollouts import RunContext
from tango_jax.loop.turn import action_mask, update_policy
from tango_jax.models import transformer
from tango_jax.models.attention import make_packed_attention
from tango_jax.models.transformer import ModelConfig
from tango_jax.records import Responses, Rollout
from tango_jax.rl.losses import token_weights_BT
from tango_jax.rl.optimizer import learning_rate, make_optimizer
from tango_jax.rl.packing import MAX_SEGMENTS, PackShape, TrainSequence, assign_rows, pack, pack_shape
from tango_jax.rl.policy import make_policy
from tango_jax.rl.score import make_score, micro_batch, token_logps
from tango_jax.rl.update import LossConfig, init_state, make_nll_loss, make_policy_loss, make_update, over_updates
from tango_jax.runtime.timers import PhaseTimer
from tango_jax.text.tokenizer import Tokenizer
from tango_jax.tracking import alarms
from tango_jax.weights.source import Source

MODEL = ModelConfig(
    vocab_size=20, width=12, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=6, mlp_width=16, remat="none"
)
TEMPERATURE = 0.7
# Three prompts with two responses each; the prompt of one token leaves no shared prefix.
PROMPTS = ([5, 6, 7], [8, 9, 10, 11, 12, 13], [14])
LENGTHS = (4, 2, 6, 1, 3, 5)
TOKENS = sum(LENGTHS)
B, N_MAX = len(LENGTHS), max(LENGTHS)
RESPONSES = [np.random.default_rng(b).integers(0, 20, n).astype(np.int32) for b, n in enumerate(LENGTHS)]
IS_ACTION_BN = np.arange(N_MAX)[None, :] < np.array(LENGTHS)[:, None]

LOSS = LossConfig(
    temperature=TEMPERATURE, clip_low=0.2, clip_high=0.3, ratio="token", kl_coef=0.3, kl_kind="k3", entropy_coef=0.05,
    importance_cap=1.1, has_old_logp=True, logp_chunk=0,
)
SEQUENCE_LOSS = dataclasses.replace(
    LOSS, ratio="sequence", kl_coef=0.0, entropy_coef=0.0, clip_low=0.02, clip_high=0.03
)
ON_POLICY_LOSS = dataclasses.replace(LOSS, kl_coef=0.5, entropy_coef=0.0, importance_cap=0.0, has_old_logp=False)
# Rows of 14 tokens, two a micro-batch, scored 7 tokens at a time: the batch that most tests look at.
SHAPE, CHUNK = PackShape(row_length=14, rows=2), 7


def random_params(seed=0):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: transformer.init_params(MODEL, jax.random.key(0)))
    return jax.tree.map(lambda leaf: (0.5 * rng.normal(size=leaf.shape)).astype(np.float32), shapes)


PARAMS = random_params()


def prompt_of(b):
    return PROMPTS[b // 2]


def plain_logps(params):
    """What each response token is drawn from and its own log-prob, [B, N_MAX, V] and [B, N_MAX]: one sequence a row."""
    length = max(map(len, PROMPTS)) + N_MAX
    rows = [[*prompt_of(b), *RESPONSES[b]] for b in range(B)]
    token_BT = np.array([row + [0] * (length - len(row)) for row in rows])
    segment_BT = np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    position_BT = np.tile(np.arange(length), (B, 1))
    attend_fn = make_packed_attention(jnp.asarray(segment_BT))
    x_BTD = transformer.forward(MODEL, params, token_BT, position_BT, attend_fn)
    head_DV = transformer.head_matrix(MODEL, params)
    logits_BTV = transformer.logits_from_hidden(MODEL, params["final_norm"], head_DV, x_BTD) / TEMPERATURE
    logps_BTV = logits_BTV - jnp.log(jnp.exp(logits_BTV).sum(-1, keepdims=True))
    row_B1 = np.arange(B)[:, None]
    at_BN = np.array([[len(prompt_of(b))] for b in range(B)]) + np.arange(N_MAX)[None, :]
    logps_BNV = logps_BTV[row_B1, at_BN - 1]
    logp_BN = logps_BNV[row_B1, np.arange(N_MAX)[None, :], token_BT[row_B1, at_BN]]
    return logps_BNV, jnp.where(IS_ACTION_BN, logp_BN, 0.0)


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


def by_response(flat):
    """Values of all action tokens, one after the other, as [B, N_MAX]."""
    table = np.zeros((B, N_MAX), np.float32)
    table[IS_ACTION_BN] = flat
    return table


@pytest.fixture(scope="module")
def data():
    """Numbers of every action token, [B, N_MAX] each; old, sampler and reference a little off the policy."""
    rng, logp_BN = np.random.default_rng(1), np.asarray(jax.jit(plain_logps)(PARAMS)[1])

    def near(spread):
        return by_response(logp_BN[IS_ACTION_BN] + spread * rng.normal(size=TOKENS))

    return {
        "weight": by_response(rng.uniform(0.02, 0.08, TOKENS)), "adv": by_response(rng.normal(size=TOKENS)),
        "sampler": near(0.1), "old": near(0.3), "ref": near(0.5),
    }


def make_batch(data, shape=SHAPE, chosen=range(B), one_a_row=False):
    """The chosen sequences, packed; old and reference log-probs go the way that the sampler's take."""
    def packed(name):
        sequences = [
            TrainSequence(prompt_of(b), RESPONSES[b], *(data[key][b, : LENGTHS[b]] for key in ("weight", "adv", name)))
            for b in chosen
        ]
        if not one_a_row:
            return pack(sequences, shape, max_sequences=B, max_prompts=3)
        parts = [pack([sequence], shape, 1) for sequence in sequences]
        whole = jax.tree.map(lambda *leaves: np.concatenate(leaves) if leaves[0].ndim else sum(leaves), *parts)
        return whole.replace(num_micro=np.int32(whole.num_micro))

    old, ref = packed("old").sampler_logp_NZRT, packed("ref").sampler_logp_NZRT
    return packed("sampler").replace(old_logp_NZRT=old, ref_logp_NZRT=ref)


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


@functools.cache
def score_fn(chunk=CHUNK):
    return make_score(MODEL, TEMPERATURE, chunk)


@pytest.fixture(scope="module")
def expected(data):
    (loss, seen), grads = plain_fn(PARAMS, data, LOSS)
    assert 0 < seen["is_clipped"].sum() < TOKENS
    return float(loss), grads, seen


def in_order(batch, values_NZRT):
    """Values of the action tokens in the order of the sequences, whatever the packing. Told apart by `adv`, which
    the caller has set to the number of the token."""
    mask = batch.is_action_NZRT
    return np.asarray(values_NZRT)[mask][np.argsort(batch.adv_NZRT[mask])]


@pytest.mark.parametrize("chunk", [0, 5, 7, 100])
def test_scores_equal_a_plain_log_softmax(data, expected, chunk):
    batch = make_batch(data | {"adv": by_response(np.arange(TOKENS))})
    assert batch.segment_NZRT.max() > 1 and batch.token_NZRT.shape == (3, 1, 2, 14) and batch.num_micro == 2
    logps = np.asarray(score_fn(chunk)(PARAMS, batch))
    np.testing.assert_allclose(in_order(batch, logps), expected[2]["logp"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(logps[2], 0.0)  # a micro-batch not in use
    np.testing.assert_array_equal(logps[..., 0], 0.0)


def test_entropies_equal_a_plain_sum(data, expected):
    batch = make_batch(data | {"adv": by_response(np.arange(TOKENS))})

    @jax.jit
    def entropy_BT(params, batch, index):
        return token_logps(MODEL, params, micro_batch(batch, index), TEMPERATURE, chunk=5)[1]

    entropy_NZRT = np.stack([entropy_BT(PARAMS, batch, np.int32(n)) for n in range(3)])[:, None]
    np.testing.assert_allclose(in_order(batch, entropy_NZRT), expected[2]["entropy"], rtol=1e-5, atol=1e-5)


LAYOUTS = {  # name: (shape, one sequence a row, tokens scored at a time)
    "packed": (SHAPE, False, CHUNK),
    "one_sequence_a_row": (PackShape(row_length=12, rows=1), True, 0),
    "one_micro_batch": (PackShape(row_length=24, rows=3), False, 5),
    "a_shared_prompt": (PackShape(8, rows=2, prompts=1, prompt_buckets=(6,)), False, 0),
    "two_shared_prompts": (PackShape(13, rows=3, prompts=2, prompt_buckets=(2, 7)), False, 6),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_packing_and_micro_batches_change_neither_loss_nor_gradient(data, expected, name):
    shape, one_a_row, chunk = LAYOUTS[name]
    batch = make_batch(data, shape, one_a_row=one_a_row)
    micros = {"packed": 2, "one_sequence_a_row": 6, "one_micro_batch": 1, "a_shared_prompt": 3, "two_shared_prompts": 2}
    assert batch.num_micro == micros[name]
    loss, grads, _ = run_update(LOSS, batch, chunk=chunk)
    assert loss == pytest.approx(expected[0], rel=1e-5, abs=1e-5)
    assert_same_gradient(grads, expected[1])


def test_metrics_are_means_over_action_tokens(data, expected):
    _, grads, metrics = run_update(LOSS, make_batch(data))
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


def tiny_role():
    config = default_config().generator
    model = dataclasses.asdict(MODEL)
    for name in config.model:
        config.model[name] = model[name]
    config.max_prompt, config.max_response, config.row_buckets = 8, 6, (6,)
    config.temperature, config.rows_per_micro_batch, config.prompts_per_micro_batch = TEMPERATURE, 2, 2
    return config


def test_pack_shape_of_a_role():
    config = tiny_role()
    config.prompt_buckets = (4,)
    assert pack_shape(config) == PackShape(row_length=7, rows=2, prompts=2, prompt_buckets=(4, 8))
    config.share_prompts = False
    assert pack_shape(config) == PackShape(row_length=14, rows=2)
    config.pack_length = 40
    assert pack_shape(config) == PackShape(row_length=40, rows=2)


def test_a_policy_gets_old_and_reference_log_probs_before_its_first_update(data):
    """Two minibatches, two epochs: four updates on two batches that were scored once, before any of them."""
    config = tiny_role()
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

    def record(state, batch):
        calls.append((state, batch))
        return types.SimpleNamespace(params=random_params(8)), {"loss": np.float32(len(calls)), **seen[len(calls) - 1]}

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
    state = types.SimpleNamespace(params=PARAMS)
    policy = dataclasses.replace(policy, update=record)
    context = RunContext(None, None, {"generator": policy}, {"generator": reference}, PhaseTimer())
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
    assert calls[0][0] is state and calls[1][0] is not state
    assert calls[2][1] is first and calls[3][1] is second
    assert [int(batch.is_action_NZRT.sum()) for batch in (first, second)] == [4 + 2 + 3 + 5, 0 + 1 + 4 + 2]
    for batch in (first, second):
        mask = batch.is_action_NZRT
        np.testing.assert_allclose(batch.weight_NZRT[mask], 1 / mask.sum(), rtol=1e-6)  # token_mean of each
        np.testing.assert_allclose(batch.old_logp_NZRT, policy.score(PARAMS, batch), atol=1e-6)
        np.testing.assert_allclose(batch.ref_logp_NZRT, policy.score(reference, batch), atol=1e-6)
        assert np.abs(batch.old_logp_NZRT - batch.ref_logp_NZRT)[mask].max() > 0.1


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
    assert alarms.check([row], default_config().alarms) == []


def test_assign_rows_first_fit_decreasing():
    # By length 6, 5, 4, 3, 2 into rows of 8: 6 opens a row, 5 the next, 4 the third, 3 fits beside 5, 2 beside 6.
    assert assign_rows([5, 3, 4, 2, 6], 8) == [[4, 3], [0, 1], [2]]
    assert assign_rows([2, 2, 2], 4) == [[0, 1], [2]]  # ties keep their order
    assert [len(row) for row in assign_rows([1] * 70, 100)] == [MAX_SEGMENTS, MAX_SEGMENTS, 70 - 2 * MAX_SEGMENTS]
    with pytest.raises(AssertionError, match="9 tokens does not fit a row of 8"):
        assign_rows([3, 9], 8)


def test_assign_rows_properties():
    rng = np.random.default_rng(0)
    for _ in range(100):
        row_length = int(rng.integers(1, 60))
        lengths = rng.integers(1, row_length + 1, rng.integers(1, 120)).tolist()
        rows = assign_rows(lengths, row_length)
        assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
        used = [sum(lengths[index] for index in row) for row in rows]
        assert max(used) <= row_length and max(map(len, rows)) <= MAX_SEGMENTS
        # A sequence opens a row only where it fits no earlier one: two rows half empty cannot both be there.
        half_empty = [2 * n <= row_length and len(row) < MAX_SEGMENTS for n, row in zip(used, rows, strict=True)]
        assert sum(half_empty) < 2


def test_pack_by_hand():
    sequences = [
        TrainSequence([7, 8], np.array([9], np.int32), np.array([0.5], np.float32), 2.0, np.array([-1.0], np.float32)),
        TrainSequence([7, 8], np.array([5, 6], np.int32), np.array([0.25, 0], np.float32), np.array([3, 4.0]), -2.0),
    ]
    batch = pack(sequences, PackShape(row_length=8, rows=1), max_sequences=2)
    assert batch.num_micro == 1 and batch.prefix_token_NZQX.shape == (2, 1, 0, 0)
    rows = {
        "token": [7, 8, 5, 6, 7, 8, 9, 0], "position": [0, 1, 2, 3, 0, 1, 2, 0], "segment": [1, 1, 1, 1, 2, 2, 2, 0],
        "is_action": [0, 0, 1, 0, 0, 0, 1, 0],  # a token of weight 0 is left out
        "weight": [0, 0, 0.25, 0, 0, 0, 0.5, 0], "adv": [0, 0, 3, 4, 0, 0, 2, 0],
        "sampler_logp": [0, 0, -2, -2, 0, 0, -1, 0], "old_logp": [0] * 8, "ref_logp": [0] * 8,
    }
    for name, row in rows.items():
        np.testing.assert_array_equal(getattr(batch, f"{name}_NZRT"), [[[row]], [[[0] * 8]]], err_msg=name)

    shared = pack(sequences, PackShape(row_length=6, rows=1, prompts=1, prompt_buckets=(3,)), 2, 1)
    np.testing.assert_array_equal(shared.prefix_token_NZQX[0, 0], [[7, 0, 0]])
    np.testing.assert_array_equal(shared.prefix_length_NZQ[0, 0], [1])
    # The last prompt token stays, at its own position.
    rows = {
        "token": [8, 5, 6, 8, 9, 0], "position": [1, 2, 3, 1, 2, 0], "segment": [1, 1, 1, 2, 2, 0],
        "is_action": [0, 1, 0, 0, 1, 0],
    }
    for name, row in rows.items():
        np.testing.assert_array_equal(getattr(shared, f"{name}_NZRT")[0, 0], [row], err_msg=name)


def test_every_batch_fits_the_shape_that_its_maxima_give():
    """Random groups of shared prompts: same array shapes always, every response once, beside its own prompt."""
    rng = np.random.default_rng(0)
    for rows, prompts, shards in ((1, 1, 1), (2, 1, 1), (3, 2, 1), (2, 4, 1), (2, 1, 3), (1, 2, 8)):
        shape, shapes = PackShape(10, rows, prompts, (5,)), set()
        for _ in range(40):
            owner = np.sort(rng.permutation(np.repeat(np.arange(1, 7), 2)))
            sequences = [
                TrainSequence([p] * p, rng.integers(1, 9, n).astype(np.int32), np.ones(n, np.float32), b + 1.0)
                for b, (p, n) in enumerate(zip(owner.tolist(), rng.integers(1, 10, 12).tolist(), strict=True))
            ]
            batch = pack(sequences, shape, max_sequences=12, max_prompts=6, num_shards=shards)
            shapes.add(tuple(leaf.shape for leaf in jax.tree.leaves(batch)))
            assert not batch.is_action_NZRT[batch.num_micro :].any()
            for b, sequence in enumerate(sequences):
                n, z, r, where = (index for index in np.nonzero(batch.adv_NZRT == b + 1))
                assert len(set(n)) == len(set(z)) == len(set(r)) == 1
                np.testing.assert_array_equal(batch.token_NZRT[n, z, r, where], sequence.response)
                q = batch.prefix_of_NZR[n[0], z[0], r[0]]
                length = batch.prefix_length_NZQ[n[0], z[0], q]
                last = batch.token_NZRT[n[0], z[0], r[0], where[0] - 1]
                prefix = [*batch.prefix_token_NZQX[n[0], z[0], q, :length], last]
                assert prefix == sequence.prompt
        assert len(shapes) == 1


def optimizer_settings(**changes):
    config = optimizer_config(lr=0.1)
    for name, value in changes.items():
        config[name] = value
    return config


@pytest.mark.parametrize(
    "changes, rates",
    [
        ({}, {0: 0.1, 1000: 0.1}),
        ({"warmup_steps": 4}, {0: 0.0, 1: 0.025, 2: 0.05, 4: 0.1, 1000: 0.1}),
        ({"schedule": "cosine", "decay_steps": 8}, {0: 0.1, 2: 0.05 * (1 + 2**-0.5), 4: 0.05, 8: 0.0}),
        # Half a cosine from step 2 to step 10: at 4 it is at cos(pi / 4), at 6 half way, at 10 zero.
        ({"schedule": "cosine", "warmup_steps": 2, "decay_steps": 10},
         {0: 0.0, 1: 0.05, 2: 0.1, 4: 0.05 * (1 + 2**-0.5), 6: 0.05, 10: 0.0, 1000: 0.0}),
    ],
)  # fmt: skip
def test_learning_rates(changes, rates):
    schedule = learning_rate(optimizer_settings(**changes))
    for step, rate in rates.items():
        assert float(schedule(step)) == pytest.approx(rate, abs=1e-7), step


def test_clipping_and_decoupled_weight_decay():
    optimizer = make_optimizer(optimizer_settings(eps=1.0, weight_decay=0.5, clip_norm=1.0))
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
