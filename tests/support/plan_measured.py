"""A program of its own, so that nothing else has touched its memory: phases of a turn with both policies in place.

Prints one JSON object: for each phase of the generator, the bytes that `tango_jax.planning` predicts and the bytes that
the process took at its fullest moment.
"""
import ctypes
import gc
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from support.paths import CONFIGS
from tango_jax.cli.command_line import load_config
from tango_jax.planning.job import make_job
from tango_jax.planning.memory import phases
from tango_jax.planning.programs import examine, lowered_functions
from tango_jax.planning.targets import Devices
from tango_jax.runtime.rng import step_key
from tango_jax.sampling.decode import DecodeState

CONFIG = CONFIGS / "tiny.py"


def settings() -> list[str]:
    """Two models of 10 million parameters; rows are short, since the CPU's batched products take memory on the side."""
    overrides = ["rl.prompts_per_step=4", "rl.samples_per_prompt=4"]
    for role in ("generator", "verifier"):
        model = ("width=512", "num_layers=3", "num_heads=8", "num_kv_heads=4", "mlp_width=2048")
        overrides += [f"{role}.model.{item}" for item in (*model, "remat=full")]
        lengths = ("max_prompt=64", "max_response=63", "row_buckets=(16,)", "cache_buckets=()")
        batches = ("rows_per_micro_batch=8", "prompts_per_micro_batch=4")
        overrides += [f"{role}.{item}" for item in (*lengths, *batches)]
    return overrides


def resident(key: str) -> int:
    """VmRSS now, or VmHWM: the most since the last `reset`."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(key))


def reset() -> int:
    """Give freed memory back, and forget what the most was."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def zeros(tree):
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf, tree)


def main() -> None:
    job = make_job(load_config(str(CONFIG), settings()), Devices(jax.devices()[:1], True, {}), 1)
    policy = job.functions["generator"]
    lowered = {name: lower() for name, lower in lowered_functions(job, "generator").items()}
    compiled = {name: program.compile() for name, program in lowered.items()}
    programs = {f"generator/{name}": examine(program) for name, program in compiled.items()}
    predicted = {phase.name.split("/")[1]: phase.peak for phase in phases(job, programs)}
    make_state = policy.init.lower(step_key(0, "plan")).compile()
    shapes = job.policies["generator"]
    _, batch = shapes.sampling.prefill
    begin_fn = policy.sampler.driver.begin_fn
    begin = begin_fn.lower(lowered["prefill"].out_info[1], batch.rows, shapes.sampling.params).compile()
    copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params)).lower(shapes.state.params).compile()

    base, measured = reset(), {}
    states = [make_state(step_key(0, "plan"))]

    def measure(name: str, fn) -> None:
        jax.block_until_ready(fn())  # code and thread pools come with the first run
        reset()
        result = jax.block_until_ready(fn())
        measured[name] = resident("VmHWM") - base
        del result

    examples = zeros(shapes.stage_one).replace(num_micro=jnp.int32(1))

    def stage_one():
        states[0], metrics = compiled["sft"](states[0], examples, {})
        return states[0].step, metrics

    measure("sft", stage_one)
    states.append(make_state(step_key(1, "plan")))  # both roles have the same sizes
    references = [jax.block_until_ready(copy(state.params)) for state in states]
    measure("reshard", lambda: compiled["layout"](states[0].params))

    def sample():
        weights = jax.block_until_ready(compiled["layout"](states[0].params))
        batch = zeros(shapes.sampling.prefill[1])
        prefix, logits_BV = jax.block_until_ready(compiled["prefill"](weights, batch))
        state = jax.block_until_ready(DecodeState(prefix, *begin(logits_BV, batch.rows, shapes.sampling.params)))
        return compiled["decode"](weights, state, shapes.sampling.params, np.int32(0))

    measure("sample", sample)
    batch = zeros(shapes.batch).replace(num_micro=jnp.int32(1))
    measure("score", lambda: compiled["score"](references[0], batch))

    def update():
        states[0], metrics = compiled["update"](states[0], batch, {})
        return states[0].step, metrics

    measure("update", update)
    print(json.dumps({name: [predicted[name], measured[name]] for name in measured}))


if __name__ == "__main__":
    main()
