"""Problem sizes of the synthetic tasks, by split: stage 1, the generator's turns, the verifier's turns, the test.

A split without a range, or with an empty one, has the range of the generator's turns.
"""

from ml_collections import ConfigDict

SPLITS = ("sft", "rl", "verifier", "test")  # task.sft_words, task.rl_words and so on
Range = tuple[int, int]  # low and high, both inclusive


def size_key(task: ConfigDict, split: str, size: str) -> str:
    """The setting with the range of a size, such as "words", for a split."""
    own = f"{split}_{size}"
    return own if task.get(own) else f"rl_{size}"


def size_ranges(task: ConfigDict, split: str, sizes: tuple[str, ...]) -> list[Range]:
    return [tuple(task[size_key(task, split, size)]) for size in sizes]


def largest_size(task: ConfigDict, size: str) -> int:
    """The largest value of a size in any split."""
    return max(task[size_key(task, split, size)][1] for split in SPLITS)


def describe_sizes(task: ConfigDict, split: str, sizes: tuple[str, ...]) -> str:
    """The settings that fix a split's problem sizes, for an error message."""
    keys = (size_key(task, split, size) for size in sizes)
    return ", ".join(f"task.{key}={tuple(task[key])}" for key in keys)
