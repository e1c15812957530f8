"""Sampling: against the full forward pass, across buckets, filters and the inverse CDF by hand, no late compilation."""
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from support.hlo import collectives
from support.tiny_sampler import FLOAT, MODEL, STOP_IDS, assert_same, compile_now, random_params
from tango_jax.models import transformer
from tango_jax.models.attention import make_packed_attention
from tango_jax.rl.packing import PackShape, TrainSequence, pack
from tango_jax.rl.score import make_score
from tango_jax.runtime.rng import step_key
from tango_jax.runtime.timers import CompileCounter
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.logits import inverse_cdf, keep_mask_BV, sample_token, sample_tokens, sampling_params
from tango_jax.sampling.sampler import Sampler, SampleRequest, make_sampler
from tango_jax.sharding.placement import DECODE_AXES

BUCKETS = SamplerConfig(prompt_buckets=(8,), cache_buckets=(5, 16), row_buckets=(3, 12))
LIMIT = 16
TEMPERATURE = 1.25
PROMPTS = ([10, 11, 12], [20], [30, 31, 32, 33, 34, 35, 36], [40, 41, 42, 43])
KEY = step_key(22, "test")
draw_fn, sample_fn = jax.jit(inverse_cdf), jax.jit(sample_token)


class Setup(NamedTuple):
    params: dict
    sampler: Sampler
    weights: dict
    compiles_before: int  # while warming up


@pytest.fixture(scope="module")
def setup():
    """One sampler, warmed up for groups of 1 and 3."""
    params, sampler = random_params(), make_sampler(MODEL, BUCKETS, STOP_IDS)
    with CompileCounter() as counter:
        weights = sampler.layout(params)
        compile_now(sampler, weights, (1, 3))
    return Setup(params, sampler, weights, len(counter.compilations))


@pytest.fixture(scope="module")
def rollout(setup):
    """Four ragged prompts, three samples each: the batch that most tests look at."""
    return setup.sampler.sample(setup.weights, SampleRequest(PROMPTS, 3, KEY, TEMPERATURE))


@pytest.fixture(scope="module")
def score_fn():
    return functools.cache(lambda temperature: make_score(MODEL, temperature, chunk=0))


