"""The decoder against a naive NumPy one, its causality, its numerics options and its configuration errors."""
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tango_jax.models import rotary, transformer
from tango_jax.models.attention import make_packed_attention
from tango_jax.models.rotary import RopeScaling
from tango_jax.models.transformer import ModelConfig

PLAIN = ModelConfig(
    vocab_size=23, width=12, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=6, mlp_width=20,
    rope_base=100.0, norm_eps=1e-3, remat="none",
)
# Wavelengths 2 pi, 29 and 135 tokens against 40: the first frequency is kept, the second blended, the third stretched.
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=40)
CONFIGS = {
    "plain": PLAIN,
    "grouped_queries": dataclasses.replace(PLAIN, num_kv_heads=2),
    "qkv_bias": dataclasses.replace(PLAIN, num_kv_heads=1, qkv_bias=True),
    "qk_norm": dataclasses.replace(PLAIN, num_kv_heads=2, qk_norm=True),
    "untied_head": dataclasses.replace(PLAIN, tied_head=False),
    "rope_scaling": dataclasses.replace(PLAIN, rope_scaling=SCALING),
}
EVERYTHING = dataclasses.replace(
    PLAIN, num_kv_heads=2, qkv_bias=True, qk_norm=True, tied_head=False, rope_scaling=SCALING
)
# Row 0 holds two sequences and padding, row 1 a single one.
SEGMENT_BT = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 0, 0], [1] * 10])
POSITION_BT = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 0, 0], range(10)])
TOKEN_BT = np.random.default_rng(0).integers(0, PLAIN.vocab_size, (2, 10))
SEQUENCES = ((0, 0, 5), (0, 5, 8), (1, 0, 10))  # row, first token, end


def random_params(config, seed=0):
    """Every leaf random, also those that start at zero or one and would hide a mistake."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: transformer.init_params(config, jax.random.key(0)))

    def leaf(path, shape):
        name = path[-1].key
        spread = {"norm": 0.3, "bias": 0.5, "embed": 0.8, "head": 0.4}
        scale = next((value for key, value in spread.items() if name.endswith(key)), config.width**-0.5)
        return (name.endswith("norm") + scale * rng.normal(size=shape.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def forward(config, params, token_BT=TOKEN_BT, position_BT=POSITION_BT, segment_BT=SEGMENT_BT):
    return transformer.forward(config, params, token_BT, position_BT, make_packed_attention(jnp.asarray(segment_BT)))


def logits(config, params):
    head_DV = transformer.head_matrix(config, params)
    return transformer.logits_from_hidden(config, params["final_norm"], head_DV, forward(config, params))


def naive_norm(x, scale, eps):
    return x / math.sqrt(np.mean(x * x) + eps) * scale


def naive_frequency(config, e):
    frequency = config.rope_base ** (-2 * e / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    # The three cases as Llama 3 states them.
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_max_position / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_max_position / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def naive_rotate(config, x, position):
    """Element e and element e + E/2 are the real and imaginary part of one number, turned by position * frequency."""
    half = config.head_dim // 2
    turned = [
        complex(x[e], x[e + half]) * np.exp(1j * position * naive_frequency(config, e)) for e in range(half)
    ]
    return np.array([z.real for z in turned] + [z.imag for z in turned])


def naive_logits(config, params, tokens):
    """One sequence, in float64, one token and one head at a time: [T, V]."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    stream = [params["embed"][token] for token in tokens]
    for layer in range(config.num_layers):
        p = {name: leaf[layer] for name, leaf in params["layers"].items()}
        keys, values, after = [], [], []
        for t, x in enumerate(stream):
            normed = naive_norm(x, p["attention_norm"], config.norm_eps)
            heads = {}
            for name, count in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
                heads[name] = [normed @ p[name][:, h] for h in range(count)]
                if config.qkv_bias:
                    heads[name] = [y + p[f"{name}_bias"][h] for h, y in enumerate(heads[name])]
                if config.qk_norm and name != "v":
                    heads[name] = [naive_norm(y, p[f"{name}_norm"], config.norm_eps) for y in heads[name]]
            keys.append([naive_rotate(config, k, t) for k in heads["k"]])
            values.append(heads["v"])
            out = np.zeros(config.width)
            for h in range(config.num_heads):
                shared = h * config.num_kv_heads // config.num_heads
                q = naive_rotate(config, heads["q"][h], t)
                scores = np.array([q @ keys[s][shared] for s in range(t + 1)]) / math.sqrt(config.head_dim)
                weights = np.exp(scores - scores.max())
                weights = weights / weights.sum()
                out += sum(weights[s] * values[s][shared] for s in range(t + 1)) @ p["o"][h]
            x = x + out
            normed = naive_norm(x, p["mlp_norm"], config.norm_eps)
            gate = normed @ p["gate"]
            after.append(x + (gate / (1 + np.exp(-gate)) * (normed @ p["up"])) @ p["down"])
        stream = after
    head = params["embed"].T if config.tied_head else params["head"]
    return np.array([naive_norm(x, params["final_norm"], config.norm_eps) @ head for x in stream])


