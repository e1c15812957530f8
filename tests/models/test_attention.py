"""Implementations of attention against sums by hand and against the plain one: values and gradients, on a mesh too.

Splash runs in Pallas's interpreter. cuDNN needs an NVIDIA GPU: here XLA does the sums of `jax.nn.dot_product_attention`
and what is tested is what it is told; test_attention_aot.py compiles both kernels for their targets.
"""
import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from support.policies import policies_of
from tango_jax.config import default_config
from tango_jax.models import attention, transformer
from tango_jax.models.attention import (
    attend,
    attend_causally,
    attention_of,
    make_packed_attention,
    make_row_attention,
    make_shared_prefix_attention,
    packed_mask,
    query_blocks,
    resolve_attention,
    why_plain,
)
from tango_jax.models.splash import block_size
from tango_jax.models.transformer import ModelConfig
from tango_jax.rl import score
from tango_jax.rl.packing import PackShape, TrainSequence, pack
from tango_jax.rl.supervised import make_nll_loss
from tango_jax.sampling import decode
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.sampler import SampleRequest, make_sampler
from tango_jax.sharding.placement import TRAIN_AXES, make_placement

KERNELS = ("cudnn", "splash_interpret")
H, K, E = 4, 2, 8
# Two rows of 150 tokens: two sequences and padding; then three, of which one has a single token, and none.
SEGMENT_BT = np.array([[1] * 70 + [2] * 60 + [0] * 20, [1] * 1 + [2] * 129 + [3] * 20])
MODEL = ModelConfig(
    vocab_size=20, width=32, num_layers=2, num_heads=H, num_kv_heads=K, head_dim=E, mlp_width=16, remat="full"
)


@pytest.fixture(autouse=True)
def xla_instead_of_cudnn(monkeypatch):
    real_fn = jax.nn.dot_product_attention

    def stand_in(*args, implementation, **kwargs):
        assert implementation == "cudnn" and args[0].shape[1] % 2 == args[1].shape[1] % 2 == 0
        return real_fn(*args, implementation="xla", **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)


def random_qkv(rows, length, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(rows, length, heads, E)), dtype) for heads in (H, K, K)]


def in_window(window, make_fn, *arguments):
    """Attention of the layers that have this window, in a model in which others have none."""
    return functools.partial(make_fn(*arguments, windows=(0, window)), window=window)


def results(attend_fn, is_real, qkv):
    """Output where tokens are real, and the gradients of a weighted sum of it: dict of arrays."""
    weight = np.random.default_rng(1).normal(size=qkv[0].shape) * is_real[..., None, None]

    def loss_fn(*qkv):
        out = attend_fn(*qkv)[0].astype(jnp.float32)
        return jnp.sum(out * weight), jnp.where(is_real[..., None, None], out, 0)

    grads, out = jax.jit(jax.grad(loss_fn, argnums=(0, 1, 2), has_aux=True))(*qkv)
    return dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))


