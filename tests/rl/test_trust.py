"""Trust in the verifier and whom it is asked about, against numbers worked by hand."""

import math

import numpy as np
import pytest

from tango_jax.config import default_config
from tango_jax.records import Counters, Problem, Responses, Rollout, Solution, Verification
from tango_jax.rl.credit import TurnSoFar, judged_labels, judged_steps_credit, steps_credit
from tango_jax.rl.schedule import Turn
from tango_jax.rl.trust import (
    DECAY,
    PRACTICE_DECAY,
    RIGHT_ASKED,
    WRONG_ASKED,
    Evidence,
    ask_about,
    asked_about,
    trust_of,
    with_verdicts,
)


def rl(**settings):
    config = default_config().rl
    for name, value in settings.items():
        config[name] = value
    return config


def test_the_likelihood_ratio_by_hand():
    # 9 of 12 right and 2 of 39 wrong ones are accepted. Without practice, 3 more right ones count as rejected.
    evidence = Evidence(right=12.0, right_accepted=9.0, wrong=39.0, wrong_accepted=2.0)
    estimate, lower = evidence.likelihood_ratio(num_steps=8)
    assert estimate == pytest.approx(9 / 15 * 40 / 2.5)
    # The variance of the logarithm of a share k / n is about 1 / k - 1 / n.
    assert lower == pytest.approx(estimate * math.exp(-math.sqrt(1 / 9 - 1 / 15 + 1 / 2.5 - 1 / 40)))


def test_practice_on_short_solutions_tells_what_to_expect_of_long_ones():
    # 64 of 100 right solutions of 4 steps are accepted: 0.8 of two steps each, 0.64^2 of 8 steps.
    practised = Evidence(practised=100.0, practised_accepted=64.0, practised_steps=400.0, wrong=19.0)
    assert practised.likelihood_ratio(num_steps=8)[0] == pytest.approx(0.64**2 * 20 / 0.5)
    assert practised.likelihood_ratio(num_steps=2)[0] == pytest.approx(0.64 * 20 / 0.5)  # shorter ones are no harder
    seen = practised._replace(right=9.0, right_accepted=9.0)
    assert seen.likelihood_ratio(num_steps=8)[0] == pytest.approx((9 + 3 * 0.64**2) / 12 * 20 / 0.5)


def test_evidence_fades():
    is_correct_B, is_accepted_B = np.array([True, True, False, False]), np.array([True, False, True, False])
    evidence = Evidence().after_solving(is_correct_B, is_accepted_B).after_solving(is_correct_B, is_accepted_B)
    assert evidence == Evidence(2 + 2 * DECAY, 1 + DECAY, 2 + 2 * DECAY, 1 + DECAY)
    evidence = evidence.after_practice(is_correct_B, is_accepted_B, np.array([2, 3, 5, 7]))
    evidence = evidence.after_practice(is_correct_B, is_accepted_B, np.array([4, 4, 4, 4]))
    assert evidence[4:] == pytest.approx((2 + 2 * PRACTICE_DECAY, 1 + PRACTICE_DECAY, 8 + 5 * PRACTICE_DECAY))


@pytest.mark.parametrize("wrong_accepted, trust", [(4e8, 0.0), (2e8, 0.0), (1e8, 1 / 3), (0.6e8, 1.0), (1e7, 1.0)])
def test_trust_is_linear_between_the_limits(wrong_accepted, trust):
    # Of so many solutions the error is none, and all right ones are accepted: LR is 2.5, 5, 10, 16.7, 100.
    evidence = Evidence(right=1e9, right_accepted=1e9, wrong=1e9, wrong_accepted=wrong_accepted)
    assert trust_of(evidence, (8, 14), 8) == pytest.approx(trust, rel=1e-3)


def test_few_verdicts_are_trusted_less_than_many():
    few, many = (Evidence(*[count * share for share in (2, 2, 20, 1)]) for count in (1, 100))
    assert trust_of(few, (8, 14), 8) == 0 and trust_of(many, (8, 14), 8) == 1


def test_a_verifier_that_rejects_everything_is_not_believed():
    for evidence in (Evidence(wrong=1e3), Evidence(wrong=1e3, practised=50.0, practised_steps=200.0)):
        assert evidence.likelihood_ratio(8) == (0, 0) and trust_of(evidence, (8, 14), 8) == 0