def packed(prompts, group_size, rollout):
    sequences = [
        TrainSequence(prompts[b // group_size], tokens, np.ones(len(tokens), np.float32), 0.0, logps)
        for b, (tokens, logps) in enumerate(zip(rollout.tokens, rollout.logps, strict=True))
    ]
    return pack(sequences, PackShape(row_length=40, rows=2), max_sequences=12)


def test_progress_counts_the_rows_that_have_ended(setup):
    """Over all decode batches of a request, here two of twelve rows."""
    ended = []
    setup.sampler.sample(setup.weights, SampleRequest(PROMPTS * 2, 3, KEY, TEMPERATURE, ended_fn=ended.append))
    assert ended == sorted(ended) and 12 in ended and ended[-1] == 24
    assert len(set(ended)) > 3  # also within a batch


@pytest.mark.parametrize("seed, survivors", [(22, 3), (17, 2)])
def test_logps_are_those_of_the_full_forward_pass(setup, score_fn, seed, survivors):
    """In batches whose cache grows and then loses its finished rows; the second keeps one to fill the bucket up."""
    result = setup.sampler.sample(setup.weights, SampleRequest(PROMPTS, 3, step_key(seed, "test"), TEMPERATURE))
    length_B = np.array([len(tokens) for tokens in result.tokens])
    assert result.decode_steps == length_B.max() == LIMIT  # past the first cache bucket
    # 12 rows in step 1; step s + 1 computes the smallest row bucket that holds the rows longer than s.
    rows = [12] + [3 if (length_B > s).sum() <= 3 else 12 for s in range(1, LIMIT)]
    assert result.row_steps == sum(rows)
    assert 5 < rows.index(3) < LIMIT - 1
    kept = np.flatnonzero(length_B > rows.index(3))
    assert len(kept) == survivors and kept.max() > 2

    batch = packed(PROMPTS, 3, result)
    assert batch.segment_NZRT.max() > 1
    scored = score_fn(TEMPERATURE)(setup.params, batch)
    mask = batch.is_action_NZRT
    assert mask.sum() == length_B.sum()
    np.testing.assert_allclose(scored[mask], batch.sampler_logp_NZRT[mask], **FLOAT)
    assert np.ptp(batch.sampler_logp_NZRT[mask]) > 1


def test_rows_end_at_a_stop_token_or_at_the_limit(rollout):
    assert 0 < rollout.is_truncated_B.sum() < 12
    for tokens, logps, is_truncated in zip(rollout.tokens, rollout.logps, rollout.is_truncated_B, strict=True):
        assert len(tokens) == len(logps) and tokens.dtype == np.int32 and logps.dtype == np.float32
        assert not set(tokens[:-1]) & set(STOP_IDS)
        assert (tokens[-1] in STOP_IDS) != is_truncated
        assert len(tokens) == LIMIT or not is_truncated
    assert len({int(tokens[-1]) for tokens in rollout.tokens} & set(STOP_IDS)) > 1


@pytest.mark.parametrize("max_new", [1, 6])
def test_max_new_cuts_the_same_rows_short(setup, rollout, max_new):
    short = setup.sampler.sample(setup.weights, SampleRequest(PROMPTS, 3, KEY, TEMPERATURE, max_new=max_new))
    assert short.decode_steps == max_new
    for b, (tokens, whole) in enumerate(zip(short.tokens, rollout.tokens, strict=True)):
        np.testing.assert_array_equal(tokens, whole[:max_new])
        assert short.is_truncated_B[b] == (tokens[-1] not in STOP_IDS)


def test_max_new_above_the_last_cache_bucket_means_that_bucket(setup, rollout):
    assert_same(setup.sampler.sample(setup.weights, SampleRequest(PROMPTS, 3, KEY, TEMPERATURE, max_new=1000)), rollout)


def test_the_same_key_repeats_and_another_differs(setup, rollout):
    again = setup.sampler.sample(setup.weights, SampleRequest(PROMPTS, 3, KEY, TEMPERATURE))
    for a, b in zip(again.tokens + again.logps, rollout.tokens + rollout.logps, strict=True):
        np.testing.assert_array_equal(a, b)
    other = setup.sampler.sample(setup.weights, SampleRequest(PROMPTS, 3, step_key(23, "test"), TEMPERATURE))
    assert sum(np.array_equal(a, b) for a, b in zip(other.tokens, rollout.tokens, strict=True)) < 4


def test_samples_of_one_prompt_differ(rollout):
    for p in range(4):
        assert len({tuple(tokens) for tokens in rollout.tokens[3 * p : 3 * p + 3]}) > 1


def test_a_row_does_not_depend_on_the_other_prompts(setup, rollout):
    # Other neighbours, then none.
    others = [PROMPTS[0], [50, 51], [60], PROMPTS[3]]
    batch = setup.sampler.sample(setup.weights, SampleRequest(others, 3, KEY, TEMPERATURE))
    assert_same(batch, rollout, slice(0, 3))
    assert_same(batch, rollout, slice(9, 12))
    alone = setup.sampler.sample(setup.weights, SampleRequest(PROMPTS[:1], 3, KEY, TEMPERATURE))
    assert_same(alone, batch, slice(0, 3))


def test_buckets_change_no_result(setup):
    # More prompts than one decode batch holds: the second starts at row 12.
    prompts = [*PROMPTS, [50, 51], [60]]
    expected = setup.sampler.sample(setup.weights, SampleRequest(prompts, 3, KEY, TEMPERATURE))
    assert len(expected.tokens) == 18
    # Two prompts a batch, each in its own prompt bucket; one cache bucket and one row bucket: nothing grows or shrinks.
    plain = make_sampler(MODEL, SamplerConfig((3, 8), (LIMIT,), (6,)), STOP_IDS)
    compile_now(plain, setup.weights, (3,))
    with CompileCounter() as counter:
        result = plain.sample(setup.weights, SampleRequest(prompts, 3, KEY, TEMPERATURE))
    assert counter.compilations == []
    assert_same(result, expected)
    lengths = np.array([len(tokens) for tokens in result.tokens]).reshape(3, 6)
    assert result.row_steps == 6 * lengths.max(axis=1).sum()  # three batches of six rows, each to its longest
    # A group of one in row buckets of 3 and 12: row b draws what row b of the groups drew.
    single = setup.sampler.sample(setup.weights, SampleRequest([PROMPTS[0]] * 3, 1, KEY, TEMPERATURE))
    assert_same(single, expected, slice(0, 3))
    assert single.row_steps == 3 * single.decode_steps


def test_greedy_takes_the_argmax_of_the_full_forward_pass(setup, score_fn):
    sampled = setup.sampler.sample(setup.weights, SampleRequest(PROMPTS, 1, KEY, 0.0))
    length = max(map(len, PROMPTS)) + LIMIT
    sequences = [prompt + list(tokens) for prompt, tokens in zip(PROMPTS, sampled.tokens, strict=True)]
    token_BT = np.array([row + [0] * (length - len(row)) for row in sequences])
    segment_BT = np.arange(length)[None, :] < np.array([[len(row)] for row in sequences])

    @jax.jit
    def argmax_BT(params):
        position_BT = jnp.broadcast_to(jnp.arange(length)[None], token_BT.shape)
        x_BTD = transformer.forward(MODEL, params, token_BT, position_BT, make_packed_attention(1 * segment_BT))
        head_DV = transformer.head_matrix(MODEL, params)
        return transformer.logits_from_hidden(MODEL, params["final_norm"], head_DV, x_BTD).argmax(-1)

    best_BT = np.asarray(argmax_BT(setup.params))
    for b, (prompt, tokens) in enumerate(zip(PROMPTS, sampled.tokens, strict=True)):
        np.testing.assert_array_equal(tokens, best_BT[b, len(prompt) - 1 : len(prompt) - 1 + len(tokens)])
    assert len({tuple(tokens) for tokens in sampled.tokens}) == 4
    # Its log-probs are those of the model at temperature 1.
    batch = packed(PROMPTS, 1, sampled)
    scored = score_fn(1.0)(setup.params, batch)
    mask = batch.is_action_NZRT
    np.testing.assert_allclose(scored[mask], batch.sampler_logp_NZRT[mask], **FLOAT)


def test_top_k_of_one_is_greedy_with_certainty(setup):
    greedy = setup.sampler.sample(setup.weights, SampleRequest(PROMPTS, 3, KEY, 0.0))
    first = setup.sampler.sample(setup.weights, SampleRequest(PROMPTS, 3, KEY, TEMPERATURE, top_k=1))
    for a, b, logps in zip(first.tokens, greedy.tokens, first.logps, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(logps, 0.0, atol=1e-6)


def test_prompts_outside_the_limits_are_refused(setup):
    with pytest.raises(ValueError, match="prompt 1 has 9 tokens; the sampler takes 1 to 8"):
        setup.sampler.sample(setup.weights, SampleRequest([[4], [4] * 9], 3, KEY, TEMPERATURE))
    with pytest.raises(ValueError, match="prompt 0 has 0 tokens; the sampler takes 1 to 8"):
        setup.sampler.sample(setup.weights, SampleRequest([[], [4]], 3, KEY, TEMPERATURE))


def test_nothing_compiles_after_warm_up(setup):
    assert setup.compiles_before > 10
    lengths = itertools.cycle([1, 8, 3, 5, 4])
    with CompileCounter() as counter:
        weights = setup.sampler.layout(setup.params)
        for group_size, counts in ((1, (1, 3, 4, 12, 13, 15)), (3, (1, 2, 4, 5))):
            for number, count in enumerate(counts):
                prompts = [[5 + i] * next(lengths) for i in range(count)]
                setup.sampler.sample(weights, SampleRequest(
                    prompts, group_size, step_key(number), 0.5 * number, top_p=1 - 0.1 * number, top_k=number,
                    max_new=(None, 2, 7)[number % 3],
                ))
        assert counter.compilations == []


# Probabilities 0.5, 0.25, 0.15, 0.1 under other names in the second row.
LOGITS_BV = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.1], [0.1, 0.5, 0.15, 0.25]]))


