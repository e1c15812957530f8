"""What a plan counts where stage 1 trains all parameters and reinforcement learning trains adapters."""

import gc

import jax
import numpy as np
import pytest

from support.paths import ROOT
from support.policies import policies_of
from support.tiny_checkpoints import save_step
from tango_jax.cli.command_line import load_config
from tango_jax.config import ROLES
from tango_jax.loop import fine_tuning, stage_one
from tango_jax.loop.init_from import sft_directory
from tango_jax.planning.assumed_lengths import Even
from tango_jax.planning.estimates import estimated_programs
from tango_jax.planning.job import device_bytes, sized_job
from tango_jax.planning.memory import phases, resident
from tango_jax.planning.sources import plan_source
from tango_jax.planning.targets import TARGETS, machine_of
from tango_jax.planning.times import stage_one_step_seconds
from tango_jax.runtime import hosts
from tango_jax.runtime.console import Console
from tango_jax.tasks.registry import make_task
from tango_jax.tracking.run_config import save_config


def both(*settings: str) -> list[str]:
    return [f"{role}.{setting}" for role in ROLES for setting in settings]


def job_of(*settings: str, devices: int = 1):
    config = load_config(str(ROOT / "configs/tiny.py"), [*both("model.lora.rank=4", "mesh.fsdp=1"), *settings])
    models = {role: plan_source(config, role).model_config for role in ROLES}
    return sized_job(config, models, machine_of("cpu", devices))


def write_stage_one(workdir, role: str, is_full: bool, params: dict) -> None:
    directory = sft_directory(workdir, role) / "checkpoints"
    save_step(directory, 1, {"params": params}, {"is_full": is_full, "heldout_loss": 0.0})


@pytest.mark.parametrize("one_policy", ["verifier.adapter=generator", "arm=self_verify"])
def test_one_policys_second_stage_one_holds_the_base(one_policy):
    job = job_of(*both("checkpoint=Qwen/Qwen2.5-0.5B"), one_policy)
    base = device_bytes(job.policies["verifier"].base)
    found = {phase.name: phase.parameters for phase in phases(job, estimated_programs(job, "cpu"))}
    assert found["verifier/sft"] == found["generator/sft"] > base > 0


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
        write_stage_one(tmp_path, role, is_full, {"weight": np.ones(1)})
    settings = [setting.replace("RUN", str(tmp_path)) for setting in settings]
    job = job_of(*both("checkpoint=Qwen/Qwen2.5-0.5B", "loss.kl_coef=0"), *settings)
    generator, verifier = job.policies.values()
    adapters = sum(device_bytes(policy.state.params) for policy in (generator, verifier))
    assert resident(job, "").parameters == adapters + bases * device_bytes(generator.base)


@pytest.mark.long
@pytest.mark.parametrize("settings", [
    [], ["verifier.sft.start=generator"], ["verifier.adapter=generator"],
    ["generator.init_from=RUN", "generator.sft.full=False", "generator.sft.steps=0"],
])
def test_the_verifiers_stage_one_holds_no_more_than_is_planned(tmp_path, monkeypatch, settings):
    """All parameters of the generator are gone once they are frozen and, where the verifier starts from them, copied.
    An update, which is left out here, adds gradients and activations."""
    job = job_of(*both("model.width=64", "model.lora.base_dtype=bfloat16", "sft.full=True", "row_buckets=(8,)"),
                 *(setting.replace("RUN", str(tmp_path)) for setting in settings))
    policies, held = policies_of(job.config), {}
    if job.config.generator.init_from:
        shapes = policies["generator"].abstract_full_params()
        params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)
        write_stage_one(tmp_path, "generator", True, params)
    task = make_task(job.config, {role: policy.tokenizer for role, policy in policies.items()})

    def held_bytes():
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    def measure(run, state, base, heldout, done, *rest):
        held[run.policy.role] = held_bytes() - before
        return state, done

    monkeypatch.setattr(fine_tuning, "_make_updates", measure)
    before = held_bytes()
    stage_one.run_stage_one(policies, job.config, task, tmp_path, Console(enabled=False), hosts.Preemption(False))
    planned = {phase.name: phase.parameters + phase.optimizer for phase in phases(job, estimated_programs(job, "cpu"))}
    assert held == pytest.approx({role: planned[f"{role}/sft"] for role in job.stage_one}, rel=0.01)


def test_all_parameters_are_planned_where_a_run_of_adapters_goes_on_without_them(tmp_path):
    settings = [*both("model.lora.rank=4"), "seed=1"]
    save_config(load_config("tiny", [*settings, *both("sft.full=True")]), tmp_path / "config.json")
    save_step(tmp_path / "checkpoints", 1, {"generator": {"params": {"weight": np.ones(1)}}}, {})
    config = load_config("tiny", [*both(f"checkpoint={tmp_path}", "sft.steps=0")])
    assert plan_source(config, "generator").model_config.lora is None


@pytest.mark.parametrize("devices", [1, 8])
def test_a_stage_one_that_trains_all_parameters_is_planned_as_without_adapters(devices):
    sizes = both("mesh.fsdp=-1", "model.width=512", "model.compute_dtype=bfloat16", "sft.full=True")
    job, plain = job_of(*sizes, devices=devices), job_of(*sizes, *both("model.lora.rank=0"), devices=devices)
    programs, expected = (estimated_programs(one, "gpu") for one in (job, plain))
    for role in ROLES:
        assert programs[f"{role}/sft"] == expected[f"{role}/sft"]
        seconds, without = (stage_one_step_seconds(one, told, TARGETS["h100"], role, Even(0.5))
                            for one, told in ((job, programs), (plain, expected)))
        assert seconds == pytest.approx(without)
        # And adapters on a base as adapters.
        assert programs[f"{role}/update"] != expected[f"{role}/update"]
