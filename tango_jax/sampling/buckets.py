"""Buckets: the few sizes in which the sampler computes, so that a handful of compiled shapes serves every request.

Plain arithmetic on the host. The sampler decides with it what to run next; the planner predicts with it what will run.
"""

import bisect
import dataclasses
from collections.abc import Sequence

# While prompts or rows wait, slots stand idle until one in so many of a batch is free: filling them takes a return to
# the host and a few copies. Half of them, 3 %, are idle on average.
REFILL = 16
# Prompts are read in chunks: for at most this share of a batch, as they are held until all their rows have slots, and
# of no more tokens than it takes to keep a device busy.
CHUNK_SHARE, CHUNK_TOKENS = 4, 8192


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Bucket sizes, each ascending. The last one is the limit: prompt tokens, new tokens, rows of one decode batch.

    A decode batch has more rows where the last row bucket is too small for a group of each device, which it then has.
    """

    prompt_buckets: tuple[int, ...]
    cache_buckets: tuple[int, ...]
    row_buckets: tuple[int, ...]
    # Tokens whose keys and values a group of devices may hold: rows x (prompt bucket + cache bucket) stays within it.
    # 0: as many rows as the last row bucket, however long they get.
    cache_tokens: int = 0
    row_multiple: int = 1  # groups of devices that share the rows of a batch; set by `with_row_multiple`

    def with_row_multiple(self, multiple: int) -> "SamplerConfig":
        """The same config with its row buckets rounded up, so that rows can be split evenly over devices."""
        rounded = {-(-rows // multiple) * multiple for rows in self.row_buckets}
        return dataclasses.replace(self, row_buckets=tuple(sorted(rounded)), row_multiple=multiple)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Of prompts and of the cache of new tokens."""
        return (*self.prompt_buckets, *self.cache_buckets)

    def prompt_bucket(self, length: int) -> int:
        return bucket_of(length, self.prompt_buckets)

    def cache_bucket(self, new_tokens: int) -> int:
        return bucket_of(new_tokens, self.cache_buckets)

    def smaller_row_bucket(self, rows: int) -> int:
        """The largest row bucket below `rows`; 0 if there is none."""
        return (0, *self.row_buckets)[bisect.bisect_left(self.row_buckets, rows)]

    def prompt_counts(self, group_size: int) -> tuple[int, ...]:
        """The numbers of prompts, ascending, that a decode batch may be padded to."""
        if group_size == 1:
            return self.row_buckets
        # Groups get one size only: each further one would be another set of shapes to compile.
        prompts = self.row_buckets[-1] // group_size // self.row_multiple * self.row_multiple
        return (max(self.row_multiple, prompts),)

    def prompts_per_batch(self, group_size: int) -> int:
        """The most prompts that one decode batch takes."""
        return self.prompt_counts(group_size)[-1]

    def padded_prompts(self, num_prompts: int, group_size: int) -> int:
        """The number of prompts that a decode batch of `num_prompts` is padded to."""
        return bucket_of(num_prompts, self.prompt_counts(group_size))

    def rows_within(self, prompt_bucket: int, cache_bucket: int) -> tuple[int, ...]:
        """The row buckets that `cache_tokens` allows for a cache of these sizes."""
        of_row = prompt_bucket + cache_bucket
        return tuple(rows for rows in self.row_buckets if rows // self.row_multiple * of_row <= self.cache_tokens)

    def prompts_per_chunk(self, prompt_bucket: int, group_size: int) -> int:
        """With `cache_tokens`: the prompts that are read at a time."""
        rows = self.rows_within(prompt_bucket, self.cache_buckets[0])[-1] // self.row_multiple
        return max(1, min(rows // CHUNK_SHARE // group_size, CHUNK_TOKENS // prompt_bucket)) * self.row_multiple

    def check_cache_tokens(self) -> None:
        """Raises ValueError if `cache_tokens` has no room for the smallest batch at its longest."""
        longest = self.prompt_buckets[-1] + self.cache_buckets[-1]
        if self.cache_tokens and not self.rows_within(self.prompt_buckets[-1], self.cache_buckets[-1]):
            rows = self.row_buckets[0] // self.row_multiple
            raise ValueError(
                f"cache_tokens={self.cache_tokens} is too small for the first of row_buckets={self.row_buckets}: "
                f"{rows} rows on a device of up to {longest} tokens, prompts included, are {rows * longest}; raise it, "
                "or put a smaller number of rows first"
            )


def bucket_of(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `size`."""
    return buckets[bisect.bisect_left(buckets, size)]
