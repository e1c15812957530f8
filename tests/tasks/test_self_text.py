"""What a model's own samples give to imitate: right and well formed, different, balanced, with known mistakes."""

import functools
import json

import numpy as np
import pytest

from tango_jax.records import Problem
from tango_jax.tasks.self_text import (
    Claim,
    agrees,
    as_fields,
    choose_claims,
    claims_of,
    closed,
    damage,
    has_layout,
    is_well_formed,
    keep_solutions,
    keep_verifications,
)
from tango_jax.tasks.tagged_examples import read_tagged_rows
from tango_jax.text.templates import judged

PROBLEMS = [Problem(str(number), f"What is {number} + 1?", str(number + 1)) for number in range(4)]


def solution(number: int, answer: int, remark: str = "") -> str:
    return (f"<think>\n<step>{remark}{number} + 1 = {number + 1}.</step>\n<step>So it is {answer}.</step>\n</think>\n"
            f"<answer>\\boxed{{{answer}}}</answer>")


def test_only_right_and_well_formed_solutions_are_kept_each_once_and_few_of_a_problem():
    texts = [
        [(solution(0, 1), True), (solution(0, 1), True), (solution(0, 2), False), (solution(0, 1, "a "), True)],
        [("<answer>\\boxed{2}</answer>", True), (f"Sure. {solution(1, 2)}", True)],  # no steps; a full format
        [(solution(2, 3, letter), True) for letter in "abc"],
        [(solution(3, 5), False), (solution(3, 4, "<step>"), True)],  # a step in a step
    ]
    kept = keep_solutions(PROBLEMS, texts, most=2, min_steps=2)
    assert [row.problem.id for row in kept] == ["0", "0", "1", "2", "2"]
    assert [row.solution for row in kept[:2]] == [solution(0, 1), solution(0, 1, "a ")]
    assert keep_solutions(PROBLEMS, texts, most=2, min_steps=3) == []  # fewer steps lose format score


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_too_long_is_counted_whatever_the_order(order):
    """Of four solutions two fit, and two are kept at most; so it is with verifications."""
    too_long = []

    def fits(row):
        too_long.extend([row] * (is_long := "long" in row.solution + row.verification))
        return not is_long

    texts = [(solution(0, 1, remark), True) for remark in ("a ", "b ", "a long ", "b long ")][::order]
    assert len(keep_solutions(PROBLEMS[:1], [texts], most=2, min_steps=2, fits_fn=fits)) == len(too_long) == 2
    claims = [Claim(PROBLEMS[0], solution(0, 1), 2, True), Claim(PROBLEMS[0], solution(0, 2), 2, False)]
    said = [[judged([remark] * 2, [claim.is_right] * 2) for remark in ("a", "b", "a long", "b long")][::order]
            for claim in claims]
    assert len(keep_verifications(claims, said, most=2, fits_fn=fits)) == 4 and len(too_long) == 2 + 4


@pytest.mark.parametrize("old, new", [
    ("think>", "thought>"), ("<think>\n", ""), ("</step>\n</think>", "</step>\n</step>"),
    ("</answer>", "</answer></answer>"),
])
def test_the_layout_is_the_prompts(old, new):
    text = f"Sure. {solution(0, 1)}"
    assert has_layout(text) and is_well_formed(text, 2, is_strict=True)
    other = text.replace(old, new)
    assert is_well_formed(other, 2) and not is_well_formed(other, 2, is_strict=True)
    sampled = [[(other, True)], [(solution(1, 2), True)]]
    kept = functools.partial(keep_solutions, PROBLEMS[:2], sampled, most=2, min_steps=2)
    assert [len(kept(is_strict=strict)) for strict in (False, True)] == [2, 1]


def test_a_sample_ends_with_its_last_tag():
    assert closed(f"{solution(1, 2)}\n\nProblem:\nWhat is", "answer") == solution(1, 2)
    assert closed("<think>and so on ", "answer") == "<think>and so on"


@pytest.mark.parametrize("text, wrong", [
    ("Tom pays 4 * 3 = 12 dollars.", True),
    ("That is 1,000 + 500 = 1,500 in all.", True),
    ("(4 + 2) * 3 = 18.", True),
    ("4 + 3 = 8.", False),  # it does not hold: another number might mend it
    ("Tom has 7 apples.", False),
    ("3 + 4 = 7.5 is no result of these", False),
])
def test_a_damaged_step_is_certainly_wrong(text, wrong):
    whole = f"<step>First.</step><step>{text}</step><answer>\\boxed{{12}}</answer>"
    for seed in range(8):
        found = damage(Claim(PROBLEMS[0], whole, 2, True), np.random.default_rng(seed))
        assert (found is not None) == wrong
        if found:
            before, after = whole.split("</step>"), found.text.split("</step>")
            assert [one != other for one, other in zip(before, after, strict=True)] == [False, True, False]
            assert found.damaged == 1 and found.is_right and found.num_steps == 2
            left, result = after[1].removeprefix("<step>").replace(",", "").split("=")
            expression = left.strip().removeprefix("Tom pays").removeprefix("That is")
            assert eval(expression) != float(result.split()[0].rstrip("."))


