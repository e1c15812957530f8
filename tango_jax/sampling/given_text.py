"""Logits of a few tokens everywhere in given rows: one pass over whole texts, with the sampler's weights."""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from tango_jax.models import transformer
from tango_jax.models.transformer import ModelConfig
from tango_jax.sampling.buckets import bucket_of
from tango_jax.sampling.checkpoint_sampler import CheckpointSampler, doubling_buckets
from tango_jax.sampling.decode import read_tokens
from tango_jax.text.tokenizer import PAD_ID

_SHORTEST, _COLUMNS = 256, 8  # least length of a compiled row; what the number of chosen tokens is rounded up to
_PASS_TOKENS = 2048  # keep a device busy, and leave little of it to padding where rows are few

LogitsFn = Callable[[Sequence[Sequence[int]], Sequence[int]], list[np.ndarray]]


def make_logits_fn(sampler: CheckpointSampler) -> LogitsFn:
    """Builds `logits(rows, chosen)`: for each row of token ids, float32 [tokens of the row, chosen tokens]. The logits
    at a token are those of the next one. A row's result does not depend on the rows around it."""
    mesh, config = sampler.placement.local if sampler.placement else None, sampler.sampler.config
    logits_fn = jax.jit(functools.partial(_logits, sampler.source.model_config, mesh))

    def logits(rows: Sequence[Sequence[int]], chosen: Sequence[int]) -> list[np.ndarray]:
        chosen_V, found = np.pad(np.array(chosen, np.int32), (0, -len(chosen) % _COLUMNS)), {}
        buckets = doubling_buckets(_SHORTEST, max(config.longest, *map(len, rows)))
        for T in sorted({bucket_of(len(row), buckets) for row in rows}):
            same = [index for index, row in enumerate(rows) if bucket_of(len(row), buckets) == T]
            count = max(1, _PASS_TOKENS // T) * config.row_multiple  # one program for each length
            for part in (same[start : start + count] for start in range(0, len(same), count)):
                token_BT = np.full((count, T), PAD_ID, np.int32)
                for b, index in enumerate(part):
                    token_BT[b, : len(rows[index])] = rows[index]
                logits_BTV = np.asarray(logits_fn(sampler.weights, token_BT, chosen_V))
                found |= {index: logits_BTV[b, : len(rows[index]), : len(chosen)] for b, index in enumerate(part)}
        return [found[index] for index in range(len(rows))]

    return logits


def _logits(
    config: ModelConfig, mesh: Mesh | None, weights: dict, token_BT: jax.Array, chosen_V: jax.Array
) -> jax.Array:
    """[B, T, chosen tokens]. The head's other columns are left out: all logits would be the largest array here."""
    with jax.named_scope("score"):
        x_BTD, _ = read_tokens(config, mesh, weights, token_BT)
        chosen_DV = weights["head_DV"][:, chosen_V]
        return transformer.logits_from_hidden(config, weights["final_norm"], chosen_DV, x_BTD)
