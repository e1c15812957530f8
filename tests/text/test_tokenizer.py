"""Text to ids and back, and the token in which each character ends: with vocabularies made by hand and the task's."""

import dataclasses
import io
import re
import string
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece

from tango_jax.cli.command_line import load_config
from tango_jax.method.texts import make_solution
from tango_jax.records import Problem
from tango_jax.tasks import last_letter
from tango_jax.tasks.registry import tokenizer_model
from tango_jax.text.character_tokenizer import printable_model, train_sentencepiece
from tango_jax.text.tokenizer import (
    Tokenizer,
    load_sentencepiece,
    token_of_character,
    unreadable_characters,
)

REPLACED = "\N{REPLACEMENT CHARACTER}"
GEQ = "\N{GREATER-THAN OR EQUAL TO}"  # e2 89 a5


def test_every_printable_character_and_the_line_break_have_a_token():
    tokenizer, text = load_sentencepiece(printable_model()), f"{string.printable[:95]}\n"
    assert tokenizer.decode(tokenizer.encode_fn(f"a{text}b\n")) == f"a{text}b\n"
    assert unreadable_characters(tokenizer, [text, f"b{GEQ}a{GEQ}", "\t"]) == ["\t", GEQ]


def by_hand(*token_bytes: bytes) -> Tokenizer:
    """A tokenizer that only decodes; id 0 is the end of a response."""
    return Tokenizer(encode_fn=lambda text: [], token_bytes=(b"", *token_bytes), bos_ids=(), stop_ids=(0,))


@pytest.fixture(scope="module")
def model() -> bytes:
    return train_sentencepiece(last_letter.ALPHABET, last_letter.symbols(12))


@pytest.fixture(scope="module")
def tokenizer(model) -> Tokenizer:
    return load_sentencepiece(model)


@pytest.mark.parametrize("token_bytes, text, ends", [
    ([b"a", b"\xe2\x89", b"\xa5", b"b"], f"a{GEQ}b", [1, 1, 2, 3]),
    ([b"a\xe2", b"\x89", b"\xa5b"], f"a{GEQ}b", [1, 1, 3]),
    ([b"\xf0", b"\x9f", b"\x99", b"\x82"], "\N{SLIGHTLY SMILING FACE}", [0, 0, 0, 1]),
    ([b"ab", b"", b"c"], "abc", [2, 2, 3]),  # a control token in the middle stands for no text
    ([b"a", b"\xe2\x89"], f"a{REPLACED}", [1, 2]),  # unfinished at the end
    ([b"a", b"\xe2\x89", b""], f"a{REPLACED}", [1, 1, 2]),  # ... and the end-of-sequence token closes it
    ([b"\xe2", b"a"], f"{REPLACED}a", [0, 2]),  # never finished: seen when the next character starts
    ([b"\xff", b"a"], f"{REPLACED}a", [1, 2]),  # no character starts with this byte
    ([b"a\xffb\xe2\x28"], f"a{REPLACED}b{REPLACED}(", [5]),
    ([b"\xa5", b"\xa5"], REPLACED * 2, [1, 2]),
    ([b"", b""], "", [0, 0]),
    ([], "", []),
])
def test_text_and_ends_of_split_characters(token_bytes, text, ends):
    tokenizer = by_hand(*token_bytes)
    ids = list(range(1, len(token_bytes) + 1))
    assert tokenizer.decode_with_ends(ids) == (text, ends)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("token_bytes, text, ends", [
    ([b" a", b" b"], "a b", [1, 3]),
    ([b" ", b" a"], " a", [0, 2]),
    ([b"", b" ", b"a"], "a", [0, 0, 1]),  # a control token in front
    ([b"a", b" "], "a ", [1, 2]),
    ([b" \xe2\x89", b"\xa5 "], f"{GEQ} ", [0, 2]),
    ([b"\xe2", b" a"], f"{REPLACED} a", [0, 3]),
])
def test_the_blank_that_encoding_puts_first_is_taken_away(token_bytes, text, ends):
    tokenizer = dataclasses.replace(by_hand(*token_bytes), strips_blank=True)
    assert tokenizer.decode_with_ends(range(1, len(token_bytes) + 1)) == (text, ends)


def test_a_chat_template_wraps_prompts_only():
    tokenizer = Tokenizer(lambda text: list(text.encode()), (b"",) * 256, (1,), (0,), chat_fn=lambda text: f"<{text}>")
    assert tokenizer.encode_prompt("a") == [60, 97, 62]  # it writes its own BOS, where the model has one
    assert tokenizer.encode_response("a") == [97, 0]


