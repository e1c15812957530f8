"""Stage-1 text from GSM8K's worked answers, and the arithmetic that carries a mistake on."""
import json
from fractions import Fraction

import pytest

from support.paths import ROWS
from tango_jax.data.rows import read_rows
from tango_jax.grading import grade, parse_solution, parse_verification
from tango_jax.tasks.arithmetic import has_short_decimals, number_text, numbers_in, replace_numbers, value_of
from tango_jax.tasks.gsm8k import gsm8k_solution_text, gsm8k_verifier_example
from tango_jax.tasks.gsm8k_examples import make_gsm8k_examples

FILE = ROWS / "gsm8k.jsonl"
ROWS = [json.loads(line) for line in FILE.open(encoding="utf-8")]
GOLDS = [row["answer"].split("####")[1].strip() for row in ROWS]
CHAIN = {
    "question": "A pen costs $2,000 and 10% tax. Tom buys 3. How much does he pay?",
    "answer": "The tax is 2000*.1=$<<2000*.1=200>>200.\nSo one costs $<<2000+200=2200>>2,200.\n"
    "He pays $2,200*3 = $<<2200*3=6600>>6,600.\n#### 6,600",
}
pytestmark = pytest.mark.usefixtures("closed_pool")


@pytest.fixture(scope="module")
def examples():
    """(row, gold answer, example) of every row under 40 indices."""
    rows = [*zip(ROWS, GOLDS, strict=True), (CHAIN, "6600")]
    return [(row, gold, gsm8k_verifier_example(row, 0, index)) for index in range(40) for row, gold in rows]


def test_lines_become_steps_without_marks():
    assert gsm8k_solution_text(ROWS[0]) == (
        "<think>\n<step>Natalia sold 48/2 = 24 clips in May.</step>\n"
        "<step>Natalia sold 48+24 = 72 clips altogether in April and May.</step>\n</think>\n"
        "<answer>\\boxed{72}</answer>"
    )


@pytest.mark.parametrize("row, gold", list(zip(ROWS, GOLDS, strict=True)), ids=GOLDS)
def test_solutions_keep_the_text_contract(row, gold):
    text = gsm8k_solution_text(row)
    parsed = parse_solution(text)
    num_lines = len(row["answer"].splitlines()) - 1
    assert len(parsed.steps) == num_lines and "<<" not in text
    assert parsed.format_score == (1.0 if num_lines >= 3 else 0.6)
    assert grade(text, gold)


def test_labels_verdict_and_grade_agree(examples):
    for row, gold, example in examples:
        solution = parse_solution(example.solution)
        verification = parse_verification(example.verification, len(solution.steps), solution.format_score)
        assert verification.aligned and verification.format_score == 1.0
        assert verification.judgements == example.is_right
        assert example.is_right.count(False) <= 1
        is_correct = grade(example.solution, gold)
        assert is_correct == all(example.is_right)
        assert verification.verdict == ("CORRECT" if is_correct else "INCORRECT")
        right = parse_solution(gsm8k_solution_text(row)).steps
        if is_correct:
            assert solution.steps == right
        else:  # nothing changes before the wrong step
            wrong = example.is_right.index(False)
            assert solution.steps[:wrong] == right[:wrong] and solution.steps[wrong] != right[wrong]


def test_about_half_are_wrong_at_various_steps(examples):
    labels = [example.is_right for row, _, example in examples if row is CHAIN]
    wrong = [is_right.index(False) for is_right in labels if not all(is_right)]
    assert 10 <= len(wrong) <= 30
    assert set(wrong) == {0, 1, 2}


def test_examples_depend_on_seed_and_index_alone():
    row = ROWS[-1]
    first = [gsm8k_verifier_example(row, 0, index) for index in range(12)]
    assert [gsm8k_verifier_example(row, 0, index) for index in range(12)] == first
    assert len(set(first)) > 3
    assert [gsm8k_verifier_example(row, 1, index) for index in range(12)] != first


