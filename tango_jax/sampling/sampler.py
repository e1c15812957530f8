"""Prompts in, sampled token ids and their log-probs out: the driver of the jitted parts in `decode.py`.

A batch starts with all its rows in the smallest cache bucket. The decode loop returns when the bucket is full (the
cache then grows to the next) or when the rows still alive fit a smaller row bucket (they are then compacted into it),
so that finished rows and unused cache cost little. Shapes come from fixed buckets; `warm_up` compiles all of them.
"""

import bisect
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from tango_jax.models import transformer
from tango_jax.records import Rollout
from tango_jax.sampling import decode
from tango_jax.sampling.logits import SamplingParams
from tango_jax.sharding.layouts import decode_shardings, to_local
from tango_jax.sharding.placement import Placement
from tango_jax.text.tokenizer import PAD_ID


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Buckets, each ascending. The last one is the limit: prompt tokens, new tokens, rows of one decode batch."""

    prompt_buckets: tuple[int, ...]
    cache_buckets: tuple[int, ...]
    row_buckets: tuple[int, ...]


class Sampler(NamedTuple):
    """`layout(params)` gives the weights that the other two take (see transformer.split_layers); do it once a phase.

    `sample(weights, prompts, group_size, key_data, temperature, top_p=1, top_k=0, max_new=None, row_numbers=None) ->
    Rollout` takes any number of prompts, each a sequence of ids, and returns group_size responses per prompt,
    prompt-major. `max_new` is one limit on the new tokens or one per row; none is above the last cache bucket. A row's
    randomness depends on the key and on its number alone: its place in the call, or what `row_numbers` says.
    `warm_up(weights, group_sizes)` compiles everything that such calls can need. `parts` are the compiled functions
    themselves, for planning.

    With several processes `layout` concerns all of them; everything after it happens in each by itself.
    """

    layout: Callable
    sample: Callable
    warm_up: Callable
    parts: "Parts"


def bucket_of(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `size`."""
    return buckets[bisect.bisect_left(buckets, size)]


def smaller_bucket(size: int, buckets: Sequence[int]) -> int:
    """The largest bucket below `size`; 0 where there is none."""
    return (0, *buckets)[bisect.bisect_left(buckets, size)]


def sampling_params(temperature: float, top_p: float = 1.0, top_k: int = 0) -> SamplingParams:
    return SamplingParams(np.float32(temperature), np.float32(top_p), np.int32(top_k))


class Parts(NamedTuple):
    """The compiled parts; jax.jit specialises each by shape."""

    layout: Callable
    prefill: Callable
    decode: Callable
    grow: Callable
    compact: Callable


