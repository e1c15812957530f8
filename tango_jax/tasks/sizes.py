"""Problem sizes of the synthetic tasks, by split. A split without a range has the range of the generator's turns."""

from ml_collections import ConfigDict

SPLITS = ("sft", "rl", "verifier", "test")  # task.sft_words, task.rl_words and so on
Range = tuple[int, int]  # low and high, both inclusive


def size_key(task: ConfigDict, split: str, size: str) -> str:
    own = f"{split}_{size}"
    return own if task.get(own) else f"rl_{size}"


def size_ranges(task: ConfigDict, split: str, sizes: tuple[str, ...]) -> list[Range]:
    return [tuple(task[size_key(task, split, size)]) for size in sizes]


def largest_size(task: ConfigDict, size: str) -> int:
    return max(task[size_key(task, split, size)][1] for split in SPLITS)


def describe_sizes(task: ConfigDict, split: str, sizes: tuple[str, ...]) -> str:
    keys = (size_key(task, split, size) for size in sizes)
    return ", ".join(f"task.{key}={tuple(task[key])}" for key in keys)
