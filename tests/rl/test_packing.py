"""Packing of sequences into rows: by hand, and what holds for any sequences."""

import jax
import numpy as np
import pytest

from support.update_cases import tiny_role
from tango_jax.records import Rollout
from tango_jax.rl.packing import PackShape, TrainSequence, action_mask, pack, pack_shape, scored_pack_shape
from tango_jax.rl.rows import MAX_SEGMENTS, assign_groups, assign_rows


def test_pack_shape_of_a_role():
    config = tiny_role()
    config.prompt_buckets = (4,)
    assert pack_shape(config) == PackShape(row_length=7, rows=2, prompts=2, prompt_buckets=(4, 8))
    config.pack_length = 40
    assert pack_shape(config) == PackShape(row_length=40, rows=2, prompts=2, prompt_buckets=(4, 8))
    config.pack_length, config.prompts_per_micro_batch = 0, 0
    assert pack_shape(config) == PackShape(row_length=14, rows=2, prompt_buckets=(4, 8), joins_prompts=True)


def test_texts_that_are_scored_are_packed_whole_with_the_other_word_of_each_mark():
    config = tiny_role()
    assert scored_pack_shape(config) == PackShape(row_length=14, rows=2)
    config.pack_length = 30
    assert scored_pack_shape(config) == PackShape(row_length=30, rows=2)
    marks = TrainSequence([5, 6], np.array([7, 8, 9], np.int32), np.array([0, 0.5, 0], np.float32), 2.0, -0.5,
                          other=np.array([-1, 4, -1], np.int32))
    batch = pack([marks, marks], PackShape(row_length=11, rows=1), 3, has_others=True)
    assert batch.token_NZRT[0, 0, 0].tolist() == [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 0]
    assert batch.other_NZRT[0, 0, 0].tolist() == [0, 0, 0, 4, 0, 0, 0, 0, 4, 0, 0]
    assert np.flatnonzero(batch.is_action_NZRT[0, 0, 0]).tolist() == [3, 8]
    assert pack([marks], PackShape(row_length=11, rows=1), 3).other_NZRT is None
    rollout = Rollout((np.array([7, 8, 9]),), (np.zeros(3),), np.zeros(1, bool), 0, 0, (np.array([-1, 4, -1]),))
    assert action_mask(config, rollout).tolist() == [[False, True, False, False, False, False]]


def test_assign_rows_first_fit_decreasing():
    # By length 6, 5, 4, 3, 2 into rows of 8: 6 opens a row, 5 the next, 4 the third, 3 fits beside 5, 2 beside 6.
    assert assign_rows([5, 3, 4, 2, 6], 8) == [[4, 3], [0, 1], [2]]
    assert assign_rows([2, 2, 2], 4) == [[0, 1], [2]]  # ties keep their order
    assert [len(row) for row in assign_rows([1] * 70, 100)] == [MAX_SEGMENTS, MAX_SEGMENTS, 70 - 2 * MAX_SEGMENTS]
    with pytest.raises(AssertionError, match="9 tokens does not fit a row of 8"):
        assign_rows([3, 9], 8)


def test_assign_rows_properties():
    rng = np.random.default_rng(0)
    for _ in range(100):
        row_length = int(rng.integers(1, 60))
        lengths = rng.integers(1, row_length + 1, rng.integers(1, 120)).tolist()
        rows = assign_rows(lengths, row_length)
        assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
        used = [sum(lengths[index] for index in row) for row in rows]
        assert max(used) <= row_length and max(map(len, rows)) <= MAX_SEGMENTS
        # A sequence opens a row only where it fits no earlier one: two rows half empty cannot both be there.
        half_empty = [2 * n <= row_length and len(row) < MAX_SEGMENTS for n, row in zip(used, rows, strict=True)]
        assert sum(half_empty) < 2


def test_assign_groups_by_hand():
    # Rows of 20 tokens. A group of one takes prompt + response, a larger one its prompt - 1 and 1 + each response.
    # Of the largest, [2, 3, 4], 4 + 9 + 6 = 19 tokens open a row, and 5 + 2 another; [5] opens a third. Then [0, 1], of
    # 2 + 4 + 3, goes to the second.
    prompts, lengths, groups = [3, 3, 5, 5, 5, 9], [3, 2, 8, 5, 2, 9], [[0, 1], [2, 3, 4], [5]]
    assert assign_groups(prompts, lengths, groups, 20) == [[2, 3], [4, 0, 1], [5]]
    # The first row has room for [2] alone, whose 3 tokens are not worth a prompt of 5 once more.
    assert assign_groups([9, 5, 5], [8, 7, 3], [[0], [1, 2]], 25) == [[0], [1, 2]]
    assert assign_groups([9, 1, 1], [8, 20, 3], [[0], [1, 2]], 23) == [[1], [2, 0]]
    with pytest.raises(AssertionError, match=r"a sequence of 3 \+ 8 tokens does not fit a row of 10"):
        assign_groups([3], [8], [[0]], 10)


