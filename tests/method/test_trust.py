"""Trust in the verifier and which solutions it judges, against numbers worked by hand."""

import dataclasses
import math

import numpy as np
import pytest

from support.turns import PROBLEM, responses_of, settings, solution, turn_of, verification
from tango_jax.config import default_config
from tango_jax.method import baselines, tango, trust
from tango_jax.method.rewards import judged_steps
from tango_jax.method.trust import (
    DECAY,
    PRACTICE_DECAY,
    RIGHT_JUDGED,
    WRONG_JUDGED,
    Evidence,
    choose,
    f1_of,
    trust_of,
    turns_done,
    warmup_metrics,
)
from tango_jax.records import Memory, Solution, Verification
from tango_jax.rl.schedule import Place
from tango_jax.tracking.turn_metrics import turn_metrics


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
    assert evidence == pytest.approx(tuple((1 + DECAY) * count for count in (7, 1, 2, 1, 0, 0, 0, 0, 0, 0)))
    practised = evidence.after_practice(*turn).after_practice(*turn)
    assert practised[:4] == evidence[:4]
    assert practised[4:] == pytest.approx(tuple((1 + PRACTICE_DECAY) * count for count in (7, 1, 2, 1, 2, 0)))


def test_of_a_verifier_that_stops_judged_steps_are_the_evidence():
    """Right solutions of 4 steps: one is accepted, of one step 2 is rejected, and the others are not judged. Wrong ones
    of 4 steps, one of which is accepted."""
    said = [(True,) * 4, (True, False, None, None), (False, None, None, None), (True,) * 4]
    turn = [np.array([True, True, False, False])]
    records = [dataclasses.replace(verification(judgements=one), of=solution(right, steps=("s",) * 4))
               for one, right in zip(said, turn[0], strict=True)]
    verdicts = trust._verdicts(records)
    np.testing.assert_array_equal(verdicts, [turn[0], [4, 2, 1, 4], [0, 1, 1, 0], [0, 2, 3, 0]])
    evidence = Evidence().after_practice(*verdicts)
    # One of six judged steps is rejected, and a right solution has four steps.
    assert evidence.practised_rates()[0] == pytest.approx((5 / 6) ** 4)
    assert Evidence().after_solving(*verdicts[:3])[:4] == (6.0, 1.0, 2.0, 1.0)
    assert Evidence(*evidence[:9]).practised_rates()[0] == pytest.approx((5 / 6) ** 3)  # as an earlier run stored it


def test_the_warm_up_is_done_once_the_verifiers_own_turns_say_so():
    # 8 right solutions of 3 steps, of whose 24 steps 2 are rejected, and 39 wrong ones, of which 1.5 are accepted.
    evidence = Evidence(practised_steps=24.0, practised_rejected=2.0, practised_wrong=39.0, practised_accepted=1.5,
                        practised_right=8.0)
    rates = (11 / 12) ** 3, 0.05 + math.sqrt(0.05 * 0.95 / 40)
    assert evidence.practised_rates() == pytest.approx(rates)
    trust = f1_of(rates)  # with limits of 0 and 1
    memory = Memory(evidence=tuple(evidence))
    for until, place, done in ((trust - 0.01, Place(4, "verifier", "warmup", 0), 20),
                              (trust + 0.01, Place(4, "verifier", "warmup", 0), 5),
                              (0.0, Place(4, "verifier", "warmup", 0), 5),
                              (trust - 0.01, Place(30, "verifier", "verifier", 6), 31)):
        chosen = rl(trust=(0.0, 1.0), warmup_until=until, warmup_steps=20)
        assert turns_done(chosen, place, memory) == done
        metrics = {"verifier/warmup_trust": pytest.approx(trust)} if until and place.phase == "warmup" else {}
        assert warmup_metrics(chosen, place, memory) == metrics
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
])
def test_the_groups_that_are_judged(judge, groups):
    choice = choose(rl(judge=judge), GRADES, HAS_SIGNAL, DOUBTED)
    assert np.flatnonzero(choice.trust_P).tolist() == [*groups] and set(choice.trust_P) <= {0.0, 1.0}
    assert np.flatnonzero(choice.is_judged_B).tolist() == [4 * group + place for group in groups for place in range(4)]


