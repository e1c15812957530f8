"""Where marks are read, and the text in which marks that are not written are read."""

import dataclasses

import numpy as np
import pytest

from support.evaluation_cases import small_tokenizer
from tango_jax.cli.command_line import load_config
from tango_jax.grading import parse_verification
from tango_jax.tasks.registry import tokenizer_model
from tango_jax.text.mark_rows import blank_marks, mark_row, marks_alone, without_remarks
from tango_jax.text.tokenizer import load_sentencepiece

LETTERS = load_sentencepiece(tokenizer_model(load_config("tiny")))
TOKENIZERS = {"letters": LETTERS, "bpe": small_tokenizer()}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_each_steps_mark_has_the_token_of_either_word(name, count):
    tokenizer = TOKENIZERS[name]
    row = mark_row(tokenizer, count, 500)
    assert row.tokens.tolist() == blank_marks(tokenizer, count) and not row.is_cut
    marks = np.flatnonzero(row.other >= 0)
    assert len(marks) == count and row.text == marks_alone([True] * count)
    for k in range(count):
        # Up to the mark, the text with INCORRECT in its place has the same tokens, and then the other word's.
        other = tokenizer.encode_response(marks_alone([j != k for j in range(count)]))
        assert other[: marks[k] + 1] == [*row.tokens[: marks[k]], row.other[marks[k]]]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_judgement_is_written_as_its_marks_are(name):
    row = mark_row(TOKENIZERS[name], 3, 500)
    for marks in ((True, True, True), (True, False, True), (False, False, False)):
        text, ends = row.written(marks)
        assert text == marks_alone(marks)
        parsed = parse_verification(text, 3)
        assert parsed.judgements == marks and parsed.aligned and parsed.format_score == 1.0
        assert parsed.verdict == ("CORRECT" if all(marks) else "INCORRECT")
        assert len(ends) == len(row.tokens) and ends == sorted(ends) and ends[-1] == len(text)
    # The token of a mark that is replaced ends where the longer word does.
    text, ends = mark_row(LETTERS, 3, 500).written((True, False, True))
    second = np.flatnonzero(mark_row(LETTERS, 3, 500).other >= 0)[1]
    assert text[: ends[second]].endswith("INCORRECT") and text[: ends[second - 1]].endswith("\\boxed{")


def test_marks_that_have_no_room_are_not_read():
    whole = mark_row(LETTERS, 3, 500)
    row = mark_row(LETTERS, 3, len(whole.tokens) - 1)
    assert row.is_cut and (row.other == -1).all() and len(row.tokens) == len(whole.tokens) - 1
    assert parse_verification(row.text, 3).verdict == "INVALID"


def test_a_tokenizer_that_joins_marks_with_what_follows_is_refused():
    """It makes one token of the word and the brace behind it, where text follows."""
    def encode(text: str) -> list[int]:
        return LETTERS.encode_fn(text.replace("CORRECT}</step>", "z}</step>"))

    with pytest.raises(ValueError, match="spells a mark otherwise where text follows it"):
        mark_row(dataclasses.replace(LETTERS, encode_fn=encode, token_bytes=tuple(
            b"CORRECT" if one == b"z" else one for one in LETTERS.token_bytes)), 2, 500)


def test_remarks_are_taken_out_of_examples():
    text = ("<step_verification>\n<step>#1 reads t, says t \\boxed{CORRECT}</step>\n<step>no \\box{incorrect}.</step>\n"
            "</step_verification>\n<final_verification>\\boxed{INCORRECT}</final_verification>")
    assert without_remarks(text) == marks_alone([True, False])
    assert without_remarks("<step_verification><step>?</step></step_verification>").startswith("<step_verification>")
    unjudged = "<step_verification><step>perhaps</step></step_verification>"
    assert without_remarks(unjudged) == unjudged
