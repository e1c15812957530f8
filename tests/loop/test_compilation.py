"""What is compiled ahead of a run: what its arm samples with and trains, and no more."""

import dataclasses

import jax
import numpy as np
import pytest

from support.paths import CONFIGS
from support.policies import policies_of
from tango_jax.cli.command_line import load_config
from tango_jax.config import ROLES
from tango_jax.loop import compilation
from tango_jax.loop.turn import RunContext
from tango_jax.method.load import load_method
from tango_jax.runtime.ahead import CompileAhead
from tango_jax.runtime.console import Console
from tango_jax.runtime.failures import OutOfMemory
from tango_jax.runtime.hosts import Preemption
from tango_jax.runtime.timers import PhaseTimer
from tango_jax.sampling.batches import BatchDriver
from tango_jax.tasks.registry import make_task


@pytest.fixture(scope="module")
def roles():
    """Policies of small shapes, and weights to begin with."""
    config = load_config(str(CONFIGS / "tiny.py"), [f"{role}.{setting}" for role in ROLES for setting in (
        "mesh.fsdp=1", "row_buckets=(8,)", "cache_buckets=()", "prompt_buckets=()")])
    policies = policies_of(config)
    return policies, {role: policy.init(np.zeros(2, np.uint32)).weights for role, policy in policies.items()}


@pytest.mark.parametrize("arm, trained, groups", [
    ("tango", {"generator", "verifier"}, {"generator": {1, 4}, "verifier": {1, 2, 4}}),
    ("grpo", {"generator"}, {"generator": {1, 4}, "verifier": {1}}),
    ("fixed_verifier", {"generator"}, {"generator": {1, 4}, "verifier": {1, 2}}),
    ("fixed_generator", {"verifier"}, {"generator": {1}, "verifier": {1, 4}}),
    ("meta_judged", {"generator", "verifier"}, {"generator": {1, 4}, "verifier": {1, 2, 4}}),
])
def test_only_what_an_arm_calls_is_compiled(roles, monkeypatch, arm, trained, groups):
    policies, start = roles
    config = load_config(str(CONFIGS / "tiny.py"), [f"arm={arm}", "rl.samples_per_prompt=4",
                                                    "rl.verifications_per_solution=2"])
    task = make_task(config, {role: policy.tokenizer for role, policy in policies.items()})
    compiled, sampled = [], {}
    monkeypatch.setattr(CompileAhead, "__call__", lambda _, fn, **settings: lambda *args: (
        compiled.append(fn), jax.eval_shape(fn, *args))[1])
    monkeypatch.setattr(BatchDriver, "compile_ahead", lambda self, ahead, weights, group_sizes: sampled.update(
        {role: group_sizes for role, policy in policies.items() if policy.sampler.driver is self}))
    context = RunContext(config, task, policies, {}, PhaseTimer(), load_method(config, task))
    with Console(enabled=False).stage("Compiling", 2) as progress:
        compilation.compile_run(context, start, progress, Preemption(is_watching=False))
    assert {role for role, policy in policies.items() if policy.update in compiled} == trained
    assert sampled == groups


@pytest.mark.parametrize("arm, settings", [
    ("grpo", {"row_buckets"}), ("scored", {"rows_per_micro_batch"}), ("tango", {"row_buckets", "rows_per_micro_batch"}),
])
def test_where_compiling_needs_too_much_the_advice_is_of_what_is_compiled(roles, monkeypatch, arm, settings):
    policies, start = roles
    config = load_config(str(CONFIGS / "tiny.py"), [f"arm={arm}", "verifier.row_buckets=(4, 8)"])
    verifier = dataclasses.replace(policies["verifier"], config=config.verifier)

    def no_memory(*arguments, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(CompileAhead, "__enter__", no_memory)
    context = RunContext(config, None, {"verifier": verifier}, {}, PhaseTimer(), load_method(config))
    with Console(enabled=False).stage("Compiling", 1) as progress, pytest.raises(OutOfMemory) as found:
        compilation.compile_run(context, start, progress, Preemption(is_watching=False))
    told = {name for name in ("row_buckets", "rows_per_micro_batch") if f"verifier.{name}=" in str(found.value)}
    assert told == settings and str(found.value).startswith("compiling for the verifier ran out of device memory")
