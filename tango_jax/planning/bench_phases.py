"""Times the phases of a turn on this machine with a published model's sizes and random weights: `bench --model=...`.

In: a model, and settings of the generator. Out: one dict of plain numbers. The functions that run are those of a run,
in the batches that own_problems chooses for the device's memory, compiled ahead of their first call, so that what the
compiler says of their memory is known before they start.

    prefill     the prompts' pass, which also samples the first tokens
    decode      all further tokens, with a cache that has room for the last of them from the start
    score       log-probs of the batch, as for a reference policy
    update      gradients of the same batch and the optimizer's step
    optimizer   the step alone: an update of no micro-batch
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tango_jax.cli.command_line import apply_override
from tango_jax.cli.ranges import check_values
from tango_jax.config import flatten
from tango_jax.models.attention import capability_of
from tango_jax.models.decode_attention import attention_names
from tango_jax.models.lora import split
from tango_jax.models.transformer import ModelConfig, init_weights
from tango_jax.planning.costs import (
    Flops,
    decode_flops,
    micro_batch_shape,
    num_parameters,
    num_trained,
    optimizer_bytes,
    prefill_flops,
)
from tango_jax.planning.estimates import training_estimates
from tango_jax.planning.job import Job, device_bytes, sized_job
from tango_jax.planning.machines import GIB, Machine
from tango_jax.planning.own_problems import set_batches
from tango_jax.planning.shares import Shares
from tango_jax.planning.sources import OpenSettings, blank_tokenizer
from tango_jax.planning.targets import Target, open_target, target_name
from tango_jax.planning.times import TimeModel, function_flops
from tango_jax.planning.which_models import models_config
from tango_jax.planning.workload import DecodeSegment, SamplingWorkload, UpdateWorkload
from tango_jax.records import Batch, TrainState
from tango_jax.rl.packing import TrainSequence, pack, pack_shape
from tango_jax.rl.policy import Policy, make_policy
from tango_jax.runtime.checks import Mistakes, cut, local_path
from tango_jax.runtime.machine import describe_machine, median_seconds
from tango_jax.runtime.rng import step_key
from tango_jax.sampling.decode import PromptBatch
from tango_jax.sampling.logits import sampling_params
from tango_jax.sampling.request import SampleRequest, pad_request, with_row_arrays
from tango_jax.sharding.layouts import batch_sharding
from tango_jax.weights.presets import known_name, short_names
from tango_jax.weights.source import NUMERICS, Source, fields_of, published_model

SAMPLING_PHASES, TRAINING_PHASES = ("prefill", "decode"), ("score", "update", "optimizer")
PHASES = SAMPLING_PHASES + TRAINING_PHASES
MICRO_BATCHES = 2  # of an update on each shard, so that gradients are accumulated as in a run
CPU_PROMPT, CPU_RESPONSE = 64, 32  # tokens, where an accelerator has those of which_models.py
OVERRIDE = "generator."


class BenchOptions(NamedTuple):
    """What is timed."""

    model: str  # a preset, by its short name or hub id, or a folder with a config.json
    layers: int = 0  # 0: all
    overrides: Sequence[str] = ()  # `generator.key=value`
    vocab: int = 0  # tokens that it knows, no option of the command line; 0: all


class Bench(NamedTuple):
    """A policy that is timed, in its sizes."""

    policy: Policy
    job: Job  # the same as shapes
    samples: int  # responses that continue the same prompt

    @property
    def prompts(self) -> int:
        return self.policy.sampler.config.prompts_per_batch(self.samples)

    @property
    def rows(self) -> int:
        """Responses that are decoded at once, on all devices."""
        return self.prompts * self.samples


class Timed(NamedTuple):
    """What was measured of a phase."""

    seconds: float  # median
    compile_s: float  # little where the compile cache has the program
    memory: int  # bytes of a device, as the compiler says, with all that lies beside the program


# --------------------------------------------------------------------------------------------------- model and sizes


def open_bench(options: BenchOptions, memory: int) -> Bench:
    """The policy that is timed, in the largest batches for which devices of `memory` bytes should have room. Nothing is
    downloaded, and no token ends a response.

    Raises:
        ValueError: there is no such model or setting, or they do not fit each other, the devices or their memory.
    """
    if jax.process_count() > 1:
        raise ValueError(f"--model is timed in one process, and there are {jax.process_count()}: start one, with all "
                         "devices of a machine")
    machine = Machine(jax.default_backend(), jax.device_count(), memory, capability_of(jax.local_devices()[0]))
    name, overrides = preset_or_folder(options.model), list(options.overrides)
    config = models_config(name, 0, machine)
    config.generator.loss.kl_coef = 0.0
    if machine.is_cpu:
        config.generator.max_prompt, config.generator.max_response = CPU_PROMPT, CPU_RESPONSE
    mistakes = Mistakes()
    for override in overrides:
        with mistakes.collected():
            if not override.startswith(OVERRIDE):
                raise ValueError(f"--config.{cut(override)}: the generator alone is timed: "
                                 f"--config.{OVERRIDE}key=value")
            apply_override(config, override)
    mistakes.raise_all()
    check_values(flatten(config))
    model = open_model(name, options, fields_of(config.generator))
    role, given = config.generator, [override.partition("=")[0] for override in overrides]
    role.cache_buckets = ()
    settings = OpenSettings(config, given)
    set_batches(settings, {"generator": model}, machine, mistakes)
    mistakes.raise_all()
    role.row_buckets = role.row_buckets[-1:]
    config.rl.prompts_per_step = MICRO_BATCHES
    config.rl.samples_per_prompt = samples = min(config.rl.samples_per_prompt, role.row_buckets[-1])
    tokenizer = dataclasses.replace(blank_tokenizer(model), stop_ids=(model.vocab_size,))
    policy = make_policy("generator", role, Source(name, model, tokenizer, None, lambda folder: None, {}))
    return Bench(policy, sized_job(config, {"generator": model}, machine), samples)


def preset_or_folder(name: str) -> str:
    """The model's hub id in the table of presets, or the folder. Raises ValueError."""
    known = short_names()
    name = known.get(name, name)
    if known_name(name) is None and not local_path("--model", name).exists():
        raise ValueError(f"--model={cut(name)} is neither a preset nor a folder: choose one of {', '.join(known)}, or "
                         "give a folder that contains a config.json (weights are not read)")
    return name


