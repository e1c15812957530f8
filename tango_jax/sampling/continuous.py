"""Continuous batching: carries out `schedule.py` within a budget of cached tokens.

A row's tokens do not depend on the schedule: its random numbers come from key, row number and position, and its cache
is never recomputed. Only the order of sums changes. Two schedules agree to rounding in every log-prob, and in every
token unless its random number (greedily, two logits) lies within rounding of the border. An int8 cache rounds a key or
value to either of two numbers.

Rows wait in host memory: a second prefill would round differently, and costs more. 128 KiB a token of an 8B model move
in 13 us at 20 GB/s; computing them takes 100 us of an A100.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np

from tango_jax.records import Rollout
from tango_jax.runtime.ahead import CompileAhead
from tango_jax.sampling import schedule
from tango_jax.sampling.buckets import SamplerConfig
from tango_jax.sampling.decode import DecodeState, PromptBatch, StartedRows
from tango_jax.sampling.logits import SamplingParams, sampling_params
from tango_jax.sampling.request import SampleRequest, check_finite, reordered
from tango_jax.sampling.resize import ResizeFns, compact_rows, grow_cache
from tango_jax.sampling.schedule import NONE, Limits, Seat, Shape, Table
from tango_jax.sampling.slots import NewRows, RowCache, SlotFns
from tango_jax.text.tokenizer import PAD_ID


@dataclasses.dataclass
class _Run:
    weights: dict
    request: SampleRequest  # with row arrays
    sampling: SamplingParams
    limits: Limits
    prompt_bucket: int  # of the longest prompt: what the batch has room for
    token_BT: np.ndarray  # int32, what the request's rows have sampled; T is the largest cache bucket
    logp_BT: np.ndarray  # float32
    saved: dict[int, RowCache] = dataclasses.field(default_factory=dict)  # by row, in host memory
    state: DecodeState | None = None
    step: int = 1  # state.step, as of the last time that it was changed
    started: StartedRows | None = None
    decode_steps: int = 0
    row_steps: int = 0


@dataclasses.dataclass(frozen=True)
class ContinuousDriver:
    config: SamplerConfig
    stop_ids: tuple[int, ...]
    prefill_fn: Callable  # (weights, PromptBatch, SamplingParams) -> StartedRows
    decode_fn: Callable  # (weights, DecodeState, SamplingParams, min_alive) -> DecodeState; the state is donated
    resize_fns: ResizeFns
    slot_fns: SlotFns

    def sample(self, weights: dict, request: SampleRequest) -> Rollout:
        # By length, so that a chunk's prompts leave little of their bucket unused.
        order_P = np.argsort([-len(prompt) for prompt in request.prompts], kind="stable")
        row_B = (order_P[:, None] * request.group_size + np.arange(request.group_size)).reshape(-1)
        rollout = self._sample(weights, reordered(request, order_P, row_B))
        place_B = np.argsort(row_B)
        tokens, logps = (tuple(rows[place] for place in place_B) for rows in (rollout.tokens, rollout.logps))
        check_finite(logps, request.temperature)
        return dataclasses.replace(
            rollout, tokens=tokens, logps=logps, is_truncated_B=rollout.is_truncated_B[place_B]
        )

    def _sample(self, weights: dict, request: SampleRequest) -> Rollout:
        num_rows, longest = len(request.row_numbers), self.config.cache_buckets[-1]
        prompt_bucket = self.config.prompt_bucket(max(map(len, request.prompts)))
        run = _Run(
            weights=weights,
            request=request,
            sampling=sampling_params(request.temperature, request.top_p, request.top_k),
            limits=schedule.limits_of(self.config, prompt_bucket, request.group_size),
            prompt_bucket=prompt_bucket,
            token_BT=np.zeros((num_rows, longest), np.int32),
            logp_BT=np.zeros((num_rows, longest), np.float32),
        )
        table = schedule.new_table(run.limits, num_rows)
        while (action := schedule.next_action(run.limits, table)) is not None:
            table = self._carry_out(run, table, action)
        tokens = tuple(row[:length].copy() for row, length in zip(run.token_BT, table.length_B, strict=True))
        logps = tuple(row[:length].copy() for row, length in zip(run.logp_BT, table.length_B, strict=True))
        is_truncated_B = np.array([row[-1] not in self.stop_ids for row in tokens], bool)
        return Rollout(tokens, logps, is_truncated_B, run.decode_steps, run.row_steps)

    def compile_ahead(self, ahead: CompileAhead, weights: dict, group_sizes: Sequence[int]) -> None:
        driver = dataclasses.replace(
            self,
            prefill_fn=ahead(self.prefill_fn),
            decode_fn=ahead(self.decode_fn),
            resize_fns=self.resize_fns.compile_ahead(ahead),
            slot_fns=self.slot_fns.compile_ahead(ahead),
        )
        for prompt_bucket in self.config.prompt_buckets:
            all_limits = [schedule.limits_of(self.config, prompt_bucket, M) for M in sorted(set(group_sizes))]
            for rows in all_limits[0].row_buckets[0]:
                driver._visit_shapes(weights, all_limits, prompt_bucket, rows)

    def _carry_out(self, run: _Run, table: Table, action: schedule.Action) -> Table:
        after = schedule.apply(run.limits, table, action)
        match action:
            case schedule.Resize(shape, slot_ZR):
                self._resize(run, table.shape, shape, slot_ZR)
            case schedule.Save(seats):
                self._save(run, table, seats)
            case schedule.Restore(seats):
                self._restore(run, table, seats)
            case schedule.Insert(seats):
                new = _new_rows(run, table, _inserted(run.limits, table, seats))
                run.state = self.slot_fns.insert(run.state, run.started, new)
            case schedule.Read(prompt_ZQ):
                rows = schedule.new_rows(run.limits, table, prompt_ZQ)
                return schedule.advance(after, after.length_B, self._read(run, table, prompt_ZQ, rows))
            case schedule.Decode(min_alive):
                length_B, is_ended_B = self._decode(run, table, min_alive)
                run.request.ended_fn(int(is_ended_B.sum()))
                return schedule.advance(after, length_B, is_ended_B)
        return after

    def _resize(self, run: _Run, old: Shape | None, shape: Shape, slot_ZR: np.ndarray) -> None:
        """Fewer rows first, then a larger cache, through all buckets between: only these steps are compiled."""
        if old is None:
            run.state = self.slot_fns.make_empty(shape.rows, run.prompt_bucket, shape.cache)
            return
        rows = old.rows
        while rows > shape.rows:
            rows = self.config.smaller_row_bucket(rows)
            # What fills a size in between is dropped again by the next step.
            extra = rows // run.limits.shards - slot_ZR.shape[1]
            keep_ZR = np.pad(slot_ZR, ((0, 0), (0, extra)), mode="edge")
            run.state = compact_rows(self.resize_fns, run.state, keep_ZR.reshape(-1).astype(np.int32))
            slot_ZR = np.broadcast_to(np.arange(slot_ZR.shape[1]), slot_ZR.shape)
        for smaller, bucket in itertools.pairwise(self.config.cache_buckets):
            if old.cache <= smaller < shape.cache:
                run.state, run.step = grow_cache(self.resize_fns, run.state, bucket), smaller

    def _save(self, run: _Run, table: Table, seats: Iterable[Seat]) -> None:
        for taken in _rounds(run.limits, seats):
            slot_Z = _slots(run.limits, table, taken)
            is_alive_B, cache = self.slot_fns.save(run.state, slot_Z)
            run.state, cache = run.state.replace(is_alive_B=is_alive_B), jax.device_get(cache)
            for seat in filter(None, taken):
                # A view would keep the other shards' rows of this round.
                run.saved[seat.row] = jax.tree.map(lambda x, z=seat.shard: x[:, z : z + 1].copy(), cache)

    def _restore(self, run: _Run, table: Table, seats: Iterable[Seat]) -> None:
        def bucket_of(seat: Seat) -> int:
            return run.saved[seat.row].suffix_k.shape[-1]

        for bucket, same in itertools.groupby(sorted(seats, key=bucket_of), key=bucket_of):
            for taken in _rounds(run.limits, same):
                some = run.saved[next(filter(None, taken)).row]  # stands in for shards without a row
                caches = [run.saved.pop(seat.row) if seat else some for seat in taken]
                cache = caches[0]
                if len(caches) > 1:
                    cache = jax.tree.map(lambda *rows: np.concatenate(rows, axis=1), *caches)
                cache = jax.device_put(cache, self.slot_fns.cache_sharding)
                for wider in self.config.cache_buckets:
                    if bucket < wider <= table.shape.cache:
                        cache = self.slot_fns.widen(wider, cache)
                run.state = self.slot_fns.restore(run.state, cache, _new_rows(run, table, taken))

    def _read(self, run: _Run, table: Table, prompt_ZQ: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """bool[B]: rows that have ended, some of them with their first token."""
        M, place_P = run.limits.group_size, {int(prompt): place for place, prompt in enumerate(prompt_ZQ.flat)}
        run.started = self.prefill_fn(run.weights, _prompt_batch(run, prompt_ZQ, self.config), run.sampling)
        token_B, logp_B, is_alive_B = jax.device_get(
            (run.started.token_B, run.started.logp_B, run.started.is_alive_B)
        )
        places = np.array([place_P[row // M] * M + row % M for row in rows], int)
        run.token_BT[rows, 0], run.logp_BT[rows, 0] = token_B[places], logp_B[places]
        run.decode_steps += 1
        run.row_steps += len(token_B)
        is_ended_B = table.status_B == schedule.DONE
        is_ended_B[rows] = ~is_alive_B[places]
        return is_ended_B

    def _decode(self, run: _Run, table: Table, min_alive: int) -> tuple[np.ndarray, np.ndarray]:
        """(length_B, is_ended_B) of all rows."""
        run.state = state = self.decode_fn(run.weights, run.state, run.sampling, np.int32(min_alive))
        step, slot_length_B, slot_is_alive_B, slot_token_BS, slot_logp_BS = jax.device_get(
            (state.step, state.length_B, state.is_alive_B, state.out_token_BS, state.out_logp_BS)
        )
        # The state's rows are the slots, shard by shard; `rows` are the request's.
        columns, slots = np.arange(run.step, step) % table.shape.cache, np.flatnonzero(table.row_ZR != NONE)
        rows, length_B = table.row_ZR.reshape(-1)[slots], table.length_B.copy()
        count = slot_length_B[slots] - length_B[rows]
        i, j = np.nonzero(np.arange(len(columns))[None, :] < count[:, None])
        run.token_BT[rows[i], length_B[rows[i]] + j] = slot_token_BS[slots[i], columns[j]]
        run.logp_BT[rows[i], length_B[rows[i]] + j] = slot_logp_BS[slots[i], columns[j]]
        run.decode_steps += len(columns)
        run.row_steps += len(columns) * table.shape.rows
        run.step = int(step)
        length_B[rows] = slot_length_B[slots]
        is_ended_B = table.status_B == schedule.DONE
        is_ended_B[rows] = ~slot_is_alive_B[slots]
        return length_B, is_ended_B

    def _visit_shapes(self, weights: dict, all_limits: Sequence[Limits], prompt_bucket: int, rows: int) -> None:
        fns, sampling, shards = self.slot_fns, sampling_params(1.0), self.config.row_multiple
        place = fns.cache_sharding
        buckets = [
            bucket for bucket in self.config.cache_buckets if rows in self.config.rows_within(prompt_bucket, bucket)
        ]
        state = fns.make_empty(rows, prompt_bucket, buckets[0])
        # With one cache bucket no row outgrows its slot, and on one shard none has to move.
        may_wait = len(self.config.cache_buckets) > 1 or shards > 1
        for bucket, larger in itertools.zip_longest(buckets, buckets[1:]):
            # A chunk's bucket goes up to the bucket of the request's longest prompt.
            of_chunks = [size for size in self.config.prompt_buckets if size <= prompt_bucket]
            for limits, chunk_bucket in itertools.product(all_limits, of_chunks):
                started = self.prefill_fn(weights, _no_prompts(limits, chunk_bucket), sampling)
                state = fns.insert(state, started, _no_rows(limits.chunk_prompts * limits.group_size, rows))
            if may_wait:
                is_alive_B, cache = fns.save(state, np.full((shards,), rows, np.int32))
                cache = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), cache)
                state = fns.restore(state.replace(is_alive_B=is_alive_B), cache, _no_rows(shards, rows))
                if bucket < self.config.cache_buckets[-1]:
                    fns.widen(self.config.cache_bucket(bucket + 1), cache)
            state = self.decode_fn(weights, state, sampling, np.int32(0))
            if smaller := self.config.smaller_row_bucket(rows):
                compact_rows(self.resize_fns, state, np.zeros((smaller,), np.int32))
            if larger:
                state = grow_cache(self.resize_fns, state, larger)


def _rounds(limits: Limits, seats: Iterable[Seat]) -> Iterator[tuple[Seat | None, ...]]:
    """Rounds of at most one seat a shard, in the order of shards; None: no seat there."""
    by_shard = [[] for _ in range(limits.shards)]
    for seat in seats:
        by_shard[seat.shard].append(seat)
    return itertools.zip_longest(*by_shard)


def _slots(limits: Limits, table: Table, taken: Sequence[Seat | None]) -> np.ndarray:
    """int32[B]: each seat's slot on its shard; without a seat, a number that no slot has."""
    free = table.shape.rows // limits.shards
    return np.array([seat.slot if seat else free for seat in taken], np.int32)


