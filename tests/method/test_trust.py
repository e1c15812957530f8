"""Trust in the verifier and whom it is asked about, against numbers worked by hand."""

import dataclasses
import math

import numpy as np
import pytest

from tango_jax.config import default_config
from tango_jax.records import Counters, Problem, Responses, Rollout, Solution, Verification
from tango_jax.rl.credit import TurnSoFar, judged_labels, judged_steps_credit, steps_credit, strict_steps_credit
from tango_jax.rl.schedule import Turn
from tango_jax.rl.trust import (
    DECAY,
    PRACTICE_DECAY,
    RIGHT_ASKED,
    WRONG_ASKED,
    Evidence,
    ask_about,
    asked_about,
    f1_of,
    trust_of,
    turns_done,
    warmup_metrics,
    with_verdicts,
)


def rl(**settings):
    config = default_config().rl
    for name, value in settings.items():
        config[name] = value
    return config


def test_the_rates_by_hand():
    # 6 of 96 steps of right solutions are rejected; without practice, 24 more count as rejected: 30 of 120.
    evidence = Evidence(right_steps=96.0, right_rejected=6.0, wrong=39.0, wrong_accepted=1.5)
    of_right, of_wrong = evidence.rates(num_steps=8)
    assert of_right == pytest.approx(0.75**8)
    # 2 of 40 are accepted, with the half that is added; the error of that share is its standard deviation.
    assert of_wrong == pytest.approx(0.05 + math.sqrt(0.05 * 0.95 / 40))


def test_practice_tells_what_to_expect_of_right_solutions():
    practised = Evidence(practised_steps=200.0, practised_rejected=20.0)
    assert practised.rates(num_steps=8)[0] == pytest.approx(0.9**8)
    assert practised.rates(num_steps=2)[0] == pytest.approx(0.9**2)
    seen = practised._replace(right_steps=56.0, right_rejected=1.6)
    assert seen.rates(num_steps=8)[0] == pytest.approx((1 - (1.6 + 24 * 0.1) / 80) ** 8)


def test_evidence_fades():
    turn = np.array([True, True, False, False]), np.array([3, 4, 5, 6]), np.array([1, 0, 0, 2])
    evidence = Evidence().after_solving(*turn).after_solving(*turn)
    assert evidence == pytest.approx(tuple((1 + DECAY) * count for count in (7, 1, 2, 1, 0, 0, 0, 0, 0)))
    practised = evidence.after_practice(*turn).after_practice(*turn)
    assert practised[:4] == evidence[:4]
    assert practised[4:] == pytest.approx(tuple((1 + PRACTICE_DECAY) * count for count in (7, 1, 2, 1, 2)))


def test_the_warm_up_is_done_once_the_verifiers_own_turns_say_so():
    # 8 right solutions of 3 steps, of whose 24 steps 2 are rejected, and 39 wrong ones, of which 1.5 are accepted.
    evidence = Evidence(practised_steps=24.0, practised_rejected=2.0, practised_wrong=39.0, practised_accepted=1.5,
                        practised_right=8.0)  # fmt: skip
    rates = (11 / 12) ** 3, 0.05 + math.sqrt(0.05 * 0.95 / 40)
    assert evidence.practised_rates() == pytest.approx(rates)
    trust = f1_of(rates)  # with limits of 0 and 1
    counters = Counters(evidence=tuple(evidence))
    for until, turn, done in ((trust - 0.01, Turn(4, "verifier", "warmup", 0), 20),
                              (trust + 0.01, Turn(4, "verifier", "warmup", 0), 5),
                              (0.0, Turn(4, "verifier", "warmup", 0), 5),
                              (trust - 0.01, Turn(30, "verifier", "verifier", 6), 31)):  # fmt: skip
        settings = rl(trust=(0.0, 1.0), warmup_until=until, warmup_steps=20)
        assert turns_done(settings, turn, counters) == done
        metrics = {"verifier/warmup_trust": pytest.approx(trust)} if until and turn.phase == "warmup" else {}
        assert warmup_metrics(settings, turn, counters) == metrics
    # Before there is a right solution, nothing is known of them.
    assert Evidence(practised_wrong=1e3).practised_rates()[0] == 0


