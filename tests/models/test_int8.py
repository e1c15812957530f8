"""Int8 for sampling: rounding by hand, its bound, and products against those of the numbers that int8 stands for."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.tiny_sampler import MODEL, random_params
from tango_jax.cli.command_line import load_config
from tango_jax.cli.validation import validate
from tango_jax.models import cache as kv
from tango_jax.models import decode_layers, transformer
from tango_jax.models.int8 import Quantized, quantize
from tango_jax.planning import costs
from tango_jax.sampling import decode
from tango_jax.sampling.decode import empty_state
from tango_jax.sampling.logits import sampling_params
from tango_jax.weights.workdir import start_source

INT8 = dataclasses.replace(MODEL, sample_cache_dtype="int8", sample_weight_dtype="int8")


def test_rounding_by_hand():
    x = jnp.array([[127.0, -64.0, 1.4], [254.0, -3.0, -5.1], [0.0, 0.0, 0.0], [-0.25, 0.125, 0.0]], jnp.bfloat16)
    value, scale = quantize(x, 1)
    assert (value.dtype, scale.dtype) == (jnp.int8, jnp.float32)
    np.testing.assert_allclose(scale, [1.0, 2.0, 0.0, 0.25 / 127], rtol=1e-6)
    np.testing.assert_array_equal(value[:3], [[127, -64, 1], [127, -2, -3], [0, 0, 0]])
    assert value[3].tolist() in ([-127, 63, 0], [-127, 64, 0])  # 63.5, but for the last bit of the scale


@pytest.mark.parametrize("axes", [0, -1, (0, 1)])
def test_no_number_is_off_by_more_than_half_a_step(axes):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(5, 6, 7)) * 10.0 ** rng.integers(-30, 30, size=(5, 6, 7))).astype(np.float32)
    value, scale = jax.jit(quantize, static_argnums=1)(x, axes)
    wide = np.expand_dims(np.asarray(scale, np.float64), axes)
    np.testing.assert_allclose(wide, np.abs(x).max(axis=axes, keepdims=True) / 127.0, rtol=1e-6)
    assert (np.abs(np.asarray(value, np.float64) * wide - x) <= 0.5001 * wide).all()
    assert np.abs(value).max() == 127


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(number):
    value, scale = quantize(jnp.array([1.0, number]), 0)
    assert not np.isfinite(value * scale).all()


def wide(cached, axis):
    return cached.value.astype(jnp.float32) * jnp.expand_dims(cached.scale, axis)


def test_attention_is_that_of_the_numbers_in_the_cache():
    rng = np.random.default_rng(1)
    P, M, H, K, E, S, X = 2, 3, 4, 2, 8, 5, 4

    def some(*shape):
        return jnp.asarray(rng.normal(size=shape) * rng.uniform(0.1, 3, size=(shape[0], 1, 1, 1)), jnp.float32)

    prefix = [Quantized(*quantize(some(P, K, *size), axis)) for size, axis in (((E, S), -2), ((S, E), -1))]
    suffix = [Quantized(*quantize(some(P * M, K, *size), axis)) for size, axis in (((E, X), -2), ((X, E), -1))]
    q, k, v = some(P * M, 1, H, E), some(P * M, 1, K, E), some(P * M, 1, K, E)
    mask_PX = jnp.arange(S)[None] < jnp.array([[S], [2]])
    is_own_BS = jnp.arange(X)[None] <= jnp.array([[2], [2], [2], [2], [2], [2]])
    attend_fn = kv.make_decode_attention(*prefix, mask_PX, *suffix, jnp.int32(2), is_own_BS)
    out, (new_k, new_v) = attend_fn(q, k, v)

    k_rounded, v_rounded = (wide(Quantized(*quantize(x, -1)), -1) for x in (k, v))
    plain_fn = kv.make_decode_attention(
        *(wide(x, axis) for x, axis in zip(prefix, (-2, -1), strict=True)), mask_PX,
        *(wide(x, axis) for x, axis in zip(suffix, (-2, -1), strict=True)), jnp.int32(2), is_own_BS,
    )
    expected, (expected_k, expected_v) = plain_fn(q, k_rounded, v_rounded)
    np.testing.assert_allclose(wide(new_k, -2), expected_k, rtol=1e-6)
    np.testing.assert_allclose(wide(new_v, -1), expected_v, rtol=1e-6)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    exact, _ = plain_fn(q, k, v)
    assert 1e-5 < np.abs(out - exact).max() < 0.1 * np.abs(exact).max()  # the new key and value alone are rounded


@pytest.mark.long
@pytest.mark.parametrize("join", [True, False])
def test_layers_are_those_of_the_matrices_that_int8_stands_for(join):
    params = random_params()
    int8, plain = (decode_layers.split_layers(model, join, params) for model in (INT8, MODEL))
    rebuilt = []
    for layer, original in zip(int8["layers"], plain["layers"], strict=True):
        names = {name.removesuffix("_scale") for name in layer if name.endswith("_scale")}
        assert names == ({"qkv", "gate_up"} if join else {"q", "k", "v", "gate", "up"}) | {"o", "down"}
        rebuilt.append(dict(original))
        for name in names:
            assert layer[name].dtype == jnp.int8 and layer[name].shape == original[name].shape
            scale, inputs = layer[f"{name}_scale"], 2 if name == "o" else 1
            assert scale.shape == original[name].shape[inputs:]
            scale = scale.reshape(*[1] * inputs, *scale.shape)
            rebuilt[-1][name] = layer[name] * scale
            error = jnp.abs(rebuilt[-1][name] - original[name])
            assert (error <= 0.5001 * scale).all() and error.max() > 0.3 * scale.min()
    x_BTD = jnp.asarray(np.random.default_rng(2).normal(size=(2, 5, MODEL.width)), jnp.float32)
    rope = transformer.rope_tables(MODEL, jnp.broadcast_to(jnp.arange(5), (2, 5)))
    attend_fns = [kv.make_prefill_attention()] * MODEL.num_layers

    def run(layers):
        return decode_layers.apply_split_layers(MODEL, tuple(layers), x_BTD, rope, attend_fns)[0]

    np.testing.assert_allclose(run(int8["layers"]), run(rebuilt), rtol=1e-4, atol=1e-4)
    assert all((int8[name] == plain[name]).all() for name in ("embed", "head_DV", "final_norm"))


def loop_of(model):
    """The line of the compiled program in which the decode loop of eight rows begins."""
    weights = jax.eval_shape(lambda: decode_layers.split_layers(model, True, random_params()))
    state = jax.eval_shape(lambda: empty_state(model, 16, 8, 8, 12))
    decode_fn = jax.jit(lambda *arguments: decode.decode(model, (1,), *arguments), donate_argnums=1)
    text = decode_fn.lower(weights, state, sampling_params(1.0), np.int32(0)).compile().as_text()
    return max((line for line in text.splitlines() if " while(" in line), key=len)


def test_no_wide_copy_is_carried_through_the_loop():
    """Neither of a weight nor of the prompts' cache: XLA would convert what a loop does not change before it."""
    loop = loop_of(INT8)
    carried = re.findall(r"\b(\w+)\[([\d,]+)\]", loop.split(" while(")[0])
    types = {kind: {shape for other, shape in carried if other == kind} for kind, _ in carried}
    small = {"16,32", "16,48", "24,16", "8,2,4,8", "8,2,8,4"}  # qkv, gate_up, down, and a layer's prompts
    assert types["s8"] >= small
    assert not types["f32"] & small
    plain = loop_of(MODEL)
    assert "s8[" not in plain and all(f"f32[{shape}]" in plain for shape in small)


