"""Rows of solutions and judgements in; named estimates with confidence intervals out. Scores: tracking/scores.py."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tango_jax.data.processbench import NO_ERROR
from tango_jax.evaluation.cost import Cost, CostBasis, Costs, costs_of
from tango_jax.evaluation.published import MATHEMATICS, OUT_OF_DOMAIN, PROCESSBENCH, comparable
from tango_jax.evaluation.responses import (
    as_verification,
    claims_of,
    probabilities_of,
    scores_of,
    voted_first_wrong,
)
from tango_jax.evaluation.sets import JudgeSet, SolveSet, grader_name
from tango_jax.evaluation.shards import GREEDY, JudgedRow, SolvedRow
from tango_jax.evaluation.voting import Ballot, accuracy_of, reported_sample_counts, selection_accuracies
from tango_jax.records import Solution
from tango_jax.tracking.intervals import (
    Estimate,
    bootstrap_means,
    estimate_from_sums,
    estimate_of,
    mean_draws,
    mean_over_sets,
    paired_differences,
    resample,
)
from tango_jax.tracking.scores import VERDICTS, class_counts, first_false, generator_scores, verifier_scores

AVERAGE = "average"
VERIFIER = (
    "verifier_outcome_f1", "verifier_outcome_balanced_accuracy", "verifier_step_f1", "verifier_step_balanced_accuracy",
    "verifier_first_error_f1", "verifier_rate_correct", "verifier_rate_invalid", "verifier_rate_misaligned",
    "verifier_format",
)
# A hit and a miss on an erroneous solution, and on a correct one: columns of `_first_error_columns`.
_ONE_OF_EACH_PA = np.array([[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]], float)


class Metric(NamedTuple):
    set: str
    name: str
    k: int  # samples it takes; 0: does not apply
    count: int  # problems or solutions behind it, however often each was judged; of an average, its sets
    estimate: Estimate
    cost: Cost | None = None  # of a problem, where an answer is selected from k samples


class SetResult(NamedTuple):
    name: str
    source: str
    role: str  # whose figures these are: generator or verifier
    count: int  # problems, or given solutions
    is_whole: bool
    metrics: tuple[Metric, ...]
    draws_J: np.ndarray  # of the headline figure, for averages over sets
    notes: tuple[str, ...]
    grader: str  # a user's function that graded the answers; empty: none

    @property
    def has_published(self) -> bool:
        return not self.grader and comparable(self.name, self.count, self.is_whole)


def solve_result(
    solve_set: SolveSet, rows: Sequence[SolvedRow], judged: Sequence[JudgedRow], basis: CostBasis
) -> SetResult:
    count = len(solve_set.problems)
    by_claim = _by_claim(judged)
    greedy = [row for row in rows if row.sample == GREEDY]
    sampled = [row for row in rows if row.sample != GREEDY]
    metrics, draws_J = [], np.zeros(0)
    if greedy:
        correct_O1 = np.array([[float(row.is_correct)] for row in greedy])
        metrics.append(Metric(solve_set.name, "greedy", 1, count, bootstrap_means(correct_O1)[0]))
        draws_J = mean_draws(correct_O1)[:, 0]
    if sampled:
        costs = costs_of(basis, sampled, by_claim)
        metrics += _selection(solve_set.name, ballots_of(sampled, by_claim, basis.is_written), costs)
        asked = {"prompt": costs.problems}
        metrics += [_without_interval(solve_set.name, f"{name}_{measure}", asked.get(name, costs.samples),
                                      getattr(cost, measure))
                    for name in ("prompt", "sample", "verification", "scored") if (cost := getattr(costs, name))
                    for measure in Cost._fields if measure == "flops" or cost.tokens]
    # Figures of responses are of problems that were asked.
    described = [row for row in greedy or sampled if not row.is_too_long] or greedy or sampled
    solutions = [claim.solution for claim in claims_of(solve_set, described)]
    scores = generator_scores(solutions, [row.is_truncated for row in described])
    for name in ("format", "truncation_rate", "step_accuracy"):
        if name in scores:
            metrics.append(_without_interval(solve_set.name, name, len(described), scores[name]))
    tokens = float(np.mean([row.num_tokens for row in described]))
    metrics.append(_without_interval(solve_set.name, "response_tokens", len(described), tokens))
    if judged:
        votes = [by_claim[row.number, row.sample] for row in described]
        metrics += _verifier(solve_set.name, [row.number for row in described], solutions, votes)
    solved = {(row.number, row.sample) for row in rows if not row.is_too_long}
    notes = _solve_notes(rows) + _judge_notes([row for row in judged if (row.number, row.sample) in solved])
    return SetResult(solve_set.name, solve_set.source, "generator", count, solve_set.is_whole, tuple(metrics), draws_J,
                     notes, grader_name(solve_set))


def judge_result(judge_set: JudgeSet, judged: Sequence[JudgedRow]) -> SetResult:
    name, by_claim = judge_set.name, _by_claim(judged)
    votes = [by_claim[claim.number, claim.sample] for claim in judge_set.claims]
    metrics, draws_J = [], np.zeros(0)
    if all(claim.first_wrong is not None for claim in judge_set.claims):
        columns_OA = _first_error_columns([claim.first_wrong for claim in judge_set.claims], votes)
        draws_J = resample(columns_OA, _first_error_f1, _ONE_OF_EACH_PA)
        erroneous, correct = columns_OA[:, 1] > 0, columns_OA[:, 3] > 0
        # The votes on a claim are not independent, but claims are.
        misaligned_O1 = np.array([[np.mean([not row.is_aligned for row in rows])] for rows in votes])
        f1 = float(_first_error_f1(columns_OA.sum(axis=0, keepdims=True))[0])
        metrics = [
            Metric(name, "f1", 0, len(votes), estimate_of(f1, draws_J)),
            *(Metric(name, f"accuracy_{kind}", 0, int(chosen.sum()), bootstrap_means(columns_OA[chosen][:, [hit]])[0])
              for kind, chosen, hit in (("erroneous", erroneous, 0), ("correct", correct, 2))),
            Metric(name, "rate_misaligned", 0, len(votes), bootstrap_means(misaligned_O1)[0]),
        ]
    else:
        numbers = [claim.number for claim in judge_set.claims]
        metrics = _verifier(name, numbers, [claim.solution for claim in judge_set.claims], votes)
    return SetResult(name, judge_set.source, "verifier", len(votes), judge_set.is_whole, tuple(metrics), draws_J,
                     _judge_notes(judged), grader_name(judge_set))


def averages(results: Sequence[SetResult]) -> list[Metric]:
    """The mean of the headline metric over each group of the paper whose sets were all evaluated."""
    by_name = {result.name: result for result in results if result.draws_J.size}
    found = []
    for group, title, headline in ((MATHEMATICS, "mathematics", "greedy"), (OUT_OF_DOMAIN, "out_of_domain", "greedy"),
                                   (PROCESSBENCH, "processbench", "f1")):
        if all(name in by_name for name in group):
            values = [value_of(by_name[name], headline).value for name in group]
            estimate = mean_over_sets(values, [by_name[name].draws_J for name in group])
            found.append(Metric(f"{title}_{AVERAGE}", headline, 0, len(group), estimate))
    return found


def value_of(result: SetResult, name: str, k: int | None = None) -> Estimate | None:
    return next((m.estimate for m in result.metrics if m.name == name and k in (None, m.k)), None)


def _by_claim(judged: Sequence[JudgedRow]) -> dict[tuple[int, int], list[JudgedRow]]:
    by_claim: dict[tuple[int, int], list[JudgedRow]] = {}
    for row in sorted(judged, key=lambda row: row.vote):
        by_claim.setdefault((row.number, row.sample), []).append(row)
    return by_claim


def _without_interval(set_name: str, name: str, count: int, value: float) -> Metric:
    return Metric(set_name, name, 0, count, Estimate(float(value), float("nan"), float("nan")))


def ballots_of(sampled: Sequence[SolvedRow], by_claim: dict, is_written: bool) -> list[Ballot]:
    groups: dict[int, list[SolvedRow]] = {}
    for row in sorted(sampled, key=lambda row: (row.number, row.sample)):
        groups.setdefault(row.number, []).append(row)
    ballots = []
    for rows in groups.values():
        votes = [by_claim[row.number, row.sample] for row in rows] if by_claim else []
        scores = [scores_of(of_one) | probabilities_of(of_one, is_written) for of_one in votes]
        by_name = {name: np.array([score[name] for score in scores]) for name in (scores[0] if scores else ())}
        classes, is_correct = [row.answer_class for row in rows], [row.is_correct for row in rows]
        ballots.append(Ballot(np.array(classes), np.array(is_correct), by_name))
    return ballots


def _selection(set_name: str, ballots: Sequence[Ballot], costs: Costs) -> list[Metric]:
    """Every rule at every number of samples and, with a verifier, at the most samples that cost no more than each of
    these numbers does with majority. Gains are over the majority of all samples."""
    num_samples, values = len(ballots[0].is_correct_M), {}
    counts = reported_sample_counts(num_samples)
    for k in counts:
        rows = [selection_accuracies(ballot, k) for ballot in ballots]
        values |= {(rule, k): [row[rule] for row in rows] for rule in rows[0]}
    rules = [rule for rule, k in values if k == 1 and "_by_" in rule]
    gains = {f"{rule}_minus_majority": (rule, num_samples) for rule in rules if num_samples > 1}
    for measure in Cost._fields:
        for rule in rules:
            for count in counts:
                k = costs.most_samples(rule, measure, getattr(costs.of("majority", count), measure), num_samples)
                if k and (rule, k) not in values:
                    values[rule, k] = [accuracy_of(ballot, rule, k) for ballot in ballots]
            if k and num_samples > 1:  # paid for by the last count, all samples
                gains[f"{rule}_minus_majority_at_equal_{measure}"] = (rule, k)
    metrics = [Metric(set_name, rule, k, len(ballots), estimate, costs.of(rule, k)) for (rule, k), estimate
               in zip(values, bootstrap_means(np.array(list(values.values())).T), strict=True)]
    if gains:
        chosen_OA = np.array([values[place] for place in gains.values()]).T
        estimates = paired_differences(chosen_OA, np.array(values["majority", num_samples]))
        metrics += [Metric(set_name, name, k, len(ballots), estimate)
                    for (name, (_, k)), estimate in zip(gains.items(), estimates, strict=True)]
    return sorted(metrics, key=lambda metric: metric.k)


def _verifier(
    set_name: str, numbers: Sequence[int], solutions: Sequence[Solution], votes: Sequence[list[JudgedRow]]
) -> list[Metric]:
    """The scores of `scores.py` over all votes. `numbers`: the problem of each solution."""
    owners = [solution for solution, rows in zip(solutions, votes, strict=True) for _ in rows]
    scores = verifier_scores(owners, [as_verification(row) for rows in votes for row in rows])
    outcome, steps, first_errors = [], [], []
    for solution, rows in zip(solutions, votes, strict=True):
        outcome.append(class_counts([VERDICTS[row.verdict] for row in rows], [solution.is_correct] * len(rows)))
        if solution.gold_steps is not None:
            judged = [mark for row in rows
                      for mark in (row.judgements if row.is_aligned else [None] * len(solution.steps))]
            steps.append(class_counts(judged, list(solution.gold_steps) * len(rows)))
            label = first_false(solution.gold_steps)
            label = NO_ERROR if label is None else label
            first_errors.append(_first_error_columns([label] * len(rows), [[row] for row in rows]).sum(axis=0))
    counts = {"verifier_outcome_f1": (outcome, _macro_f1), "verifier_step_f1": (steps, _macro_f1),
              "verifier_first_error_f1": (first_errors, _first_error_f1)}
    metrics = []
    for name in VERIFIER:
        score = scores.get(name.removeprefix("verifier_"))
        if score is not None and name in counts:
            estimate = estimate_from_sums(_by_problem(numbers, counts[name][0]), counts[name][1])
            metrics.append(Metric(set_name, name, 0, len(solutions), estimate))
        elif score is not None:
            metrics.append(_without_interval(set_name, name, len(solutions), score))
    return metrics


def _by_problem(numbers: Sequence[int], counts: Sequence[Sequence[int]]) -> np.ndarray:
    """Counts summed per problem: samples and votes of one problem are not independent."""
    _, places = np.unique(numbers, return_inverse=True)
    sums_OA = np.zeros((places.max() + 1, len(counts[0])))
    np.add.at(sums_OA, places, np.array(counts))
    return sums_OA


def _macro_f1(sums_JA: np.ndarray) -> np.ndarray:
    smallest = np.finfo(float).tiny
    parts = [2 * sums_JA[:, c] / np.maximum(smallest, sums_JA[:, c + 1] + sums_JA[:, c + 2]) for c in (0, 3)]
    return (parts[0] + parts[1]) / 2


def _first_error_columns(labels: Sequence[int], votes: Sequence[list[JudgedRow]]) -> np.ndarray:
    columns = []
    for label, rows in zip(labels, votes, strict=True):
        hit = voted_first_wrong(rows) == label
        columns.append([0, 0, hit, 1] if label == NO_ERROR else [hit, 1, 0, 0])
    return np.array(columns, float)


def _first_error_f1(sums_JA: np.ndarray) -> np.ndarray:
    """The harmonic mean of the two accuracies (ProcessBench); NaN if one kind of solution does not occur."""
    with np.errstate(invalid="ignore", divide="ignore"):
        erroneous, correct = sums_JA[:, 0] / sums_JA[:, 1], sums_JA[:, 2] / sums_JA[:, 3]
        f1 = 2 * erroneous * correct / (erroneous + correct)
    return np.where(erroneous + correct == 0, 0.0, f1)


def _solve_notes(rows: Sequence[SolvedRow]) -> tuple[str, ...]:
    too_long = len({row.number for row in rows if row.is_too_long})
    failed = {kind: sum(row.grader == kind for row in rows) for kind in ("error", "timeout", "overlong")}
    notes = [f"{too_long} problems whose prompt is over the limit count as wrong; figures of responses leave them out"]
    notes *= too_long > 0
    if any(failed.values()):
        listed = ", ".join(f"{count} {kind}" for kind, count in failed.items() if count)
        notes.append(f"answers that the grader could not read count as wrong: {listed}, of {len(rows)}")
    return tuple(notes)


def _judge_notes(judged: Sequence[JudgedRow]) -> tuple[str, ...]:
    told = {"is_shortened": "verifications of a solution that was shortened to fit",
            "is_truncated": "verifications were cut off at the length limit"}
    counts = {name: sum(getattr(row, name) for row in judged) for name in told}
    claims = {(row.number, row.sample): row.is_too_long for row in judged}
    unjudged = sum(claims.values())
    notes = [f"{count} of {len(judged)} {told[name]}" for name, count in counts.items() if count]
    if unjudged:
        notes.append(f"{unjudged} of {len(claims)} solutions were not judged, and count as INVALID: their problem is "
                     "too long for the verifier")
    return tuple(notes)
