"""Whether attention, sampler, int8 and adapters of a small random model compute correctly on this device.

Every bfloat16 implementation is compared with plain attention and the plain model in float32; the sampler's log-probs
are compared with the trainer's.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tango_jax.models import lora
from tango_jax.models.attention import ATTENTION_KINDS, capability_of, make_row_attention, resolve_attention
from tango_jax.models.decode_attention import DECODE_ATTENTION_KINDS, resolve_decode_attention
from tango_jax.models.lora import LoraConfig
from tango_jax.models.transformer import ModelConfig, init_params
from tango_jax.records import Batch, Rollout, with_base
from tango_jax.rl.packing import PackShape, TrainSequence, pack
from tango_jax.rl.score import make_score
from tango_jax.runtime.checks import cut
from tango_jax.runtime.failures import describe
from tango_jax.runtime.rng import step_key
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.request import SampleRequest
from tango_jax.sampling.sampler import make_sampler
from tango_jax.tracking.alarm_rules import Limits

HIGHEST = "highest"  # all bits of float32 products, on accelerators too
BFLOAT16 = {"compute_dtype": "bfloat16"}


class Allowed(NamedTuple):
    largest: float
    mean: float
    unit: str  # nats, or shares of the largest number


# As in tests/models/test_attention.py, tests/sampling/test_int8.py and a run's alarm.
ATTENTION = Allowed(2e-2, math.inf, "of the largest number")
EXACT = Allowed(2e-4, math.inf, "nats")
INT8_CACHE = Allowed(0.5, 0.02, "nats")
INT8 = Allowed(0.5, 0.1, "nats")
GAP = Allowed(math.inf, Limits().logprob_gap, "nats")


class ParitySizes(NamedTuple):
    model: ModelConfig  # in float32
    prompts: int
    samples: int
    prompt: int  # tokens of the longest prompt
    new: int  # tokens of the longest response
    row: int  # tokens of a packed row
    rank: int  # of adapters


class Case(NamedTuple):
    name: str
    run: Callable[[], Iterator[dict]]


def comparisons(sizes: ParitySizes) -> Iterator[dict]:
    """A row for each comparison, failed and left out ones included."""
    for case in cases(sizes):
        try:
            yield from case.run()
        # A compiler or a kernel may raise anything.
        except Exception as error:
            yield {"what": case.name, "error": error_text(error)}


def error_text(error: Exception) -> str:
    return cut(f"{type(error).__name__}: {describe(error)}", 300)


def cases(sizes: ParitySizes) -> Iterator[Case]:
    device, kernels = jax.local_devices()[0], []  # settings of the sampler that this device can run
    numerics = (device.platform, BFLOAT16["compute_dtype"], sizes.model.head_dim)
    for kind in ATTENTION_KINDS[1:]:
        name = f"attention {kind}"
        try:
            resolve_attention(kind, *numerics, capability_of(device))
        except ValueError as error:
            yield left_out(name, error)
            continue
        yield Case(name, lambda kind=kind, name=name: attention_rows(name, kind, sizes))
        kernels += [{"attention": kind}] if kind != "xla" else []
    for kind in DECODE_ATTENTION_KINDS[1:]:
        try:
            resolve_decode_attention(kind, *numerics, (sizes.prompt, sizes.new), capability_of(device))
        except ValueError as error:
            yield left_out(f"decode attention {kind}", error)
            continue
        kernels += [{"decode_attention": kind}] if kind != "xla" else []
    adapters = LoraConfig(sizes.rank, 2.0 * sizes.rank)
    for name, settings, allowed in (
        ("float32", {}, EXACT),
        ("bfloat16", BFLOAT16, GAP),
        *((f"{key.replace('_', ' ')} {kind}", BFLOAT16 | {key: kind}, GAP) for each in kernels
          for key, kind in each.items()),
        ("int8 cache", BFLOAT16 | {"sample_cache_dtype": "int8"}, INT8_CACHE),
        ("int8 weights", BFLOAT16 | {"sample_weight_dtype": "int8"}, INT8),
        ("adapters, float32", {"lora": adapters}, EXACT),
        ("adapters", BFLOAT16 | {"lora": adapters}, GAP),
        ("adapters, int8 base", BFLOAT16 | {"lora": dataclasses.replace(adapters, base_dtype="int8")}, GAP),
    ):
        changed = dataclasses.replace(sizes.model, **{"attention": "xla"} | settings)
        yield Case(name, lambda name=name, model=changed, allowed=allowed: sampler_rows(name, model, allowed, sizes))


def left_out(name: str, error: ValueError) -> Case:
    return Case(name, lambda: iter([{"what": name, "left_out": str(error).partition(": use ")[0]}]))


def row(what: str, pairs: list[tuple[np.ndarray, np.ndarray]], allowed: Allowed) -> dict:
    """A comparison of (found, wanted) arrays, taken together."""
    found = []
    for got, wanted in pairs:
        got, wanted = (np.asarray(x, np.float64).ravel() for x in (got, wanted))
        found.append(np.abs(got - wanted) / (1.0 if allowed.unit == "nats" else np.abs(wanted).max()))
    different = np.concatenate(found)
    largest, mean = float(different.max()), float(different.mean())
    # NaN fails these comparisons.
    is_within = largest <= allowed.largest and mean <= allowed.mean
    return {"what": what, "largest": largest, "mean": mean, "unit": allowed.unit, "allowed_largest": allowed.largest,
            "allowed_mean": allowed.mean, "within": is_within}


def attention_rows(name: str, kind: str, sizes: ParitySizes) -> Iterator[dict]:
    """Attention of packed rows that continue a prompt: outputs of real tokens, and gradients of a weighted sum."""
    model, T, X, rng = sizes.model, sizes.row, sizes.prompt, np.random.default_rng(0)
    segment_BT = np.zeros((2, T), np.int32)
    segment_BT[0, : T // 2], segment_BT[0, T // 2 : T - T // 8] = 1, 2  # the rest is padding
    segment_BT[1, :1], segment_BT[1, 1 : T - T // 8], segment_BT[1, T - T // 8 :] = 1, 2, 3
    is_prefix_BX = np.arange(X) < np.array([[X], [max(1, X // 3)]])
    heads = ((T, model.num_heads), (X + T, model.num_kv_heads), (X + T, model.num_kv_heads))
    qkv = [jnp.asarray(rng.normal(size=(2, length, count, model.head_dim)), jnp.float32) for length, count in heads]
    is_token_BTHE = jnp.asarray(segment_BT > 0)[..., None, None]
    weight_BTHE = rng.normal(size=qkv[0].shape)

    def found(implementation: str, qkv: list[jax.Array]) -> list[jax.Array]:
        attend_fn = make_row_attention(jnp.asarray(segment_BT), jnp.asarray(is_prefix_BX), implementation)

        def loss_fn(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
            out_BTHE = jnp.where(is_token_BTHE, attend_fn(*qkv).astype(jnp.float32), 0)
            return jnp.sum(out_BTHE * weight_BTHE), out_BTHE

        grads, out_BTHE = jax.jit(jax.grad(loss_fn, argnums=(0, 1, 2), has_aux=True))(*qkv)
        return [out_BTHE, *grads]

    with jax.default_matmul_precision(HIGHEST):
        wanted = found("xla", qkv)
    pairs = list(zip(found(kind, [x.astype(jnp.bfloat16) for x in qkv]), wanted, strict=True))
    yield row(f"{name}: outputs", pairs[:1], ATTENTION)
    yield row(f"{name}: gradients", pairs[1:], ATTENTION)


def sampler_rows(name: str, model: ModelConfig, allowed: Allowed, sizes: ParitySizes) -> Iterator[dict]:
    """The sampler's log-probs against the trainer's, and these against the plain float32 model with merged adapters."""
    plain = dataclasses.replace(sizes.model, attention="xla")
    weights = random_weights(model, sizes)
    is_exact = model.compute_dtype == "float32"
    with jax.default_matmul_precision(HIGHEST if is_exact else None):
        rollout, prompts = sampled(model, weights, sizes)
        batch = packed(rollout, prompts, sizes)
        scored_NZRT = make_score(model, 1.0, 0)(weights, batch)
    is_action_NZRT = batch.is_action_NZRT
    scored, drawn = np.asarray(scored_NZRT)[is_action_NZRT], batch.sampler_logp_NZRT[is_action_NZRT]
    yield row(f"sampler against trainer, {name}", [(drawn, scored)], allowed)
    if model.sample_cache_dtype or model.sample_weight_dtype or model == plain:
        return  # this trainer was compared before, or is the plain model
    with jax.default_matmul_precision(HIGHEST):
        merged = jax.jit(functools.partial(lora.merge, model))(weights) if model.lora else weights
        wanted = np.asarray(make_score(plain, 1.0, 0)(merged, batch))[is_action_NZRT]
    yield row(f"trainer against float32, {name}", [(scored, wanted)], EXACT if is_exact else GAP)


def random_weights(model: ModelConfig, sizes: ParitySizes) -> dict:
    """Fresh parameters, and adapters that change the matrices' results by a third."""

    def make(key: jax.Array) -> dict:
        params = init_params(sizes.model, key)
        if not model.lora:
            return params
        # Fresh adapters change nothing: every second matrix is zero.
        size = 0.3 * model.lora.rank**-0.5
        adapters = {name: leaf if name.endswith(lora.LORA_A) else size * jax.random.normal(key, leaf.shape)
                    for name, leaf in lora.init_adapters(model, key)["layers"].items()}
        return with_base(lora.freeze(model, params), {"layers": adapters})

    return jax.jit(make)(jax.random.key(0))


