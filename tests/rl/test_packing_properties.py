"""Packing: any batch of prompts and responses fits its arrays, whole, whatever is repeated and however short it is."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tango_jax.rl.packing import PackShape, TrainSequence, pack


@st.composite
def batches(draw):
    """(prompts, response lengths P x M, kept or not, rows, shared prompts, shards, most prompts)."""
    P, M = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    prompts = draw(st.lists(st.sampled_from([(1,), (2,), (2, 3), (2, 4, 5), (2, 4, 6)]), min_size=P, max_size=P))
    lengths = draw(st.lists(st.integers(1, 9), min_size=P * M, max_size=P * M))
    is_kept = draw(st.lists(st.booleans(), min_size=P * M, max_size=P * M))
    sizes = [draw(st.sampled_from(choices)) for choices in ((1, 2, 8), (0, 1, 2, 5, JOINED), (1, 2, 3, 8))]
    return prompts, np.reshape(lengths, (P, M)), np.reshape(is_kept, (P, M)), *sizes, P + draw(st.integers(0, 3))


JOINED = -1  # prompts stand in rows, in the place of a number of prompts beside them
EQUAL = [(2, 3)] * 4
REPEATED = (EQUAL + [(1,), (2,), (2, 4, 5), (2, 4, 6)], np.full((8, 8), 9), np.ones((8, 8), bool), 8, 2, 8, 8)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(batches())
@example(REPEATED)  # half of the prompts are equal
@example((EQUAL, np.full((4, 8), 9), np.ones((4, 8), bool), 8, 1, 8, 8))
@example((*REPEATED[:4], JOINED, 8, 8))
def test_every_response_is_packed_once_beside_its_prompt(batch):
    prompts, lengths_PM, is_kept_PM, rows, shared, shards, most = batch
    joins, shared = shared == JOINED, max(shared, 0)
    P, M = lengths_PM.shape
    rng = np.random.default_rng(0)
    sequences = [
        TrainSequence(
            list(prompts[p]), rng.integers(1, 9, lengths_PM[p, m]).astype(np.int32),
            np.full(lengths_PM[p, m], 0.5 * is_kept_PM[p, m], np.float32), 1.0 + p * M + m,
        )
        for p in range(P) for m in range(M)
    ]
    shape = PackShape(10 if shared else 30 if joins else 12, rows, shared, (1, 2) if shared else (), joins)
    packed = pack(sequences, shape, max_sequences=most * M, max_prompts=most, num_shards=shards)
    again = pack([], shape, max_sequences=most * M, max_prompts=most, num_shards=shards)
    assert packed.token_NZRT.shape == again.token_NZRT.shape  # it depends on the maxima alone
    assert not packed.segment_NZRT[packed.num_micro :].any()
    for sequence in sequences:
        n, z, r, where = np.nonzero(packed.adv_NZRT == sequence.adv)
        (place,) = set(zip(n, z, r, strict=True))
        np.testing.assert_array_equal(packed.token_NZRT[place][where], sequence.response)
        np.testing.assert_array_equal(packed.weight_NZRT[place][where], sequence.weight)
        np.testing.assert_array_equal(packed.is_action_NZRT[place][where], sequence.weight > 0)
        in_segment = packed.segment_NZRT[place] == packed.segment_NZRT[place][where[0]]
        own = packed.token_NZRT[place][in_segment][: -len(where)]
        if shared:
            q = packed.prefix_of_NZR[place]
            own = [*packed.prefix_token_NZQX[*place[:2], q, : packed.prefix_length_NZQ[*place[:2], q]], *own]
        if joins and (prompt := packed.prompt_NZRT[place][where[0]]):
            own = [*packed.token_NZRT[place][packed.segment_NZRT[place] == prompt], *own]
        np.testing.assert_array_equal(own, sequence.prompt)
        start = len(sequence.prompt) - packed.position_NZRT[place][in_segment][0]
        assert packed.position_NZRT[place][in_segment][start] == len(sequence.prompt)
