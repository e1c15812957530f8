"""The output projection compiled ahead of time for a GPU and a TPU that are not here (support/absent_devices.py)."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from support.absent_devices import absent_devices
from tango_jax.models.head_precision import HEAD_PRECISIONS
from tango_jax.models.transformer import ModelConfig, logits_from_hidden

D, V, T = 3584, 32768, 1024
# How a compiled program names three products of bfloat16.
THREE_PRODUCTS = {"gpu": r"\bdot\(.*algorithm=dot_bf16_bf16_f32_x3", "tpu": r"operand_precision={high,high}"}


@pytest.mark.compilers
@pytest.mark.parametrize("target", ["a100-80gb", "tpu-v5p"])
def test_three_products_are_made_inside_a_kernel(target):
    """Forward and both gradients; the two halves of the matrices are never arrays in memory."""
    [device, *_] = absent_devices(target)
    place = SingleDeviceSharding(device)

    def compiled(precision: str):
        model = ModelConfig(V, D, 1, 28, 4, 128, 64, compute_dtype="bfloat16", head_precision=precision)

        def loss_fn(head_DV, x_BTD):
            scale_D = jnp.ones(D, jnp.bfloat16)
            return jax.nn.logsumexp(logits_from_hidden(model, scale_D, head_DV, x_BTD), axis=-1).mean()

        shapes = ((D, V), jnp.float32), ((1, T, D), jnp.bfloat16)
        arguments = (jax.ShapeDtypeStruct(*shape, sharding=place) for shape in shapes)
        return jax.jit(jax.grad(loss_fn, (0, 1))).lower(*arguments).compile()

    found = {precision: compiled(precision) for precision in HEAD_PRECISIONS}
    products = {precision: len(re.findall(THREE_PRODUCTS[device.platform], program.as_text()))
                for precision, program in found.items()}
    assert products == {"highest": 0, "bfloat16_x3": 3}
    exact, split = (found[precision].memory_analysis().temp_size_in_bytes for precision in HEAD_PRECISIONS)
    assert split < 1.01 * exact
