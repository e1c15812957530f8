"""Second tries, second judgements and a teacher that sees the answer: rewards and advantages, worked by hand."""

import numpy as np
import pytest

from support.turns import PROBLEM, responses_of, rollout_of, settings, solution, turn_of, verification
from tango_jax.method import tango
from tango_jax.method.relatives import (
    MAX_NATS,
    judge_and_be_judged,
    judge_informed,
    second_try_reward,
    solve_twice,
    twice_judged_reward,
)
from tango_jax.method.turn import joined
from tango_jax.records import Problem, Rewards
from tango_jax.rl.own_reward import OwnReward
from tango_jax.runtime.user_code import UserFunction


def second_try_turn(first: list[bool], tried: dict[int, bool], own_rewards=(), **rl):
    """Solutions of groups of two, all judged, and second tries of some of them, by their places."""
    said = {"generator": [solution(is_correct) for is_correct in first],
            "verifier": [verification("INCORRECT" if b in tried else "CORRECT") for b in range(len(first))],
            "second_try": [solution(tried[place], tokens=3) for place in sorted(tried)]}
    return turn_of(settings(len(first) // 2, 2, **rl), "generator", said, own_rewards=own_rewards)


def test_a_second_try_is_rewarded_for_what_it_improves():
    # Grades of four solutions: wrong, right, wrong, wrong; tried again are 0 (then right), 1 (then wrong), 3 (wrong).
    t = second_try_turn([False, True, False, False], {0: True, 1: False, 3: False}, outcome_weight=1.0,
                        format_weight=0.25)
    rewards = solve_twice(t).reward
    # First tries: the grade + 0.25; second: the same + 0.5 (+1, -1, 0).
    np.testing.assert_allclose(rewards.reward_B, [0.25, 1.25, 0.25, 0.25, 1.75, -0.25, 0.25], rtol=1e-6)
    total = sum(np.broadcast_to(term.weight, 7) * term.value for term in rewards.terms)
    np.testing.assert_allclose(total, rewards.reward_B, rtol=1e-6)
    assert t._work.asked[2] == ("second_try", [t.sampled[1][b] for b in (0, 1, 3)])


def test_nothing_rejected_is_nothing_tried_again():
    t = second_try_turn([False, True], {})
    lesson = solve_twice(t)
    assert len(lesson.reward.reward_B) == 2 and len(t.sampled[2]) == 0
    [(weight, adv_BT)] = lesson.terms.values()
    # Two rewards, 0 and 1: mean 0.5, sample deviation 0.7071.
    assert weight == 1.0
    np.testing.assert_allclose(adv_BT[:, 0], [-0.7071, 0.7071], atol=1e-4)
    assert lesson.reward.metrics["second_try/share"] == 0
    assert lesson.reward.metrics["second_try/final_accuracy"] == 0.5


def test_batches_with_and_without_second_tries_are_chosen_from_alike():
    """Of two batches of dynamic sampling, one is all accepted, and one has a rejected solution."""
    said = {"generator": [solution(False), solution(False), solution(False), solution(True)],
            "verifier": [verification(), verification(), verification("INCORRECT"), verification()],
            "second_try": [solution(True)]}
    lesson = solve_twice(turn_of(settings(1, 2, dynamic_sampling=1, outcome_weight=1.0, format_weight=0.0),
                                 "generator", said))
    np.testing.assert_allclose(lesson.reward.reward_B, [0, 1, 1.5])
    assert [term.name for term in lesson.reward.terms][-1] == "improvement"


def test_without_the_weight_of_the_grade_nothing_of_it_is_left():
    t = second_try_turn([False, True, False, False], {0: True, 1: False, 3: False}, outcome_weight=0.0,
                        format_weight=0.0)
    assert not solve_twice(t).reward.reward_B.any()


def test_one_group_holds_both_tries():
    t = second_try_turn([False, True, False, False], {0: True, 1: False, 3: False})
    lesson = solve_twice(t)
    reward = Rewards(np.array([0, 1, 0, 0, 2, -1, 1], np.float32), {})
    adv_BT = t.algorithm.outcome(reward, lesson.responses)
    # Group 0: 0, 1 and then 2, -1: mean 0.5, deviation sqrt(5 / 3). Group 1: 0, 0, 1: mean 1/3, deviation sqrt(1/3).
    deviations = np.sqrt(5 / 3), np.sqrt(1 / 3)
    expected = [-0.5 / deviations[0], 0.5 / deviations[0], -1 / 3 / deviations[1], -1 / 3 / deviations[1],
                1.5 / deviations[0], -1.5 / deviations[0], 2 / 3 / deviations[1]]
    np.testing.assert_allclose(adv_BT[:, 1], expected, rtol=1e-4)
    np.testing.assert_array_equal(adv_BT[:4, 2], 0)  # first tries have two tokens
    np.testing.assert_allclose(adv_BT[4:, 2], expected[4:], rtol=1e-4)
    # Of four solutions three are tried again: one is mended, one broken; one of four is right in the end, as before.
    assert {name: value for name, value in lesson.reward.metrics.items() if name.startswith("second_try/")} == {
        "second_try/share": 0.75, "second_try/mended": 0.25, "second_try/broken": 0.25,
        "second_try/final_accuracy": 0.25}


def test_an_algorithm_that_compares_all_groups_takes_none_of_different_sizes():
    config = settings(1, 2)
    config.generator.loss.algorithm = "reinforce_pp"
    t = turn_of(config, "generator", {"generator": [solution(False)] * 2, "verifier": [verification("INCORRECT")] * 2,
                                      "second_try": [solution()] * 2})
    with pytest.raises(ValueError, match="of different sizes, and generator.loss.algorithm=reinforce_pp cannot"):
        solve_twice(t)


def test_both_tries_are_one_batch_with_their_own_prompts():
    problems = [PROBLEM, Problem("other", "q", "b")]
    first = responses_of("generator", problems, 2, [solution(b == 1) for b in range(4)])
    judged = responses_of("verifier", first, 1, [verification("INCORRECT")] * 4)
    second = responses_of("generator", [judged[0], judged[3]], 1, [solution(tokens=3)] * 2, "second_try")
    first = first.replace(prompts=[[10], [11]])
    second = second.replace(prompts=[[20], [23]], rollout=rollout_of([3, 3], first=50))
    both = joined([first, second], most_prompts=8)
    assert both.prompts == [[10], [10], [11], [11], [20], [23]] and both.group_size == 1
    assert [int(tokens[0]) for tokens in both.rollout.tokens] == [1, 2, 3, 4, 50, 51]
    assert both.most_prompts == 8 and len(both.records) == 6  # its arrays have room for a second try of each
    assert [rows.tolist() for rows in both.groups()] == [[0, 1, 4], [2, 3, 5]]
    assert [one.after for one in both] == [None] * 4 + [judged[0], judged[3]]


def test_a_reward_of_ones_own_counts_for_both_tries():
    function = UserFunction("generator.rewards", "own.py:f", lambda one: 3.0 if one.is_correct else 1.0)
    own = (OwnReward("generator", function),)
    t = second_try_turn([False, True], {0: True}, own)
    lesson = solve_twice(t)
    usual = second_try_reward(t, lesson.responses)
    np.testing.assert_allclose(lesson.reward.reward_B - usual.reward_B, [1.0, 3.0, 3.0], rtol=1e-6)
    assert lesson.reward.metrics["generator/reward/own/f"] == 2.0  # of first tries, as all rewards
    assert len(solve_twice(second_try_turn([False, True], {}, own)).reward.reward_B) == 2  # nothing was rejected


SAID_OF_TWO = [verification("CORRECT", (True, True), 0.5), verification("INCORRECT", (True, True)),
               verification("INCORRECT", (True, False)), verification("INCORRECT", (True, False), 0.8)]
RATED = [verification(judgements=(True, False)), verification(judgements=(True, True)),
         verification(judgements=(True,), is_aligned=False), verification(judgements=(True, True))]


def test_the_verifiers_reward_is_format_times_verdict_times_quality():
    said = {"generator": [solution(True), solution(False)], "verifier": SAID_OF_TWO, "second_judgement": RATED}
    t = turn_of(settings(2, 2), "verifier", said)
    rewards = judge_and_be_judged(t).reward
    # 0.5 x 1 x 1/2; a wrong verdict, 0; judged without alignment, 0; 0.8 x 1 x 1.
    np.testing.assert_allclose(rewards.reward_B, [0.25, 0.0, 0.0, 0.8], rtol=1e-6)
    # Qualities 1/2, 1, 0, 1; verdicts right for all but the second.
    assert rewards.metrics["second_judgement/separation"] == pytest.approx(0.5 - 1.0)
    assert t.sampled[2][3].of is t.sampled[1][3] and t.sampled[2][3].of.of is t.sampled[0][1]

    all_right = responses_of("verifier", t.sampled[0], 2, [SAID_OF_TWO[place] for place in (0, 0, 2, 3)])
    metrics = twice_judged_reward(t, all_right, t.sampled[2]).metrics
    assert "second_judgement/separation" not in metrics  # there is nothing to tell apart


def test_the_informed_verifier_moves_every_token():
    lengths = (2, 3, 1, 2)
    verdicts = ("CORRECT", "INCORRECT", "CORRECT", "INCORRECT")
    said = {"generator": [solution(True), solution(False)],
            "verifier": [verification(verdict, tokens=n) for verdict, n in zip(verdicts, lengths, strict=True)]}
    is_action_BT = np.arange(5)[None] < np.array(lengths)[:, None]
    teacher_logp_BT = np.where(is_action_BT, -0.5, 0.0).astype(np.float32)
    teacher_logp_BT[0, 1], teacher_logp_BT[1, 2] = -0.1, -20.0  # it agrees more with one token, and objects to another

    def lesson_of(turn_fn):
        t = turn_of(settings(2, 2), "verifier", said, reference_fn=lambda _: teacher_logp_BT)
        return turn_fn(t)

    def total(lesson):
        return sum(np.reshape(weight, (-1, 1)) * adv_BT for weight, adv_BT in lesson.terms.values())

    informed, plain = lesson_of(judge_informed), lesson_of(tango.judge)
    expected_BT = np.zeros((4, 5), np.float32)
    expected_BT[0, 1], expected_BT[1, 2] = 0.5 * 0.4, -0.5 * MAX_NATS
    np.testing.assert_allclose(total(informed) - total(plain), expected_BT, atol=1e-6)
    assert informed.metrics["verifier/teacher_kl"] == pytest.approx((MAX_NATS - 0.4) / 8)
    assert informed.metrics["verifier/teacher_objects"] == pytest.approx(1 / 8)
    assert informed.memory == plain.memory
    assert informed.metrics["verifier/teacher_silent"] == 0

    teacher_logp_BT[1] = np.nan  # no room for that solution: the row that was objected to is left to its verdict
    silent = lesson_of(judge_informed)
    expected_BT[1] = 0
    np.testing.assert_allclose(total(silent) - total(plain), expected_BT, atol=1e-6)
    assert silent.metrics["verifier/teacher_silent"] == pytest.approx(3 / 8)
    assert silent.metrics["verifier/teacher_kl"] == pytest.approx(-0.4 / 5)  # of the tokens that the teacher scored
