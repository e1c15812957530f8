"""Advantages against numbers worked by hand."""
import numpy as np
import pytest

from tango_jax.config import default_config
from tango_jax.rl import advantages
from tango_jax.rl.algorithms import algorithm_of

# Two samples of one prompt. Row 0: K = 2, approved then rejected. Row 1: K = 1, approved. Token 0 of row 0 is a prompt
# token; the last token of row 1 is padding.
STEP_REWARD_BT = np.array([[0, 0.5, 0, -0.5, 0, 0], [0, 0, 1.0, 0, 0, 0]], np.float32)
IS_STEP_END_BT = STEP_REWARD_BT != 0
IS_ACTION_BT = np.array([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]], bool)


def test_grpo_outcome_normalises_each_group_with_ddof_1():
    reward_B = np.array([2, 0, 4, 1, 1, 1], np.float32)
    # First group: mean 2, std sqrt((0 + 4 + 4) / 2) = 2.  Second: no spread.
    np.testing.assert_allclose(
        advantages.grpo_outcome_B(reward_B, group_size=3), [0, -1, 1, 0, 0, 0], atol=1e-6
    )
    # mean 1/2, std sqrt(4 * 0.25 / 3) = 0.5773503, 0.5 / 0.5773503 = 0.8660254
    adv_B = advantages.grpo_outcome_B(np.array([1, 0, 0, 1], np.float32), group_size=4)
    np.testing.assert_allclose(adv_B, [0.866025, -0.866025, -0.866025, 0.866025], atol=3e-6)
    assert adv_B.dtype == np.float32


def test_grpo_outcome_adds_1e_6_to_the_std():
    # mean 1e-6, std sqrt(2 * 1e-12 / 1) = 1.414214e-6; 1 / (1.414214 + 1) = 0.414214
    adv_B = advantages.grpo_outcome_B(np.array([0.0, 2e-6]), group_size=2)
    np.testing.assert_allclose(adv_B, [-0.414214, 0.414214], atol=1e-6)


def test_grpo_outcome_without_std_only_centres():
    adv_B = advantages.grpo_outcome_B(np.array([2, 0, 4], np.float32), group_size=3, use_std=False)
    np.testing.assert_allclose(adv_B, [0, -2, 2], atol=1e-7)


@pytest.mark.parametrize("use_std", [True, False])
def test_grpo_group_of_one_keeps_the_reward(use_std):
    adv_B = advantages.grpo_outcome_B(np.array([1.8, 0.0], np.float32), group_size=1, use_std=use_std)
    np.testing.assert_allclose(adv_B, [1.8, 0.0], rtol=2e-6)


def test_grpo_step_normalises_jointly_then_sums_what_follows():
    adv_BT = advantages.grpo_step_BT(STEP_REWARD_BT, IS_STEP_END_BT, IS_ACTION_BT, group_size=2)
    # Elements 1/2, -1/2, 1: mean 1/3, deviations 1/6, -5/6, 4/6, std sqrt((1 + 25 + 16) / 36 / 2) = 0.7637626;
    # normalised 0.2182179, -1.0910895, 0.8728716.  Row 0: 0.2182179 - 1.0910895 = -0.8728716 up to token 1.
    expected = [
        [0.0, -0.872872, -1.091089, -1.091089, 0.0, 0.0],
        [0.872872, 0.872872, 0.872872, 0.0, 0.0, 0.0],
    ]
    np.testing.assert_allclose(adv_BT, expected, atol=3e-6)
    assert adv_BT.dtype == np.float32


def test_grpo_step_without_std_only_centres():
    adv_BT = advantages.grpo_step_BT(STEP_REWARD_BT, IS_STEP_END_BT, IS_ACTION_BT, group_size=2, use_std=False)
    # 1/6 - 5/6 = -2/3 up to token 1, then -5/6;  row 1: 2/3
    expected = [[0, -2 / 3, -5 / 6, -5 / 6, 0, 0], [2 / 3, 2 / 3, 2 / 3, 0, 0, 0]]
    np.testing.assert_allclose(adv_BT, expected, atol=1e-6)


