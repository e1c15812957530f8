"""Losses and their gradients against numbers worked by hand."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tango_jax.rl import losses

LN2 = 0.69314718
# ratios 1.5, 0.5, 1.25, 1 as log-probs against an old log-prob of -1
LOGP_1T = jnp.array([[-0.59453489, -1.69314718, -0.77685645, -1.0]])
OLD_1T = jnp.full((1, 4), -1.0)


def policy_loss_BT(logp_BT, old_logp_BT, adv_BT, clip_low, clip_high):
    """GRPO's policy loss with token-level ratios (arXiv 2402.03300, eq. 3), as the update puts it together."""
    return losses.clipped_loss_BT(losses.log_ratio_BT(logp_BT, old_logp_BT), adv_BT, clip_low, clip_high)


def policy_sum(logp_BT, adv_BT, clip_low=0.2, clip_high=0.2, weight_BT=1.0):
    return jnp.sum(weight_BT * policy_loss_BT(logp_BT, OLD_1T, adv_BT, clip_low, clip_high)[0])


def test_policy_loss_and_gradient_for_a_positive_advantage():
    adv_1T = jnp.full((1, 4), 2.0)
    loss_1T, is_clipped_1T = policy_loss_BT(LOGP_1T, OLD_1T, adv_1T, 0.2, 0.2)
    # -min(c * 2, clip(c) * 2): c = 1.5 -> 1.2 * 2;  0.5 -> unclipped 0.5 * 2;  1.25 -> 1.2 * 2;  1 -> 1 * 2
    np.testing.assert_allclose(loss_1T, [[-2.4, -1.0, -2.4, -2.0]], rtol=1e-6)
    np.testing.assert_array_equal(is_clipped_1T, [[True, False, True, False]])
    # gradient -c * A where the clip is idle, else 0
    np.testing.assert_allclose(jax.grad(policy_sum)(LOGP_1T, adv_1T), [[0, -1.0, 0, -2.0]], rtol=1e-6)


def test_policy_loss_and_gradient_for_a_negative_advantage():
    adv_1T = jnp.full((1, 4), -2.0)
    loss_1T, is_clipped_1T = policy_loss_BT(LOGP_1T, OLD_1T, adv_1T, 0.2, 0.2)
    # c = 1.5 -> 3;  0.5 -> clipped to 0.8, 1.6;  1.25 -> 2.5;  1 -> 2
    np.testing.assert_allclose(loss_1T, [[3.0, 1.6, 2.5, 2.0]], rtol=1e-6)
    np.testing.assert_array_equal(is_clipped_1T, [[False, True, False, False]])
    np.testing.assert_allclose(jax.grad(policy_sum)(LOGP_1T, adv_1T), [[3.0, 0, 2.5, 2.0]], rtol=1e-6)


def test_clip_higher_lets_the_upper_side_move_further():
    adv_1T = jnp.ones((1, 4))
    loss_1T, is_clipped_1T = policy_loss_BT(LOGP_1T, OLD_1T, adv_1T, 0.2, 0.28)
    # 1.5 -> 1.28;  1.25 stays
    np.testing.assert_allclose(loss_1T, [[-1.28, -0.5, -1.25, -1.0]], rtol=1e-6)
    np.testing.assert_array_equal(is_clipped_1T, [[True, False, False, False]])


def test_on_policy_gradient_is_minus_advantage_times_weight():
    logp_BT = jnp.array([[-0.3, -2.0], [-5.0, -0.01]])
    adv_BT = jnp.array([[1.0, -0.5], [3.0, 0.0]])
    weight_BT = jnp.array([[0.5, 0.5], [0.25, 0.25]])

    def total(logp_BT):
        # one update per batch: the old log-probs are the current ones
        return jnp.sum(weight_BT * policy_loss_BT(logp_BT, logp_BT, adv_BT, 0.2, 0.2)[0])

    np.testing.assert_allclose(jax.jit(jax.grad(total))(logp_BT), [[-0.5, 0.25], [-0.75, 0.0]], rtol=1e-6)


