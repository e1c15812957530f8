"""GGUF files into parameters: against the plain arrays they were written from, for every type, and broken ones."""

import dataclasses
import math

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from support.gguf_files import file_arrays, model_metadata, plain_arrays, write_gguf, write_model
from tango_jax.models import rotary, transformer
from tango_jax.models.rotary import RopeScaling
from tango_jax.models.transformer import ModelConfig
from tango_jax.weights.from_gguf import load_gguf, model_config_from_gguf

CONFIG = ModelConfig(
    vocab_size=24, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=48, rope_base=5e4,
    norm_eps=1e-5, max_position=512,
)
VARIANTS = {
    "tied": ("llama", CONFIG),
    "wide heads": ("llama", dataclasses.replace(CONFIG, tied_head=False, head_dim=16, num_kv_heads=1)),
    "llama with bias": ("llama", dataclasses.replace(CONFIG, qkv_bias=True)),
    "qwen2": ("qwen2", dataclasses.replace(CONFIG, qkv_bias=True, tied_head=False)),
}


def expected_params(config: ModelConfig, plain: dict[str, np.ndarray]) -> dict:
    """The tree of `init_params` from PyTorch's arrays, leaf by leaf."""
    D, H, K, E = config.width, config.num_heads, config.num_kv_heads, config.head_dim

    def stack(name, *shape):
        return np.stack([plain[f"blk.{layer}.{name}"].T.reshape(shape) for layer in range(config.num_layers)])

    layers = {
        "attention_norm": stack("attn_norm.weight", D),
        "q": stack("attn_q.weight", D, H, E),
        "k": stack("attn_k.weight", D, K, E),
        "v": stack("attn_v.weight", D, K, E),
        "o": stack("attn_output.weight", H, E, D),
        "mlp_norm": stack("ffn_norm.weight", D),
        "gate": stack("ffn_gate.weight", D, config.mlp_width),
        "up": stack("ffn_up.weight", D, config.mlp_width),
        "down": stack("ffn_down.weight", config.mlp_width, D),
    }
    if config.qkv_bias:
        layers |= {
            "q_bias": stack("attn_q.bias", H, E), "k_bias": stack("attn_k.bias", K, E),
            "v_bias": stack("attn_v.bias", K, E),
        }
    params = {"embed": plain["token_embd.weight"], "layers": layers, "final_norm": plain["output_norm.weight"]}
    return params if config.tied_head else params | {"head": plain["output.weight"].T}


def assert_same(params, expected, **tolerance):
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, **tolerance), params, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_config_and_weights_come_back(tmp_path, variant):
    arch, config = VARIANTS[variant]
    plain = plain_arrays(config)
    write_model(tmp_path / "m.gguf", arch, config, plain)
    assert model_config_from_gguf(tmp_path / "m.gguf") == config
    params = load_gguf(tmp_path / "m.gguf", config)
    assert_same(params, expected_params(config, plain), rtol=0)
    fresh = jax.eval_shape(lambda key: transformer.init_params(config, key), jax.random.key(0))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), fresh
    )


def test_what_a_file_may_leave_out(tmp_path):
    metadata = model_metadata("llama", CONFIG)
    for name in ("attention.key_length", "attention.head_count_kv", "rope.freq_base", "context_length"):
        del metadata[f"llama.{name}"]
    config = dataclasses.replace(CONFIG, num_kv_heads=4, rope_base=10_000.0, max_position=32_768)
    write_gguf(tmp_path / "m.gguf", "llama", metadata, file_arrays("llama", config, plain_arrays(config)))
    assert model_config_from_gguf(tmp_path / "m.gguf") == config


def test_numerics_and_the_attention_window(tmp_path):
    metadata = model_metadata("llama", CONFIG) | {"llama.attention.sliding_window": 128}
    write_gguf(tmp_path / "m.gguf", "llama", metadata, file_arrays("llama", CONFIG, plain_arrays(CONFIG)))
    config = model_config_from_gguf(tmp_path / "m.gguf", param_dtype="bfloat16", remat="none")
    assert config == dataclasses.replace(CONFIG, param_dtype="bfloat16", remat="none", max_position=128)
    params = load_gguf(tmp_path / "m.gguf", config)
    expected = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), expected_params(CONFIG, plain_arrays(CONFIG)))
    assert_same(params, expected, rtol=0)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_attention_scores_are_those_of_interleaved_rotation(tmp_path):
    # llama.cpp rotates neighbouring pairs of the rows that the file has; here the halves of the rows that were loaded.
    plain = plain_arrays(CONFIG)
    stored = file_arrays("llama", CONFIG, plain)
    write_gguf(tmp_path / "m.gguf", "llama", model_metadata("llama", CONFIG), stored)
    layers = load_gguf(tmp_path / "m.gguf", CONFIG)["layers"]
    x_TD = np.random.default_rng(1).normal(size=(5, CONFIG.width)).astype(np.float32)
    angle_TE = np.arange(5)[:, None] * CONFIG.rope_base ** (-np.arange(4)[None] / 4)

    def interleaved(name):
        z_THE2 = (x_TD @ stored[f"blk.0.{name}"].T).reshape(5, -1, 4, 2)
        turn_TE = np.exp(1j * angle_TE)[:, None]
        z_THE = (z_THE2[..., 0] + 1j * z_THE2[..., 1]) * turn_TE
        return np.stack([z_THE.real, z_THE.imag], -1).reshape(5, -1, 8)

    (rope,) = transformer.rope_tables(CONFIG, jnp.arange(5)[None])
    q, k = (rotary.apply_rope(jnp.einsum("td,dhe->the", x_TD, layers[n][0])[None], rope)[0] for n in "qk")
    scores = np.einsum("the,she->hts", q[:, ::2], k)
    expected = np.einsum("the,she->hts", interleaved("attn_q.weight")[:, ::2], interleaved("attn_k.weight"))
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)


