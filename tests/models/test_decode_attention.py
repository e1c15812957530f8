"""Attention of decode steps by kernels: merging of two parts, both kernels against plain attention, what runs where.

The TPU kernel runs in Pallas's interpreter. cuDNN needs an NVIDIA GPU: here XLA does its sums, and what is tested is
what it is told; test_decode_attention_aot.py compiles both for their targets.
"""
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.pallas import tpu as pltpu

from support.policies import policies_of
from tango_jax.config import default_config
from tango_jax.models import decode_attention, transformer
from tango_jax.models.cache import make_decode_attention
from tango_jax.models.decode_attention import (
    decode_attention_of,
    make_skipping_decode_attention,
    merge_parts,
    page_size,
    resolve_decode_attention,
)
from tango_jax.models.transformer import ModelConfig
from tango_jax.sampling import sampler as sampler_module
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.sampler import SampleRequest, make_sampler
from tango_jax.sharding.placement import make_placement

INF = np.inf
P, M, H, K, E = 2, 3, 6, 2, 128
B, G = P * M, H // K
PREFIX, SUFFIX = 32, 48  # pages of 32 and of 16
PROMPT_LENGTH_P = np.array([32, 5])
LENGTH_B = np.array([20, 20, 1, 20, 20, 1])  # two rows have ended
COLUMN = 19
MODEL = ModelConfig(
    vocab_size=20, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=16, remat="full"
)


@pytest.fixture
def xla_instead_of_cudnn(monkeypatch):
    """cuDNN's function for sequences [N, S, 1, E] of which the first so many tokens are there."""

    def stand_in(q, k, v, *, q_seqlen, kv_seqlen, scale, mask_type, return_residual):
        assert mask_type == cudnn.MaskType.PADDING and return_residual
        assert q.shape[2] == k.shape[2] == 1 and k.dtype == q.dtype and kv_seqlen.dtype == q_seqlen.dtype == jnp.int32
        score = scale * jnp.einsum("nxhe,nshe->nhxs", q, k)
        is_there_NS = jnp.arange(k.shape[1])[None, :] < kv_seqlen[:, None]
        score = jnp.where(is_there_NS[:, None, None, :], score, -jnp.inf)
        out = jnp.einsum("nhxs,nshe->nxhe", jax.nn.softmax(score), v)
        return out, jax.nn.logsumexp(score, axis=-1)

    monkeypatch.setattr(cudnn, "dot_product_attention", stand_in)


@pytest.mark.parametrize("first, second, wanted", [
    # exp(0) = 1 and exp(log 3) = 3 of 4.
    ((2.0, 0.0), (10.0, np.log(3.0)), 8.0),
    ((2.0, np.log(3.0)), (10.0, 0.0), 4.0),
    ((2.0, 5000.0), (10.0, 5000.0), 6.0),
    ((2.0, 1e30), (10.0, -1e30), 2.0),
    ((2.0, -1e30), (10.0, 3.0), 10.0),
    ((7.0, -INF), (10.0, -800.0), 10.0),  # no keys in the first part
    ((2.0, 90.0), (0.0, -INF), 2.0),
    ((2.0, -INF), (10.0, -INF), 6.0),
])
def test_merging_by_hand(first, second, wanted):
    (out_1, lse_1), (out_2, lse_2) = first, second
    got = merge_parts(jnp.full((1, 2), out_1), jnp.full((1,), lse_1), jnp.full((1, 2), out_2), jnp.full((1,), lse_2))
    np.testing.assert_allclose(got, np.full((1, 2), wanted), rtol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize("border", [1, 4, 8])
def test_two_parts_are_one_softmax(scale, border):
    rng = np.random.default_rng(0)
    score_XS, v_SE = scale * rng.normal(size=(5, 9)).astype(np.float32), rng.normal(size=(9, 4)).astype(np.float32)

    def attended(part):
        score_XS_part = score_XS[:, part]
        return jax.nn.softmax(score_XS_part) @ v_SE[part], jax.nn.logsumexp(score_XS_part, axis=-1)

    got = merge_parts(*attended(slice(border)), *attended(slice(border, None)))
    np.testing.assert_allclose(got, attended(slice(None))[0], atol=2e-6)


def both_attentions(implementation, dtype):
    """(kernel, plain) results for the same numbers: attention, and keys and values of the suffix."""
    rng = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16).astype(dtype)

    prefix_k, prefix_v, suffix_k, suffix_v = (random(rows, K, S, E) for rows, S in ((P, PREFIX), (B, SUFFIX))
                                              for _ in range(2))
    q, k, v = random(B, 1, H, E), random(B, 1, K, E), random(B, 1, K, E)
    kernel_fn = make_skipping_decode_attention(
        prefix_k, prefix_v, jnp.asarray(PROMPT_LENGTH_P, jnp.int32), suffix_k, suffix_v, jnp.int32(COLUMN),
        jnp.asarray(LENGTH_B, jnp.int32), implementation,
    )
    plain_fn = make_decode_attention(
        *(x.astype(jnp.float32) for x in (prefix_k.swapaxes(2, 3), prefix_v)),
        jnp.asarray(np.arange(PREFIX) < PROMPT_LENGTH_P[:, None]),
        *(x.astype(jnp.float32) for x in (suffix_k.swapaxes(2, 3), suffix_v)),
        jnp.int32(COLUMN),
        jnp.asarray(np.arange(SUFFIX) < LENGTH_B[:, None]),
    )
    return kernel_fn(q, k, v), plain_fn(*(x.astype(jnp.float32) for x in (q, k, v)))