def test_rows_that_hold_prompts_by_hand():
    tokens = iter(range(20, 40))
    sequences = [
        TrainSequence(prompt, np.array([next(tokens) for _ in range(length)]), np.full(length, 0.5, np.float32), adv)
        for prompt, length, adv in (([7, 8, 9], 2, 1.0), ([7, 8, 9], 1, 2.0), ([5, 6], 2, 3.0), ([4], 1, 4.0),
                                    ([4], 1, 5.0))
    ]
    batch = pack(sequences, PackShape(row_length=16, rows=1, joins_prompts=True), max_sequences=6, max_prompts=3)
    rows = {  # the prompt of two responses without its last token, them with it; then whole sequences
        "token": [7, 8, 9, 20, 21, 9, 22, 5, 6, 23, 24, 4, 25, 4, 26, 0],
        "position": [0, 1, 2, 3, 4, 2, 3, 0, 1, 2, 3, 0, 1, 0, 1, 0],
        "segment": [1, 1, 2, 2, 2, 3, 3, 4, 4, 4, 4, 5, 5, 6, 6, 0],
        "prompt": [0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        "adv": [0, 0, 0, 1, 1, 0, 2, 0, 0, 3, 3, 0, 4, 0, 5, 0],
        "is_action": [0, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 0, 1, 0],
    }
    assert batch.num_micro == 1 and batch.token_NZRT.shape == (6, 1, 1, 16)
    for name, row in rows.items():
        np.testing.assert_array_equal(getattr(batch, f"{name}_NZRT")[0, 0, 0], row, err_msg=name)


def test_responses_of_long_rows_begin_at_few_columns():
    """At multiples of 4 in rows of 2,048, with the prompt right before the first."""
    sequences = [TrainSequence([3] * 6, np.full(n, 9), np.ones(n, np.float32), n) for n in (5, 2)]
    batch = pack([TrainSequence([3], np.array([9]), np.ones(1, np.float32)), *sequences],
                 PackShape(2048, 1, joins_prompts=True), max_sequences=4, max_prompts=2)
    assert batch.segment_NZRT[0, 0, 0, :22].tolist() == [0] * 3 + [1] * 5 + [2] * 6 + [0] * 2 + [3] * 3 + [4] * 2 + [0]
    assert batch.prompt_NZRT[0, 0, 0, :22].tolist() == [0] * 8 + [1] * 6 + [0] * 2 + [1] * 3 + [0] * 3


def test_pack_by_hand():
    sequences = [
        TrainSequence([7, 8], np.array([9], np.int32), np.array([0.5], np.float32), 2.0, np.array([-1.0], np.float32)),
        TrainSequence([7, 8], np.array([5, 6], np.int32), np.array([0.25, 0], np.float32), np.array([3, 4.0]), -2.0),
    ]
    batch = pack(sequences, PackShape(row_length=8, rows=1), max_sequences=2)
    assert batch.num_micro == 1 and batch.prefix_token_NZQX.shape == (2, 1, 0, 0)
    rows = {
        "token": [7, 8, 5, 6, 7, 8, 9, 0], "position": [0, 1, 2, 3, 0, 1, 2, 0], "segment": [1, 1, 1, 1, 2, 2, 2, 0],
        "is_action": [0, 0, 1, 0, 0, 0, 1, 0],  # a token of weight 0 is left out
        "weight": [0, 0, 0.25, 0, 0, 0, 0.5, 0], "adv": [0, 0, 3, 4, 0, 0, 2, 0],
        "sampler_logp": [0, 0, -2, -2, 0, 0, -1, 0], "old_logp": [0] * 8, "ref_logp": [0] * 8,
    }
    for name, row in rows.items():
        np.testing.assert_array_equal(getattr(batch, f"{name}_NZRT"), [[[row]], [[[0] * 8]]], err_msg=name)

    shared = pack(sequences, PackShape(row_length=6, rows=1, prompts=1, prompt_buckets=(3,)), 2, 1)
    np.testing.assert_array_equal(shared.prefix_token_NZQX[0, 0], [[7, 0, 0]])
    np.testing.assert_array_equal(shared.prefix_length_NZQ[0, 0], [1])
    # The last prompt token stays, at its own position.
    rows = {
        "token": [8, 5, 6, 8, 9, 0], "position": [1, 2, 3, 1, 2, 0], "segment": [1, 1, 1, 2, 2, 0],
        "is_action": [0, 1, 0, 0, 1, 0],
    }
    for name, row in rows.items():
        np.testing.assert_array_equal(getattr(shared, f"{name}_NZRT")[0, 0], [row], err_msg=name)


def test_every_batch_fits_the_shape_that_its_maxima_give():
    """Random groups of shared prompts: same array shapes always, every response once, beside its own prompt."""
    rng = np.random.default_rng(0)
    for rows, prompts, shards in ((1, 1, 1), (2, 1, 1), (3, 2, 1), (2, 4, 1), (2, 1, 3), (1, 2, 8)):
        shape, shapes = PackShape(10, rows, prompts, (5,)), set()
        for _ in range(40):
            owner = np.sort(rng.permutation(np.repeat(np.arange(1, 7), 2)))
            sequences = [
                TrainSequence([p] * p, rng.integers(1, 9, n).astype(np.int32), np.ones(n, np.float32), b + 1.0)
                for b, (p, n) in enumerate(zip(owner.tolist(), rng.integers(1, 10, 12).tolist(), strict=True))
            ]
            batch = pack(sequences, shape, max_sequences=12, max_prompts=6, num_shards=shards)
            shapes.add(tuple(leaf.shape for leaf in jax.tree.leaves(batch)))
            assert not batch.is_action_NZRT[batch.num_micro :].any()
            for b, sequence in enumerate(sequences):
                n, z, r, where = (index for index in np.nonzero(batch.adv_NZRT == b + 1))
                assert len(set(n)) == len(set(z)) == len(set(r)) == 1
                np.testing.assert_array_equal(batch.token_NZRT[n, z, r, where], sequence.response)
                q = batch.prefix_of_NZR[n[0], z[0], r[0]]
                length = batch.prefix_length_NZQ[n[0], z[0], q]
                last = batch.token_NZRT[n[0], z[0], r[0], where[0] - 1]
                prefix = [*batch.prefix_token_NZQX[n[0], z[0], q, :length], last]
                assert prefix == sequence.prompt
        assert len(shapes) == 1
