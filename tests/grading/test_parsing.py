"""The parsers of model text: spans, answers, judgements, verdicts and format scores, on written cases."""
import pytest

from tango_jax.grading import parse_solution, parse_verification, until_first_error

THREE_STEPS = "<think>\n<step>a</step>\n<step>b</step>\n<step>c</step>\n</think>\n"


def solution(answer_block: str, steps: str = THREE_STEPS) -> str:
    return f"{steps}<answer>{answer_block}</answer>"


def verification(*blocks: str, final: str = r"\boxed{CORRECT}") -> str:
    body = "\n".join(f"<step>{block}</step>" for block in blocks)
    return f"<step_verification>\n{body}\n</step_verification>\n<final_verification>{final}</final_verification>"


# ---------------------------------------------------------------------------------------------------- solutions


def test_spans_are_characters_with_the_tags():
    text = "<think>\n<step>multi\nline</step>\n<step>设 x=1，则 y≥2。</step>\n</think><answer>\\boxed{\\pi^2}</answer>"
    parsed = parse_solution(text)
    assert parsed.step_spans == ((8, 31), (32, 57))
    assert parsed.steps == ("multi\nline", "设 x=1，则 y≥2。")
    assert [text[start:end] for start, end in parsed.step_spans] == [f"<step>{step}</step>" for step in parsed.steps]
    assert parsed.answer == r"\pi^2"


@pytest.mark.parametrize("text, spans", [
    ("<step></step>", ((0, 13),)),
    ("<step>a<step>b</step>c</step>", ((0, 21),)),  # a block ends at the first closing tag
    ("</step><step>a</step>", ((7, 21),)),
    ("<step>a</step><step>b", ((0, 14),)),
    ("<step>a", ()),
    ("<Step>a</Step>", ()),
    ("< step>a</step>", ()),
    ("<step>a</answer></step>", ((0, 23),)),
    ("", ()),
])
def test_step_blocks(text, spans):
    assert parse_solution(text).step_spans == spans