def test_a_mistake_is_carried_on_to_the_answer(examples):
    example = next(e for row, _, e in examples if row is CHAIN and not e.is_right[0])
    wrong = numbers_in(parse_solution(example.solution).steps[0])[-1]
    tax, price, total = (number_text(value, has_commas) for value, has_commas in
                         ((wrong, False), (2000 + wrong, True), (3 * (2000 + wrong), True)))
    assert parse_solution(example.solution).steps == (
        f"The tax is 2000*.1=${tax}.", f"So one costs ${price}.", f"He pays ${price}*3 = ${total}.",
    )
    assert example.verification.splitlines()[1:4] == [
        f"<step>2000*.1 = 200, not {tax}. \\boxed{{INCORRECT}}</step>",
        f"<step>2000+{tax} = {price.replace(',', '')}. \\boxed{{CORRECT}}</step>",
        f"<step>{price.replace(',', '')}*3 = {total.replace(',', '')}. \\boxed{{CORRECT}}</step>",
    ]


def test_a_row_without_computations_stays_right():
    row = {"question": "Q", "answer": "It is two.\nSo <<2=2>>2.\n#### 2"}
    assert all(all(gsm8k_verifier_example(row, 0, index).is_right) for index in range(20))


@pytest.mark.parametrize("expression, value", [
    ("48/2", 24), ("20*.01", Fraction(1, 5)), ("(1,000-5)*2", 1990), ("-3+5", 2), ("08+1", 9), (" 7 ", 7),
    ("1/3", Fraction(1, 3)),
    ("1/0", None), ("2**9", None), ("x+1", None), ("", None), ("1 2", None), ("f(1)", None), ("(" * 5000, None),
])
def test_evaluate(expression, value):
    assert value_of(expression) == value


def test_numbers_in_text():
    assert numbers_in("$1,080.50, or 3 .5s") == [Fraction("1080.5"), 3, Fraction(1, 2)]
    changed = {Fraction(24): Fraction(25), Fraction(1000): Fraction(12345)}
    assert replace_numbers("24 of 1,000 or 1000; 240, 24.0", changed) == "25 of 12,345 or 12345; 240, 25"
    assert number_text(Fraction(1, 4)) == "0.25" and number_text(Fraction(7)) == "7"
    assert has_short_decimals(Fraction(1, 4)) and not has_short_decimals(Fraction(1, 3))


# ------------------------------------------------------------------------------------------- functions of an index


@pytest.fixture(scope="module")
def made():
    return make_gsm8k_examples(read_rows(FILE), num_heldout=2, seed=3)


def test_roles_get_their_texts_and_rows_are_parted(made):
    assert (made.num_train, made.num_heldout) == (3, 2)  # two rows have two lines only
    ids = {part: {made.sft_example("generator", part, k)[0].id for k in range(6)} for part in ("train", "heldout")}
    assert (len(ids["train"]), len(ids["heldout"])) == (3, 2) and not ids["train"] & ids["heldout"]
    for index in range(6):
        problem, nothing, zero, solution = made.sft_example("generator", "train", index)[:4]
        assert (nothing, zero) == ("", 0)
        assert grade(solution, problem.answer) and parse_solution(solution).format_score == 1.0
        problem, solution, num_steps, verification = made.sft_example("verifier", "train", index)[:4]
        assert parse_verification(verification, num_steps).aligned
        assert len(parse_solution(solution).steps) == num_steps
    assert made.sft_example("verifier", "train", 4) == made.sft_example("verifier", "train", 4)


def test_the_pool_has_step_labels_and_other_solutions_have_none(made):
    labels = []
    for index in range(12):
        problem, solution = made.pool_solution(index)
        steps = parse_solution(solution).steps
        labels.append(made.gold_steps(problem, steps))
        assert all(labels[-1]) == grade(solution, problem.answer)
        assert made.gold_steps(problem, (*steps, "and so on")) is None
    assert {all(label) for label in labels} == {True, False}
    problem, _, _, solution = made.sft_example("generator", "heldout", 0)[:4]
    assert made.gold_steps(problem, parse_solution(solution).steps) is None


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="stage 1: 5 of 5 examples are within the limits"):
        make_gsm8k_examples(read_rows(FILE), num_heldout=5, seed=0)
    with pytest.raises(ValueError, match="num_heldout=0 of 5 rows; hold out at least 1"):
        make_gsm8k_examples(read_rows(FILE), num_heldout=0, seed=0)
