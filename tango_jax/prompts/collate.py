"""Packing: whole sequences (prompt + response, with their per-token numbers) into rows of fixed length.

Comes after rewards and before score and update. Several sequences share a row, told apart by segment ids, so that
little padding is computed. Where prompts are shared, a row holds responses of one prompt only and the prompt stands
beside the rows, computed once for all of them. How sequences are packed changes no result: weights are fixed before.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tango_jax.data.tokenizer import PAD_ID
from tango_jax.records import Batch

MAX_SEGMENTS = 32  # sequences that a packed row may hold; sequence-level ratios are computed for so many


@dataclasses.dataclass(frozen=True)
class TrainSequence:
    """One sequence to train on; the float arrays run over the response's tokens."""

    prompt: Sequence[int]
    response: np.ndarray  # int32[T]
    weight: np.ndarray  # float32[T], the token's share of the loss; 0 leaves it out
    adv: np.ndarray | float = 0.0
    sampler_logp: np.ndarray | float = 0.0


@dataclasses.dataclass(frozen=True)
class PackShape:
    """Static sizes of a Batch; together with the number of sequences they fix its shape."""

    row_length: int  # T
    rows: int  # R, of a micro-batch
    prompts: int = 0  # Q, shared prompts of a micro-batch; 0: every sequence carries its own prompt
    prompt_buckets: tuple[int, ...] = ()  # X is the smallest that holds the batch's longest shared prompt


def assign_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """First-fit decreasing: indices of the sequences of each row. Deterministic; ties keep their order."""
    rows, room = [], []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        assert length <= row_length, f"a sequence of {length} tokens does not fit a row of {row_length}"
        row = next((r for r, free in enumerate(room) if free >= length and len(rows[r]) < MAX_SEGMENTS), None)
        if row is None:
            rows.append([])
            room.append(row_length)
            row = len(rows) - 1
        rows[row].append(index)
        room[row] -= length
    return rows


def _micro_batches(rows_of_prompt: list[tuple[int, list]], shape: PackShape) -> list[list[tuple[int, list]]]:
    """Rows, each with its prompt, into micro-batches of at most R rows and (where shared) Q different prompts."""
    micros, prompts = [[]], set()
    for prompt, row in rows_of_prompt:
        is_full = len(micros[-1]) == shape.rows
        needs_prompt = shape.prompts and prompt not in prompts and len(prompts) == shape.prompts
        if is_full or needs_prompt:
            micros.append([])
            prompts = set()
        micros[-1].append((prompt, row))
        prompts.add(prompt)
    return micros


def pack(sequences: Sequence[TrainSequence], shape: PackShape, max_sequences: int, max_prompts: int = 0) -> Batch:
    """A Batch whose shape depends on `shape`, the prompt bucket and the two maxima, never on how well the batch packs.

    Only `num_micro` micro-batches are computed, so the empty rest of N costs nothing.
    """
    assert len(sequences) <= max_sequences, (len(sequences), max_sequences)
    groups = {}
    for index, sequence in enumerate(sequences):
        groups.setdefault(tuple(sequence.prompt) if shape.prompts else (), []).append(index)
    prompts = list(groups)
    rows_of_prompt = []
    for number, members in enumerate(groups.values()):
        lengths = [len(sequences[i].response) + (1 if shape.prompts else len(sequences[i].prompt)) for i in members]
        for row in assign_rows(lengths, shape.row_length):
            rows_of_prompt.append((number, [members[j] for j in row]))
    micros = _micro_batches(rows_of_prompt, shape)

    full = -(-max_sequences // shape.rows)
    N = full + -(-(max_prompts + full) // shape.prompts) + 1 if shape.prompts else full
    R, T, Q = shape.rows, shape.row_length, shape.prompts
    longest = max(len(prompt) for prompt in prompts) - 1 if Q else 0
    X = next(bucket for bucket in shape.prompt_buckets if bucket >= longest) if Q else 0
    batch = Batch(
        prefix_token_NQX=np.full((N, Q, X), PAD_ID, np.int32),
        prefix_length_NQ=np.zeros((N, Q), np.int32),
        prefix_of_NR=np.zeros((N, R), np.int32),
        is_action_NRT=np.zeros((N, R, T), bool),
        **{f"{name}_NRT": np.zeros((N, R, T), np.int32) for name in ("token", "position", "segment")},
        **{f"{name}_NRT": np.zeros((N, R, T), np.float32)
           for name in ("weight", "adv", "sampler_logp", "old_logp", "ref_logp")},
        num_micro=np.int32(len(micros)),
    )
    for n, micro in enumerate(micros):
        places = {prompt: q for q, prompt in enumerate(dict.fromkeys(prompt for prompt, _ in micro))}
        for prompt, q in places.items() if Q else ():
            batch.prefix_length_NQ[n, q] = len(prompts[prompt]) - 1
            batch.prefix_token_NQX[n, q, : len(prompts[prompt]) - 1] = prompts[prompt][:-1]
        for r, (prompt, row) in enumerate(micro):
            batch.prefix_of_NR[n, r] = places[prompt] if Q else 0
            _fill_row(batch, n, r, [sequences[index] for index in row], is_shared=Q > 0)
    return batch


def _fill_row(batch: Batch, n: int, r: int, row: list[TrainSequence], is_shared: bool) -> None:
    start = 0
    for segment, sequence in enumerate(row, 1):
        # The last prompt token stays with the response: its hidden state scores the response's first token.
        prompt = sequence.prompt[-1:] if is_shared else sequence.prompt
        skipped = len(sequence.prompt) - len(prompt)
        answer = start + len(prompt)
        end = answer + len(sequence.response)
        batch.token_NRT[n, r, start:answer] = prompt
        batch.token_NRT[n, r, answer:end] = sequence.response
        batch.position_NRT[n, r, start:end] = skipped + np.arange(end - start)
        batch.segment_NRT[n, r, start:end] = segment
        batch.weight_NRT[n, r, answer:end] = sequence.weight
        batch.adv_NRT[n, r, answer:end] = sequence.adv
        batch.sampler_logp_NRT[n, r, answer:end] = sequence.sampler_logp
        batch.is_action_NRT[n, r, answer:end] = sequence.weight > 0
        start = end
