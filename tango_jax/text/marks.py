r"""Where a verifier's marks are read.

The probability of a mark is read at the first token at which `\boxed{CORRECT}` and `\boxed{INCORRECT}` differ in the
tokenizer, after all that stands before it: P(CORRECT) = p(CORRECT's token) / (p(CORRECT's token) + p(INCORRECT's
token)). A word in lower case is compared with the other in lower case.

Marks that are not written are read in `blank_marks`, a verification without remarks in which every mark is CORRECT.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tango_jax.grading import find_marks, parse_verification
from tango_jax.text.templates import judged
from tango_jax.text.tokenizer import Tokenizer, token_of_character

END = "\n"  # of each line of a verification without remarks


class Place(NamedTuple):
    """Where a mark's probability is read."""

    row: list[int]  # prompt and verification
    index: int  # of the token after which the two words differ
    correct: int  # the next token of each word
    incorrect: int


def marks_alone(is_right: Sequence[bool]) -> str:
    """A verification without remarks."""
    return judged([""] * len(is_right), is_right, end=END)


def without_remarks(verification: str) -> str:
    """With the same marks; unchanged if it does not judge all its blocks."""
    judgements = parse_verification(verification, 0).judgements
    return verification if None in judgements else marks_alone(judgements)


def blank_marks(tokenizer: Tokenizer, num_steps: int) -> list[int]:
    """Token ids of a verification without remarks, in which every mark is CORRECT."""
    return tokenizer.encode_response(marks_alone([True] * num_steps))


def places_of_marks(tokenizer: Tokenizer, prompt: list[int], tokens: Sequence[int]) -> list[Place | None]:
    """Of each step block's mark, and of the verdict; None: it has none."""
    text, ends = tokenizer.decode_with_ends(tokens)
    marks, verdict = find_marks(text)
    row = [*prompt, *map(int, tokens)]

    def place(start: int, end: int) -> Place:
        case_fn = str.lower if text[start:end].islower() else str.upper
        pair = [tokenizer.encode_fn(f"{text[:start]}{case_fn(word)}}}") for word in ("correct", "incorrect")]
        first = next(index for index, (one, other) in enumerate(zip(*pair, strict=False)) if one != other)
        # The tokens that differ may begin before the word, as in "{COR".
        own_ends = [0, *tokenizer.decode_with_ends(pair[0])[1]]
        character = start + len("correct}") - (own_ends[-1] - own_ends[first])
        token = token_of_character(ends, character)
        if [0, *ends][token] == character:
            return Place(row, len(prompt) + token - 1, pair[0][first], pair[1][first])
        # The model spelled its text with other tokens than its tokenizer, which then decides.
        return Place([*prompt, *pair[0]], len(prompt) + first - 1, pair[0][first], pair[1][first])

    return [None if mark is None else place(*mark) for mark in (*marks, verdict)]


class MarkRow(NamedTuple):
    """`blank_marks` of a number of steps, cut off at a limit: then no mark is read, and the text is empty."""

    tokens: np.ndarray  # int32[T]
    other: np.ndarray  # int32[T], at each step's mark INCORRECT's token, where `tokens` has CORRECT's; -1 elsewhere
    text: str
    ends: list[int]  # of each token, characters that are complete after it
    is_cut: bool

    def written(self, is_right: Sequence[bool]) -> tuple[str, list[int]]:
        """The text with these marks, of which the verdict follows, and the ends of the tokens in it."""
        marks, verdict = find_marks(self.text)
        text, ends = self.text, np.array(self.ends)
        for (start, end), right in reversed(list(zip((*marks, verdict), (*is_right, all(is_right)), strict=True))):
            if not right:
                text = f"{text[:start]}INCORRECT{text[end:]}"
                ends[ends >= end] += len("IN")
        return text, ends.tolist()


def mark_row(tokenizer: Tokenizer, num_steps: int, limit: int) -> MarkRow:
    """Raises ValueError: the tokenizer spells the marks so that one pass cannot read them."""
    tokens = np.array(blank_marks(tokenizer, num_steps), np.int32)
    other, is_cut = np.full(len(tokens), -1, np.int32), len(tokens) > limit
    for place in places_of_marks(tokenizer, [], tokens)[: 0 if is_cut else num_steps]:
        if place is None or place.row != tokens.tolist() or tokens[place.index + 1] != place.correct:
            raise ValueError("the verifier's tokenizer spells a mark otherwise where text follows it, so that one pass "
                             "cannot read all marks: choose an arm whose verifier writes")
        other[place.index + 1] = place.incorrect
    if is_cut:
        return MarkRow(tokens[:limit], other[:limit], "", [0] * limit, True)
    return MarkRow(tokens, other, *tokenizer.decode_with_ends(tokens), False)
