"""Marks that are not written: a verification without remarks in which every mark is CORRECT, and where they are read.

The probability of a mark is that of CORRECT's token among the two words' (text/marks.py), after all before it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tango_jax.grading import find_marks, parse_verification
from tango_jax.text.marks import find_deciding_tokens
from tango_jax.text.templates import judged
from tango_jax.text.tokenizer import Tokenizer

END = "\n"  # of each line of a verification without remarks


def marks_alone(is_right: Sequence[bool]) -> str:
    """A verification without remarks."""
    return judged([""] * len(is_right), is_right, end=END)


def without_remarks(verification: str) -> str:
    """With the same marks; unchanged if it has no blocks, or does not judge all of them."""
    judgements = parse_verification(verification, 0).judgements
    return marks_alone(judgements) if judgements and None not in judgements else verification


def blank_marks(tokenizer: Tokenizer, num_steps: int) -> list[int]:
    """Token ids of a verification without remarks, in which every mark is CORRECT."""
    return tokenizer.encode_response(marks_alone([True] * num_steps))


class MarkRow(NamedTuple):
    """`blank_marks` of a number of steps, cut off at a limit: then no mark is read, and the text is empty."""

    tokens: np.ndarray  # int32[T]
    other: np.ndarray  # int32[T], at each step's mark INCORRECT's token, where `tokens` has CORRECT's; -1 elsewhere
    text: str
    ends: list[int]  # of each token, characters that are complete after it
    is_cut: bool

    def written(self, is_right: Sequence[bool]) -> tuple[str, list[int]]:
        """The text with these marks, of which the verdict follows, and the ends of the tokens in it. Without a mark
        nothing was read, and there is no verdict."""
        if not is_right:
            text = self.text.partition("<final_verification>")[0]
            return text, np.minimum(self.ends, len(text)).tolist()
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
    text, ends = tokenizer.decode_with_ends(tokens)
    for mark in find_deciding_tokens(tokenizer, text, ends)[: 0 if is_cut else num_steps]:
        if mark is None or mark.token is None or tokens[mark.token] != mark.correct:
            raise ValueError("the verifier's tokenizer spells a mark otherwise where text follows it, so that one pass "
                             "cannot read all marks: choose an arm whose verifier writes")
        other[mark.token] = mark.incorrect
    if is_cut:
        return MarkRow(tokens[:limit], other[:limit], "", [0] * limit, True)
    return MarkRow(tokens, other, text, ends, False)