def test_the_f1_score_by_hand():
    # Of 1,000 solutions 50 are right, of which 40 are accepted, and so are 95 of 950 wrong ones: precision 40 / 135,
    # recall 40 / 50, and their harmonic mean 2 x 40 / (135 + 50).
    assert f1_of((0.8, 0.1), 0.05) == pytest.approx(80 / 185)
    assert f1_of((1.0, 0.0)) == 1 and f1_of((0.0, 0.3)) == 0


@pytest.mark.parametrize("of_wrong, trust", [(0.2, 0.0), (0.1, 0.0), (0.05, 0.597), (0.0, 1.0)])
def test_trust_is_linear_between_the_limits(of_wrong, trust):
    # The F1 scores are 0.286, 0.432, 0.08 / 0.1375 = 0.582 and 0.889.
    assert trust_of((0.8, of_wrong), (0.5018, 0.6358)) == pytest.approx(trust, abs=2e-3)


def test_a_verifier_that_rejects_or_accepts_everything_is_not_believed():
    strict = Evidence(right_steps=800.0, right_rejected=800.0, wrong=1e3)
    lenient = Evidence(right_steps=800.0, wrong=1e3, wrong_accepted=1e3)
    for evidence in (strict, lenient):
        assert trust_of(evidence.rates(8), (0.4, 0.55)) == 0


def test_few_wrong_solutions_are_trusted_less_than_many():
    few, many = (Evidence(right_steps=800.0, right_rejected=16.0, wrong=float(count)) for count in (8, 400))
    assert trust_of(few.rates(8), (0.4, 0.55)) < 0.2 and trust_of(many.rates(8), (0.4, 0.55)) == 1


def test_without_evidence_there_is_no_trust_and_without_limits_all_of_it():
    assert trust_of(Evidence().rates(8), (0.4, 0.55)) == 0.0
    assert trust_of(Evidence().rates(8), ()) == 1.0


GRADES = np.array([[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]] + [[0, 0, 0, 0]] * 7, bool).reshape(-1)
HAS_SIGNAL = np.array([False, False, True] + [False] * 7)
DOUBTED, SURE = (0.0, 1.0), (1.0, 0.0)  # rates of acceptance


@pytest.mark.parametrize("judge, groups", [
    ("all", range(10)), ("silent", [0, 1, *range(3, 10)]), ("failed", [0, *range(3, 10)])
])  # fmt: skip
def test_the_groups_that_are_judged(judge, groups):
    asked = ask_about(rl(judge=judge), GRADES, HAS_SIGNAL, DOUBTED)
    assert np.flatnonzero(asked.trust_P).tolist() == [*groups] and set(asked.trust_P) <= {0.0, 1.0}
    assert np.flatnonzero(asked.is_asked_B).tolist() == [4 * group + place for group in groups for place in range(4)]