def test_without_evidence_there_is_no_trust_and_without_limits_all_of_it():
    assert trust_of(Evidence(), (8, 14), 8) == 0.0
    assert trust_of(Evidence(), (), 8) == 1.0


GRADES = np.array([[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]] + [[0, 0, 0, 0]] * 7, bool).reshape(-1)
HAS_SIGNAL = np.array([False, False, True] + [False] * 7)
SURE = Evidence(right=100.0, right_accepted=100.0, wrong=100.0)


@pytest.mark.parametrize("judge, groups", [
    ("all", range(10)), ("silent", [0, 1, *range(3, 10)]), ("failed", [0, *range(3, 10)])
])  # fmt: skip
def test_the_groups_that_are_judged(judge, groups):
    asked = ask_about(rl(judge=judge), GRADES, HAS_SIGNAL, 3.0, Evidence())
    assert np.flatnonzero(asked.trust_P).tolist() == [*groups] and set(asked.trust_P) <= {0.0, 1.0}
    assert np.flatnonzero(asked.is_asked_B).tolist() == [4 * group + place for group in groups for place in range(4)]


def test_some_solutions_are_judged_for_the_measure_alone():
    doubted = ask_about(rl(trust=(8, 14)), GRADES, HAS_SIGNAL, 3.0, Evidence())
    assert doubted.trust == 0 and not doubted.trust_P.any()
    assert (doubted.is_asked_B & GRADES).sum() == GRADES.sum() == 5 < RIGHT_ASKED  # all that there are
    assert (doubted.is_asked_B & ~GRADES).sum() == WRONG_ASKED
    assert len(np.unique(np.flatnonzero(doubted.is_asked_B & ~GRADES) // 4)) == 9  # from all groups that have any
    believed = ask_about(rl(trust=(8, 14), judge="failed"), GRADES, HAS_SIGNAL, 3.0, SURE)
    assert believed.trust == 1 and np.flatnonzero(~believed.is_asked_B).tolist() == [8, 10, 11]
    assert np.flatnonzero(believed.trust_P == 0).tolist() == [1, 2]  # the measure's solutions have no step rewards


# Credit.

PROBLEM, NO_ROLLOUT = Problem("p", "", "", 0), Rollout((), (), np.zeros(0, bool), 0, 0)


def solved(*grades: bool) -> Responses:
    """Solutions of two steps, which end at tokens 1 and 3, two to each problem."""
    records = [Solution(PROBLEM, "", ("a", "b"), (1, 3), 1.0, grade, None) for grade in grades]
    return Responses("generator", [PROBLEM] * (len(grades) // 2), [], 2, NO_ROLLOUT, records, {})


def judged(solutions: Responses, places: list[int], labels: list[tuple[bool, bool]]) -> Responses:
    records = [Verification("", pair, "CORRECT" if all(pair) else "INCORRECT", 1.0, True, ()) for pair in labels]
    parents = [solutions.records[place] for place in places]
    return Responses("verifier", parents, [], 1, NO_ROLLOUT, records, {}, places)


def so_far_of(solutions: Responses, verifications: Responses | None, evidence: Evidence, **settings) -> TurnSoFar:
    """The generator's turn, as loop/turn.py has it before its credit."""
    config = default_config()
    config.rl.update({"alpha_initial": 0.5, "alpha_schedule": "none", "trust": (8, 14), "judge": "failed", **settings})
    answers = {"generator": solutions} | ({"verifier": verifications} if verifications else {})
    reward_B = np.array([record.is_correct for record in solutions.records], np.float32)
    is_action_BT = np.ones((len(reward_B), 5), bool)
    counters = Counters(evidence=tuple(evidence))
    trust_P = asked_about(config, solutions, counters).trust_P
    turn = Turn(0, "generator", "generator", 0)
    return TurnSoFar(config, turn, answers, reward_B, is_action_BT, counters, trust_P)


def test_step_rewards_weigh_as_much_as_the_verifier_is_trusted():
    """Two groups: one without a right solution, of which all are judged, and one in which the grades differ."""
    solutions = solved(False, False, True, False)
    verifications = judged(solutions, [0, 1, 2, 3], [(True, True), (True, False), (True, True), (False, False)])
    half = Evidence(right=1e9, right_accepted=1e9, wrong=11e8, wrong_accepted=1e8)  # LR = 11
    so_far = so_far_of(solutions, verifications, half)
    credit = judged_steps_credit(so_far)
    outcome, steps = credit.terms
    np.testing.assert_allclose(so_far.trust_P, [0.5, 0], rtol=1e-3)
    assert credit.metrics["generator/alpha"] == pytest.approx(0.25, rel=1e-3) and credit.metrics["generator/step_rewarded_share"] == 0.5
    np.testing.assert_allclose(steps.weight, [0.25, 0.25, 0, 0], rtol=1e-3)
    np.testing.assert_allclose(outcome.weight, [0.75, 0.75, 1, 1], rtol=1e-3)
    # Step rewards 1/2 1/2 1/2 -1/2 have mean 1/4 and std 1/2: elements 1/2, 1/2, 1/2, -3/2, and what is still to come.
    np.testing.assert_allclose(steps.value, [[1, 1, 0.5, 0.5, 0], [-1, -1, -1.5, -1.5, 0], [0] * 5, [0] * 5], rtol=1e-5)
    np.testing.assert_allclose(credit.adv_BT[:2], 0.25 * steps.value[:2], rtol=1e-3)
    np.testing.assert_allclose(credit.adv_BT[2:], outcome.value[2:])
    assert credit.labels == [[(True, True), (True, False), None, None]]


def test_a_credit_of_the_users_is_weighed_alike():
    """It hands its labels to steps_credit, which knows in which groups they count."""
    solutions = solved(False, False, True, False)
    verifications = judged(solutions, [0, 1, 2, 3], [(True, True), (True, False), (True, True), (False, False)])
    half = Evidence(right=1e9, right_accepted=1e9, wrong=11e8, wrong_accepted=1e8)
    so_far = so_far_of(solutions, verifications, half)
    credit = steps_credit(so_far, [[tuple(not label for label in labels) for labels in judged_labels(so_far)[0]]])
    np.testing.assert_allclose(credit.terms[1].weight, [0.25, 0.25, 0, 0], rtol=1e-3)
    assert not credit.terms[1].value[2:].any()


def test_nothing_is_measured_for_which_there_is_no_use():
    """All groups have an outcome signal, so that no step reward counts; then one has none."""
    grades = np.array([[0, 1, 0, 0]] * 10, bool).reshape(-1)
    asked = ask_about(rl(trust=(8, 14), judge="failed"), grades, np.ones(10, bool), 3.0, Evidence())
    assert not asked.is_asked_B.any()
    grades[:4] = False
    asked = ask_about(rl(trust=(8, 14), judge="failed"), grades, np.arange(10) > 0, 3.0, Evidence())
    # 4 of the 24 that a measure takes at most depend on it: a sixth of each kind, rounded up.
    assert (asked.is_asked_B & grades).sum() == 2 and (asked.is_asked_B & ~grades).sum() == 3


def test_verdicts_are_evidence_where_trust_is_measured():
    solutions = solved(False, False, True, False)
    verifications = judged(solutions, [0, 1, 2, 3], [(True, True), (True, False), (True, True), (False, False)])
    answers, before = {"generator": solutions, "verifier": verifications}, Counters(evidence=(1.0,) * 7)
    is_correct_B, is_accepted_B = np.array([0, 0, 1, 0], bool), np.array([1, 0, 1, 0], bool)
    solving = with_verdicts(before, rl(trust=(8, 14)), "generator", answers)
    assert Evidence(*solving.evidence) == Evidence(*[1.0] * 7).after_solving(is_correct_B, is_accepted_B)
    practice = with_verdicts(before, rl(trust=(8, 14)), "verifier", answers)
    practised = Evidence(*[1.0] * 7).after_practice(is_correct_B, is_accepted_B, np.full(4, 2))
    assert Evidence(*practice.evidence) == practised
    assert with_verdicts(before, rl(), "generator", answers) is before
    assert with_verdicts(before, rl(trust=(8, 14)), "generator", {"generator": solutions}) is before


def test_where_nobody_is_asked_the_credit_is_that_of_the_outcome():
    solutions = solved(True, False, True, True)
    so_far = so_far_of(solutions, None, Evidence(), trust=())
    credit = judged_steps_credit(so_far)
    np.testing.assert_array_equal(credit.adv_BT, so_far.outcome_advantages("generator"))
    assert credit.metrics["generator/step_rewarded_share"] == 0
