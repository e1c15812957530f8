"""The machines that a run can be planned for. Without the target's compiler, virtual CPU devices stand in."""

import dataclasses
import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental import topologies

from tango_jax.planning.machines import GIB, Machine
from tango_jax.planning.shares import Reached, Shares, reached
from tango_jax.runtime.checks import cut, shortened
from tango_jax.runtime.machine import host_memory, machine_rates


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of device, `per_host` of them in a machine. Rates are the data sheet's: dense, one direction."""

    name: str
    platform: str  # gpu, tpu or cpu
    memory: float  # bytes that programs may use
    flops: float  # per second, products of bfloat16
    flops_float32: float  # per second, float32 as jax multiplies by default (TF32 on GPUs, one bfloat16 pass on TPUs)
    flops_highest: float  # per second, with Precision.HIGHEST (no tensor cores on GPUs, six bfloat16 passes on TPUs)
    read: float  # bytes per second from memory
    link: float  # bytes per second that a device receives within its host (TPUs: its slice)
    network: float  # bytes per second that a device receives from other hosts
    host: float  # bytes per second between a device and its host's memory
    per_host: int
    compilers: tuple[str, ...] = ()  # modules that compile for it; none: always installed
    shapes: tuple[tuple[int, str], ...] = ()  # TPU slices: number of chips and their arrangement
    largest_host: int = 0  # chips of the largest TPU slice that is one machine
    product: str = ""  # TPUs: Google's name of a slice is this and a number
    cores: int = 1  # of a chip
    counted: int = 1  # what a chip adds to the number in the name of a slice
    capability: float | None = None  # compute capability of an NVIDIA GPU
    kinds: tuple[str, ...] = ()  # values of `jax.Device.device_kind`
    reached: Reached = Reached()

    def slice_name(self, chips: int) -> str:
        """Google's name of a slice with this many chips; empty for other devices."""
        return f"{self.product}-{chips * self.counted}" if self.product else ""

    def with_shares(self, shares: Shares) -> "Target":
        return dataclasses.replace(self, reached=self.reached._replace(likely=shares))


# Planning for more takes hours: XLA compiles for every device.
MOST_DEVICES, MOST_CPU_DEVICES = 16_384, 256
_XLA_SHARE = 0.95
_GPU = {"platform": "gpu", "per_host": 8, "compilers": ("jax_cuda12_plugin", "nvidia.cudnn")}
_SLICES_OF_256 = ((1, "1x1"), (4, "2x2"), (8, "2x4"), (16, "4x4"), (32, "4x8"), (64, "8x8"), (128, "8x16"),
                  (256, "16x16"))