def make_sampler(
    model_config, config: SamplerConfig, stop_ids: tuple[int, ...], placement: Placement | None = None
) -> Sampler:
    """Build a sampler of one policy; without a placement, for the default device.

    On several devices rows are split over them, and the row buckets are rounded up to multiples of their number.

    Raises:
        ValueError: from `sample`, when a prompt is empty or longer than the last prompt bucket.
        FloatingPointError: from `sample`, when logits are NaN or infinite: there is nothing to draw a token from.
    """
    multiple = placement.row_multiple if placement else 1
    config = dataclasses.replace(
        config, row_buckets=tuple(sorted({-(-rows // multiple) * multiple for rows in config.row_buckets}))
    )
    parts = _make_parts(model_config, config, stop_ids, placement)

    def layout(params):
        weights = parts.layout(params)
        return to_local(placement, weights) if placement else weights

    def prompts_per_call(group_size: int) -> int:
        return max(multiple, config.row_buckets[-1] // group_size // multiple * multiple)

    def sample(
        weights, prompts, group_size, key_data, temperature, top_p=1.0, top_k=0, max_new=None, row_numbers=None
    ):
        _check_prompts(prompts, config.prompt_buckets[-1], max_new)
        sampling = sampling_params(temperature, top_p, top_k)
        per_call = prompts_per_call(group_size)
        rows = len(prompts) * group_size
        largest = config.cache_buckets[-1]
        limit_B = np.minimum(np.broadcast_to(largest if max_new is None else max_new, (rows,)), largest)
        number_B = np.arange(rows) if row_numbers is None else np.asarray(row_numbers)
        assert number_B.shape == (rows,), (number_B.shape, rows)
        chunks = []
        for start in range(0, len(prompts), per_call):
            chosen = slice(start * group_size, (start + per_call) * group_size)
            num_prompts = per_call if group_size > 1 else bucket_of(min(rows - start, per_call), config.row_buckets)
            chunks.append(
                _sample_chunk(
                    parts,
                    config,
                    stop_ids,
                    weights,
                    prompts[start : start + per_call],
                    num_prompts,
                    group_size,
                    limit_B[chosen],
                    key_data,
                    sampling,
                    number_B[chosen],
                )
            )
        return Rollout(
            tokens=tuple(tokens for part in chunks for tokens in part.tokens),
            logps=tuple(logps for part in chunks for logps in part.logps),
            is_truncated_B=np.concatenate([part.is_truncated_B for part in chunks]),
            decode_steps=sum(part.decode_steps for part in chunks),
            row_steps=sum(part.row_steps for part in chunks),
        )

    def warm_up(weights, group_sizes: Sequence[int]) -> None:
        for bucket in config.prompt_buckets:
            for group_size in sorted(set(group_sizes)):
                for num_prompts in config.row_buckets if group_size == 1 else (prompts_per_call(group_size),):
                    _visit_shapes(parts, config, weights, num_prompts, group_size, bucket)

    return Sampler(layout, sample, warm_up, parts)


def _make_parts(model_config, config: SamplerConfig, stop_ids, placement: Placement | None) -> Parts:
    first, largest = config.cache_buckets[0], config.cache_buckets[-1]
    # Joined matrices cannot be split over devices.
    join = placement is None or placement.local.shape["tensor"] == 1
    split = functools.partial(transformer.split_layers, model_config, join)
    weights_at = state_at = mesh = None
    if placement:
        params = jax.eval_shape(lambda: transformer.init_params(model_config, jax.random.key(0)))
        weights_at = decode_shardings(placement.decode, jax.eval_shape(split, params))
        # Pinned, so that each part takes what any other has made without compiling once more.
        mesh = placement.local
        state_at = decode.state_shardings(mesh)
    return Parts(
        layout=jax.jit(split, out_shardings=weights_at),
        prefill=jax.jit(
            functools.partial(decode.prefill, model_config, stop_ids, first, largest, mesh), out_shardings=state_at
        ),
        decode=jax.jit(
            functools.partial(decode.decode, model_config, stop_ids), donate_argnums=1, out_shardings=state_at
        ),
        grow=jax.jit(decode.grow, static_argnums=0, out_shardings=state_at),
        compact=jax.jit(decode.compact, out_shardings=state_at),
    )


def _check_prompts(prompts, limit: int, max_new) -> None:
    if not len(prompts) or (max_new is not None and np.min(max_new) < 1):
        raise ValueError(f"the sampler needs a prompt (it got {len(prompts)}) and a new token (max_new={max_new})")
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= limit:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; the sampler takes 1 to {limit} (its last prompt bucket): "
                "shorten the prompt or raise max_prompt"
            )


def _pad_prompts(prompts, count: int, bucket: int) -> tuple[np.ndarray, np.ndarray]:
    token_PS = np.full((count, bucket), PAD_ID, np.int32)
    length_P = np.ones((count,), np.int32)  # rows that only fill the batch: one token, no limit to generate
    for p, prompt in enumerate(prompts):
        token_PS[p, : len(prompt)] = prompt
        length_P[p] = len(prompt)
    return token_PS, length_P


def _sample_chunk(
    parts, config, stop_ids, weights, prompts, num_prompts, group_size, limit_B, key_data, sampling, number_B
):
    """One decode batch from prefill to the last row's end."""
    rows, num_rows = len(prompts) * group_size, num_prompts * group_size
    bucket = bucket_of(max(map(len, prompts)), config.prompt_buckets)
    token_PS, length_P = _pad_prompts(prompts, num_prompts, bucket)
    limit_B, number_B = (np.pad(values, (0, num_rows - rows)).astype(np.int32) for values in (limit_B, number_B))
    state = parts.prefill(weights, token_PS, length_P, limit_B, key_data, number_B, sampling)

    slots = np.arange(num_rows)  # which row of the batch each row of the state holds
    tokens, logps, steps, row_steps, done = [None] * rows, [None] * rows, 1, num_rows, 1
    while True:
        smaller = smaller_bucket(len(slots), config.row_buckets)
        state = parts.decode(weights, state, sampling, np.int32(smaller))
        is_alive_B, steps = np.asarray(state.is_alive_B), int(state.step)
        row_steps, done = row_steps + len(slots) * (steps - done), steps
        alive = int(is_alive_B.sum())
        if alive == 0:
            _collect(state, slots, np.ones_like(is_alive_B), tokens, logps)
            break
        if alive <= smaller:
            _collect(state, slots, ~is_alive_B, tokens, logps)
            # Finished rows fill the bucket up; they are collected once and stay dead.
            keep = np.argsort(~is_alive_B, kind="stable")[:smaller].astype(np.int32)
            slots = np.where(is_alive_B, slots, rows)[keep]
            state = parts.compact(state, keep)
        else:
            state = parts.grow(bucket_of(steps + 1, config.cache_buckets), state)
    _check_finite(logps, float(sampling.temperature))
    is_truncated_B = np.array([row[-1] not in stop_ids for row in tokens], bool)
    return Rollout(tuple(tokens), tuple(logps), is_truncated_B, steps, row_steps)


def _check_finite(logps, temperature: float) -> None:
    """Raises FloatingPointError where a row of log-probs ends in one that is not finite."""
    broken = [b for b, row in enumerate(logps) if not np.isfinite(row).all()]
    if broken:
        raise FloatingPointError(
            f"the logits are NaN or infinite at new token {len(logps[broken[0]])} of row {broken[0]}, and in "
            f"{len(broken)} of {len(logps)} rows in all (temperature {temperature:g}): the weights hold values that "
            "are not finite or too large, or the temperature is too small"
        )


def _collect(state, slots, is_wanted_B, tokens, logps) -> None:
    """Copy the wanted rows' tokens and log-probs out of the state, each into its row of the batch."""
    out_token_BS, out_logp_BS = np.asarray(state.out_token_BS), np.asarray(state.out_logp_BS)
    length_B = np.asarray(state.length_B)
    for b in np.flatnonzero(is_wanted_B & (slots < len(tokens))):
        tokens[slots[b]] = out_token_BS[b, : length_B[b]].copy()
        logps[slots[b]] = out_logp_BS[b, : length_B[b]].copy()


def _visit_shapes(parts, config, weights, num_prompts: int, group_size: int, prompt_bucket: int) -> None:
    """Run every shape that a batch starting here can take, with no row alive, so that nothing is generated."""
    rows = num_prompts * group_size
    token_PS, length_P = _pad_prompts([], num_prompts, prompt_bucket)
    sampling = sampling_params(1.0)
    key_data = np.zeros((2,), np.uint32)
    none_B = np.zeros((rows,), np.int32)
    state = parts.prefill(weights, token_PS, length_P, none_B, key_data, none_B, sampling)
    # What is left, the last first: a state to run, or one whose cache is full. It grows only when its turn comes, so
    # that no more memory is taken than a real batch takes.
    pending, seen = [(state, False)], set()
    while pending:
        state, is_full = pending.pop()
        if is_full:
            state = parts.grow(bucket_of(state.out_token_BS.shape[1] + 1, config.cache_buckets), state)
        shape = (state.out_token_BS.shape, state.prefix.length_P.shape)
        if shape in seen:
            continue
        seen.add(shape)
        state = parts.decode(weights, state, sampling, np.int32(0))
        rows, length = state.out_token_BS.shape
        if length < config.cache_buckets[-1]:
            pending.append((state, True))
        if smaller := smaller_bucket(rows, config.row_buckets):
            pending.append((parts.compact(state, np.zeros((smaller,), np.int32)), False))
