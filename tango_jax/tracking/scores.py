"""Scores of solutions and verifications: accuracy, per-class F1, and rates."""

from collections.abc import Sequence

import numpy as np

from tango_jax.records import Solution, Verification

LEFT_OUT = ("step F1 counts as missed the steps that a verifier leaves out because it stops at its first error "
            "(verifier.stop_at_first_error)")
LEFT_OUT_SENTENCE = f"{LEFT_OUT[0].upper()}{LEFT_OUT[1:]}."
VERDICTS = {"CORRECT": True, "INCORRECT": False, "INVALID": None}  # what a verdict says of the solution


def class_counts(predicted: Sequence[bool | None], actual: Sequence[bool]) -> list[int]:
    """Hits, predictions and occurrences of True, then of False."""
    pairs = list(zip(predicted, actual, strict=True))
    return [
        count for label in (True, False)
        for count in (sum(p is label and a == label for p, a in pairs), sum(p is label for p, _ in pairs),
                      sum(a == label for _, a in pairs))
    ]


def class_scores(predicted: Sequence, actual: Sequence[bool]) -> dict[str, float]:
    """F1 of the classes True ("correct") and False ("incorrect"), their mean, and the balanced accuracy.

    A prediction of None is a miss. The F1 of a class that neither occurs nor is predicted is 0, as in scikit-learn.
    Balanced accuracy is the mean recall over the classes that occur.
    """
    scores, recalls, counts = {}, [], class_counts(predicted, actual)
    for name, (hits, claimed, present) in zip(("correct", "incorrect"), (counts[:3], counts[3:]), strict=True):
        scores[f"f1_{name}"] = 2 * hits / (claimed + present) if claimed + present else 0.0
        if present:
            recalls.append(hits / present)
    scores["f1"] = (scores["f1_correct"] + scores["f1_incorrect"]) / 2
    scores["balanced_accuracy"] = float(np.mean(recalls)) if recalls else 0.0
    return scores


def generator_scores(solutions: Sequence[Solution], is_truncated: Sequence[bool]) -> dict[str, float]:
    """Accuracy, also by problem size where problems have one; step accuracy if all solutions have gold labels."""
    scores = {
        "accuracy": float(np.mean([solution.is_correct for solution in solutions])),
        "format": float(np.mean([solution.format_score for solution in solutions])),
        "truncation_rate": float(np.mean(is_truncated)),
    }
    if all(solution.gold_steps is not None for solution in solutions):
        labels = [label for solution in solutions for label in solution.gold_steps]
        scores["step_accuracy"] = float(np.mean(labels)) if labels else 0.0
    for size in sorted({solution.problem.size for solution in solutions} - {0}):
        chosen = [solution.is_correct for solution in solutions if solution.problem.size == size]
        scores[f"accuracy_by_size/{size}"] = float(np.mean(chosen))
    return scores


def verifier_scores(solutions: Sequence[Solution], verifications: Sequence[Verification]) -> dict[str, float]:
    """Step scores against gold labels (if any), outcome scores against the grader, and rates.

    A misaligned verification judges no steps: each counts as a prediction of None. So does, in an aligned one, a step
    after the error at which a verifier stopped (`verifier.stop_at_first_error`): its step scores are of all steps, as
    those of a verifier that judges them all, and lower for what it leaves open. `first_error_f1` is the same for both:
    it reads each verification up to its first INCORRECT. It is the harmonic mean of the shares of solutions with a
    wrong step whose first one is found, and of solutions without one of which no step is rejected (ProcessBench);
    misaligned ones are misses, and it is left out unless there are both kinds.

    `right_verdict_wrong_steps`: the share of right verdicts of aligned verifications with a step that is judged
    wrongly. `accept_gap`: the share of right solutions of
    which no step is rejected, minus the same share of wrong ones (J of arXiv 2601.04411), among aligned verifications;
    left out unless there are both.
    """
    verdicts = [v.verdict for v in verifications]
    predicted = [VERDICTS[verdict] for verdict in verdicts]
    outcome = class_scores(predicted, [solution.is_correct for solution in solutions])
    scores = {f"outcome_{name}": value for name, value in outcome.items()}
    scores |= {
        "rate_correct": float(np.mean([verdict == "CORRECT" for verdict in verdicts])),
        "rate_invalid": float(np.mean([verdict == "INVALID" for verdict in verdicts])),
        "rate_misaligned": float(np.mean([not v.is_aligned for v in verifications])),
        "format": float(np.mean([v.format_score for v in verifications])),
    }
    accepted = {True: [], False: []}
    for solution, v in zip(solutions, verifications, strict=True):
        if v.is_aligned:
            accepted[bool(solution.is_correct)].append(False not in v.judgements)
    if all(accepted.values()):
        scores["accept_gap"] = float(np.mean(accepted[True]) - np.mean(accepted[False]))
    if all(solution.gold_steps is not None for solution in solutions):
        judged, gold, misjudged = [], [], []
        for solution, v in zip(solutions, verifications, strict=True):
            if v.is_aligned and v.verdict == ("CORRECT" if solution.is_correct else "INCORRECT"):
                pairs = zip(v.judgements, solution.gold_steps, strict=True)
                misjudged.append(any(mark is not None and mark != label for mark, label in pairs))
            judged += v.judgements if v.is_aligned else [None] * len(solution.steps)
            gold += solution.gold_steps
        scores |= {f"step_{name}": value for name, value in class_scores(judged, gold).items()}
        scores["right_verdict_wrong_steps"] = float(np.mean(misjudged)) if misjudged else 0.0
        scores |= _first_error_scores(solutions, verifications)
    return scores


def _first_error_scores(solutions: Sequence[Solution], verifications: Sequence[Verification]) -> dict[str, float]:
    hits = {True: [], False: []}  # by whether the solution has a wrong step
    for solution, v in zip(solutions, verifications, strict=True):
        is_found = v.is_aligned and first_false(v.judgements) == first_false(solution.gold_steps)
        hits[False in solution.gold_steps].append(is_found)
    if not all(hits.values()):
        return {}
    erroneous, correct = (float(np.mean(hits[kind])) for kind in (True, False))
    both = erroneous + correct
    return {"first_error_f1": 2.0 * erroneous * correct / both if both else 0.0}


def first_false(labels: Sequence[bool | None]) -> int | None:
    return list(labels).index(False) if False in labels else None