@pytest.mark.parametrize(
    "top_p, top_k, kept",  # how many of the likeliest
    [
        (1.0, 0, 4), (1.0, 1, 1), (1.0, 3, 3), (1.0, 9, 4),
        (1e-9, 0, 1), (0.45, 0, 1), (0.55, 0, 2), (0.7, 0, 2), (0.8, 0, 3), (0.95, 0, 4),
        (0.55, 3, 1),  # of the three that top-k leaves, 0.5 / 0.9 = 0.556 is enough
        (0.6, 3, 2), (0.6, 2, 1),  # 0.5 / 0.75 = 0.667
        (0.8, 2, 2),
    ],
)
def test_filters_keep_the_likeliest_tokens(top_p, top_k, kept):
    mask_BV = keep_mask_BV(LOGITS_BV, sampling_params(1.0, top_p, top_k))
    np.testing.assert_array_equal(mask_BV[0], np.arange(4) < kept)
    np.testing.assert_array_equal(mask_BV[1], np.isin(np.arange(4), [1, 3, 2, 0][:kept]))


def test_ties_at_the_border_are_all_kept():
    logits_BV = jnp.log(jnp.array([[0.1, 0.3, 0.3, 0.3]]))
    for params in (sampling_params(1.0, top_k=2), sampling_params(1.0, top_p=0.5)):
        np.testing.assert_array_equal(keep_mask_BV(logits_BV, params), [[False, True, True, True]])


