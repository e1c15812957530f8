#!/usr/bin/env bash
# XLA's settings for NVIDIA GPUs, sourced by the launchers. What XLA_FLAGS held before stands last, and so wins.
# Accepted by jax 0.10.2 and 0.11.2; another jax may not know all of them, and aborts at the first that it does not
# know.

# An error instead of a slow run on the CPU where CUDA does not start. The CPU stays at hand for host memory.
export JAX_PLATFORMS=cuda,cpu
# Overlap of compute and communication. With jax 0.10.2 it gives a scanned FSDP step the same collectives as the flags
# below; they are written out so that what is overlapped does not depend on what a level means in another release.
export JAX_OPTIMIZATION_LEVEL=${JAX_OPTIMIZATION_LEVEL:-O1}
# The rest is for NCCL and CUDA libraries. Lower it when they run out of memory, not XLA.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.95}

flags=(
    # Collectives start early and end late, with compute in between.
    --xla_gpu_enable_latency_hiding_scheduler=true
    # FSDP: the next layer's parameters are gathered, and the last layer's gradients reduced, while a layer computes.
    # Loops over layers are unrolled by two, so that the two buffers need no copies.
    --xla_gpu_enable_pipelined_all_gather=true
    --xla_gpu_enable_pipelined_reduce_scatter=true
    --xla_gpu_enable_pipelined_all_reduce=true
    --xla_gpu_enable_while_loop_double_buffering=true
    # Few large transfers instead of many small ones: 1 GiB, and 128 MiB for gradients, which keep their memory for
    # longer.
    --xla_gpu_all_gather_combine_threshold_bytes=1073741824
    --xla_gpu_all_reduce_combine_threshold_bytes=1073741824
    --xla_gpu_reduce_scatter_combine_threshold_bytes=134217728
    # CUDA graphs: a decode step is many short kernels, whose launches would take longer than they do. Autotuning gives
    # some products to cublasLt, and one that is not in the list breaks a graph.
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL"
)
export XLA_FLAGS="${flags[*]} ${XLA_FLAGS:-}"
unset flags
