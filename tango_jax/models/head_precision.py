"""How the products of a float32 head are made, by `model.head_precision`, and on which devices that is possible."""

import jax
from jax import lax

from tango_jax.models.attention import capability_of

# How a head of float32 is multiplied. "highest": to all 24 bits; on GPUs without tensor cores, on TPUs in six passes.
# "bfloat16_x3": as high x high + high x low + low x high, where each number is the sum of two of bfloat16: 16 bits, by
# tensor cores or in three passes. CPUs multiply float32 to all its bits in either case.
HEAD_PRECISIONS = {"highest": lax.Precision.HIGHEST, "bfloat16_x3": lax.DotAlgorithmPreset.BF16_BF16_F32_X3}
LEAST_CAPABILITY = 8.0  # compute capability from which NVIDIA GPUs multiply bfloat16, and XLA splits float32 into it


def check_head_precision(precision: str, device: jax.Device) -> None:
    """Raises ValueError where XLA refuses a head's `head_precision` on the device."""
    capability = capability_of(device)
    if precision == "bfloat16_x3" and capability is not None and capability < LEAST_CAPABILITY:
        raise ValueError(f"head_precision={precision} needs an NVIDIA GPU of compute capability {LEAST_CAPABILITY} or "
                         f"more, and this one has {capability}: set model.head_precision=highest")