def test_ends_for_random_splits_of_text():
    # Independent of the decoder: a character is complete once the token with its last byte has been read.
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = "".join(rng.choice(list("ab>\n\u00e9\u2265\u6570\U0001f642"), size=rng.integers(1, 12)))
        data = text.encode()
        cuts = np.unique([0, *rng.integers(0, len(data) + 1, size=rng.integers(0, 6)), len(data)])
        pieces = [data[start:end] for start, end in zip(cuts[:-1], cuts[1:], strict=True)]
        last_byte = np.cumsum([len(character.encode()) for character in text])
        decoded, ends = by_hand(*pieces).decode_with_ends(range(1, len(pieces) + 1))
        assert decoded == text
        assert ends == [int((last_byte <= end).sum()) for end in cuts[1:]]
        for c in range(len(text)):
            holder = int(np.searchsorted(cuts[1:], last_byte[c]))  # first token whose bytes reach the character's last
            assert token_of_character(ends, c) == holder


def test_random_bytes_decode_as_a_whole():
    rng = np.random.default_rng(1)
    alphabet = np.array([0x61, 0x3E, 0xE2, 0x89, 0xA5, 0xF0, 0xFF], np.uint8)
    for _ in range(200):
        pieces = [rng.choice(alphabet, size=rng.integers(0, 4)).tobytes() for _ in range(rng.integers(1, 8))]
        text, ends = by_hand(*pieces).decode_with_ends(range(1, len(pieces) + 1))
        assert text == b"".join(pieces).decode("utf-8", "replace")
        assert ends == sorted(ends) and ends[-1] == len(text)


@pytest.mark.parametrize("ends", [[3], [0, 0, 2, 2, 5], [1, 2, 3, 4], [0, 4, 4, 4], [0, 0], []])
def test_token_of_character_is_the_first_that_completes_it(ends):
    for character in range(7):
        holders = [token for token, end in enumerate(ends) if end > character]
        assert token_of_character(ends, character) == (holders[0] if holders else -1)


def test_round_trips_of_the_tasks_text(tokenizer):
    config = last_letter.LastLetterConfig((1, 12), (1, 10), 0.5, 0.5, 0.5)
    for index in range(20):
        problem, solution, verification = last_letter.verifier_example(config, 0, "sft_verifier", index)
        for text in (problem.question, solution, verification, f"{problem.question}\n{solution}\n12\n", ""):
            ids = tokenizer.encode_prompt(text)
            assert tokenizer.decode(ids) == text
            assert tokenizer.decode(tokenizer.encode_response(text)) == text
            assert max(ids) < tokenizer.vocab_size


def test_bos_starts_prompts_eos_ends_responses_and_neither_is_text(tokenizer):
    (bos,), (eos,) = tokenizer.bos_ids, tokenizer.stop_ids
    prompt, response = tokenizer.encode_prompt("ab"), tokenizer.encode_response("ab")
    assert (prompt[0], response[-1]) == (bos, eos)
    assert prompt[1:] == response[:-1] and len(prompt) == 3
    assert tokenizer.token_bytes[bos] == tokenizer.token_bytes[eos] == b""
    assert bos != eos
    assert tokenizer.decode_with_ends([bos, *prompt[1:], eos]) == ("ab", [0, 1, 2, 2])


def test_every_symbol_is_one_token_wherever_it_stands(tokenizer):
    symbols = last_letter.symbols(12)
    ids = [tokenizer.encode_fn(symbol) for symbol in symbols]
    assert [len(found) for found in ids] == [1] * len(symbols)
    assert len({found[0] for found in ids}) == len(symbols)
    for symbol, (token,) in zip(symbols, ids, strict=True):
        assert tokenizer.token_bytes[token] == symbol.encode()
        assert tokenizer.encode_fn(f"x{symbol}y") == [*tokenizer.encode_fn("x"), token, *tokenizer.encode_fn("y")]


def test_the_longest_symbol_wins(tokenizer):
    assert [tokenizer.token_bytes[token] for token in tokenizer.encode_fn("#12 \\boxed{INCORRECT}")] == [
        b"#12", b" ", b"\\boxed{", b"INCORRECT", b"}",
    ]


def test_blanks_are_kept_where_they_are(tokenizer):
    for text in (" a", "a ", "a  b", "\n\na\n", "  "):
        assert tokenizer.decode(tokenizer.encode_fn(text)) == text


def test_an_unknown_character_is_marked_and_leaves_the_rest_alone(tokenizer):
    assert tokenizer.decode(tokenizer.encode_fn("aQb")) == f"a{REPLACED}b"


def test_training_twice_gives_the_same_model(model, tokenizer):
    again = train_sentencepiece(last_letter.ALPHABET, last_letter.symbols(12))
    assert again == model
    assert load_sentencepiece(again).token_bytes == tokenizer.token_bytes