TARGETS = {
    target.name: target
    for target in (
        # NVIDIA's data sheets of the SXM modules, which sum both directions of NVLink and PCIe. Networks as in DGX A100
        # and H100: 200 and 400 Gb/s of InfiniBand for each GPU.
        Target("a100-80gb", memory=_XLA_SHARE * 85.10e9, flops=312e12, flops_float32=156e12,
               flops_highest=19.5e12, read=2.04e12, link=300e9, network=25e9, host=32e9, capability=8.0,
               kinds=("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), **_GPU),
        Target("h100", memory=_XLA_SHARE * 84.94e9, flops=989e12, flops_float32=494e12,
               flops_highest=67e12, read=3.35e12, link=450e9, network=50e9, host=64e9, capability=9.0,
               kinds=("NVIDIA H100 80GB HBM3",), **_GPU),
        Target("h200", memory=_XLA_SHARE * 150.1e9, flops=989e12, flops_float32=494e12,
               flops_highest=67e12, read=4.8e12, link=450e9, network=50e9, host=64e9, capability=9.0,
               kinds=("NVIDIA H200",), **_GPU),
        Target("a100-40gb", memory=_XLA_SHARE * 42.3e9, flops=312e12, flops_float32=156e12,
               flops_highest=19.5e12, read=1.555e12, link=300e9, network=25e9, host=32e9, capability=8.0,
               kinds=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), **_GPU),
        # NVIDIA's data sheets of cards without NVLink: PCIe Gen4 to the others. Dense products of bfloat16, summed in
        # float32; networks of 100 Gb/s shared by eight.
        Target("l4", memory=_XLA_SHARE * 23.58e9, flops=121e12, flops_float32=60e12,
               flops_highest=30.3e12, read=0.3e12, link=32e9, network=1.5e9, host=32e9, capability=8.9,
               kinds=("NVIDIA L4",), **_GPU),
        Target("a10g", memory=_XLA_SHARE * 23.61e9, flops=70e12, flops_float32=35e12,
               flops_highest=31.2e12, read=0.6e12, link=32e9, network=1.5e9, host=32e9, capability=8.6,
               kinds=("NVIDIA A10G",), **_GPU),
        Target("rtx-4090", memory=_XLA_SHARE * 25.39e9, flops=165.2e12, flops_float32=82.6e12,
               flops_highest=82.6e12, read=1.008e12, link=32e9, network=1.5e9, host=32e9, capability=8.9,
               kinds=("NVIDIA GeForce RTX 4090",), **_GPU),
        # A ring over one axis of the torus, both directions; memory by libtpu. A chip reaches its host as a TPU v4 does
        # (jax-ml.github.io/scaling-book/tpus). Slices: docs.cloud.google.com/tpu/docs/v5p and /v5e; a v5e of one chip
        # and one of eight are whole machines.
        Target("tpu-v5p", platform="tpu", memory=95.74 * GIB, flops=459e12, flops_float32=459e12,
               flops_highest=76.5e12, read=2.77e12, link=180e9, network=180e9, host=16e9, per_host=4,
               compilers=("libtpu",), largest_host=4, kinds=("TPU v5p", "TPU v5"), product="v5p", cores=2,
               counted=2,
               shapes=((4, "2x2x1"), (8, "2x2x2"), (16, "2x2x4"), (32, "2x4x4"), (64, "4x4x4"), (128, "4x4x8"),
                       (256, "4x8x8"), (512, "8x8x8"), (1024, "8x8x16"), (2048, "8x16x16"), (4096, "16x16x16"),
                       (6144, "16x16x24"))),
        Target("tpu-v5e", platform="tpu", memory=15.75 * GIB, flops=197e12, flops_float32=197e12,
               flops_highest=32.8e12, read=0.82e12, link=90e9, network=90e9, host=16e9, per_host=4,
               compilers=("libtpu",), largest_host=8, kinds=("TPU v5e", "TPU v5 lite"), product="v5litepod",
               shapes=_SLICES_OF_256),
        # docs.cloud.google.com/tpu/docs/v6e; links as in jax-ml.github.io/scaling-book/tpus.
        Target("tpu-v6e", platform="tpu", memory=31.25 * GIB, flops=918e12, flops_float32=918e12,
               flops_highest=153e12, read=1.64e12, link=180e9, network=180e9, host=16e9, per_host=4,
               compilers=("libtpu",), largest_host=8, kinds=("TPU v6e", "TPU v6 lite"), product="v6e",
               shapes=_SLICES_OF_256),
    )
}
_TPU_NAMES = {"tpu-v5p": ("v5:", "megacore"), "tpu-v5e": ("v5e:", "default"), "tpu-v6e": ("v6e:", "default")}
GPU_FLAGS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    "xla_gpu_enable_while_loop_double_buffering": True,
    "xla_gpu_all_gather_combine_threshold_bytes": 1073741824,
    "xla_gpu_all_reduce_combine_threshold_bytes": 1073741824,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 134217728,
}
TPU_FLAGS = ("--xla_tpu_enable_data_parallel_all_reduce_opt=true",
             "--xla_tpu_data_parallel_opt_different_sized_ops=true")
GPU_OPTIMIZATION_LEVEL = "O1"  # as launch/flags_gpu.sh sets it; for TPUs the launchers set none


class Devices(NamedTuple):
    devices: list
    is_target: bool  # False: virtual CPU devices stand in for it
    compiler_options: dict


def parse_target(text: str) -> tuple[str, int]:
    """`a100-80gb:32` -> name and number of devices, by default those of one host. Raises ValueError."""
    name, _, count = text.partition(":")
    known = (*TARGETS, "cpu")
    if name not in known or (count and (not re.fullmatch(r"[0-9]{1,9}", count) or int(count) < 1)):
        raise ValueError(f"--target={cut(text)}: choose one of {', '.join(known)}, with a number of devices, 1 "
                         "or more, after a colon")
    most = MOST_CPU_DEVICES if name == "cpu" else MOST_DEVICES
    if count and int(count) > most:
        raise ValueError(f"--target={text}: a plan has at most {most} devices of {name}; lower the number")
    if name == "cpu":
        return name, int(count or 1)
    target = TARGETS[name]
    number = int(count or target.per_host)
    sizes = dict(target.shapes)
    if sizes and number not in sizes:
        raise ValueError(f"--target={text}: {name} comes in slices of {', '.join(map(str, sizes))} chips")
    if not sizes and number > target.per_host and number % target.per_host:
        raise ValueError(f"--target={text}: a machine has {target.per_host} devices, and {number} is not a multiple: "
                         "choose one")
    return name, number


