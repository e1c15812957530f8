"""Decode steps compiled ahead of time for GPUs and TPUs that are not here, where their compilers are installed
(support/absent_devices.py).

The decode loop of a layer with the attention of Qwen2.5-7B: the kernel is in it, once for the prefix and once for the
suffix, or once for slots, and gets the caches as they lie. Nothing in the program makes another array of their size,
although the rows of slots write different columns. On a mesh each device has its own rows and heads.
"""
import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from support.absent_devices import absent_devices
from tango_jax.models import decode_layers, transformer
from tango_jax.models.decode_attention import decode_attention_of
from tango_jax.models.lora import LoraConfig
from tango_jax.models.transformer import ModelConfig
from tango_jax.sampling import decode, slots
from tango_jax.sampling.buckets import SamplerConfig, Shape
from tango_jax.sampling.decode import empty_state
from tango_jax.sampling.logits import sampling_params
from tango_jax.sampling.slots import empty_slots
from tango_jax.sharding.layouts import decode_shardings, with_shardings
from tango_jax.sharding.placement import DECODE_AXES

B, K, E, PREFIX, SUFFIX = 16, 4, 128, 512, 2048
MODEL = ModelConfig(
    vocab_size=512, width=256, num_layers=1, num_heads=28, num_kv_heads=K, head_dim=E, mlp_width=1024, qkv_bias=True,
    param_dtype="bfloat16", compute_dtype="bfloat16", head_dtype="bfloat16", decode_attention="auto",
)
KERNEL = {"cudnn": r'custom_call_target="__cudnn\$fmhaSoftmax"', "paged": r"custom-call\(.*paged_decode_attention"}
RESULT = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = \w+\[([\d,]+)\]\S* ([\w-]+)\(")
# What gives an array without making one, and the write of a column, or of a column of each row, in place.
IN_PLACE = ("parameter", "get-tuple-element", "bitcast", "dynamic-update-slice", "scatter")
FUSED_IN_PLACE = r"dynamic.update.slice|scatter"
ON_CHIP = "S(1)"  # a TPU's own memory, into which XLA brings ahead what is small enough


def compile_decode(model: ModelConfig, mesh: Mesh, rows: int = B, columns: int | None = None) -> str:
    """The text of the compiled loop, with slots of so many columns if these are given."""
    if columns:
        specs, empty_fn = slots.slot_specs(), functools.partial(empty_slots, model, SUFFIX, Shape(rows, columns))
        decode_fn = functools.partial(slots.decode_slots, model, (1,), mesh)
    else:
        specs, empty_fn = decode.state_specs(), functools.partial(empty_state, model, SUFFIX, rows, PREFIX, SUFFIX)
        decode_fn = functools.partial(decode.decode, model, (1,), mesh=mesh)
    places, state = decode.shardings_of(mesh, specs), jax.eval_shape(empty_fn)
    state = jax.tree.map(
        lambda place, part: jax.tree.map(lambda leaf: leaf.update(sharding=place), part), places, state,
        is_leaf=lambda node: isinstance(node, NamedSharding),
    )
    params = jax.eval_shape(lambda: transformer.init_weights(model, jax.random.key(0)))
    weights = jax.eval_shape(functools.partial(decode_layers.split_layers, model, mesh.shape["tensor"] == 1), params)
    weights = with_shardings(weights, decode_shardings(mesh, weights))
    copied = NamedSharding(mesh, P())
    sampling, least = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), np.asarray(leaf).dtype, sharding=copied),
        (sampling_params(1.0), np.int32(0)),
    )
    fn = jax.jit(decode_fn, donate_argnums=1, out_shardings=places)
    return fn.lower(weights, state, sampling, least).compile().as_text()


def made_arrays(text: str, size: int) -> list[str]:
    """Instructions that make an array of at least so many numbers; no weight has as many."""
    found = []
    for line in text.splitlines():
        if (match := RESULT.match(line)) and np.prod([int(n) for n in match[2].split(",")]) >= size:
            is_write = match[3] == "fusion" and re.search(FUSED_IN_PLACE, match[1])
            is_write = is_write or "calls=%bitcast_fusion" in line
            if match[3] not in IN_PLACE and not is_write and ON_CHIP not in line.split(" = ")[1].split(" ")[0]:
                found.append(line.strip()[:200])
    return found


@pytest.mark.compilers
@pytest.mark.parametrize("target, wanted, rows, tensor", [
    ("a100-80gb", "cudnn", 1, 1),
    ("h100", "cudnn", 2, 2),
    ("tpu-v5p", "paged", 1, 1),
    ("tpu-v5p", "paged", 2, 2),
])
def test_the_cache_is_read_where_it_lies(target, wanted, rows, tensor):
    devices = absent_devices(target)
    assert decode_attention_of(MODEL, (PREFIX, SUFFIX), devices[0]) == wanted
    mesh = Mesh(np.array(devices[: rows * tensor]).reshape(rows, tensor), DECODE_AXES)
    text = compile_decode(dataclasses.replace(MODEL, decode_attention=wanted), mesh)
    calls = [line for line in text.splitlines() if re.search(KERNEL[wanted], line)]
    assert len(calls) == 2  # prefix and suffix
    assert not made_arrays(text, B // rows * K // tensor * PREFIX * E)
    for length in (PREFIX, SUFFIX):  # each device's own heads of its own rows
        shape = {"cudnn": f"bf16[{B * K // rows // tensor},{length},1,{E}]",
                 "paged": f"bf16[1,{B * K // rows // tensor * length // 256},256,{E}]"}[wanted]
        assert sum(shape in line for line in calls) == 1, (shape, calls)


@pytest.mark.compilers
@pytest.mark.parametrize("target, attention, calls", [
    ("h100", "xla", 0), ("h100", "cudnn", 1), ("tpu-v5p", "xla", 0), ("tpu-v5p", "paged", 1),
])
def test_rows_write_columns_of_their_own_in_place(target, attention, calls):
    columns = SamplerConfig((2560,), (512, 1024, 1536), (B,), cache_tokens=4096 * B).columns[1]
    devices = absent_devices(target)
    model = dataclasses.replace(MODEL, decode_attention=attention)
    assert attention == "xla" or decode_attention_of(MODEL, (columns,), devices[0]) == attention
    text = compile_decode(model, Mesh(np.array(devices[:1]).reshape(1, 1), DECODE_AXES), columns=columns)
    kernels = [line for line in text.splitlines() if re.search("|".join(KERNEL.values()), line)]
    assert len(kernels) == calls
    assert not made_arrays(text, B * K * columns * E)


@pytest.mark.compilers
def test_a_frozen_matrix_is_not_copied_beside_its_adapter():
    """XLA for GPUs makes one product of x @ W and x @ A by joining A to a copy of W, in every step."""
    mesh = Mesh(np.array(absent_devices("h100")[:1]).reshape(1, 1), DECODE_AXES)
    sizes = {"width": 3584, "mlp_width": 18944, "lora": LoraConfig(rank=32, alpha=32.0)}
    text = compile_decode(dataclasses.replace(MODEL, decode_attention="xla", **sizes), mesh, rows=64)
    made = made_arrays(text, sizes["width"] * sizes["mlp_width"])
    assert not [line for line in made if re.search(r"= bf16\[(3584|18944),", line)]
