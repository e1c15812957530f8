"""Rewards of whole turns: the usual ones, a function that is added, and the weight of steps that follows the grades."""

import dataclasses

import numpy as np
import pytest

from support.turns import responses_of, settings, solution, turn_of, verification
from tango_jax.method import baselines, tango
from tango_jax.method.rewards import agreement, graded
from tango_jax.records import Solution, Verification
from tango_jax.rl.algorithms import algorithm_of
from tango_jax.rl.own_reward import OwnReward, load_own_rewards


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Write a file with the function `f`, and load it as the reward of a role."""
    monkeypatch.chdir(tmp_path)

    def load(text: str, role: str = "generator") -> tuple[OwnReward, ...]:
        (tmp_path / "own.py").write_text(text)
        config = settings(1, 1)
        config[role].rewards = ("own.py:f",)
        return load_own_rewards(config)[role]

    return load


def rewarded(own_rewards: tuple[OwnReward, ...], *solutions: Solution, **rl):
    t = turn_of(settings(1, len(solutions), **rl), "generator", {}, own_rewards=own_rewards)
    reward = graded(t, responses_of("generator", t.problems(), len(solutions), solutions))[1]
    assert t.adds_own_reward
    return reward


def rewarded_verifications(
    own_rewards: tuple[OwnReward, ...], solutions: list[Solution], said: list[Verification], **rl
):
    t = turn_of(settings(len(solutions), 1, **rl), "verifier", {}, own_rewards=own_rewards)
    solved = responses_of("generator", t.problems(), 1, solutions)
    return agreement(t, responses_of("verifier", solved, len(said) // len(solved), said))[1]


def of_text(text: str, is_correct: bool = True, format_score: float = 0.5) -> Solution:
    return solution(is_correct, format_score, text=text)


def said(verdict: str, text: str = "judged") -> Verification:
    return dataclasses.replace(verification(verdict, format_score=0.25), text=text)


def test_the_generators_function_is_added_to_the_grade_and_the_format_score(own):
    own_fns = own("def f(solution):\n    return -len(solution.text) * (1 + solution.is_correct)\n")
    reward = rewarded(own_fns, of_text("abc"), of_text("a", False, 1.0), outcome_weight=2.0, format_weight=0.5)
    # 2 + 0.25 - 6;  0 + 0.5 - 1.
    np.testing.assert_array_equal(reward.reward_B, np.float32([-3.75, -0.5]))
    assert [(term.name, term.weight, term.value.tolist()) for term in reward.terms] == [
        ("grade", 2.0, [1, 0]), ("format score", 0.5, [0.5, 1]), ("own reward (own.py:f)", 1.0, [-6, -1])]
    assert reward.reward_B.dtype == reward.terms[-1].value.dtype == np.float32
    assert reward.metrics == {
        "generator/reward/outcome": 0.5, "generator/reward/format": 0.75, "generator/reward/own/f": -3.5
    }


def test_several_functions_are_added_with_their_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def length(solution):\n    return -len(solution.text)\n"
                                     "def steps(solution):\n    return 4\ndef watched(solution):\n    return 7\n")
    config = settings(1, 1)
    config.generator.rewards = ("own.py:length", "own.py:steps", "own.py:watched")
    config.generator.reward_weights = (0.5, 2.0, 0.0)
    reward = rewarded(load_own_rewards(config)["generator"], of_text("abc"), of_text("a", False))
    np.testing.assert_array_equal(reward.reward_B, np.float32([1 - 1.5 + 8, 0 - 0.5 + 8]))
    assert [(term.name, term.weight, term.value.tolist()) for term in reward.terms[2:]] == [
        ("own reward (own.py:length)", 0.5, [-3, -1]), ("own reward (own.py:steps)", 2.0, [4, 4]),
        ("own reward (own.py:watched)", 0.0, [7, 7])]
    own = {name: value for name, value in reward.metrics.items() if "/own/" in name}
    assert own == {"generator/reward/own/length": -2.0, "generator/reward/own/steps": 4.0,
                   "generator/reward/own/watched": 7.0}


def test_with_weights_of_zero_it_takes_their_place(own):
    own_fns = own("def f(solution):\n    return 0.25\n")
    assert rewarded(own_fns, of_text("two"), outcome_weight=0.0, format_weight=0.0).reward_B == [0.25]


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
@pytest.mark.parametrize("turn_fn", [tango.solve, baselines.solve_with_gold_steps])
def test_alpha_by_signal_follows_the_grades_whatever_else_is_in_the_reward(own, algorithm, turn_fn):
    """Three of four groups have answers of one kind; the lengths and format scores of all differ."""
    own_fns = own("def f(solution):\n    return 0.001 * len(solution.text)\n")
    config = settings(4, 2, alpha_schedule="signal", alpha_initial=0.5, alpha_final=0.1, format_weight=0.25)
    config.generator.loss.algorithm = algorithm
    grades = [False, False, True, True, True, False, False, False]
    solved = [of_text("x" * number, grade, number / 8) for number, grade in enumerate(grades)]
    t = turn_of(config, "generator", {"generator": solved, "verifier": [said("CORRECT")] * 8}, own_rewards=own_fns)
    lesson = turn_fn(t)
    assert algorithm_of(algorithm).has_signal_fn(lesson.reward.reward_B.reshape(-1, 2)).all()
    assert lesson.metrics["generator/alpha"] == pytest.approx(0.1 + 0.4 * 3 / 4)


def test_the_verifiers_function_gets_the_solution_that_was_judged(own):
    own_fns = own("def f(verification, solution):\n    return len(verification.text) + 10 * len(solution.text)\n",
                 "verifier")
    records = [said("CORRECT", "x"), said("INCORRECT", "xx"), said("CORRECT", ""), said("INVALID", "x")]
    reward = rewarded_verifications(own_fns, [of_text("ab"), of_text("", False)], records)
    np.testing.assert_array_equal(reward.terms[-1].value, np.float32([21, 22, 0, 1]))
    # 1 for the first verdict alone, and 0.8 * 0.25 for each format score.
    np.testing.assert_allclose(reward.reward_B, [22.2, 22.2, 0.2, 1.2], rtol=1e-6)
    assert reward.metrics["verifier/reward/own/f"] == 11.0 and reward.metrics["verifier/reward/correctness"] == 0.25


def test_responses_of_the_other_role_have_no_part_in_it(own):
    """Judged in a generator's turn for a metric."""
    own_fns = own("def f(solution):\n    return 5.0\n")
    t = turn_of(settings(2, 1), "generator", {}, own_rewards=own_fns)
    solved = responses_of("generator", t.problems(), 1, [of_text("ab"), of_text("", False)])
    _, reward = agreement(t, responses_of("verifier", solved, 1, [said("CORRECT"), said("CORRECT")]))
    np.testing.assert_allclose(reward.reward_B, [1.2, 0.2], rtol=1e-6)
    assert not t.adds_own_reward and "generator/reward/own/f" not in reward.metrics
