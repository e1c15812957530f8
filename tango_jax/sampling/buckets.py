"""Buckets: the few sizes in which the sampler computes, so that few compiled shapes serve every request."""

import bisect
import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

# Slots stand idle until one in so many is free, as filling them takes a return to the host: 3 % are idle on average.
REFILL = 16
# A chunk has at most one prompt for every 4 rows of the batch, and at most 8192 tokens, which keep a device busy.
CHUNK_SHARE, CHUNK_TOKENS = 4, 8192
# Slots have a multiple of one of these columns: a TPU kernel reads whole pages, and a GPU loads keys number by number
# where their columns are odd. Rounding adds at most one column in SLACK.
UNITS, SLACK = (128, 64, 32, 16, 1), 8


class Shape(NamedTuple):
    """The size of a refilled batch."""

    rows: int
    columns: int  # of a row's slot: the tokens of its prompt and the new ones

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Bucket sizes, each ascending; the last is the limit. A batch has more rows where the last row bucket is too small
    for a group of each device."""

    prompt_buckets: tuple[int, ...]
    cache_buckets: tuple[int, ...]
    row_buckets: tuple[int, ...]
    # Tokens, prompts included, that a group of devices may hold (`shapes`). 0: row_buckets alone limit rows.
    cache_tokens: int = 0
    row_multiple: int = 1  # groups of devices that share the rows of a batch; set by `with_row_multiple`

    def with_row_multiple(self, multiple: int) -> "SamplerConfig":
        """Rounds row buckets up, so that rows split evenly over devices."""
        rounded = {-(-rows // multiple) * multiple for rows in self.row_buckets}
        return dataclasses.replace(self, row_buckets=tuple(sorted(rounded)), row_multiple=multiple)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Numbers of columns that decode attention reads."""
        return self.columns if self.cache_tokens else (*self.prompt_buckets, *self.cache_buckets)

    @property
    def longest(self) -> int:
        """Tokens of a row, prompt included."""
        return self.prompt_buckets[-1] + self.cache_buckets[-1]

    @property
    def columns(self) -> tuple[int, ...]:
        """Of the slots of a refilled batch, ascending, in proportion to the cache buckets and rounded up."""
        sizes = (-(-self.longest * bucket // self.cache_buckets[-1]) for bucket in self.cache_buckets)
        return tuple(dict.fromkeys(map(self._rounded, sizes)))

    def _rounded(self, columns: int) -> int:
        unit = next(unit for unit in UNITS if self.longest % unit == 0 and (unit * SLACK <= columns or unit == 1))
        return -(-columns // unit) * unit

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes that a refilled batch passes, in order, each compiled separately. At first the columns grow, with
        as many rows as the budget allows; then the rows become fewer."""
        fullest = [Shape(self.rows_within(columns)[-1], columns) for columns in self.columns]
        return (*fullest, *(Shape(rows, self.longest) for rows in self.rows_within(self.longest)[-2::-1]))

    def prompt_bucket(self, length: int) -> int:
        return bucket_of(length, self.prompt_buckets)

    def cache_bucket(self, new_tokens: int) -> int:
        return bucket_of(new_tokens, self.cache_buckets)

    def smaller_row_bucket(self, rows: int) -> int:
        return (0, *self.row_buckets)[bisect.bisect_left(self.row_buckets, rows)]

    def prompt_counts(self, group_size: int) -> tuple[int, ...]:
        """Numbers of prompts, ascending, that a decode batch is padded to."""
        if group_size == 1:
            return self.row_buckets
        # Groups get one size only: each further one would be another set of shapes to compile.
        prompts = self.row_buckets[-1] // group_size // self.row_multiple * self.row_multiple
        return (max(self.row_multiple, prompts),)

    def prompts_per_batch(self, group_size: int) -> int:
        return self.prompt_counts(group_size)[-1]

    def padded_prompts(self, num_prompts: int, group_size: int) -> int:
        return bucket_of(num_prompts, self.prompt_counts(group_size))

    def rows_within(self, columns: int) -> tuple[int, ...]:
        """Row buckets that `cache_tokens` allows for slots of this size."""
        return tuple(rows for rows in self.row_buckets if rows // self.row_multiple * columns <= self.cache_tokens)

    @property
    def prompts_per_chunk(self) -> int:
        """One number for a refilled batch, whatever the group size and the prompts: few shapes are compiled."""
        rows = self.shapes[0].rows // self.row_multiple
        return max(1, min(rows // CHUNK_SHARE, CHUNK_TOKENS // self.prompt_buckets[-1])) * self.row_multiple

    def check_cache_tokens(self) -> None:
        """ValueError: the smallest batch does not fit at its longest."""
        longest = self.longest
        if self.cache_tokens and not self.rows_within(longest):
            rows = self.row_buckets[0] // self.row_multiple
            raise ValueError(
                f"cache_tokens={self.cache_tokens} is too small for the first of row_buckets={self.row_buckets}: "
                f"{rows} rows on a device of up to {longest} tokens, prompts included, are {rows * longest}; raise it, "
                "or put a smaller number of rows first"
            )


def bucket_of(size: int, buckets: Sequence[int]) -> int:
    return buckets[bisect.bisect_left(buckets, size)]
