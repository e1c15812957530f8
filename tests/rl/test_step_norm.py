"""Forms of the step advantage against numbers worked by hand, and what holds of them for any counts."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tango_jax.config import default_config
from tango_jax.method.rewards import step_count_corr
from tango_jax.rl.advantages import grpo_step_BT
from tango_jax.rl.algorithms import ALGORITHMS
from tango_jax.rl.step_count_bias import explained, first_token_advantage_B
from tango_jax.rl.step_norm import FORMS, step_advantage_BT

T = 20


def steps_of(*labels: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Solutions with a step on every second token: rewards y / n, ends, and tokens that are actions."""
    reward_BT, is_action_BT = np.zeros((len(labels), T), np.float32), np.zeros((len(labels), T), bool)
    is_end_BT = np.zeros((len(labels), T), bool)
    for row, label in enumerate(labels):
        ends = 2 * np.arange(len(label)) + 1
        reward_BT[row, ends], is_end_BT[row, ends] = np.array(label) / max(len(label), 1), True
        is_action_BT[row, : 2 * len(label) + 2] = True
    return reward_BT, is_end_BT, is_action_BT


def advantage(form: str, *labels, algorithm="grpo", right=None, group_size=None, **loss_settings) -> np.ndarray:
    loss = default_config().generator.loss
    loss.update(loss_settings)
    reward_BT, is_end_BT, is_action_BT = steps_of(*labels)
    is_right_B = np.array(right if right is not None else [True] * len(labels))
    compared = (ALGORITHMS[algorithm].baseline_fn, not ALGORITHMS[algorithm].compares_groups_alone)
    return step_advantage_BT(
        form, *compared, np.sign(reward_BT), is_end_BT, is_end_BT.sum(axis=1), is_right_B, is_action_BT,
        group_size or len(labels), loss
    )


def test_the_published_form_pays_for_the_number_of_steps():
    few, many = (1,) * 2, (1,) * 8
    adv_BT = grpo_step_BT(*steps_of(*[few] * 4, *[many] * 4), 8)
    np.testing.assert_allclose(adv_BT[:, 0], [3.95] * 4 + [-3.95] * 4, atol=0.005)
    assert step_count_corr(adv_BT[:, 0], np.repeat([2, 8], 4), np.ones(8, bool), [range(8)]) == pytest.approx(-1.0)


def test_solutions_by_hand():
    # s = (0, 1, -1): m = 0, d = 1. Steps of the first get +1/2 and -1/2, of the second 1/1, of the third twice -1/2.
    adv_BT = advantage("solutions", (1, -1), (1,), (-1, -1))
    np.testing.assert_allclose(adv_BT[0, :5], [0, 0, -0.5, -0.5, 0], atol=1e-5)
    np.testing.assert_allclose(adv_BT[1, :3], [1, 1, 0], atol=1e-5)
    np.testing.assert_allclose(adv_BT[2, :5], [-1, -1, -0.5, -0.5, 0], atol=1e-5)


def test_minimum_by_hand():
    # The lowest judgements are (-1, 1, -1): m = -1/3, d = sqrt((2 * 4/9 + 16/9) / 2) = 1.1547.
    adv_BT = advantage("minimum", (-1, 1), (1,), (1, -1))
    low, high = -2 / 3 / 1.1547, 4 / 3 / 1.1547
    np.testing.assert_allclose(adv_BT[0, :5], [low, low, high, high, 0], atol=1e-5)
    np.testing.assert_allclose(adv_BT[1, :3], [high, high, 0], atol=1e-5)
    np.testing.assert_allclose(adv_BT[2, :5], [low, low, low, low, 0], atol=1e-5)


def test_first_error_by_hand():
    # Shares before the first rejected step: (1/2, 0, 1): m = 1/2, d = 1/2.
    adv_BT = advantage("first_error", (1, -1), (-1, 1), (1, 1))
    np.testing.assert_allclose(adv_BT[0, :5], [0, 0, -2, -2, 0], atol=1e-5)
    np.testing.assert_allclose(adv_BT[1, :5], [-2, -2, 0, 0, 0], atol=1e-5)
    np.testing.assert_allclose(adv_BT[2, :5], [1, 1, 1, 1, 0], atol=1e-5)


