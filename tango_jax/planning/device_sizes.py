"""Seconds of decoding, scoring and updating some layers of a published model, beside the plan's."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from tango_jax.config import role_config
from tango_jax.models.attention import attention_of
from tango_jax.models.lora import LoraConfig, split
from tango_jax.models.transformer import ModelConfig, init_weights
from tango_jax.planning.costs import Flops, micro_batch_shape, prefill_flops, score_flops, update_flops
from tango_jax.planning.targets import TARGETS, target_name
from tango_jax.planning.times import TimeModel
from tango_jax.records import Batch, TrainState
from tango_jax.rl.optimizer import make_optimizer
from tango_jax.rl.packing import PackShape, TrainSequence, pack
from tango_jax.rl.policy import loss_config
from tango_jax.rl.score import is_chunked, make_score
from tango_jax.rl.update import init_state, make_policy_loss, make_update
from tango_jax.runtime.machine import median_seconds
from tango_jax.runtime.rng import step_key
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.request import SampleRequest
from tango_jax.sampling.sampler import make_sampler
from tango_jax.weights.presets import preset_model

LOGP_CHUNK = 512
RUNS = 3  # after two warm-up calls


class TimedSizes(NamedTuple):
    model: str  # a checkpoint of weights/presets.py
    layers: int
    rows: tuple[int, ...]  # decoded at once, without shared prompts
    prompt: int
    new: int  # tokens of a response
    trained: int  # responses of an update
    rank: int  # of adapters on a frozen base
    vocab: int = 0  # 0: the model's


def timed(sizes: TimedSizes) -> Iterator[dict]:
    """A row for each phase as soon as it is timed. What needs most memory comes last."""
    device = jax.local_devices()[0]
    name = target_name(device.device_kind)
    plan = TimeModel(TARGETS[name]) if name else None
    model = model_of(sizes, device)
    weights = jax.jit(functools.partial(init_weights, model))(jax.random.key(0))

    def row(what: str, seconds: float, planned_fn: Callable[[], float]) -> dict:
        planned = planned_fn() if plan else None
        return {"what": f"{what}; {model.num_layers} layers", "seconds": seconds, "plan": planned,
                "of the plan": planned and seconds / planned}

    def sampling(rows: int) -> Iterator[dict]:
        prefill_s, step_s = sampling_seconds(model, weights, rows, sizes)
        yield row(f"prefill of {rows} x {sizes.prompt} tokens", prefill_s, lambda: plan.matmul_seconds(
            prefill_flops(model, rows, sizes.prompt, 1, model.attention), model, "prefill"))
        yield row(f"decode step of {rows} rows, {sizes.prompt} + {sizes.new} columns", step_s,
                  lambda: plan.step_seconds(model, rows, sizes.prompt, rows, sizes.new, 1))

    def training(kind: str, seconds_fn: Callable, flops: Flops) -> Iterator[dict]:
        count = int(batch.num_micro)
        yield row(f"{kind} of {count * tokens.total} tokens", seconds_fn(model, weights, batch),
                  lambda: count * plan.matmul_seconds(flops, model, kind))

    batch = trained_batch(sizes)
    tokens = micro_batch_shape(batch)
    shape = (model, tokens, 1, model.attention)
    fewest, *more = sizes.rows
    yield from sampling(fewest)
    yield from training("score", score_seconds, score_flops(*shape))
    yield from training("update", update_seconds, update_flops(*shape, is_chunked(tokens.scored, LOGP_CHUNK)))
    for rows in more:
        yield from sampling(rows)


def model_of(sizes: TimedSizes, device: jax.Device) -> ModelConfig:
    model = preset_model(sizes.model, compute_dtype="bfloat16", remat="full", head_precision="bfloat16_x3",
                         lora=LoraConfig(sizes.rank, float(sizes.rank)))
    model = dataclasses.replace(model, num_layers=sizes.layers, vocab_size=sizes.vocab or model.vocab_size)
    return dataclasses.replace(model, attention=attention_of(model, device))


def sampling_seconds(model: ModelConfig, weights: dict, rows: int, sizes: TimedSizes) -> tuple[float, float]:
    """(of the prompts' pass with the first tokens, of a decode step)."""
    sampler = make_sampler(model, SamplerConfig((sizes.prompt,), (sizes.new,), (rows,)), stop_ids=(model.vocab_size,))
    laid_out = sampler.layout(weights)
    prompts = np.random.default_rng(0).integers(0, model.vocab_size, (rows, sizes.prompt)).tolist()

    def sample(number: int, new: int) -> None:
        sampler.sample(laid_out, SampleRequest(prompts, 1, step_key(number, "sizes"), 1.0, max_new=new))

    first, whole = (median_seconds(functools.partial(sample, new=new), RUNS) for new in (1, sizes.new))
    return first, (whole - first) / (sizes.new - 1)


def trained_batch(sizes: TimedSizes) -> Batch:
    """Responses of full length to prompts of full length, one each."""
    token_T, logp_T = np.ones(sizes.new, np.int32), np.zeros(sizes.new, np.float32)
    weight_T = np.full(sizes.new, 1.0 / (sizes.trained * sizes.new), np.float32)
    sequences = [TrainSequence([1 + number] * sizes.prompt, token_T, weight_T, 1.0, logp_T)
                 for number in range(sizes.trained)]
    shape = PackShape(row_length=sizes.new + 1, rows=4, prompts=4, prompt_buckets=(sizes.prompt,))
    return pack(sequences, shape, sizes.trained, sizes.trained)


def score_seconds(model: ModelConfig, weights: dict, batch: Batch) -> float:
    score = make_score(model, 1.0, LOGP_CHUNK)
    return median_seconds(lambda _: score(weights, batch), RUNS)


def update_seconds(model: ModelConfig, weights: dict, batch: Batch) -> float:
    config = role_config()
    config.loss.kl_coef, config.logp_chunk = 0.0, LOGP_CHUNK
    params, base = split(weights)
    optimizer = make_optimizer(config.optimizer, are_adapters=True)
    state: list[TrainState] = [jax.jit(functools.partial(init_state, optimizer))(params)]
    update = make_update(optimizer, make_policy_loss(model, loss_config("generator", config)))

    def step(_: int) -> dict:
        state[0], metrics = update(state[0], batch, base)  # which donates the state
        return metrics

    return median_seconds(step, RUNS)
