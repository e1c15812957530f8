"""Second tries, second judgements and a teacher that sees the answer: rewards, credits and prompts, worked by hand."""

import dataclasses

import numpy as np
import pytest

from support.update_cases import IS_ACTION_BN, LENGTHS, MODEL, PARAMS, PROMPTS, RESPONSES, plain_logps, tiny_role
from tango_jax.config import default_config
from tango_jax.records import Counters, Judged, Problem, Responses, Rollout, Solution, Verification
from tango_jax.rl import informed
from tango_jax.rl.credit import TurnSoFar, class_balanced_credit
from tango_jax.rl.family import (
    MAX_NATS,
    informed_credit,
    joined,
    second_try_credit,
    second_try_reward,
    twice_judged_reward,
)
from tango_jax.rl.labels import rejected
from tango_jax.rl.own_reward import OwnReward, with_own_reward
from tango_jax.rl.policy import make_policy
from tango_jax.rl.schedule import Turn
from tango_jax.runtime.user_code import UserFunction
from tango_jax.text.tokenizer import Tokenizer
from tango_jax.weights.source import Source

PROBLEM = Problem("p", "q", "b")


def rollout_of(lengths: list[int], first: int = 1) -> Rollout:
    return Rollout(
        tokens=tuple(np.full(length, first + b, np.int32) for b, length in enumerate(lengths)),
        logps=tuple(np.full(length, -0.5, np.float32) for length in lengths),
        is_truncated_B=np.zeros(len(lengths), bool), decode_steps=max(lengths), row_steps=sum(lengths),
    )  # fmt: skip


def solution(is_correct: bool, format_score: float = 1.0) -> Solution:
    return Solution(PROBLEM, "t", ("s",), (0,), format_score, is_correct, None)


def verification(verdict: str = "CORRECT", judgements=(True,), format_score: float = 1.0, is_aligned=True):
    return Verification("v", judgements, verdict, format_score, is_aligned, ("b",) * len(judgements))


