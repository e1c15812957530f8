"""Times the phases of a turn on this machine, and sets them against its own matmul and copy rates.

In: a policy with its sizes (bench_sizes.py). Out: one dict of plain numbers. Stage: `bench --model=...`. The functions
that run are those of a run, compiled ahead of their first call, so that what the compiler says of their memory is known
before they start.

    prefill     the prompts' pass, which also samples the first tokens
    decode      all further tokens, with a cache that has room for the last of them from the start
    score       log-probs of the batch, as for a reference policy
    update      gradients of the same batch and the optimizer's step
    optimizer   the step alone: an update of no micro-batch
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from tango_jax.models.head_precision import HEAD_PRECISIONS
from tango_jax.models.lora import split
from tango_jax.models.transformer import ModelConfig, init_weights
from tango_jax.planning.bench_predicted import predicted_seconds, target_here
from tango_jax.planning.bench_sizes import MICRO_BATCHES, Sizes
from tango_jax.planning.bench_work import PhaseWork, sampling_work, training_work
from tango_jax.planning.costs import micro_batch_shape, num_parameters, num_trained
from tango_jax.planning.job import device_bytes
from tango_jax.planning.machines import GIB
from tango_jax.records import Batch, TrainState
from tango_jax.rl.packing import TrainSequence, pack, pack_shape
from tango_jax.rl.policy import Policy
from tango_jax.runtime.machine import (
    copy_rate,
    describe_machine,
    matmul_rate,
    median_seconds,
    peak_memory,
)
from tango_jax.runtime.rng import step_key
from tango_jax.sampling.decode import PromptBatch
from tango_jax.sampling.logits import sampling_params
from tango_jax.sampling.request import SampleRequest, pad_request, with_row_arrays
from tango_jax.sharding.layouts import batch_sharding

SAMPLING_PHASES, TRAINING_PHASES = ("prefill", "decode"), ("score", "update", "optimizer")
PHASES = SAMPLING_PHASES + TRAINING_PHASES


class DeviceRates(NamedTuple):
    """What a device was measured to do at best."""

    matmul: float  # FLOP/s in compute_dtype, as jax multiplies it by default
    head: float  # FLOP/s in head_dtype; in float32 with head_precision
    copy: float  # bytes per second, read and written together


class Timed(NamedTuple):
    """What was measured of a phase."""

    seconds: float  # median
    compile_s: float  # little where the compile cache has the program
    memory: int  # bytes of a device, as the compiler says, with all that lies beside the program


def bench_phases(
    policy: Policy, sizes: Sizes, names: tuple[str, ...], runs: int, memory: int,
    report_fn: Callable[[str, dict], None], rates: DeviceRates | None = None,
) -> dict:
    """Time the phases of these names; `report_fn(name, figures)` hears of each as it is done.

    Args:
        rates: from `measured_rates`; None: they are measured now.

    Raises:
        ValueError: a program needs more than a device's `memory`, in bytes.
    """
    rates = rates or measured_rates(policy.model_config)
    target = target_here(memory, *rates)
    machine = {
        "description": describe_machine(),
        "memory_gib": memory / GIB,
        "matmul_flops_per_s": rates.matmul,
        "head_matmul_flops_per_s": rates.head,
        "copy_bytes_per_s": rates.copy,
        "predicted_for": target and target.name,
    }
    report_fn("machine", machine)
    batch, tokens = training_batch(policy, sizes)
    work = sampling_work(policy, sizes) | training_work(policy, batch, tokens)
    predicted = predicted_seconds(policy, sizes, batch, target, memory) if target else {}
    phases = {}
    for name, timed in timed_phases(policy, sizes, batch, BenchTimer(names, runs, memory)):
        phases[name] = figures(work[name], timed, rates) | {"predicted_s": predicted.get(name)}
        report_fn(name, phases[name])
    peak = peak_memory()
    return {
        "machine": machine,
        "jax": jax.__version__,
        "model": describe_model(policy),
        "sizes": sizes._asdict() | {"prompts": sizes.prompts, "micro_batch": micro_batch_shape(batch)._asdict(),
                                    "micro_batches": int(batch.num_micro)},
        "phases": phases,
        "peak_memory_gib": None if peak is None else peak / GIB,
    }  # fmt: skip


def measured_rates(model: ModelConfig, size: int = 0) -> DeviceRates:
    """The rates in the model's dtypes. `size` is that of the matrices, for tests; 0: one that keeps the device busy."""
    matmul = matmul_rate(model.compute_dtype, size=size)
    precision = HEAD_PRECISIONS[model.head_precision] if model.head_dtype == "float32" else None
    is_same = model.head_dtype == model.compute_dtype and precision is None
    head = matmul if is_same else matmul_rate(model.head_dtype, precision, size)
    return DeviceRates(matmul, head, copy_rate(4 * size * size))


