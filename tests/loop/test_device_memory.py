"""A device whose memory is full: the error says in which phase, how full it is, and what to lower where."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from support.paths import CONFIGS
from support.policies import policies_of
from support.update_cases import LENGTHS, RESPONSES, make_data
from tango_jax.cli.command_line import load_config
from tango_jax.loop import run, turn
from tango_jax.loop.breakdown import explained, names_memory
from tango_jax.loop.turn import RunContext, respond, update_policy
from tango_jax.records import Responses, Rollout, TrainState
from tango_jax.runtime.console import Console
from tango_jax.runtime.failures import OutOfMemory
from tango_jax.runtime.rng import step_key
from tango_jax.runtime.timers import PhaseTimer

FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12884901888 bytes."


def no_memory(*arguments, **options):
    raise jax.errors.JaxRuntimeError(f"{FULL}\nBufferAssignment OOM Debugging.")


@pytest.fixture(scope="module")
def policies():
    return policies_of(load_config(str(CONFIGS / "tiny.py")))


@pytest.fixture
def policy(policies):
    return policies["generator"]


@pytest.fixture(autouse=True)
def full_device(monkeypatch):
    sizes = [(30.0, 78.5), (61.0, 78.5)]
    stats = [{"bytes_in_use": int(used * 2**30), "bytes_limit": int(limit * 2**30)} for used, limit in sizes]
    devices = [types.SimpleNamespace(device_kind="NVIDIA H100", memory_stats=lambda own=own: own) for own in stats]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)


def message_of(work_fn) -> str:
    with pytest.raises(OutOfMemory) as found, explained("turn 5", None, "runs/mine", 4):
        work_fn()
    return str(found.value)


def sample(policy, monkeypatch, **changes) -> str:
    sampler = types.SimpleNamespace(**{"layout": lambda weights: weights, "sample": no_memory} | changes)
    policy = dataclasses.replace(policy, sampler=sampler)
    monkeypatch.setattr(turn, "build_prompts", lambda policy, prompt, parents: ([[30]] * len(parents), [False]))
    context = RunContext(load_config("tiny"), None, {"generator": policy}, {}, PhaseTimer())
    states = {"generator": types.SimpleNamespace(weights=np.ones(1))}
    return message_of(lambda: respond(context, states, "generator", ["a problem"], 1, step_key(0)))


def test_sampling(policy, monkeypatch):
    message = sample(policy, monkeypatch)
    start = "turn 5: sampling from the generator ran out of device memory (NVIDIA H100: 61.0 of 78.5 GiB in use)"
    assert message.startswith(f"{start}: {FULL}") and "\n" not in message
    assert "Start a new --workdir with: generator.row_buckets=" in message and "rows_per_micro_batch" not in message
    assert "`python -m tango_jax.plan` shows" in message
    # A mesh may change in mid run.
    resumable, new = message.partition("Resume this run with: ")[2].split("Start a new --workdir with: ")
    assert "generator.mesh.offload=True and verifier.mesh.offload=True" in resumable and "mesh." not in new
    message = sample(policy, monkeypatch, layout=no_memory)
    assert message.startswith("turn 5: the layout of the generator's weights ran out of device memory")


def test_update_and_scores(policy, monkeypatch):
    def update(*settings: str) -> str:
        data = make_data()
        rollout = Rollout(tuple(RESPONSES), tuple(data["sampler"][b, :size] for b, size in enumerate(LENGTHS)),
                          np.zeros(6, bool), 6, 36)
        learner = Responses("generator", (), [[3], [4], [5]], 2, rollout, [None] * 6, {})
        whole, references = load_config("tiny", settings), {"generator": dict}
        context = RunContext(whole, None, {"generator": failing}, references, PhaseTimer())
        return message_of(lambda: update_policy(context, TrainState({}, (), np.int32(0)), learner, data["adv"]))

    config = policy.config.copy_and_resolve_references()
    config.loss.kl_coef = 0.0
    failing = dataclasses.replace(policy, config=config, update=no_memory)
    message = update()
    assert message.startswith("turn 5: the update of the generator ran out of device memory (NVIDIA H100: 61.0 of ")
    assert f"generator.rows_per_micro_batch={config.rows_per_micro_batch // 2}: half the activations" in message
    assert "row_buckets" not in message and "verifier.model" not in message
    assert "generator.model.remat=full and verifier.model.remat=full: " in update("arm=self_verify")
    config.loss.kl_coef = 0.1
    failing = dataclasses.replace(failing, score=no_memory)
    assert update().startswith("turn 5: scoring for the update of the generator ran out of device memory")


@pytest.mark.parametrize("arm, is_advised", [("tango", True), ("scored", False)])
def test_a_verifier_that_is_read_shares_no_prompt_in_an_update(policies, arm, is_advised):
    verifier = policies["verifier"]
    assert verifier.config.prompts_per_micro_batch > 1

    def update():
        with names_memory("the update of the verifier", ["update"], load_config("tiny", [f"arm={arm}"]), verifier):
            no_memory()

    assert ("verifier.prompts_per_micro_batch=" in message_of(update)) == is_advised


def test_the_start_of_a_run(policies, monkeypatch, tmp_path):
    config = load_config(str(CONFIGS / "tiny.py"), ["generator.sft.steps=0", "verifier.sft.steps=0"])
    monkeypatch.setattr(run, "run_stage_one", no_memory)
    with pytest.raises(OutOfMemory) as found:
        run.run_or_resume(config, tmp_path / "run", Console(enabled=False), policies)
    message = str(found.value)
    assert message.startswith("setting up the policies ran out of device memory (NVIDIA H100")
    assert "generator.model.lora.rank=32" in message and "micro_batch" not in message


def test_an_error_of_another_kind_is_left_alone(policy, monkeypatch):
    def fail(*arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: a driver fails")

    with pytest.raises(jax.errors.JaxRuntimeError, match="^INTERNAL: a driver fails"):
        sample(policy, monkeypatch, sample=fail)
