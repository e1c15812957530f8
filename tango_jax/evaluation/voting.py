"""Rules that select one answer from many samples.

Every accuracy is an expectation over which k of the n samples are used, and over ties, broken uniformly at random. Of
more than MAX_SUBSETS choices, that many are drawn, the same ones for every rule.
"""

import functools
import itertools
from collections.abc import Sequence
from math import comb
from typing import NamedTuple

import numpy as np

from tango_jax.grading import grade_many

RIGHT = 0  # the class of every answer that the grader accepts
NO_ANSWER = -1  # votes for nothing
MAX_SUBSETS = 1000
_COUNT_WEIGHT = 1e-6  # added to each vote's weight: frequency decides between classes of equal weight
_TIE_TOLERANCE = 1e-9  # of the largest score: probabilities of many steps are all small


class Ballot(NamedTuple):
    answer_class_M: np.ndarray  # int: RIGHT, other classes of equal answers, or NO_ANSWER
    is_correct_M: np.ndarray  # bool
    score_M: dict[str, np.ndarray]  # float, at least 0, by name of the score; empty without a verifier


def answer_classes(
    groups: Sequence[Sequence[str | None]], correct: Sequence[Sequence[bool]], kind: str
) -> list[list[int]]:
    """The class of every answer in each group (problem): accepted answers form one, equal wrong ones share one.

    A wrong answer is compared with the first answer of every class; one grading call serves a round of all groups.
    """
    classes = [[RIGHT if is_right else NO_ANSWER for is_right in marks] for marks in correct]
    places: list[dict[str, list[int]]] = []
    for answers, marks in zip(groups, correct, strict=True):
        of_answer: dict[str, list[int]] = {}
        for place, (answer, is_right) in enumerate(zip(answers, marks, strict=True)):
            if not is_right and answer is not None and answer.strip():
                of_answer.setdefault(answer, []).append(place)
        places.append(of_answer)
    pending, number = [list(of_answer) for of_answer in places], RIGHT + 1
    while any(pending):
        pairs = [(g, answers[0], other) for g, answers in enumerate(pending) for other in answers[1:]]
        texts = [f"<answer>\\boxed{{{other}}}</answer>" for _, _, other in pairs]
        is_equal = grade_many(texts, [first for _, first, _ in pairs], kind).correct if pairs else ()
        joined: list[set[str]] = [set(answers[:1]) for answers in pending]
        for (g, _, other), equal in zip(pairs, is_equal, strict=True):
            if equal:
                joined[g].add(other)
        for g, members in enumerate(joined):
            for answer in members:
                for place in places[g][answer]:
                    classes[g][place] = number
            pending[g] = [answer for answer in pending[g] if answer not in members]
        number += 1
    return classes


@functools.cache
def subsets_JC(num_samples: int, k: int) -> np.ndarray:
    """The samples in each choice of k, int [J, k]: all choices, or MAX_SUBSETS drawn ones."""
    if comb(num_samples, k) <= MAX_SUBSETS:
        return np.array(list(itertools.combinations(range(num_samples), k)))
    rng = np.random.default_rng((num_samples, k))
    return rng.permuted(np.tile(np.arange(num_samples), (MAX_SUBSETS, 1)), axis=1)[:, :k]


def majority(ballot: Ballot, k: int) -> float:
    return weighted_vote(ballot, np.ones(len(ballot.answer_class_M)), k)


def weighted_vote(ballot: Ballot, weight_M: np.ndarray, k: int) -> float:
    """The probability that the answer with the largest sum of weights is correct. Frequency breaks ties."""
    chosen_JC = subsets_JC(len(weight_M), k)
    class_JC, weight_JC = ballot.answer_class_M[chosen_JC], weight_M[chosen_JC]
    largest_J1 = weight_JC.max(axis=1, keepdims=True)
    weight_JC = weight_JC / np.where(largest_J1 > 0, largest_J1, 1.0)
    total_JA = np.zeros((len(chosen_JC), max(RIGHT, int(ballot.answer_class_M.max())) + 2))
    # NO_ANSWER, -1, counts in the last column, which no class has.
    np.add.at(total_JA, (np.arange(len(chosen_JC))[:, None], class_JC), weight_JC + _COUNT_WEIGHT)
    total_JA = total_JA[:, :-1]
    best_J1 = total_JA.max(axis=1, keepdims=True)
    is_top_JA = (total_JA >= best_J1 - _TIE_TOLERANCE) & (best_J1 > 0)
    return float((is_top_JA[:, RIGHT] / np.maximum(1, is_top_JA.sum(axis=1))).mean())


def best_of(ballot: Ballot, score_M: np.ndarray, k: int) -> float:
    chosen_JC = subsets_JC(len(score_M), k)
    score_JC = score_M[chosen_JC]
    is_top_JC = score_JC >= score_JC.max(axis=1, keepdims=True) * (1 - _TIE_TOLERANCE)
    return float(((is_top_JC & ballot.is_correct_M[chosen_JC]).sum(axis=1) / is_top_JC.sum(axis=1)).mean())


def rules_of(ballot: Ballot) -> tuple[str, ...]:
    by_score = (f"{rule}_by_{name}" for name in ballot.score_M for rule in ("best_of", "vote"))
    return ("pass", "majority", *by_score)


def accuracy_of(ballot: Ballot, rule: str, k: int) -> float:
    kind, _, score = rule.partition("_by_")
    if kind == "pass":
        return pass_at_k(len(ballot.is_correct_M), int(ballot.is_correct_M.sum()), k)
    if kind == "majority":
        return majority(ballot, k)
    return {"best_of": best_of, "vote": weighted_vote}[kind](ballot, ballot.score_M[score], k)


def selection_accuracies(ballot: Ballot, k: int) -> dict[str, float]:
    return {rule: accuracy_of(ballot, rule, k) for rule in rules_of(ballot)}


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k), the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374, section 2.1)."""
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples, (num_samples, num_correct, k)
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def reported_sample_counts(num_samples: int) -> tuple[int, ...]:
    """1, 2, 4, ... and all."""
    powers = [1 << power for power in range(num_samples.bit_length()) if 1 << power < num_samples]
    return (*powers, num_samples)