def describe_model(policy: Policy) -> dict:
    model, placement = policy.model_config, policy.placement
    return {
        "layers": model.num_layers,
        "parameters": num_parameters(model),
        "trained_parameters": num_trained(model),
        "lora_rank": model.lora.rank if model.lora else 0,
        "compute_dtype": model.compute_dtype,
        "head_dtype": model.head_dtype,
        "head_precision": model.head_precision,
        "sample_cache_dtype": model.sample_cache_dtype or model.compute_dtype,
        "sample_weight_dtype": model.sample_weight_dtype or model.compute_dtype,
        "attention": model.attention,
        "decode_attention": model.decode_attention,
        "remat": model.remat,
        "mesh": dict(placement.train.shape),
        "decode_mesh": dict(placement.local.shape),
    }


def figures(work: PhaseWork, timed: Timed, rates: DeviceRates) -> dict[str, float]:
    """A phase in numbers for JSON.

    `share_of_matmul` is the time that the products would take at the measured rates of their dtypes, over the time that
    the phase took; `mfu` is the same of the products that are needed, without what remat computes again.
    `share_of_copy` is the share of the measured rate of copies at which its bytes were moved.
    """
    seconds = timed.seconds
    return {
        "seconds": seconds,
        "tokens": work.tokens,
        "tokens_per_s": work.tokens / seconds,
        "flops": work.flops.total,
        "flops_per_s": work.flops.total / seconds,
        "bytes": work.bytes,
        "bytes_per_s": work.bytes / seconds,
        "share_of_matmul": work.flops.seconds(rates.matmul, rates.head) / seconds,
        "mfu": work.needed.seconds(rates.matmul, rates.head) / seconds,
        "share_of_copy": work.bytes / rates.copy / seconds,
        "compile_s": timed.compile_s,
        "memory_gib": timed.memory / GIB,
    }


def phase_line(name: str, found: dict) -> str:
    """The figures of a phase, or of the machine, in one line."""
    if name == "machine":
        rates = f"{found['matmul_flops_per_s'] / 1e12:.3g} TFLOP/s (head {found['head_matmul_flops_per_s'] / 1e12:.3g})"
        return (f"machine: {found['description']}, {found['memory_gib']:.1f} GiB each, matmul {rates}, copy "
                f"{found['copy_bytes_per_s'] / 1e9:.3g} GB/s")
    parts = [f"{name}: {found['seconds']:.4g} s"]
    if found["flops"]:  # the optimizer's step has neither tokens nor products
        parts.append(f"{found['tokens_per_s']:,.0f} tokens/s")
        parts.append(f"{found['flops_per_s'] / 1e12:.3g} TFLOP/s ({found['share_of_matmul']:.1%} of the matmul rate, "
                     f"{found['mfu']:.1%} without what remat computes again)")
    parts.append(f"{found['bytes_per_s'] / 1e9:.3g} GB/s ({found['share_of_copy']:.1%} of the copy rate)")
    expected = "" if found["predicted_s"] is None else f", predicted {found['predicted_s']:.4g} s"
    return f"{', '.join(parts)}; {found['memory_gib']:.1f} GiB, compiled in {found['compile_s']:.1f} s{expected}"


class CompiledPhase(NamedTuple):
    """A jitted function, compiled for its arguments."""

    fn: Callable
    compile_s: float
    memory: int  # as in Timed


class BenchTimer(NamedTuple):
    """Compiles functions and times the phases that are asked for."""

    names: tuple[str, ...]
    runs: int
    memory: int  # bytes of a device

    def compile(self, name: str, lowered: jax.stages.Lowered, beside: int = 0) -> CompiledPhase:
        """Compile; `beside` are the bytes on the device that are no arguments of the function.

        Raises:
            ValueError: it needs more memory than there is.
        """
        began = time.monotonic()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise ValueError(f"{name} does not compile for {self.memory / GIB:.1f} GiB ({str(error).splitlines()[0]}): "
                             f"{self._advice(name)}") from error
        said = compiled.memory_analysis()
        needed = beside + said.argument_size_in_bytes + said.temp_size_in_bytes
        needed += said.output_size_in_bytes - said.alias_size_in_bytes
        if needed > self.memory:
            raise ValueError(f"{name} needs {needed / GIB:.1f} GiB of each device, which has {self.memory / GIB:.1f} "
                             f"GiB: {self._advice(name)}")
        return CompiledPhase(compiled, time.monotonic() - began, needed)

    def _advice(self, name: str) -> str:
        sizes = "--rows, --prompt, --new" if name in SAMPLING_PHASES else "--micro_rows, --logp_chunk, --prompt, --new"
        return f"lower {sizes} or --layers, or split the model over more devices with --mesh"

    def time(
        self, phase: CompiledPhase, fn: Callable[[Any], object], prepare_fn: Callable[[int], object] = lambda i: i
    ) -> Timed:
        """`fn` calls the compiled function on what `prepare_fn` has made, which takes no counted time."""
        return Timed(median_seconds(fn, self.runs, prepare_fn), phase.compile_s, phase.memory)


