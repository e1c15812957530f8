"""Labels of solutions without gold answers, and which solutions the verifier then learns from.

In: the graded solutions of a call; out: the same with labels, or the places of those that are asked about. Stage: after
the generator's call of an arm whose plan says so (arms.py). Training takes a label for the grade; evaluations and
metrics keep the grade, which tells how often a label is wrong.
"""

import dataclasses
from collections import Counter

import numpy as np

from tango_jax.grading import FAILURES, answer_of
from tango_jax.records import Responses
from tango_jax.runtime import hosts
from tango_jax.tasks.own_grader import Graded, grade_own_solutions


def majority_labels(solved: Responses, graded: Graded) -> Responses:
    """A solution is right if its answer is that of most samples of its problem (TTRL, arXiv 2504.16084).

    Answers are counted by their text, the first of several as frequent; all that the task's comparison finds equal to
    the most frequent one are right, and none is where no sample has an answer.
    """
    answers = [(answer_of(solution.text) or "").strip() for solution in solved.records]
    counts = [Counter(filter(None, answers[first : first + solved.group_size]))
              for first in range(0, len(answers), solved.group_size)]  # fmt: skip
    majorities = [count.most_common(1)[0][0] if count else "" for count in counts for _ in range(solved.group_size)]
    answered = [b for b, majority in enumerate(majorities) if majority]
    own = hosts.own_part(answered)  # graded once: another process might run into another time limit
    problems = [dataclasses.replace(solved.records[b].problem, answer=majorities[b]) for b in own]
    report = grade_own_solutions(graded, problems, [solved.records[b].text for b in own])
    label_of = dict(zip(answered, map(bool, hosts.join_parts(report.correct)), strict=True))
    records = [dataclasses.replace(solution, label=label_of.get(b, False))
               for b, solution in enumerate(solved.records)]  # fmt: skip
    failures = {f"grader/label_{name}": sum(hosts.join_parts([getattr(report, name)])) for name in FAILURES}
    metrics = failures | {
        "generator/labelled_right": np.mean([solution.label for solution in records]),
        "generator/label_accuracy": np.mean([solution.label == solution.is_correct for solution in records]),
    }
    return dataclasses.replace(solved, records=records, metrics=solved.metrics | metrics)


def one_of_either_label(solved: Responses, minibatches: int) -> np.ndarray:
    """Places of one solution of each problem, in turn one that is labelled right and one that is labelled wrong, as far
    as a problem has such a one: a verifier that saw the majority's answers alone would learn to accept. So it is in
    each of the `minibatches`, to which problems go in turn."""
    label_PM = np.array([solution.is_right for solution in solved.records]).reshape(-1, solved.group_size)
    is_wanted_P = np.arange(len(label_PM)) // minibatches % 2 == 0
    sample_P = np.argmax(label_PM == is_wanted_P[:, None], axis=1)  # the first; sample 0 where there is none
    return np.arange(len(label_PM)) * solved.group_size + sample_P


def rejected(judged: Responses, _: int) -> np.ndarray:
    """Places of the verifications whose verdict is INCORRECT."""
    return np.flatnonzero([verification.verdict == "INCORRECT" for verification in judged.records])


LABELS = {"majority": majority_labels}
ABOUT = {"one_of_either_label": one_of_either_label, "rejected": rejected}