def test_leaves_take_their_shardings(tmp_path):
    mesh = jax.make_mesh((2, 4), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    plain = plain_arrays(CONFIG)
    write_model(tmp_path / "m.gguf", "llama", CONFIG, plain)

    def place(leaf):
        spec = PartitionSpec(None, "fsdp") if leaf.ndim > 1 else PartitionSpec("tp")
        return NamedSharding(mesh, spec)

    expected = expected_params(CONFIG, plain)
    shardings = jax.tree.map(place, expected)
    params = load_gguf(tmp_path / "m.gguf", CONFIG, shardings)
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == shardings
    assert_same(params, expected, rtol=0)
    jax.jit(lambda tree: jax.tree.map(lambda leaf: 2 * leaf, tree), donate_argnums=0)(params)  # may be donated
    assert_same(load_gguf(tmp_path / "m.gguf", CONFIG, shardings), expected, rtol=0)


# ---------------------------------------------------------------------------------------------------------- types

WIDE = dataclasses.replace(CONFIG, width=256, num_heads=4, num_kv_heads=4, head_dim=64, mlp_width=256, num_layers=1)
# Largest error of a value in steps of its block's range: half a step, and what the float16 scale loses.
STEPS = {"Q8_0": 254, "Q4_0": 16, "Q4_1": 15, "Q5_0": 32, "Q5_1": 31}


@pytest.mark.parametrize("kind", ["F16", "BF16", *STEPS])
def test_quantised_types_are_near_the_plain_arrays(tmp_path, kind):
    kind_id = gguf.GGMLQuantizationType[kind]
    plain = plain_arrays(WIDE)
    stored = {
        name: (gguf.quantize(w, kind_id), kind_id) if w.ndim == 2 else w
        for name, w in file_arrays("llama", WIDE, plain).items()
    }
    write_gguf(tmp_path / "m.gguf", "llama", model_metadata("llama", WIDE), stored)
    params, expected = load_gguf(tmp_path / "m.gguf", WIDE), expected_params(WIDE, plain)
    if kind in STEPS:
        largest = max(np.abs(w).max() for w in plain.values())
        assert_same(params, expected, rtol=0, atol=1.1 * 2 * largest / STEPS[kind])
        # Most blocks reach far less than the largest value, so most errors are much smaller than that.
        assert np.abs(params["layers"]["gate"] - expected["layers"]["gate"]).mean() < 2 * largest / STEPS[kind] / 4
    else:
        assert_same(params, expected, rtol=2.0**-11 if kind == "F16" else 2.0**-8, atol=1e-7)


def unpack_scales(block: bytes) -> list[tuple[int, int]]:
    """The eight 6-bit (scale, minimum) pairs in the 12 bytes of a Q4_K or Q5_K block."""
    pairs = [(block[j] & 63, block[j + 4] & 63) for j in range(4)]
    for j in range(4, 8):
        low, high_scale, high_min = block[j + 4], block[j - 4] >> 6, block[j] >> 6
        pairs.append(((low & 15) | (high_scale << 4), (low >> 4) | (high_min << 4)))
    return pairs


def decode_k45(block: bytes, bits: int) -> np.ndarray:
    """256 values of a Q4_K (bits=4) or Q5_K (bits=5) block: 8 groups of 32, each scale * code - minimum."""
    d, d_min = np.frombuffer(block[:4], np.float16).astype(np.float64)
    pairs, rest = unpack_scales(block[4:16]), block[16:]
    high, codes = (rest[:32], rest[32:]) if bits == 5 else (bytes(32), rest)
    out = []
    for group, (scale, minimum) in enumerate(pairs):
        for i in range(32):
            nibble = codes[32 * (group // 2) + i] >> (4 * (group % 2)) & 15
            code = nibble + 16 * (high[i] >> group & 1)
            out.append(d * scale * code - d_min * minimum)
    return np.array(out)


def decode_q6_k(block: bytes) -> np.ndarray:
    """256 values of a Q6_K block: two halves of four runs of 32; 6-bit codes around 32, a scale per 16 values."""
    low, high, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8).astype(np.float64)
    d = float(np.frombuffer(block[208:210], np.float16)[0])
    out = []
    for half in range(2):
        for run in range(4):
            for i in range(32):
                nibble = low[64 * half + 32 * (run % 2) + i] >> (4 * (run // 2)) & 15
                code = nibble | (high[32 * half + i] >> (2 * run) & 3) << 4
                out.append(d * scales[8 * half + 2 * run + i // 16] * (code - 32))
    return np.array(out)


@pytest.mark.parametrize("kind, size, scale_at, decode_fn", [
    ("Q4_K", 144, (0, 2), lambda block: decode_k45(block, 4)),
    ("Q5_K", 176, (0, 2), lambda block: decode_k45(block, 5)),
    ("Q6_K", 210, (208,), decode_q6_k),
])
def test_k_types_by_their_definition(tmp_path, kind, size, scale_at, decode_fn):
    # The package does not write these: random blocks with small float16 scales, decoded here value by value.
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, size=(WIDE.mlp_width, size), dtype=np.uint8)
    for at in scale_at:
        blocks[:, at : at + 2] = rng.uniform(0.001, 0.01, (WIDE.mlp_width, 1)).astype(np.float16).view(np.uint8)
    stored = file_arrays("llama", WIDE, plain_arrays(WIDE))
    stored["blk.0.ffn_gate.weight"] = (blocks, gguf.GGMLQuantizationType[kind])
    write_gguf(tmp_path / "m.gguf", "llama", model_metadata("llama", WIDE), stored)
    gate = load_gguf(tmp_path / "m.gguf", WIDE)["layers"]["gate"][0]
    for row in range(0, WIDE.mlp_width, 17):
        np.testing.assert_allclose(gate[:, row], decode_fn(blocks[row].tobytes()), rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------------- rope scaling


def llama3_divisors(config: ModelConfig, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """As the converter writes them: 1 for short wavelengths, `factor` for long ones, blended between."""
    out = []
    for i in range(config.head_dim // 2):
        wavelength = 2 * math.pi * config.rope_base ** (2 * i / config.head_dim)
        if wavelength < original / high:
            out.append(1.0)
        elif wavelength > original / low:
            out.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize("head_dim, scaling", [
    (128, RopeScaling(8.0, 1.0, 4.0, 8192)),
    (64, RopeScaling(32.0, 1.0, 4.0, 8192)),
    (64, RopeScaling(2.5, 1.0, 6.0, 4096)),
])
def test_rope_divisors_become_llama3_scaling(tmp_path, head_dim, scaling):
    config = dataclasses.replace(CONFIG, num_heads=1, num_kv_heads=1, head_dim=head_dim, rope_base=500_000.0)
    stored = file_arrays("llama", config, plain_arrays(config))
    stored["rope_freqs.weight"] = llama3_divisors(config, *dataclasses.astuple(scaling))
    write_gguf(tmp_path / "m.gguf", "llama", model_metadata("llama", config), stored)
    assert model_config_from_gguf(tmp_path / "m.gguf") == dataclasses.replace(config, rope_scaling=scaling)
    load_gguf(tmp_path / "m.gguf", config)


def test_divisors_of_one_change_nothing(tmp_path):
    stored = file_arrays("llama", CONFIG, plain_arrays(CONFIG)) | {"rope_freqs.weight": np.ones(4, np.float32)}
    write_gguf(tmp_path / "m.gguf", "llama", model_metadata("llama", CONFIG), stored)
    assert model_config_from_gguf(tmp_path / "m.gguf") == CONFIG


def test_scales_that_change_nothing_are_accepted(tmp_path):
    scales = dict(llama__rope__scaling__attn_factor=1.0, llama__attention__scale=CONFIG.head_dim**-0.5,
                  llama__logit_scale=1.0, llama__final_logit_softcapping=0.0,
                  llama__attention__causal=True)
    write_changed(tmp_path / "m.gguf", **scales, llama__vocab_size=24)
    assert model_config_from_gguf(tmp_path / "m.gguf") == CONFIG


# --------------------------------------------------------------------------------------------------- broken files


def write_changed(path, arch="llama", tensors=(), **metadata):
    """The small model with some tensors and metadata replaced; None leaves one out."""
    stored = file_arrays("llama", CONFIG, plain_arrays(CONFIG)) | dict(tensors)
    values = model_metadata("llama", CONFIG) | {key.replace("__", "."): value for key, value in metadata.items()}
    write_gguf(path, arch, values, {name: value for name, value in stored.items() if value is not None})


ZEROS = np.zeros((24, 32), np.float32)
IQ4_NL = (np.zeros((24, 18), np.uint8), gguf.GGMLQuantizationType.IQ4_NL)


@pytest.mark.parametrize("tensors, words", [
    ({"blk.1.ffn_up.weight": None}, ["missing: blk.1.ffn_up.weight"]),
    ({"blk.1.ffn_up.bias": np.zeros(48, np.float32)}, ["blk.1.ffn_up.bias", "unexpected"]),
    ({"output.weight": ZEROS}, ["output.weight", "unexpected"]),
    ({"blk.0.attn_k.weight": np.zeros((8, 32), np.float32)}, ["blk.0.attn_k.weight", "[8, 32]", "[16, 32]"]),
    ({"token_embd.weight": ZEROS[:23]}, ["token_embd.weight", "[23, 32]", "[24, 32]"]),
    ({"token_embd.weight": IQ4_NL}, ["token_embd.weight", "IQ4_NL", "Q8_0"]),
    ({"output_norm.weight": np.full(32, np.nan, np.float32)}, ["output_norm.weight", "NaN"]),
])
def test_wrong_tensors_are_named(tmp_path, tensors, words):
    write_changed(tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(ValueError) as error:
        load_gguf(tmp_path / "m.gguf", CONFIG)
    assert all(word in str(error.value) for word in ["m.gguf", *words]), error.value


@pytest.mark.parametrize("change, words", [
    ({"arch": "gemma2"}, ["gemma2", "llama, qwen2"]),
    ({"llama__block_count": None}, ["llama.block_count"]),
    ({"llama__expert_count": 8}, ["8 experts"]),
    ({"llama__rope__scaling__type": "yarn"}, ["yarn"]),
    ({"llama__rope__scaling__factor": 4.0}, ["rope scaling 'linear'"]),
    ({"llama__rope__scale_linear": 4.0}, ["rope scaling 'linear'"]),
    ({"llama__rope__dimension_count": 4}, ["rope.dimension_count=4", "8"]),
    ({"llama__attention__value_length": 16}, ["value_length=16", "8"]),
    ({"llama__attention__head_count_kv": [2, 1]}, ["head_count_kv", "[2, 1]"]),
    ({"llama__rope__scaling__attn_factor": 0.5},
     ["llama.rope.scaling.attn_factor=0.5", "only 1 is supported", "Hugging Face"]),
    ({"llama__attention__scale": 0.5}, ["llama.attention.scale=0.5", "only 0.35355"]),
    ({"llama__logit_scale": 0.25}, ["llama.logit_scale=0.25", "only 1 is supported"]),
    ({"llama__embedding_scale": 12.0}, ["llama.embedding_scale=12.0", "only 1 is supported"]),
    ({"llama__residual_scale": 0.5}, ["llama.residual_scale=0.5", "only 1 is supported"]),
    ({"llama__attn_logit_softcapping": 50.0}, ["llama.attn_logit_softcapping=50.0", "only 0 is supported"]),
    ({"llama__final_logit_softcapping": 30.0}, ["llama.final_logit_softcapping=30.0", "only 0 is supported"]),
    ({"llama__something__new": 3}, ["llama.something.new=3", "not known here"]),
    ({"split__count": 3}, ["3 parts", "merge"]),
    ({"tensors": {"rope_freqs.weight": np.array([1, 2, 1, 3], np.float32)}}, ["rope_freqs.weight", "4 factors"]),
    ({"tensors": {"rope_freqs.weight": np.full(4, 0.5, np.float32)}}, ["rope_freqs.weight", "0.5"]),
    ({"tensors": {"rope_freqs.weight": np.full(3, 2.0, np.float32)}}, ["rope_freqs.weight", "3 factors"]),
    ({"tensors": {"token_embd.weight": None}}, ["token_embd.weight"]),
])
def test_models_that_are_not_supported_are_named(tmp_path, change, words):
    write_changed(tmp_path / "m.gguf", **change)
    with pytest.raises(ValueError) as error:
        model_config_from_gguf(tmp_path / "m.gguf")
    assert all(word in str(error.value) for word in ["m.gguf", *words]), error.value


def test_a_file_cut_off_anywhere(tmp_path):
    write_changed(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    for length in [0, 1, 3, 4, 8, 20, 24, *range(30, len(whole) - 160, 997), len(whole) - 160]:
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"cut.gguf .*{length} bytes.*download it again"):
            model_config_from_gguf(tmp_path / "cut.gguf")


def test_what_is_no_gguf_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}" + bytes(100))
    for path in (tmp_path, tmp_path / "none.gguf", tmp_path / "model.safetensors"):
        with pytest.raises(ValueError, match=path.name):
            model_config_from_gguf(path)