def test_step_advantage_of_lone_and_missing_elements():
    # Group 1: one element, -1, in its first row.  Group 2: none.
    reward_BT = np.zeros((4, 3), np.float32)
    reward_BT[0, 1] = -1.0
    is_action_BT = np.ones((4, 3), bool)
    expected = [[-1, -1, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    adv_BT = advantages.grpo_step_BT(reward_BT, reward_BT != 0, is_action_BT, group_size=2)
    np.testing.assert_allclose(adv_BT, expected, atol=2e-6)
    adv_BT = advantages.rloo_step_BT(reward_BT, reward_BT != 0, is_action_BT, group_size=2, step_scale=1.0)
    np.testing.assert_allclose(adv_BT, expected, atol=1e-7)


def test_step_groups_do_not_mix():
    # Two groups of two; in each the elements are +1 and -1 on other scales: mean 0, std sqrt(2) and sqrt(2)/4.
    reward_BT = np.array([[1.0], [-1.0], [0.25], [-0.25]], np.float32)
    adv_BT = advantages.grpo_step_BT(reward_BT, reward_BT != 0, np.ones((4, 1), bool), group_size=2)
    # 1 / 1.4142136 = 0.7071068
    np.testing.assert_allclose(adv_BT[:, 0], [0.707107, -0.707107, 0.707107, -0.707107], atol=3e-6)


def test_rloo_outcome_subtracts_the_mean_of_the_others():
    # [1, 0, 0, 1]: the others of a 1 average 1/3, the others of a 0 average 2/3.
    adv_B = advantages.rloo_outcome_B(np.array([1, 0, 0, 1, 5, 1, 1, 1], np.float32), group_size=4)
    # second group: 5 - 1 = 4;  1 - (5 + 1 + 1) / 3 = -4/3
    expected = [2 / 3, -2 / 3, -2 / 3, 2 / 3, 4, -4 / 3, -4 / 3, -4 / 3]
    np.testing.assert_allclose(adv_B, expected, rtol=1e-6)
    np.testing.assert_array_equal(
        advantages.rloo_outcome_B(np.array([3, 0.5], np.float32), group_size=1), np.array([3, 0.5], np.float32)
    )


def test_rloo_step_scales_with_the_number_of_elements():
    adv_BT = advantages.rloo_step_BT(STEP_REWARD_BT, IS_STEP_END_BT, IS_ACTION_BT, group_size=2, step_scale=10.0)
    # n = 3: element minus the mean of the other two: 1/2 - 1/4 = 1/4;  -1/2 - 3/4 = -5/4;  1 - 0 = 1.  Times 10.
    expected = [[0, -10, -12.5, -12.5, 0, 0], [10, 10, 10, 0, 0, 0]]
    np.testing.assert_allclose(adv_BT, expected, rtol=1e-6, atol=1e-6)


def test_reinforce_pp_outcome_whitens_over_all_action_tokens():
    is_action_BT = np.array([[0, 1, 1, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], bool)
    adv_BT = advantages.reinforce_pp_outcome_BT(np.array([1, 0, 7], np.float32), is_action_BT)
    # Returns 1, 1, 1 | 0; the third row has no action.  Mean 3/4, squared deviations 3/16 + 9/16 = 3/4, / 3 = 1/4,
    # std 1/2: (1 - 3/4) / (1/2) = 1/2 and -3/4 / (1/2) = -3/2.
    np.testing.assert_allclose(adv_BT, [[0, 0.5, 0.5, 0.5, 0], [-1.5, 0, 0, 0, 0], [0] * 5], atol=1e-6)
    assert adv_BT.dtype == np.float32


def test_reinforce_pp_step_whitens_the_returns_and_spares_rows_without_steps():
    reward_BT = np.array([[0, 0.5, 0, 0.5], [0, 0, 0, 0]], np.float32)
    is_action_BT = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
    adv_BT = advantages.reinforce_pp_step_BT(reward_BT, reward_BT != 0, is_action_BT)
    # Returns 1, 1, 1/2, 1/2 | 0, 0: mean 1/2, squared deviations 4 * 1/4 = 1, / 5 = 0.2, std 0.4472136;
    # 0.5 / 0.4472136 = 1.1180340.  Row 1 has no step reward: 0, not -1.118.
    np.testing.assert_allclose(adv_BT, [[1.118034, 1.118034, 0, 0], [0, 0, 0, 0]], atol=1e-6)


def test_steps_whose_rewards_cancel_are_steps():
    """One long token closes two steps, of which the verifier approved one."""
    reward_BT = np.array([[0, 0.5, 0, 0.5], [0, 0, 0, 0]], np.float32)
    is_action_BT = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
    is_end_BT = np.array([[0, 1, 0, 1], [0, 1, 0, 0]], bool)
    adv_BT = advantages.reinforce_pp_step_BT(reward_BT, is_end_BT, is_action_BT)
    np.testing.assert_allclose(adv_BT, [[1.118034, 1.118034, 0, 0], [-1.118034, -1.118034, 0, 0]], atol=1e-6)


@pytest.mark.parametrize("reward, is_action", [([1.0, 1.0], [[1, 1], [1, 1]]), ([1.0, 0.0], [[0, 0], [0, 0]])])
def test_reinforce_pp_without_spread_or_tokens_is_zero(reward, is_action):
    adv_BT = advantages.reinforce_pp_outcome_BT(np.array(reward), np.array(is_action, bool))
    np.testing.assert_array_equal(adv_BT, np.zeros((2, 2)))


def test_outcome_dispatch_spreads_over_the_actions():
    reward_B = np.array([1, 0], np.float32)
    is_action_BT = np.array([[0, 1, 1], [1, 0, 0]], bool)
    # GRPO: mean 1/2, std 0.7071068.  Centred: 1/2.  RLOO: 2 * 1/2 = 1.
    # REINFORCE++: returns 1, 1, 0; mean 2/3, squared deviations 6/9, / 2 = 1/3; (1/3) / 0.5773503 = 0.5773503.
    first, off = [0, 1, 1], [1, 0, 0]
    for algorithm, use_std, plus, minus in [
        ("grpo", True, 0.707107, 0.707107),
        ("grpo", False, 0.5, 0.5),
        ("rloo", True, 1.0, 1.0),
        ("reinforce_pp", True, 0.577350, 1.154701),
    ]:
        adv_BT = algorithm_of(algorithm).outcome_fn(reward_B, is_action_BT, 2, options(use_std=use_std))
        np.testing.assert_allclose(adv_BT, [plus * np.array(first), -minus * np.array(off)], atol=3e-6)
        assert adv_BT.dtype == np.float32


def test_step_dispatch():
    def first(algorithm: str, **changed) -> float:
        args = (STEP_REWARD_BT, IS_STEP_END_BT, IS_ACTION_BT, 2, options(**changed))
        return algorithm_of(algorithm).step_fn(*args)[0, 1]  # the first action token of row 0, worked out above

    assert first("grpo") == pytest.approx(-0.872872, abs=3e-6)
    assert first("grpo", use_std=False) == pytest.approx(-2 / 3)
    assert first("rloo") == pytest.approx(-10.0)
    # REINFORCE++: returns of the 10 action tokens 0, -1/2, -1/2, 0, 0 | 1, 1, 1, 0, 0: mean 0.2, squared deviations
    # 3.5 - 10 * 0.04 = 3.1, / 9 = 0.3444444, std 0.5868939; -0.2 / 0.5868939 = -0.3407771
    assert first("reinforce_pp") == pytest.approx(-0.340777, abs=1e-6)


def options(**changed):
    loss = default_config().generator.loss
    loss.update(changed)
    return loss


def test_unknown_algorithm_lists_the_choices():
    with pytest.raises(ValueError, match="generator.loss.algorithm='ppo' is not one of grpo, rloo, reinforce_pp"):
        algorithm_of("ppo", "generator.loss.algorithm")


def test_rows_must_split_into_groups():
    with pytest.raises(AssertionError, match="5 rows .* groups of 2"):
        advantages.grpo_outcome_B(np.zeros(5), group_size=2)
    with pytest.raises(AssertionError, match="2 rows .* groups of 3"):
        advantages.rloo_step_BT(STEP_REWARD_BT, IS_STEP_END_BT, IS_ACTION_BT, group_size=3, step_scale=1.0)


def test_average_over_verifications():
    mean_BT = advantages.average_over_verifications([np.array([[1.0, 2.0]]), np.array([[0.0, -4.0]])])
    np.testing.assert_array_equal(mean_BT, [[0.5, -1.0]])


def test_label_counts_start_with_the_first_batch_then_decay():
    counts_2 = advantages.update_label_counts(np.zeros(2), np.array([True, True, True, False]), decay=0.8)
    np.testing.assert_array_equal(counts_2, [1, 3])
    counts_2 = advantages.update_label_counts(counts_2, np.array([False] * 4), decay=0.8)
    # 0.8 * 1 + 0.2 * 4 = 1.6;  0.8 * 3 + 0 = 2.4
    np.testing.assert_allclose(counts_2, [1.6, 2.4])


def test_class_weights_follow_the_inverse_root_and_average_one():
    weight_B = advantages.class_weights_B(np.array([4.0, 1.0]), np.array([False, False, True]))
    # 1/2, 1/2, 1: mean 2/3, divided by it 3/4, 3/4, 3/2
    np.testing.assert_allclose(weight_B, [0.75, 0.75, 1.5], rtol=1e-6)
    assert weight_B.dtype == np.float32


def test_class_weights_of_an_unseen_class_are_bounded():
    weight_B = advantages.class_weights_B(np.array([0.0, 100.0]), np.array([False, True]))
    # The floor is 1 % of 100 = 1: weights 1 and 1/10, mean 0.55.
    np.testing.assert_allclose(weight_B, [1.818182, 0.181818], rtol=1e-5)
    # A class that faded to nothing is as bounded as one never seen.
    faded_B = advantages.class_weights_B(np.array([1e-30, 100.0]), np.array([False, True]))
    np.testing.assert_allclose(faded_B, [1.818182, 0.181818], rtol=1e-5)
    np.testing.assert_array_equal(advantages.class_weights_B(np.zeros(2), np.array([False, True, True])), [1, 1, 1])
