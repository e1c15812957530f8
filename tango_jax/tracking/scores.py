"""Scores of solutions and verifications: accuracy, per-class F1, and rates."""

from collections.abc import Sequence

import numpy as np

from tango_jax.records import Solution, Verification

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
    """Accuracy, also by problem size; step accuracy if all solutions have gold labels."""
    scores = {
        "accuracy": float(np.mean([solution.is_correct for solution in solutions])),
        "format": float(np.mean([solution.format_score for solution in solutions])),
        "truncation_rate": float(np.mean(is_truncated)),
    }
    if all(solution.gold_steps is not None for solution in solutions):
        labels = [label for solution in solutions for label in solution.gold_steps]
        scores["step_accuracy"] = float(np.mean(labels)) if labels else 0.0
    for size in sorted({solution.problem.size for solution in solutions}):
        chosen = [solution.is_correct for solution in solutions if solution.problem.size == size]
        scores[f"accuracy_by_size/{size}"] = float(np.mean(chosen))
    return scores


def verifier_scores(solutions: Sequence[Solution], verifications: Sequence[Verification]) -> dict[str, float]:
    """Step scores against gold labels (if any), outcome scores against the grader, and rates.

    A misaligned verification judges no steps: each counts as a prediction of None. `right_verdict_wrong_steps`: the
    share of right verdicts of aligned verifications with a wrong step. `accept_gap`: the share of right solutions of
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
                misjudged.append(tuple(v.judgements) != tuple(solution.gold_steps))
            judged += v.judgements if v.is_aligned else [None] * len(solution.steps)
            gold += solution.gold_steps
        scores |= {f"step_{name}": value for name, value in class_scores(judged, gold).items()}
        scores["right_verdict_wrong_steps"] = float(np.mean(misjudged)) if misjudged else 0.0
    return scores
