"""What a plan counts where stage 1 trains all parameters and reinforcement learning trains adapters."""

import numpy as np
import pytest

from support.paths import ROOT
from tango_jax.cli.command_line import load_config
from tango_jax.config import ROLES
from tango_jax.loop.init_from import sft_directory
from tango_jax.planning.job import device_bytes, sized_job
from tango_jax.planning.memory import resident
from tango_jax.planning.sources import plan_source
from tango_jax.planning.targets import machine_of
from tango_jax.runtime.checkpoint import Checkpointer


def both(*settings: str) -> list[str]:
    return [f"{role}.{setting}" for role in ROLES for setting in settings]


def job_of(*settings: str, devices: int = 1):
    config = load_config(str(ROOT / "configs/tiny.py"), [*both("model.lora.rank=4", "mesh.fsdp=-1"), *settings])
    models = {role: plan_source(config, role).model_config for role in ROLES}
    return sized_job(config, models, machine_of("cpu", devices))


def write_stage_one(workdir, role: str, is_full: bool) -> None:
    state, directory = {"params": {"weight": np.ones(1)}}, sft_directory(workdir, role) / "checkpoints"
    Checkpointer(directory).save(1, state, {"is_full": is_full})


@pytest.mark.parametrize("settings, held, bases", [
    (both("sft.full=False"), {}, 1),
    (both("sft.full=True"), {}, 2),
    (["verifier.sft.full=True"], {}, 2),
    (both("sft.full=True", "sft.steps=0"), {}, 1),  # without a stage 1 the checkpoint is the base
    (both("init_from=RUN"), {"generator": True, "verifier": True}, 2),
    (both("init_from=RUN"), {"generator": True, "verifier": False}, 2),
    (both("init_from=RUN"), {"generator": False, "verifier": False}, 1),
    (both("init_from=RUN", "sft.full=True"), {"generator": False, "verifier": False}, 1),
    (["verifier.init_from=RUN"], {"verifier": True}, 2),
    (both("init_from=RUN"), {}, 2),  # a run that is not on this machine
])
def test_a_base_is_counted_once_unless_a_stage_one_trained_all_parameters(tmp_path, settings, held, bases):
    for role, is_full in held.items():
        write_stage_one(tmp_path, role, is_full)
    settings = [setting.replace("RUN", str(tmp_path)) for setting in settings]
    job = job_of(*both("checkpoint=Qwen/Qwen2.5-0.5B", "loss.kl_coef=0"), *settings)
    generator, verifier = job.policies.values()
    adapters = sum(device_bytes(policy.state.params) for policy in (generator, verifier))
    assert resident(job, "").parameters == adapters + bases * device_bytes(generator.base)
