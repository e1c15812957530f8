"""Rewards against numbers worked by hand."""
import numpy as np
import pytest

from tango_jax.config import default_config
from tango_jax.rl.algorithms import algorithm_of
from tango_jax.rl.rewards import generator_outcome_reward_B, lowest_y_BT, step_reward_BT, verifier_reward_B


def test_step_reward_is_y_over_K_at_the_step_ends():
    reward_BT, is_step_end_BT = step_reward_BT(
        judgements=[(True, False), (True,), (False, False, True, True)],
        step_ends=[[1, 4], [0], [0, 1, 2, 5]],
        num_tokens=6,
    )
    # K = 2: +1/2, -1/2.  K = 1: +1/1.  K = 4: -1/4, -1/4, +1/4, +1/4.
    expected = [
        [0.0, 0.5, 0.0, 0.0, -0.5, 0.0],
        [1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [-0.25, -0.25, 0.25, 0.0, 0.0, 0.25],
    ]
    np.testing.assert_array_equal(reward_BT, np.array(expected, np.float32))
    np.testing.assert_array_equal(is_step_end_BT, np.array(expected) != 0)
    assert reward_BT.dtype == np.float32 and is_step_end_BT.dtype == bool


@pytest.mark.parametrize(
    "labels, ends",
    [
        (None, [1, 3]),  # misaligned verification
        ((True,), [1, 3]),  # one judgement for two steps
        ((True, True, True), [1, 3]),  # three for two
        ((True, None), [1, 3]),  # a block that judges nothing
        ((), []),  # K = 0
        ((True, True), [1, -1]),  # unknown end
        ((True, True), [1, 4]),  # end beyond the kept tokens
    ],
)
def test_row_without_usable_judgements_has_no_step_element(labels, ends):
    reward_BT, is_step_end_BT = step_reward_BT([labels, (False,)], [ends, [2]], num_tokens=4)
    np.testing.assert_array_equal(reward_BT, [[0, 0, 0, 0], [0, 0, -1, 0]])
    np.testing.assert_array_equal(is_step_end_BT, [[False] * 4, [False, False, True, False]])


def test_two_steps_that_end_in_one_token_add_up():
    reward_BT, is_step_end_BT = step_reward_BT([(True, True, False)], [[1, 1, 2]], num_tokens=3)
    # K = 3: 1/3 + 1/3 at token 1, -1/3 at token 2.
    np.testing.assert_allclose(reward_BT, [[0.0, 0.6666667, -0.3333333]], rtol=1e-6)
    assert is_step_end_BT.sum() == 2


def test_a_float_is_y_and_a_step_that_is_not_judged_counts_in_K():
    labels, ends = [(0.5, -0.25, float("nan"), float("nan"))], [[0, 2, 3, 5]]
    reward_BT, is_step_end_BT = step_reward_BT(labels, ends, num_tokens=6)
    np.testing.assert_array_equal(reward_BT, np.float32([[0.125, 0, -0.0625, 0, 0, 0]]))
    np.testing.assert_array_equal(is_step_end_BT, [[True, False, True, False, False, False]])
    np.testing.assert_array_equal(lowest_y_BT(labels, ends, 6), np.float32([[0.5, 0, -0.25, 0, 0, 0]]))
    # Of two steps that end in one token, the lower y; a probability of one half is an element, too.
    np.testing.assert_array_equal(lowest_y_BT([(0.5, -0.25, 0.0)], [[1, 1, 2]], 3), np.float32([[0, -0.25, 0]]))
    assert step_reward_BT([(0.5, -0.25, 0.0)], [[1, 1, 2]], 3)[1].tolist() == [[False, True, True]]


def test_step_reward_rejects_rows_that_do_not_match():
    with pytest.raises(AssertionError, match="1 judgements for 2 rows"):
        step_reward_BT([(True,)], [[0], [1]], num_tokens=2)


def test_generator_outcome_reward():
    reward_B = generator_outcome_reward_B(
        np.array([True, True, False]), np.array([1.0, 0.2, 0.6]), outcome_weight=2.0, format_weight=0.5
    )
    # 2 + 0.5;  2 + 0.1;  0 + 0.3
    np.testing.assert_allclose(reward_B, [2.5, 2.1, 0.3], rtol=1e-6)
    assert reward_B.dtype == np.float32


def test_verifier_reward_compares_the_verdict_with_the_graded_outcome():
    reward_B, correctness_B = verifier_reward_B(
        ["CORRECT", "INCORRECT", "CORRECT", "INCORRECT", "INVALID", "INVALID"],
        is_correct_B=np.array([True, False, False, True, True, False]),
        format_B=np.array([1.0, 0.2, 0.6, 0.0, 0.0, 1.0]),
        gamma=0.8,
    )
    np.testing.assert_array_equal(correctness_B, [1, 1, 0, 0, 0, 0])
    # 1 + 0.8;  1 + 0.16;  0 + 0.48;  0;  0;  0 + 0.8
    np.testing.assert_allclose(reward_B, [1.8, 1.16, 0.48, 0.0, 0.0, 0.8], rtol=1e-6)
    assert reward_B.dtype == correctness_B.dtype == np.float32


def test_verifier_reward_refuses_another_verdict():
    with pytest.raises(AssertionError, match="MAYBE"):
        verifier_reward_B(["MAYBE"], np.array([True]), np.array([1.0]), gamma=0.8)


def test_misshapen_input_is_refused():
    with pytest.raises(AssertionError):
        generator_outcome_reward_B(np.array([True, False]), np.array([1.0]), 1.0, 0.0)
    with pytest.raises(AssertionError):
        verifier_reward_B(["CORRECT"], np.array([True, True]), np.array([1.0, 1.0]), 0.8)


@pytest.mark.parametrize("algorithm, rewards, group_size, expected", [
    ("grpo", [1, 1, 0, 1], 2, [False, True]), ("rloo", [0, 0, 1, 1], 2, [False, False]),
    ("grpo", [1, 0, -1], 1, [True, False, True]),  # one alone keeps its reward
    ("reinforce_pp", [1, 1, 0, 0], 2, [True, True]), ("reinforce_pp", [1, 1, 1, 1], 2, [False, False]),
])
def test_a_signal_is_an_outcome_advantage(algorithm, rewards, group_size, expected):
    reward_B, is_action_BT = np.array(rewards, np.float32), np.ones((len(rewards), 2), bool)
    found = algorithm_of(algorithm)
    assert found.has_signal_fn(reward_B.reshape(-1, group_size)).tolist() == expected
    adv_BT = found.outcome_fn(reward_B, is_action_BT, group_size, default_config().generator.loss)
    assert (adv_BT != 0).any(axis=1).reshape(-1, group_size).any(axis=1).tolist() == expected