def test_among_equals_by_hand():
    # Right ones have s = (1, 0), wrong ones s = (1, -1): each pair apart, m = 1/2, d = 0.7071 and m = 0, d = 1.4142.
    adv_BT = advantage("among_equals", (1,), (1, -1), (1,), (-1,), right=[True, True, False, False])
    np.testing.assert_allclose(adv_BT[:, 0], [0.70711, -0.70711, 0.70711, -0.70711], atol=1e-5)
    # One right solution alone is compared with none.
    adv_BT = advantage("among_equals", (1,), (1, -1), (-1,), right=[True, False, False])
    np.testing.assert_allclose(adv_BT[:, 0], [0, 0.70711, -0.70711], atol=1e-5)


def test_rloo_compares_with_the_others():
    # s = (0, 1, -1): minus the mean of the others, times the scale of 10.
    adv_BT = advantage("solutions", (1, -1), (1,), (-1, -1), algorithm="rloo")
    np.testing.assert_allclose(adv_BT[:, 0], [0, 15, -15], atol=1e-4)


def test_reinforce_pp_compares_the_whole_batch():
    one = advantage("solutions", (1,), (1, -1), (-1,), (-1, -1), algorithm="reinforce_pp", group_size=2)
    np.testing.assert_array_equal(one, advantage("solutions", (1,), (1, -1), (-1,), (-1, -1), group_size=4))


labels = st.lists(st.sampled_from([1, -1]), min_size=1, max_size=8).map(tuple)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=2, max_size=8), st.sampled_from([1, -1]), st.sampled_from(sorted(FORMS)),
       st.sampled_from(["grpo", "rloo", "reinforce_pp"]))
def test_equal_judgements_compare_nothing_whatever_the_counts(counts, y, form, algorithm):
    assert not advantage(form, *[(y,) * n for n in counts], algorithm=algorithm).any()


@settings(max_examples=60, deadline=None)
@given(st.lists(labels, min_size=2, max_size=6), st.integers(2, 3))
def test_the_first_token_of_solutions_depends_on_the_share_alone(rows, times):
    adv_BT = advantage("solutions", *rows)
    share = np.array([np.mean(row) for row in rows])
    wanted = np.zeros(len(rows)) if np.ptp(share) < 1e-9 else (share - share.mean()) / (share.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(adv_BT[:, 0], wanted, atol=1e-4)
    assert np.isfinite(adv_BT).all() and np.abs(adv_BT).max() < 1e3


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6).flatmap(lambda n: st.lists(
    st.lists(st.sampled_from([1, -1]), min_size=n, max_size=n).map(tuple), min_size=2, max_size=6)))