def test_claims_are_half_wrong_and_a_quarter_damaged_and_of_different_problems_first():
    texts = [[(solution(n, n + 1), True), (solution(n, n + 2), False), (solution(n, n + 2), False)] for n in range(4)]
    claims = choose_claims(claims_of(PROBLEMS, texts, 2, seed=0), 8)
    assert sum(not claim.is_right for claim in claims) == 4
    assert sum(claim.damaged is not None for claim in claims) == 2
    assert {claim.problem.id for claim in claims if not claim.is_right} == {"0", "1", "2", "3"}
    assert claims == choose_claims(claims_of(PROBLEMS, texts, 2, seed=0), 8)
    only_right = claims_of(PROBLEMS, [own[:1] for own in texts], 2, seed=0)
    assert all(claim.is_right for claim in choose_claims(only_right, 8))
    # Of one problem, solutions of both kinds as well, and of the one kind that there is.
    for own, kinds in ((texts[0], [False, True]), (texts[0][1:], [False])):
        assert [claim.is_right for claim in choose_claims(claims_of(PROBLEMS[:1], [own], 2, seed=0), 1)] == kinds


def verification(*steps: bool, verdict: bool) -> str:
    return judged([f"remark {place}" for place in range(len(steps))], steps, is_right=verdict)


RIGHT, WRONG = Claim(PROBLEMS[0], solution(0, 1), 2, True), Claim(PROBLEMS[1], solution(1, 5), 2, False)
DAMAGED = Claim(PROBLEMS[2], solution(2, 3), 2, True, damaged=0)


@pytest.mark.parametrize("claim, text, is_kept", [
    (RIGHT, verification(True, True, verdict=True), True),
    (RIGHT, verification(True, True, verdict=False), False),
    (RIGHT, verification(True, verdict=True), False),  # one judgement for two steps
    (RIGHT, f"Well: {verification(True, True, verdict=True)}", False),  # text outside of the tags
    (WRONG, verification(True, False, verdict=False), True),
    (WRONG, verification(True, False, verdict=True), False),
    (DAMAGED, verification(False, True, verdict=True), True),  # the answer is right all the same
    (DAMAGED, verification(True, True, verdict=True), False),
    (DAMAGED, verification(True, False, verdict=True), False),  # another step
    (DAMAGED, verification(False, True, verdict=False), False),
])
def test_a_judgement_is_kept_if_it_agrees_with_what_is_known(claim, text, is_kept):
    assert agrees(claim, text) == is_kept


def test_as_many_judgements_of_right_as_of_wrong_solutions_are_kept():
    good = {RIGHT: verification(True, True, verdict=True), WRONG: verification(True, False, verdict=False),
            DAMAGED: verification(False, True, verdict=True)}
    claims = [RIGHT, RIGHT, WRONG, WRONG, DAMAGED]
    rows = keep_verifications(claims, [[good[claim], good[claim]] for claim in claims], most=3)
    verdicts = ["{CORRECT}</final" in row.verification for row in rows]
    assert verdicts == [True, False, True, False]  # in turns
    assert [row.problem.id for row in rows] == ["2", "1", "0", "1"]  # of the right ones, the damaged one first
    assert keep_verifications([RIGHT], [[good[RIGHT]]], most=3) == []


def test_what_is_too_long_is_left_out_before_as_many_of_each_are_kept():
    """One of two judgements of wrong solutions fits, so one of three of right ones is kept; and a shorter sample of
    the same problem takes the place of one that is too long."""
    right, wrong = verification(True, True, verdict=True), verification(True, False, verdict=False)
    rows = keep_verifications([RIGHT] * 3 + [WRONG] * 2, [[right]] * 3 + [[wrong], [wrong.replace("remark", "r")]],
                              most=3, fits_fn=lambda row: len(row.verification) < len(wrong))
    assert [row.verification for row in rows] == [right, wrong.replace("remark", "r")]
    texts = [[(solution(0, 1, "long "), True), (solution(0, 1), True)]]
    rows = keep_solutions(PROBLEMS[:1], texts, 1, 2, fits_fn=lambda row: "long" not in row.solution)
    assert [row.solution for row in rows] == [solution(0, 1)]


def test_kept_rows_are_what_stage_one_reads_from_a_file(tmp_path):
    rows = [*keep_verifications([RIGHT, WRONG], [[verification(True, True, verdict=True)],
                                                 [verification(True, False, verdict=False)]], most=1)]
    path = tmp_path / "kept.jsonl"
    path.write_text("".join(json.dumps(as_fields(row)) + "\n" for row in rows))
    found = read_tagged_rows(str(path), is_for_verifier=True)
    assert [(row.problem.question, row.solution, row.num_steps, row.verification) for row in found] == [
        (row.problem.question, row.solution, row.num_steps, row.verification) for row in rows]
