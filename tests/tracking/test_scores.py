"""Agreement of verifications with the facts, against counts made by hand."""

import dataclasses

import pytest

from tango_jax.records import Problem, Solution, Verification
from tango_jax.tracking.scores import class_scores, generator_scores, verifier_scores

T, F, N = True, False, None


@pytest.mark.parametrize("predicted, actual, f1_correct, f1_incorrect, balanced_accuracy", [
    # Correct: 2 hits, 3 claimed, 3 present: 4/6. Incorrect: 1 hit, 2 claimed, 2 present: 2/4. Recalls 2/3 and 1/2.
    ([T, T, F, T, F], [T, T, T, F, F], 2 / 3, 1 / 2, 7 / 12),
    # A None is a miss for its true class and claimed by neither: correct 2*1/(1+2), incorrect 2*1/(1+2).
    ([T, N, F, N], [T, T, F, F], 2 / 3, 2 / 3, 1 / 2),
    ([N, N], [T, F], 0, 0, 0),
    # One class only: F1 of the other is 0 by convention, balanced accuracy leaves it out.
    ([T, T], [T, T], 1, 0, 1),
    ([F, F, F], [F, F, F], 0, 1, 1),
    # Predicted where it never occurs: incorrect 0 hits, 1 claimed; correct 2*2/(2+3).
    ([T, T, F], [T, T, T], 4 / 5, 0, 2 / 3),
    ([F, T], [T, F], 0, 0, 0),
    # Always "correct" on 3 of 4: F1 2*3/(4+3), recalls 1 and 0.
    ([T, T, T, T], [T, T, T, F], 6 / 7, 0, 1 / 2),
    ([], [], 0, 0, 0),
])
def test_class_scores(predicted, actual, f1_correct, f1_incorrect, balanced_accuracy):
    assert class_scores(predicted, actual) == pytest.approx({
        "f1_correct": f1_correct, "f1_incorrect": f1_incorrect, "f1": (f1_correct + f1_incorrect) / 2,
        "balanced_accuracy": balanced_accuracy,
    })


def test_class_scores_refuse_lists_of_different_length():
    with pytest.raises(ValueError, match="longer"):
        class_scores([True], [True, False])


def solution(is_correct, gold_steps) -> Solution:
    steps = ("s",) * (len(gold_steps) if gold_steps is not None else 2)
    return Solution(Problem("p", "q", "a"), "text", steps, (0,) * len(steps), 1.0, is_correct, gold_steps)


def verification(verdict, judgements, is_aligned=True, format_score=1.0) -> Verification:
    return Verification("text", judgements, verdict, format_score, is_aligned, ("b",) * len(judgements))


def test_verifier_scores():
    solutions = [solution(True, (T, T)), solution(False, (T, F)), solution(False, (F,)), solution(True, (T,))]
    verifications = [
        verification("CORRECT", (T, F)),
        verification("INCORRECT", (T, F), format_score=0.2),
        verification("INVALID", (F, F), is_aligned=False, format_score=0.0),  # 2 judgements of 1 step
        verification("INCORRECT", (T,)),
    ]
    # Verdicts T, F, None, F of outcomes T, F, F, T: correct 2*1/(1+2), incorrect 2*1/(2+2); recalls 1/2 and 1/2.
    # Steps T F | T F | None | T of T T | T F | F | T: correct 3 hits, 3 claimed, 4 present: 6/7; incorrect 1 hit,
    # 2 claimed, 2 present: 1/2; recalls 3/4 and 1/2.
    assert verifier_scores(solutions, verifications) == pytest.approx({
        "outcome_f1_correct": 2 / 3, "outcome_f1_incorrect": 1 / 2, "outcome_f1": 7 / 12,
        "outcome_balanced_accuracy": 1 / 2,
        "step_f1_correct": 6 / 7, "step_f1_incorrect": 1 / 2, "step_f1": 19 / 28, "step_balanced_accuracy": 5 / 8,
        "rate_correct": 1 / 4, "rate_invalid": 1 / 4, "rate_misaligned": 1 / 4, "format": 0.55,
        "first_error_f1": 1 / 2,  # found in one of two with a wrong step; one of two without is accepted
        "right_verdict_wrong_steps": 1 / 2,  # of the first two, whose verdicts are right
        "accept_gap": 1 / 2,  # one of two right solutions has no rejected step; the only wrong one that is judged has
    })


