"""Import of Hugging Face checkpoints: logits against PyTorch's, what is read, and what is refused.

The expected logits are in fixtures/hf_logits.npz (make_hf_golden.py makes them); where torch is installed they are
computed anew as well.
"""
import dataclasses
import tracemalloc

import jax
import numpy as np
import pytest

from support import hf_cases
from support.hf_cases import CASES, INPUTS, make_tensors, write_checkpoint
from support.hf_loading import TOLERANCE, assert_equal_trees, load, logits, shardings_of
from tango_jax.models.rotary import RopeScaling
from tango_jax.models.transformer import LayerKind
from tango_jax.weights import from_hf, hf_layout, safetensors_files
from tango_jax.weights.from_hf import load_hf, model_config_from_hf
from tango_jax.weights.to_hf import hf_config

LLAMA, QWEN2, QWEN3, MISTRAL = (CASES[name] for name in ("llama2", "qwen2", "qwen3", "mistral"))


def assert_parity(folder, expected):
    """All inputs as one batch, so that each case compiles once; padding is compared nowhere."""
    inputs = hf_cases.Inputs(*(np.concatenate(parts) for parts in zip(*INPUTS.values(), strict=True)))
    ours = logits(*load(folder), inputs)
    theirs = np.concatenate([expected[kind] for kind in INPUTS])
    difference = np.abs(ours - theirs).max(axis=-1)[inputs.is_token_BT]
    assert difference.max() < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_pytorch(name, tmp_path):
    golden = np.load(hf_cases.GOLDEN)
    expected = {kind: golden[f"{name}/{kind}"] for kind in INPUTS}
    assert_parity(write_checkpoint(tmp_path, CASES[name]), expected)
    # The inputs differ in what they show: neither padding nor distance is without effect.
    for kind in ("left_padded", "far"):
        assert np.abs(expected["plain"] - expected[kind])[:, -1].max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_pytorch_live(name, tmp_path):
    pytest.importorskip("torch")
    from support.make_hf_golden import torch_logits

    folder = write_checkpoint(tmp_path, CASES[name])
    expected = {kind: torch_logits(folder, inputs) for kind, inputs in INPUTS.items()}
    assert_parity(folder, expected)
    for kind, golden in expected.items():
        np.testing.assert_allclose(golden, np.load(hf_cases.GOLDEN)[f"{name}/{kind}"], atol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_as_near_to_float32_as_in_pytorch(name, tmp_path):
    torch = pytest.importorskip("torch")
    from support.make_hf_golden import torch_logits

    folder, inputs = write_checkpoint(tmp_path, CASES[name]), INPUTS["left_padded"]
    # Rounded weights on both sides, so that only the arithmetic differs.
    tensors = {key: value.astype("bfloat16").astype("float32") for key, value in make_tensors(CASES[name]).items()}
    write_checkpoint(tmp_path, CASES[name], tensors=tensors)
    exact = torch_logits(folder, inputs)
    ours = np.asarray(logits(*load(folder, compute_dtype="bfloat16", head_dtype="bfloat16"), inputs))
    theirs = torch_logits(folder, inputs, torch.bfloat16)
    ours, theirs = (np.abs(found - exact).max(axis=-1)[inputs.is_token_BT] for found in (ours, theirs))
    assert 10 * TOLERANCE < ours.max() < 2 * theirs.max() and ours.mean() < 1.2 * theirs.mean()


def test_rotary_scaling_reaches_the_logits(tmp_path):
    """Parity would show little if the scaled band were never touched."""
    config, params = load(write_checkpoint(tmp_path, CASES["llama3_1"]))
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 256)
    unscaled = logits(dataclasses.replace(config, rope_scaling=None), params, INPUTS["far"])
    assert np.abs(unscaled - logits(config, params, INPUTS["far"])).max() > 100 * TOLERANCE


def test_config_of_every_family(tmp_path):
    for name, case in CASES.items():
        config = model_config_from_hf(write_checkpoint(tmp_path / name, case), compute_dtype="bfloat16", remat="dots")
        assert (config.head_dim, config.qkv_bias, config.qk_norm) == (case.head_dim, case.biases, case.norms)
        assert config.tied_head == case.config["tie_word_embeddings"]
        assert config.norm_eps == case.config["rms_norm_eps"]
        assert (config.compute_dtype, config.remat, config.max_position) == ("bfloat16", "dots", 8192)
        own = case.config.get("rope_parameters", case.config)
        assert config.rope_base == own.get("full_attention", own)["rope_theta"]