@pytest.mark.parametrize(
    "temperature, top_p, top_k, probability",
    [
        (1.0, 1.0, 0, [0.5, 0.25, 0.15, 0.1]),
        (0.5, 1.0, 0, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),  # squares, their sum 0.345
        (1.0, 1.0, 3, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        (1.0, 0.7, 0, [2 / 3, 1 / 3, 0, 0]),
        (0.5, 0.7, 0, [1, 0, 0, 0]),  # the filters see the distribution after temperature: 0.725 is enough
    ],
)
def test_sample_token_draws_from_the_renormalised_distribution(temperature, top_p, top_k, probability):
    grid_B = jnp.asarray((np.arange(1000) + 0.5) / 1000, jnp.float32)
    logits_BV = jnp.broadcast_to(LOGITS_BV[:1], (1000, 4))
    token_B, logp_B = sample_token(logits_BV, grid_B, sampling_params(temperature, top_p, top_k))
    counts_V = np.bincount(token_B, minlength=4)
    np.testing.assert_allclose(counts_V, 1000 * np.array(probability), atol=1.0)
    assert (counts_V > 0).tolist() == [p > 0 for p in probability]
    np.testing.assert_allclose(logp_B, np.log(np.maximum(probability, 1e-30))[token_B], atol=2e-6)


def test_greedy_takes_the_first_of_the_largest_logits():
    logits_BV = np.array([[0.5, 2.0, 2.0, 1.0], [-3.0, -9.0, -3.5, -3.0], [7.0, 7.0, 7.0, 7.0]], np.float32)
    uniform_B = np.array([0.99, 0.5, 0.0], np.float32)
    for params in (sampling_params(0.0), sampling_params(0.0, 0.3, 1)):
        token_B, logp_B = sample_fn(logits_BV, uniform_B, params)
        np.testing.assert_array_equal(token_B, [1, 0, 0])
        np.testing.assert_allclose(logp_B, jax.nn.log_softmax(logits_BV)[np.arange(3), token_B], rtol=1e-6)


@pytest.mark.parametrize("vocab", [1, 5, 64, 70, 200])
def test_inverse_cdf_draws_every_token_as_often_as_its_weight_says(vocab):
    rng = np.random.default_rng(vocab)
    weight_V = rng.integers(0, 4, vocab)
    weight_V[vocab // 2] = 2
    weight_V[64:130] = 0  # in the largest vocabulary a whole chunk without weight, and parts of its neighbours
    total = weight_V.sum()
    # The middle of each of `total` equal parts of [0, 1): a token of weight w owns w of them, in the order of the ids.
    grid_B = (np.arange(total) + 0.5) / total
    token_B = draw_fn(jnp.broadcast_to(weight_V.astype(np.float32), (total, vocab)), grid_B.astype(np.float32))
    np.testing.assert_array_equal(token_B, np.repeat(np.arange(vocab), weight_V))
    assert token_B.dtype == jnp.int32


@pytest.mark.parametrize("vocab, first, last", [(5, 1, 3), (64, 0, 63), (70, 66, 67), (70, 0, 69), (260, 70, 130)])
def test_inverse_cdf_at_the_ends_of_the_unit_interval(vocab, first, last):
    weight_V = np.zeros(vocab, np.float32)
    weight_V[[first, last]] = 0.3, 0.1
    uniform_B = np.array([0.0, np.nextafter(np.float32(1), np.float32(0))], np.float32)
    token_B = draw_fn(jnp.broadcast_to(weight_V, (2, vocab)), uniform_B)
    np.testing.assert_array_equal(token_B, [first, last])


@pytest.mark.parametrize("vocab", [128, 640])
def test_inverse_cdf_never_draws_a_token_without_weight(vocab):
    """Also where a uniform number falls on the border between two tokens, which is where rounding decides."""
    rng = np.random.default_rng(0)
    steps = np.arange(-4, 5) * 2.0**-23  # neighbours among the numbers that jax.random.uniform can return
    for _ in range(10):
        weight_V = (rng.random(vocab) * (rng.random(vocab) < 0.3)).astype(np.float32)
        weight_V.reshape(-1, 64)[rng.random(vocab // 64) < 0.4] = 0.0
        weight_V[rng.integers(vocab)] = 0.5
        border_V = np.cumsum(weight_V, dtype=np.float64) / weight_V.sum(dtype=np.float64)
        uniform_B = np.clip(np.round(border_V * 2**23)[:, None] / 2**23 + steps[None, :], 0, 1 - 2.0**-23).reshape(-1)
        token_B = np.asarray(draw_fn(jnp.broadcast_to(weight_V, (uniform_B.size, vocab)), uniform_B.astype(np.float32)))
        assert token_B.max() < vocab
        assert weight_V[token_B].min() > 0, f"drew tokens {np.unique(token_B[weight_V[token_B] == 0])}"


WAYS = {"plain": (1.0, 1.0, 0), "greedy": (0.0, 1.0, 0), "top_p": (0.7, 0.9, 0), "top_k": (1.0, 1.0, 3),
        "both": (1.0, 0.5, 2)}


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    vocab=st.sampled_from((1, 64, 70)),
    way=st.sampled_from(sorted(WAYS)),
    broken=st.lists(st.tuples(st.integers(0, 69), st.sampled_from([np.nan, np.inf, -np.inf])), max_size=4),
    everywhere=st.sampled_from([None, np.nan, np.inf, -np.inf]),
    uniform=st.floats(0.0, 1.0, exclude_max=True, width=32, allow_subnormal=False),
)
def test_a_token_is_of_the_vocabulary_and_its_log_prob_is_nan_where_a_logit_is_not_finite(
    vocab, way, broken, everywhere, uniform
):
    logits_BV = np.linspace(-2, 3, 2 * vocab, dtype=np.float32).reshape(2, vocab)
    for place, value in broken:
        logits_BV[0, place % vocab] = value
    if everywhere is not None:
        logits_BV[0] = everywhere
    drawn = sample_fn(logits_BV, np.full(2, uniform, np.float32), sampling_params(*WAYS[way]))
    token_B, logp_B = map(np.asarray, drawn)
    assert ((0 <= token_B) & (token_B < vocab)).all()
    assert np.isfinite(logp_B[0]) == np.isfinite(logits_BV[0]).all()
    assert np.isfinite(logp_B[1]) and logp_B[1] <= 1e-6  # its neighbour does not mind


def test_logits_that_are_not_finite_end_the_call(setup):
    """The head is the embedding: what is wrong with one token is in every row's logits."""
    embed_VD = setup.params["embed"].copy()
    embed_VD[7] = np.nan
    weights = setup.sampler.layout(setup.params | {"embed": embed_VD})
    with pytest.raises(FloatingPointError, match="logits are NaN or infinite at new token 1 of row 0, and in 12 of 12"):
        setup.sampler.sample(weights, SampleRequest(PROMPTS, 3, KEY, TEMPERATURE))


def test_step_keys_do_not_collide_and_repeat():
    names = ("solve", "verify", "evaluate", "init", "warm-up")
    paths = [(seed, name, index) for seed in range(8) for name in names for index in range(100)]
    paths += [(seed, index) for seed in range(8) for index in range(50)] + [(seed, "init", name) for seed, name in
                                                                            itertools.product(range(8), names)]
    keys = {step_key(*path).tobytes() for path in paths}
    assert len(keys) == len(paths)
    assert {step_key(*path).tobytes() for path in paths} == keys
    key = step_key(3, "solve", 7)
    assert key.dtype == np.uint32 and key.shape == (2,)


def test_step_key_tells_a_missing_counter_from_zero():
    assert step_key(0, "solve").tolist() != step_key(0, "solve", 0).tolist()


@pytest.mark.parametrize("shape, vocabulary", [((1, 4), 200), ((2, 2), 200), ((2, 2), 201)])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8, "top_k": 50}])
def test_devices_that_share_weights_share_the_rows(shape, vocabulary, filters):
    """The tokens and log-probs of one device, also where rows or vocabulary cannot be split evenly; no device gathers
    the logits of all rows."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(shape), DECODE_AXES)
    rng, rows = np.random.default_rng(4), 6
    logits_BV = rng.normal(size=(rows, vocabulary)).astype(np.float32)
    uniform_B = rng.uniform(size=rows).astype(np.float32)
    spec = P("rows", "tensor") if vocabulary % shape[1] == 0 else P("rows")
    logits = jax.device_put(logits_BV, NamedSharding(mesh, spec))
    shared_fn = jax.jit(functools.partial(sample_tokens, mesh))
    for temperature in (0.0, TEMPERATURE):
        params = sampling_params(temperature, **filters)
        expected, found = sample_fn(logits_BV, uniform_B, params), shared_fn(logits, uniform_B, params)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)
    sent = collectives(shared_fn.lower(logits, uniform_B, params).compile().as_text(), 4)
    largest = rows // shape[0] * vocabulary // shape[1] * 4  # a device's part, padded to whole shares
    assert all(item.size <= 1.5 * largest for item in sent)
    assert len([item for item in sent if item.size > largest / 2]) == (vocabulary % shape[1] == 0)
