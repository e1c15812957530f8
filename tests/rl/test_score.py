"""Scoring of packed rows against a plain softmax over one sequence at a time."""

import jax
import numpy as np
import pytest

from support.update_cases import (
    IS_ACTION_BN,
    MODEL,
    PARAMS,
    TEMPERATURE,
    TOKENS,
    by_response,
    make_batch,
    make_data,
    plain_logps,
    score_fn,
)
from tango_jax.rl.score import micro_batch, token_logps


@pytest.fixture(scope="module")
def data():
    return make_data()


@pytest.fixture(scope="module")
def plain():
    """Log-probs of all tokens and of the sampled ones, one sequence a row."""
    return [np.asarray(values) for values in jax.jit(plain_logps)(PARAMS)]


def in_order(batch, values_NZRT):
    """Values of the action tokens in the order of the sequences, whatever the packing. Told apart by `adv`, which
    the caller has set to the number of the token."""
    mask = batch.is_action_NZRT
    return np.asarray(values_NZRT)[mask][np.argsort(batch.adv_NZRT[mask])]


@pytest.mark.parametrize("chunk", [0, 5, 7, 100])
def test_scores_equal_a_plain_log_softmax(data, plain, chunk):
    batch = make_batch(data | {"adv": by_response(np.arange(TOKENS))})
    assert batch.segment_NZRT.max() > 1 and batch.token_NZRT.shape == (3, 1, 2, 14) and batch.num_micro == 2
    logps = np.asarray(score_fn(chunk)(PARAMS, batch))
    np.testing.assert_allclose(in_order(batch, logps), plain[1][IS_ACTION_BN], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(logps[2], 0.0)  # a micro-batch not in use
    np.testing.assert_array_equal(logps[..., 0], 0.0)


def test_entropies_equal_a_plain_sum(data, plain):
    batch = make_batch(data | {"adv": by_response(np.arange(TOKENS))})

    @jax.jit
    def entropy_BT(params, batch, index):
        return token_logps(MODEL, params, micro_batch(batch, index), TEMPERATURE, chunk=5)[1]

    entropy_NZRT = np.stack([entropy_BT(PARAMS, batch, np.int32(n)) for n in range(3)])[:, None]
    expected = -(np.exp(plain[0]) * plain[0]).sum(-1)[IS_ACTION_BN]
    np.testing.assert_allclose(in_order(batch, entropy_NZRT), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [0, 5])
def test_a_choice_between_two_words_is_scored_by_their_logits_alone(data, plain, chunk):
    batch = make_batch(data | {"adv": by_response(np.arange(TOKENS))})
    other_NZRT = (batch.token_NZRT * 3 + 1) % MODEL.vocab_size
    batch = batch.replace(other_NZRT=other_NZRT)

    @jax.jit
    def both(params, batch, index):
        return token_logps(MODEL, params, micro_batch(batch, index), TEMPERATURE, chunk=chunk)

    scored = [both(PARAMS, batch, np.int32(n)) for n in range(3)]
    logp, entropy = (in_order(batch, np.stack([one[part] for one in scored])[:, None]) for part in (0, 1))
    of_words = plain[0][IS_ACTION_BN]
    place = np.arange(TOKENS)
    chosen, other = (of_words[place, in_order(batch, token)] for token in (batch.token_NZRT, other_NZRT))
    p = np.exp(chosen) / (np.exp(chosen) + np.exp(other))
    np.testing.assert_allclose(logp, np.log(p), rtol=1e-4, atol=1e-5)
    is_two = in_order(batch, batch.token_NZRT) != in_order(batch, other_NZRT)
    expected = -(p * np.log(p) + (1 - p) * np.log1p(-p))
    assert is_two.sum() > 15
    np.testing.assert_allclose(entropy[is_two], expected[is_two], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(score_fn(chunk)(PARAMS, batch))[batch.is_action_NZRT],
                               np.stack([one[0] for one in scored])[:, None][batch.is_action_NZRT], rtol=1e-5)
