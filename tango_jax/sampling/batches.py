"""Sampling in consecutive batches, each from prefill until its last row has ended.

All rows start in the smallest cache bucket. The cache grows when it is full; rows are compacted when those alive fit a
smaller row bucket. Memory must hold all rows at their longest: `continuous.py` does without.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from tango_jax.records import Rollout
from tango_jax.runtime.ahead import CompileAhead
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.decode import DecodeState, PromptBatch
from tango_jax.sampling.logits import SamplingParams, sampling_params
from tango_jax.sampling.request import SampleRequest, check_finite, pad_request
from tango_jax.sampling.resize import ResizeFns, compact_rows, grow_cache

NO_ROW = -1


@dataclasses.dataclass(frozen=True)
class BatchDriver:
    config: SamplerConfig
    stop_ids: tuple[int, ...]
    prefill_fn: Callable  # (weights, PromptBatch) -> prefix, logits_BV
    begin_fn: Callable  # (logits_BV, RowStart, SamplingParams) -> the rest of a DecodeState
    decode_fn: Callable  # (weights, DecodeState, SamplingParams, min_alive) -> DecodeState; the state is donated
    resize_fns: ResizeFns

    def sample(self, weights: dict, request: SampleRequest) -> Rollout:
        M = request.group_size
        per_batch, rollouts = self.config.prompts_per_batch(M), []
        for start in range(0, len(request.prompts), per_batch):
            rows = slice(start * M, (start + per_batch) * M)
            batch = dataclasses.replace(
                request,
                prompts=request.prompts[start : start + per_batch],
                max_new=request.max_new[rows],
                row_numbers=request.row_numbers[rows],
                ended_fn=lambda ended, before=start * M: request.ended_fn(before + ended),
            )
            rollouts.append(self._sample_batch(weights, batch))
        return Rollout(
            tokens=tuple(tokens for rollout in rollouts for tokens in rollout.tokens),
            logps=tuple(logps for rollout in rollouts for logps in rollout.logps),
            is_truncated_B=np.concatenate([rollout.is_truncated_B for rollout in rollouts]),
            decode_steps=sum(rollout.decode_steps for rollout in rollouts),
            row_steps=sum(rollout.row_steps for rollout in rollouts),
        )

    def compile_ahead(self, ahead: CompileAhead, weights: dict, group_sizes: Sequence[int]) -> None:
        driver = dataclasses.replace(
            self,
            prefill_fn=ahead(self.prefill_fn, is_local=True),
            begin_fn=ahead(self.begin_fn, is_local=True),
            decode_fn=ahead(self.decode_fn, is_local=True),
            resize_fns=self.resize_fns.compile_ahead(ahead),
        )
        for prompt_bucket in self.config.prompt_buckets:
            for group_size in sorted(set(group_sizes)):
                for num_prompts in self.config.prompt_counts(group_size):
                    driver._visit_shapes(weights, num_prompts, group_size, prompt_bucket)

    def _sample_batch(self, weights: dict, request: SampleRequest) -> Rollout:
        config, num_rows = self.config, len(request.row_numbers)
        num_prompts = config.padded_prompts(len(request.prompts), request.group_size)
        batch = pad_request(request, num_prompts, config.prompt_bucket(max(map(len, request.prompts))))
        sampling = sampling_params(request.temperature, request.top_p, request.top_k)
        state = self._begin(weights, batch, sampling)

        # The request's row in each row of the state; NO_ROW for padding and rows collected before.
        row_B = np.arange(num_prompts * request.group_size)
        row_B = np.where(row_B < num_rows, row_B, NO_ROW)
        responses: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        step, row_steps = 1, len(row_B)  # prefill has sampled every row's first token
        while True:
            smaller = config.smaller_row_bucket(len(row_B))
            state = self.decode_fn(weights, state, sampling, np.int32(smaller))
            previous, step = step, int(state.step)
            row_steps += len(row_B) * (step - previous)
            is_alive_B = np.asarray(state.rows.is_alive_B)
            num_alive = is_alive_B.sum()
            request.ended_fn(num_rows - int(num_alive))
            if num_alive == 0:
                responses |= _collect(state, row_B)
                break
            if num_alive <= smaller:
                responses |= _collect(state, np.where(is_alive_B, NO_ROW, row_B))
                # Finished rows fill the smaller bucket up, because its size is fixed; they stay dead.
                keep_B = np.argsort(~is_alive_B, kind="stable")[:smaller].astype(np.int32)
                row_B = np.where(is_alive_B, row_B, NO_ROW)[keep_B]
                state = compact_rows(self.resize_fns, state, keep_B)
            else:
                state = grow_cache(self.resize_fns, state, config.cache_bucket(step + 1))

        tokens, logps = zip(*(responses[row] for row in range(num_rows)), strict=True)
        check_finite(logps, request.temperature)
        is_truncated_B = np.array([row[-1] not in self.stop_ids for row in tokens], bool)
        return Rollout(tokens, logps, is_truncated_B, step, row_steps)

    def _begin(self, weights: dict, batch: PromptBatch, sampling: SamplingParams) -> DecodeState:
        """The state after its first step."""
        prefix, logits_BV = self.prefill_fn(weights, batch)
        return DecodeState(prefix, *self.begin_fn(logits_BV, batch.rows, sampling))

    def _visit_shapes(self, weights: dict, num_prompts: int, group_size: int, prompt_bucket: int) -> None:
        empty = SampleRequest((), group_size, np.zeros((2,), np.uint32), 1.0, max_new=(), row_numbers=())
        sampling = sampling_params(empty.temperature)
        state = self._begin(weights, pad_request(empty, num_prompts, prompt_bucket), sampling)
        pending, seen = [state], set()
        while pending:
            state = pending.pop()
            rows, length = len(state.rows.token_B), state.suffix.v[0].shape[-2]
            if (shape := (rows, length, len(state.prefix.length_P))) in seen:
                continue
            seen.add(shape)
            state = self.decode_fn(weights, state, sampling, np.int32(0))
            if length < self.config.cache_buckets[-1]:
                pending.append(grow_cache(self.resize_fns, state, self.config.cache_bucket(length + 1)))
            if smaller := self.config.smaller_row_bucket(rows):
                pending.append(compact_rows(self.resize_fns, state, np.zeros((smaller,), np.int32)))


def _collect(state: DecodeState, row_B: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """{row of the request: (tokens, log-probs)} without NO_ROW."""
    rows = state.rows
    token_BT, logp_BT, length_B = jax.device_get((rows.out_token_BT, rows.out_logp_BT, rows.length_B))
    return {
        int(row_B[b]): (token_BT[b, : length_B[b]].copy(), logp_BT[b, : length_B[b]].copy())
        for b in np.flatnonzero(row_B != NO_ROW)
    }
