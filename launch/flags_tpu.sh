#!/usr/bin/env bash
# XLA's settings for TPUs, sourced by the launchers. What LIBTPU_INIT_ARGS held before stands last, and so wins. TPU
# flags belong there and not in XLA_FLAGS, whose parser knows none of them. Accepted by libtpu 0.0.42 (jax 0.10.2) and
# 0.0.52.
#
# The list is short because libtpu's defaults are good. Lists found elsewhere often hold
# --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true: libtpu 0.0.52 refuses to compile with it on v5p, for
# fear of wrong results.

# An error instead of a slow run on the CPU where the TPU does not start. The CPU stays at hand for host memory.
export JAX_PLATFORMS=tpu,cpu

flags=(
    # Gradients that are summed over the data axis are sent while others are still computed, whatever their sizes.
    --xla_tpu_enable_data_parallel_all_reduce_opt=true
    --xla_tpu_data_parallel_opt_different_sized_ops=true
)
export LIBTPU_INIT_ARGS="${flags[*]} ${LIBTPU_INIT_ARGS:-}"
unset flags