def timed_phases(policy: Policy, sizes: Sizes, batch: Batch, timer: BenchTimer) -> Iterator[tuple[str, Timed]]:
    """The phases that are asked for, in the order of a turn."""
    state = fresh_state(policy)
    if set(timer.names) & set(SAMPLING_PHASES):
        yield from timed_sampling(policy, sizes, state, timer)
    if set(timer.names) & set(TRAINING_PHASES):
        yield from timed_training(policy, batch, state, timer)


def fresh_state(policy: Policy) -> TrainState:
    """Random parameters; with adapters, fresh ones on a random base."""
    key_data, model = step_key(0, "bench"), policy.model_config
    state = policy.init(key_data)
    if not model.lora:
        return state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, split(policy.abstract_weights())[1])

    def make_base(key_data: jax.Array) -> dict:
        return split(init_weights(model, jax.random.wrap_key_data(key_data)))[1]

    return state.replace(base=jax.jit(make_base, out_shardings=shardings)(key_data))


def timed_sampling(
    policy: Policy, sizes: Sizes, state: TrainState, timer: BenchTimer
) -> Iterator[tuple[str, Timed]]:
    """Prefill and decode, apart."""
    sampler = policy.sampler
    beside = device_bytes(state)  # waits for its update, as in a run
    weights = jax.block_until_ready(sampler.layout(state.weights))
    prompts, sampling = prompt_batch(policy.model_config, sizes), sampling_params(1.0)
    prefill = timer.compile("prefill", sampler.driver.prefill_fn.lower(weights, prompts, sampling), beside)
    if "prefill" in timer.names:
        yield "prefill", timer.time(prefill, lambda _: prefill.fn(weights, prompts, sampling))
    if "decode" not in timer.names:
        return
    started = prefill.fn(weights, prompts, sampling)
    none_left = np.int32(0)
    decode = timer.compile("decode", sampler.driver.decode_fn.lower(weights, started, sampling, none_left), beside)
    del started
    steps = []

    def finish(started: Any) -> jax.Array:
        steps.append(decode.fn(weights, started, sampling, none_left).step)
        return steps[-1]

    yield "decode", timer.time(decode, finish, lambda _: prefill.fn(weights, prompts, sampling))
    assert {int(step) for step in steps} == {sizes.new}, steps


def timed_training(
    policy: Policy, batch: Batch, state: TrainState, timer: BenchTimer
) -> Iterator[tuple[str, Timed]]:
    """Score, update, and an update without micro-batches. The state is donated."""
    placed = jax.tree.map(lambda leaf: jax.device_put(leaf, batch_sharding(policy.placement, leaf)), batch)
    if "score" in timer.names:
        beside = device_bytes(state.opt_state)
        score = timer.compile("score", policy.score.lower(state.weights, placed), beside)
        yield "score", timer.time(score, lambda _: score.fn(state.weights, placed))
    if not {"update", "optimizer"} & set(timer.names):
        return
    state, base = state.replace(base={}), state.base  # a base is not donated
    update = timer.compile("update", policy.update.lower(state, placed, base))

    def step(batch: Batch) -> dict:
        nonlocal state
        state, metrics = update.fn(state, batch, base)
        return metrics

    if "update" in timer.names:
        yield "update", timer.time(update, lambda _: step(placed))
    if "optimizer" in timer.names:
        none = jax.device_put(np.int32(0), batch_sharding(policy.placement, batch.num_micro))
        yield "optimizer", timer.time(update, lambda _: step(placed.replace(num_micro=none)))


def prompt_batch(model: ModelConfig, sizes: Sizes) -> PromptBatch:
    """Random prompts, all of the full length; every row may use the whole cache."""
    prompts = np.random.default_rng(0).integers(0, model.vocab_size, (sizes.prompts, sizes.prompt)).tolist()
    request = SampleRequest(prompts, sizes.samples, step_key(0, "bench", "sample"), 1.0)
    return pad_request(with_row_arrays(request, sizes.new), sizes.prompts, sizes.prompt)


def training_batch(policy: Policy, sizes: Sizes) -> tuple[Batch, int]:
    """Random responses of the full length to random prompts, packed as in a run, on the host; and their tokens."""
    shards, M, rng = policy.placement.num_local_shards, sizes.micro_samples, np.random.default_rng(1)
    rows = sizes.micro_rows * MICRO_BATCHES * shards
    num_prompts = -(-rows // M)
    vocabulary = policy.model_config.vocab_size
    prompts = rng.integers(0, vocabulary, (num_prompts, sizes.prompt)).tolist()
    response_BT = rng.integers(0, vocabulary, (rows, sizes.new), np.int32)
    adv_B, weight_T = rng.normal(size=rows), np.full(sizes.new, 1 / response_BT.size, np.float32)
    sequences = [TrainSequence(prompts[b // M], response_BT[b], weight_T, adv_B[b]) for b in range(rows)]
    batch = pack(sequences, pack_shape(policy.config), rows, num_prompts, shards)
    return batch, response_BT.size + num_prompts * sizes.prompt
