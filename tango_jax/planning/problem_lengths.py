"""How long the prompts of a problem file are, in tokens of both roles' tokenizers."""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.data.problem_sets import resolve
from tango_jax.data.row_formats import detect_format
from tango_jax.data.rows import read_rows
from tango_jax.records import Problem
from tango_jax.text.templates import MANY_STEPS, generator_prompt, load_template, verifier_prompt
from tango_jax.text.tokenizer import Tokenizer
from tango_jax.weights.source import Source

ROUND = 32  # lengths are multiples of it
NO_LIMIT = 1 << 30
# Without a tokenizer. In SmolLM2's small vocabulary, most prompts of the math sets have 2.4 to 3.1 bytes a token,
# with its chat template.
BYTES_PER_TOKEN = 2.5


class Lengths(NamedTuple):
    """Tokens of all prompts of a role, by problem; the verifier's without a solution."""

    tokens: np.ndarray
    limit: int  # the longest, or less where a few are far longer

    @property
    def longest(self) -> int:
        return int(self.tokens.max())

    @property
    def median(self) -> int:
        return int(np.median(self.tokens))


def prompt_lengths(
    config: ConfigDict, problems: tuple[Problem, ...], tokenizers: dict[str, Tokenizer]
) -> dict[str, Lengths]:
    generator, verifier = (load_template(role, config[role].template) for role in ROLES)
    tokens = {
        "generator": [len(generator_prompt(generator, tokenizers["generator"], problem)) for problem in problems],
        "verifier": [
            len(verifier_prompt(verifier, tokenizers["verifier"], problem, "", MANY_STEPS, NO_LIMIT)[0])
            for problem in problems
        ],
    }
    return {role: Lengths(np.array(counts), usual_limit(counts)) for role, counts in tokens.items()}


def usual_limit(counts: list[int]) -> int:
    """The longest length, or the 99th percentile where the longest is more than twice that."""
    usual = math.ceil(np.percentile(counts, 99))
    return max(counts) if max(counts) <= 2 * usual else usual


def read_as(config: ConfigDict, tokenizer: Tokenizer) -> tuple[str, int]:
    """The row format, and the 99th percentile of the tokens of worked answers; 0 without any."""
    source, row_format = resolve(config.task.train)
    rows = read_rows(source)
    row_format = row_format or detect_format(rows[0].fields)
    if row_format != "gsm8k":
        return row_format, 0
    tokens = [len(tokenizer.encode_fn(str(row.fields["answer"]))) for row in rows]
    return row_format, math.ceil(np.percentile(tokens, 99))


def with_rough_tokens(source: Source) -> Source:
    tokenizer = dataclasses.replace(source.tokenizer, encode_fn=_rough_tokens, chat_fn=None)
    return dataclasses.replace(source, tokenizer=tokenizer)


def is_rough(tokenizer: Tokenizer) -> bool:
    return tokenizer.encode_fn is _rough_tokens


def _rough_tokens(text: str) -> list[int]:
    return [0] * math.ceil(len(text.encode(errors="replace")) / BYTES_PER_TOKEN)


def rounded(tokens: float) -> int:
    return ROUND * math.ceil(tokens / ROUND)
