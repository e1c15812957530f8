"""Adapters: against the merged model, in the trainer and in the sampler, and what an update leaves as it was."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from support import tiny_sampler, update_cases
from tango_jax.models import decode_layers, lora, transformer
from tango_jax.models.attention import make_packed_attention
from tango_jax.models.lora import LoraConfig
from tango_jax.records import with_base
from tango_jax.rl.score import make_score
from tango_jax.rl.update import LossConfig, init_state, make_policy_loss, make_update
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.request import SampleRequest
from tango_jax.sampling.sampler import make_sampler

RANK = 3
TARGETS = {"all": (), "q_and_v": ("q", "v"), "mlp": ("up", "down"), "o": ("o",)}


def with_lora(model, targets=(), base_dtype=""):
    return dataclasses.replace(model, lora=LoraConfig(RANK, 6.0, targets, base_dtype))


def random_weights(model, params):
    """The base in place, and adapters of which neither A nor B is zero."""
    rng, adapters = np.random.default_rng(2), lora.init_adapters(model, jax.random.key(0))
    adapters = jax.tree.map(lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype(np.float32), adapters)
    return with_base(lora.freeze(model, jax.tree.map(jnp.asarray, params)), adapters)


def logits(model, weights):
    token_BT = np.random.default_rng(3).integers(0, model.vocab_size, (2, 9))
    position_BT, segment_BT = np.tile(np.arange(9), (2, 1)), np.ones((2, 9), int)
    attend_fn = make_packed_attention(jnp.asarray(segment_BT))
    x_BTD = transformer.forward(model, weights, token_BT, position_BT, attend_fn)
    return transformer.logits_from_hidden(model, weights["final_norm"], transformer.head_matrix(model, weights), x_BTD)


def test_sizes_by_hand():
    model = with_lora(tiny_sampler.MODEL)
    adapters = lora.init_adapters(model, jax.random.key(0))["layers"]
    L, D, F, H, K, E = 2, 16, 24, 4, 2, 4
    assert adapters["q_lora_a"].shape == (L, D, RANK) and adapters["q_lora_b"].shape == (L, RANK, H, E)
    assert adapters["v_lora_b"].shape == (L, RANK, K, E)
    assert adapters["o_lora_a"].shape == (L, H, E, RANK) and adapters["o_lora_b"].shape == (L, RANK, D)
    assert adapters["down_lora_a"].shape == (L, F, RANK) and adapters["down_lora_b"].shape == (L, RANK, D)
    assert len(adapters) == 14
    only = lora.init_adapters(with_lora(tiny_sampler.MODEL, ("gate",)), jax.random.key(0))["layers"]
    assert only.keys() == {"gate_lora_a", "gate_lora_b"}


def test_a_fresh_adapter_changes_nothing():
    model, params = with_lora(tiny_sampler.MODEL), tiny_sampler.random_params()
    weights = with_base(lora.freeze(model, params), lora.init_adapters(model, jax.random.key(0)))
    np.testing.assert_array_equal(logits(model, weights), logits(tiny_sampler.MODEL, params))
    spread = float(weights["layers"]["down_lora_a"].std())
    assert spread == pytest.approx((3 * tiny_sampler.MODEL.mlp_width) ** -0.5, rel=0.2)


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_the_merged_model_computes_the_same(targets):
    model = with_lora(tiny_sampler.MODEL, targets)
    weights = random_weights(model, tiny_sampler.random_params())
    merged = lora.merge(model, weights)
    np.testing.assert_allclose(logits(model, weights), logits(tiny_sampler.MODEL, merged), rtol=1e-4, atol=1e-4)
    base = lora.split(weights)[1]
    assert np.abs(logits(model, weights) - logits(tiny_sampler.MODEL, base)).max() > 0.1


def test_merging_by_hand():
    """Of one matrix: W + (alpha / r) A B, here with alpha / r = 2."""
    model = with_lora(tiny_sampler.MODEL)
    weights = random_weights(model, tiny_sampler.random_params())
    layers, merged = weights["layers"], lora.merge(model, weights)["layers"]["o"]
    for layer in range(2):
        wide, narrow = layers["o_lora_a"][layer].reshape(16, 3), layers["o_lora_b"][layer]
        expected = layers["o"][layer].reshape(16, 16) + 2 * wide @ narrow
        np.testing.assert_allclose(merged[layer].reshape(16, 16), expected, rtol=1e-5, atol=1e-6)


def test_an_int8_base_is_the_model_of_its_rounded_matrices():
    model = with_lora(tiny_sampler.MODEL, base_dtype="int8")
    weights = random_weights(model, tiny_sampler.random_params())
    assert weights["layers"]["q"].dtype == jnp.int8 and weights["layers"]["o_scale"].shape == (2, 16)
    merged = lora.merge(model, weights)
    np.testing.assert_allclose(logits(model, weights), logits(tiny_sampler.MODEL, merged), rtol=1e-4, atol=1e-4)
    exact = logits(with_lora(tiny_sampler.MODEL), random_weights(with_lora(tiny_sampler.MODEL),
                                                                 tiny_sampler.random_params()))
    assert 1e-3 < np.abs(logits(model, weights) - exact).max() < 1


# ------------------------------------------------------------------------------------------------------- the sampler


def sampled(model, weights):
    config = SamplerConfig(prompt_buckets=(8,), cache_buckets=(8,), row_buckets=(6,))
    sampler = make_sampler(model, config, tiny_sampler.STOP_IDS)
    request = SampleRequest(prompts=[[20, 21, 22], [30, 31]], group_size=3, temperature=1.0,
                            key_data=np.array([1, 2], np.uint32))
    return sampler.sample(sampler.layout(weights), request)


@pytest.mark.long
@pytest.mark.parametrize("base_dtype", ["", "bfloat16", "int8"])
@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_sampler_and_trainer_agree_on_log_probs(targets, base_dtype):
    model = with_lora(tiny_sampler.MODEL, targets, base_dtype)
    weights = random_weights(model, tiny_sampler.random_params())
    rollout = sampled(model, weights)
    for b, (tokens, logps) in enumerate(zip(rollout.tokens, rollout.logps, strict=True)):
        row = np.array([[[20, 21, 22], [30, 31]][b // 3] + tokens.tolist()])
        size = row.shape[1]
        attend_fn = make_packed_attention(jnp.ones((1, size), jnp.int32))
        x_BTD = transformer.forward(model, weights, row, np.arange(size)[None], attend_fn)
        logits_TV = transformer.logits_from_hidden(
            model, weights["final_norm"], transformer.head_matrix(model, weights), x_BTD
        )[0]
        start = size - len(tokens)
        expected = jax.nn.log_softmax(logits_TV)[np.arange(start - 1, size - 1), tokens]
        np.testing.assert_allclose(logps, expected, rtol=1e-4, atol=1e-4)


def test_the_next_sample_follows_a_changed_adapter():
    model = with_lora(tiny_sampler.MODEL)
    weights = random_weights(model, tiny_sampler.random_params())
    adapters, base = lora.split(weights)
    changed = with_base(base, jax.tree.map(lambda leaf: 1.5 * leaf, adapters))
    before, after = (np.concatenate(sampled(model, now).logps) for now in (weights, changed))
    assert len(before) != len(after) or np.abs(before - after).max() > 1e-3


def test_adapters_of_joined_matrices_are_blocks():
    model = with_lora(tiny_sampler.MODEL, ("q", "v"), "bfloat16")
    weights = random_weights(model, tiny_sampler.random_params())
    layer = decode_layers.split_layers(model, True, weights)["layers"][1]
    assert layer["qkv_lora_a"].shape == (16, 2 * RANK) and layer["qkv_lora_b"].shape == (2 * RANK, 16 + 8 + 8)
    q_part, k_part, v_part = np.split(layer["qkv_lora_b"], [16, 24], axis=1)
    np.testing.assert_array_equal(q_part[:RANK], weights["layers"]["q_lora_b"][1].reshape(RANK, 16))
    np.testing.assert_array_equal(v_part[RANK:], weights["layers"]["v_lora_b"][1].reshape(RANK, 8))
    assert not q_part[RANK:].any() and not k_part.any() and not v_part[:RANK].any()


def test_the_sampler_has_adapters_merged_where_nothing_is_rounded_away():
    """In float32; with less precision a small adapter would be lost in the sum."""
    model = with_lora(tiny_sampler.MODEL)
    weights = random_weights(model, tiny_sampler.random_params())
    layer = decode_layers.split_layers(model, True, weights)["layers"][1]
    expected = decode_layers.split_layers(tiny_sampler.MODEL, True, lora.merge(model, weights))["layers"][1]
    jax.tree.map(np.testing.assert_array_equal, layer, expected)
    for other in (dataclasses.replace(model, compute_dtype="bfloat16"),
                  dataclasses.replace(model, sample_weight_dtype="int8"),
                  with_lora(tiny_sampler.MODEL, base_dtype="int8")):
        kept = decode_layers.split_layers(other, True, random_weights(other, tiny_sampler.random_params()))["layers"][1]
        assert "qkv_lora_a" in kept and "down_lora_b" in kept


# -------------------------------------------------------------------------------------------------------- the update

LOSS = LossConfig(
    temperature=update_cases.TEMPERATURE, clip_low=0.2, clip_high=0.2, ratio="token", kl_coef=0.0, kl_kind="k3",
    entropy_coef=0.0, importance_cap=0.0, has_old_logp=False, logp_chunk=0,
)


@pytest.mark.long
@pytest.mark.parametrize("base_dtype", ["", "int8"])
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_the_gradient_is_that_of_the_merged_model(remat, base_dtype):
    """Plain gradient descent with learning rate 1; the base stays what it was, and is not donated."""
    model = dataclasses.replace(with_lora(update_cases.MODEL, base_dtype=base_dtype), remat=remat)
    weights = random_weights(model, update_cases.PARAMS)
    adapters, base = lora.split(weights)
    batch = update_cases.make_batch(update_cases.make_data())
    loss_fn = make_policy_loss(update_cases.MODEL, LOSS)

    def merged_loss(adapters):
        params = lora.merge(model, with_base(base, adapters))
        micros = [jax.tree.map(lambda leaf, i=i: leaf[i] if np.ndim(leaf) else leaf, batch)
                  for i in range(int(batch.num_micro))]
        return sum(loss_fn(params, micro)[0] for micro in micros)

    expected = jax.tree.map(lambda leaf, grad: leaf - grad, adapters, jax.grad(merged_loss)(adapters))
    kept = jax.tree.map(np.array, base)
    optimizer = optax.sgd(1.0)
    update = make_update(optimizer, make_policy_loss(model, LOSS))
    state, metrics = update(init_state(optimizer, jax.tree.map(jnp.copy, adapters)), batch, base)
    assert state.params["layers"].keys() == adapters["layers"].keys() and metrics["grad_norm"] > 0
    for name, leaf in state.params["layers"].items():
        np.testing.assert_allclose(leaf, expected["layers"][name], rtol=1e-3, atol=1e-5, err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, base, kept)


def test_with_adapters_remat_keeps_as_much_of_a_layer_as_without():
    """One result of each matrix, and not x W beside x A B; parameters lie there in any case."""
    batch = update_cases.make_batch(update_cases.make_data())
    micro = jax.tree.map(lambda leaf: leaf[0] if np.ndim(leaf) else leaf, batch)

    def kept(model, trained, base):
        loss_fn = make_policy_loss(model, LOSS)
        made = jax.eval_shape(lambda: jax.vjp(lambda params: loss_fn(with_base(base, params), micro)[0], trained)[1])
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))

    plain = dataclasses.replace(update_cases.MODEL, remat="dots")
    model = with_lora(plain)
    adapters, base = lora.split(random_weights(model, update_cases.PARAMS))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(adapters))
    assert kept(model, adapters, base) <= kept(plain, update_cases.PARAMS, {}) + size


def test_scores_see_the_adapter():
    model = with_lora(update_cases.MODEL)
    weights = random_weights(model, update_cases.PARAMS)
    batch = update_cases.make_batch(update_cases.make_data())
    ours = make_score(model, 1.0, 0)(weights, batch)
    plain = make_score(update_cases.MODEL, 1.0, 0)
    np.testing.assert_allclose(ours, plain(lora.merge(model, weights), batch), rtol=1e-4, atol=1e-4)
    assert np.abs(ours - plain(lora.split(weights)[1], batch)).max() > 0.1


def test_a_rank_above_the_narrowest_matrix_is_refused():
    with pytest.raises(ValueError, match=r"lora\.rank=9 is above 8, the narrowest side of a matrix"):
        dataclasses.replace(tiny_sampler.MODEL, lora=LoraConfig(9, 32.0))
    assert dataclasses.replace(tiny_sampler.MODEL, lora=LoraConfig(9, 32.0, ("q", "gate"))).lora.rank == 9