def test_some_solutions_are_judged_for_the_measure_alone():
    doubted = ask_about(rl(trust=(0.4, 0.55)), GRADES, HAS_SIGNAL, DOUBTED)
    assert doubted.trust == 0 and not doubted.trust_P.any()
    assert (doubted.is_asked_B & GRADES).sum() == GRADES.sum() == 5 < RIGHT_ASKED  # all that there are
    assert (doubted.is_asked_B & ~GRADES).sum() == WRONG_ASKED
    assert len(np.unique(np.flatnonzero(doubted.is_asked_B & ~GRADES) // 4)) == 9  # from all groups that have any
    believed = ask_about(rl(trust=(0.4, 0.55), judge="failed"), GRADES, HAS_SIGNAL, SURE)
    assert believed.trust == 1 and np.flatnonzero(~believed.is_asked_B).tolist() == [8, 10, 11]
    assert np.flatnonzero(believed.trust_P == 0).tolist() == [1, 2]  # the measure's solutions have no step rewards


# Credit.

# All right solutions are accepted, and a share b of the wrong ones: F1 is 0.1 / (0.1 + 0.95 b) = 0.475.
HALF = Evidence(right_steps=1e12, wrong=1e12, wrong_accepted=(0.1 / 0.475 - 0.1) / 0.95 * 1e12)

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
    own = {"alpha_initial": 0.5, "alpha_schedule": "none", "trust": (0.4, 0.55), "judge": "failed"}
    config.rl.update(own | settings)
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
    so_far = so_far_of(solutions, verifications, HALF)
    credit = judged_steps_credit(so_far)
    outcome, steps = credit.terms
    np.testing.assert_allclose(so_far.trust_P, [0.5, 0], rtol=1e-3)
    assert credit.metrics["generator/alpha"] == pytest.approx(0.25, rel=1e-3)
    assert credit.metrics["generator/step_rewarded_share"] == 0.5
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
    so_far = so_far_of(solutions, verifications, HALF)
    credit = steps_credit(so_far, [[tuple(not label for label in labels) for labels in judged_labels(so_far)[0]]])
    np.testing.assert_allclose(credit.terms[1].weight, [0.25, 0.25, 0, 0], rtol=1e-3)
    assert not credit.terms[1].value[2:].any()


def test_nothing_is_measured_for_which_there_is_no_use():
    """All groups have an outcome signal, so that no step reward counts; then one has none."""
    grades = np.array([[0, 1, 0, 0]] * 10, bool).reshape(-1)
    asked = ask_about(rl(trust=(0.4, 0.55), judge="failed"), grades, np.ones(10, bool), DOUBTED)
    assert not asked.is_asked_B.any()
    grades[:4] = False
    asked = ask_about(rl(trust=(0.4, 0.55), judge="failed"), grades, np.arange(10) > 0, DOUBTED)
    # 4 of the 24 that a measure takes at most depend on it: a sixth of each kind, rounded up.
    assert (asked.is_asked_B & grades).sum() == 2 and (asked.is_asked_B & ~grades).sum() == 3


def test_judgements_are_evidence_where_trust_is_measured():
    solutions = solved(False, False, True, False)
    verifications = judged(solutions, [0, 1, 2, 3], [(True, True), (True, False), (True, True), (False, False)])
    verifications.records[3] = dataclasses.replace(verifications.records[3], is_aligned=False)  # tells of no step
    answers, before = {"generator": solutions, "verifier": verifications}, Counters(evidence=(1.0,) * 6)
    turn = np.array([False, False, True]), np.array([2, 2, 2]), np.array([0, 1, 0])
    solving = with_verdicts(before, rl(trust=(0.4, 0.55)), "generator", answers)
    assert Evidence(*solving.evidence) == Evidence(*[1.0] * 6).after_solving(*turn)
    practice = with_verdicts(before, rl(trust=(0.4, 0.55)), "verifier", answers)
    assert Evidence(*practice.evidence) == Evidence(*[1.0] * 6).after_practice(*turn)
    assert with_verdicts(before, rl(), "generator", answers) is before
    assert with_verdicts(before, rl(trust=(0.4, 0.55)), "generator", {"generator": solutions}) is before


def test_where_nobody_is_asked_the_credit_is_that_of_the_outcome():
    solutions = solved(True, False, True, True)
    so_far = so_far_of(solutions, None, Evidence(), trust=())
    credit = judged_steps_credit(so_far)
    np.testing.assert_array_equal(credit.adv_BT, so_far.outcome_advantages("generator"))
    assert credit.metrics["generator/step_rewarded_share"] == 0


def test_steps_that_do_not_match_the_judgements_can_count_as_rejected():
    solutions = solved(False, False)
    verifications = judged(solutions, [0, 1], [(True, True), (True, True)])
    verifications.records[1] = dataclasses.replace(verifications.records[1], judgements=(True,), is_aligned=False)
    so_far = so_far_of(solutions, verifications, Evidence(right_steps=1e12, wrong=1e12))
    assert judged_steps_credit(so_far).labels == [[(True, True), None]]
    strict = strict_steps_credit(so_far)
    assert strict.labels == [[(True, True), (False, False)]]
    # Step rewards 1/2 1/2 -1/2 -1/2 have mean 0 and std 1/sqrt(3): a token gets the sum of those still to come.
    size = 0.5 * math.sqrt(3)
    np.testing.assert_allclose(strict.terms[1].value, [[2 * size] * 2 + [size] * 2 + [0],
                                                       [-2 * size] * 2 + [-size] * 2 + [0]], rtol=1e-4)  # fmt: skip
