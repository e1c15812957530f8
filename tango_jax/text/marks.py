r"""Where a verification's marks are decided: the token at which `\boxed{CORRECT}` and `\boxed{INCORRECT}` differ."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from tango_jax.grading import find_marks
from tango_jax.text.tokenizer import Tokenizer, token_of_character


class Mark(NamedTuple):
    """A mark in lower case is compared with the other word in lower case."""

    is_correct: bool
    start: int  # character of the word's first letter
    spelled: list[int]  # the text up to the mark, with CORRECT, in the tokenizer's spelling
    place: int  # index in `spelled` of the first token that differs; it may begin before the word, as in "{COR"
    correct: int  # the token there for each word
    incorrect: int
    token: int | None  # of the text's own tokens, the one that begins there; None: it is spelled with other tokens


def find_deciding_tokens(tokenizer: Tokenizer, text: str, ends: Sequence[int]) -> list[Mark | None]:
    """Of each step block's mark, and last of the verdict; None: it has none. `ends`: the number of characters complete
    after each token of the text."""
    marks, verdict = find_marks(text)
    return [None if span is None else _mark(tokenizer, text, ends, *span) for span in (*marks, verdict)]


def _mark(tokenizer: Tokenizer, text: str, ends: Sequence[int], start: int, end: int) -> Mark:
    case_fn = str.lower if text[start:end].islower() else str.upper
    pair = [tokenizer.encode_fn(f"{text[:start]}{case_fn(word)}}}") for word in ("correct", "incorrect")]
    differ = (index for index, (one, other) in enumerate(zip(*pair, strict=False)) if one != other)
    place = next(differ, min(map(len, pair)) - 1)  # a tokenizer without these letters spells both words alike
    own_ends = [0, *tokenizer.decode_with_ends(pair[0])[1]]
    character = start + len("correct}") - (own_ends[-1] - own_ends[place])
    token, correct, incorrect = token_of_character(ends, character), pair[0][place], pair[1][place]
    is_spelled = [0, *ends][token] == character and correct != incorrect
    return Mark(text[start:end].lower() == "correct", start, pair[0], place, correct, incorrect,
                token if is_spelled else None)


def of_judgements(
    values: Sequence[float | None], judgements: Sequence[bool | None]
) -> tuple[float | None, ...]:
    """The values of the blocks, one for each judgement; None of a step that is not judged."""
    return tuple(None if judgement is None else values[k] for k, judgement in enumerate(judgements))


def sampled_probabilities(
    tokenizer: Tokenizer, tokens: Sequence[int], text: str, ends: Sequence[int], logps: Sequence[float]
) -> tuple[float | None, ...]:
    """P(CORRECT) of each step block's mark, from the log-prob with which the token that decides it was sampled:
    exp(logp) of CORRECT, 1 - exp(logp) of INCORRECT. None: the block has no mark.

    Any other token counts for the word that was not sampled. The log-probs are the sampler's, at the temperature and
    after the top-p and top-k of the run. In a word that is not spelled as the tokenizer spells it, the token with its
    first letter decides.
    """
    found = []
    for mark in find_deciding_tokens(tokenizer, text, ends)[:-1]:
        if mark is None:
            found.append(None)
            continue
        token, expected = mark.token, mark.correct if mark.is_correct else mark.incorrect
        if token is None or tokens[token] != expected:
            token = token_of_character(ends, mark.start)
        p = min(math.exp(logps[token]), 1.0)
        found.append(p if mark.is_correct else 1.0 - p)
    return tuple(found)
