"""The problems that a run will take: which they are, and the error for one whose prompt is too long."""

import types

import pytest

from tango_jax.config import default_config
from tango_jax.loop import problems_ahead
from tango_jax.loop.problems_ahead import check_problems
from tango_jax.method.load import load_method
from tango_jax.method.own_arm import make_schedule
from tango_jax.method.texts import build_prompts
from tango_jax.records import Problem, Solution
from tango_jax.tasks.task import Task
from tango_jax.text.character_tokenizer import printable_model
from tango_jax.text.prompts import OWN
from tango_jax.text.tokenizer import load_sentencepiece

LETTERS = load_sentencepiece(printable_model())
POLICIES = {role: types.SimpleNamespace(tokenizer=LETTERS) for role in ("generator", "verifier")}


def number(name):
    return lambda index: Problem(f"{name}/{index}", "1" * (30 if (name, index) == ("train", 70) else 9), "1")


@pytest.fixture
def config():
    config = default_config()
    config.task.name = "own.py:f"
    for role in ("generator", "verifier"):
        config[role].template, config[role].max_prompt = "plain", 100
    config.rl.prompts_per_step, config.rl.warmup_steps, config.rl.generator_steps = 8, 2, 6
    config.rl.generator_turns_per_cycle, config.rl.verifier_turns_per_cycle = 3, 1
    config.eval.problems = 5
    return config


TASK = Task("own", "string", 1, number("train"), number("test"), num_test=3)


@pytest.mark.parametrize("arm, task, taken", [
    ("tango", TASK, {"test": 3, "train": 48}),  # both roles take the same problems
    ("tango", TASK._replace(verifier_problem=number("own")), {"test": 3, "own": 32, "train": 48}),
    ("grpo_curriculum", TASK._replace(num_test=None, curriculum_problem=number("both")), {"test": 5, "both": 48}),
])
def test_every_problem_of_a_run_is_looked_at_once(config, arm, task, taken):
    config.arm = arm
    method = load_method(config, task)
    ids = [problem.id for problem in problems_ahead.problems_ahead(config, task, make_schedule(config), method)]
    assert sorted(ids) == sorted(f"{name}/{index}" for name, count in taken.items() for index in range(count))


def test_what_dynamic_sampling_may_draw_is_looked_at_too(config):
    config.arm, config.rl.dynamic_sampling = "grpo", 2
    method = load_method(config, TASK)
    ids = [problem.id for problem in problems_ahead.problems_ahead(config, TASK, make_schedule(config), method)]
    assert ids == [f"test/{index}" for index in range(3)] + [f"train/{index}" for index in range(6 * 24)]


def test_a_late_problem_that_is_too_long_is_named_before_the_run(config, monkeypatch):
    config.rl.generator_steps = 9
    config.generator.max_prompt = 24
    schedule, method = make_schedule(config), load_method(config, TASK)
    with pytest.raises(ValueError, match=r"^task.name=own.py:f: the generator's longest prompt has at least 3\d tokens "
                       r"\(problem train/70\), more than generator.max_prompt=24: raise the limits"):
        check_problems(config, POLICIES, TASK, schedule, method)
    config.generator.max_prompt, config.verifier.max_prompt = 100, 24
    with pytest.raises(ValueError, match=r"the verifier's longest prompt has at least 3\d tokens without the solution"):
        check_problems(config, POLICIES, TASK, schedule, method)
    monkeypatch.setattr(problems_ahead, "MOST_CHECKED", 70)
    check_problems(config, POLICIES, TASK, schedule, method)


@pytest.mark.parametrize("role", ["generator", "verifier"])
def test_a_problem_that_is_too_long_for_a_turn_is_named_with_its_role(role):
    template = "{problem}\n{solution}\n{num_steps}" if role == "verifier" else "{problem}\n"
    policy = types.SimpleNamespace(template=template, tokenizer=LETTERS, config=types.SimpleNamespace(max_prompt=24))
    problem = number("train")(70)
    parent = Solution(problem, "", (), (), 1.0, True, None) if role == "verifier" else problem
    with pytest.raises(ValueError, match=rf"^the {role}'s prompt for problem train/70 has 3\d tokens.*; the limit is "
                       rf"24: raise {role}.max_prompt or filter the problem; .* choose a new --workdir$"):
        build_prompts(policy, OWN[role], [parent])
