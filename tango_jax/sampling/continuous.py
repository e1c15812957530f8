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

from tango_jax.models.cache import Suffix
from tango_jax.records import Rollout
from tango_jax.runtime.ahead import CompileAhead
from tango_jax.sampling import schedule
from tango_jax.sampling.buckets import SamplerConfig, Shape
from tango_jax.sampling.logits import SamplingParams, sampling_params
from tango_jax.sampling.request import SampleRequest, check_finite, reordered
from tango_jax.sampling.resize import replace_layer
from tango_jax.sampling.schedule import NONE, Limits, Seat, Table
from tango_jax.sampling.slots import ENTERING, NewRows, SlotFns, SlotState
from tango_jax.text.tokenizer import PAD_ID


@dataclasses.dataclass
class _Run:
    weights: dict
    request: SampleRequest  # with row arrays
    sampling: SamplingParams
    limits: Limits
    token_BT: np.ndarray  # int32, what the request's rows have sampled; T is the last cache bucket
    logp_BT: np.ndarray  # float32
    saved: dict[int, Suffix] = dataclasses.field(default_factory=dict)  # by row, in host memory
    state: SlotState | None = None
    read: tuple[Suffix, jax.Array] | None = None
    decode_steps: int = 0
    row_steps: int = 0


@dataclasses.dataclass(frozen=True)
class ContinuousDriver:
    config: SamplerConfig
    stop_ids: tuple[int, ...]
    fns: SlotFns

    @property
    def prefill_fn(self) -> Callable:
        return self.fns.read

    @property
    def decode_fn(self) -> Callable:
        return self.fns.decode

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
        run = _Run(
            weights=weights,
            request=request,
            sampling=sampling_params(request.temperature, request.top_p, request.top_k),
            limits=schedule.limits_of(self.config, request.group_size),
            token_BT=np.zeros((num_rows, longest), np.int32),
            logp_BT=np.zeros((num_rows, longest), np.float32),
        )
        table = schedule.new_table(run.limits, [len(prompt) for prompt in request.prompts])
        while (action := schedule.next_action(run.limits, table)) is not None:
            table = self._carry_out(run, table, action)
        tokens = tuple(row[:length].copy() for row, length in zip(run.token_BT, table.length_B, strict=True))
        logps = tuple(row[:length].copy() for row, length in zip(run.logp_BT, table.length_B, strict=True))
        is_truncated_B = np.array([row[-1] not in self.stop_ids for row in tokens], bool)
        return Rollout(tokens, logps, is_truncated_B, run.decode_steps, run.row_steps + num_rows)

    def compile_ahead(self, ahead: CompileAhead, weights: dict, group_sizes: Sequence[int]) -> None:
        """The same programs for any group size."""
        fns, shards, shapes = self.fns.compile_ahead(ahead), self.config.row_multiple, self.config.shapes
        for bucket in self.config.prompt_buckets:
            read = fns.read(weights, *_no_prompts(self.config.prompts_per_chunk, bucket))
        sampling, place_B = sampling_params(1.0), np.zeros((shards * ENTERING,), np.int32)
        growing = len(self.config.columns)
        for number, (shape, following) in enumerate(itertools.zip_longest(shapes, shapes[1:])):
            if number >= growing:  # a larger batch becomes it
                state = self.fns.make_empty.lower(shape).out_info
            else:
                state = fns.make_empty(shape)
                state = fns.insert(state, read, place_B, _no_rows(len(place_B), shape.rows), sampling)
                slot_Z = np.full((shards,), shape.rows, np.int32)
                if number + 1 < growing:  # a row outgrows its slot, or has to leave a batch that will have fewer
                    fns.save(state, slot_Z)
                if number > 0:
                    _, cache = self.fns.save.lower(state, slot_Z).out_info
                    state = fns.restore(state, cache, _no_rows(shards, shape.rows))
            state = fns.decode(weights, state, sampling, np.int32(0))
            if following:
                keep_B = np.zeros((following.rows,), np.int32)
                fns.resize_layer(following.columns, (state.k[0], state.v[0]), keep_B)

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
                self._insert(run, table, seats)
            case schedule.Read(prompt_ZQ):
                run.read = self.fns.read(run.weights, *self._prompts(run.request, prompt_ZQ))
                run.decode_steps += 1
            case schedule.Decode(min_alive):
                length_B, is_ended_B = self._decode(run, table, min_alive)
                run.request.ended_fn(int(is_ended_B.sum()))
                return schedule.advance(after, length_B, is_ended_B)
        return after

    def _resize(self, run: _Run, old: Shape | None, shape: Shape, slot_ZR: np.ndarray) -> None:
        """Through all shapes between: only these steps are compiled."""
        if old is None:
            run.state = self.fns.make_empty(shape)
            return
        shapes, shards = run.limits.shapes, run.limits.shards
        for step in shapes[shapes.index(old) + 1 : shapes.index(shape) + 1]:
            # What fills a size in between is dropped again by a later step.
            extra = step.rows // shards - slot_ZR.shape[1]
            keep_ZR = np.pad(slot_ZR, ((0, 0), (0, extra)), mode="edge")
            run.state = _resized(self.fns, run.state, step, keep_ZR.astype(np.int32))
            slot_ZR = np.broadcast_to(np.arange(slot_ZR.shape[1]), slot_ZR.shape)

    def _insert(self, run: _Run, table: Table, seats: Iterable[Seat]) -> None:
        M, shards = run.limits.group_size, run.limits.shards
        places = [{int(prompt): place for place, prompt in enumerate(row_Q)} for row_Q in table.prompt_ZQ]
        rounds = list(_rounds(run.limits, seats))
        for start in range(0, len(rounds), ENTERING):
            some = rounds[start : start + ENTERING]
            some += [(None,) * shards] * (ENTERING - len(some))
            taken = [seat for of_shard in zip(*some, strict=True) for seat in of_shard]  # shard by shard
            place_B = np.array([places[seat.shard][seat.row // M] if seat else 0 for seat in taken], np.int32)
            run.state = self.fns.insert(run.state, run.read, place_B, _new_rows(run, table, taken), run.sampling)

    def _save(self, run: _Run, table: Table, seats: Iterable[Seat]) -> None:
        for taken in _rounds(run.limits, seats):
            is_alive_B, cache = self.fns.save(run.state, _slots(run.limits, table, taken))
            rows = run.state.rows.replace(is_alive_B=is_alive_B)
            run.state, cache = run.state.replace(rows=rows), jax.device_get(cache)
            for seat in filter(None, taken):
                # A view would keep the other shards' rows of this round.
                run.saved[seat.row] = jax.tree.map(lambda x, z=seat.shard: x[:, z : z + 1].copy(), cache)

    def _restore(self, run: _Run, table: Table, seats: Iterable[Seat]) -> None:
        for taken in _rounds(run.limits, seats):
            some = run.saved[next(filter(None, taken)).row]  # stands in for shards without a row
            caches = [_widened(run.saved.pop(seat.row) if seat else some, run.state) for seat in taken]
            cache = jax.tree.map(lambda *rows: np.concatenate(rows, axis=1), *caches)
            cache = jax.device_put(cache, self.fns.cache_sharding)
            run.state = self.fns.restore(run.state, cache, _new_rows(run, table, taken))

    def _decode(self, run: _Run, table: Table, min_alive: int) -> tuple[np.ndarray, np.ndarray]:
        """(length_B, is_ended_B) of all rows."""
        run.state = state = self.fns.decode(run.weights, run.state, run.sampling, np.int32(min_alive))
        told = state.rows.length_B, state.rows.is_alive_B, state.rows.out_token_BT, state.rows.out_logp_BT
        steps, (slot_length_B, slot_is_alive_B, slot_token_BT, slot_logp_BT) = jax.device_get((state.steps, told))
        # The state's rows are the slots, shard by shard; `rows` are the request's.
        slots = np.flatnonzero(table.row_ZR != NONE)
        rows, length_B = table.row_ZR.reshape(-1)[slots], table.length_B.copy()
        for row, slot in zip(rows, slots, strict=True):
            new = slice(length_B[row], slot_length_B[slot])
            run.token_BT[row, new], run.logp_BT[row, new] = slot_token_BT[slot, new], slot_logp_BT[slot, new]
        run.decode_steps += int(steps)
        run.row_steps += int(steps) * table.shape.rows
        length_B[rows] = slot_length_B[slots]
        is_ended_B = table.status_B == schedule.DONE
        is_ended_B[rows] = ~slot_is_alive_B[slots]
        return length_B, is_ended_B

    def _prompts(self, request: SampleRequest, prompt_ZQ: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        longest = max(len(request.prompts[index]) for index in prompt_ZQ.flat if index != NONE)
        token_PX, length_P = _no_prompts(prompt_ZQ.size, self.config.prompt_bucket(longest))
        for place, index in enumerate(prompt_ZQ.flat):
            if index != NONE:
                prompt = request.prompts[index]
                token_PX[place, : len(prompt)], length_P[place] = prompt, len(prompt)
        return token_PX, length_P


def _resized(fns: SlotFns, state: SlotState, shape: Shape, keep_ZR: np.ndarray) -> SlotState:
    """Keeps the rows `keep_ZR`, each on its shard, where they are counted. The old caches are deleted."""
    layers, keep_B = list(zip(state.k, state.v, strict=True)), keep_ZR.reshape(-1)
    for index in range(len(layers)):
        replace_layer(layers, index, lambda layer: fns.resize_layer(shape.columns, layer, keep_B))
    k, v = zip(*layers, strict=True)
    # What is small goes by way of the host, which needs no program for each shape.
    shards = len(keep_ZR)
    row_B = (keep_ZR + len(state.prompt_length_B) // shards * np.arange(shards)[:, None]).reshape(-1)
    small = state.prompt_length_B, state.rows
    prompt_length_B, rows = jax.tree.map(
        lambda x, old: jax.device_put(x[row_B], old.sharding if old.committed else None), jax.device_get(small), small)
    return state.replace(k=k, v=v, prompt_length_B=prompt_length_B, rows=rows)


def _widened(cache: Suffix, state: SlotState) -> Suffix:
    """With as many columns as the state, on the host."""

    def widened(x: np.ndarray, of_state: jax.Array) -> np.ndarray:
        return np.pad(x, [(0, 0), (0, 0), *((0, there - here) for here, there in zip(
            x.shape[2:], of_state.shape[1:], strict=True))])

    return jax.tree.map(widened, cache, Suffix(state.k[0], state.v[0]))


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
    return NewRows(
        slot_B=_slots(run.limits, table, taken),
        token_B=run.token_BT[row_B, length_B - 1],
        length_B=length_B.astype(np.int32),
        limit_B=run.request.max_new[row_B].astype(np.int32),
        number_B=run.request.row_numbers[row_B].astype(np.int32),
        prompt_length_B=table.prompt_B[row_B].astype(np.int32),
        key_data=run.request.key_data,
    )


def _no_rows(count: int, slot: int) -> NewRows:
    zeros = np.zeros((count,), np.int32)
    return NewRows(np.full_like(zeros, slot), zeros, zeros, zeros, zeros, zeros, np.zeros((2,), np.uint32))


def _no_prompts(count: int, bucket: int) -> tuple[np.ndarray, np.ndarray]:
    """(token_PX, length_P)."""
    return np.full((count, bucket), PAD_ID, np.int32), np.ones((count,), np.int32)
