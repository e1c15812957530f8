"""Sampling in int8: close to the full forward pass, no schedule and no mesh changes a row, nothing compiles late."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
import pytest

from support.tiny_sampler import FLOAT, MODEL, STOP_IDS, compile_now, random_params
from tango_jax.config import default_config
from tango_jax.rl.packing import PackShape, TrainSequence, pack
from tango_jax.rl.score import make_score
from tango_jax.runtime.rng import step_key
from tango_jax.runtime.timers import CompileCounter
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.sampler import Sampler, SampleRequest, make_sampler
from tango_jax.sharding.placement import make_placement

INT8 = dataclasses.replace(MODEL, sample_cache_dtype="int8", sample_weight_dtype="int8")
LIMIT = 16
PLAIN = SamplerConfig(prompt_buckets=(8,), cache_buckets=(4, LIMIT), row_buckets=(3, 12))
TEMPERATURE = 1.25
PROMPTS = ([10, 11, 12], [20], [30, 31, 32, 33, 34, 35, 36], [40, 41, 42, 43])


class Setup(NamedTuple):
    params: dict
    weights: dict
    sampler: Sampler


@pytest.fixture(scope="module")
def setup():
    params, sampler = random_params(), make_sampler(INT8, PLAIN, STOP_IDS)
    return Setup(params, sampler.layout(params), sampler)


def request(seed, temperature=TEMPERATURE):
    return SampleRequest(PROMPTS, 3, step_key(seed, "test"), temperature)


def assert_same_rows(left, right):
    """Equal tokens, and log-probs that are equal to rounding, in all rows but one.

    Rounding depends on the shapes of a batch. Rarely it puts a key or a value on the other side of the border between
    two int8 numbers, and the log-probs that follow differ by what such a step is worth, until a token differs.
    """
    same = []
    for a, b, logps_a, logps_b in zip(left.tokens, right.tokens, left.logps, right.logps, strict=True):
        count = min(len(a), len(b))
        differs = np.flatnonzero(a[:count] != b[:count])
        count = differs[0] if len(differs) else count
        np.testing.assert_allclose(logps_a[:count], logps_b[:count], atol=0.1)
        same.append(np.array_equal(a, b) and np.allclose(logps_a, logps_b, **FLOAT))
    assert sum(same) >= len(same) - 1, same


def test_log_probs_are_near_those_of_the_full_forward_pass(setup):
    """Within hundredths of a nat; in full precision, within rounding."""
    score_fn, gaps = make_score(MODEL, TEMPERATURE, chunk=0), {}
    cache_only = dataclasses.replace(MODEL, sample_cache_dtype="int8")
    samplers = {name: make_sampler(model, PLAIN, STOP_IDS) for name, model in (("plain", MODEL), ("cache", cache_only))}
    for name, sampler in (samplers | {"int8": setup.sampler}).items():
        rollout = sampler.sample(sampler.layout(setup.params), request(22))
        assert rollout.decode_steps > 4  # past the first cache bucket
        sequences = [
            TrainSequence(PROMPTS[b // 3], tokens, np.ones(len(tokens), np.float32), 0.0, logps)
            for b, (tokens, logps) in enumerate(zip(rollout.tokens, rollout.logps, strict=True))
        ]
        batch = pack(sequences, PackShape(row_length=40, rows=2), max_sequences=12)
        mask = batch.is_action_NZRT
        gaps[name] = np.abs(score_fn(setup.params, batch)[mask] - batch.sampler_logp_NZRT[mask])
    assert gaps["plain"].max() < 2e-4
    assert 1e-4 < gaps["cache"].mean() < 0.02
    assert gaps["cache"].mean() < gaps["int8"].mean() < 0.1 and gaps["int8"].max() < 0.5


@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE])
def test_no_budget_changes_a_row(setup, temperature):
    expected = setup.sampler.sample(setup.weights, request(3, temperature))
    budget = dataclasses.replace(PLAIN, row_buckets=(2, 6), cache_tokens=72)
    sampler = make_sampler(INT8, budget, STOP_IDS)
    assert_same_rows(sampler.sample(setup.weights, request(3, temperature)), expected)
    # Rows of another batch, of which most have ended when the last one goes on alone.
    alone = SampleRequest(PROMPTS[3:], 3, step_key(3, "test"), temperature, row_numbers=(9, 10, 11))
    last = setup.sampler.sample(setup.weights, alone)
    whole = dataclasses.replace(expected, tokens=expected.tokens[9:], logps=expected.logps[9:])
    assert_same_rows(last, whole)


@pytest.mark.long
def test_rows_and_heads_on_several_devices(setup):
    mesh = default_config().generator.mesh.copy_and_resolve_references()
    mesh.decode_tensor = 2
    placement = make_placement(mesh, jax.devices()[:4])
    sampler = make_sampler(
        INT8, SamplerConfig((8,), (4, LIMIT), (2, 4), cache_tokens=30), STOP_IDS, placement
    )
    weights = sampler.layout(setup.params)
    layer = weights["layers"][0]
    assert layer["q"].sharding.shard_shape(layer["q"].shape)[1] == MODEL.num_heads // 2
    assert layer["q_scale"].sharding.shard_shape(layer["q_scale"].shape) == (MODEL.num_heads // 2, MODEL.head_dim)
    assert layer["o_scale"].sharding.shard_shape(layer["o_scale"].shape) == (MODEL.width,)
    compile_now(sampler, weights, (3,))
    with CompileCounter() as counter:
        result = sampler.sample(weights, request(3))
    assert counter.compilations == []
    assert_same_rows(result, setup.sampler.sample(setup.weights, request(3)))