@pytest.mark.parametrize("block, answer", [
    (r"\boxed{6}", "6"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{1} or \boxed{2}", "2"),
    (r"\boxed{1} then \boxed{2", "1"),  # the last one is not balanced
    (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{a\boxed{b}c}", "b"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{\left\{x\right.}", r"\left\{x\right."),  # an escaped brace groups nothing
    (r"\boxed{a\\{b}}", r"a\\{b}"),  # after a line break a brace does
    (r"\\boxed{7}", "7"),
    (r"{\boxed{6}", "6"),
    (r"}\boxed{6}}", "6"),
    ("\\boxed{a\nb}", "a\nb"),
    (r"\boxed{'}'}", "'}'"),  # a brace in a Python string ends nothing
    (r"\boxed{'{'}", "'{'"),
    ("\\boxed{['}', 'a{', \"}\"]}", "['}', 'a{', \"}\"]"),
    (r"\boxed{\{'}': '\'}', 2: b'{'\}}", r"\{'}': '\'}', 2: b'{'\}"),
    (r"\boxed{f'(x)}", "f'(x)"),  # primes, apostrophes and quotes that nothing closes are no strings
    (r"\boxed{f'} and \boxed{g'}", "g'"),
    (r"\boxed{{y}' + y'}", "{y}' + y'"),
    (r"\boxed{\text{don't}} or \boxed{\text{can't}}", r"\text{can't}"),
    (r"\boxed{'} then \boxed{7}", "7"),
    ("\\boxed{5' 3\"} and {6'", "5' 3\""),
    ("\\boxed{'}\n'}", "'"),
    (r"it's '\boxed{7}' isn't", "7"),
    (r"\boxed{}", ""),
    (r"\boxed {6}", None),
    (r"\boxed{\frac{1}{2}", None),
    ("6", None),
    ("", None),
])
def test_answer_is_the_last_balanced_box_of_the_answer_block(block, answer):
    assert parse_solution(solution(block)).answer == answer


def test_answer_comes_from_the_first_answer_block_only():
    assert parse_solution(r"\boxed{1}<answer>\boxed{2}</answer><answer>\boxed{3}</answer>\boxed{4}").answer == "2"
    assert parse_solution(r"<answer>two</answer><answer>\boxed{3}</answer>").answer is None
    assert parse_solution(r"<answer>\boxed{6}").answer is None
    assert parse_solution(r"\boxed{6}</answer>").answer is None


@pytest.mark.parametrize("text, score", [
    (solution(r"\boxed{6}"), 1.0),
    (solution("\n \\boxed{6} \n"), 1.0),
    (solution(r"\boxed{6}", steps=THREE_STEPS.replace("<think>", "").replace("</think>", "")), 1.0),
    (solution(r"\boxed{\frac{1}{2}}"), 1.0),
    (solution(r"\boxed{\boxed{6}}"), 1.0),
    (solution(r"\boxed{6}", steps="<step></step>" * 3), 1.0),
    (solution(r"\boxed{6}") + " trailing", 1.0),
    (solution(r"\boxed{}"), 0.2),
    (solution("6"), 0.2),
    (solution(""), 0.2),
    (solution(r"$\boxed{6}$"), 0.2),
    (solution(r"\boxed{6}."), 0.2),
    (solution(r"The answer is \boxed{6}"), 0.2),
    (solution(r"\boxed{1}\boxed{2}"), 0.2),
    (solution(r"\boxed{1}, \boxed{2}"), 0.2),
    (solution(r"\boxed{\frac{1}{2}"), 0.2),
    (solution(r"\boxed{6}", steps="<step>a</step><step>b</step>"), 0.6),
    (solution(r"\boxed{6}", steps="<step>a</step>"), 0.6),
    (solution("6", steps="<step>a</step>"), 0.0),  # 1 - 0.8 - 0.4 is below 0
    (solution(r"\boxed{6}", steps="words"), 0.2),
    (solution("6", steps="words"), 0.0),
    (THREE_STEPS + r"\boxed{6}", 0.0),
    (THREE_STEPS + r"<answer>\boxed{6}", 0.0),
    ("", 0.0),
])
def test_generator_format_score(text, score):
    assert parse_solution(text).format_score == score


def test_min_steps_is_the_tasks():
    one_step = solution(r"\boxed{6}", steps="<step>a</step>")
    assert parse_solution(one_step, min_steps=1).format_score == 1.0
    assert parse_solution(one_step, min_steps=2).format_score == 0.6
    assert parse_solution(solution(r"\boxed{6}"), min_steps=4).format_score == 0.6
    assert parse_solution(solution(r"\boxed{6}", steps=""), min_steps=0).format_score == 0.2


# ------------------------------------------------------------------------------------------------ verifications


@pytest.mark.parametrize("block, judgement", [
    (r"fine. \boxed{CORRECT}", True),
    (r"fine. \boxed{INCORRECT}", False),
    (r"\boxed{CORRECT}", True),
    (r"fine. \box{CORRECT}", True),
    (r"fine. \box{incorrect}", False),
    (r"fine. \boxed{Correct}", True),
    (r"fine. \boxed{CORRECT}.", True),
    ("fine. \\boxed{CORRECT}. \n ", True),
    ("fine. \\boxed{INCORRECT}\n", False),
    (r"\boxed{CORRECT} no: \boxed{INCORRECT}", False),
    (r"\boxed{INCORRECT} so 2 \boxed{CORRECT}.", True),
    (r"fine. \boxed{CORRECT}!", None),
    (r"fine. \boxed{CORRECT}..", None),
    (r"fine. \boxed{CORRECT} .", None),
    (r"fine. \boxed{CORRECT} I think", None),
    (r"$\boxed{CORRECT}$", None),
    (r"\boxed{\text{CORRECT}}", None),
    (r"\boxed{ CORRECT }", None),
    (r"\boxed{CORRECT", None),
    (r"\boxed{UNSURE}", None),
    (r"\boxed{NOT CORRECT}", None),
    ("boxed{CORRECT}", None),
    ("CORRECT", None),
    ("", None),
])
def test_judgement_is_the_box_that_ends_the_block(block, judgement):
    parsed = parse_verification(verification(block), num_steps=1)
    assert parsed.judgements == (judgement,)
    assert parsed.blocks == (block,)
    assert parsed.aligned == (judgement is not None)


def test_a_block_without_judgement_does_not_swallow_the_next():
    parsed = parse_verification(verification("no box here", r"\boxed{INCORRECT}", r"\boxed{CORRECT}"), num_steps=3)
    assert parsed.judgements == (None, False, True)
    assert not parsed.aligned
    assert parsed.verdict == "CORRECT"
    assert parsed.format_score == 0.2  # two judged blocks for three steps


@pytest.mark.parametrize("num_blocks, num_steps, aligned", [
    (2, 2, True), (2, 3, False), (3, 2, False), (0, 0, False), (0, 2, False), (1, 1, True),
])
def test_alignment_needs_as_many_judgements_as_steps(num_blocks, num_steps, aligned):
    text = verification(*[r"\boxed{CORRECT}"] * num_blocks)
    assert parse_verification(text, num_steps).aligned is aligned


@pytest.mark.parametrize("final, verdict", [
    (r"\boxed{CORRECT}", "CORRECT"),
    (r"\boxed{INCORRECT}", "INCORRECT"),
    ("\n\\boxed{CORRECT}\n", "CORRECT"),
    (" \t\\boxed{INCORRECT} \n\n", "INCORRECT"),
    (r"\box{CORRECT}", "CORRECT"),
    (r"\boxed{incorrect}", "INCORRECT"),
    (r"\boxed{CORRECT}.", "CORRECT"),
    (r"$\boxed{CORRECT}$", "INVALID"),
    (r"\boxed{ CORRECT }", "INVALID"),
    (r"\boxed{\text{CORRECT}}", "INVALID"),
    (r"\boxed{CORRECT}!", "INVALID"),
    (r"All good: \boxed{CORRECT}", "INVALID"),
    (r"\boxed{CORRECT} \boxed{INCORRECT}", "INVALID"),
    (r"\boxed{CORRECT or INCORRECT}", "INVALID"),
    (r"\boxed{ıncorrect}", "INVALID"),  # a dotless i is no I
    ("CORRECT", "INVALID"),
    ("", "INVALID"),
])
def test_verdict(final, verdict):
    parsed = parse_verification(verification(r"\boxed{CORRECT}", final=final), num_steps=1)
    assert parsed.verdict == verdict
    assert parsed.format_score == (0.2 if verdict == "INVALID" else 1.0)
    assert parsed.aligned  # a bad verdict takes nothing from the judgements


@pytest.mark.parametrize("text", [
    "",
    "I refuse.",
    r"\boxed{CORRECT}",
    r"<final_verification>\boxed{CORRECT}",
    r"\boxed{CORRECT}</final_verification>",
    r"<final_verification></final_verification>\boxed{CORRECT}",
])
def test_absent_or_truncated_verdict_is_invalid(text):
    parsed = parse_verification(text, num_steps=1)
    assert (parsed.verdict, parsed.judgements, parsed.format_score) == ("INVALID", (), 0.0)


def test_blocks_count_only_inside_a_closed_section():
    block = r"<step>\boxed{CORRECT}</step>"
    final = r"<final_verification>\boxed{INCORRECT}</final_verification>"
    for text in (block + final, "<step_verification>" + block + final, block + "</step_verification>" + final):
        parsed = parse_verification(text, num_steps=1)
        assert (parsed.judgements, parsed.aligned, parsed.format_score) == ((), False, 0.0)
        assert parsed.verdict == "INCORRECT"
    parsed = parse_verification(f"{block}<step_verification>{block}{block}</step_verification>{block}{final}", 2)
    assert (parsed.judgements, parsed.aligned, parsed.format_score) == ((True, True), True, 0.0)


def test_answered_twice_the_first_sections_count():
    first = verification(r"\boxed{CORRECT}", r"\boxed{CORRECT}")
    second = verification(r"\boxed{INCORRECT}", r"\boxed{INCORRECT}", final=r"\boxed{INCORRECT}")
    parsed = parse_verification(first + second, num_steps=2)
    assert (parsed.judgements, parsed.verdict, parsed.format_score) == ((True, True), "CORRECT", 1.0)


OK = r"\boxed{CORRECT}"
SECTION = f"<step_verification><step>{OK}</step></step_verification>"
FINAL = f"<final_verification>{OK}</final_verification>"


@pytest.mark.parametrize("text, score", [
    (SECTION + FINAL, 1.0),
    (f"  \n{SECTION}\n\n {FINAL}\n ", 1.0),
    ("Sure! " + SECTION + FINAL, 0.0),
    (SECTION + FINAL + " Done.", 0.0),
    (SECTION + " so " + FINAL, 0.0),
    (FINAL + SECTION, 0.0),
    (SECTION, 0.0),
    (FINAL, 0.0),
    (f"<step_verification>Now: <step>{OK}</step></step_verification>" + FINAL, 0.6),
    (f"<step_verification><step>{OK}</step>.</step_verification>" + FINAL, 0.6),
    (f"<step_verification><step>{OK}</step><step></step_verification>" + FINAL, 0.6),
    ("<step_verification></step_verification>" + FINAL, 0.2),
    ("<step_verification> \n </step_verification>" + FINAL, 0.2),
    ("<step_verification>fine</step_verification>" + FINAL, 0.0),  # 1 - 0.8 - 0.4 is below 0
    (f"<step_verification><step>{OK}</step>x</step_verification><final_verification>?</final_verification>", 0.0),
])
def test_verifier_format_score_for_one_step(text, score):
    assert parse_verification(text, num_steps=1).format_score == score


def test_text_between_blocks_costs():
    text = f"<step_verification><step>{OK}</step> and <step>{OK}</step></step_verification>{FINAL}"
    assert parse_verification(text, num_steps=2).format_score == 0.6
    assert parse_verification(text, num_steps=3).format_score == 0.0


@pytest.mark.parametrize("generator_score, score", [(1.0, 0.2), (0.6, 0.2), (1 - 0.4, 0.2), (0.2, 1.0), (0.0, 1.0)])
def test_a_wrong_count_costs_only_if_the_solution_was_well_formed(generator_score, score):
    assert parse_verification(SECTION + FINAL, 2, generator_score).format_score == score


def test_a_verdict_named_in_a_step_is_not_the_verdict():
    text = verification(rf"I must still write <final_verification>. {OK}", final=r"\boxed{INCORRECT}")
    parsed = parse_verification(text, num_steps=1)
    assert (parsed.judgements, parsed.verdict, parsed.format_score) == ((True,), "INCORRECT", 1.0)


def test_a_verdict_that_a_block_quotes_is_not_the_verdict():
    quoted = r"<final_verification>\boxed{INCORRECT}</final_verification>"
    section = rf"<step_verification><step>it says {quoted} \boxed{{CORRECT}}</step></step_verification>"
    own = r"<final_verification>\boxed{CORRECT}</final_verification>"
    assert parse_verification(section + own, 1).verdict == "CORRECT"
    assert parse_verification(own + section, 1).verdict == "CORRECT"  # out of order, but there
    assert parse_verification(section, 1).verdict == "INCORRECT"


NOT_OK = r"\boxed{INCORRECT}"


@pytest.mark.parametrize("blocks, num_steps, judgements, aligned, score", [
    ((OK, NOT_OK), 4, (True, False, None, None), True, 1.0),
    ((NOT_OK,), 1, (False,), True, 1.0),
    ((OK, OK), 2, (True, True), True, 1.0),
    # What comes after the first INCORRECT is not read: it costs format score, whatever it is.
    ((OK, NOT_OK, OK), 3, (True, False, None), True, 0.2),
    ((OK, NOT_OK, NOT_OK, OK), 3, (True, False, None), True, 0.2),
    ((OK, NOT_OK, "no box"), 3, (True, False, None), True, 0.2),
    # Without one, all steps are to be judged.
    ((OK, OK), 3, (True, True), False, 0.2),
    ((OK, OK, NOT_OK), 2, (True, True, False), False, 0.2),
    # Not every step is judged up to there.
    (("no box", NOT_OK), 2, (None, False), False, 0.2),
    (("no box", NOT_OK), 3, (None, False), False, 0.2),
    ((), 2, (), False, 0.2),
])
def test_a_verifier_that_stops_at_the_first_error(blocks, num_steps, judgements, aligned, score):
    parsed = parse_verification(verification(*blocks, final=NOT_OK), num_steps, stops=True)
    assert (parsed.judgements, parsed.aligned, parsed.format_score) == (judgements, aligned, score)
    assert parsed.verdict == "INCORRECT" and len(parsed.blocks) == len(blocks)


def test_a_verification_is_cut_after_its_first_error():
    text = verification(OK, rf"wrong: {NOT_OK}", OK, NOT_OK, final=NOT_OK)
    assert until_first_error(text) == verification(OK, rf"wrong: {NOT_OK}", final=NOT_OK)
    for whole in (verification(OK, OK), verification(OK, NOT_OK), verification("?", OK), "", "<step_verification>"):
        assert until_first_error(whole) == whole
    lines = f"<step_verification>\n<step>{NOT_OK}</step>\n<step>{OK}</step>\n</step_verification>\n{FINAL}"
    assert until_first_error(lines) == f"<step_verification>\n<step>{NOT_OK}</step>\n</step_verification>\n{FINAL}"
