"""Reward functions of users: what they are called with, what becomes of their numbers, and how they fail."""

import jax.numpy as jnp
import numpy as np
import pytest

from tango_jax.config import default_config
from tango_jax.records import Counters, Problem, Responses, Rollout, Solution, Verification
from tango_jax.rl.algorithms import algorithm_of
from tango_jax.rl.credit import CREDITS, REWARDS, TurnSoFar
from tango_jax.rl.own_reward import load_own_rewards, own_reward_B, with_own_reward
from tango_jax.rl.schedule import Turn
from tango_jax.runtime import hosts, user_code

PROBLEM = Problem("p7", "1+1?", "2")
NO_ROLLOUT = Rollout((), (), np.zeros(0, bool), 0, 0)


def solution(text: str = "two", is_correct: bool = True, format_score: float = 0.5) -> Solution:
    return Solution(PROBLEM, text, ("step",), (0,), format_score, is_correct, None)


def verification(verdict: str, text: str = "judged") -> Verification:
    return Verification(text, (True,), verdict, 0.25, True, ("block",))


def responses(role: str, parents: list, group_size: int, records: list) -> Responses:
    return Responses(role, parents, [], group_size, NO_ROLLOUT, records, {})


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Write a file with the function `f`, and load it as the reward of a role."""
    monkeypatch.chdir(tmp_path)

    def load(text: str, role: str = "generator", **settings):
        (tmp_path / "own.py").write_text(text)
        config = default_config()
        config[role].update(settings)
        config[role].reward = "own.py:f"
        return load_own_rewards(config)[role]

    return load


def test_without_a_name_there_is_no_function():
    assert load_own_rewards(default_config()) == {}


def test_the_generators_function_is_added_to_the_grade_and_the_format_score(own):
    own_fn = own("def f(solution):\n    return -len(solution.text) * (1 + solution.is_correct)\n")
    answers = {"generator": responses("generator", [PROBLEM], 2, [solution("abc"), solution("a", False, 1.0)])}
    rl = default_config().rl
    rl.outcome_weight, rl.format_weight = 2.0, 0.5
    reward = with_own_reward(REWARDS["outcome_reward"], own_fn, ("generator",))(answers, rl)
    # 2 + 0.25 - 6;  0 + 0.5 - 1.
    np.testing.assert_array_equal(reward.reward_B, np.float32([-3.75, -0.5]))
    assert [(term.name, term.weight, term.value.tolist()) for term in reward.terms] == [
        ("grade", 2.0, [1, 0]), ("format score", 0.5, [0.5, 1]), ("own reward (own.py:f)", 1.0, [-6, -1])]
    assert reward.reward_B.dtype == reward.terms[-1].value.dtype == np.float32
    assert reward.metrics == {
        "generator/reward/outcome": 0.5, "generator/reward/format": 0.75, "generator/reward/own": -3.5
    }  # fmt: skip


def test_with_weights_of_zero_it_takes_their_place(own):
    answers = {"generator": responses("generator", [PROBLEM], 1, [solution()])}
    rl = default_config().rl
    rl.outcome_weight = rl.format_weight = 0.0
    own_fn = own("def f(solution):\n    return 0.25\n")
    assert with_own_reward(REWARDS["outcome_reward"], own_fn, ("generator",))(answers, rl).reward_B == [0.25]
    judged = {"verifier": responses("verifier", [solution()], 1, [verification("CORRECT")])}
    rl.correctness_weight = rl.gamma = 0.0
    own_fn = own("def f(verification, solution):\n    return 0.25\n", "verifier")
    assert with_own_reward(REWARDS["verdict_reward"], own_fn, ("verifier",))(judged, rl).reward_B == [0.25]


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
@pytest.mark.parametrize("arm_credit", ["judged_steps_credit", "gold_steps_credit"])
def test_alpha_by_signal_follows_the_grades_whatever_else_is_in_the_reward(own, algorithm, arm_credit):
    """Three of four groups have answers of one kind; the lengths and format scores of all differ."""
    config, own_fn = default_config(), own("def f(solution):\n    return 0.001 * len(solution.text)\n")
    config.generator.loss.algorithm, config.rl.alpha_schedule = algorithm, "signal"
    config.rl.alpha_initial, config.rl.alpha_final, config.rl.format_weight = 0.5, 0.1, 0.25
    grades = [False, False, True, True, True, False, False, False]
    solved = [solution("x" * number, grade, number / 8) for number, grade in enumerate(grades)]
    answers = {"generator": responses("generator", [PROBLEM] * 4, 2, solved),
               "verifier": responses("verifier", solved, 1, [verification("CORRECT")] * 8)}  # fmt: skip
    reward = with_own_reward(REWARDS["outcome_reward"], own_fn, ("generator",))(answers, config.rl)
    assert algorithm_of(algorithm).has_signal_P(reward.reward_B, 2).all()
    so_far = TurnSoFar(config, Turn(0, "generator", "generator", 0), answers, reward.reward_B, np.ones((8, 3), bool),
                       Counters())  # fmt: skip
    assert CREDITS[arm_credit](so_far).metrics["generator/alpha"] == pytest.approx(0.1 + 0.4 * 3 / 4)


def test_the_verifiers_function_gets_the_solution_that_was_judged(own):
    own_fn = own("def f(verification, solution):\n    return len(verification.text) + 10 * len(solution.text)\n",
                 "verifier")  # fmt: skip
    records = [verification("CORRECT", "x"), verification("INCORRECT", "xx"), verification("CORRECT", ""),
               verification("INVALID", "x")]  # fmt: skip
    answers = {"verifier": responses("verifier", [solution("ab"), solution("", False)], 2, records)}
    rl = default_config().rl
    rl.correctness_weight = 3.0
    reward = with_own_reward(REWARDS["verdict_reward"], own_fn, ("verifier",))(answers, rl)
    np.testing.assert_array_equal(reward.terms[-1].value, np.float32([21, 22, 0, 1]))
    # 3 for the first verdict alone, and 0.8 * 0.25 for each format score.
    np.testing.assert_allclose(reward.reward_B, [24.2, 22.2, 0.2, 1.2], rtol=1e-6)
    assert reward.metrics["verifier/reward/own"] == 11.0 and reward.metrics["verifier/reward/correctness"] == 0.25


@pytest.mark.parametrize("value", ["1", "1.0", "True", "np.float32(1)", "np.array(1)", "jnp.ones(())", "np.True_"])
def test_any_number_is_a_reward(own, value):
    own_fn = own(f"import numpy as np, jax.numpy as jnp\ndef f(solution):\n    return {value}\n")
    assert own_fn.of(solution(), PROBLEM) == 1.0
    assert jnp.ones(()) == 1  # the names that the file uses


@pytest.mark.parametrize("value, shown", [
    ("None", "None"), ("'1'", "'1'"), ("float('nan')", "nan"), ("float('-inf')", "-inf"), ("1e7", "10000000.0"),
    ("[1.0]", "[1.0]"), ("[[1], [1, 2]]", "[[1], [1, 2]]"), ("1j", "1j"), ("solution.steps", "('step',)"),
])  # fmt: skip
def test_anything_else_is_refused_with_the_place_and_the_response(own, value, shown):
    own_fn = own(f"import math\ndef f(solution):\n    return {value}\n")
    with pytest.raises(ValueError) as error:
        own_fn.of(solution("a\n" + "long " * 40), PROBLEM)
    beginning = ("a\\n" + "long " * 40)[:56]
    assert str(error.value) == (
        f"generator.reward=own.py:f: own.py, line 2: it returned {shown}; it must return one number between -1e+06 and "
        f"1e+06 (for the response '{beginning}... to problem 'p7')"
    )


def test_an_error_names_the_line_the_problem_and_the_response(own):
    own_fn = own("def f(verification, solution):\n    return 1 / solution.format_score\n", "verifier")
    with pytest.raises(ValueError) as error:
        own_fn.of(verification("CORRECT"), solution(format_score=0.0))
    assert str(error.value) == ("verifier.reward=own.py:f: own.py, line 2: ZeroDivisionError: float division by zero "
                                "(for the response 'judged' to problem 'p7')")


def test_a_reward_that_hangs_is_interrupted(own, monkeypatch):
    monkeypatch.setattr(user_code, "CALL_LIMIT_S", 1)
    own_fn = own("def f(solution):\n    while True:\n        pass\n")
    with pytest.raises(ValueError, match=r"line [23]: TimeoutError: not done after 1 seconds"):
        own_fn.of(solution(), PROBLEM)


@pytest.mark.parametrize("role, text, message", [
    ("generator", "def f(answers, rl):", r"missing a required argument: 'rl'; it is called as f\(solution\)"),
    ("verifier", "def f(solution):", r"too many positional arguments; it is called as f\(verification, solution\)"),
])  # fmt: skip
def test_other_parameters_are_refused(own, role, text, message):
    with pytest.raises(ValueError, match=rf"^{role}\.reward=own\.py:f: own\.py, line 1: {message}$"):
        own(f"{text}\n    return 0\n", role)


def test_processes_share_the_responses(own, monkeypatch):
    """The second of two processes: it scores its half, and has the numbers of the other one."""
    own_fn = own("calls = []\ndef f(solution):\n    calls.append(solution.text)\n    return len(calls)\n")
    asked = responses("generator", [PROBLEM], 4, [solution(text) for text in "abcd"])
    monkeypatch.setattr(hosts, "own_part", lambda items: items[2:])
    monkeypatch.setattr(hosts, "join_parts", lambda items: ["", *items] if items == [""] else [-1.0, -2.0, *items])
    np.testing.assert_array_equal(own_reward_B(own_fn, asked), np.float32([-1, -2, 1, 2]))
    assert own_fn.function.function.__globals__["calls"] == ["c", "d"]
    monkeypatch.setattr(hosts, "join_parts", lambda items: ["the other one failed", *items])
    with pytest.raises(ValueError, match=r"^the other one failed\. Once that is mended, the same command res"):
        own_reward_B(own_fn, asked)
