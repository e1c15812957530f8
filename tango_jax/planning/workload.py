"""Micro-batches, decode batches and their steps in a turn of the busiest process, from assumed or measured lengths.

Assumed lengths are spread evenly, with a mean of `filled` of the longest allowed.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from tango_jax.planning.costs import MicroBatchShape
from tango_jax.planning.job import Job
from tango_jax.rl.packing import TrainSequence, assign_micro_batches, batch_shape, pack_shape, sft_pack_shape
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.schedule import limits_of, replay


class UpdateWorkload(NamedTuple):
    micro_batches: int  # in all calls
    calls: int  # one a minibatch
    tokens: MicroBatchShape  # of each micro-batch of a shard


class DecodeSegment(NamedTuple):
    rows: int
    cache: int  # columns of the cache of new tokens, or of a slot
    steps: int


class SamplingWorkload(NamedTuple):
    """Equal decode batches or, with a budget of cached tokens, one that is refilled."""

    batches: int
    prompts: int  # of a prompts' pass
    prompt_length: int  # columns of the cache of prompts
    segments: tuple[DecodeSegment, ...]
    chunk_lengths: tuple[int, ...] = ()  # bucket of each prompts' pass, with a budget
    shares_prompts: bool = True  # samples share the cache of their prompt until rows are compacted into a smaller batch

    @property
    def pass_lengths(self) -> tuple[int, ...]:
        return self.chunk_lengths or (self.prompt_length,)


class Lengths(NamedTuple):
    """Of a role's responses in turns that were measured, and how many they were."""

    longest: int
    mean: float
    share: float = 1.0  # of the prompts that a turn can have
    batches: float = 1.0  # that dynamic sampling drew
    trained_mean: float | None = None  # of the prompts that are trained on; None: of all


Measured = Mapping[str, Lengths]  # by role
NOTHING: Measured = MappingProxyType({})


def response_lengths(config: ConfigDict, count: int, filled: float, measured: Lengths | None) -> np.ndarray:
    """Assumed lengths of responses, the longest first."""
    longest, mean = measured[:2] if measured else (config.max_response, filled * config.max_response)
    return evenly_spaced_lengths(count, longest, mean / longest)


def evenly_spaced_lengths(count: int, longest: int, filled: float) -> np.ndarray:
    """From 1 to `longest`, evenly spaced around a mean of `filled` x `longest`; the longest first."""
    half = min(filled, 1 - filled)
    shares = np.linspace(filled + half, filled - half, count)
    return np.maximum(1, np.ceil(longest * shares)).astype(int)


def update_workload(job: Job, role: str, filled: float, measured: Measured = NOTHING) -> UpdateWorkload:
    config, shards = job.policies[role].config, job.policies[role].placement.num_local_shards
    rehearsal, told = job.method.rehearsals.get(role), measured.get(role)
    prompts, M = dataclasses.replace(job.policies[role], learner=rehearsal and rehearsal.learner).trained_groups
    there = max(1, math.ceil(prompts * told.share)) if told else prompts
    trained = told._replace(mean=told.trained_mean) if told and told.trained_mean is not None else told
    responses = shuffled(response_lengths(config, prompts * M, filled, trained))
    lengths = shuffled(evenly_spaced_lengths(prompts, config.max_prompt, filled))
    sequences = [
        TrainSequence([b // M] * lengths[b // M], np.ones(responses[b], np.int32), np.ones(responses[b], np.float32))
        for b in range(there * M)
    ]
    pack_as = pack_shape(config)
    micro_batches = assign_micro_batches(sequences, pack_as, prompts * M, prompts, shards)
    shape = batch_shape(pack_as, prompts * M, prompts, shards, longest_prompt=lengths.max())
    calls = config.loss.minibatches
    tokens = MicroBatchShape(shape.R, shape.T, shape.Q, shape.X)
    return UpdateWorkload(max(map(len, micro_batches)) * calls, calls, tokens)


def stage_one_workload(job: Job, role: str, filled: float) -> UpdateWorkload:
    policy, shards = job.policies[role], job.policies[role].placement.num_local_shards
    shape, count = sft_pack_shape(policy.config), policy.sft_examples
    lengths = shuffled(evenly_spaced_lengths(count, shape.row_length, filled))
    sequences = [TrainSequence([], np.ones(length, np.int32), np.ones(length, np.float32)) for length in lengths]
    micro_batches = assign_micro_batches(sequences, shape, count, 0, shards)
    return UpdateWorkload(max(map(len, micro_batches)), 1, MicroBatchShape(shape.rows, shape.row_length))


def shuffled(lengths: np.ndarray) -> np.ndarray:
    return np.random.default_rng(0).permutation(lengths)


def sampling_workload(
    job: Job, role: str, num_prompts: int, group_size: int, filled: float, measured: Measured = NOTHING
) -> SamplingWorkload:
    config, buckets, told = job.policies[role].config, job.policies[role].sampler_config, measured.get(role)
    num_prompts = max(1, math.ceil(num_prompts * told.share)) if told else num_prompts
    if buckets.cache_tokens:
        return _refilled_batch(buckets, config, num_prompts, group_size, filled, told)
    batches = math.ceil(num_prompts / buckets.prompts_per_batch(group_size))
    taken = math.ceil(num_prompts / batches)
    prompts = buckets.padded_prompts(taken, group_size)
    lengths = response_lengths(config, taken * group_size, filled, told)
    prompt_lengths = evenly_spaced_lengths(num_prompts, config.max_prompt, filled)
    segments = decode_segments(lengths, prompts * group_size, buckets)
    return SamplingWorkload(batches, prompts, buckets.prompt_bucket(prompt_lengths[0]), tuple(segments))


def _refilled_batch(
    buckets: SamplerConfig, config: ConfigDict, num_prompts: int, group_size: int, filled: float, told: Lengths | None
) -> SamplingWorkload:
    """Continuous batching: response lengths come in no order, and the longest prompts are read first."""
    prompt_lengths = evenly_spaced_lengths(num_prompts, config.max_prompt, filled)
    limits = limits_of(buckets, group_size)
    responses = shuffled(response_lengths(config, num_prompts * group_size, filled, told))
    done = replay(limits, prompt_lengths, responses)
    return SamplingWorkload(
        batches=1,
        prompts=limits.chunk_prompts,
        prompt_length=0,  # slots hold both
        segments=tuple(DecodeSegment(*segment.shape, segment.steps) for segment in done.segments),
        chunk_lengths=tuple(buckets.prompt_bucket(prompt_lengths[prompt]) for prompt in done.chunks),
        shares_prompts=False,
    )


def decode_segments(lengths: np.ndarray, rows: int, buckets: SamplerConfig) -> Iterator[DecodeSegment]:
    """The shapes of a decode batch: `lengths` of its rows, the longest first, in `rows` places."""
    step, cache = 1, buckets.cache_buckets[0]  # prefill has made the first token
    while step < lengths[0]:
        smaller = buckets.smaller_row_bucket(rows)
        # From this step on no more than `smaller` rows are alive.
        target = int(lengths[smaller]) if smaller < len(lengths) else step
        stop = min(target, cache)
        if stop > step:
            yield DecodeSegment(rows, cache, stop - step)
            step = stop
        if step >= target:
            rows = smaller or rows
        else:
            cache = buckets.cache_bucket(step + 1)