def open_model(name: str, options: BenchOptions, numerics: dict) -> ModelConfig:
    """The model, cut to `layers` and `vocab`. Raises ValueError."""
    model = published_model(name, **numerics)
    if options.layers > model.num_layers:
        raise ValueError(f"--layers={options.layers} is more than the {model.num_layers} of {cut(name)}: choose at "
                         f"most {model.num_layers}, or leave the option out for all of them")
    return dataclasses.replace(model, num_layers=options.layers or model.num_layers,
                               vocab_size=options.vocab or model.vocab_size)  # fmt: skip


def describe_sizes(bench: Bench) -> str:
    """One line, before anything is timed."""
    policy = bench.policy
    model, config = policy.model_config, policy.config
    mesh = " x ".join(f"{axis} {size}" for axis, size in policy.placement.train.shape.items())
    lora = f"adapters of rank {model.lora.rank} on a frozen base, " if model.lora else ""
    return (f"sizes: {model.num_layers} layers in {model.compute_dtype}, {lora}head in {model.head_dtype}, attention "
            f"{attention_names(model)}, mesh {mesh}; sampling {bench.rows} rows ({bench.prompts} prompts of "
            f"{config.max_prompt} tokens x {bench.samples} samples of {config.max_response}); training on "
            f"{MICRO_BATCHES} micro-batches of {config.rows_per_micro_batch} responses on each of "
            f"{policy.placement.num_shards} shard(s), remat {model.remat}")


# ------------------------------------------------------------------------------------------------- work and predictions


def work(bench: Bench, batch: Batch, tokens: int) -> dict[str, tuple[int, Flops]]:
    """{phase: (tokens of all devices, FLOPs of one)}; `batch` is what is trained on, with so many tokens."""
    policy = bench.policy
    model, groups, prompt = policy.model_config, policy.placement.row_multiple, policy.config.max_prompt
    tensor, count, new = policy.placement.local.shape["tensor"], int(batch.num_micro), policy.config.max_response
    prefill = prefill_flops(model, bench.prompts / groups, prompt, tensor, model.attention)
    step = decode_flops(model, bench.rows / groups, prompt + new, tensor)
    score, update = function_flops(policy, micro_batch_shape(batch))
    return {
        "prefill": (bench.prompts * prompt, prefill),  # which makes the first token
        "decode": (bench.rows * (new - 1), Flops((new - 1) * step.layers, (new - 1) * step.head)),
        "score": (tokens, Flops(count * score.layers, count * score.head)),
        "update": (tokens, Flops(count * update.layers, count * update.head)),
        "optimizer": (0, Flops(0.0, 0.0)),
    }


def target_here() -> Target | None:
    """This machine's devices as a target; None: they are accelerators without a data sheet here."""
    device = jax.local_devices()[0]
    name = "cpu" if device.platform == "cpu" else target_name(device.device_kind)
    return open_target(name, jax.device_count()) if name else None