def answers_of(first: list[bool], tried: dict[int, bool], group_size: int = 2) -> dict[str, Responses]:
    """Solutions of groups of two, all judged, and second tries of some of them, by their places."""
    solutions = [solution(is_correct) for is_correct in first]
    problems = [PROBLEM] * (len(first) // group_size)
    prompts = [[10 + p] for p in range(len(problems))]
    solved = Responses("generator", problems, prompts, group_size, rollout_of([2] * len(first)), solutions, {})
    said = [verification("INCORRECT" if b in tried else "CORRECT") for b in range(len(first))]
    judged = Responses("verifier", solutions, [[5]] * len(first), 1, rollout_of([3] * len(first)), said, {})
    answers = {"generator": solved, "verifier": judged}
    if tried:
        places = rejected(judged, 1)
        assert list(places) == sorted(tried)
        answers["second_solution"] = Responses(
            "generator", [judged.next_parents[place] for place in places], [[20 + int(place)] for place in places], 1,
            rollout_of([3] * len(tried), first=50), [solution(tried[place]) for place in places], {}, places,
        )  # fmt: skip
    return answers


def so_far_of(answers: dict, reward_B: np.ndarray, is_action_BT: np.ndarray, role: str = "generator", **settings):
    config = default_config()
    for name, value in settings.items():
        config.rl[name] = value
    return TurnSoFar(config, Turn(0, role, role, 0), answers, reward_B, is_action_BT, Counters(),
                     teacher_logp_BT=None)  # fmt: skip


def test_a_second_try_is_rewarded_for_what_it_improves():
    # Grades of four solutions: wrong, right, wrong, wrong; tried again are 0 (then right), 1 (then wrong), 3 (wrong).
    answers, rl = answers_of([False, True, False, False], {0: True, 1: False, 3: False}), default_config().rl
    rl.outcome_weight, rl.format_weight, rl.improvement_weight = 1.0, 0.25, 0.5
    rewards = second_try_reward(answers, rl)
    # First tries: the grade + 0.25; second: the same + 0.5 (+1, -1, 0).
    np.testing.assert_allclose(rewards.reward_B, [0.25, 1.25, 0.25, 0.25, 1.75, -0.25, 0.25], rtol=1e-6)
    total = sum(np.broadcast_to(term.weight, 7) * term.value for term in rewards.terms)
    np.testing.assert_allclose(total, rewards.reward_B, rtol=1e-6)


def test_nothing_rejected_is_nothing_tried_again():
    answers = answers_of([False, True], {})
    rewards = second_try_reward(answers, default_config().rl)
    assert len(rewards.reward_B) == 2
    is_action_BT = np.ones((2, 3), bool)
    credit = second_try_credit(so_far_of(answers, np.array([0.0, 1.0], np.float32), is_action_BT))
    # Two rewards, 0 and 1: mean 0.5, sample deviation 0.7071.
    np.testing.assert_allclose(credit.adv_BT[:, 0], [-0.7071, 0.7071], atol=1e-4)
    assert credit.metrics["second_solution/share"] == 0 and credit.metrics["second_solution/final_accuracy"] == 0.5


def test_one_group_holds_both_tries():
    answers = answers_of([False, True, False, False], {0: True, 1: False, 3: False})
    reward_B = np.array([0, 1, 0, 0, 2, -1, 1], np.float32)
    is_action_BT = np.ones((7, 3), bool)
    is_action_BT[:4, 2] = False  # first tries have two tokens
    credit = second_try_credit(so_far_of(answers, reward_B, is_action_BT))
    # Group 0: 0, 1 and then 2, -1: mean 0.5, deviation sqrt(5 / 3). Group 1: 0, 0, 1: mean 1/3, deviation sqrt(1/3).
    deviations = np.sqrt(5 / 3), np.sqrt(1 / 3)
    expected = [-0.5 / deviations[0], 0.5 / deviations[0], -1 / 3 / deviations[1], -1 / 3 / deviations[1],
                1.5 / deviations[0], -1.5 / deviations[0], 2 / 3 / deviations[1]]  # fmt: skip
    np.testing.assert_allclose(credit.adv_BT[:, 1], expected, rtol=1e-4)
    np.testing.assert_array_equal(credit.adv_BT[:4, 2], 0)
    # Of four solutions three are tried again: one is mended, one broken; one of four is right in the end, as before.
    assert {name: value for name, value in credit.metrics.items() if name.startswith("second_solution/")} == {
        "second_solution/share": 0.75, "second_solution/mended": 0.25, "second_solution/broken": 0.25,
        "second_solution/final_accuracy": 0.25}  # fmt: skip


def test_both_tries_are_one_batch_with_their_own_prompts():
    answers = answers_of([False, True, False, False], {0: True, 3: False})
    both = joined(answers, ("generator", "second_solution"))
    assert both.prompts == [[10], [10], [11], [11], [20], [23]] and both.group_size == 1
    assert [int(tokens[0]) for tokens in both.rollout.tokens] == [1, 2, 3, 4, 50, 51]
    assert both.most_prompts == 8 and len(both.records) == 6  # its arrays have room for a second try of each
    assert joined(answers, ("generator",)) is answers["generator"]


def test_a_reward_of_ones_own_counts_for_both_tries():
    answers, rl = answers_of([False, True], {0: True}), default_config().rl
    own = OwnReward("generator", UserFunction("generator.reward", "f", lambda one: 3.0 if one.is_correct else 1.0))
    usual = second_try_reward(answers, rl)
    both = with_own_reward(second_try_reward, own, ("generator", "second_solution"))
    np.testing.assert_allclose(both(answers, rl).reward_B - usual.reward_B, [1.0, 3.0, 3.0], rtol=1e-6)
    del answers["second_solution"]  # nothing was rejected
    assert len(both(answers, rl).reward_B) == 2


def test_the_verifiers_reward_is_format_times_verdict_times_quality():
    solutions = [solution(True), solution(False)]
    said = [verification("CORRECT", (True, True), 0.5), verification("INCORRECT", (True, True)),
            verification("INCORRECT", (True, False)), verification("INCORRECT", (True, False), 0.8)]  # fmt: skip
    judged = Responses("verifier", solutions, [[1], [2]], 2, rollout_of([2] * 4), said, {})
    rated = [verification(judgements=(True, False)), verification(judgements=(True, True)),
             verification(judgements=(True,), is_aligned=False), verification(judgements=(True, True))]  # fmt: skip
    again = Responses("verifier", judged.next_parents, [[3]] * 4, 1, rollout_of([2] * 4), rated, {})
    rewards = twice_judged_reward({"verifier": judged, "second_judgement": again}, default_config().rl)
    # 0.5 x 1 x 1/2; a wrong verdict, 0; judged without alignment, 0; 0.8 x 1 x 1.
    np.testing.assert_allclose(rewards.reward_B, [0.25, 0.0, 0.0, 0.8], rtol=1e-6)
    # Qualities 1/2, 1, 0, 1; verdicts right for all but the second.
    assert rewards.metrics["second_judgement/separation"] == pytest.approx(0.5 - 1.0)
    assert again.parents[3] == Judged(solutions[1], said[3])

    all_right = dataclasses.replace(judged, records=[said[0], said[0], said[2], said[3]])
    metrics = twice_judged_reward({"verifier": all_right, "second_judgement": again}, default_config().rl).metrics
    assert "second_judgement/separation" not in metrics  # there is nothing to tell apart


def test_the_informed_verifier_moves_every_token():
    solutions = [solution(True), solution(False)]
    said = [verification(verdict) for verdict in ("CORRECT", "INCORRECT", "CORRECT", "INCORRECT")]
    judged = Responses("verifier", solutions, [[1], [2]], 2, rollout_of([2, 3, 1, 2]), said, {})
    is_action_BT = np.arange(3)[None] < np.array([[2], [3], [1], [2]])
    so_far = so_far_of({"verifier": judged}, np.array([1, 0, 0, 1], np.float32), is_action_BT, "verifier",
                       teacher_weight=0.25)  # fmt: skip
    teacher_logp_BT = np.where(is_action_BT, -0.5, 0.0).astype(np.float32)
    teacher_logp_BT[0, 1], teacher_logp_BT[1, 2] = -0.1, -20.0  # it agrees more with one token, and objects to another
    credit = informed_credit(so_far._replace(teacher_logp_BT=teacher_logp_BT))
    plain = class_balanced_credit(so_far)
    difference_BT = credit.adv_BT - plain.adv_BT
    expected_BT = np.zeros((4, 3), np.float32)
    expected_BT[0, 1], expected_BT[1, 2] = 0.25 * 0.4, -0.25 * MAX_NATS
    np.testing.assert_allclose(difference_BT, expected_BT, atol=1e-6)
    assert credit.metrics["verifier/teacher_kl"] == pytest.approx((MAX_NATS - 0.4) / 8)
    assert credit.metrics["verifier/teacher_objects"] == pytest.approx(1 / 8)
    assert credit.counters == plain.counters
    assert credit.metrics["verifier/teacher_silent"] == 0

    teacher_logp_BT[1] = np.nan  # no room for that solution: the row that was objected to is left to its verdict
    silent = informed_credit(so_far._replace(teacher_logp_BT=teacher_logp_BT))
    expected_BT[1] = 0
    np.testing.assert_allclose(silent.adv_BT - plain.adv_BT, expected_BT, atol=1e-6)
    assert silent.metrics["verifier/teacher_silent"] == pytest.approx(3 / 8)


@pytest.mark.parametrize("shares, minibatches, mesh", [
    (True, 1, {"fsdp": 1}), (False, 3, {"fsdp": 1}), (True, 1, {"data": 2, "fsdp": 2})])  # fmt: skip
def test_the_teacher_scores_the_same_tokens_under_its_own_prompt(monkeypatch, shares, minibatches, mesh):
    """However they are packed and laid out: as the plain forward pass scores them."""
    config = tiny_role()
    config.share_prompts, config.loss.minibatches = shares, minibatches
    config.mesh.update(mesh)
    tokenizer = Tokenizer(lambda text: [], (b"",) * 20, (), (0,))
    policy = make_policy("verifier", config, Source("", MODEL, tokenizer, None, lambda folder: None, {}))
    rollout = Rollout(tuple(RESPONSES), tuple(np.zeros(n, np.float32) for n in LENGTHS), np.zeros(6, bool), 6, 36)
    learner = Responses("verifier", [None] * 3, [[1], [2], [3]], 2, rollout, [], {})
    monkeypatch.setattr(informed, "informed_prompts", lambda policy, parents: [(ids, False) for ids in PROMPTS])
    scores_BT = informed.teacher_scores("informed", policy, lambda: PARAMS, learner, IS_ACTION_BN)
    np.testing.assert_allclose(scores_BT, plain_logps(PARAMS)[1], atol=2e-5)
    cut = [(ids, place == 1) for place, ids in enumerate(PROMPTS)]
    monkeypatch.setattr(informed, "informed_prompts", lambda policy, parents: cut)
    with_cut_BT = informed.teacher_scores("informed", policy, lambda: PARAMS, learner, IS_ACTION_BN)
    assert np.isnan(with_cut_BT[2:4]).all(), "both responses to the prompt that was cut"
    np.testing.assert_array_equal(with_cut_BT[[0, 1, 4, 5]], scores_BT[[0, 1, 4, 5]])
    assert informed.teacher_scores("", policy, None, learner, IS_ACTION_BN) is None
