"""Buckets: the few sizes in which the sampler computes, so that few compiled shapes serve every request."""

import bisect
import dataclasses
from collections.abc import Sequence

# Slots stand idle until one in so many is free, as filling them takes a return to the host: 3 % are idle on average.
REFILL = 16
# A chunk of prompts: at most this share of a batch, as it is held until all its rows have slots, and no more tokens
# than keep a device busy.
CHUNK_SHARE, CHUNK_TOKENS = 4, 8192


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Bucket sizes, each ascending; the last is the limit. A batch has more rows where the last row bucket is too small
    for a group of each device."""

    prompt_buckets: tuple[int, ...]
    cache_buckets: tuple[int, ...]
    row_buckets: tuple[int, ...]
    # Tokens that a group of devices may hold: rows x (prompt bucket + cache bucket). 0: row_buckets alone limit rows.
    cache_tokens: int = 0
    row_multiple: int = 1  # groups of devices that share the rows of a batch; set by `with_row_multiple`

    def with_row_multiple(self, multiple: int) -> "SamplerConfig":
        """Rounds row buckets up, so that rows split evenly over devices."""
        rounded = {-(-rows // multiple) * multiple for rows in self.row_buckets}
        return dataclasses.replace(self, row_buckets=tuple(sorted(rounded)), row_multiple=multiple)

    @property
    def buckets(self) -> tuple[int, ...]:
        return (*self.prompt_buckets, *self.cache_buckets)

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

    def rows_within(self, prompt_bucket: int, cache_bucket: int) -> tuple[int, ...]:
        """Row buckets that `cache_tokens` allows for these sizes."""
        of_row = prompt_bucket + cache_bucket
        return tuple(rows for rows in self.row_buckets if rows // self.row_multiple * of_row <= self.cache_tokens)

    def prompts_per_chunk(self, prompt_bucket: int, group_size: int) -> int:
        rows = self.rows_within(prompt_bucket, self.cache_buckets[0])[-1] // self.row_multiple
        return max(1, min(rows // CHUNK_SHARE // group_size, CHUNK_TOKENS // prompt_bucket)) * self.row_multiple

    def check_cache_tokens(self) -> None:
        """ValueError: the smallest batch does not fit at its longest."""
        longest = self.prompt_buckets[-1] + self.cache_buckets[-1]
        if self.cache_tokens and not self.rows_within(self.prompt_buckets[-1], self.cache_buckets[-1]):
            rows = self.row_buckets[0] // self.row_multiple
            raise ValueError(
                f"cache_tokens={self.cache_tokens} is too small for the first of row_buckets={self.row_buckets}: "
                f"{rows} rows on a device of up to {longest} tokens, prompts included, are {rows * longest}; raise it, "
                "or put a smaller number of rows first"
            )


def bucket_of(size: int, buckets: Sequence[int]) -> int:
    return buckets[bisect.bisect_left(buckets, size)]
