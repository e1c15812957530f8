"""Continuous batching: which rows run next and in what shape, within a budget of cached tokens.

Pure functions on the host take a `Table` and return the next `Action` and table: `continuous.py` carries actions out,
`replay` counts them. A batch has slots of S cached new tokens; slots x (prompt bucket + S) is at most `cache_tokens`.
Each shard (a group of devices, of Z) has R slots. The shape runs the most rows, with the smallest such cache:

    - At first many rows run in the first cache bucket. Chunks of prompts are read, and refill slots as rows end.
    - While enough rows wait, a row that fills the bucket leaves its slot; its cache is saved to host memory.
    - Once more rows can run in the next bucket, the cache grows. The longest saved rows take free slots of any shard.
    - When no row waits, the batch shrinks through the row buckets.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tango_jax.sampling.buckets import REFILL, SamplerConfig, bucket_of

NONE = -1  # a slot without a row, a place without a prompt
# What a row is doing. Ready: its prompt has been read and its first token sampled, but it has no slot yet.
WAITING, READY, RUNNING, SAVED, DONE = range(5)


class Shape(NamedTuple):
    rows: int
    cache: int  # new tokens


@dataclasses.dataclass(frozen=True)
class Limits:
    group_size: int  # M rows of each prompt; row b is one of prompt b // M
    shards: int  # Z
    cache_buckets: tuple[int, ...]
    row_buckets: tuple[tuple[int, ...], ...]  # allowed in each cache bucket
    chunk_prompts: int  # read at a time, a multiple of Z


def limits_of(config: SamplerConfig, prompt_bucket: int, group_size: int) -> Limits:
    return Limits(
        group_size=group_size,
        shards=config.row_multiple,
        cache_buckets=config.cache_buckets,
        row_buckets=tuple(config.rows_within(prompt_bucket, bucket) for bucket in config.cache_buckets),
        chunk_prompts=config.prompts_per_chunk(prompt_bucket, group_size),
    )


class Table(NamedTuple):
    """Where every row stands (B rows, Z shards of R slots, Q prompts of a chunk on each shard)."""

    shape: Shape | None  # None: nothing is on the device yet
    status_B: np.ndarray  # WAITING to DONE
    length_B: np.ndarray  # new tokens so far
    row_ZR: np.ndarray  # the running row in each slot, or NONE
    prompt_ZQ: np.ndarray  # the prompts that were read last, which ready rows take their prefix from, or NONE


class Seat(NamedTuple):
    row: int
    shard: int
    slot: int


class Resize(NamedTuple):
    """Changes the batch's shape; the first time, makes it."""

    shape: Shape
    slot_ZR: np.ndarray  # the slots that stay, in their new order


class Save(NamedTuple):
    """Copies running rows to host memory; their slots become free."""

    seats: tuple[Seat, ...]


class Restore(NamedTuple):
    seats: tuple[Seat, ...]


class Read(NamedTuple):
    """Reads a chunk of prompts and samples their rows' first tokens."""

    prompt_ZQ: np.ndarray


class Insert(NamedTuple):
    """Puts ready rows into free slots."""

    seats: tuple[Seat, ...]


class Decode(NamedTuple):
    """Samples until a row fills the cache bucket, or at most `min_alive` rows run."""

    min_alive: int


Action = Resize | Save | Restore | Read | Insert | Decode