def test_no_gradient_reaches_old_logp_or_the_advantage():
    def total(old_logp_BT, adv_BT):
        return jnp.sum(policy_loss_BT(LOGP_1T, old_logp_BT, adv_BT, 0.2, 0.2)[0])

    for gradient in jax.grad(total, argnums=(0, 1))(OLD_1T, jnp.ones((1, 4))):
        np.testing.assert_array_equal(gradient, np.zeros((1, 4)))


def test_policy_loss_stays_finite_at_an_absurd_ratio():
    logp_BT, old_BT = jnp.array([[0.0, -900.0]]), jnp.array([[-900.0, 0.0]])
    loss_BT, _ = policy_loss_BT(logp_BT, old_BT, -jnp.ones((1, 2)), 0.2, 0.2)
    # exp(20) = 485165195 in place of exp(900);  a ratio of 0 is clipped to 0.8
    np.testing.assert_allclose(loss_BT, [[485165195.0, 0.8]], rtol=1e-5)


def test_log_ratio_is_float32_whatever_comes_in():
    ratio_BT = losses.log_ratio_BT(jnp.array([[-1.0]], jnp.bfloat16), jnp.array([[-1.5]], jnp.bfloat16))
    assert ratio_BT.dtype == jnp.float32
    assert float(ratio_BT[0, 0]) == 0.5


# Two sequences and padding in the first row, one sequence in the second; tokens 2 and 5 of row 0 are a prompt token and
# padding, with log-ratios that must not count.
GSPO_LOGP_BT = jnp.array([[0.2, 0.4, 9.0, -0.1, 0.3, 9.0], [0.6, 0.0, -0.3, 0.0, 0.0, 0.0]])
GSPO_ACTION_BT = jnp.array([[1, 1, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0]], bool)
GSPO_SEGMENT_BT = jnp.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 0, 0, 0]])


def test_sequence_log_ratio_averages_within_each_packed_sequence():
    ratio_fn = jax.jit(losses.sequence_log_ratio_BT, static_argnums=4)
    ratio_BT = ratio_fn(GSPO_LOGP_BT, jnp.zeros((2, 6)), GSPO_ACTION_BT, GSPO_SEGMENT_BT, 2)
    # (0.2 + 0.4) / 2 = 0.3;  (-0.1 + 0.3) / 2 = 0.1;  (0.6 + 0 - 0.3) / 3 = 0.1
    expected = [[0.3, 0.3, 0, 0.1, 0.1, 0], [0.1, 0.1, 0.1, 0, 0, 0]]
    np.testing.assert_allclose(ratio_BT, expected, rtol=1e-5, atol=1e-7)
    # More segments than a row holds change nothing.
    wider_BT = ratio_fn(GSPO_LOGP_BT, jnp.zeros((2, 6)), GSPO_ACTION_BT, GSPO_SEGMENT_BT, 5)
    np.testing.assert_allclose(wider_BT, expected, rtol=1e-5, atol=1e-7)


def test_sequence_log_ratio_is_the_same_unpacked():
    # The second sequence of row 0 in a row of its own.
    ratio_BT = losses.sequence_log_ratio_BT(
        jnp.array([[9.0, -0.1, 0.3]]), jnp.zeros((1, 3)), jnp.array([[0, 1, 1]], bool), jnp.ones((1, 3), int), 1
    )
    np.testing.assert_allclose(ratio_BT, [[0, 0.1, 0.1]], rtol=1e-5, atol=1e-7)