@pytest.mark.parametrize("config", [*CONFIGS.values(), EVERYTHING], ids=[*CONFIGS, "everything"])
def test_forward_equals_a_naive_decoder(config):
    params = random_params(config)
    logits_BTV = jax.jit(logits, static_argnums=0)(config, params)
    for row, start, end in SEQUENCES:
        expected = naive_logits(config, params, TOKEN_BT[row, start:end])
        np.testing.assert_allclose(logits_BTV[row, start:end], expected, rtol=1e-4, atol=1e-4)


def test_no_hidden_state_depends_on_a_later_token_or_another_sequence():
    params = random_params(EVERYTHING)
    x_BTD = transformer.embed_tokens(EVERYTHING, params, TOKEN_BT)
    readout_D = np.random.default_rng(1).normal(size=EVERYTHING.width).astype(np.float32)

    def hidden_BT(x_BTD):
        rope = transformer.rope_tables(EVERYTHING, jnp.asarray(POSITION_BT))
        attend_fn = make_packed_attention(jnp.asarray(SEGMENT_BT))
        return transformer.apply_layers(EVERYTHING, params["layers"], x_BTD, rope, attend_fn) @ readout_D

    influence = np.abs(jax.jit(jax.jacrev(hidden_BT))(x_BTD)).max(-1)  # [B, T, B, T]: of the second pair on the first
    for row, other in ((0, 1), (1, 0)):
        assert not influence[row, :, other].any()
    for row in (0, 1):
        for t in range(10):
            for s in range(10):
                is_seen = s <= t and SEGMENT_BT[row, s] == SEGMENT_BT[row, t]
                assert (influence[row, t, row, s] > 0) == is_seen, (row, t, s)


def test_llama_3_scaling_of_single_frequencies():
    config = dataclasses.replace(
        PLAIN, head_dim=8, rope_base=10_000.0,
        rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=1000),
    )
    # Frequencies 1, 0.1, 0.01, 0.001; turns in 1000 tokens 159, 15.9, 1.59155, 0.159. Above 4 turns kept, below 1
    # divided by 8, between: (1.59155 - 1) / 3 = 0.197183 of 0.01 and 0.802817 of 0.00125.
    expected = [1.0, 0.1, 0.197183 * 0.01 + 0.802817 * 0.00125, 0.000125]
    np.testing.assert_allclose(rotary.rope_frequencies(config), expected, rtol=1e-5)
    unscaled = dataclasses.replace(config, rope_scaling=None)
    np.testing.assert_allclose(rotary.rope_frequencies(unscaled), [1.0, 0.1, 0.01, 0.001], rtol=1e-5)


def loss_fn(config, params):
    logits_BTV = logits(config, params)
    return jnp.sum(jnp.where(SEGMENT_BT[..., None] > 0, jnp.sin(logits_BTV), 0.0))


@pytest.fixture(scope="module")
def without_remat():
    params = random_params(EVERYTHING)
    return params, jax.jit(jax.value_and_grad(loss_fn, argnums=1), static_argnums=0)(EVERYTHING, params)


@pytest.mark.parametrize("remat, unroll", [("dots", False), ("full", True)])
def test_remat_and_unrolling_change_no_value_and_no_gradient(without_remat, remat, unroll):
    params, (value, grads) = without_remat
    config = dataclasses.replace(EVERYTHING, remat=remat, unroll=unroll)
    got_value, got_grads = jax.jit(jax.value_and_grad(loss_fn, argnums=1), static_argnums=0)(config, params)
    np.testing.assert_allclose(got_value, value, rtol=1e-5)
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(grads)) > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got_grads, grads)


