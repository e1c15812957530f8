"""What the plan's arithmetic expects of the phases that `bench --model` times, on the device that is here.

In: a policy with its sizes, and rates. Out: {phase: seconds}. Stage: `bench --model`, beside what it measures. The
rates are those of the device's data sheet, as in a plan for it (targets.py). A CPU has none: there they are the ones
that were just measured, of which the plan expects the same shares. Nothing is predicted for an accelerator that is no
target.
"""

import jax

from tango_jax.planning.bench_sizes import Sizes, bench_job, bench_machine
from tango_jax.planning.bench_work import columns
from tango_jax.planning.costs import micro_batch_shape, optimizer_bytes
from tango_jax.planning.estimates import as_programs, training_estimates
from tango_jax.planning.job import device_bytes
from tango_jax.planning.targets import Target, known_target
from tango_jax.planning.times import TimeModel, function_flops
from tango_jax.planning.workload import DecodeSegment, SamplingWorkload, UpdateWorkload
from tango_jax.records import Batch
from tango_jax.rl.policy import Policy


def target_here(memory: int, matmul: float, head: float, copy: float) -> Target | None:
    """This machine's devices as a target; None: they are accelerators without a data sheet here.

    Args:
        memory: bytes of a device.
        matmul: FLOP/s that were measured; it, `head` (of the head's products) and `copy` (bytes per second) count on a
            CPU alone.
    """
    device, count = jax.local_devices()[0], jax.device_count()
    if device.platform != "cpu":
        return known_target(device.device_kind, count)
    between = dict.fromkeys(("link", "network", "host"), copy / 2)
    return Target("cpu", "cpu", memory, matmul, flops_float32=matmul, flops_highest=head, read=copy, per_host=count,
                  **between)  # fmt: skip


def predicted_seconds(policy: Policy, sizes: Sizes, batch: Batch, target: Target, memory: int) -> dict[str, float]:
    """Of every phase; `batch` is what it trains on, and `memory` the bytes of a device."""
    times, job = TimeModel(target), bench_job(policy.model_config, sizes, policy.config.mesh, bench_machine(memory))
    sized = job.policies["generator"]
    segment = DecodeSegment(sizes.rows, sizes.new, sizes.new - 1, columns(policy, sizes))
    prefill, sampled = (
        times.sampling_seconds(sized, SamplingWorkload(1, sizes.prompts, sizes.prompt, segments))
        for segments in ((), (segment,))
    )
    programs = as_programs("generator", training_estimates(job, "generator", target.platform), {})
    passes = UpdateWorkload(int(batch.num_micro), 1, micro_batch_shape(batch))
    score, update = (
        times.training_seconds(sized, programs[f"generator/{name}"], flops, passes)
        for name, flops in zip(("score", "update"), function_flops(sized, passes.tokens), strict=True)
    )
    step = times.read_seconds(optimizer_bytes(device_bytes(sized.state), device_bytes(sized.state.params)))
    return {"prefill": prefill, "decode": sampled - prefill, "score": score, "update": update + step, "optimizer": step}
