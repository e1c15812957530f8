"""Which sequences share a row and a shard. Deterministic; ties keep their order."""

import math
from collections import Counter
from collections.abc import Sequence

from tango_jax.models.segments import response_alignment

MAX_SEGMENTS = 32  # I: segments that a packed row may hold. Sequence-level ratios make arrays of [B, T, I]

Members = list[int]  # indices of sequences


def assign_rows(lengths: Sequence[int], row_length: int) -> list[Members]:
    """First-fit decreasing: the sequences of each row."""
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


class _Row:
    """A row with room for prompts that stand in it once, each before its responses."""

    def __init__(self, row_length: int):
        self.members: Members = []
        self._room, self._segments, self._align = row_length, MAX_SEGMENTS, response_alignment(row_length)

    def cost(self, prompt: int, responses: Sequence[int]) -> int:
        """Columns that they take at most. The prompt's last token stands before each response."""
        if len(responses) == 1:
            return prompt + responses[0]
        aligned = (-(-(1 + length) // self._align) * self._align for length in responses)
        return prompt - 1 + self._align - 1 + sum(aligned)

    def fitting(self, prompt: int, lengths: Sequence[int], todo: Members) -> Members:
        """Those of `todo` that fit beside each other, taken from the first to the last."""
        chosen: Members = []
        for index in todo:
            tried = [*chosen, index]
            has_room = self.cost(prompt, [lengths[i] for i in tried]) <= self._room
            if has_room and len(tried) < self._segments:
                chosen = tried
        return chosen

    def take(self, prompt: int, lengths: Sequence[int], chosen: Members) -> None:
        self.members += chosen
        self._room -= self.cost(prompt, [lengths[i] for i in chosen])
        self._segments -= len(chosen) + 1


def assign_groups(prompts: Sequence[int], lengths: Sequence[int], groups: Sequence[Members], row_length: int) -> list[
    Members]:
    """Rows that hold each prompt once before its responses. `prompts` and `lengths`: tokens of each sequence's prompt
    and response; `groups`: the sequences of each prompt.

    The largest groups come first. A group goes to the first row that holds all of it. Else the row that holds most of
    it takes that part, if the part's responses have at least twice the tokens of the prompt, which is then repeated; if
    not, a new row begins. A new row takes at least one sequence, so there are never more rows than sequences.
    """
    rows: list[_Row] = []
    for group in sorted(groups, key=lambda members: -prompts[members[0]] - sum(lengths[i] for i in members)):
        prompt, todo = prompts[group[0]], sorted(group, key=lambda i: -lengths[i])
        while todo:
            taken = [row.fitting(prompt, lengths, todo) for row in rows]
            tokens = [sum(lengths[i] for i in chosen) for chosen in taken]
            best = max(range(len(rows)), key=tokens.__getitem__, default=0)
            if not rows or (len(taken[best]) < len(todo) and tokens[best] < 2 * prompt):
                best = len(rows)
                rows.append(_Row(row_length))
                taken.append(rows[best].fitting(prompt, lengths, todo))
            assert taken[best], f"a sequence of {prompt} + {lengths[todo[0]]} tokens does not fit a row of {row_length}"
            rows[best].take(prompt, lengths, taken[best])
            todo = [i for i in todo if i not in taken[best]]
    return [row.members for row in rows]


def split_over_shards(groups: Sequence[Members], sizes: Sequence[int], num_shards: int) -> list[Members]:
    """About as many sequences and tokens for each shard. `sizes`: tokens of each group, which stays together."""
    heaviest_first = sorted(range(len(sizes)), key=lambda group: -sizes[group])
    shards: list[Members] = [[] for _ in range(num_shards)]
    for place, group in enumerate(heaviest_first):
        lap, shard = divmod(place, num_shards)
        # Back and forth: the shard with the heaviest group of one lap gets the lightest of the next.
        shards[shard if lap % 2 == 0 else num_shards - 1 - shard] += groups[group]
    return [sorted(members) for members in shards]


def groups_by_prompt(prompts: Sequence[tuple], most: int = 0) -> list[Members]:
    """Sequences of equal prompts. `most` of a group: with more, a shard could get more than its arrays hold."""
    groups: dict[tuple, Members] = {}
    seen: Counter = Counter()
    for index, prompt in enumerate(prompts):
        groups.setdefault((prompt, seen[prompt] // most if most else 0), []).append(index)
        seen[prompt] += 1
    return list(groups.values())


def rows_at_most(max_sequences: int, max_prompts: int, num_shards: int) -> int:
    """Rows of a shard, however its sequences pack, where a group of `max_sequences / max_prompts` stays together."""
    if not max_prompts:
        return math.ceil(max_sequences / num_shards)
    return math.ceil(max_prompts / num_shards) * math.ceil(max_sequences / max_prompts)
