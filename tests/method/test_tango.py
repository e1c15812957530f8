"""The two published turns, worked by hand."""

import dataclasses

import numpy as np
import pytest

from support.turns import settings, solution, turn_of, verification
from tango_jax.method import tango
from tango_jax.method.rewards import graded
from tango_jax.records import Memory


def solutions(*grades: bool):
    """Of two steps, which end at tokens 1 and 3."""
    return [solution(grade, tokens=5, steps=("a", "b"), step_ends=(1, 3)) for grade in grades]


def test_the_generators_advantages_are_those_of_outcome_and_steps_each_normalised_before():
    said = {"generator": solutions(True, False, False, False),
            "verifier": [verification(judgements=pair) for pair in
                         ((True, True), (True, True), (True, False), (True, True),
                          (False, False), (False, False), (False, False), (True, True))]}
    config = settings(2, 2, alpha_schedule="none", alpha_initial=0.25, verifications_per_solution=2)
    t = turn_of(config, "generator", said)
    lesson = tango.solve(t)
    assert [name for name, _ in t._work.asked] == ["generator", "verifier"] and len(t.sampled[1]) == 8
    (outcome_weight, outcome_BT), (steps_weight, steps_BT) = lesson.terms["outcome"], lesson.terms["steps"]
    assert (outcome_weight, steps_weight) == (0.75, 0.25)
    # Rewards 1 and 0 have mean 1/2 and sample deviation 1/sqrt(2); 0 and 0 teach nothing.
    np.testing.assert_allclose(outcome_BT, np.repeat([[0.5], [-0.5], [0], [0]], 5, axis=1) * np.sqrt(2), rtol=1e-4)
    # Elements of steps, +-1/2. First group: of the first verification of each solution 1/2 1/2 1/2 -1/2, with mean 1/4
    # and deviation 1/2; of the second 1/2 1/2 1/2 1/2, which differ in nothing. Second group: all -1/2, in nothing; and
    # -1/2 -1/2 1/2 1/2, with mean 0 and deviation 1/sqrt(3). A token gets the sum of those still to come, and the two
    # verifications are averaged.
    first = np.array([[1, 1, 0.5, 0.5, 0], [-1, -1, -1.5, -1.5, 0]]) / 2
    size = np.sqrt(3) / 2
    second = np.array([[-2, -2, -1, -1, 0], [2, 2, 1, 1, 0]]) * size / 2
    np.testing.assert_allclose(steps_BT, [*first, *second], rtol=1e-4, atol=1e-6)
    assert [one.of_steps for one in lesson.step_rewards] == [
        [(0.5, 0.5), (0.5, -0.5), (-0.5, -0.5), (-0.5, -0.5)], [(0.5, 0.5), (0.5, 0.5), (-0.5, -0.5), (0.5, 0.5)]]
    assert lesson.metrics == {"generator/alpha": 0.25, "generator/reward/step": pytest.approx(1 / 8),
                              "generator/step_rewarded_share": 1.0,
                              "generator/steps_approved": 9 / 16}
    assert lesson.memory is None


def test_steps_are_rewarded_by_probabilities():
    """Two verifications of each of two solutions; the last is misaligned, so it gives no step rewards."""
    p_steps = [(0.75, 1.0), (0.5, 0.25), (0.25, 0.75), ()]
    # What was written need not be the likelier word.
    judged = [dataclasses.replace(verification(judgements=(True, False)), p_steps=p) for p in p_steps]
    judged[3] = dataclasses.replace(judged[3], judgements=(True,), is_aligned=False)
    config = settings(1, 2, alpha_schedule="none", alpha_initial=0.25, verifications_per_solution=2,
                      step_reward="probability")
    lesson = tango.solve(turn_of(config, "generator", {"generator": solutions(True, False), "verifier": judged}))
    assert [one.of_steps for one in lesson.step_rewards] == [[(0.25, 0.5), (-0.25, 0.25)], [(0.0, -0.25), None]]
    np.testing.assert_array_equal(lesson.step_rewards[0].y_BT, [[0, 0.5, 0, 1, 0], [0, -0.5, 0, 0.5, 0]])
    # First verifications: 1/4 1/2 -1/4 1/4 with mean 3/16; second: 0 -1/4 with mean -1/8.
    first = np.array([1, 5, -7, 1]) / 16
    first, second = first / np.std(first, ddof=1), np.sqrt(np.array([0.5, 0.5])) * [1, -1]
    a, b = first[:2], first[2:]
    expected = [[(a.sum() + second.sum()) / 2] * 2 + [(a[1] + second[1]) / 2] * 2 + [0],
                [b.sum() / 2] * 2 + [b[1] / 2] * 2 + [0]]
    np.testing.assert_allclose(lesson.terms["steps"][1], expected, rtol=1e-4, atol=1e-6)
    # P(CORRECT) is above one half in 3 of the 6 rewarded steps; the reward's mean is over verifications and solutions.
    assert lesson.metrics["generator/steps_approved"] == 3 / 6
    assert lesson.metrics["generator/reward/step"] == pytest.approx((0.75 + 0 - 0.25 + 0) / 4)