def test_sequence_loss_reaches_every_token_of_its_sequence():
    def total(logp_BT):
        ratio_BT = losses.sequence_log_ratio_BT(logp_BT, logp_BT, GSPO_ACTION_BT, GSPO_SEGMENT_BT, 2)
        adv_BT = jnp.array([[2.0, 2.0, 0, -1.0, -1.0, 0], [3.0, 3.0, 3.0, 0, 0, 0]])
        # seq_mean weights of three sequences of 2, 2 and 3 tokens
        weight_BT = jnp.array([[1 / 6, 1 / 6, 0, 1 / 6, 1 / 6, 0], [1 / 9, 1 / 9, 1 / 9, 0, 0, 0]])
        return jnp.sum(weight_BT * losses.clipped_loss_BT(ratio_BT, adv_BT, 3e-4, 4e-4)[0])

    # Each sequence's loss is -A s / 3, and a token moves s by 1/length: -2/6, 1/6, -3/9.
    expected = [[-1 / 3, -1 / 3, 0, 1 / 6, 1 / 6, 0], [-1 / 3, -1 / 3, -1 / 3, 0, 0, 0]]
    np.testing.assert_allclose(jax.grad(total)(GSPO_LOGP_BT), expected, rtol=1e-5, atol=1e-7)


def test_sequence_loss_clips_whole_sequences():
    ratio_BT = losses.sequence_log_ratio_BT(GSPO_LOGP_BT, jnp.zeros((2, 6)), GSPO_ACTION_BT, GSPO_SEGMENT_BT, 2)
    _, is_clipped_BT = losses.clipped_loss_BT(ratio_BT, jnp.ones((2, 6)), 0.2, 0.2)
    # exp(0.3) = 1.35 is clipped at both of its tokens; exp(0.1) = 1.105 is not
    np.testing.assert_array_equal(is_clipped_BT, [[True, True] + [False] * 4, [False] * 6])


@pytest.mark.parametrize(
    "kind, value, gradient",
    [
        ("k1", -0.693147, 1.0),  # logp - ref
        ("k2", 0.240227, -0.693147),  # 0.693147^2 / 2;  logp - ref
        ("k3", 0.306853, -1.0),  # 2 - 0.693147 - 1;  1 - 2
    ],
)
def test_kl_estimators(kind, value, gradient):
    # The reference gives the token twice the policy's probability; at the second token both agree.
    logp_BT, ref_BT = jnp.array([[-2.0, -1.0]]), jnp.array([[-2.0 + LN2, -1.0]])
    np.testing.assert_allclose(losses.kl_BT(logp_BT, ref_BT, kind), [[value, 0.0]], rtol=1e-5)
    logp_grad, ref_grad = jax.grad(lambda *args: losses.kl_BT(*args, kind)[0, 0], argnums=(0, 1))(logp_BT, ref_BT)
    np.testing.assert_allclose(logp_grad, [[gradient, 0.0]], rtol=1e-5)
    np.testing.assert_array_equal(ref_grad, [[0.0, 0.0]])


def test_k3_is_held_above_an_exponent_of_20():
    far_BT = jnp.array([[-100.0]])
    value, gradient = jax.value_and_grad(lambda x: losses.kl_BT(x, jnp.zeros((1, 1)), "k3")[0, 0])(far_BT)
    # exp(20) - 20 - 1 = 485165195 - 21
    np.testing.assert_allclose(value, 485165174.0, rtol=1e-5)
    assert float(gradient[0, 0]) == 0.0
    # On the other side nothing is held: exp(-100) + 100 - 1
    np.testing.assert_allclose(losses.kl_BT(jnp.array([[100.0]]), jnp.zeros((1, 1)), "k3"), [[99.0]], rtol=1e-6)


def test_unknown_kl_lists_the_choices():
    with pytest.raises(ValueError, match="'k4'.*k1, k2, k3"):
        losses.kl_BT(LOGP_1T, OLD_1T, "k4")


def test_the_kl_of_a_choice_between_two_words_by_hand():
    """0.8 log(0.8 / 0.5) + 0.2 log(0.2 / 0.5) = 0.19274; in log p, its derivative is p times the
    difference of both logarithms."""
    logp_BT, ref_BT = jnp.log(jnp.array([[0.8, 0.5]])), jnp.log(jnp.array([[0.5, 0.5]]))
    np.testing.assert_allclose(losses.two_word_kl_BT(logp_BT, ref_BT), [[0.192745, 0.0]], rtol=1e-5, atol=1e-7)
    own, reference = jax.grad(lambda *args: losses.two_word_kl_BT(*args)[0, 0], argnums=(0, 1))(logp_BT, ref_BT)
    np.testing.assert_allclose(own, [[0.8 * np.log(4.0), 0.0]], rtol=1e-5)
    np.testing.assert_array_equal(reference, 0.0)