def test_some_solutions_are_judged_for_the_measure_alone():
    doubted = choose(rl(trust=(0.4, 0.55)), GRADES, HAS_SIGNAL, DOUBTED)
    assert doubted.trust == 0 and not doubted.trust_P.any()
    assert (doubted.is_judged_B & GRADES).sum() == GRADES.sum() == 5 < RIGHT_JUDGED  # all that there are
    assert (doubted.is_judged_B & ~GRADES).sum() == WRONG_JUDGED
    assert len(np.unique(np.flatnonzero(doubted.is_judged_B & ~GRADES) // 4)) == 9  # from all groups that have any
    believed = choose(rl(trust=(0.4, 0.55), judge="failed"), GRADES, HAS_SIGNAL, SURE)
    assert believed.trust == 1 and np.flatnonzero(~believed.is_judged_B).tolist() == [8, 10, 11]
    assert np.flatnonzero(believed.trust_P == 0).tolist() == [1, 2]  # the measure's solutions have no step rewards


# Turns.

# All right solutions are accepted, and a share b of the wrong ones: F1 is 0.1 / (0.1 + 0.95 b) = 0.475.
HALF = Evidence(right_steps=1e12, wrong=1e12, wrong_accepted=(0.1 / 0.475 - 0.1) / 0.95 * 1e12)
LABELS = [(True, True), (True, False), (True, True), (False, False)]


def solved(*grades: bool) -> list[Solution]:
    """Solutions of two steps, which end at tokens 1 and 3."""
    return [solution(grade, tokens=5, steps=("a", "b"), step_ends=(1, 3)) for grade in grades]


def judged(labels: list[tuple[bool, bool]]) -> list[Verification]:
    return [verification("CORRECT" if all(pair) else "INCORRECT", pair) for pair in labels]


def solving(grades: list[bool], verifications: list[Verification], evidence: Evidence, **changed):
    """The generator's turn on groups of two, and its lesson."""
    own = {"alpha_initial": 0.5, "alpha_schedule": "none", "trust": (0.4, 0.55), "judge": "failed"}
    t = turn_of(settings(len(grades) // 2, 2, **own | changed), "generator",
                {"generator": solved(*grades), "verifier": verifications}, memory=Memory(evidence=tuple(evidence)))
    return t, trust.solve(t)


def total_of(lesson) -> np.ndarray:
    return sum(np.reshape(weight, (-1, 1)) * adv_BT for weight, adv_BT in lesson.terms.values())


def test_step_rewards_weigh_as_much_as_the_verifier_is_trusted():
    """Two groups: one without a right solution, of which all are judged, and one in which the grades differ."""
    t, lesson = solving([False, False, True, False], judged(LABELS), HALF)
    (outcome_weight, outcome_BT), (steps_weight, steps_BT) = lesson.terms["outcome"], lesson.terms["steps"]
    choice = choose(t.rl, np.array([False, False, True, False]), np.array([False, True]), HALF.rates(2))
    np.testing.assert_allclose(choice.trust_P, [0.5, 0], rtol=1e-3)
    assert lesson.metrics["generator/alpha"] == pytest.approx(0.25, rel=1e-3)
    assert lesson.metrics["generator/trust"] == pytest.approx(0.5, rel=1e-3)
    assert lesson.metrics["generator/step_rewarded_share"] == 0.5
    np.testing.assert_allclose(steps_weight, [0.25, 0.25, 0, 0], rtol=1e-3)
    np.testing.assert_allclose(outcome_weight, [0.75, 0.75, 1, 1], rtol=1e-3)
    # Step rewards 1/2 1/2 1/2 -1/2 have mean 1/4 and std 1/2: elements 1/2, 1/2, 1/2, -3/2, and what is still to come.
    np.testing.assert_allclose(steps_BT, [[1, 1, 0.5, 0.5, 0], [-1, -1, -1.5, -1.5, 0], [0] * 5, [0] * 5], rtol=1e-5)
    np.testing.assert_allclose(total_of(lesson)[:2], 0.25 * steps_BT[:2], rtol=1e-3)
    np.testing.assert_allclose(total_of(lesson)[2:], outcome_BT[2:])
    assert [one.of_steps for one in lesson.step_rewards] == [[(0.5, 0.5), (0.5, -0.5), None, None]]


def test_nothing_is_measured_for_which_there_is_no_use():
    """All groups have an outcome signal, so that no step reward counts; then one has none."""
    grades = np.array([[0, 1, 0, 0]] * 10, bool).reshape(-1)
    choice = choose(rl(trust=(0.4, 0.55), judge="failed"), grades, np.ones(10, bool), DOUBTED)
    assert not choice.is_judged_B.any()
    grades[:4] = False
    choice = choose(rl(trust=(0.4, 0.55), judge="failed"), grades, np.arange(10) > 0, DOUBTED)
    # 4 of the 24 that a measure takes at most depend on it: a sixth of each kind, rounded up.
    assert (choice.is_judged_B & grades).sum() == 2 and (choice.is_judged_B & ~grades).sum() == 3


# Grades, numbers of steps and how many of them are rejected, of three solutions whose judgements match their steps.
MATCHED = np.array([False, False, True]), np.array([2, 2, 2]), np.array([0, 1, 0])
BEFORE = Evidence(*[1.0] * 6)


def one_unmatched() -> list[Verification]:
    return [*judged(LABELS[:3]), dataclasses.replace(judged(LABELS)[3], is_aligned=False)]  # tells of no step


def test_judgements_of_a_generators_turn_are_evidence_where_trust_is_measured():
    _, lesson = solving([False, False, True, False], one_unmatched(), BEFORE, judge="all", trust=(0.0, 0.55))
    assert Evidence(*lesson.memory.evidence) == BEFORE.after_solving(*MATCHED)
    t, lesson = solving([False, False, True, False], one_unmatched(), BEFORE, judge="all", trust=())
    assert lesson.memory == t.memory
    t, lesson = solving([True, False], [], BEFORE)  # nobody is judged
    assert lesson.memory == t.memory and not t._work.asked[1:]


def test_verifications_of_one_solution_are_no_further_solutions():
    """Each judgement sampled four times says no more than once; where they differ, their mean counts."""
    grades = [False, False, True, False]
    _, once = solving(grades, judged(LABELS), BEFORE, judge="all", trust=(0.0, 0.55))
    four = [one for one in judged(LABELS) for _ in range(4)]
    _, often = solving(grades, four, BEFORE, judge="all", trust=(0.0, 0.55), verifications_per_solution=4)
    assert often.memory.evidence == pytest.approx(once.memory.evidence)
    wrong = np.array([False, False]), np.array([2, 2]), np.array([0, 1])  # one solution, judged twice
    assert Evidence().after_solving(*wrong, np.array([0.5, 0.5]))[:4] == (0.0, 0.0, 1.0, 0.5)


def test_solutions_that_cannot_be_judged_make_no_verifier_better():
    with_steps, without = solved(False, False, True, True), [dataclasses.replace(one, steps=(), step_ends=())
                                                             for one in solved(False, False, True, True)]
    shares = []
    for solutions in (with_steps, with_steps[:3] + without[3:]):
        t = turn_of(settings(2, 2, judge="failed", trust=(0.4, 0.55)), "generator",
                    {"generator": solutions, "verifier": judged(LABELS)}, memory=Memory(evidence=tuple(BEFORE)))
        shares.append(trust.solve(t).metrics["verifier/right_accepted"])
    assert shares[0] == shares[1]


def test_judgements_of_a_verifiers_turn_are_evidence_where_trust_is_measured():
    def lesson_of(**changed):
        t = turn_of(settings(4, 1, **changed), "verifier", {"generator": solved(False, False, True, False),
                    "verifier": one_unmatched()}, memory=Memory(evidence=tuple(BEFORE)))
        return trust.remembering(tango.judge)(t)

    lesson = lesson_of(trust=(0.4, 0.55))
    assert Evidence(*lesson.memory.evidence) == BEFORE.after_practice(*MATCHED)
    assert lesson.memory.label_counts == (3.0, 1.0)
    assert lesson_of().memory.evidence == tuple(BEFORE)


def test_where_nobody_is_judged_the_advantages_are_those_of_the_outcome():
    grades = [True, False, True, True]
    t, lesson = solving(grades, [], Evidence(), trust=(0.4, 0.55))
    plain = baselines.solve_alone(turn_of(settings(2, 2), "generator", {"generator": solved(*grades)}))
    np.testing.assert_array_equal(total_of(lesson), total_of(plain))
    assert total_of(lesson).any() and lesson.metrics["generator/step_rewarded_share"] == 0


def test_steps_that_do_not_match_the_judgements_can_count_as_rejected():
    solutions = responses_of("generator", [PROBLEM], 2, solved(False, False))
    said = judged([(True, True), (True, True)])
    said[1] = dataclasses.replace(said[1], judgements=(True,), is_aligned=False)
    t, verifications = turn_of(settings(1, 2), "generator", {}), responses_of("verifier", solutions, 1, said)
    [plain] = judged_steps(t, solutions, verifications)
    assert plain.of_steps == [(0.5, 0.5), None]
    [strict] = judged_steps(t, solutions, verifications, rejects_unmatched=True)
    assert strict.of_steps == [(0.5, 0.5), (-0.5, -0.5)]
    # Step rewards 1/2 1/2 -1/2 -1/2 have mean 0 and std 1/sqrt(3): a token gets the sum of those still to come.
    size = 0.5 * math.sqrt(3)
    np.testing.assert_allclose(t.algorithm.step(strict, solutions), [
        [2 * size] * 2 + [size] * 2 + [0], [-2 * size] * 2 + [-size] * 2 + [0]], rtol=1e-4)


def test_evidence_is_of_all_that_was_sampled_and_not_of_what_dynamic_sampling_chose():
    """In each of four batches one of 20 judgements of right solutions rejects, and one of 20 of wrong ones accepts:
    only these two groups have a signal, and are trained on with some that fill the batch."""
    grades, labels = [], []
    for _ in range(4):
        grades += [True] * 10 + [False] * 10
        labels += [(False,), *[(True,)] * 19, (True,), *[(False,)] * 19]
    solutions = [solution(grade) for grade in grades]
    said = [verification("CORRECT" if label[0] else "INCORRECT", label) for label in labels]
    t = turn_of(settings(20, 2, dynamic_sampling=3, trust=(0.4, 0.55)), "verifier",
                {"generator": solutions, "verifier": said}, phase="warmup")
    lesson = trust.remembering(tango.judge)(t)
    evidence = Evidence(*lesson.memory.evidence)
    assert evidence[4:] == (80.0, 4.0, 80.0, 4.0, 80.0, 0.0)
    assert evidence.practised_rates() == pytest.approx((0.95, (4.5 / 81) + math.sqrt(4.5 / 81 * (1 - 4.5 / 81) / 81)))
    # Of the 40 that are trained on, 8 judge right solutions and have a signal, of which 4 reject.
    chosen = [one for one in lesson.responses if one.of.is_correct]
    assert sum(one.judgements[0] for one in chosen) / len(chosen) < 0.9


def test_verdicts_on_a_part_of_the_solutions_have_a_name_of_their_own():
    """A verifier that rejects everything is perfect on the group without a right solution, which alone is judged."""
    t, lesson = solving([False, False, True, False], judged([(False, False)] * 4), Evidence(), trust=())
    metrics = turn_metrics(t, lesson, {})
    assert len(t.sampled[1]) == 2 and metrics["verifier/judged_rate_correct"] == 0.0
    assert not any(name.startswith("verifier/live_") for name in metrics)
    said = {"generator": solved(False, False, True, False), "verifier": judged([(False, False)] * 4)}
    t = turn_of(settings(2, 2), "generator", said)
    metrics = turn_metrics(t, tango.solve(t), {})
    assert metrics["verifier/live_rate_correct"] == 0.0  # it rejects the right one as well
    assert not any(name.startswith("verifier/judged_") for name in metrics)