def test_with_equal_counts_solutions_is_the_published_form_up_to_the_scale(rows):
    shares = [np.mean(row) for row in rows]
    adv_BT, published_BT = advantage("solutions", *rows), grpo_step_BT(*steps_of(*rows), len(rows))
    if np.ptp(shares) < 1e-9:
        return  # no solution is better than another: nothing under `solutions`
    elements = np.concatenate([np.array(row) / len(row) for row in rows])
    scale = (elements.std(ddof=1) + 1e-6) / (np.std(shares, ddof=1) + 1e-6)
    np.testing.assert_allclose(adv_BT, published_BT * scale, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_solutions_without_step_rewards_are_not_compared(form):
    adv_BT = advantage(form, (1, -1), (), (1,), (-1, -1, -1))
    assert not adv_BT[1].any()
    np.testing.assert_array_equal(adv_BT[[0, 2, 3]], advantage(form, (1, -1), (1,), (-1, -1, -1)))


def test_steps_that_end_in_one_token_count_as_one():
    reward_BT, is_end_BT, is_action_BT = steps_of((1,), (1,))
    reward_BT[0, 1] = 0.0  # one approved and one rejected
    loss = default_config().generator.loss
    baseline_fn = ALGORITHMS["grpo"].baseline_fn
    adv_BT = step_advantage_BT(
        "solutions", baseline_fn, False, reward_BT, is_end_BT, np.ones(2, int), np.ones(2, bool), is_action_BT, 2, loss
    )
    np.testing.assert_allclose(adv_BT[:, 0], [-0.70711, 0.70711], atol=1e-5)


def soft(form: str, y_BT: list, num_steps: list[int]) -> np.ndarray:
    """One token a step; NaN: it ends no step that is judged."""
    y_BT, loss = np.array(y_BT), default_config().generator.loss
    ends_BT, B = ~np.isnan(y_BT), len(y_BT)
    return step_advantage_BT(form, ALGORITHMS["grpo"].baseline_fn, False, np.nan_to_num(y_BT), ends_BT,
                             np.array(num_steps), np.ones(B, bool), np.ones(y_BT.shape, bool), B, loss)


def test_probabilities_are_compared_as_they_are():
    # s = (0.25, -0.25): m = 0, d = 0.35355. The steps give 0.75/2, -0.25/2 and twice -0.25/2.
    adv_BT = soft("solutions", [[0.75, -0.25], [-0.25, -0.25]], [2, 2])
    np.testing.assert_allclose(adv_BT * 0.35355, [[0.25, -0.125], [-0.25, -0.125]], atol=1e-5)
    # The lowest are (-0.25, 0.75): m = 0.25, d = 0.70711.
    adv_BT = soft("minimum", [[-0.25, 0.75], [0.75, 1.0]], [2, 2])
    np.testing.assert_allclose(adv_BT * 0.70711, [[-0.5, 0.5], [0.5, 0.75]], atol=1e-5)


def test_steps_that_are_not_judged_get_nothing():
    """The first verification stops at step 2 of 4, the other approves both steps of another solution."""
    none = np.nan
    stopped, whole = [1, -1, none, none], [1, 1, none, none]
    # Of the judged steps: s = (0, 1), m = 1/2, d = 0.70711.
    adv_BT = soft("solutions", [stopped, whole], [4, 2])
    np.testing.assert_allclose(adv_BT * 0.70711, [[-0.5, -0.75, 0, 0], [0.5, 0.25, 0, 0]], atol=1e-5)
    # The share of right steps before the error is of all four: s = (1/4, 1), as if the others had been judged.
    adv_BT = soft("first_error", [stopped, whole], [4, 2])
    np.testing.assert_array_equal(adv_BT, soft("first_error", [[1, -1, 1, -1], whole], [4, 2]))
    np.testing.assert_allclose(adv_BT[0, 1:] * 0.53033, [-1, 0, 0], atol=1e-5)


def test_correlation_with_the_number_of_steps_is_within_groups():
    assert step_count_corr(np.array([1.0, 1, 5, 5]), np.array([2, 2, 8, 8]), np.ones(4, bool), [[0, 1], [2, 3]]) is None
    adv_B, count_B = np.array([1.0, 0, 9, 10]), np.array([2, 3, 7, 8])
    assert step_count_corr(adv_B, count_B, np.ones(4, bool), [[0, 1], [2, 3]]) == pytest.approx(0.0)
    judged_B = np.array([True, True, False, False])
    assert step_count_corr(adv_B, count_B, judged_B, [[0, 1], [2, 3]]) == pytest.approx(-1.0)


# ------------------------------------------------------------------- the tables of step_count_bias, as documented


@pytest.mark.parametrize("share, by_count, by_quality", [(0.5, 0.0, 0.83), (0.9, 0.41, 0.40), (0.99, 0.77, 0.04)])
def test_the_published_form_is_explained_by_the_count_where_most_steps_are_approved(share, by_count, by_quality):
    """Numbers of another 400 problems, so that they agree to two standard errors."""
    assert explained("elements", share) == pytest.approx((by_count, by_quality), abs=0.04)


@pytest.mark.parametrize("form", FORMS)
def test_the_count_explains_little_of_the_other_forms(form):
    assert all(explained(form, share)[0] < 0.1 for share in (0.5, 0.8, 0.95))
    for count in (2, 5):
        assert not first_token_advantage_B(form, [np.ones(count)] * 4 + [np.ones(8)] * 4).any()
