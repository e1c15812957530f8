"""Packing: whole sequences (prompt + response, with their per-token numbers) into rows of fixed length.

Segment ids tell the sequences of a row apart. A prompt is computed once for its responses: it stands beside the rows
(`PackShape.prompts`; a row holds responses to one prompt), or in the row, before them (`joins_prompts`; a row holds
several prompts). Packing changes no result: weights are fixed before.
"""

import dataclasses
import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from tango_jax.models.segments import response_alignment
from tango_jax.records import Batch, Responses, Rollout
from tango_jax.rl.losses import token_weights_BT
from tango_jax.rl.rows import assign_groups, assign_rows, groups_by_prompt, rows_at_most, split_over_shards
from tango_jax.runtime import hosts
from tango_jax.sampling.buckets import bucket_of
from tango_jax.sharding.layouts import place_batch
from tango_jax.sharding.placement import Placement
from tango_jax.text.tokenizer import PAD_ID

MicroBatchRows = list[tuple[int, list["TrainSequence"]]]  # (number of the prompt, sequences) of each row


@dataclasses.dataclass(frozen=True)
class TrainSequence:
    """The float arrays run over the response's tokens."""

    prompt: Sequence[int]
    response: np.ndarray  # int32[T]
    weight: np.ndarray  # float32[T], the token's share of the loss; 0 leaves it out
    adv: np.ndarray | float = 0.0
    sampler_logp: np.ndarray | float = 0.0
    other: np.ndarray | None = None  # int32[T], see Batch.other_NZRT


@dataclasses.dataclass(frozen=True)
class PackShape:
    """Static sizes of a Batch; with the number of sequences they fix its shape."""

    row_length: int  # T
    rows: int  # R, of a micro-batch
    prompts: int = 0  # Q, shared prompts of a micro-batch; 0: rows hold the prompts
    prompt_buckets: tuple[int, ...] = ()  # X is the smallest that holds the batch's longest shared prompt
    joins_prompts: bool = False  # with Q = 0: a prompt stands once in a row, before its responses


class BatchShape(NamedTuple):
    """On the shards of one process."""

    N: int  # micro-batches
    Z: int  # shards
    Q: int  # shared prompts
    X: int  # tokens of a shared prompt
    R: int  # rows
    T: int  # tokens of a row


def pack_shape(role_config: ConfigDict) -> PackShape:
    longest = role_config.max_response + (1 if role_config.prompts_per_micro_batch else role_config.max_prompt)
    return PackShape(
        row_length=role_config.pack_length or longest,
        rows=role_config.rows_per_micro_batch,
        prompts=role_config.prompts_per_micro_batch,
        prompt_buckets=(*role_config.prompt_buckets, role_config.max_prompt),
        joins_prompts=not role_config.prompts_per_micro_batch,
    )


def sft_pack_shape(role_config: ConfigDict) -> PackShape:
    """The shape of packed SFT batches, in which every prompt has one response."""
    length = role_config.sft.pack_length or role_config.max_prompt + role_config.max_response
    return PackShape(length, role_config.sft.rows_per_micro_batch)


def scored_pack_shape(role_config: ConfigDict) -> PackShape:
    """The shape of batches of texts that are scored: as in SFT, every prompt has one response."""
    longest = role_config.max_prompt + role_config.max_response
    return PackShape(max(longest, role_config.pack_length), role_config.rows_per_micro_batch)


def action_mask(config: ConfigDict, rollout: Rollout) -> np.ndarray:
    """bool[B, max_response], sampled tokens including EOS, or the marks of texts that were read; `loss.mask_overlong`
    leaves out truncated responses."""
    if rollout.others is not None:
        is_mark_BT = np.zeros((len(rollout.others), config.max_response), bool)
        for is_mark_T, other_T in zip(is_mark_BT, rollout.others, strict=True):
            is_mark_T[: len(other_T)] = other_T >= 0
        return is_mark_BT
    length_B = np.array([len(tokens) for tokens in rollout.tokens], int)
    if config.loss.mask_overlong:
        length_B = np.where(rollout.is_truncated_B, 0, length_B)
    return np.arange(config.max_response)[None, :] < length_B[:, None]


