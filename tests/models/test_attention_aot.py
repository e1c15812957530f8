"""Attention compiled ahead of time for GPUs and TPUs that are not here, where their compilers are installed
(support/absent_devices.py).

A layer of the shape of Qwen2.5-7B, forward and gradient: the kernels are in the compiled program, and no array of
scores is. Training on a mesh is compiled as it runs there, under `shard_map`.
"""
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from support.absent_devices import absent_devices
from tango_jax.models import transformer
from tango_jax.models.attention import attention_of, make_packed_attention, query_blocks
from tango_jax.models.transformer import ModelConfig
from tango_jax.records import Batch
from tango_jax.rl.supervised import make_nll_loss
from tango_jax.sharding.layouts import param_shardings, with_shardings
from tango_jax.sharding.placement import BATCH_AXES, TRAIN_AXES

MODEL = ModelConfig(
    vocab_size=512, width=3584, num_layers=1, num_heads=28, num_kv_heads=4, head_dim=128, mlp_width=18944,
    qkv_bias=True, param_dtype="bfloat16", compute_dtype="bfloat16", head_dtype="bfloat16",
)
R, T = 4, 2048  # packed rows of a micro-batch
KERNEL = {"gpu": r'"(__cudnn\$fmha\w+)"', "tpu": r"/(splash_mha_\w+?)(?:_no)?_residuals/pallas_call"}
FORWARD = {"gpu": {"__cudnn$fmhaScaleBiasSoftmax"}, "tpu": {"splash_mha_fwd_segmented"}}
BACKWARD = {"gpu": {"__cudnn$fmhaScaleBiasSoftmaxBackward"},
            "tpu": {"splash_mha_dq_segmented", "splash_mha_dkv_segmented"}}
PROMPT = {"gpu": {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"},
          "tpu": {"splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv"}}


@pytest.fixture(scope="module", params=["a100-80gb", "tpu-v5p"])
def devices(request):
    """Eight A100, or eight chips of a TPU v5p."""
    return absent_devices(request.param)


def kernels(compiled, platform: str) -> set[str]:
    return set(re.findall(KERNEL[platform], compiled.as_text()))


def has_scores(compiled) -> bool:
    """Whether there is an array of the scores of a block of queries, with all keys: what no kernel makes."""
    block = query_blocks(T)[-1]
    shapes = ([int(size) for size in dims.split(",")] for dims in re.findall(r"f32\[([\d,]+)\]", compiled.as_text()))
    size = R * MODEL.num_heads * (block.stop - block.start) * T
    return any(shape[-1] == T and np.prod(shape) == size for shape in shapes)


def compile_layer(device, implementation: str, with_gradient: bool):
    mesh = Mesh(np.array([device]), ("x",))

    def here(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    params = jax.eval_shape(lambda: transformer.init_params(MODEL, jax.random.key(0)))
    layers = jax.tree.map(lambda leaf: here(leaf.shape, leaf.dtype), params["layers"])
    position_BT = np.broadcast_to(np.arange(T), (R, T))

    def forward(layers, x_BTD, segment_BT):
        attend_fn = make_packed_attention(segment_BT, implementation)
        return transformer.apply_layers(MODEL, layers, x_BTD, transformer.rope_tables(MODEL, position_BT), attend_fn)

    def loss(*args):
        return jnp.sum(forward(*args).astype(jnp.float32))

    fn = jax.grad(loss, argnums=(0, 1)) if with_gradient else forward
    return jax.jit(fn).lower(layers, here((R, T, MODEL.width), jnp.bfloat16), here((R, T), jnp.int32)).compile()


@pytest.mark.compilers
def test_a_layer_of_seven_billion(devices):
    device = devices[0]
    platform, implementation = device.platform, attention_of(MODEL, device)
    assert implementation == {"gpu": "cudnn", "tpu": "splash"}[platform]
    forward = compile_layer(device, implementation, with_gradient=False)
    gradient = compile_layer(device, implementation, with_gradient=True)
    assert kernels(forward, platform) == FORWARD[platform]
    assert kernels(gradient, platform) == FORWARD[platform] | BACKWARD[platform]
    plain = compile_layer(device, "xla", with_gradient=False)
    assert not kernels(plain, platform)
    assert has_scores(plain) and not has_scores(forward) and not has_scores(gradient)


def abstract_batch(mesh: Mesh, Z: int, Q: int, X: int, R: int, T: int) -> Batch:
    """Shapes of a micro-batch whose shards have Q shared prompts of X tokens and R rows of T."""
    shapes = {"prefix_token": (Z, Q, X), "prefix_length": (Z, Q), "prefix_of": (Z, R), "num": ()}
    ints = (*shapes, "token", "position", "segment")
    fields = {}
    for field in dataclasses.fields(Batch):
        if field.default is None:  # of other batches
            continue
        name = field.name.rpartition("_")[0]
        shape = shapes.get(name, (Z, R, T))
        dtype = jnp.int32 if name in ints else bool if name == "is_action" else jnp.float32
        spec = P(BATCH_AXES) if shape else P()
        fields[field.name] = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    return Batch(**fields)


@pytest.mark.compilers
def test_training_on_shared_prompts_on_a_mesh(devices):
    platform = devices[0].platform
    model = dataclasses.replace(MODEL, width=256, mlp_width=512, attention=attention_of(MODEL, devices[0]))
    mesh = Mesh(np.array(devices).reshape(1, 2, 4), TRAIN_AXES, axis_types=(AxisType.Auto,) * 3)
    params = jax.eval_shape(lambda: transformer.init_params(model, jax.random.key(0)))
    params = with_shardings(params, param_shardings(mesh, params))
    loss_and_grad = jax.value_and_grad(make_nll_loss(model, 0, mesh), has_aux=True)
    compiled = jax.jit(loss_and_grad).lower(params, abstract_batch(mesh, Z=2, Q=1, X=256, R=2, T=512)).compile()
    assert kernels(compiled, platform) == FORWARD[platform] | BACKWARD[platform] | PROMPT[platform]
    # Each device works on its own rows and heads: 7 of 28.
    queries = {"gpu": "bf16[2,512,7,128]", "tpu": "bf16[2,7,512,128]"}[platform]
    assert queries in compiled.as_text()
