"""Micro-batches, decode batches and their steps in a turn of the busiest process, from assumed or measured lengths."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from tango_jax.method.rehearsal import Rehearsal
from tango_jax.planning.assumed_lengths import AssumedLengths, evenly_spaced_lengths, shuffled
from tango_jax.planning.costs import MicroBatchShape
from tango_jax.planning.job import Job
from tango_jax.rl.packing import (
    PackShape,
    TrainSequence,
    assign_micro_batches,
    batch_shape,
    pack_shape,
    scored_pack_shape,
    sft_pack_shape,
)
from tango_jax.rl.score import is_chunked
from tango_jax.sampling.buckets import SamplerConfig, bucket_of
from tango_jax.sampling.given_text import row_lengths
from tango_jax.sampling.schedule import Limits, Replay, limits_of, replay

TAIL = 4  # a decode step is in the tail if the batch has at most one row in so many left


class UpdateWorkload(NamedTuple):
    shapes: dict[MicroBatchShape, int]  # micro-batches of a shard in all calls, by shape
    calls: int  # one a minibatch
    useful: float  # share of the computed tokens that are no padding

    @property
    def micro_batches(self) -> int:
        return sum(self.shapes.values())

    @property
    def tokens(self) -> int:
        """Computed on a shard, padding included."""
        return sum(count * shape.total for shape, count in self.shapes.items())


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

    @property
    def steps(self) -> int:
        return self.batches * sum(segment.steps for segment in self.segments)

    @property
    def tail(self) -> float:
        """The share of the steps in which few rows are left."""
        most = max((segment.rows for segment in self.segments), default=0)
        few = sum(segment.steps for segment in self.segments if segment.rows * TAIL <= most)
        return self.batches * few / max(1, self.steps)


class Lengths(NamedTuple):
    """Of a role's responses in turns that were measured, and how many they were."""

    longest: int
    mean: float
    share: float = 1.0  # of the prompts that a turn can have
    batches: float = 1.0  # that dynamic sampling drew
    trained_mean: float | None = None  # of the prompts that are trained on; None: of all
    trained_tokens: float | None = None  # of a turn, where dynamic sampling chose the responses that are trained on


Measured = Mapping[str, Lengths]  # by role
NOTHING: Measured = MappingProxyType({})


def _taken(prompts: int, told: Lengths | None) -> int:
    """Of the `prompts` that a turn can have, as many as measured turns had."""
    return max(1, math.ceil(prompts * told.share)) if told else prompts


def response_lengths(
    lengths: AssumedLengths, config: ConfigDict, role: str, count: int, told: Lengths | None
) -> np.ndarray:
    """The longest first; those of measured turns are taken as evenly spread."""
    if told is None:
        return lengths.responses(config, role, count)
    return evenly_spaced_lengths(count, told.longest, told.mean / told.longest)


