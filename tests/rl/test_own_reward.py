"""Reward functions of users: what they are called with, what becomes of their numbers, and how they fail."""

import jax.numpy as jnp
import numpy as np
import pytest

from tango_jax.config import default_config
from tango_jax.records import Problem, Responses, Rollout, Solution, Verification
from tango_jax.rl.own_reward import load_own_rewards
from tango_jax.runtime import hosts, user_code
from tango_jax.runtime.checks import SettingsError

PROBLEM = Problem("p7", "1+1?", "2")
NO_ROLLOUT = Rollout((), (), np.zeros(0, bool), 0, 0)


def solution(text: str = "two", is_correct: bool = True, format_score: float = 0.5) -> Solution:
    return Solution(PROBLEM, text, ("step",), (0,), format_score, is_correct, None)


def verification(verdict: str, text: str = "judged") -> Verification:
    return Verification(text, (True,), verdict, 0.25, True, ("block",))


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Write a file with the function `f`, and load it as the reward of a role."""
    monkeypatch.chdir(tmp_path)

    def load(text: str, role: str = "generator", **settings):
        (tmp_path / "own.py").write_text(text)
        config = default_config()
        config[role].update(settings)
        config[role].rewards = ("own.py:f",)
        return load_own_rewards(config)[role][0]

    return load


def test_without_a_name_there_is_no_function():
    assert load_own_rewards(default_config()) == {}


@pytest.mark.parametrize("value", ["1", "1.0", "True", "np.float32(1)", "np.array(1)", "jnp.ones(())", "np.True_"])
def test_any_number_is_a_reward(own, value):
    own_fn = own(f"import numpy as np, jax.numpy as jnp\ndef f(solution):\n    return {value}\n")
    assert own_fn.of(solution(), PROBLEM) == 1.0
    assert jnp.ones(()) == 1  # the names that the file uses


@pytest.mark.parametrize("value, shown", [
    ("None", "None"), ("'1'", "'1'"), ("float('nan')", "nan"), ("float('-inf')", "-inf"), ("1e7", "10000000.0"),
    ("[1.0]", "[1.0]"), ("[[1], [1, 2]]", "[[1], [1, 2]]"), ("1j", "1j"), ("solution.steps", "('step',)"),
])
def test_anything_else_is_refused_with_the_place_and_the_response(own, value, shown):
    own_fn = own(f"import math\ndef f(solution):\n    return {value}\n")
    with pytest.raises(ValueError) as error:
        own_fn.of(solution("a\n" + "long " * 40), PROBLEM)
    beginning = ("a\\n" + "long " * 40)[:56]
    assert str(error.value) == (
        f"generator.rewards=own.py:f: own.py, line 2: it returned {shown}; it must return one number between -1e+06 "
        f"and 1e+06 (for the response '{beginning}... to problem 'p7')"
    )


def test_an_error_names_the_line_the_problem_and_the_response(own):
    own_fn = own("def f(verification, solution):\n    return 1 / solution.format_score\n", "verifier")
    with pytest.raises(ValueError) as error:
        own_fn.of(verification("CORRECT"), solution(format_score=0.0))
    assert str(error.value) == ("verifier.rewards=own.py:f: own.py, line 2: ZeroDivisionError: float division by zero "
                                "(for the response 'judged' to problem 'p7')")


def test_a_reward_that_hangs_is_interrupted(own, monkeypatch):
    monkeypatch.setattr(user_code, "CALL_LIMIT_S", 1)
    own_fn = own("def f(solution):\n    while True:\n        pass\n")
    with pytest.raises(ValueError, match=r"line [23]: TimeoutError: not done after 1 seconds"):
        own_fn.of(solution(), PROBLEM)


@pytest.mark.parametrize("role, text, message", [
    ("generator", "def f(answers, rl):", r"missing a required argument: 'rl'; it is called as f\(solution\)"),
    ("verifier", "def f(solution):", r"too many positional arguments; it is called as f\(verification, solution\)"),
])
def test_other_parameters_are_refused(own, role, text, message):
    with pytest.raises(ValueError, match=rf"^{role}\.rewards=own\.py:f: own\.py, line 1: {message}$"):
        own(f"{text}\n    return 0\n", role)


TWO = "def f(solution):\n    return 1.0\ndef g(solution):\n    return 2.0\n"


@pytest.mark.parametrize("weights, expected", [((), [1.0, 1.0]), ((0.5, 0.0), [0.5, 0.0])])
def test_several_functions_have_weights_and_metrics_of_their_own(tmp_path, monkeypatch, weights, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(TWO)
    config = default_config()
    config.generator.rewards, config.generator.reward_weights = ("own.py:f", "own.py:g"), weights
    [(role, (first, second))] = load_own_rewards(config).items()
    assert role == "generator" and [first.weight, second.weight] == expected
    assert (first.metric, second.metric) == ("generator/reward/own/f", "generator/reward/own/g")
    (tmp_path / "own.py").write_text(TWO.replace("2.0", "3.0"))  # an edited file does not change what was loaded
    assert [one.of(solution(), PROBLEM) for one in (first, second)] == [1.0, 2.0]


def test_all_mistakes_in_the_names_and_weights_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(TWO)
    config = default_config()
    config.generator.rewards, config.generator.reward_weights = ("own.py:f", "own.py:none", "no.py:f"), (1.0,)
    config.verifier.reward_weights = (1.0,)
    with pytest.raises(SettingsError) as error:
        load_own_rewards(config)
    assert [message.partition(":")[0] for message in error.value.messages] == [
        "generator.reward_weights=(1.0,) is of length 1, and generator.rewards=('own.py", "generator.rewards=('own.py",
        "generator.rewards=own.py", "generator.rewards=no.py",
        "verifier.reward_weights=(1.0,) is of length 1, and verifier.rewards=() of length 0"]
    assert "has 2 functions named 'f', and the name is that of the function's curve" in error.value.messages[1]
    assert error.value.messages[2] == "generator.rewards=own.py:none: own.py has no function 'none'"


def test_processes_share_the_responses(own, monkeypatch):
    """The second of two processes: it scores its half, and has the numbers of the other one."""
    own_fn = own("calls = []\ndef f(solution):\n    calls.append(solution.text)\n    return len(calls)\n")
    asked = Responses("generator", [PROBLEM], [], 4, NO_ROLLOUT, [solution(text) for text in "abcd"], {})
    monkeypatch.setattr(hosts, "own_part", lambda items: items[2:])
    monkeypatch.setattr(hosts, "join_parts", lambda items: ["", *items] if items == [""] else [-1.0, -2.0, *items])
    np.testing.assert_array_equal(own_fn.of_all(asked), np.float32([-1, -2, 1, 2]))
    assert own_fn.function.function.__globals__["calls"] == ["c", "d"]
    monkeypatch.setattr(hosts, "join_parts", lambda items: ["the other one failed", *items])
    with pytest.raises(ValueError, match=r"^the other one failed\. Once that is mended, the same command res"):
        own_fn.of_all(asked)