def test_cudnn_attends_as_the_plain_one(xla_instead_of_cudnn):
    (out, (new_k, new_v)), (plain_out, (plain_k, plain_v)) = both_attentions("cudnn", jnp.float32)
    np.testing.assert_allclose(out, plain_out, atol=2e-6)
    np.testing.assert_array_equal(new_k, plain_k.swapaxes(2, 3))
    np.testing.assert_array_equal(new_v, plain_v)


def test_paged_attends_as_the_plain_one():
    with pltpu.force_tpu_interpret_mode():
        (out, _), (plain_out, _) = both_attentions("paged", jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), plain_out, rtol=2**-8, atol=1e-4)  # rounded to bfloat16


def test_paged_reads_no_page_beyond_a_length():
    lengths, page, S = np.array([1, 16, 17, 48], np.int32), 16, 48
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(4, 2, size, E)), jnp.bfloat16) for size in (3, S, S))
    is_there = np.arange(S) < lengths[:, None]
    is_read = np.arange(S) < (-(-lengths // page) * page)[:, None]  # whole pages
    assert is_read.sum(axis=1).tolist() == [16, 16, 32, 48]
    k, v = (jnp.where(is_read[:, None, :, None], x, jnp.nan) for x in (k, v))
    with pltpu.force_tpu_interpret_mode():
        out, lse = decode_attention.make_part_attention("paged", None)(q, k, v, jnp.asarray(lengths))
    k, v = (jnp.where(is_there[:, None, :, None], x, 0).astype(jnp.float32) for x in (k, v))
    score = jnp.einsum("bkxe,bkse->bkxs", q.astype(jnp.float32) * E**-0.5, k)
    score = jnp.where(is_there[:, None, None, :], score, -jnp.inf)
    assert page_size(S) == page
    np.testing.assert_allclose(lse, jax.nn.logsumexp(score, axis=-1), atol=1e-5)
    np.testing.assert_allclose(out, jnp.einsum("bkxs,bkse->bkxe", jax.nn.softmax(score), v), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("cache_tokens", [0, 84])
def test_sampling_by_a_kernel_on_a_mesh(monkeypatch, xla_instead_of_cudnn, cache_tokens):
    """Rows that end at different steps, a cache that grows, fewer rows: the tokens and log-probs of xla. With a budget,
    rows wait, too."""
    settings = default_config().generator.mesh
    settings.tensor = settings.decode_tensor = 2
    params = transformer.init_params(MODEL, jax.random.key(0))
    prompts = [[4, 5, 6], [7] * 9, [8, 9], [3, 3, 4, 5, 6]]
    request = SampleRequest(prompts, 2, np.zeros(2, np.uint32), 1.0, max_new=np.array([2, 12, 1, 3, 12, 5, 2, 9]))

    def sample(placement):
        sizes = SamplerConfig((4, 9), (4, 12), (4, 8), cache_tokens)
        sampler = make_sampler(MODEL, sizes, (1,), placement)
        return sampler.sample(sampler.layout(params), request)

    wanted = sample(None)
    monkeypatch.setattr(sampler_module, "decode_attention_of", lambda *args: "cudnn")
    got = sample(make_placement(settings, jax.devices()[:4]))
    assert [row.tolist() for row in got.tokens] == [row.tolist() for row in wanted.tokens]
    np.testing.assert_allclose(np.concatenate(got.logps), np.concatenate(wanted.logps), atol=1e-5)
    assert max(map(len, got.tokens)) > 4
    assert cache_tokens or got.row_steps == wanted.row_steps  # of a budget, each device has its own


BUCKETS = (256, 2048)


@pytest.mark.parametrize("name, platform, dtype, head_dim, buckets, capability, wanted", [
    ("auto", "cpu", "bfloat16", 128, BUCKETS, None, "xla"),
    ("auto", "gpu", "bfloat16", 128, BUCKETS, 8.0, "cudnn"),
    ("auto", "gpu", "bfloat16", 64, (100,), 9.0, "cudnn"),
    ("auto", "gpu", "float32", 128, BUCKETS, 8.0, "xla"),
    ("auto", "gpu", "bfloat16", 128, BUCKETS, None, "xla"),
    ("auto", "tpu", "bfloat16", 128, BUCKETS, None, "paged"),
    ("auto", "tpu", "float32", 128, BUCKETS, None, "xla"),
    ("auto", "tpu", "bfloat16", 64, BUCKETS, None, "xla"),
    ("auto", "tpu", "bfloat16", 128, (256, 1000), None, "xla"),
    ("xla", "gpu", "bfloat16", 128, BUCKETS, 8.0, "xla"),
    ("cudnn", "gpu", "bfloat16", 128, BUCKETS, 9.0, "cudnn"),
    ("paged", "tpu", "bfloat16", 256, BUCKETS, None, "paged"),
])
def test_what_runs_where(name, platform, dtype, head_dim, buckets, capability, wanted):
    got = resolve_decode_attention(name, platform, dtype, head_dim, buckets, capability)
    assert got == wanted


@pytest.mark.parametrize("arguments, message", [
    (("cudnn", "cpu", "bfloat16", 128, BUCKETS), "model.decode_attention=cudnn runs on a gpu, and the devices are"),
    (("cudnn", "gpu", "bfloat16", 128, BUCKETS, 7.5), "compute capability 8.0 or more, and this one has 7.5"),
    (("cudnn", "gpu", "float32", 128, BUCKETS, 8.0), "compute_dtype is float32: use auto"),
    (("paged", "gpu", "bfloat16", 128, BUCKETS, 8.0), "runs on a tpu, and the devices are of platform gpu"),
    (("paged", "tpu", "float32", 128, BUCKETS), "computes in bfloat16, and compute_dtype is float32"),
    (("paged", "tpu", "bfloat16", 64, BUCKETS), "multiple of 128, and it is 64"),
    (("paged", "tpu", "bfloat16", 128, (256, 1000)), "takes caches of a multiple of 16 columns, and one has 1000"),
    (("cudnn", "gpu", "bfloat16", 128, BUCKETS, 8.0, "", 512), "some layers see only the last 512 tokens: use auto"),
    (("cudnn", "gpu", "bfloat16", 128, BUCKETS, 8.0, "int8"), "of compute_dtype, and sample_cache_dtype=int8: use"),
])
def test_what_cannot_run_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve_decode_attention(*arguments)


def test_devices_decide():
    model = dataclasses.replace(MODEL, compute_dtype="bfloat16", head_dim=128, decode_attention="auto")
    devices = {
        "cudnn": types.SimpleNamespace(platform="gpu", compute_capability="8.0"),
        "xla": types.SimpleNamespace(platform="gpu", compute_capability="gfx942"),
        "paged": types.SimpleNamespace(platform="tpu"),
    }
    assert {name: decode_attention_of(model, BUCKETS, device) for name, device in devices.items()} == {
        name: name for name in devices
    }
    assert ModelConfig(20, 32, 2, 4, 2, 8, 16).decode_attention == "xla"  # nothing else runs unless it is asked for
    config = default_config()
    config.verifier.model.decode_attention = "cudnn"
    with pytest.raises(ValueError, match="verifier: model.decode_attention=cudnn runs on a gpu, and the device"):
        policies_of(config)
    with pytest.raises(ValueError, match="decode_attention='flash' is not one of auto, xla, cudnn, paged"):
        dataclasses.replace(MODEL, decode_attention="flash")
    with pytest.raises(ValueError, match="'xla' is none of cudnn, paged"):
        decode_attention.make_part_attention("xla", None)


def test_pages_divide_the_cache():
    assert [page_size(bucket) for bucket in (2048, 384, 1008)] == [256, 128, 16]
