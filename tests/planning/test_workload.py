"""Padding of updates and the tail of decode steps, on lists of lengths by hand."""

from collections import Counter

import numpy as np
import pytest

from tango_jax.cli.command_line import load_config
from tango_jax.config import ROLES
from tango_jax.planning import workload
from tango_jax.planning.assumed_lengths import Even
from tango_jax.planning.costs import MicroBatchShape
from tango_jax.planning.job import sized_job
from tango_jax.planning.sources import plan_source
from tango_jax.planning.targets import machine_of
from tango_jax.planning.workload import (
    DecodeSegment,
    Lengths,
    SamplingWorkload,
    _refilled_batch,
    decode_segments,
    packed,
    stage_one_workload,
    update_workload,
)
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


def job_of(*settings: str):
    config = load_config("tiny", settings)
    models = {role: plan_source(config, role).model_config for role in ROLES}
    return sized_job(config, models, machine_of("cpu", 1))


@pytest.fixture
def given(monkeypatch) -> list[list[TrainSequence]]:
    """What the packing is given, call by call."""
    found = []

    def seen(sequences, *rest):
        found.append(sequences)
        return packed(sequences, *rest)

    monkeypatch.setattr(workload, "packed", seen)
    return found


@pytest.mark.parametrize("minibatches", [1, 2])
def test_first_tries_share_their_prompts_and_second_tries_have_their_own(given, minibatches):
    """Four problems with eight first tries each and at most as many second ones; of a measured turn, a quarter of the
    first tries was followed by another."""
    job = job_of("arm=second_try", "generator.max_prompt=300", "verifier.max_prompt=300", "rl.prompts_per_step=4",
                 "rl.samples_per_prompt=8", f"generator.loss.minibatches={minibatches}")
    for told, tries in (({}, 32), ({"generator": Lengths(32, 16.0, share=(1 + 1 / 4) / 2)}, 8)):
        update_workload(job, "generator", Even(0.5), told)
        responses_of = Counter(one.prompt[0] for one in given.pop())
        assert sorted(responses_of.values()) == [1] * (tries // minibatches) + [8] * (4 // minibatches)


def test_half_of_one_policys_second_stage_one_is_the_generators(given):
    """The generator's examples have up to 10 + 4 tokens. Those that do not fit into a row of nine are left out."""
    limits = ["generator.max_prompt=10", "generator.max_response=4", "verifier.max_prompt=40",
              "verifier.max_response=4", *(f"{role}.sft.batch_size=4" for role in ROLES)]
    for settings in ((), ("verifier.sft.pack_length=9",)):
        job = job_of("arm=self_verify", *limits, *settings)
        for role in ROLES:
            stage_one_workload(job, role, Even(0.5))
        of_generator, of_both = ([len(one.response) for one in sequences] for sequences in given[-2:])
        assert len(of_generator) == 4
        assert of_both[4:] == [length for length in of_generator if length <= (9 if settings else 44)]
    assert 0 < len(of_both) - 4 < 4