def new_table(limits: Limits, num_rows: int) -> Table:
    empty = np.full((limits.shards, limits.chunk_prompts // limits.shards), NONE)
    return Table(None, np.full(num_rows, WAITING), np.zeros(num_rows, int), np.full((limits.shards, 0), NONE), empty)


def next_action(limits: Limits, table: Table) -> Action | None:
    """None once every row has ended."""
    if (table.status_B == DONE).all():
        return None
    shape = best_shape(limits, table)
    if table.shape is None:
        return Resize(shape, np.zeros((limits.shards, 0), int))
    if seats := _seats_to_save(limits, table, shape):
        return Save(seats)
    if shape != table.shape:
        assert shape.rows <= table.shape.rows and shape.cache >= table.shape.cache, (table.shape, shape)
        return Resize(shape, _slots_to_keep(limits, table, shape))
    if seats := _seats_to_restore(table):
        return Restore(seats)
    if seats := _seats_to_insert(limits, table):
        return Insert(seats)
    prompt_ZQ = _prompts_to_read(limits, table)
    if prompt_ZQ is not None:
        return Read(prompt_ZQ)
    return Decode(_min_alive(limits, table))


def best_shape(limits: Limits, table: Table) -> Shape:
    length_B = np.maximum(1, table.length_B[table.status_B != DONE])  # reading a prompt gives its rows a token
    present = table.shape.cache if table.shape else 0
    rows = [
        min(int((length_B < cache).sum()), buckets[-1]) if cache >= present else -1
        for cache, buckets in zip(limits.cache_buckets, limits.row_buckets, strict=True)
    ]
    best = rows.index(max(rows))
    return Shape(bucket_of(rows[best], limits.row_buckets[best]), limits.cache_buckets[best])


def _seats_to_save(limits: Limits, table: Table, shape: Shape) -> tuple[Seat, ...]:
    seats = []
    for shard, row_R in enumerate(table.row_ZR):
        slots = np.flatnonzero(row_R != NONE)
        length = table.length_B[row_R[slots]]
        is_long = length >= shape.cache
        # Of the others the shortest leave, because they are the cheapest to copy.
        shortest_first = slots[~is_long][np.argsort(length[~is_long], kind="stable")]
        too_many = max(0, len(shortest_first) - shape.rows // limits.shards)
        seats += [Seat(int(row_R[s]), shard, int(s)) for s in (*slots[is_long], *shortest_first[:too_many])]
    return tuple(seats)


def _slots_to_keep(limits: Limits, table: Table, shape: Shape) -> np.ndarray:
    """int[Z, R]: running rows first. Where no row has to go, all stay where they are."""
    if shape.rows == table.shape.rows:
        return np.broadcast_to(np.arange(table.row_ZR.shape[1]), table.row_ZR.shape)
    order_ZR = np.argsort(table.row_ZR == NONE, axis=1, kind="stable")
    return order_ZR[:, : shape.rows // limits.shards]


def _free_slots(table: Table) -> list[list[tuple[int, int]]]:
    return [[(z, int(slot)) for slot in np.flatnonzero(row_R == NONE)] for z, row_R in enumerate(table.row_ZR)]


def _seats_to_restore(table: Table) -> tuple[Seat, ...]:
    """The longest first, spread over the shards."""
    rows = np.flatnonzero((table.status_B == SAVED) & (table.length_B < table.shape.cache))
    rows = rows[np.argsort(-table.length_B[rows], kind="stable")]
    free = [place for places in itertools.zip_longest(*_free_slots(table)) for place in places if place]
    return tuple(Seat(int(row), *place) for row, place in zip(rows, free, strict=False))


def _ready_rows(limits: Limits, table: Table, shard: int) -> np.ndarray:
    prompts = table.prompt_ZQ[shard]
    rows = (prompts[prompts != NONE, None] * limits.group_size + np.arange(limits.group_size)).reshape(-1)
    return rows[table.status_B[rows] == READY]


def _seats_to_insert(limits: Limits, table: Table) -> tuple[Seat, ...]:
    seats: dict[int, Seat] = {}  # by row: its prompt may be on several shards
    for shard, free in enumerate(_free_slots(table)):
        rows = [int(row) for row in _ready_rows(limits, table, shard) if int(row) not in seats]
        seats |= {row: Seat(row, *place) for row, place in zip(rows, free, strict=False)}
    return tuple(seats.values())


def _prompts_to_read(limits: Limits, table: Table) -> np.ndarray | None:
    """int[Z, Q]: prompts for shards with free slots and no ready row, or None. Other shards read theirs again, because
    a chunk is one computation on all shards."""
    needing = [
        shard for shard, free in enumerate(_free_slots(table)) if free and not len(_ready_rows(limits, table, shard))
    ]
    prompts = np.flatnonzero(table.status_B[:: limits.group_size] == WAITING)
    if not len(prompts):  # in the end, rows that are ready on a full shard may as well run on another
        prompts = np.unique(np.flatnonzero(table.status_B == READY) // limits.group_size)
    if not len(prompts) or not needing:
        return None
    prompt_ZQ = table.prompt_ZQ.copy()
    prompt_ZQ[needing] = NONE
    places = [(shard, q) for q in range(prompt_ZQ.shape[1]) for shard in needing]
    for prompt, place in zip(prompts, places, strict=False):
        prompt_ZQ[place] = prompt
    return prompt_ZQ


def _min_alive(limits: Limits, table: Table) -> int:
    alive, level = int((table.row_ZR != NONE).sum()), limits.cache_buckets.index(table.shape.cache)
    is_saved_B = table.status_B == SAVED
    is_left = np.isin(table.status_B, (WAITING, READY)) | (is_saved_B & (table.length_B < table.shape.cache))
    if is_left.any():
        enough = table.shape.rows - max(1, table.shape.rows // REFILL)
    else:
        enough = max((rows for rows in limits.row_buckets[level] if rows < table.shape.rows), default=0)
        if is_saved_B.any():  # rows that wait for a larger cache: it pays once more of them run there
            enough = max(enough, limits.row_buckets[level + 1][-1] - 1)
    return max(0, min(enough, alive - 1))


def apply(limits: Limits, table: Table, action: Action) -> Table:
    """The table after an action; `advance` enters what rows have sampled."""
    status_B, row_ZR = table.status_B.copy(), table.row_ZR.copy()
    match action:
        case Resize(shape, slot_ZR):
            kept_ZR = np.full((limits.shards, shape.rows // limits.shards), NONE)
            kept_ZR[:, : slot_ZR.shape[1]] = np.take_along_axis(row_ZR, slot_ZR, axis=1)
            return table._replace(shape=shape, row_ZR=kept_ZR)
        case Save(seats):
            for row, shard, slot in seats:
                row_ZR[shard, slot], status_B[row] = NONE, SAVED
        case Restore(seats) | Insert(seats):
            for row, shard, slot in seats:
                row_ZR[shard, slot], status_B[row] = row, RUNNING
        case Read(prompt_ZQ):
            rows = new_rows(limits, table, prompt_ZQ)
            status_B[rows] = READY
            length_B = table.length_B.copy()
            length_B[rows] = 1
            return table._replace(status_B=status_B, length_B=length_B, prompt_ZQ=prompt_ZQ)
    return table._replace(status_B=status_B, row_ZR=row_ZR)


def new_rows(limits: Limits, table: Table, prompt_ZQ: np.ndarray) -> np.ndarray:
    prompts = prompt_ZQ[prompt_ZQ != NONE]
    rows = (prompts[:, None] * limits.group_size + np.arange(limits.group_size)).reshape(-1)
    return rows[table.status_B[rows] == WAITING]


def advance(table: Table, length_B: np.ndarray, is_ended_B: np.ndarray) -> Table:
    status_B, row_ZR = np.where(is_ended_B, DONE, table.status_B), table.row_ZR.copy()
    is_row_ZR = row_ZR != NONE
    row_ZR[is_row_ZR] = np.where(is_ended_B[row_ZR[is_row_ZR]], NONE, row_ZR[is_row_ZR])
    return table._replace(status_B=status_B, length_B=length_B, row_ZR=row_ZR)


class Segment(NamedTuple):
    shape: Shape
    steps: int


class Replay(NamedTuple):
    segments: tuple[Segment, ...]  # in order
    chunks: tuple[int, ...]  # of prompts that were read, each by the first that it has
    saved: int  # how often a row was copied to host memory
    row_steps: int  # rows x steps; a chunk counts as a step of its rows
    decode_steps: int  # chunks included


def replay(limits: Limits, length_B: Sequence[int]) -> Replay:
    """The schedule of rows that end at these lengths, each from 1 to the last cache bucket."""
    length_B, table = np.asarray(length_B), new_table(limits, len(length_B))
    segments, chunks, saved = [], [], 0
    while (action := next_action(limits, table)) is not None:
        table = apply(limits, table, action)
        match action:
            case Save(seats):
                saved += len(seats)
            case Read(prompt_ZQ):
                chunks.append(int(prompt_ZQ[prompt_ZQ != NONE].min()))
                table = advance(table, table.length_B, (table.status_B == DONE) | (table.length_B == length_B))
            case Decode(min_alive):
                rows = table.row_ZR[table.row_ZR != NONE]
                left = np.sort(length_B[rows] - table.length_B[rows])[::-1]
                until_full = table.shape.cache - table.length_B[rows[length_B[rows] > table.shape.cache]]
                steps = min(int(left[min_alive]), int(until_full.min(initial=left[0])))
                segments.append(Segment(table.shape, steps))
                reached_B = table.length_B.copy()
                reached_B[rows] = np.minimum(reached_B[rows] + steps, length_B[rows])
                table = advance(table, reached_B, (table.status_B == DONE) | (reached_B == length_B))
    steps = sum(segment.steps for segment in segments)
    row_steps = sum(segment.shape.rows * segment.steps for segment in segments)
    chunk_rows = limits.chunk_prompts * limits.group_size
    return Replay(tuple(segments), tuple(chunks), saved, row_steps + len(chunks) * chunk_rows, steps + len(chunks))
