"""How the products of a float32 head are made (`model.head_precision`), and on which devices."""

import jax
from jax import lax

from tango_jax.models.attention import capability_of

# "highest": all 24 bits; on GPUs without tensor cores, on TPUs in six passes. "bfloat16_x3": 16 bits, with each number
# a sum of two bfloat16, by tensor cores or in three passes. CPUs use 24 bits in either case.
HEAD_PRECISIONS = {"highest": lax.Precision.HIGHEST, "bfloat16_x3": lax.DotAlgorithmPreset.BF16_BF16_F32_X3}
LEAST_CAPABILITY = 8.0  # compute capability from which NVIDIA GPUs multiply bfloat16, and XLA splits float32 into it


def check_head_precision(precision: str, device: jax.Device) -> None:
    """ValueError where XLA refuses `head_precision` on the device."""
    capability = capability_of(device)
    if precision == "bfloat16_x3" and capability is not None and capability < LEAST_CAPABILITY:
        raise ValueError(f"head_precision={precision} needs an NVIDIA GPU of compute capability {LEAST_CAPABILITY} or "
                         f"more, and this one has {capability}: set model.head_precision=highest")
