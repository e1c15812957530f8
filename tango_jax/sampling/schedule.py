"""Continuous batching: which rows run next and in what shape, within a budget of cached tokens.

Pure functions on the host take a `Table` and return the next `Action` and table: `continuous.py` carries actions out,
`replay` counts them. A batch has slots of so many columns, for a row's prompt and its new tokens. Each shard (a group
of devices, of Z) has R slots. Shapes are passed in the order of `SamplerConfig.shapes`:

    - At first many rows run in few columns. Chunks of prompts are read, and refill slots as rows end.
    - While enough rows wait, a row that fills its slot leaves it; its cache is saved to host memory.
    - Once more rows can run with more columns, slots grow. The longest saved rows take free slots of any shard.
    - When no row waits, the batch shrinks, and each row stays on its shard: no row enters or leaves these shapes.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tango_jax.sampling.buckets import REFILL, SamplerConfig, Shape

NONE = -1  # a slot without a row, a place without a prompt
# What a row is doing. Ready: its prompt has been read, but it has no slot yet.
WAITING, READY, RUNNING, SAVED, DONE = range(5)


@dataclasses.dataclass(frozen=True)
class Limits:
    group_size: int  # M rows of each prompt; row b is one of prompt b // M
    shards: int  # Z
    shapes: tuple[Shape, ...]
    growing: int  # how many of the shapes, from the first on, rows can enter
    chunk_prompts: int  # read at a time, a multiple of Z


def limits_of(config: SamplerConfig, group_size: int) -> Limits:
    return Limits(group_size, config.row_multiple, config.shapes, len(config.columns), config.prompts_per_chunk)


class Table(NamedTuple):
    """Where every row stands (B rows, Z shards of R slots, Q prompts of a chunk on each shard)."""

    prompt_B: np.ndarray  # tokens of the row's prompt
    shape: Shape | None  # None: nothing is on the device yet
    status_B: np.ndarray  # WAITING to DONE
    length_B: np.ndarray  # new tokens that have been collected
    row_ZR: np.ndarray  # the running row in each slot, or NONE
    prompt_ZQ: np.ndarray  # the prompts that were read last, which ready rows take their prefix from, or NONE

    @property
    def size_B(self) -> np.ndarray:
        """Columns that a row needs for its next step: its newest token is not in the cache yet. With its slot, a row
        has its first token."""
        return self.prompt_B + np.maximum(1, self.length_B)


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
    """Reads a chunk of prompts."""

    prompt_ZQ: np.ndarray


class Insert(NamedTuple):
    """Puts ready rows into free slots and samples their first tokens."""

    seats: tuple[Seat, ...]


class Decode(NamedTuple):
    """Samples until a row fills its slot, or at most `min_alive` rows run."""

    min_alive: int


Action = Resize | Save | Restore | Read | Insert | Decode


def new_table(limits: Limits, prompt_lengths: Sequence[int]) -> Table:
    prompt_B = np.repeat(np.asarray(prompt_lengths, int), limits.group_size)
    return Table(
        prompt_B=prompt_B,
        shape=None,
        status_B=np.full(len(prompt_B), WAITING),
        length_B=np.zeros(len(prompt_B), int),
        row_ZR=np.full((limits.shards, 0), NONE),
        prompt_ZQ=np.full((limits.shards, limits.chunk_prompts // limits.shards), NONE),
    )


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
    """Of those that are left: where most rows run, and of these the one with the fewest tokens."""
    size_B = table.size_B[table.status_B != DONE]
    all_run = np.isin(table.status_B, (RUNNING, DONE)).all()
    most = (table.row_ZR != NONE).sum(axis=1).max(initial=0)  # rows of a shard
    shapes = [shape for shape in _shapes_left(limits, table) if shape in limits.shapes[: limits.growing]
              or all_run and shape.rows // limits.shards >= most]
    return max(shapes, key=lambda shape: (min(int((size_B <= shape.columns).sum()), shape.rows), -shape.tokens))


def _shapes_left(limits: Limits, table: Table) -> tuple[Shape, ...]:
    return limits.shapes[limits.shapes.index(table.shape) if table.shape else 0 :]


def _seats_to_save(limits: Limits, table: Table, shape: Shape) -> tuple[Seat, ...]:
    seats = []
    for shard, row_R in enumerate(table.row_ZR):
        slots = np.flatnonzero(row_R != NONE)
        size = table.size_B[row_R[slots]]
        is_long = size > shape.columns
        # Of the others the shortest leave, because they are the cheapest to copy.
        shortest_first = slots[~is_long][np.argsort(size[~is_long], kind="stable")]
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
    rows = np.flatnonzero((table.status_B == SAVED) & (table.size_B <= table.shape.columns))
    rows = rows[np.argsort(-table.size_B[rows], kind="stable")]
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
    is_open_P = (table.status_B == WAITING)[:: limits.group_size]
    prompts = np.flatnonzero(is_open_P & (table.size_B <= table.shape.columns)[:: limits.group_size])
    if not is_open_P.any():  # in the end, rows that are ready on a full shard may as well run on another
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
    alive, shape = int((table.row_ZR != NONE).sum()), table.shape
    fits_B, is_saved_B = table.size_B <= shape.columns, table.status_B == SAVED
    if (fits_B & (is_saved_B | np.isin(table.status_B, (WAITING, READY)))).any():
        enough = shape.rows - max(1, shape.rows // REFILL)
    else:
        later = _shapes_left(limits, table)[1:]
        enough = max((other.rows for other in later if other.tokens < shape.tokens), default=0)
        # Rows that wait for more columns: to change pays once more rows run there.
        waiting = table.size_B[~fits_B & np.isin(table.status_B, (WAITING, SAVED))]
        if len(waiting):
            enough = max(enough, next(other.rows for other in later if other.columns >= waiting.min()) - 1)
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
            status_B[new_rows(limits, table, prompt_ZQ)] = READY
            return table._replace(status_B=status_B, prompt_ZQ=prompt_ZQ)
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
    row_steps: int  # rows x steps, and a step for each row that entered
    decode_steps: int  # chunks included


def replay(limits: Limits, prompt_lengths: Sequence[int], length_B: Sequence[int]) -> Replay:
    """The schedule of rows that end at these lengths, each from 1 to the last cache bucket."""
    length_B, table = np.asarray(length_B), new_table(limits, prompt_lengths)
    segments, chunks, saved = [], [], 0
    while (action := next_action(limits, table)) is not None:
        table = apply(limits, table, action)
        match action:
            case Save(seats):
                saved += len(seats)
            case Read(prompt_ZQ):
                chunks.append(int(prompt_ZQ[prompt_ZQ != NONE].min()))
            case Decode(min_alive):
                rows = table.row_ZR[table.row_ZR != NONE]
                has = np.maximum(1, table.length_B[rows])
                left = length_B[rows] - has
                until_full = table.shape.columns + 1 - table.size_B[rows]
                until_full = until_full[left > until_full].min(initial=left.max())
                # No step is made if so many rows ended with their first token that at most `min_alive` run.
                steps = int(min(np.sort(left)[::-1][min_alive], until_full))
                if steps:
                    segments.append(Segment(table.shape, steps))
                reached_B = table.length_B.copy()
                reached_B[rows] = np.minimum(has + steps, length_B[rows])
                table = advance(table, reached_B, (table.status_B == DONE) | (reached_B == length_B))
    steps = sum(segment.steps for segment in segments)
    row_steps = sum(segment.shape.rows * segment.steps for segment in segments) + len(length_B)
    return Replay(tuple(segments), tuple(chunks), saved, row_steps, steps + len(chunks))
