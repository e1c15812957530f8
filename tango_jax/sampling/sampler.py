"""Prompts in; sampled token ids and their log-probabilities out.

The sampler runs on the host and drives the jitted functions of `decode.py`. A decode batch starts with all its rows in
the smallest cache bucket. The decode loop returns when that bucket is full, and the cache then grows to the next one;
or when the rows that are still alive fit a smaller row bucket, into which they are then compacted. Finished rows and
unused cache therefore cost little. All shapes come from fixed buckets (`buckets.py`), and `warm_up` compiles all of
them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from tango_jax.models import transformer
from tango_jax.models.transformer import ModelConfig
from tango_jax.records import Rollout
from tango_jax.sampling import decode
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.decode import DecodeState, PromptBatch
from tango_jax.sampling.logits import sampling_params
from tango_jax.sharding.layouts import decode_shardings, to_local
from tango_jax.sharding.placement import Placement
from tango_jax.text.tokenizer import PAD_ID

NO_ROW = -1


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """M responses to each of P prompts, B = P x M rows in all, prompt-major."""

    prompts: Sequence[Sequence[int]]  # P lists of token ids
    group_size: int  # M
    key_data: np.ndarray  # uint32[2]
    temperature: float  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 switches the filter off
    # New tokens allowed, for all rows or int[B]. None, and whatever is larger, means the last cache bucket.
    max_new: int | Sequence[int] | np.ndarray | None = None
    # int[B]. A row's randomness depends on the key and on its number alone, never on the batch around it. None: 0..B-1.
    row_numbers: Sequence[int] | np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Samples from one model; made by `make_sampler`.

    With several processes `layout` concerns all of them; everything after it happens in each process by itself.
    """

    config: SamplerConfig
    stop_ids: tuple[int, ...]
    placement: Placement | None  # None: the default device alone
    # Jitted once; jax.jit specialises each by shape.
    layout_fn: Callable  # (params) -> weights
    prefill_fn: Callable  # (weights, PromptBatch, SamplingParams) -> DecodeState
    decode_fn: Callable  # (weights, DecodeState, SamplingParams, min_alive) -> DecodeState; the state is donated
    grow_fn: Callable  # (cache bucket, DecodeState) -> DecodeState
    compact_fn: Callable  # (DecodeState, keep_B) -> DecodeState

    def layout(self, params: dict) -> dict:
        """The weights that the other methods take (see transformer.split_layers). Call it once per phase."""
        weights = self.layout_fn(params)
        return to_local(self.placement, weights) if self.placement else weights

    def sample(self, weights: dict, request: SampleRequest) -> Rollout:
        """Sample every row of the request, in as many decode batches as it takes.

        Raises:
            ValueError: there is no prompt, one is empty or longer than the last prompt bucket, or a limit is below 1.
            FloatingPointError: logits are NaN or infinite, so there is nothing to draw a token from.
        """
        _check_request(request, self.config.prompt_buckets[-1])
        M, longest = request.group_size, self.config.cache_buckets[-1]
        num_rows = len(request.prompts) * M
        limit_B = np.broadcast_to(longest if request.max_new is None else request.max_new, (num_rows,))
        limit_B = np.minimum(limit_B, longest)
        number_B = np.arange(num_rows) if request.row_numbers is None else np.asarray(request.row_numbers)
        assert number_B.shape == (num_rows,), (number_B.shape, num_rows)
        per_batch, rollouts = self.config.prompts_per_batch(M), []
        for start in range(0, len(request.prompts), per_batch):
            rows = slice(start * M, (start + per_batch) * M)
            batch = dataclasses.replace(
                request,
                prompts=request.prompts[start : start + per_batch],
                max_new=limit_B[rows],
                row_numbers=number_B[rows],
            )
            rollouts.append(self._sample_batch(weights, batch))
        return Rollout(
            tokens=tuple(tokens for rollout in rollouts for tokens in rollout.tokens),
            logps=tuple(logps for rollout in rollouts for logps in rollout.logps),
            is_truncated_B=np.concatenate([rollout.is_truncated_B for rollout in rollouts]),
            decode_steps=sum(rollout.decode_steps for rollout in rollouts),
            row_steps=sum(rollout.row_steps for rollout in rollouts),
        )

    def warm_up(self, weights: dict, group_sizes: Sequence[int]) -> None:
        """Compile everything that requests with these group sizes can need. Nothing is generated."""
        for prompt_bucket in self.config.prompt_buckets:
            for group_size in sorted(set(group_sizes)):
                for num_prompts in self.config.prompt_counts(group_size):
                    self._visit_shapes(weights, num_prompts, group_size, prompt_bucket)

    def _sample_batch(self, weights: dict, request: SampleRequest) -> Rollout:
        """One decode batch, from prefill until its last row has ended. Every row's limit and number are given."""
        config, num_rows = self.config, len(request.row_numbers)
        num_prompts = config.padded_prompts(len(request.prompts), request.group_size)
        batch = _pad(request, num_prompts, config.prompt_bucket(max(map(len, request.prompts))))
        sampling = sampling_params(request.temperature, request.top_p, request.top_k)
        state = self.prefill_fn(weights, batch, sampling)

        # Which row of the request each row of the state holds; NO_ROW for padding and for rows collected before.
        row_B = np.arange(num_prompts * request.group_size)
        row_B = np.where(row_B < num_rows, row_B, NO_ROW)
        responses: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        step, row_steps = 1, len(row_B)  # prefill has sampled every row's first token
        while True:
            smaller = config.smaller_row_bucket(len(row_B))
            state = self.decode_fn(weights, state, sampling, np.int32(smaller))
            previous, step = step, int(state.step)
            row_steps += len(row_B) * (step - previous)
            is_alive_B = np.asarray(state.is_alive_B)
            num_alive = is_alive_B.sum()
            if num_alive == 0:
                responses |= _collect(state, row_B)
                break
            if num_alive <= smaller:
                responses |= _collect(state, np.where(is_alive_B, NO_ROW, row_B))
                # Finished rows fill the smaller bucket up, because its size is fixed; they stay dead.
                keep_B = np.argsort(~is_alive_B, kind="stable")[:smaller].astype(np.int32)
                row_B = np.where(is_alive_B, row_B, NO_ROW)[keep_B]
                state = self.compact_fn(state, keep_B)
            else:
                state = self.grow_fn(config.cache_bucket(step + 1), state)

        tokens, logps = zip(*(responses[row] for row in range(num_rows)), strict=True)
        _check_finite(logps, request.temperature)
        is_truncated_B = np.array([row[-1] not in self.stop_ids for row in tokens], bool)
        return Rollout(tokens, logps, is_truncated_B, step, row_steps)

    def _visit_shapes(self, weights: dict, num_prompts: int, group_size: int, prompt_bucket: int) -> None:
        """Run every shape that a decode batch of this size can take, with no row alive, so that nothing is sampled."""
        empty = SampleRequest((), group_size, np.zeros((2,), np.uint32), 1.0, max_new=(), row_numbers=())
        sampling = sampling_params(empty.temperature)
        state = self.prefill_fn(weights, _pad(empty, num_prompts, prompt_bucket), sampling)
        # A stack of states to run and of states whose cache is to grow first. Growth waits for its turn, so that no
        # more memory is taken than by a real batch.
        pending, seen = [(state, False)], set()
        while pending:
            state, is_full = pending.pop()
            if is_full:
                state = self.grow_fn(self.config.cache_bucket(state.out_token_BS.shape[1] + 1), state)
            shape = (state.out_token_BS.shape, state.prefix.length_P.shape)
            if shape in seen:
                continue
            seen.add(shape)
            state = self.decode_fn(weights, state, sampling, np.int32(0))
            rows, length = state.out_token_BS.shape
            if length < self.config.cache_buckets[-1]:
                pending.append((state, True))
            if smaller := self.config.smaller_row_bucket(rows):
                pending.append((self.compact_fn(state, np.zeros((smaller,), np.int32)), False))