def test_each_remat_mode_keeps_less_for_the_backward_pass():
    def kept(remat):
        config = dataclasses.replace(EVERYTHING, remat=remat)
        residuals = jax.eval_shape(lambda: jax.vjp(lambda params: loss_fn(config, params), random_params(config))[1])
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(residuals))

    assert kept("full") < kept("dots") < kept("none")


def test_bfloat16_compute_returns_float32_logits():
    params = random_params(EVERYTHING)
    config = dataclasses.replace(EVERYTHING, compute_dtype="bfloat16")
    assert jax.eval_shape(lambda: forward(config, params)).dtype == jnp.bfloat16
    assert jax.eval_shape(lambda: logits(config, params)).dtype == jnp.float32
    config = dataclasses.replace(config, head_dtype="bfloat16")
    logits_BTV = jax.jit(logits, static_argnums=0)(config, params)
    assert logits_BTV.dtype == jnp.float32
    for row, start, end in SEQUENCES:
        exact = naive_logits(EVERYTHING, params, TOKEN_BT[row, start:end])
        error = np.abs(logits_BTV[row, start:end] - exact)
        # bfloat16 keeps 8 bits: the error shows, and is small against the logits.
        assert 1e-4 < error.mean() < 0.05 * np.abs(exact).mean()


def test_init_params_has_the_documented_shapes_and_scales():
    config = dataclasses.replace(
        PLAIN, vocab_size=300, width=64, num_kv_heads=2, mlp_width=96, head_dim=16, tied_head=False, qkv_bias=True,
        qk_norm=True,
    )
    params = jax.jit(transformer.init_params, static_argnums=0)(config, jax.random.key(0))
    L, D, F, H, K, E = 2, 64, 96, 4, 2, 16
    # name: (shape, mean, standard deviation); matrices at 1 / sqrt(inputs), 1/8 for width 64 and for 4 x 16; where a
    # layer writes to the residual stream, over sqrt(2 layers) = 2
    expected = {
        "attention_norm": ((L, D), 1, 0), "mlp_norm": ((L, D), 1, 0),
        "q_norm": ((L, E), 1, 0), "k_norm": ((L, E), 1, 0),
        "q": ((L, D, H, E), 0, 1 / 8), "k": ((L, D, K, E), 0, 1 / 8), "v": ((L, D, K, E), 0, 1 / 8),
        "q_bias": ((L, H, E), 0, 0), "k_bias": ((L, K, E), 0, 0), "v_bias": ((L, K, E), 0, 0),
        "o": ((L, H, E, D), 0, 1 / 16), "gate": ((L, D, F), 0, 1 / 8), "up": ((L, D, F), 0, 1 / 8),
        "down": ((L, F, D), 0, 96**-0.5 / 2),
    }
    leaves = params["layers"] | {name: params[name] for name in ("embed", "final_norm", "head")}
    expected |= {"embed": ((300, D), 0, 1 / 8), "final_norm": ((D,), 1, 0), "head": ((D, 300), 0, 1 / 8)}
    assert set(leaves) == set(expected) and set(params) == {"embed", "layers", "final_norm", "head"}
    for name, (shape, mean, std) in expected.items():
        leaf = np.asarray(leaves[name])
        assert leaf.shape == shape and leaf.dtype == np.float32, name
        assert abs(leaf.mean() - mean) <= 0.1 * std and abs(leaf.std() - std) <= 0.1 * std, name
    assert not np.array_equal(params["layers"]["q"][0], params["layers"]["q"][1])


def test_a_tied_head_has_no_parameter_of_its_own():
    params = jax.eval_shape(lambda: transformer.init_params(PLAIN, jax.random.key(0)))
    assert set(params) == {"embed", "layers", "final_norm"}
    assert not {"q_bias", "q_norm"} & set(params["layers"])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_heads": 6, "num_kv_heads": 4}, "num_heads=6 must be a multiple of num_kv_heads=4"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"remat": "some"}, "remat='some' is not one of none, dots, full"),
    ],
)
def test_impossible_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAIN, **change)
