"""The token that decides a mark, and P(CORRECT) by the log-prob with which it was sampled, worked by hand."""

import dataclasses
import math

import numpy as np
import pytest

from support.evaluation_cases import verification
from support.greedy_tokenizer import greedy_tokenizer
from tango_jax.method.texts import read_responses
from tango_jax.records import Problem, Rollout
from tango_jax.text.marks import find_deciding_tokens, sampled_probabilities
from tango_jax.text.prompts import JUDGE, solution_of

WORDS = ("CORRECT", "INCORRECT")


def sampled(tokenizer, tokens, probability_of):
    """`probability_of`: the token's text -> what it was sampled with; 0.9 of every other."""
    text, ends = tokenizer.decode_with_ends(tokens)
    logps = [math.log(probability_of.get(tokenizer.decode([token]), 0.9)) for token in tokens]
    return sampled_probabilities(tokenizer, tokens, text, ends, logps)


def test_the_probability_of_a_sampled_word_or_of_the_other_one():
    tokenizer = greedy_tokenizer(*WORDS)
    tokens = tokenizer.encode_fn(verification("INCORRECT", True, False))
    # CORRECT was sampled with 0.7; INCORRECT with 0.4, and all other tokens count for CORRECT.
    assert sampled(tokenizer, tokens, {"CORRECT": 0.7, "INCORRECT": 0.4}) == pytest.approx((0.7, 0.6))


def test_a_token_that_begins_before_the_word_decides():
    r"""`{IN` is one token, and `boxed{C` another: the words differ from "boxed" on, in which INCORRECT has a "b"."""
    tokenizer = greedy_tokenizer("{IN", "boxed{C", "ORRECT")
    right, wrong = (tokenizer.encode_fn(verification("CORRECT", mark)) for mark in (True, False))
    assert sampled(tokenizer, right, {"boxed{C": 0.8, "ORRECT": 0.3}) == pytest.approx((0.8,))
    text, ends = tokenizer.decode_with_ends(wrong)
    [mark, _] = find_deciding_tokens(tokenizer, text, ends)
    assert tokenizer.decode([wrong[mark.token]]) == "b" and text[mark.start :].startswith("INCORRECT")
    logps = np.full(len(wrong), math.log(0.9))
    logps[mark.token] = math.log(0.25)
    assert sampled_probabilities(tokenizer, wrong, text, ends, logps) == pytest.approx((0.75,))


@pytest.mark.parametrize("pieces, mark, p", [
    (WORDS, True, 0.7), (WORDS, False, 0.6),
    (("{CORRECT", "INCORRECT"), True, 0.7),  # of INCORRECT, "{" is the tokenizer's own token, and decides
])
def test_in_a_word_of_other_tokens_its_first_letter_decides(pieces, mark, p):
    tokenizer = greedy_tokenizer(*pieces)
    text = verification("CORRECT", mark)
    tokens = [number + 2 for number in greedy_tokenizer().encode_fn(text)]  # one a character
    assert tokenizer.decode(tokens) == text
    logps = np.full(len(tokens), math.log(0.9))
    logps[text.index("CORRECT" if mark else "INCORRECT")] = math.log(0.7 if mark else 0.4)
    found = sampled_probabilities(tokenizer, tokens, text, list(range(1, len(text) + 1)), logps)
    assert found == pytest.approx((p,))


def test_blocks_without_a_mark_have_none_and_rounding_leaves_no_probability_above_one():
    tokenizer = greedy_tokenizer("correct")
    text = "<step_verification><step>fine</step><step>\\boxed{correct}</step></step_verification>"
    tokens = tokenizer.encode_fn(text)
    text, ends = tokenizer.decode_with_ends(tokens)
    assert sampled_probabilities(tokenizer, tokens, text, ends, np.full(len(tokens), 1e-7)) == (None, 1.0)
    assert sampled_probabilities(tokenizer, [], "", [], []) == ()


@pytest.mark.parametrize("is_needed", [False, True])
def test_responses_of_the_verifier_have_probabilities_where_they_are_needed(is_needed):
    tokenizer = greedy_tokenizer(*WORDS)
    texts = [verification("CORRECT", True), verification("INCORRECT", False)]
    tokens = tuple(np.array(tokenizer.encode_fn(text), np.int32) for text in texts)
    logps = tuple(np.full(len(one), math.log(0.8), np.float32) for one in tokens)
    solutions = [solution_of(Problem("p", "q", "a"), "s", 1)] * 2
    rollout = Rollout(tokens, logps, np.zeros(2, bool), 1, 1)
    records = read_responses(JUDGE, None, tokenizer, solutions, rollout, needs_probabilities=is_needed)
    assert [one.judgements for one in records] == [(True,), (False,)]
    expected = [(0.8,), (0.2,)] if is_needed else [(), ()]
    assert [one.p_steps for one in records] == [pytest.approx(one) for one in expected]


def test_a_step_that_is_not_judged_has_no_probability():
    tokenizer = greedy_tokenizer(*WORDS)
    tokens = np.array(tokenizer.encode_fn(verification("INCORRECT", True, False, True)), np.int32)
    rollout = Rollout((tokens,), (np.full(len(tokens), math.log(0.8)),), np.zeros(1, bool), 1, 1)
    solutions = [solution_of(Problem("p", "q", "a"), "s", 4)]
    [record] = read_responses(JUDGE, None, tokenizer, solutions, rollout, stops=True, needs_probabilities=True)
    assert record.judgements == (True, False, None, None) and record.is_aligned
    assert record.p_steps[:2] == pytest.approx((0.8, 0.2)) and record.p_steps[2:] == (None, None)


def test_a_tokenizer_that_spells_both_words_alike_raises_nothing():
    """One that has no capital letters leaves them out, and the model wrote with a token of its own."""
    tokenizer = greedy_tokenizer(*WORDS)
    deaf = dataclasses.replace(tokenizer, encode_fn=lambda text: tokenizer.encode_fn(
        text.replace("INCORRECT", "").replace("CORRECT", "")))
    tokens = tokenizer.encode_fn(verification("CORRECT", True))
    assert sampled(deaf, tokens, {"CORRECT": 0.7}) == pytest.approx((0.7,))