def make_sampler(
    model_config: ModelConfig, config: SamplerConfig, stop_ids: tuple[int, ...], placement: Placement | None = None
) -> Sampler:
    """Build the sampler of one policy; without a placement, for the default device.

    On several devices rows are split over them, and row buckets are rounded up to multiples of their number.
    """
    # Joined matrices cannot be split over devices.
    join = placement is None or placement.local.shape["tensor"] == 1
    split = functools.partial(transformer.split_layers, model_config, join)
    weight_shardings = state_shardings = mesh = None
    if placement:
        config, mesh = config.with_row_multiple(placement.row_multiple), placement.local
        params = jax.eval_shape(lambda: transformer.init_params(model_config, jax.random.key(0)))
        weight_shardings = decode_shardings(placement.decode, jax.eval_shape(split, params))
        # Pinned, so that each function takes what any other one has made without compiling once more.
        state_shardings = decode.state_shardings(mesh)
    prefill_fn = functools.partial(
        decode.prefill, model_config, stop_ids, config.cache_buckets[0], config.cache_buckets[-1], mesh
    )
    decode_fn = functools.partial(decode.decode, model_config, stop_ids)
    return Sampler(
        config=config,
        stop_ids=stop_ids,
        placement=placement,
        layout_fn=jax.jit(split, out_shardings=weight_shardings),
        prefill_fn=jax.jit(prefill_fn, out_shardings=state_shardings),
        decode_fn=jax.jit(decode_fn, donate_argnums=1, out_shardings=state_shardings),
        grow_fn=jax.jit(decode.grow_cache, static_argnums=0, out_shardings=state_shardings),
        compact_fn=jax.jit(decode.compact_rows, out_shardings=state_shardings),
    )


