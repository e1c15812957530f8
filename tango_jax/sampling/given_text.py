"""Logits of a few tokens or classes everywhere in given rows: one pass over whole texts, with the sampler's weights."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tango_jax.models import transformer
from tango_jax.models.transformer import ModelConfig
from tango_jax.runtime.ahead import CompileAhead
from tango_jax.sampling.buckets import bucket_of
from tango_jax.sampling.checkpoint_sampler import CheckpointSampler, doubling_buckets
from tango_jax.sampling.decode import read_tokens
from tango_jax.sampling.sampler import Sampler
from tango_jax.text.templates import StepRow
from tango_jax.text.tokenizer import PAD_ID

_SHORTEST, _COLUMNS = 256, 8  # least length of a compiled row; what the number of chosen tokens is rounded up to
_CLASSES = (0, 1)  # of a process reward model: incorrect, correct
_PASS_TOKENS = 2048  # keep a device busy, and leave little of it to padding where rows are few

LogitsFn = Callable[[Sequence[Sequence[int]], Sequence[int]], list[np.ndarray]]


class TextReader(NamedTuple):
    """The jitted pass of one model, in a few sizes."""

    longest: int  # tokens of a row; longer rows have programs of their own
    row_multiple: int  # groups of devices that share the rows of a pass
    logits_fn: Callable  # (weights, token_BT, chosen_V) -> [B, T, chosen]

    def logits(self, weights: dict, rows: Sequence[Sequence[int]], chosen: Sequence[int]) -> list[np.ndarray]:
        """For each row of token ids, float32 [tokens of the row, chosen tokens]. The logits at a token are those of the
        next one. A row's result does not depend on the rows around it."""
        chosen_V, found = _padded(chosen), {}
        lengths = self._lengths(max(map(len, rows)))
        for T in sorted({bucket_of(len(row), lengths) for row in rows}):
            same, count = [i for i, row in enumerate(rows) if bucket_of(len(row), lengths) == T], self._count(T)
            for part in (same[start : start + count] for start in range(0, len(same), count)):
                token_BT = np.full((count, T), PAD_ID, np.int32)
                for b, index in enumerate(part):
                    token_BT[b, : len(rows[index])] = rows[index]
                logits_BTV = np.asarray(self.logits_fn(weights, token_BT, chosen_V))
                found |= {index: logits_BTV[b, : len(rows[index]), : len(chosen)] for b, index in enumerate(part)}
        return [found[index] for index in range(len(rows))]

    def step_probabilities(self, weights: dict, rows: Sequence[StepRow]) -> list[tuple[float, ...]]:
        """By a process reward model: the probability that each step of a row is correct. FloatingPointError: logits are
        not finite."""
        read = [index for index, row in enumerate(rows) if row.ends]
        logits = self.logits(weights, [rows[index].tokens for index in read], _CLASSES) if read else []
        found = {index: tuple(probability_of(*of_row[end][::-1]) for end in rows[index].ends)
                 for index, of_row in zip(read, logits, strict=True)}
        return [found.get(index, ()) for index in range(len(rows))]

    def compile_ahead(self, ahead: CompileAhead, weights: dict) -> None:
        """All that `step_probabilities` runs."""
        for T in self._lengths(self.longest):
            ahead(self.logits_fn, is_local=True)(*pass_arguments(weights, T, self.row_multiple))

    def _lengths(self, longest: int) -> tuple[int, ...]:
        return row_lengths(max(self.longest, longest))

    def _count(self, length: int) -> int:
        return rows_of_pass(length) * self.row_multiple


def row_lengths(longest: int) -> tuple[int, ...]:
    """What rows are padded to."""
    return doubling_buckets(_SHORTEST, longest)


def rows_of_pass(length: int) -> int:
    """On each group of devices: one program for each length."""
    return max(1, _PASS_TOKENS // length)


def pass_arguments(weights: dict, length: int, row_multiple: int) -> tuple:
    """Of `TextReader.logits_fn` where a process reward model judges rows of this length."""
    return weights, np.zeros((rows_of_pass(length) * row_multiple, length), np.int32), _padded(_CLASSES)


def _padded(chosen: Sequence[int]) -> np.ndarray:
    return np.pad(np.array(chosen, np.int32), (0, -len(chosen) % _COLUMNS))


def make_text_reader(model_config: ModelConfig, sampler: Sampler) -> TextReader:
    mesh, config = sampler.placement.local if sampler.placement else None, sampler.config
    longest = config.prompt_buckets[-1] if model_config.score_head else config.longest
    return TextReader(longest, config.row_multiple, _jitted(model_config, mesh))


@functools.cache
def _jitted(model_config: ModelConfig, mesh: Mesh | None) -> Callable:
    return jax.jit(functools.partial(_logits, model_config, mesh))


def make_logits_fn(sampler: CheckpointSampler) -> LogitsFn:
    """Builds `logits(rows, chosen)` of a sampler with weights, see `TextReader.logits`."""
    return functools.partial(make_text_reader(sampler.source.model_config, sampler.sampler).logits, sampler.weights)


def probability_of(logit: float, other: float) -> float:
    """Of the first of two tokens or classes. FloatingPointError: NaN, or both infinite."""
    difference = float(other) - float(logit)
    if not math.isfinite(difference):
        raise FloatingPointError("the logits are NaN or infinite: the weights hold values that are not finite")
    return float(np.exp(-np.logaddexp(0.0, difference)))


def _logits(
    config: ModelConfig, mesh: Mesh | None, weights: dict, token_BT: jax.Array, chosen_V: jax.Array
) -> jax.Array:
    """[B, T, chosen tokens]; of a process reward model its classes. The head's other columns are left out: all logits
    would be the largest array here."""
    with jax.named_scope("score"):
        if mesh is not None:  # otherwise each group of devices would read all rows
            token_BT = jax.lax.with_sharding_constraint(token_BT, NamedSharding(mesh, PartitionSpec("rows")))
        x_BTD, _ = read_tokens(config, mesh, weights, token_BT)
        if config.score_head:
            return transformer.class_logits(config, weights, x_BTD)
        chosen_DV = weights["head_DV"][:, chosen_V]
        return transformer.logits_from_hidden(config, weights["final_norm"], chosen_DV, x_BTD)
