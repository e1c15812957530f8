"""Continuous batching gives the tokens of plain batches, whatever the budget, and runs the steps that its schedule
says; nothing compiles late; rows may lie on several devices; a cache in a new shape is made layer by layer."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.tiny_sampler import MODEL, STOP_IDS, assert_same, compile_now, random_params
from tango_jax.config import default_config
from tango_jax.runtime.rng import step_key
from tango_jax.runtime.timers import CompileCounter
from tango_jax.sampling import continuous, resize
from tango_jax.sampling.buckets import SamplerConfig, Shape
from tango_jax.sampling.decode import empty_state
from tango_jax.sampling.resize import compact_rows, grow_cache, make_resize_fns
from tango_jax.sampling.sampler import Sampler, SampleRequest, make_sampler
from tango_jax.sampling.schedule import limits_of, replay
from tango_jax.sampling.slots import empty_slots, make_slot_fns
from tango_jax.sharding.placement import make_placement

LIMIT = 16
BUCKETS = SamplerConfig(prompt_buckets=(4, 8), cache_buckets=(3, 7, LIMIT), row_buckets=(2, 4, 8), cache_tokens=88)
TEMPERATURE = 1.25
GROUP_SIZES = (1, 3)


class Setup(NamedTuple):
    params: dict
    weights: dict
    plain: Sampler
    continuous: Sampler
    compiles_before: int  # while warming up


def make_plain(model):
    return make_sampler(model, dataclasses.replace(BUCKETS, row_buckets=(12,), cache_tokens=0), STOP_IDS)


@pytest.fixture(scope="module")
def setup():
    """A model of one layer, as there are many shapes and each compiles every layer by itself. Rows on several devices
    go through two."""
    model = dataclasses.replace(MODEL, num_layers=1)
    params, plain = random_params(model), make_plain(model)
    continuous = make_sampler(model, BUCKETS, STOP_IDS)
    weights = plain.layout(params)
    with CompileCounter() as counter:
        compile_now(continuous, weights, GROUP_SIZES)
    return Setup(params, weights, plain, continuous, len(counter.compilations))


def with_config(sampler, config):
    """The same jitted functions in other sizes."""
    return dataclasses.replace(sampler, config=config, driver=dataclasses.replace(sampler.driver, config=config))


def check(setup, config, request):
    """Sample with a budget and without, compare, and return the schedule that was followed."""
    sampler = with_config(setup.continuous, config)
    result, expected = sampler.sample(setup.weights, request), setup.plain.sample(setup.weights, request)
    assert_same(result, expected)
    done = replay(limits_of(config, request.group_size), *lengths_as_read(request, result))
    assert (result.decode_steps, result.row_steps) == (done.decode_steps, done.row_steps)
    return done


def lengths_as_read(request, result):
    """How long the prompts are, the longest first, and their responses."""
    order = sorted(range(len(request.prompts)), key=lambda p: -len(request.prompts[p]))
    lengths = [len(result.tokens[p * request.group_size + m]) for p in order for m in range(request.group_size)]
    return [len(request.prompts[p]) for p in order], lengths


def some_prompts(count):
    return [[10 + (7 * p + i) % 50 for i in range(1 + 3 * p % 8)] for p in range(count)]


def test_rows_wait_and_go_on_where_they_were(setup):
    ended = []
    request = SampleRequest(some_prompts(9), 3, step_key(3, "test"), TEMPERATURE, ended_fn=ended.append)
    done = check(setup, BUCKETS, request)
    assert len(set(ended)) > 9 and ended[-1] == 27  # how many rows have ended, after each decode loop
    assert done.saved > 5 and len(done.chunks) == 5  # of two prompts
    assert BUCKETS.shapes == ((8, 5), (8, 11), (2, 24))
    assert {shape for shape, _ in done.segments} == set(BUCKETS.shapes)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    cache_tokens=st.integers(24, 8 * 24),
    cache_buckets=st.sampled_from([(LIMIT,), (3, LIMIT), (7, LIMIT), (3, 7, LIMIT)]),
    smallest=st.integers(0, 2),
    prompts=st.integers(1, 7),
    group_size=st.sampled_from(GROUP_SIZES),
    seed=st.integers(0, 1000),
    temperature=st.sampled_from((0.0, TEMPERATURE)),
    data=st.data(),
)
def test_no_budget_changes_a_token(
    setup, cache_tokens, cache_buckets, smallest, prompts, group_size, seed, temperature, data
):
    row_buckets = BUCKETS.row_buckets[smallest:]
    cache_tokens = max(cache_tokens, row_buckets[0] * 24)
    config = SamplerConfig(BUCKETS.prompt_buckets, cache_buckets, row_buckets, cache_tokens)
    size = prompts * group_size
    limits = data.draw(st.one_of(st.none(), st.lists(st.integers(1, LIMIT), min_size=size, max_size=size)))
    numbers = np.random.default_rng(seed).permutation(1000)[:size]
    done = check(setup, config, SampleRequest(
        some_prompts(prompts), group_size, step_key(seed, "test"), temperature, max_new=limits, row_numbers=numbers
    ))
    passed = [config.shapes.index(segment.shape) for segment in done.segments]
    assert passed == sorted(passed)  # slots never shrink, and rows never become more


def test_a_chunk_of_prompts_is_as_wide_as_its_longest(setup):
    """Short prompts are read in a bucket of their own."""
    widths, fns = [], setup.continuous.driver.fns

    def watched(weights, token_PX, length_P):
        widths.append(token_PX.shape)
        return fns.read(weights, token_PX, length_P)

    driver = dataclasses.replace(setup.continuous.driver, fns=dataclasses.replace(fns, read=watched))
    sampler = dataclasses.replace(setup.continuous, driver=driver)
    prompts = [[5, 6, 7], [5] * 8, [8, 9], [6] * 4, [7] * 5]
    request = SampleRequest(prompts, 1, step_key(1, "test"), TEMPERATURE)
    assert_same(sampler.sample(setup.weights, request), setup.plain.sample(setup.weights, request))
    assert widths == [(2, 8), (2, 4), (2, 4)]  # of lengths 8 and 5, 4 and 3, 2


def test_a_request_that_fits_runs_the_steps_of_a_plain_batch(setup):
    config = dataclasses.replace(BUCKETS, row_buckets=(4,), cache_tokens=4 * 24)
    lengths = [2, 16, 5, 9]
    request = SampleRequest(some_prompts(4), 1, step_key(5, "test"), 0.0, max_new=lengths)
    plain = with_config(setup.plain, dataclasses.replace(config, cache_tokens=0))
    expected = plain.sample(setup.weights, request)
    result = with_config(setup.continuous, config).sample(setup.weights, request)
    assert_same(result, expected)
    longest = max(len(tokens) for tokens in result.tokens)
    assert expected.row_steps == 4 * longest
    assert result.row_steps == 4 + 4 * (longest - 1)


def test_nothing_compiles_after_warm_up(setup):
    # Three shapes of ever more columns. Rows enter each and are sampled in it; they may leave all but the last and come
    # back to all but the first. Two changes of shape; two prompt buckets. No group size needs another program.
    assert setup.compiles_before == 3 * 3 + 2 * 2 + 2 + 2
    with CompileCounter() as counter:
        for number, (count, group_size) in enumerate([(1, 1), (5, 1), (14, 1), (1, 3), (2, 3), (7, 3)]):
            setup.continuous.sample(setup.weights, SampleRequest(
                some_prompts(count), group_size, step_key(number), 0.5 * number, top_p=1 - 0.1 * number, top_k=number,
                max_new=(None, 2, 7)[number % 3],
            ))
        assert counter.compilations == []


def test_logits_that_are_not_finite_end_the_call(setup):
    embed_VD = setup.params["embed"].copy()
    embed_VD[7] = np.nan
    weights = setup.continuous.layout(setup.params | {"embed": embed_VD})
    with pytest.raises(FloatingPointError, match="logits are NaN or infinite at new token 1 of row 0, and in 9 of 9"):
        setup.continuous.sample(weights, SampleRequest(some_prompts(3), 3, step_key(0), TEMPERATURE))


@pytest.fixture(scope="module")
def expected_of_two_layers():
    """Parameters of two layers, a request, and what a plain batch makes of it."""
    params, plain = random_params(), make_plain(MODEL)
    request = SampleRequest(some_prompts(9), 3, step_key(3, "test"), TEMPERATURE)
    return params, request, plain.sample(plain.layout(params), request)


@pytest.mark.long
@pytest.mark.parametrize("decode_tensor", [1, 2])
def test_rows_on_several_devices(expected_of_two_layers, decode_tensor):
    """Each has its own slots; a row that has to wait may go on on another."""
    params, request, expected = expected_of_two_layers
    mesh = default_config().generator.mesh.copy_and_resolve_references()
    mesh.decode_tensor = decode_tensor
    placement = make_placement(mesh, jax.devices()[:4])
    shards = 4 // decode_tensor
    config = SamplerConfig((3, 8), (4, LIMIT), (shards, 2 * shards), cache_tokens=30)
    sampler = make_sampler(MODEL, config, STOP_IDS, placement)
    weights = sampler.layout(params)
    compile_now(sampler, weights, (3,))
    with CompileCounter() as counter:
        result = sampler.sample(weights, request)
    assert counter.compilations == []
    assert_same(result, expected)
    limits = limits_of(sampler.config, 3)
    done = replay(limits, *lengths_as_read(request, result))
    assert limits.shards == shards and done.saved > shards
    assert (result.decode_steps, result.row_steps) == (done.decode_steps, done.row_steps)


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("has_slots", [False, True])
def test_a_cache_changes_its_shape_layer_by_layer(has_slots, monkeypatch):
    model, peaks = dataclasses.replace(MODEL, num_layers=8), []
    replace_layer = resize.replace_layer

    def watched(layers, index, layer_fn):
        def fn(layer):
            new = layer_fn(layer)
            peaks.append(nbytes(jax.live_arrays()))
            return new

        replace_layer(layers, index, fn)

    monkeypatch.setattr(resize, "replace_layer", watched)
    monkeypatch.setattr(continuous, "replace_layer", watched)
    others, keep_B = nbytes(jax.live_arrays()), np.arange(8, dtype=np.int32)
    if has_slots:
        fns, state = make_slot_fns(model, STOP_IDS, 8, 64, None), empty_slots(model, 64, Shape(16, 40))
        changes = [lambda state: continuous._resized(fns, state, Shape(16, 72), np.arange(16, dtype=np.int32)[None]),
                   lambda state: continuous._resized(fns, state, Shape(8, 72), keep_B[None])]
        names = {"k": (), "v": ()}
    else:
        fns, state = make_resize_fns(None), empty_state(model, 64, 16, 8, 32)
        changes = [lambda state: grow_cache(fns, state, 64), lambda state: compact_rows(fns, state, keep_B)]
        names = {"prefix": None, "suffix": None}

    def caches(state):
        return nbytes([getattr(state, name) for name in names])

    for change in changes:
        before, peaks[:] = caches(state), []
        state = change(state)
        after = caches(state)
        rest = 4 * nbytes(state.replace(**names))
        assert len(peaks) == 8
        assert max(peaks) - others < max(before, after) * (1 + 1 / 8) + rest < before + after