def assert_close(got, wanted, tolerance):
    """Largest difference against the largest wanted value."""
    for name, value in wanted.items():
        value = np.asarray(value, np.float32)
        error = np.abs(np.asarray(got[name], np.float32) - value).max() / np.abs(value).max()
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("implementation", ["xla", *KERNELS])
def test_who_sees_whom_by_hand(implementation):
    # All scores are equal, so an output is the mean of the values seen. A prefix of two tokens and padding, then two
    # sequences of two tokens and padding.
    is_prefix_BX, segment_BT = jnp.array([[True, True, False]]), jnp.array([[1, 1, 2, 2, 0]])
    value_S = np.array([1, 2, 4, 8, 16, 32, 64, 128], np.float32)
    means_T = [(1 + 2 + 8) / 3, (1 + 2 + 8 + 16) / 4, (1 + 2 + 32) / 3, (1 + 2 + 32 + 64) / 4]
    v_BSKE = jnp.ones((1, 8, K, E)) * value_S[None, :, None, None] * np.float32([1, 10])[None, None, :, None]
    q_BTHE, k_BSKE = jnp.zeros((1, 5, H, E)), jnp.ones((1, 8, K, E))
    fn = make_row_attention(segment_BT, is_prefix_BX, implementation)
    out_TH = np.asarray(fn(q_BTHE, k_BSKE, v_BSKE))[0, :4, :, 0]
    np.testing.assert_allclose(out_TH, np.outer(means_T, [1, 1, 10, 10]), rtol=1e-5)
    own = np.asarray(make_row_attention(segment_BT, None, implementation)(q_BTHE, k_BSKE[:, 3:], v_BSKE[:, 3:]))
    np.testing.assert_allclose(own[0, :4, 0, 0], [8, 12, 32, 48], rtol=1e-5)
    causal = np.asarray(make_row_attention(None, None, implementation)(q_BTHE, k_BSKE[:, 3:], v_BSKE[:, 3:]))
    np.testing.assert_allclose(causal[0, :, 0, 0], [8, 12, 56 / 3, 30, 49.6], rtol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", *KERNELS])
def test_who_sees_whom_in_a_window_by_hand(implementation):
    """As above, where a query sees three tokens at most; the prefix has two, or three in the second row."""
    is_prefix_BX, segment_BT = jnp.array([[True, True, False], [True] * 3]), jnp.array([[1, 1, 2, 2, 0]] * 2)
    value_S = np.array([1, 2, 4, 8, 16, 32, 64, 128], np.float32)
    means_BT = [[(1 + 2 + 8) / 3, (2 + 8 + 16) / 3, (1 + 2 + 32) / 3, (2 + 32 + 64) / 3],
                [(2 + 4 + 8) / 3, (4 + 8 + 16) / 3, (2 + 4 + 32) / 3, (4 + 32 + 64) / 3]]
    v_BSKE = jnp.ones((2, 8, K, E)) * value_S[None, :, None, None]
    q_BTHE, k_BSKE = jnp.zeros((2, 5, H, E)), jnp.ones((2, 8, K, E))
    fn = make_row_attention(segment_BT, is_prefix_BX, implementation, window=3)
    np.testing.assert_allclose(fn(q_BTHE, k_BSKE, v_BSKE)[:, :4, 0, 0], means_BT, rtol=1e-5)
    own = make_row_attention(jnp.array([[1, 1, 1, 1, 0]] * 2), None, implementation, window=3)
    out = own(q_BTHE, k_BSKE[:, 3:], v_BSKE[:, 3:])
    np.testing.assert_allclose(out[0, :4, 0, 0], [8, 12, 56 / 3, 112 / 3], rtol=1e-5)
    causal = make_row_attention(None, None, implementation, window=2)(q_BTHE, k_BSKE[:, 3:], v_BSKE[:, 3:])
    np.testing.assert_allclose(causal[0, :, 0, 0], [8, 12, 24, 48, 96], rtol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", *KERNELS])
def test_who_sees_whom_where_rows_hold_prompts_by_hand(implementation):
    """A prompt of two tokens, two responses of two, and a sequence of one; the values tell who is seen. In a window of
    three, the second response's last token does not see the prompt's first, although a response stands between."""
    segment_BT, prompt_BT = jnp.array([[1, 1, 2, 2, 3, 3, 4, 0]]), jnp.array([[0, 0, 1, 1, 1, 1, 0, 0]])
    v_BSKE = jnp.ones((1, 8, K, E)) * (2.0 ** np.arange(8))[None, :, None, None]
    q_BTHE, k_BSKE = jnp.zeros((1, 8, H, E)), jnp.ones((1, 8, K, E))
    means = {0: [1, 3 / 2, 7 / 3, 15 / 4, (3 + 16) / 3, (3 + 48) / 4, 64],
             3: [1, 3 / 2, 7 / 3, (2 + 12) / 3, (3 + 16) / 3, (2 + 48) / 3, 64]}
    for window, wanted in means.items():
        fn = make_row_attention(segment_BT, None, implementation, window=window, prompt_BT=prompt_BT)
        np.testing.assert_allclose(fn(q_BTHE, k_BSKE, v_BSKE)[0, :7, 0, 0], wanted, rtol=1e-5, err_msg=str(window))


@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize("implementation", KERNELS)
def test_rows_that_hold_prompts(implementation, window):
    """Rows of several blocks, as packed: prompts of many lengths with one to four responses, and padding."""
    rng = np.random.default_rng(4)
    sequences = [TrainSequence([p] * (1 + 40 * (p % 4)), np.full(n, 5), np.ones(n, np.float32))
                 for p in range(1, 7) for n in rng.integers(1, 90, 1 + p % 4)]
    batch = pack(sequences, PackShape(700, 2, joins_prompts=True), 24, 6)
    assert batch.prompt_NZRT.max() > 1 and batch.num_micro == 1
    segment_BT, prompt_BT = (leaf[0, 0] for leaf in (batch.segment_NZRT, batch.prompt_NZRT))

    def attended(name, prompt_BT):
        attend_fn = make_packed_attention(jnp.asarray(segment_BT), name, (0, window), prompt_BT)
        return results(functools.partial(attend_fn, window=window), segment_BT > 0, random_qkv(2, 700))

    wanted = attended("xla", jnp.asarray(prompt_BT))
    assert_close(attended(implementation, jnp.asarray(prompt_BT)), wanted, 1e-5)
    assert np.abs(attended("xla", None)["out"] - wanted["out"]).max() > 0.1


@pytest.mark.parametrize("T, X, num_blocks, window", [(95, 8, 1, 0), (101, 37, 2, 0), (513, 0, 2, 0), (1030, 0, 4, 0),
                                                      (1030, 0, 4, 200)])
def test_blocks_of_queries_change_nothing(T, X, num_blocks, window):
    assert len(query_blocks(T)) == num_blocks and query_blocks(T)[-1].stop == T
    rng = np.random.default_rng(3)
    arrays = [rng.normal(size=(1, length, heads, E)) for length, heads in ((T, H), (X + T, K), (X + T, K))]
    own_BTT = packed_mask(jnp.asarray(np.sort(rng.integers(1, 4, (1, T)))), window)
    mask_BTS = jnp.concatenate([jnp.asarray(rng.random((1, T, X)) < 0.5), own_BTT], axis=-1)
    wanted, got = (
        results(lambda *qkv, fn=fn: (fn(*qkv, mask_BTS), None), np.ones((1, T)), [jnp.float32(x) for x in arrays])
        for fn in (attend, functools.partial(attend_causally, window=window))
    )
    assert_close(got, wanted, 1e-5)


def test_scores_of_the_future_are_not_computed():
    q_BTHE, k_BSKE = (jax.ShapeDtypeStruct((1, 256, heads, E), jnp.float32) for heads in (H, K))
    mask_BTS = jax.ShapeDtypeStruct((1, 256, 256), bool)
    lowered = (jax.jit(fn).lower(q_BTHE, k_BSKE, k_BSKE, mask_BTS) for fn in (attend, attend_causally))
    every_key, no_future = (program.compile().cost_analysis()["flops"] for program in lowered)
    assert no_future < 0.8 * every_key  # two blocks: 3/4


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize("implementation", KERNELS)
def test_packed_rows(implementation, window, dtype, tolerance):
    # In bfloat16 kernels keep some numbers in float32 that the plain one rounds, and the other way round.
    is_real_BT, segment_BT = SEGMENT_BT > 0, jnp.asarray(SEGMENT_BT)
    own = functools.partial(in_window, window)
    wanted = results(own(make_packed_attention, segment_BT), is_real_BT, random_qkv(2, 150))
    got = results(own(make_packed_attention, segment_BT, implementation), is_real_BT, random_qkv(2, 150, dtype))
    assert_close(got, wanted, tolerance)


def shared_prefix_rows(Z=4, Q=2, X=37, R=3, T=45):
    """Shards of prompts of many lengths (none, and all, of X too) and of rows with 1 to 3 responses."""
    rng = np.random.default_rng(2)
    length_ZQ = rng.integers(1, X, (Z, Q))
    length_ZQ[0] = (0, X)
    segment_ZRT = np.zeros((Z, R, T), np.int32)
    for z, r in np.ndindex(Z, R):
        first, second, end = sorted(rng.integers(1, T + 1, 3))
        segment_ZRT[z, r, :first], segment_ZRT[z, r, first:second], segment_ZRT[z, r, second:end] = 1, 2, 3
    is_prefix_ZQX = np.arange(X)[None, None] < length_ZQ[..., None]
    is_real = np.concatenate([is_prefix_ZQX.reshape(Z, -1), segment_ZRT.reshape(Z, -1) > 0], axis=1)
    arrays = (jnp.asarray(length_ZQ), X, jnp.asarray(rng.integers(0, Q, (Z, R))), jnp.asarray(segment_ZRT))
    return arrays, is_real


@pytest.mark.parametrize("window", [0, 15])
@pytest.mark.parametrize("implementation", KERNELS)
def test_rows_that_continue_shared_prompts(implementation, window):
    arrays, is_real = shared_prefix_rows()
    qkv, own = random_qkv(*is_real.shape), functools.partial(in_window, window)
    wanted = results(own(make_shared_prefix_attention, *arrays), is_real, qkv)
    assert_close(results(own(make_shared_prefix_attention, *arrays, implementation), is_real, qkv), wanted, 1e-5)
    if window:
        assert np.abs(results(make_shared_prefix_attention(*arrays), is_real, qkv)["out"] - wanted["out"]).max() > 0.1


@pytest.mark.long
def test_loss_and_gradients_through_all_layers_on_a_mesh(monkeypatch):
    """The whole model with splash in its rematerialised scan, on four devices, against plain attention on one."""
    rng, params = np.random.default_rng(3), transformer.init_params(MODEL, jax.random.key(0))
    sequences = [
        TrainSequence(list(range(3, 3 + n)), rng.integers(0, 20, m).astype(np.int32), np.ones(m, np.float32))
        for n, m in ((9, 4), (9, 7), (5, 11), (2, 3), (7, 12), (7, 1), (3, 5), (3, 5))
    ]
    batch = pack(sequences, PackShape(13, 2, 2, (9,)), 8, 5, num_shards=2)
    micro = score.micro_batch(jax.tree.map(jnp.asarray, batch), 0)

    def loss_and_gradients(mesh):
        loss_fn = make_nll_loss(MODEL, 0, mesh)
        (loss, _), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params, micro)
        return dict(enumerate(jax.tree.leaves((loss, grads))))

    wanted = loss_and_gradients(None)
    monkeypatch.setattr(score, "attention_of", lambda config: "splash_interpret")
    mesh = jax.make_mesh((1, 2, 2), TRAIN_AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:4])
    assert_close(loss_and_gradients(mesh), wanted, 1e-4)