# By family, settings of other families, which transformers' model of this one does not read.
STRAYS = [
    ("llama2", dict(no_rope_layers=[0, 1], query_pre_attn_scalar=3, final_logit_softcapping=1.0)),
    ("mistral", dict(no_rope_layers=[0], attention_bias=True)),
    ("qwen2", dict(query_pre_attn_scalar=3, attention_bias=True)),
    ("smollm3", dict(query_pre_attn_scalar=3)),
    ("olmo2", dict(no_rope_layers=[0, 0], mlp_bias=True)),
    ("gemma3", dict(no_rope_layers=[0], rope_scaling=None,
                    rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=5e5))),
]


@pytest.mark.parametrize("name, strays", STRAYS)
def test_settings_that_transformers_does_not_read_change_nothing(name, strays, tmp_path):
    case = CASES[name]
    plain = {key: None for key in strays if key == "rope_scaling"}
    expected = model_config_from_hf(write_checkpoint(tmp_path / "plain", case, **plain))
    assert model_config_from_hf(write_checkpoint(tmp_path / "strays", case, **strays)) == expected


@pytest.mark.parametrize("name, strays", STRAYS)
def test_settings_that_transformers_does_not_read_change_nothing_live(name, strays, tmp_path):
    pytest.importorskip("torch")
    from support.make_hf_golden import torch_logits

    folder = write_checkpoint(tmp_path, CASES[name], **strays)
    assert_parity(folder, {kind: torch_logits(folder, inputs) for kind, inputs in INPUTS.items()})


@pytest.mark.parametrize("prefix", ["language_model.model", "model.language_model"])
def test_the_text_part_of_a_model_that_reads_images(prefix, tmp_path):
    case, tensors = CASES["gemma3"], make_tensors(CASES["gemma3"])
    config, expected = load(write_checkpoint(tmp_path / "text", case))
    whole = {name.replace("model", prefix, 1): value for name, value in tensors.items()}
    whole |= {f"{part}.weight": np.ones((2, 2)) for part in ("vision_tower.encoder", "multi_modal_projector.linear")}
    about = dict(model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"], text_config=case.config,
                 vision_config={"model_type": "siglip_vision_model"})
    folder = write_checkpoint(tmp_path / "whole", case._replace(config=about), tensors=whole)
    assert model_config_from_hf(folder) == config
    assert_equal_trees(load_hf(folder, config), expected)
    assert hf_config(config, "gemma3", "float32")["model_type"] == "gemma3_text"


def test_two_kinds_of_layers_are_a_pattern(tmp_path):
    config = model_config_from_hf(write_checkpoint(tmp_path, CASES["gemma3"]))
    local = LayerKind(window=4, rope_base=10_000.0)
    assert config.pattern == (local, local, LayerKind()) and config.layer_kinds[6:] == (local, local)
    assert (config.rope_base, config.rope_scaling, config.query_width) == (1e6, RopeScaling(8.0), 12.0)
    changes = dict(rope_scaling=None, query_pre_attn_scalar=16)  # the head dim
    plain = model_config_from_hf(write_checkpoint(tmp_path, CASES["gemma3"], **changes))
    assert (plain.rope_scaling, plain.query_width) == (None, 0.0)


def test_layers_that_rotate_nothing_are_a_pattern(tmp_path):
    config = model_config_from_hf(write_checkpoint(tmp_path, CASES["smollm3"]))
    assert [layer.rope_base for layer in config.pattern] == [None, None, 0]
    assert [layer.rope_base for layer in config.layer_kinds] == [None, None, 0, None, None, 0, None]
    # By default every fourth, in seven layers one.
    changes = dict(no_rope_layers=None, no_rope_layer_interval=4)
    config = model_config_from_hf(write_checkpoint(tmp_path, CASES["smollm3"], **changes))
    assert [layer.rope_base for layer in config.pattern] == [None, None, None, 0]


def test_both_spellings_of_the_rotary_settings(tmp_path):
    case = CASES["llama3_1"]
    scaling = case.config["rope_scaling"]
    old = model_config_from_hf(write_checkpoint(tmp_path / "old", case))
    new = model_config_from_hf(write_checkpoint(
        tmp_path / "new", case, rope_scaling=None, rope_theta=None, rope_parameters=scaling | {"rope_theta": 500000.0}
    ))
    oldest = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    assert old == new == model_config_from_hf(write_checkpoint(tmp_path / "oldest", case, rope_scaling=oldest))