def predicted_seconds(bench: Bench, batch: Batch, target: Target) -> dict[str, float]:
    """What a plan expects of every phase; `batch` is what is trained on."""
    times, job, config = TimeModel(target), bench.job, bench.policy.config
    sized, segment = job.policies["generator"], DecodeSegment(bench.rows, config.max_response, config.max_response - 1)
    prefill, sampled = (
        times.sampling_seconds(sized, SamplingWorkload(1, bench.prompts, config.max_prompt, segments))
        for segments in ((), (segment,))
    )
    programs = training_estimates(job, "generator", target.platform)
    passes = UpdateWorkload(int(batch.num_micro), 1, micro_batch_shape(batch))
    score, update = (
        times.training_seconds(sized, programs[f"generator/{name}"], flops, passes, name)
        for name, flops in zip(("score", "update"), function_flops(sized, passes.tokens), strict=True)
    )
    step = times.read_seconds(optimizer_bytes(device_bytes(sized.state), device_bytes(sized.state.params)))
    return {"prefill": prefill, "decode": sampled - prefill, "score": score, "update": update + step, "optimizer": step}


# -------------------------------------------------------------------------------------------------------- measurements


def bench_phases(
    bench: Bench, names: Sequence[str], runs: int, memory: int, report_fn: Callable[[str, dict], None]
) -> dict:
    """Time the phases of these names; `report_fn(name, figures)` hears of each as it is done.

    `share_of_peak` is the time that the products would take at the data sheet's rates, on a CPU at measured ones, over
    the time that the phase took.

    Raises:
        ValueError: a program needs more than a device's `memory`, in bytes.
    """
    model, config, target = bench.policy.model_config, bench.policy.config, target_here()
    batch, tokens = training_batch(bench)
    done, phases = work(bench, batch, tokens), {}
    predicted = predicted_seconds(bench, batch, target) if target else {}
    for name, timed in timed_phases(bench, batch, BenchTimer(names, runs, memory)):
        count, flops = done[name]
        at_peak = target and TimeModel(target.with_shares(Shares(1.0, 1.0, 1.0, 1.0))).matmul_seconds(flops, model)
        phases[name] = {
            "seconds": timed.seconds,
            "predicted_s": predicted.get(name),
            "tokens": count,
            "tokens_per_s": count / timed.seconds,
            "flops": flops.total,
            "flops_per_s": flops.total / timed.seconds,
            "share_of_peak": target and at_peak / timed.seconds,
            "memory_gib": timed.memory / GIB,
            "compile_s": timed.compile_s,
        }
        report_fn(name, phases[name])
    return {
        "machine": {"description": describe_machine(), "memory_gib": memory / GIB, "target": target and target.name},
        "jax": jax.__version__,
        "model": {
            "layers": model.num_layers,
            "parameters": num_parameters(model),
            "trained_parameters": num_trained(model),
            "lora_rank": model.lora.rank if model.lora else 0,
            "mesh": dict(bench.policy.placement.train.shape),
            **{name: getattr(model, name) for name in NUMERICS},
        },
        "sizes": {"rows": bench.rows, "samples": bench.samples, "prompt": config.max_prompt,
                  "new": config.max_response, "micro_batch": micro_batch_shape(batch)._asdict(),
                  "micro_batches": int(batch.num_micro)},
        "phases": phases,
    }  # fmt: skip


def phase_line(name: str, found: dict) -> str:
    """The figures of a phase in one line."""
    parts = [f"{name}: {found['seconds']:.4g} s"]
    if found["predicted_s"] is not None:
        parts.append(f"predicted {found['predicted_s']:.4g} s")
    if found["flops"]:  # the optimizer's step has neither tokens nor products
        share = "" if found["share_of_peak"] is None else f" ({found['share_of_peak']:.1%} of the peak)"
        parts += [f"{found['tokens_per_s']:,.0f} tokens/s", f"{found['flops_per_s'] / 1e12:.3g} TFLOP/s{share}"]
    return f"{', '.join(parts)}; {found['memory_gib']:.1f} GiB, compiled in {found['compile_s']:.1f} s"


