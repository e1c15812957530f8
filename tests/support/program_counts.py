"""How many programs a sampler compiles before a run, by kind, by the rules of its buckets and without a model."""

from collections import Counter
from collections.abc import Iterable

from tango_jax.sampling.buckets import SamplerConfig


def sampler_programs(config: SamplerConfig, group_sizes: Iterable[int]) -> Counter[str]:
    return _of_slots(config) if config.cache_tokens else _of_batches(config, group_sizes)


def _of_slots(config: SamplerConfig) -> Counter[str]:
    """Rows enter and leave the shapes whose columns grow; the others are sampled in."""
    growing, shapes = len(config.columns), len(config.shapes)
    return Counter(read=len(config.prompt_buckets), make=growing, insert=growing, save=growing - 1,
                   restore=growing - 1, decode=shapes, resize=shapes - 1)


def _of_batches(config: SamplerConfig, group_sizes: Iterable[int]) -> Counter[str]:
    found, last = set(), config.cache_buckets[-1]
    for prompt in config.prompt_buckets:
        for group_size in group_sizes:
            for prompts in config.prompt_counts(group_size):
                found.add(("prefill", prompt, prompts, group_size))
                pending = [(prompts * group_size, config.cache_buckets[0], prompts)]
                while pending:
                    rows, length, prefixes = state = pending.pop()
                    if ("decode", prompt, state) in found:
                        continue
                    found.add(("decode", prompt, state))
                    if length < last:
                        found.add(("grow", rows, length))
                        pending.append((rows, config.cache_bucket(length + 1), prefixes))
                    if smaller := config.smaller_row_bucket(rows):
                        found |= {("compact a layer", prompt, state), ("compact the rest", rows, prefixes)}
                        pending.append((smaller, length, smaller))
    return Counter(kind for kind, *_ in found)
