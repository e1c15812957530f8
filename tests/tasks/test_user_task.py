"""Tasks of users: what their functions may return, and how a mistake in them is reported."""

import pytest

from tango_jax.cli.task_validation import check_task
from tango_jax.config import default_config
from tango_jax.method import load
from tango_jax.method.load import load_method
from tango_jax.records import Problem
from tango_jax.runtime.checks import Mistakes
from tango_jax.tasks.registry import make_task
from tango_jax.tasks.task import SftExample
from tango_jax.text.character_tokenizer import printable_model
from tango_jax.text.tokenizer import load_sentencepiece

HEAD = """import random
from tango_jax.records import Problem
from tango_jax.tasks.task import SftExample, Task
def problem(index): return Problem(f"p{index}", "1+1?", "2")
"""
WHOLE = """
def f(config): return Task(
    "own", "string", 1, problem, problem, num_test=3, pool_solution=lambda index: (problem(index), "<step>a</step>"),
    gold_steps=lambda problem, steps: (True,) * len(steps),
    sft_example=lambda role, split, index: SftExample(problem(index), "", 0, role + split), sft_roles=("generator",))
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = default_config()
    config.task.name = "own.py:f"
    for role in ("generator", "verifier"):
        config[role].template, config[role].sft.steps = "last_letter", 0
    return config


@pytest.fixture(scope="module")
def tokenizers():
    return dict.fromkeys(("generator", "verifier"), load_sentencepiece(printable_model()))


def test_a_task_is_what_its_functions_say(config, tokenizers, tmp_path):
    (tmp_path / "own.py").write_text(HEAD + WHOLE)
    check_task(config, Mistakes(), None)
    for given in (tokenizers, {}):
        task = make_task(config, given)
        assert (task.name, task.grade_kind, task.min_steps, task.num_test) == ("own", "string", 1, 3)
        assert task.train_problem(5) == task.test_problem(5) == Problem("p5", "1+1?", "2")
        assert task.pool_solution(2) == (Problem("p2", "1+1?", "2"), "<step>a</step>")
        assert task.gold_steps(task.train_problem(0), ("a", "b")) == (True, True)
        assert task.sft_example("generator", "train", 1) == SftExample(task.train_problem(1), "", 0, "generatortrain")


def test_characters_without_a_token_are_told(config, tokenizers, tmp_path):
    (tmp_path / "own.py").write_text((HEAD + WHOLE).replace("1+1?", "1+1\N{EURO SIGN}?\\n"))
    said = ("warning: the problems have '\N{EURO SIGN}', for which the {}'s tokenizer has no token: its model can "
            "neither read nor write them")
    assert make_task(config, tokenizers).notes[-2:] == (said.format("generator"), said.format("verifier"))


@pytest.mark.parametrize("more, kind", [
    ("", ""), ("further_example=lambda prompt, split, index: SftExample(problem(index), '', 0, prompt), ",
               "second_judgement")])
def test_a_further_prompt_sets_a_stage_one_apart_where_the_task_has_examples(config, tmp_path, more, kind):
    (tmp_path / "own.py").write_text(HEAD + WHOLE.replace("sft_roles", f"{more}sft_roles").replace(
        '"generator",))', '"generator", "verifier"))'))
    config.verifier.sft.steps = 1
    assert load.stage_one_kind(config, "tango") == ""
    assert load.stage_one_kind(config, "meta_judged") == kind


# The rest of own.py, from line 5, and the error.
MISTAKES = {
    "no argument": ("def f(): return 1", "line 5: too many positional arguments; it is called as f(config)"),
    "an error": ("def f(config):\n    return config.nothing", "line 6: AttributeError: "),
    "no Task": ("def f(config): return 3", "line 5: it must return a tango_jax.tasks.task.Task, not 3"),
    "no such kind": ("def f(config): return Task('own', 'maths', 1, problem, problem)",
                     "line 5: grade_kind='maths' is not one of math, string, python, choice, text"),
    "no test problems": ("def f(config): return Task('own', 'math', 1, problem, problem, 0)",
                         "line 5: num_test=0 must be a whole number of at least 1, or None for no limit"),
    "no pool": ("def f(config): return Task('own', 'math', 1, problem, problem, num_pool=2.5)",
                "line 5: num_pool=2.5 must be a whole number of at least 1, or None for no limit"),
    "too few problems": ("problems = [problem(0)]\ndef f(config): return Task('own', 'math', 1, lambda index:\n"
                         "    problems[index], problem)",
                         "line 7: IndexError: list index out of range (in train_problem(1))"),
    "a text": ("def f(config): return Task('own', 'math', 1, lambda index:\n    '1+1?', problem)",
               "line 5: train_problem(0) returned '1+1?'; it must return a tango_jax.records.Problem"),
    "a number as answer": ("def f(config): return Task('own', 'math', 1, problem, lambda i: Problem('p', '1?', 1))",
                           "answer=1, size=0); answer must be text, and not empty"),
    "chance": ("def draw(index):\n    return Problem('p', str(random.random()), '2')\n"
               "def f(config): return Task('own', 'math', 1, draw, problem)",
               "line 5: train_problem(0) returned two different problems; the index alone must determine a problem, or "
               "no run could be resumed: seed random numbers with it"),
    "a text to imitate": ("def f(config):\n    config.generator.sft.steps = 1\n    return Task(\n"
                          "        'own', 'math', 1, problem, problem, sft_example=lambda role, split, index: role)",
                          "line 8: sft_example('generator', 'train', 0) returned 'generator'; it must return a tango_"),
    "a grade": ("def f(config): return Task('own', 'math', 1, problem, problem, is_correct=lambda problem, answer: 1)",
                "returned 1; it must return True or False"),
    "too long": ("def f(config): return Task('own', 'math', 1, problem, lambda i: Problem('p', '1' * 3000, '2'))",
                 "task.name=own.py:f: the generator's longest prompt has at least 3002 tokens (problem p), more than "
                 "generator.max_prompt=2048; the verifier's longest prompt has at least "),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_found_before_the_run(config, tokenizers, tmp_path, what):
    text, message = MISTAKES[what]
    (tmp_path / "own.py").write_text(f"{HEAD}{text}\n")
    with pytest.raises(ValueError) as error:
        mistakes = Mistakes()
        check_task(config, mistakes, None)
        mistakes.raise_all()
        make_task(config, tokenizers)
    assert str(error.value).startswith("task.name=own.py:f") and message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name, body, arguments, message", [
    ("pool_solution", "problem(0)", (4,), "; it must return a Problem and the text of a solution"),
    ("gold_steps", "(True,)", ("p", ("a", "b")), "; it must return None, or a tuple of 2 bools: one for each step"),
    ("gold_steps", "(1, 0)", ("p", ("a", "b")), "; it must return None, or a tuple of 2 bools: one for each step"),
    ("step_kinds", "('a', 1)", ("p", ("a", "b")), "; it must return a tuple of 2 texts: one for each step"),
    ("further_example", "'text'", ("informed", "train", 0), "; it must return a tango_jax.tasks.task.SftExample: prob"),
    ("sft_example", "'text'", ("generator", "train", 0), "; it must return a tango_jax.tasks.task.SftExample: problem"),
    ("sft_example", "1 / 0", ("generator", "train", 0), "line 5: ZeroDivisionError: division by zero (in sft_example("
     "'generator', 'train', 0))"),
])
def test_a_mistake_during_the_run_is_one_line(config, tokenizers, tmp_path, name, body, arguments, message):
    (tmp_path / "own.py").write_text(
        f"{HEAD}def f(config): return Task('own', 'math', 1, problem, problem, {name}=lambda *args: {body})\n"
    )
    task = make_task(config, tokenizers)
    with pytest.raises(ValueError) as error:
        getattr(task, name)(*arguments)
    assert str(error.value).startswith("task.name=own.py:f: own.py, line 5: ") and message in str(error.value)


def test_text_to_imitate_is_for_both_roles_unless_said_otherwise(config, tokenizers, tmp_path):
    text = (HEAD + WHOLE).replace(', sft_roles=("generator",)', "")
    (tmp_path / "own.py").write_text(text)
    config.generator.sft.steps = config.verifier.sft.steps = 3
    assert make_task(config, tokenizers).sft_roles == ("generator", "verifier")
    (tmp_path / "own.py").write_text(HEAD + WHOLE)
    with pytest.raises(ValueError, match=r"^verifier\.sft\.steps=3, but task\.name=own\.py:f has no text for the ver"):
        make_task(config, tokenizers)


def test_an_arm_that_needs_step_labels(config, tokenizers, tmp_path):
    (tmp_path / "own.py").write_text(f"{HEAD}def f(config): return Task('own', 'math', 1, problem, problem)\n")
    config.arm = "grpo"
    task = make_task(config, tokenizers)
    load.check_task(config, load_method(config), task)
    assert task.gold_steps is None
    config.arm = "gold_steps"
    with pytest.raises(ValueError, match="arm=gold_steps needs a task with step labels, and task.name=.* has none"):
        load.check_task(config, load_method(config), make_task(config, tokenizers))
