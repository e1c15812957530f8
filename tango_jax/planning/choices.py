"""The settings that `plan --search` chooses among.

In: a role's settings, its model, the devices. Out: for each of three parts (how it samples, its training mesh, its
micro-batches) a list of settings to try, {"row_buckets": (40, 80), ...}; the first is what the configuration has. Those
that a model or a mesh cannot have are not among them, with a few exceptions that validation finds.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from ml_collections import ConfigDict

from tango_jax.models.transformer import REMAT_MODES, ModelConfig
from tango_jax.rl.policy import sampler_sizes
from tango_jax.sharding.placement import resolve_axes

Settings = dict[str, Any]  # key of a role, such as mesh.fsdp -> value

SAMPLING_KEYS = ("mesh.decode_tensor", "row_buckets", "cache_tokens")
MESH_KEYS = ("mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.offload")
MICRO_BATCH_KEYS = ("model.remat", "rows_per_micro_batch", "prompts_per_micro_batch")

# Rows of a group of devices: all that are sampled at once, or as many of the longest as a budget of tokens holds.
ROWS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# With a budget, each row bucket is so much of the next larger one: a finer ladder uses more of the budget, and has more
# shapes to compile.
STEP, MOST_BUCKETS = 0.8, 12
MICRO_BATCH_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# For each number of rows these many rows to a prompt are tried. More rows than others take more memory, and must not
# pack worse than by this factor.
ROWS_OF_A_PROMPT, WORSE_PACKED = range(1, 9), 1.1


def chosen(config: ConfigDict, keys: tuple[str, ...]) -> Settings:
    """What a role's configuration has."""
    values = {}
    for key in keys:
        node = config
        for part in key.split("."):
            node = node[part]
        values[key] = tuple(node) if isinstance(node, list | tuple) else node
    return values


def sampling_choices(
    config: ConfigDict, model: ModelConfig, local: int, needed_rows: int, samples: int
) -> list[Settings]:
    """How a role may sample.

    Args:
        local: devices of a process.
        needed_rows: the most that a process samples in a phase; no batch needs more.
        samples: of each prompt, which stay in one batch unless there is a budget.
    """
    found = [chosen(config, SAMPLING_KEYS)]
    for tensor in _tensor_sizes(model, local):
        groups = local // tensor
        for rows in ROWS:
            found += _at_their_longest(tensor, rows, groups, needed_rows, samples)
            found += _within_a_budget(config, tensor, rows, groups, needed_rows)
    return _different(found)


def _at_their_longest(tensor: int, rows: int, groups: int, needed_rows: int, samples: int) -> Iterator[Settings]:
    unit = math.lcm(groups, samples)
    top = min(rows * groups, -(-needed_rows // unit) * unit) // unit * unit
    if top:
        buckets = {max(groups, top * eighths // 8 // groups * groups) for eighths in range(1, 8)} | {top}
        yield _sampling(tensor, tuple(sorted(buckets)), 0)


def _within_a_budget(
    config: ConfigDict, tensor: int, rows: int, groups: int, needed_rows: int
) -> Iterator[Settings]:
    sizes, needed = sampler_sizes(config), -(-needed_rows // groups)
    # Where all rows have room at their longest, prompts are still read in chunks.
    budget = min(rows, needed) * (sizes.prompt_buckets[-1] + sizes.cache_buckets[-1])
    most = min(needed, budget // (sizes.prompt_buckets[0] + sizes.cache_buckets[0]))
    low = max(1, min(rows, most // 16))
    yield _sampling(tensor, tuple(size * groups for size in _ladder(low, most)), budget)


def _ladder(low: int, high: int) -> list[int]:
    """Whole numbers from about `low` to `high`, ascending in even steps."""
    count = min(MOST_BUCKETS, 1 + math.ceil(math.log(max(1, high / low)) / -math.log(STEP)))
    if count == 1:
        return [high]
    return sorted({round(high * (low / high) ** (index / (count - 1))) for index in range(count)})


def _sampling(tensor: int, row_buckets: tuple[int, ...], cache_tokens: int) -> Settings:
    return dict(zip(SAMPLING_KEYS, (tensor, row_buckets, cache_tokens), strict=True))


def mesh_choices(
    config: ConfigDict, model: ModelConfig, devices: int, local: int, has_host_memory: bool
) -> list[Settings]:
    """How a role's state may be split over all devices, and whether what is not in use waits in host memory."""
    found = [chosen(config, MESH_KEYS)]
    now = (*resolve_axes(config.mesh, devices), config.mesh.offload)
    for tensor in _tensor_sizes(model, local):
        for fsdp in _divisors(devices // tensor):
            if model.width % fsdp == 0:
                found += [dict(zip(MESH_KEYS, (-1, fsdp, tensor, offload), strict=True))
                          for offload in ((False, True) if has_host_memory else (False,))
                          if (devices // tensor // fsdp, fsdp, tensor, offload) != now]
    return _different(found)


def micro_batch_choices(
    config: ConfigDict, sequences: int, padded_tokens: Callable[[int, int], float]
) -> list[Settings]:
    """How much of a minibatch with `sequences` sequences in a shard is computed at once, and what is kept of it.

    Args:
        padded_tokens: of all micro-batches of a shard, padding included, by the rows and prompts of each. For each
            number of rows the number of prompts is taken with which they are fewest.
    """
    now = chosen(config, MICRO_BATCH_KEYS)
    found, fewest = [now], math.inf
    for rows in (count for count in MICRO_BATCH_ROWS if count <= sequences):
        tried = {max(1, round(rows / share)) for share in ROWS_OF_A_PROMPT}
        if not config.share_prompts:
            tried = {now["prompts_per_micro_batch"]}
        tokens, prompts = min((padded_tokens(rows, count), count) for count in tried)
        if tokens <= WORSE_PACKED * fewest:
            found += [dict(zip(MICRO_BATCH_KEYS, (remat, rows, prompts), strict=True)) for remat in REMAT_MODES]
        fewest = min(fewest, tokens)
    return _different(found)


def _tensor_sizes(model: ModelConfig, local: int) -> list[int]:
    return [size for size in _divisors(local) if model.num_kv_heads % size == 0 and model.mlp_width % size == 0]


def halved(most: int, multiple: int) -> list[int]:
    """`most` and what repeated halving makes of it, as multiples, the largest first."""
    found = []
    while most >= multiple:
        found.append(most // multiple * multiple)
        most //= 2
    return found


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def _different(found: list[Settings]) -> list[Settings]:
    return list({tuple(settings.items()): settings for settings in found}.values())
