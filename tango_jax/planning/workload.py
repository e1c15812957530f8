"""How much of everything a turn does: micro-batches, decode batches and their steps, for lengths that are assumed.

In: the job, and how long prompts and responses are. Out: counts of passes and tokens of the busiest process. Stage:
`plan`, before times are predicted; memory does not depend on it.

Lengths are spread evenly, with a mean of `filled` of the longest one allowed.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tango_jax.planning.needs import Tokens
from tango_jax.planning.programs import Job
from tango_jax.rl.packing import TrainSequence, assign_micro_batches, batch_shape, pack_shape
from tango_jax.sampling.buckets import SamplerConfig


class Passes(NamedTuple):
    """An update or a score of one turn."""

    micro_batches: int  # in all calls
    calls: int  # one a minibatch
    tokens: Tokens  # of each micro-batch of a shard


class Segment(NamedTuple):
    """Decode steps in the same shapes."""

    rows: int
    cache: int  # size of the cache of new tokens
    steps: int


class Sampled(NamedTuple):
    """One phase of sampling in the busiest process: decode batches that follow each other, all alike."""

    batches: int
    prompts: int  # of a batch
    prompt_length: int  # bucket
    segments: tuple[Segment, ...]


def spread(count: int, longest: int, filled: float) -> np.ndarray:
    """`count` lengths from 1 to `longest`, evenly spaced around a mean of `filled` x `longest`; the longest first."""
    half = min(filled, 1 - filled)
    shares = np.linspace(filled + half, filled - half, count)
    return np.maximum(1, np.ceil(longest * shares)).astype(int)


def passes_of(job: Job, role: str, filled: float) -> Passes:
    """What `pack` makes of a turn's sequences."""
    policy, config, M = job.policies[role], job.policies[role].config, job.config.rl.samples_per_prompt
    prompts, shards = job.minibatch_prompts(role), policy.placement.num_local_shards
    responses = shuffled(spread(prompts * M, config.max_response, filled))
    lengths = shuffled(spread(prompts, config.max_prompt, filled))
    sequences = [
        TrainSequence([b // M] * lengths[b // M], np.ones(responses[b], np.int32), np.ones(responses[b], np.float32))
        for b in range(prompts * M)
    ]
    pack_as = pack_shape(config)
    micro_batches = assign_micro_batches(sequences, pack_as, prompts * M, prompts, shards)
    shape = batch_shape(pack_as, prompts * M, prompts, shards, longest_prompt=lengths.max())
    calls = config.loss.minibatches
    return Passes(max(map(len, micro_batches)) * calls, calls, Tokens(shape.R, shape.T, shape.Q, shape.X))


def shuffled(lengths: np.ndarray) -> np.ndarray:
    return np.random.default_rng(0).permutation(lengths)


def sampled_by(job: Job, role: str, num_prompts: int, group_size: int, filled: float) -> Sampled:
    """What the sampler makes of `num_prompts` prompts with `group_size` responses each."""
    config, buckets = job.policies[role].config, job.policies[role].sampler.config
    batches = math.ceil(num_prompts / buckets.prompts_per_batch(group_size))
    taken = math.ceil(num_prompts / batches)
    prompts = buckets.padded_prompts(taken, group_size)
    longest = int(spread(num_prompts, config.max_prompt, filled)[0])
    lengths = spread(taken * group_size, config.max_response, filled)
    return Sampled(
        batches=batches,
        prompts=prompts,
        prompt_length=buckets.prompt_bucket(longest),
        segments=tuple(segments_of(lengths, prompts * group_size, buckets)),
    )


def segments_of(lengths: np.ndarray, rows: int, buckets: SamplerConfig) -> Iterator[Segment]:
    """The shapes that a decode batch goes through: `lengths` of its rows, the longest first, in `rows` places."""
    step, cache = 1, buckets.cache_buckets[0]  # prefill has made the first token
    while step < lengths[0]:
        smaller = buckets.smaller_row_bucket(rows)
        # From this step on no more than `smaller` rows are alive.
        target = int(lengths[smaller]) if smaller < len(lengths) else step
        stop = min(target, cache)
        if stop > step:
            yield Segment(rows, cache, stop - step)
            step = stop
        if step >= target:
            rows = smaller or rows
        else:
            cache = buckets.cache_bucket(step + 1)
