#!/usr/bin/env bash
# XLA's settings for CPUs, sourced by the launchers. What XLA_FLAGS held before stands last, and so wins.
# LOCAL_DEVICES=4 gives each process that many virtual devices, to try out meshes that need more than this machine has.

export JAX_PLATFORMS=cpu
export XLA_FLAGS="--xla_force_host_platform_device_count=${LOCAL_DEVICES:-1} ${XLA_FLAGS:-}"