def machine_of(name: str, count: int, per_process: int | None = None) -> Machine:
    """What settings are fitted to on `count` devices, `per_process` in each process (None: all of a host). No device is
    opened. Raises ValueError."""
    target = None if name == "cpu" else open_target(name, count)
    of_host = min(target.per_host, count) if target else count
    local = of_host if per_process is None else per_process
    if local < 1 or count % local or local > of_host:
        raise ValueError(f"--per-process={shortened(per_process)}: choose a number of devices that divides {count} and "
                         f"is at most the {of_host} of a host")
    if target is None:
        return Machine("cpu", count, host_memory() // count, local=local)
    return Machine(target.platform, count, int(target.memory), target.capability, local)


def reserve_devices(name: str, count: int) -> None:
    """Set how many CPU devices stand in for the target. Call it before a config file is read, which may open them."""
    if name == "cpu" or missing_compilers(TARGETS[name]):
        _set_cpu_devices(count)


def open_target(name: str, count: int) -> Target:
    """The target with the shares that `count` devices reach. Rates of cpu are measured here."""
    target = cpu_target(count) if name == "cpu" else TARGETS[name]
    if count <= target.largest_host:
        target = dataclasses.replace(target, per_host=count)
    return dataclasses.replace(target, reached=reached(name, max(1, count // target.per_host)))


def target_name(kind: str) -> str | None:
    return next((target.name for target in TARGETS.values() if kind in target.kinds), None)


def cpu_target(count: int) -> Target:
    memory = host_memory() / count
    cpu_devices(count)  # before anything is measured, or there would be one
    rates = machine_rates()
    flops, read = rates["matmul_gflops"] * 1e9 / count, rates["read_gb_s"] * 1e9 / count
    return Target("cpu", "cpu", memory, flops, flops, flops, read, link=read / 2, network=read / 2, host=read / 2,
                  per_host=count)


def missing_compilers(target: Target) -> list[str]:
    return [name for name in target.compilers if not _is_installed(name)]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing, too
        return False


def open_devices(target: Target, count: int) -> Devices:
    """Devices to compile for. Call it before anything else touches a device."""
    jax.config.update("jax_platforms", "cpu")  # opens no accelerator of this machine
    if target.platform == "cpu" or missing_compilers(target):
        return Devices(cpu_devices(count), target.platform == "cpu", {})
    if target.platform == "gpu":
        jax.config.update("jax_optimization_level", GPU_OPTIMIZATION_LEVEL)
        description = (Path(__file__).parent / "gpu_targets" / f"{target.name}.txtpb").read_text()
        hosts = max(1, count // target.per_host)
        topology = topologies.get_topology_desc(
            topology_name="", platform="cuda", target_config=description, topology=f"1x{hosts}x{count // hosts}"
        )
        _answer_jax_for(target)
        return Devices(list(topology.devices), True, GPU_FLAGS)
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # no server to ask what slice this is
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # no chip is opened: others may compile at the same time
    os.environ["LIBTPU_INIT_ARGS"] = " ".join((*TPU_FLAGS, os.environ.get("LIBTPU_INIT_ARGS", "")))
    prefix, chip = _TPU_NAMES[target.name]
    shape = dict(target.shapes)[count]
    host = (*map(int, shape.split("x")), 1)[:3] if count <= target.largest_host else (2, 2, 1)
    topology = topologies.get_topology_desc(
        topology_name=prefix + shape, platform="tpu", chip_config_name=chip, chips_per_host_bounds=host, num_slices=1
    )
    return Devices(list(topology.devices), True, {})


def _answer_jax_for(target: Target) -> None:
    """jax asks a local GPU which heads cuDNN takes; without one it refuses heads of 256 numbers, which an H100 runs."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    cudnn.check_compute_capability = lambda least: target.capability >= float(least)


def cpu_devices(count: int) -> list:
    """Virtual CPU devices. Raises ValueError where this process has started with fewer."""
    _set_cpu_devices(count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(f"this process has {len(devices)} CPU devices, and the plan needs {count}: start a new one")
    return devices[:count]


def _set_cpu_devices(count: int) -> None:
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # the backend runs already, with fewer
        pass