def _new_rows(run: _Run, table: Table, taken: Sequence[Seat | None]) -> NewRows:
    row_B = np.array([seat.row if seat else 0 for seat in taken])
    length_B = np.maximum(1, table.length_B[row_B])
    prompt_length_B = np.array([len(run.request.prompts[row // run.limits.group_size]) for row in row_B])
    return NewRows(
        slot_B=_slots(run.limits, table, taken),
        token_B=run.token_BT[row_B, length_B - 1],
        length_B=length_B.astype(np.int32),
        limit_B=run.request.max_new[row_B].astype(np.int32),
        number_B=run.request.row_numbers[row_B].astype(np.int32),
        prompt_length_B=prompt_length_B.astype(np.int32),
        key_data=run.request.key_data,
    )


def _no_rows(count: int, slot: int) -> NewRows:
    zeros = np.zeros((count,), np.int32)
    return NewRows(np.full_like(zeros, slot), zeros, zeros, zeros, zeros, zeros, np.zeros((2,), np.uint32))


def _inserted(limits: Limits, table: Table, seats: Iterable[Seat]) -> list[Seat | None]:
    M, shards = limits.group_size, np.repeat(np.arange(limits.shards), limits.chunk_prompts // limits.shards)
    place_of = {
        (int(z), int(prompt)): place
        for place, (z, prompt) in enumerate(zip(shards, table.prompt_ZQ.flat, strict=True))
    }
    taken: list[Seat | None] = [None] * (limits.chunk_prompts * M)
    for seat in seats:
        taken[place_of[seat.shard, seat.row // M] * M + seat.row % M] = seat
    return taken


def _no_prompts(limits: Limits, prompt_bucket: int) -> PromptBatch:
    P, B = limits.chunk_prompts, limits.chunk_prompts * limits.group_size
    return PromptBatch(
        token_PX=np.full((P, prompt_bucket), PAD_ID, np.int32),
        length_P=np.ones((P,), np.int32),
        limit_B=np.zeros((B,), np.int32),
        number_B=np.zeros((B,), np.int32),
        key_data=np.zeros((2,), np.uint32),
    )


def _prompt_batch(run: _Run, prompt_ZQ: np.ndarray, config: SamplerConfig) -> PromptBatch:
    M, request = run.limits.group_size, run.request
    longest = max(len(request.prompts[index]) for index in prompt_ZQ.flat if index != NONE)
    batch = _no_prompts(run.limits, config.prompt_bucket(longest)).replace(key_data=request.key_data)
    for place, index in enumerate(prompt_ZQ.flat):
        if index != NONE:
            prompt, rows = request.prompts[index], slice(index * M, (index + 1) * M)
            batch.token_PX[place, : len(prompt)] = prompt
            batch.length_P[place] = len(prompt)
            batch.limit_B[place * M : (place + 1) * M] = request.max_new[rows]
            batch.number_B[place * M : (place + 1) * M] = request.row_numbers[rows]
    return batch