def test_steps_after_the_first_error_have_no_reward():
    """A verifier that stopped at the first of two steps, and one that approved both."""
    judged = [verification("INCORRECT", (False, None)), verification(judgements=(True, True))]
    config = settings(1, 2, alpha_schedule="none", alpha_initial=0.25)
    lesson = tango.solve(turn_of(config, "generator", {"generator": solutions(False, True), "verifier": judged}))
    [steps] = lesson.step_rewards
    assert steps.of_steps == [(-0.5, None), (0.5, 0.5)] and steps.y_BT is None
    # Elements -1/2, 1/2, 1/2 with mean 1/6 and deviation 1/sqrt(3); tokens after the error get 0.
    np.testing.assert_allclose(lesson.terms["steps"][1] / np.sqrt(3), [
        [-2 / 3, -2 / 3, 0, 0, 0], [2 / 3, 2 / 3, 1 / 3, 1 / 3, 0]], rtol=1e-4, atol=1e-6)
    assert lesson.metrics["generator/steps_approved"] == pytest.approx(2 / 3)  # of three steps with a reward
    config.generator.loss.step_norm = "first_error"
    lesson = tango.solve(turn_of(config, "generator", {"generator": solutions(False, True), "verifier": judged}))
    # Shares of all steps before the error: 0 and 1, with mean 1/2 and deviation 1/sqrt(2).
    np.testing.assert_allclose(lesson.terms["steps"][1] / np.sqrt(2), [
        [-1, -1, 0, 0, 0], [0.5, 0.5, 0.5, 0.5, 0]], rtol=1e-4, atol=1e-6)


def test_probabilities_of_an_own_verification_must_be_given():
    config = settings(1, 1, step_reward="probability")
    said = {"generator": solutions(True), "verifier": [verification(judgements=(True, True))]}
    t = turn_of(config, "generator", said)
    with pytest.raises(ValueError, match=r"needs P\(CORRECT\) of each judgement, and a verification has 0 of 2"):
        tango.solve(t)


def test_the_verifiers_rare_grades_weigh_more():
    """Three of four solutions are wrong; the right one's verifications weigh sqrt(3) times the others."""
    said = {"generator": solutions(True, False, False, False),
            "verifier": [verification(verdict) for verdict in ("CORRECT", "INCORRECT") * 4]}
    t = turn_of(settings(4, 2), "verifier", said, phase="warmup")
    lesson = tango.judge(t)
    assert t.draws == {"verifier": 1} and [parent.id for parent in t._work.asked[0][1]] == ["0", "1", "2", "3"]
    # 1 + 0.8 x format where the verdict agrees, and the format score alone where not.
    np.testing.assert_allclose(lesson.reward.reward_B, [1.8, 0.8, 0.8, 1.8, 0.8, 1.8, 0.8, 1.8], rtol=1e-6)
    [(weight_B, adv_BT)] = lesson.terms.values()
    assert lesson.memory == t.memory.replace(label_counts=(6.0, 2.0))
    np.testing.assert_allclose(weight_B[:2] / weight_B[2:4], np.sqrt(3), rtol=1e-5)
    assert np.mean(weight_B) == pytest.approx(1.0)
    np.testing.assert_allclose(adv_BT[:2, 0], [0.5 * np.sqrt(2), -0.5 * np.sqrt(2)], rtol=1e-4)
    np.testing.assert_array_equal(adv_BT[:, 2:], 0)  # responses have two tokens
    assert lesson.metrics["verifier/solutions_correct"] == 0.25

    later = turn_of(settings(4, 2), "verifier", said, memory=Memory(label_counts=(2.0, 2.0)))
    decay = tango.LABEL_COUNT_DECAY
    assert tango.judge(later).memory.label_counts == pytest.approx((2 * decay + 6 * (1 - decay), 2.0))


@pytest.mark.parametrize("batches", [1, 2])
def test_labels_of_the_reward_are_on_the_responses_that_are_trained_on(batches):
    """With one batch, and with dynamic sampling."""
    t = turn_of(settings(1, 2, dynamic_sampling=batches - 1), "generator",
                {"generator": [solution(True), solution(False)] * batches})

    def labelled(t, responses):
        return graded(t, t.labelled(responses, [not one.is_correct for one in responses]))

    _, rewarded_fn = t.until_full_later(lambda problems: t.sample("generator", problems, 2), labelled)
    responses, reward = rewarded_fn()
    assert [one.label for one in responses] == [False, True] and reward.reward_B.tolist() == [0, 1]