def test_a_window_that_no_sequence_reaches_is_no_window(tmp_path):
    assert model_config_from_hf(write_checkpoint(tmp_path, MISTRAL, sliding_window=8192)).max_position == 8192
    changes = dict(use_sliding_window=True, max_window_layers=1, sliding_window=8192)
    assert model_config_from_hf(write_checkpoint(tmp_path, QWEN2, **changes)).max_position == 8192


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_stored_dtypes(stored, wanted, tmp_path):
    config, params = load(write_checkpoint(tmp_path, QWEN2, stored), param_dtype=wanted)
    q = make_tensors(QWEN2)["model.layers.1.self_attn.q_proj.weight"].astype(stored).astype(wanted)
    assert params["layers"]["q"].dtype == wanted
    # Weights are [out, in] there, and the rows of one head lie together.
    np.testing.assert_array_equal(params["layers"]["q"][1, 5, 3, 7], q[3 * 8 + 7, 5])
    np.testing.assert_array_equal(params["layers"]["q"][1].reshape(32, 32).T, q)


def test_the_tree_is_that_of_init_params(tmp_path):
    for name, case in CASES.items():
        config, params = load(write_checkpoint(tmp_path / name, case), param_dtype="bfloat16")
        fresh = hf_layout.abstract_params(config)
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype), fresh)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))


def test_several_files_equal_one(tmp_path):
    config, expected = load(write_checkpoint(tmp_path / "one", QWEN3))
    for shards in (2, 5):
        folder = write_checkpoint(tmp_path / str(shards), QWEN3, shards=shards)
        assert_equal_trees(load_hf(folder, config), expected)


def test_harmless_leftovers_are_accepted(tmp_path):
    tensors = make_tensors(CASES["llama3_2"])
    config, expected = load(write_checkpoint(tmp_path / "clean", CASES["llama3_2"]))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    tensors["model.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    folder = write_checkpoint(tmp_path / "more", CASES["llama3_2"], tensors=tensors)
    assert_equal_trees(load_hf(folder, config), expected)
    tensors["lm_head.weight"] = 3 * tensors["model.embed_tokens.weight"] + 1
    folder = write_checkpoint(tmp_path / "other", CASES["llama3_2"], tensors=tensors)
    with pytest.raises(ValueError, match=r"tie_word_embeddings=true, but lm_head\.weight differs from the embedding"):
        load_hf(folder, config)


def test_one_odd_row_of_a_tied_head_is_found(tmp_path):
    """A few added tokens may be all that differs: in a larger vocabulary than is read at once, next to its end."""
    case, rows = CASES["llama3_2"], 2 * from_hf.HEAD_ROWS + 9
    case = case._replace(config=case.config | dict(vocab_size=rows))
    tensors = make_tensors(case) | {"model.embed_tokens.weight": np.ones((rows, 32), np.float32)}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    folder = write_checkpoint(tmp_path, case, tensors=tensors)
    load(folder)
    tensors["lm_head.weight"][rows - 2, 5] = 2.0
    write_checkpoint(tmp_path, case, tensors=tensors)
    with pytest.raises(ValueError, match=rf"differs from the embedding \(row {rows - 2} of {rows} differs\): set it"):
        load(folder)


def test_a_sharded_load_equals_the_plain_one_and_reads_every_number_once(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path, QWEN2, shards=3)
    config, expected = load(folder)
    shardings, read = shardings_of(config), []
    read_parts = safetensors_files.read_parts

    def counted(tensors, parts):
        for block, target in read_parts(tensors, parts):
            read.append(block.size)
            yield block, target

    monkeypatch.setattr(safetensors_files, "read_parts", counted)
    params = load_hf(folder, config, shardings)
    assert_equal_trees(params, expected)
    jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding or pytest.fail(str(leaf.sharding)), params, shardings)
    # The head dim of k is cut over four devices: its rows are read four times, once for each part.
    again = 3 * expected["layers"]["k"].size
    assert sum(read) == sum(leaf.size for leaf in jax.tree.leaves(expected)) + again


def test_loaded_parameters_can_be_donated(tmp_path):
    """A part that several devices hold is read once; still each device owns its copy."""
    config, expected = load(write_checkpoint(tmp_path, QWEN2))
    expected = jax.tree.map(np.array, expected)
    params = load_hf(tmp_path, config, shardings_of(config))
    for _ in range(3):
        params = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)(params)
    jax.tree.map(lambda leaf, start: np.testing.assert_array_equal(leaf, start + 1 + 1 + 1), params, expected)


def test_memory_stays_near_one_parameter_and_one_tensor(tmp_path):
    case = LLAMA._replace(config=LLAMA.config | dict(num_hidden_layers=24, hidden_size=64, intermediate_size=256),
                          head_dim=16)
    config = model_config_from_hf(write_checkpoint(tmp_path, case, shards=4))
    load_hf(tmp_path, config)  # what is imported and compiled at the first call is not counted
    sizes = [leaf.size * 4 for leaf in jax.tree.leaves(hf_layout.abstract_params(config))]
    tracemalloc.start()
    params = load_hf(tmp_path, config)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert params["layers"]["gate"].nbytes == max(sizes)
    assert peak < sum(sizes) + max(sizes)
