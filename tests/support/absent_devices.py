"""Devices that are not here, for which programs can be compiled where their compiler is installed.

    pip install jax-cuda12-plugin==VERSION jax-cuda12-pjrt==VERSION nvidia-cudnn-cu12    # VERSION is that of jax
    pip install libtpu
"""

import pytest
from jax.experimental import topologies

from support.paths import ROOT
from tango_jax.planning.targets import TARGETS, missing_compilers


def absent_devices(name: str) -> list:
    """Eight devices of a planner's target, a GPU or a TPU v5p; skips the test without their compiler."""
    target = TARGETS[name]
    if missing := missing_compilers(target):
        pytest.skip(f"needs {', '.join(missing)} (CPU hosts too)")
    if target.platform == "gpu":
        text = (ROOT / f"tango_jax/planning/gpu_targets/{name}.txtpb").read_text()
        return topologies.get_topology_desc(
            topology_name="", platform="cuda", target_config=text, topology="1x1x8"
        ).devices
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")  # there is no server to ask what slice this is
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is opened: others may compile at the same time
        return topologies.get_topology_desc(
            topology_name="v5:2x2x2", platform="tpu", chip_config_name="megacore", chips_per_host_bounds=(2, 2, 1),
            num_slices=1,
        ).devices