def test_memory_as_it_is_planned():
    for model in (INT8, dataclasses.replace(INT8, compute_dtype="bfloat16"), MODEL):
        state = jax.eval_shape(lambda model=model: empty_state(model, 16, 8, 8, 12))
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state.prefix.k, state.prefix.v)))
        assert held == 8 * 8 * costs.cached_token_bytes(model, tensor=1)
        weights = jax.eval_shape(lambda model=model: decode_layers.split_layers(model, True, random_params()))
        leaves = jax.tree_util.tree_flatten_with_path((weights["layers"], weights["head_DV"]))[0]
        held = sum(leaf.size * leaf.dtype.itemsize for path, leaf in leaves if "norm" not in jax.tree_util.keystr(path))
        assert held == costs.sampling_weight_bytes(model, tensor=1)
    # By hand: 2 layers, keys and values, 2 heads of 4 bytes and a scale. A trainer's weights are what they were.
    assert costs.cached_token_bytes(INT8, tensor=1) == 2 * 2 * 2 * (4 + 4)
    assert costs.cached_token_bytes(INT8, tensor=2) == 2 * 2 * (4 + 4)
    assert costs.weight_bytes(INT8, tensor=1) == costs.weight_bytes(MODEL, tensor=1)


@pytest.mark.parametrize("overrides, message", [
    (["verifier.model.sample_cache_dtype=int4"],
     r"verifier\.model\.sample_cache_dtype='int4' is not one of \(empty\), int8"),
    (["generator.model.sample_weight_dtype=int8"],
     r"generator\.model\.sample_weight_dtype=int8 makes .* generator\.loss\.importance_cap=0 .*: set it to 2, or"),
    (["generator.model.sample_cache_dtype=int8", "verifier.loss.importance_cap=2.0"],
     r"generator\.loss\.importance_cap=0 does not correct for this"),
])
def test_settings_that_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        validate(load_config("configs/tiny.py", overrides))


def test_settings_that_reach_the_model():
    names = ("sample_cache_dtype", "sample_weight_dtype")
    config = load_config(
        "configs/tiny.py", [*(f"verifier.model.{name}=int8" for name in names), "verifier.loss.importance_cap=2.0"]
    )
    validate(config)
    for role, dtype in (("generator", ""), ("verifier", "int8")):
        model = start_source(config, role).model_config
        assert [getattr(model, name) for name in names] == [dtype, dtype]