class BenchTimer(NamedTuple):
    """Compiles functions and times the phases that are asked for."""

    names: Sequence[str]
    runs: int
    memory: int  # bytes of a device

    def compile(self, name: str, lowered: jax.stages.Lowered, beside: int = 0) -> tuple[Callable, float, int]:
        """The function, the seconds of compiling it, and the bytes that it needs; `beside` are those on the device that
        are no arguments of it.

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
        return compiled, time.monotonic() - began, needed

    def _advice(self, name: str) -> str:
        rows = "row_buckets=(ROWS,)" if name in SAMPLING_PHASES else "rows_per_micro_batch=ROWS"
        return f"lower --layers, or give --config.generator.{rows} with fewer rows, or a shorter max_response"


def timed_phases(bench: Bench, batch: Batch, timer: BenchTimer) -> Iterator[tuple[str, Timed]]:
    """The phases that are asked for, in the order of a turn."""
    state = fresh_state(bench.policy)
    if set(timer.names) & set(SAMPLING_PHASES):
        yield from timed_sampling(bench, state, timer)
    if set(timer.names) & set(TRAINING_PHASES):
        yield from timed_training(bench.policy, batch, state, timer)


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


def timed_sampling(bench: Bench, state: TrainState, timer: BenchTimer) -> Iterator[tuple[str, Timed]]:
    """Prefill and decode, apart."""
    sampler, beside = bench.policy.sampler, device_bytes(state)  # the state waits for its update, as in a run
    driver, weights = sampler.driver, jax.block_until_ready(sampler.layout(state.weights))
    prompts, sampling = prompt_batch(bench), sampling_params(1.0)
    prefill_fn, *told = timer.compile("prefill", driver.prefill_fn.lower(weights, prompts, sampling), beside)
    if "prefill" in timer.names:
        yield "prefill", Timed(median_seconds(lambda _: prefill_fn(weights, prompts, sampling), timer.runs), *told)
    if "decode" not in timer.names:
        return
    started, none_left = prefill_fn(weights, prompts, sampling), np.int32(0)
    decode_fn, *told = timer.compile("decode", driver.decode_fn.lower(weights, started, sampling, none_left), beside)
    del started
    steps = []

    def finish(started: Any) -> jax.Array:
        steps.append(decode_fn(weights, started, sampling, none_left).step)
        return steps[-1]

    seconds = median_seconds(finish, timer.runs, lambda _: prefill_fn(weights, prompts, sampling))
    yield "decode", Timed(seconds, *told)
    assert {int(step) for step in steps} == {bench.policy.config.max_response}, steps


def timed_training(
    policy: Policy, batch: Batch, state: TrainState, timer: BenchTimer
) -> Iterator[tuple[str, Timed]]:
    """Score, update, and an update without micro-batches. The state is donated."""
    placed = jax.tree.map(lambda leaf: jax.device_put(leaf, batch_sharding(policy.placement, leaf)), batch)
    if "score" in timer.names:
        lowered = policy.score.lower(state.weights, placed)
        score_fn, *told = timer.compile("score", lowered, device_bytes(state.opt_state))
        yield "score", Timed(median_seconds(lambda _: score_fn(state.weights, placed), timer.runs), *told)
    if not {"update", "optimizer"} & set(timer.names):
        return
    state, base = state.replace(base={}), state.base  # a base is not donated
    update_fn, *told = timer.compile("update", policy.update.lower(state, placed, base))

    def step(batch: Batch) -> dict:
        nonlocal state
        state, metrics = update_fn(state, batch, base)
        return metrics

    none = jax.device_put(np.int32(0), batch_sharding(policy.placement, batch.num_micro))
    for name, trained in (("update", placed), ("optimizer", placed.replace(num_micro=none))):
        if name in timer.names:
            yield name, Timed(median_seconds(lambda _, trained=trained: step(trained), timer.runs), *told)


def prompt_batch(bench: Bench) -> PromptBatch:
    """Random prompts, all of the full length; every row may use the whole cache."""
    config, vocabulary = bench.policy.config, bench.policy.model_config.vocab_size
    prompts = np.random.default_rng(0).integers(0, vocabulary, (bench.prompts, config.max_prompt)).tolist()
    request = SampleRequest(prompts, bench.samples, step_key(0, "bench", "sample"), 1.0)
    return pad_request(with_row_arrays(request, config.max_response), bench.prompts, config.max_prompt)


def training_batch(bench: Bench) -> tuple[Batch, int]:
    """Random responses of the full length to random prompts, packed as in a run, on the host; and their tokens."""
    config, shards, rng = bench.policy.config, bench.policy.placement.num_local_shards, np.random.default_rng(1)
    # As many responses to a prompt as a micro-batch has room for.
    M = max(1, config.rows_per_micro_batch // config.prompts_per_micro_batch)
    num_prompts = config.prompts_per_micro_batch * MICRO_BATCHES * shards
    vocabulary, rows = bench.policy.model_config.vocab_size, num_prompts * M
    prompts = rng.integers(0, vocabulary, (num_prompts, config.max_prompt)).tolist()
    response_BT = rng.integers(0, vocabulary, (rows, config.max_response), np.int32)
    adv_B, weight_T = rng.normal(size=rows), np.full(config.max_response, 1 / response_BT.size, np.float32)
    sequences = [TrainSequence(prompts[b // M], response_BT[b], weight_T, adv_B[b]) for b in range(rows)]
    batch = pack(sequences, pack_shape(config), rows, num_prompts, shards)
    return batch, response_BT.size + num_prompts * config.max_prompt