def _check_request(request: SampleRequest, max_prompt: int) -> None:
    prompts, max_new = request.prompts, request.max_new
    if not len(prompts) or (max_new is not None and np.min(max_new) < 1):
        raise ValueError(f"the sampler needs a prompt (it got {len(prompts)}) and a new token (max_new={max_new})")
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= max_prompt:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; the sampler takes 1 to {max_prompt} (its last prompt "
                "bucket): shorten the prompt or raise max_prompt"
            )


def _pad(request: SampleRequest, num_prompts: int, prompt_bucket: int) -> PromptBatch:
    """The request as arrays of fixed shape. Rows that only fill the batch may generate nothing."""
    token_PS = np.full((num_prompts, prompt_bucket), PAD_ID, np.int32)
    length_P = np.ones((num_prompts,), np.int32)
    for p, prompt in enumerate(request.prompts):
        token_PS[p, : len(prompt)] = prompt
        length_P[p] = len(prompt)
    padding = (0, num_prompts * request.group_size - len(request.row_numbers))
    return PromptBatch(
        token_PS=token_PS,
        length_P=length_P,
        limit_B=np.pad(request.max_new, padding).astype(np.int32),
        number_B=np.pad(request.row_numbers, padding).astype(np.int32),
        key_data=request.key_data,
    )


def _collect(state: DecodeState, row_B: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """{row of the request: (tokens, log-probs)} of the rows of the state that are not NO_ROW."""
    out_token_BS, out_logp_BS = np.asarray(state.out_token_BS), np.asarray(state.out_logp_BS)
    length_B = np.asarray(state.length_B)
    return {
        int(row_B[b]): (out_token_BS[b, : length_B[b]].copy(), out_logp_BS[b, : length_B[b]].copy())
        for b in np.flatnonzero(row_B != NO_ROW)
    }


def _check_finite(logps: Sequence[np.ndarray], temperature: float) -> None:
    """Raises FloatingPointError where a row of log-probs ends in one that is not finite."""
    broken = [b for b, row in enumerate(logps) if not np.isfinite(row).all()]
    if broken:
        raise FloatingPointError(
            f"the logits are NaN or infinite at new token {len(logps[broken[0]])} of row {broken[0]}, and in "
            f"{len(broken)} of {len(logps)} rows in all (temperature {temperature:g}): the weights hold values that "
            "are not finite or too large, or the temperature is too small"
        )