def test_a_word_that_is_certain_has_a_finite_kl():
    for logit in (-200.0, 40.0, 200.0):
        def loss(x):
            return losses.two_word_kl_BT(jax.nn.log_sigmoid(x), jnp.log(jnp.full((1, 1), 0.5)))[0, 0]

        value, gradient = jax.value_and_grad(loss)(jnp.full((1, 1), logit))
        assert value == pytest.approx(np.log(2), rel=1e-5) and np.isfinite(gradient).all()


def test_truncated_importance_weights():
    old_BT, sampler_BT = jnp.array([[-1.0, -1.0, 0.0]]), jnp.array([[-1.0 - LN2, -1.0 + LN2, -200.0]])
    # exp(ln 2) = 2;  exp(-ln 2) = 1/2;  exp(200) is beyond float32 and capped
    weight_BT = losses.truncated_importance_BT(old_BT, sampler_BT, cap=3.0)
    np.testing.assert_allclose(weight_BT, [[2.0, 0.5, 3.0]], rtol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(losses.truncated_importance_BT(x, sampler_BT, 3.0)))(old_BT)
    np.testing.assert_array_equal(gradient, [[0.0, 0.0, 0.0]])


# three tokens, one token, none (masked for its length)
IS_ACTION_BT = np.array([[0, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], bool)


@pytest.mark.parametrize(
    "kind, first, second",
    [
        ("token_mean", 1 / 4, 1 / 4),
        ("seq_mean", 1 / 6, 1 / 2),  # two sequences that count: 1/(2 * 3), 1/(2 * 1)
        ("seq_sum_norm", 1 / 16, 1 / 16),  # 1/(2 * 8)
    ],
)
def test_token_weights(kind, first, second):
    weight_BT = losses.token_weights_BT(IS_ACTION_BT, kind, max_length=8)
    expected = [[0, first, first, first], [second, 0, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(weight_BT, expected, rtol=1e-6)
    assert weight_BT.dtype == np.float32


def test_aggregations_of_one_batch():
    # Token losses 1, 2, 3 and 10.  (1 + 2 + 3 + 10) / 4 = 4;  (2 + 10) / 2 = 6;  16 / (2 * 8) = 1
    loss_BT = np.array([[7, 1, 2, 3], [10, 7, 7, 7], [7, 7, 7, 7]], np.float32)
    for kind, expected in [("token_mean", 4.0), ("seq_mean", 6.0), ("seq_sum_norm", 1.0)]:
        assert np.sum(losses.token_weights_BT(IS_ACTION_BT, kind, 8) * loss_BT) == pytest.approx(expected)


@pytest.mark.parametrize("kind", losses.WEIGHT_KINDS)
def test_a_batch_without_actions_weighs_nothing(kind):
    np.testing.assert_array_equal(losses.token_weights_BT(np.zeros((2, 3), bool), kind, 8), np.zeros((2, 3)))


def test_token_weights_refuse():
    with pytest.raises(ValueError, match="'mean'.*token_mean, seq_mean, seq_sum_norm"):
        losses.token_weights_BT(IS_ACTION_BT, "mean", 8)
    with pytest.raises(ValueError, match="max_length, which is 0"):
        losses.token_weights_BT(IS_ACTION_BT, "seq_sum_norm", 0)


def test_misshapen_input_is_refused():
    with pytest.raises(AssertionError):
        policy_loss_BT(LOGP_1T, OLD_1T[:, :3], jnp.ones((1, 4)), 0.2, 0.2)
    with pytest.raises(AssertionError):
        losses.kl_BT(LOGP_1T[0], OLD_1T[0], "k3")