def sampled(model: ModelConfig, weights: dict, sizes: ParitySizes) -> tuple[Rollout, list[list[int]]]:
    rng, P, M = np.random.default_rng(3), sizes.prompts, sizes.samples
    lengths = [*rng.integers(1, sizes.prompt + 1, P - 1), sizes.prompt]
    prompts = [rng.integers(0, model.vocab_size, length).tolist() for length in lengths]
    limit_B = rng.integers(1, sizes.new + 1, P * M)
    limit_B[-1] = sizes.new
    buckets = SamplerConfig((sizes.prompt,), (sizes.new // 2, sizes.new), (P * M,))
    sampler = make_sampler(model, buckets, stop_ids=(model.vocab_size,))
    request = SampleRequest(prompts, M, step_key(0, "parity"), 1.0, max_new=limit_B)
    return sampler.sample(sampler.layout(weights), request), prompts


def packed(rollout: Rollout, prompts: list[list[int]], sizes: ParitySizes) -> Batch:
    sequences = [
        TrainSequence(prompts[b // sizes.samples], tokens, np.ones(len(tokens), np.float32), 0.0, logps)
        for b, (tokens, logps) in enumerate(zip(rollout.tokens, rollout.logps, strict=True))
    ]
    shape = PackShape(row_length=sizes.new + 1, rows=4, prompts=2, prompt_buckets=(sizes.prompt,))
    return pack(sequences, shape, len(sequences), sizes.prompts)
