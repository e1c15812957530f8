"""Padding of updates and the tail of decode steps, on lists of lengths by hand."""

import numpy as np
import pytest

from tango_jax.planning.costs import MicroBatchShape
from tango_jax.planning.workload import DecodeSegment, SamplingWorkload, _refilled_batch, decode_segments, packed
from tango_jax.rl.packing import PackShape, TrainSequence
from tango_jax.sampling.buckets import SamplerConfig


def sequences(prompts: list[int], responses: list[list[int]]) -> list[TrainSequence]:
    return [TrainSequence([p] * length, np.ones(count, np.int32), np.ones(count, np.float32))
            for p, (length, counts) in enumerate(zip(prompts, responses, strict=True)) for count in counts]


def test_padding_by_hand():
    """A row has the prompt's last token for each response. The first prompt's responses fill a row of 11 and a part of
    another; those of the second, 7 and 4 tokens, one row. Each prompt has a micro-batch, of two rows and a prompt of
    8: 60 tokens are computed for 5 + 7 of prompts and 23 of responses."""
    given = sequences([5, 7], [[10, 4], [6, 3]])
    shape = PackShape(row_length=11, rows=2, prompts=1, prompt_buckets=(8,))
    found = packed(given, shape, 4, 2, shards=1, calls=3)
    assert found.shapes == {MicroBatchShape(2, 11, 1, 8): 6} and (found.calls, found.tokens) == (3, 180)
    assert found.useful == pytest.approx(35 / 60)
    # Two devices have one micro-batch each. Four have one, too: two of them compute nothing but padding.
    assert packed(given, shape, 4, 2, shards=2).useful == pytest.approx(35 / 60)
    idle = packed(given, shape, 4, 2, shards=4)
    assert (idle.micro_batches, idle.useful) == (1, pytest.approx(35 / 120))


def test_padding_without_shared_prompts_by_hand():
    """Each response carries its prompt: 15 and 9 tokens, 13 and 10, in rows of 24: two micro-batches of a row."""
    found = packed(sequences([5, 7], [[10, 4], [6, 3]]), PackShape(row_length=24, rows=1), 4, 0, shards=1)
    assert found.shapes == {MicroBatchShape(1, 24): 2} and found.useful == pytest.approx((15 + 9 + 13 + 10) / 48)


def test_the_tail_of_a_batch_by_hand():
    """Prompts give the first tokens. After two steps two of eight rows are left, and one of them for six more steps."""
    buckets = SamplerConfig((4,), (16,), (2, 8))
    segments = tuple(decode_segments(np.array([9, 3, 3, 3, 2, 2, 2, 2]), 8, buckets))
    assert segments == (DecodeSegment(8, 16, 2), DecodeSegment(2, 16, 6))
    done = SamplingWorkload(batches=3, prompts=8, prompt_length=4, segments=segments)
    assert (done.steps, done.tail) == (24, pytest.approx(6 / 8))
    assert SamplingWorkload(1, 1, 4, ()).tail == 0  # all rows ended with their first token


def test_the_tail_of_a_refilled_batch_by_hand():
    """Four slots of 20 columns. Three rows end after two steps; the batch shrinks to one slot for the other twelve."""
    buckets = SamplerConfig((4,), (16,), (1, 4), cache_tokens=80)
    done = _refilled_batch(buckets, np.array([4, 4, 3, 2]), np.array([15, 3, 3, 3]), group_size=1)
    assert done.segments == (DecodeSegment(4, 20, 2), DecodeSegment(1, 20, 12))
    assert done.tail == pytest.approx(12 / 14)
