"""Reward functions of users are tried on made-up responses before a run begins."""

import types

import pytest

from tango_jax.config import default_config
from tango_jax.loop.try_method import try_method
from tango_jax.records import Problem

PROBLEM = Problem("p0", "1+1?", "2")


def task(min_steps: int = 2):
    return types.SimpleNamespace(min_steps=min_steps, gold_steps=None, train_problem=lambda index: PROBLEM)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = default_config()
    config.generator.reward, config.verifier.reward = "own.py:generator", "own.py:verifier"
    return config


def write(text: str) -> None:
    with open("own.py", "w") as file:
        file.write(text)


@pytest.mark.parametrize("min_steps", [0, 3])
def test_each_function_sees_a_whole_and_an_empty_response(config, min_steps):
    write("seen = []\ndef generator(solution):\n    seen.append(solution)\n    return 0\n"
          "def verifier(verification, solution):\n    seen.append((verification, solution))\n    return 0\n")
    own = try_method(config, task(min_steps)).own_rewards
    assert set(own) == {"generator", "verifier"}
    seen = own["generator"].function.function.__globals__["seen"]
    whole, empty, (judged, right), (unjudged, nothing) = seen[-4:]
    assert (right, nothing) == (whole, empty)
    assert whole.problem is PROBLEM and whole.is_correct and whole.format_score == 1.0
    assert len(whole.steps) == len(whole.step_ends) == max(min_steps, 1)
    assert [whole.text[:end].endswith("</step") for end in whole.step_ends] == [True] * len(whole.steps)
    assert (empty.text, empty.steps, empty.is_correct) == ("", (), False)
    assert judged.is_aligned and judged.verdict == "CORRECT" and judged.judgements == (True,) * len(whole.steps)
    assert (unjudged.text, unjudged.verdict, unjudged.judgements) == ("", "INVALID", ())


def test_a_function_that_only_fails_on_an_empty_response_is_found_now(config):
    write("def generator(solution):\n    return len(solution.steps[0])\n"
          "def verifier(verification, solution):\n    return 0\n")  # fmt: skip
    with pytest.raises(ValueError) as error:
        try_method(config, task())
    assert str(error.value) == (
        "generator.reward=own.py:generator: own.py, line 2: IndexError: tuple index out of range (for the response '' "
        "to problem 'p0'); the response was made up to try the function before the run"
    )


def test_a_reward_is_tried_on_what_it_will_see(config):
    """In the generator's turns the verifier is asked when the rewards are known."""
    config.generator.reward = config.verifier.reward = ""
    config.arm = "own.py:mine"
    write("""
import dataclasses
from tango_jax.arms import ARMS, SOLVE_AND_BE_JUDGED
from tango_jax.rl.credit import outcome_reward
def by_verdicts(answers, rl):
    answers["verifier"]
    return outcome_reward(answers, rl)
plan = dataclasses.replace(SOLVE_AND_BE_JUDGED, reward=by_verdicts)
mine = dataclasses.replace(ARMS["tango"], turns={**ARMS["tango"].turns, "generator": plan})
""")
    with pytest.raises(ValueError, match="KeyError: verifier; the response was made up to try the function before"):
        try_method(config, task())
