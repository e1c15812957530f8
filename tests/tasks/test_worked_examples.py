"""Worked examples in prompts: the shipped ones, and a file of one's own."""

import json

import pytest

from support.small_tokenizers import byte_level
from tango_jax.config import ROLES, default_config
from tango_jax.grading import grade_many, parse_solution, parse_verification
from tango_jax.records import Problem
from tango_jax.tasks.arithmetic import value_of
from tango_jax.tasks.worked_examples import SHOWN, examples_of, prompt_with, read_examples, with_known
from tango_jax.text.hf_tokenizer import make_tokenizer
from tango_jax.text.prompts import OWN, prompt_ids, solution_of
from tango_jax.text.templates import load_template


def config_of(**task):
    config = default_config()
    config.task.update(task)
    for role in ROLES:
        config[role].sft.steps = 4
    return config


def test_the_shipped_examples_are_well_formed_and_say_what_is_right():
    rows = read_examples(config_of(min_steps=2))
    for row in rows:
        assert parse_solution(row.solution, 2).format_score == 1.0
        found = parse_verification(row.verification, row.num_steps)
        assert found.aligned and found.format_score == 1.0
        steps = parse_solution(row.solution).steps
        for step, is_right in zip(steps, found.judgements, strict=True):
            left, _, result = step.rpartition(" = ")
            if left:
                expression = "".join(left.split()[-3:])
                assert (value_of(expression) == value_of(result.split()[0].rstrip("."))) == is_right, step
    answers = {"Sam has": "9", "A shop": "8", "Mia has": "7", "A box": "24", "What is 6": "84", "A train": "250"}
    for min_steps, count in ((2, SHOWN), (3, 3)):
        shown = examples_of("generator", rows, min_steps)
        golds = [next(gold for start, gold in answers.items() if row.problem.question.startswith(start))
                 for row in shown]
        assert len(shown) == count and all(grade_many([row.solution for row in shown], golds, "string").correct)
    shown = [parse_verification(row.verification, row.num_steps) for row in examples_of("verifier", rows, 2)]
    assert len(shown) == SHOWN and {one.verdict for one in shown} == {"CORRECT", "INCORRECT"}
    assert any(one.verdict == "CORRECT" and False in one.judgements for one in shown)  # as with a damaged step


@pytest.mark.parametrize("role", ROLES)
def test_examples_stand_before_the_problem_in_the_words_of_the_template(role):
    backend = byte_level("smollm")
    tokenizer = make_tokenizer(backend, backend.get_vocab_size(), (), (backend.token_to_id("<|im_end|>"),))
    template, problem = load_template(role, "math"), Problem("1", "What is 1 + 1?", "2")
    parent = problem if role == "generator" else with_known(solution_of(problem, "<step>1 + 1 = 3</step>", 1), False,
                                                            None)
    rows = examples_of(role, read_examples(config_of()), 2)
    plain, shown = (tokenizer.decode(prompt_ids(prompt, template, tokenizer, parent, 100_000)[0])
                    for prompt in (OWN[role], prompt_with(role, rows)))
    told = "\n\nThe final answer is wrong." if role == "verifier" else ""
    asked, end = plain[plain.index("What is 1 + 1?"):], "\n\nVerification:\n"
    asked = asked.replace(end, f"{told}{end}")
    assert shown.endswith(asked) and shown.startswith(plain[:100])
    assert "The final answer" not in plain[plain.index("What is 1 + 1?"):]
    assert shown.count("\nProblem:\n") == plain.count("\nProblem:\n") + len(rows)
    assert all(row.solution in shown for row in rows)
    assert all(row.verification in shown for row in rows) == (role == "verifier")


@pytest.mark.parametrize("is_right, damaged, line", [
    (False, None, "The final answer is wrong."),
    (True, None, "The final answer is right."),
    (True, 1, "The final answer is right, and step 2 is wrong."),
])
def test_the_verifier_is_told_what_is_known_of_the_solution(is_right, damaged, line):
    solution = with_known(solution_of(Problem("1", "q", "2"), "<step>a</step>", 3), is_right, damaged)
    assert prompt_with("verifier", []).fields(solution, False).text == f"<step>a</step>\n\n{line}"
    assert OWN["verifier"].fields(solution, False).text == "<step>a</step>"


def test_the_line_before_each_shown_verification_agrees_with_it():
    rows = examples_of("verifier", read_examples(config_of()), 2)
    shown = prompt_with("verifier", rows).fields(solution_of(Problem("1", "q", "2"), "s", 1), False).question
    told = [text.split("\n\n")[-1] for text in shown.split("\n\nVerification:\n")[:-1]]
    assert told == ["The final answer is right.", "The final answer is wrong.", "The final answer is right.",
                    "The final answer is right, and step 2 is wrong.", "The final answer is wrong."]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


SOLUTION = "<think><step>a</step><step>b</step></think><answer>\\boxed{1}</answer>"
WRONG = "<step_verification><step>\\boxed{CORRECT}</step><step>\\boxed{INCORRECT}</step></step_verification>\
<final_verification>\\boxed{INCORRECT}</final_verification>"


@pytest.mark.parametrize("rows, settings, message", [
    ([{"question": "q", "solution": "It is 1.", "verification": WRONG}], {},
     "line 1: the solution is not tagged: it has 0 <step> blocks"),
    ([{"question": "q", "solution": SOLUTION}], {}, "line 1: 'verification' is missing"),
    ([{"question": "q", "solution": SOLUTION, "verification": WRONG}], {},
     "none can be shown to the generator, which needs a solution without a mistake in at least task.min_steps=2"),
    ([{"question": "q", "solution": SOLUTION, "verification": WRONG.replace("INC", "C")}], {"min_steps": 3},
     "at least task.min_steps=3 steps"),
])
def test_a_file_of_ones_own_must_have_what_each_role_is_shown(tmp_path, rows, settings, message):
    with pytest.raises(ValueError, match=message):
        read_examples(config_of(examples=write(tmp_path / "own.jsonl", *rows), **settings))


def test_a_generator_alone_needs_no_verifications(tmp_path):
    config = config_of(examples=write(tmp_path / "own.jsonl", {"question": "q", "solution": SOLUTION}))
    config.verifier.sft.steps = 0
    assert [row.solution for row in read_examples(config)] == [SOLUTION]
    config.task.examples = write(tmp_path / "both.jsonl", *(
        {"question": "q", "solution": SOLUTION, "verification": text} for text in (WRONG, WRONG.replace("INC", "C"))))
    assert len(examples_of("generator", read_examples(config), 2)) == 1  # the one with a mistake is not shown