def test_scoring_on_a_mesh_keeps_nothing_for_a_gradient():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def score_fn(segment_BT, *qkv):
        return make_packed_attention(segment_BT, "splash_interpret")(*qkv)[0]

    on_mesh_fn = jax.shard_map(score_fn, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    program = str(jax.make_jaxpr(on_mesh_fn)(jnp.asarray(SEGMENT_BT), *random_qkv(2, 150)))
    assert "splash_mha_fwd_segmented_no_residuals" in program and "segmented_residuals" not in program


def test_prompts_are_read_alike_on_a_mesh(monkeypatch):
    settings = default_config().generator.mesh
    settings.fsdp, settings.tensor, settings.decode_tensor = 2, 2, 2
    placement = make_placement(settings, jax.devices()[:4])
    params = transformer.init_params(MODEL, jax.random.key(0))
    prompts = [[4, 5, 6], [7] * 9, [8, 9], [3, 3, 4, 5, 6]]

    def sample(placement):
        sampler = make_sampler(MODEL, SamplerConfig((9,), (4,), (4,)), (1,), placement)
        return sampler.sample(sampler.layout(params), SampleRequest(prompts, 1, np.zeros(2, np.uint32), 1.0))

    wanted = sample(None)
    monkeypatch.setattr(decode, "attention_of", lambda config: "splash_interpret")
    got = sample(placement)
    for one, other in zip(got.tokens + got.logps, wanted.tokens + wanted.logps, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("name, platform, dtype, head_dim, capability, wanted", [
    ("auto", "cpu", "bfloat16", 128, None, "xla"),
    ("auto", "gpu", "bfloat16", 128, 8.0, "cudnn"),
    ("auto", "gpu", "float16", 64, 9.0, "cudnn"),
    ("auto", "gpu", "float32", 128, 8.0, "xla"),
    ("auto", "gpu", "bfloat16", 192, 8.0, "xla"),
    ("auto", "gpu", "bfloat16", 192, 9.0, "cudnn"),
    ("auto", "gpu", "float16", 64, 7.5, "xla"),
    ("auto", "gpu", "bfloat16", 128, None, "xla"),
    ("auto", "tpu", "bfloat16", 128, None, "splash"),
    ("auto", "tpu", "float32", 64, None, "splash"),
    ("auto", "tpu", "float16", 128, None, "xla"),
    ("auto", "tpu", "bfloat16", 20, None, "xla"),
    ("xla", "tpu", "float32", 6, None, "xla"),
    ("cudnn", "gpu", "bfloat16", 128, 8.0, "cudnn"),
    ("splash", "tpu", "bfloat16", 128, None, "splash"),
])
def test_what_runs_where(name, platform, dtype, head_dim, capability, wanted):
    assert resolve_attention(name, platform, dtype, head_dim, capability) == wanted


@pytest.mark.parametrize("arguments, message", [
    (("cudnn", "tpu", "bfloat16", 128, None), "model.attention=cudnn runs on a gpu, and the devices are"),
    (("cudnn", "gpu", "bfloat16", 128, 7.5), "needs .* compute capability 8.0 or more, and this one has 7.5"),
    (("cudnn", "gpu", "float32", 128, 8.0), "computes in bfloat16 or float16, and compute_dtype is float32"),
    (("cudnn", "gpu", "bfloat16", 192, 8.0), "multiple of 8 and at most 128, and it is 192: use auto"),
    (("splash", "gpu", "bfloat16", 128, 8.0), "runs on a tpu"),
    (("splash", "tpu", "bfloat16", 100, None), "multiple of 8 and at most 256, and it is 100"),
])
def test_what_cannot_run_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve_attention(*arguments)


def test_devices_decide():
    model = dataclasses.replace(MODEL, compute_dtype="bfloat16")
    devices = {
        "cudnn": types.SimpleNamespace(platform="gpu", compute_capability="8.6"),
        "xla": types.SimpleNamespace(platform="gpu", compute_capability="gfx942"),
        "splash": types.SimpleNamespace(platform="tpu"),
    }
    assert {name: attention_of(model, device) for name, device in devices.items()} == {name: name for name in devices}
    assert attention_of(model) == "xla"
    # Heads as wide as Gemma 3's: where the kernel takes no such ones, a run says why it goes without.
    wide = dataclasses.replace(model, head_dim=256)
    assert attention_of(wide, devices["cudnn"]) == "xla"
    assert why_plain(wide, devices["cudnn"]) == (
        "cudnn takes a head_dim that is a multiple of 8 and at most 128, and it is 256")
    assert not any(why_plain(wide, device) for device in (
        types.SimpleNamespace(platform="gpu", compute_capability="9.0"), devices["splash"],
        types.SimpleNamespace(platform="cpu")))
    config = default_config()
    config.verifier.model.attention = "splash"
    with pytest.raises(ValueError, match="verifier: model.attention=splash runs on a tpu, and the devices are of"):
        policies_of(config)
    with pytest.raises(ValueError, match="attention='flash' is not one of auto"):
        dataclasses.replace(MODEL, attention="flash")
    with pytest.raises(ValueError, match="'auto' is none of xla, cudnn, splash"):
        attention.make_packed_attention(jnp.ones((1, 4)), "auto")


def test_blocks_pad_little():
    # 2048 = 4 x 512; 2049 would grow by 511 of 2049 in blocks of 512, by 255 (an eighth is 256) in blocks of 256.
    assert [block_size(2048), block_size(2049), block_size(2000, 2049), block_size(100)] == [512, 256, 256, 128]