def test_byte_pieces_stand_for_their_byte():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["abc cab"] * 4), model_writer=model, model_type="bpe", vocab_size=300,
        byte_fallback=True, hard_vocab_limit=False, normalization_rule_name="identity", add_dummy_prefix=False,
        minloglevel=2,
    )
    tokenizer = load_sentencepiece(model.getvalue())
    ids = tokenizer.encode_fn(f"a{GEQ}b")
    assert [tokenizer.token_bytes[token] for token in ids] == [b"a", b"\xe2", b"\x89", b"\xa5", b"b"]
    assert tokenizer.decode_with_ends(ids) == (f"a{GEQ}b", [1, 1, 1, 2, 3])


# ------------------------------------------------------------------------------------------------------- step ends

TASK = SimpleNamespace(min_steps=2, gold_steps=None)
PROBLEM = Problem("p", "?", "7")


@pytest.mark.parametrize("pieces, step_ends", [
    # The token that holds the last '>' of each </step>, alone or with what stands around it.
    (["<step>", "a", "</step>", "<step>", "b", "</step>", ""], (2, 5)),
    (["<step>a", "</", "step", "><", "step>b", "</step", ">", "", ""], (3, 6)),
    (["<", "step>a</step", "><step>b</st", "ep>\n<answer>"], (2, 3)),
    (["<step>a</step><step>b</step>"], (0, 0)),
    (["\u2265 <step>\u2265", "\u2265</step", ">\u2265", "<step></step>\u2265"], (2, 3)),
    (["<step>a</step>", "<step>b</step"], (0,)),
    (["no steps"], ()),
])
def test_step_ends_point_at_the_token_with_the_last_character_of_the_tag(pieces, step_ends):
    tokenizer = by_hand(*(piece.encode() for piece in pieces))
    text, ends = tokenizer.decode_with_ends(range(1, len(pieces) + 1))
    solution = make_solution(TASK, PROBLEM, text, ends, False)
    assert solution.step_ends == step_ends
    # Independently: with the tokens up to the one named the block is closed, with one less it is not.
    for k, token in enumerate(step_ends, 1):
        assert "".join(pieces[: token + 1]).count("</step>") >= k > "".join(pieces[:token]).count("</step>")


def test_step_ends_where_a_character_is_split_inside_a_step():
    tokenizer = by_hand(b"<step>\xe2\x89", b"\xa5</step", b">\xe2", b"\x89\xa5<step>\xff</step>", b"")
    text, ends = tokenizer.decode_with_ends([1, 2, 3, 4, 5])
    solution = make_solution(TASK, PROBLEM, text, ends, False)
    assert solution.steps == (GEQ, REPLACED)
    assert solution.step_ends == (2, 3)


def test_step_ends_of_the_tasks_own_tokens(tokenizer):
    text = last_letter.solution_text(["t", "g"], [1, 1])
    ids = tokenizer.encode_response(text)
    (close,) = tokenizer.encode_fn("</step>")
    solution = make_solution(TASK, PROBLEM, *tokenizer.decode_with_ends(ids), True)
    assert solution.step_ends == tuple(place for place, token in enumerate(ids) if token == close)
    assert solution.steps == ("#1 ends in t", "#2 ends in g")


def test_characters_that_are_known_where_they_stand_are_read():
    """The tokenizer of last_letter has "#1", but no "#" alone."""
    tokenizer = load_sentencepiece(tokenizer_model(load_config("tiny")))
    assert unreadable_characters(tokenizer, ["cat#1 dog#2"]) == []
    assert unreadable_characters(tokenizer, ["cat#1", "dog # 2"]) == ["#"]
    assert unreadable_characters(tokenizer, ["Cat#1 dög#2", "öC"]) == ["C", "ö"]


def test_special_texts_in_what_is_imitated_and_in_templates():
    """<s> is BOS and <e> ends a turn; each is one id where a text spells it out."""
    def encode(text):
        ids = {"<s>": [1], "<e>": [0]}
        return [i for part in re.split("(<[se]>)", text) for i in ids.get(part, part.encode())]

    tokenizer = Tokenizer(encode, (b"",) * 256, (1,), (0,), special_texts=("<s>", "<e>"))
    assert tokenizer.encode_prompt("a") == tokenizer.encode_prompt("<s>a") == [1, 97]
    for text in ("a", "a<e>", "a<e>\n<s>\n"):
        assert tokenizer.encode_response(text) == [97, 0]
    assert tokenizer.encode_response("a<e>b") == [97, *b"< e>b", 0]
