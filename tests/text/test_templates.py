"""Prompts of both roles: fields are put in literally, and a solution too long for the limit loses its end only."""

import pytest

from support.letters import LETTERS
from tango_jax.grading import parse_solution, parse_verification
from tango_jax.records import Problem
from tango_jax.text.templates import (
    FIRST_ERROR,
    TEMPLATES,
    generator_prompt,
    has_steps,
    load_template,
    verifier_prompt,
)
from tango_jax.text.tokenizer import Tokenizer

NASTY = [
    r"\frac{1}{2} and \left\{x\right\}, then {x: {}} or {{problem}}",
    "the {problem} has {num_steps} steps, its {solution} is {solution}",
    r"\1 \g<0> %s %(problem)s $problem {0} {}",
    "",
    "\n\n{\n}",
]
NAMES = ["latex", "field names", "escapes", "empty", "line breaks"]


@pytest.mark.parametrize("question", NASTY, ids=NAMES)
def test_the_question_is_put_in_literally(question):
    template = "a {x} \\frac{1}{2}\n{problem}\nz"
    ids = generator_prompt(template, LETTERS, Problem("p", question, ""))
    assert LETTERS.read(ids) == "a {x} \\frac{1}{2}\n" + question + "\nz"


@pytest.mark.parametrize("question", NASTY, ids=NAMES)
@pytest.mark.parametrize("solution", NASTY, ids=NAMES)
def test_question_and_solution_are_put_in_literally(question, solution):
    template = "{num_steps}|{problem}|{solution}|{num_steps}|\\boxed{CORRECT}"
    ids, is_shortened = verifier_prompt(template, LETTERS, Problem("p", question, ""), solution, 12, max_prompt=500)
    assert LETTERS.read(ids) == "12|" + question + "|" + solution + "|12|\\boxed{CORRECT}"
    assert not is_shortened


@pytest.mark.parametrize("role, name", TEMPLATES)
def test_known_templates_hold_every_field_once_filled(role, name):
    template = load_template(role, name)
    problem = Problem("p", "QUESTION {braces}", "")
    if role == "generator":
        text = LETTERS.read(generator_prompt(template, LETTERS, problem))
        assert text == template.replace("{problem}", "QUESTION {braces}")
    else:
        solution = "<step>SOLUTION</step>" if has_steps(template) else "SOLUTION"
        text = LETTERS.read(verifier_prompt(template, LETTERS, problem, solution, 3, 10_000)[0])
        assert text.count("SOLUTION") == 1 and text.index("QUESTION") < text.index("SOLUTION")
    assert text.count("QUESTION {braces}") == 1
    assert not any(field in text for field in ("{problem}", "{solution}", "{num_steps}", "{step}"))


@pytest.mark.parametrize("max_prompt", range(15, 28))
def test_a_long_solution_loses_its_end_and_nothing_else(max_prompt):
    # BOS, 10 characters of the filled template around question and solution, 4 of the question: 15 without a solution.
    template, question, solution = "in: {problem} / {num_steps}\n{solution}\n", "1+{1", "0123456{x}9"
    ids, is_shortened = verifier_prompt(template, LETTERS, Problem("p", question, ""), solution, 2, max_prompt)
    kept = min(max_prompt - 15, len(solution))
    assert LETTERS.read(ids) == f"in: 1+{{1 / 2\n{solution[:kept]}\n"
    assert len(ids) == min(max_prompt, 26)
    assert is_shortened == (max_prompt < 26)


def test_shortening_where_characters_are_no_tokens():
    # A pair of characters is one token, or two if it has an accent: the longest prefix is found by trying them all.
    def encode(text: str) -> list[int]:
        pairs = [text[start:start + 2] for start in range(0, len(text), 2)]
        return [token for pair in pairs for token in ([1, 2] if "\u00e9" in pair else [3])]

    tokenizer = Tokenizer(encode, (), (9,), (8,))
    template, solution = "{problem}{num_steps}{solution}", "abc\u00e9def\u00e9ghij\u00e9"
    for limit in range(2, 12):
        ids, is_shortened = verifier_prompt(template, tokenizer, Problem("p", "q", ""), solution, 1, limit)
        fitting = [end for end in range(len(solution) + 1) if 1 + len(encode("q1" + solution[:end])) <= limit]
        assert ids == [9, *encode("q1" + solution[: max(fitting)])]
        assert is_shortened == (max(fitting) < len(solution))


def test_a_problem_too_long_even_without_a_solution_is_named():
    problem = Problem("rl/7", "x" * 30, "")
    with pytest.raises(ValueError, match=r"rl/7 has 34 tokens without the solution; the limit is 33: raise"):
        verifier_prompt("{problem}\n{solution}\n{num_steps}", LETTERS, problem, "y" * 50, 2, max_prompt=33)


def test_template_from_a_file(tmp_path):
    path = tmp_path / "verifier.txt"
    path.write_text("{problem} then {solution} in {num_steps}\n\\boxed{CORRECT}")
    assert load_template("verifier", str(path)) == "{problem} then {solution} in {num_steps}\n\\boxed{CORRECT}"
    assert load_template("generator", str(path)).startswith("{problem}")  # further fields stay as they are
    path.write_text("{problem}\n=", encoding="utf-8-sig")  # with the mark of some editors
    assert load_template("generator", str(path)) == "{problem}\n="


@pytest.mark.parametrize("role, text, missing", [
    ("generator", "Solve {question}", r"\{problem\}"),
    ("verifier", "{problem} {solution}", r"\{num_steps\}"),
    ("verifier", "{num_steps}", r"\{problem\}, \{solution\}"),
    ("verifier", "", r"\{problem\}, \{solution\}, \{num_steps\}"),
])
def test_a_template_file_without_a_field_is_refused(tmp_path, role, text, missing):
    path = tmp_path / "template.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"^{role}\.template file .*template\.txt lacks {missing}$"):
        load_template(role, str(path))


def test_a_template_file_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "template.txt"
    path.write_text("{problem} café", encoding="latin-1")
    with pytest.raises(ValueError, match=r"^generator\.template file .* is not UTF-8 text \(.*\): save it as UTF-8$"):
        load_template("generator", str(path))


def test_template_given_as_its_text():
    assert load_template("generator", "{problem}\n=") == "{problem}\n="
    with pytest.raises(ValueError, match=r"^verifier\.template='\{problem\}\?' lacks \{solution\}, \{num_steps\}$"):
        load_template("verifier", "{problem}?")


@pytest.mark.parametrize("role", ["generator", "verifier"])
def test_an_unknown_template_lists_the_known_ones(role):
    known = {"generator": "math, plain, last_letter",
             "verifier": "math, math_first_error, plain, last_letter, trl_prm, qwen_prm"}[role]
    with pytest.raises(ValueError, match=rf"{role}\.template='maths' is neither one of {known} nor a file"):
        load_template(role, "maths")


def test_a_verifier_that_stops_is_asked_to():
    """The two templates differ in this alone; in the new one's example, step 3 of 3 is not judged."""
    each, first = (load_template("verifier", name) for name in ("math", FIRST_ERROR))
    assert "Stop at the first step that is wrong" in first and "Stop at" not in each
    example = first[first.index("Example.") : first.index("Problem:\n")]
    solution, text = example.split("Verification:\n")
    assert len(parse_solution(solution).steps) == 3
    parsed = parse_verification(text, 3, stops=True)
    assert parsed.judgements == (True, False, None) and parsed.format_score == 1.0
    assert each[each.index("Verification:\n") :] == first[first.index("Verification:\n") :]