def update_workload(
    job: Job, role: str, lengths: AssumedLengths, measured: Measured = NOTHING
) -> UpdateWorkload:
    config, shards = job.policies[role].config, job.policies[role].placement.num_local_shards
    rehearsal, told = job.method.rehearsals.get(role), measured.get(role)
    prompts, M = dataclasses.replace(job.policies[role], learner=rehearsal and rehearsal.learner).trained_groups
    is_joined = rehearsal is not None and rehearsal.learner.is_joined
    prompt_B = _joined_prompts(job, role, rehearsal) if is_joined else [b // M for b in range(prompts * M)]
    there = _taken(len(prompt_B) // M, told) * M
    trained = told._replace(mean=told.trained_mean) if told and told.trained_mean is not None else told
    if told and told.trained_tokens is not None:
        mean = told.trained_tokens / (there * job.processes * config.loss.minibatches)
        trained = told._replace(mean=min(mean, told.longest))
    responses = shuffled(response_lengths(lengths, job.config, role, len(prompt_B), trained))
    of_prompts = shuffled(lengths.prompts(job.config, role, prompt_B[-1] + 1), seed=1)
    sequences = [_sequence([p] * of_prompts[p], length)
                 for p, length in zip(prompt_B[:there], responses[:there], strict=True)]
    calls = config.loss.minibatches
    if rehearsal is not None and rehearsal.learner.is_scored:
        return packed(sequences, scored_pack_shape(config), prompts, 0, shards, calls, config.logp_chunk)
    shape = pack_shape(config)
    return packed(sequences, shape, prompts * M, prompts, shards, calls, config.logp_chunk)


def reading_workload(
    job: Job, role: str, count: int, lengths: AssumedLengths, measured: Measured = NOTHING
) -> UpdateWorkload:
    """Of a pass that reads the marks of `count` solutions."""
    policy, told = job.policies[role], measured.get(role)
    count = _taken(count, told)
    marks = shuffled(response_lengths(lengths, job.config, role, count, told))
    prompts = shuffled(lengths.prompts(job.config, role, count), seed=1)
    sequences = [_sequence([p] * prompts[p], marks[p]) for p in range(count)]
    shards, calls = policy.placement.num_local_shards, policy.config.loss.minibatches
    passes = packed(sequences, scored_pack_shape(policy.config), count, 0, shards, 1, policy.config.logp_chunk)
    return passes._replace(calls=calls)


def _joined_prompts(job: Job, role: str, rehearsal: Rehearsal) -> list[int]:
    """The number of the prompt of each joined response in a minibatch: those of one call share its prompts."""
    parts, samples = job.processes * job.policies[role].config.loss.minibatches, []  # of each prompt
    for call in rehearsal.calls.values():
        samples += [call.samples] * math.ceil(call.prompts / parts) if call.prompt.role == role else []
    prompt_B = [p for p, count in enumerate(samples) for _ in range(count)]
    return prompt_B[: math.ceil(rehearsal.learner.prompts / parts)]


def stage_one_workload(job: Job, role: str, lengths: AssumedLengths) -> UpdateWorkload:
    policy, shards = job.policies[role], job.policies[role].placement.num_local_shards
    shape, most = sft_pack_shape(policy.config), policy.sft_examples

    def examples(of: str) -> np.ndarray:
        count = math.ceil(most / (2 if policy.rehearses else 1))
        return lengths.prompts(job.config, of, count) + shuffled(lengths.responses(job.config, of, count))

    whole = np.minimum(shape.row_length, examples(role))
    if policy.rehearses:  # the generator's are left out where they do not fit into a row
        rehearsed = examples("generator")
        whole = np.concatenate([whole, rehearsed[rehearsed <= shape.row_length]])
    return packed([_sequence([], length) for length in whole[:most]], shape, most, 0, shards)


def _sequence(prompt: list[int], length: int) -> TrainSequence:
    return TrainSequence(prompt, np.ones(length, np.int32), np.ones(length, np.float32))


def packed(
    sequences: Sequence[TrainSequence], shape: PackShape, max_sequences: int, max_prompts: int, shards: int,
    calls: int = 1, chunk: int = 0,
) -> UpdateWorkload:
    """What the packing of updates makes of these sequences, in each of `calls` calls. All shards make as many passes as
    the fullest one. `chunk`: tokens whose logits are made at a time."""
    longest = max(len(one.prompt) for one in sequences)
    made = assign_micro_batches(sequences, shape, max_sequences, max_prompts, shards)
    sizes = batch_shape(shape, max_sequences, max_prompts, shards, longest_prompt=max(1, longest))
    tokens, count = MicroBatchShape(sizes.R, sizes.T, sizes.Q, sizes.X), max(map(len, made))
    # A shared prompt is needed once; its last token stays with its responses.
    prompts, responses = {tuple(one.prompt): len(one.prompt) for one in sequences}, sum(
        len(one.response) for one in sequences)
    is_shared = shape.prompts or shape.joins_prompts
    needed = responses + (sum(prompts.values()) if is_shared else sum(len(one.prompt) for one in sequences))
    if is_chunked(tokens.scored, chunk):  # chunks without a sampled token are skipped
        tokens = tokens._replace(sampled_share=min(1.0, responses / (shards * count * tokens.scored)))
    return UpdateWorkload({tokens: count * calls}, calls, needed / (shards * count * tokens.total))


def sampling_workload(
    job: Job, role: str, num_prompts: int, group_size: int, lengths: AssumedLengths, measured: Measured = NOTHING
) -> SamplingWorkload:
    buckets, told = job.policies[role].sampler_config, measured.get(role)
    num_prompts = _taken(num_prompts, told)
    if job.policies[role].model_config.score_head:
        return _scored_rows(job, role, num_prompts, lengths)
    of_prompts = lengths.prompts(job.config, role, num_prompts)
    if buckets.cache_tokens:
        responses = response_lengths(lengths, job.config, role, num_prompts * group_size, told)
        return _refilled_batch(buckets, of_prompts, responses, group_size)
    batches = math.ceil(num_prompts / buckets.prompts_per_batch(group_size))
    taken = math.ceil(num_prompts / batches)
    prompts = buckets.padded_prompts(taken, group_size)
    responses = response_lengths(lengths, job.config, role, taken * group_size, told)
    segments = decode_segments(responses, prompts * group_size, buckets)
    return SamplingWorkload(batches, prompts, buckets.prompt_bucket(of_prompts[0]), tuple(segments))


def _scored_rows(job: Job, role: str, num_prompts: int, lengths: AssumedLengths) -> SamplingWorkload:
    """A process reward model reads each solution once, whatever the samples."""
    config, groups = job.policies[role].sampler_config, job.policies[role].placement.row_multiple
    buckets = row_lengths(config.prompt_buckets[-1])
    of_rows = sorted(bucket_of(int(length), buckets) for length in lengths.prompts(job.config, role, num_prompts))
    return SamplingWorkload(batches=1, prompts=groups, prompt_length=0, segments=(),
                            chunk_lengths=tuple(of_rows[::groups]), shares_prompts=False)


def _refilled_batch(
    buckets: SamplerConfig, of_prompts: np.ndarray, responses: np.ndarray, group_size: int
) -> SamplingWorkload:
    """Continuous batching: response lengths come in no order, and the longest prompts are read first."""
    limits = limits_of(buckets, group_size)
    done = _replayed(limits, tuple(of_prompts), tuple(shuffled(responses)))
    return SamplingWorkload(
        batches=1,
        prompts=limits.chunk_prompts,
        prompt_length=0,  # slots hold both
        segments=tuple(DecodeSegment(*segment.shape, segment.steps) for segment in done.segments),
        chunk_lengths=tuple(buckets.prompt_bucket(of_prompts[prompt]) for prompt in done.chunks),
        shares_prompts=False,
    )


@functools.lru_cache(maxsize=32)
def _replayed(limits: Limits, of_prompts: tuple[int, ...], responses: tuple[int, ...]) -> Replay:
    """It takes seconds for a thousand rows, and is the same at every share of a target's rates."""
    return replay(limits, of_prompts, responses)


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
