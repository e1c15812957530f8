"""How much of everything a turn does: micro-batches, decode batches and their steps, for lengths that are assumed.

In: the job, and how long prompts and responses are. Out: counts of passes and tokens of the busiest process. Stage:
`plan`, before times are predicted; memory does not depend on it.

Lengths are spread evenly, with a mean of `filled` of the longest one allowed.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tango_jax.planning.needs import Tokens
from tango_jax.planning.programs import Job
from tango_jax.rl.packing import TrainSequence, pack, pack_shape
from tango_jax.sampling.sampler import bucket_of, smaller_bucket


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
    prompts = math.ceil(job.prompts / config.loss.minibatches)
    responses = shuffled(spread(prompts * M, config.max_response, filled))
    lengths = shuffled(spread(prompts, config.max_prompt, filled))
    sequences = [
        TrainSequence([b // M] * lengths[b // M], np.ones(responses[b], np.int32), np.ones(responses[b], np.float32))
        for b in range(prompts * M)
    ]
    batch = pack(sequences, pack_shape(config), prompts * M, prompts, policy.placement.num_local_shards)
    (_, _, Q, X), (_, _, R, T) = batch.prefix_token_NZQX.shape, batch.token_NZRT.shape
    calls = config.loss.minibatches
    return Passes(int(batch.num_micro) * calls, calls, Tokens(R, T, Q, X))


def shuffled(lengths: np.ndarray) -> np.ndarray:
    return np.random.default_rng(0).permutation(lengths)


def sampled_by(job: Job, role: str, num_prompts: int, group_size: int, filled: float) -> Sampled:
    """What the sampler's driver makes of `num_prompts` prompts with `group_size` responses each."""
    policy, config = job.policies[role], job.policies[role].config
    multiple = policy.placement.row_multiple
    row_buckets = sorted({-(-rows // multiple) * multiple for rows in config.row_buckets})
    per_call = max(multiple, row_buckets[-1] // group_size // multiple * multiple)
    batches = math.ceil(num_prompts / per_call)
    taken = math.ceil(num_prompts / batches)
    prompts = per_call if group_size > 1 else bucket_of(taken, row_buckets)
    longest = int(spread(num_prompts, config.max_prompt, filled)[0])
    lengths = spread(taken * group_size, config.max_response, filled)
    return Sampled(
        batches=batches,
        prompts=prompts,
        prompt_length=bucket_of(longest, (*config.prompt_buckets, config.max_prompt)),
        segments=tuple(
            segments_of(lengths, prompts * group_size, row_buckets, (*config.cache_buckets, config.max_response))
        ),
    )


def segments_of(
    lengths: np.ndarray, rows: int, row_buckets: Sequence[int], cache_buckets: Sequence[int]
) -> Iterator[Segment]:
    """The shapes that a decode batch goes through: `lengths` of its rows, the longest first, in `rows` places."""
    step, cache = 1, cache_buckets[0]  # prefill has made the first token
    while step < lengths[0]:
        smaller = smaller_bucket(rows, row_buckets)
        # From this step on no more than `smaller` rows are alive.
        target = int(lengths[smaller]) if smaller < len(lengths) else step
        stop = min(target, cache)
        if stop > step:
            yield Segment(rows, cache, stop - step)
            step = stop
        if step >= target:
            rows = smaller or rows
        else:
            cache = bucket_of(step + 1, cache_buckets)