def pack_minibatch(
    config: ConfigDict, placement: Placement, number: int, learner: Responses, adv_BT: np.ndarray,
    is_action_BT: np.ndarray,
) -> Batch:
    """Minibatch `number`: every n-th group, and this process's rows of it, on its devices."""
    loss, rollout, group_size = config.loss, learner.rollout, learner.group_size
    is_chosen_B = np.zeros(len(learner), bool)
    for rows in learner.groups()[number :: loss.minibatches]:
        is_chosen_B[rows] = True
    weight_BT = np.zeros(is_action_BT.shape, np.float32)
    weight_BT[is_chosen_B] = token_weights_BT(is_action_BT[is_chosen_B], loss.aggregation, config.max_response)
    first, last = hosts.own_range(len(learner.prompts))
    sequences = [
        TrainSequence(
            prompt=learner.prompts[b // group_size],
            response=rollout.tokens[b],
            weight=weight_BT[b, : len(rollout.tokens[b])],
            adv=adv_BT[b, : len(rollout.tokens[b])],
            sampler_logp=rollout.logps[b],
            other=rollout.others and rollout.others[b],
        )
        for b in range(first * group_size, last * group_size)
        if is_chosen_B[b]
    ]
    most = learner.most_prompts or len(learner.prompts)
    max_prompts = prompts_per_minibatch(most, jax.process_count(), loss.minibatches, learner.is_joined)
    if rollout.others is not None:
        assert group_size == 1, group_size
        batch = pack(sequences, scored_pack_shape(config), max_prompts, 0, placement.num_local_shards, has_others=True)
    else:
        batch = pack(sequences, pack_shape(config), max_prompts * group_size, max_prompts, placement.num_local_shards)
    return place_batch(placement, batch)


def prompts_per_minibatch(num_prompts: int, num_processes: int, minibatches: int, is_joined: bool = False) -> int:
    """The most prompts of one minibatch that a process can have."""
    # Groups of joined responses differ in size: all of a process's may be in one minibatch.
    return math.ceil(math.ceil(num_prompts / num_processes) / (1 if is_joined else minibatches))


def _micro_batches(sequences: Sequence[TrainSequence], shape: PackShape) -> list[MicroBatchRows]:
    """Rows in micro-batches of at most R rows and Q shared prompts."""
    if shape.joins_prompts:
        prompts = [tuple(sequence.prompt) for sequence in sequences]
        lengths = [len(sequence.response) for sequence in sequences]
        rows = assign_groups([len(prompt) for prompt in prompts], lengths, groups_by_prompt(prompts), shape.row_length)
        found = [(0, [sequences[i] for i in row]) for row in rows]
        return [found[first : first + shape.rows] for first in range(0, len(found), shape.rows)]
    micros, prompts = [[]] if sequences else [], set()
    shared = [tuple(sequence.prompt) if shape.prompts else () for sequence in sequences]
    for number, group in enumerate(groups_by_prompt(shared)):
        members = [sequences[i] for i in group]
        lengths = [len(item.response) + (1 if shape.prompts else len(item.prompt)) for item in members]
        for row in assign_rows(lengths, shape.row_length):
            is_full = len(micros[-1]) == shape.rows
            needs_prompt = shape.prompts and number not in prompts and len(prompts) == shape.prompts
            if is_full or needs_prompt:
                micros.append([])
                prompts = set()
            micros[-1].append((number, [members[j] for j in row]))
            prompts.add(number)
    return micros


def pack(
    sequences: Sequence[TrainSequence],
    shape: PackShape,
    max_sequences: int,
    max_prompts: int = 0,
    num_shards: int = 1,
    has_others: bool = False,
) -> Batch:
    """This process's part of a Batch; all processes must call it. A prompt has at most max_sequences / max_prompts
    responses. The shape does not depend on how well the batch packs. `has_others`: sequences are scored."""
    assert len(sequences) <= max_sequences, (len(sequences), max_sequences)
    shards = assign_micro_batches(sequences, shape, max_sequences, max_prompts, num_shards)
    longest = max((len(sequence.prompt) for sequence in sequences), default=1)
    # Over all processes: they run one program.
    longest, num_micro = hosts.max_over_processes(longest, max(map(len, shards)))
    sizes = batch_shape(shape, max_sequences, max_prompts, num_shards, longest)
    batch = empty_batch(sizes, shape.joins_prompts, has_others).replace(num_micro=np.int32(num_micro))
    N = batch.token_NZRT.shape[0]
    assert num_micro <= N, (num_micro, N)
    for z, micros in enumerate(shards):
        for n, micro in enumerate(micros):
            _fill_micro_batch(batch, n, z, micro)
    return batch


def assign_micro_batches(
    sequences: Sequence[TrainSequence], shape: PackShape, max_sequences: int, max_prompts: int, num_shards: int
) -> list[list[MicroBatchRows]]:
    if shape.prompts or shape.joins_prompts:
        prompts = [tuple(sequence.prompt) for sequence in sequences]
        groups = groups_by_prompt(prompts, math.ceil(max_sequences / max_prompts))
    else:
        groups = [[index] for index in range(len(sequences))]
    sizes = [len(sequences[group[0]].prompt) + sum(len(sequences[i].response) for i in group) for group in groups]
    shards = split_over_shards(groups, sizes, num_shards)
    return [_micro_batches([sequences[i] for i in members], shape) for members in shards]


def batch_shape(
    shape: PackShape, max_sequences: int, max_prompts: int, num_shards: int, longest_prompt: int
) -> BatchShape:
    """The shape of a batch that holds these maxima, however it packs."""
    R, T, Q, Z = shape.rows, shape.row_length, shape.prompts, num_shards
    if not Q:
        rows = rows_at_most(max_sequences, max_prompts if shape.joins_prompts else 0, Z)
        return BatchShape(N=math.ceil(rows / R), Z=Z, Q=0, X=0, R=R, T=T)
    group_size, shard_prompts = math.ceil(max_sequences / max_prompts), math.ceil(max_prompts / Z)
    # A micro-batch ends when its rows are full, at most `full` times, or when it has Q prompts and the next row needs
    # another one. A prompt counts once for that, and once more whenever full rows have cut its group in two.
    full = math.ceil(shard_prompts * group_size / R)
    N = full + math.ceil((shard_prompts + full) / Q) + 1
    # A prompt's last token stays with its responses.
    return BatchShape(N=N, Z=Z, Q=Q, X=bucket_of(longest_prompt - 1, shape.prompt_buckets), R=R, T=T)


def empty_batch(shape: BatchShape, joins_prompts: bool = False, has_others: bool = False) -> Batch:
    N, Z, Q, X, R, T = shape
    return Batch(
        prompt_NZRT=np.zeros((N, Z, R, T), np.int32) if joins_prompts else None,
        other_NZRT=np.zeros((N, Z, R, T), np.int32) if has_others else None,
        prefix_token_NZQX=np.full((N, Z, Q, X), PAD_ID, np.int32),
        prefix_length_NZQ=np.zeros((N, Z, Q), np.int32),
        prefix_of_NZR=np.zeros((N, Z, R), np.int32),
        is_action_NZRT=np.zeros((N, Z, R, T), bool),
        **{f"{name}_NZRT": np.zeros((N, Z, R, T), np.int32) for name in ("token", "position", "segment")},
        **{f"{name}_NZRT": np.zeros((N, Z, R, T), np.float32)
           for name in ("weight", "adv", "sampler_logp", "old_logp", "ref_logp")},
        num_micro=np.int32(0),
    )


def _fill_micro_batch(batch: Batch, n: int, z: int, micro: MicroBatchRows) -> None:
    Q = batch.prefix_token_NZQX.shape[2]
    places = {number: q for q, number in enumerate(dict.fromkeys(number for number, _ in micro))}
    for r, (number, row) in enumerate(micro):
        if Q:
            prompt, q = row[0].prompt, places[number]
            batch.prefix_of_NZR[n, z, r] = q
            batch.prefix_length_NZQ[n, z, q] = len(prompt) - 1
            batch.prefix_token_NZQX[n, z, q, : len(prompt) - 1] = prompt[:-1]
        start, segment, joins_prompts = 0, 1, batch.prompt_NZRT is not None
        for _, group in groupby(row, key=lambda sequence: tuple(sequence.prompt) if joins_prompts else ()):
            start, segment = _fill_group(batch, (n, z, r), start, segment, list(group))


def _fill_group(
    batch: Batch, place: tuple[int, int, int], start: int, segment: int, group: list[TrainSequence]
) -> tuple[int, int]:
    """Write sequences from column `start` on; with `joins_prompts` they continue one prompt. Returns where the next
    group starts, and its first segment."""
    joined, align = 0, 1
    if batch.prompt_NZRT is not None and len(group) > 1 and len(group[0].prompt) > 1:
        prompt, align = group[0].prompt[:-1], response_alignment(batch.token_NZRT.shape[-1])
        end = -(-(start + len(prompt)) // align) * align
        batch.token_NZRT[*place, end - len(prompt) : end] = prompt
        batch.position_NZRT[*place, end - len(prompt) : end] = np.arange(len(prompt))
        batch.segment_NZRT[*place, end - len(prompt) : end] = joined = segment
        start, segment = end, segment + 1
    is_shared = batch.prefix_token_NZQX.shape[2] > 0 or joined > 0
    for sequence in group:
        # The last prompt token stays with the response: its hidden state scores the response's first token.
        prompt = sequence.prompt[-1:] if is_shared else sequence.prompt
        skipped, start = len(sequence.prompt) - len(prompt), -(-start // align) * align
        answer = start + len(prompt)
        end = answer + len(sequence.response)
        batch.token_NZRT[*place, start:answer] = prompt
        batch.token_NZRT[*place, answer:end] = sequence.response
        batch.position_NZRT[*place, start:end] = skipped + np.arange(end - start)
        batch.segment_NZRT[*place, start:end] = segment
        if joined:
            batch.prompt_NZRT[*place, start:end] = joined
        batch.weight_NZRT[*place, answer:end] = sequence.weight
        batch.adv_NZRT[*place, answer:end] = sequence.adv
        batch.sampler_logp_NZRT[*place, answer:end] = sequence.sampler_logp
        if batch.other_NZRT is not None:
            batch.other_NZRT[*place, answer:end] = np.maximum(sequence.other, 0)
        # Metrics are means over actions: a response that the loss leaves out, such as an overlong one, has none.
        batch.is_action_NZRT[*place, answer:end] = sequence.weight > 0
        start, segment = end, segment + 1
    return start, segment