def test_a_verifier_that_stops_is_compared_by_its_first_error():
    """The first verifier stops where the second judges on: they have the same first error, and not the same step F1."""
    solutions = [solution(False, (T, F, T)), solution(False, (T, F, F)), solution(True, (T, T, T)),
                 solution(True, (T,))]
    stops = [(T, F, None), (F, None, None), (T, T, T), (F,)]
    goes_on = [(T, F, T), (F, F, T), (T, T, T), (F,)]
    first, second = (verifier_scores(solutions, [verification("INCORRECT", one) for one in said])
                     for said in (stops, goes_on))
    assert first["first_error_f1"] == second["first_error_f1"] == 1 / 2
    # Steps T F None | F None None | T T T | F of T F T | T F F | T T T | T: correct 4 hits, 4 claimed, 7 present;
    # incorrect 1 hit, 3 claimed, 3 present.
    assert first["step_f1"] == pytest.approx((8 / 11 + 2 / 6) / 2)
    # Steps T F T | F F T | T T T | F: correct 5 hits, 6 claimed, 7 present; incorrect 2 hits, 4 claimed, 3 present.
    assert second["step_f1"] == pytest.approx((10 / 13 + 4 / 7) / 2)
    # Of two right verdicts (the first two solutions are wrong), one has a step that is judged wrongly.
    assert first["right_verdict_wrong_steps"] == 1 / 2 and first["accept_gap"] == 1 / 2
    assert "first_error_f1" not in verifier_scores(solutions[:2], [verification("CORRECT", (T, F, None))] * 2)


def test_a_misaligned_verification_of_no_steps_adds_nothing():
    scores = verifier_scores([solution(False, ())], [verification("CORRECT", (T, F), is_aligned=False)])
    assert scores["step_f1"] == scores["step_balanced_accuracy"] == 0.0
    assert scores["outcome_f1_incorrect"] == 0.0 and scores["rate_correct"] == scores["rate_misaligned"] == 1.0


def test_without_gold_steps_there_are_no_step_scores():
    scores = verifier_scores([solution(True, None)], [verification("CORRECT", (T, T))])
    assert {name.split("_")[0] for name in scores} == {"outcome", "rate", "format"}
    assert scores["outcome_f1_correct"] == 1.0


def test_the_gap_of_acceptance_needs_solutions_of_both_kinds():
    accepted, rejected = verification("CORRECT", (T,)), verification("INCORRECT", (F,))
    right, wrong = solution(True, (T,)), solution(False, (F,))
    assert "accept_gap" not in verifier_scores([right, right], [accepted, rejected])
    assert verifier_scores([right, wrong], [accepted, rejected])["accept_gap"] == 1.0
    assert verifier_scores([right, wrong], [rejected, accepted])["accept_gap"] == -1.0
    # An acceptance by the verdict alone is none.
    assert verifier_scores([right, wrong], [verification("CORRECT", (F,)), rejected])["accept_gap"] == 0.0


def test_generator_scores():
    sized = [Problem("p", "q", "a", size) for size in (2, 2, 3)]
    solutions = [solution(True, (T, F)), solution(False, (F, F)), solution(True, (T,))]
    solutions = [dataclasses.replace(one, problem=problem) for one, problem in zip(solutions, sized, strict=True)]
    assert generator_scores(solutions, [False, True, True]) == pytest.approx({
        "accuracy": 2 / 3, "format": 1, "truncation_rate": 2 / 3, "step_accuracy": 2 / 5,
        "accuracy_by_size/2": 1 / 2, "accuracy_by_size/3": 1,
    })
    unlabelled = generator_scores([solution(False, None), solution(False, (T,))], [False, False])
    assert unlabelled == {"accuracy": 0, "format": 1, "truncation_rate": 0}
