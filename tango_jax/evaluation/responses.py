"""Solutions of a shard by the generator, greedy and sampled, and judgements by the verifier."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tango_jax.data.processbench import NO_ERROR
from tango_jax.data.teacher_rows import write_part
from tango_jax.evaluation.judging import Reading, mark_probabilities, read_solutions
from tango_jax.evaluation.sets import Claim, SolveSet
from tango_jax.evaluation.shards import GREEDY, JudgedRow, Shard, SolvedRow, digest, read_shard
from tango_jax.evaluation.voting import NO_ANSWER, answer_classes
from tango_jax.grading import parse_solution, parse_verification
from tango_jax.method.texts import make_solution
from tango_jax.records import Problem, Verification
from tango_jax.runtime import hosts, rng
from tango_jax.runtime.keys import MAX_SAMPLES
from tango_jax.sampling.checkpoint_sampler import CheckpointSampler
from tango_jax.sampling.given_text import make_logits_fn
from tango_jax.tasks.own_grader import grade_solutions, version_of
from tango_jax.text.templates import generator_prompt, verifier_prompt


class Pass(NamedTuple):
    samples: tuple[int, ...]
    temperature: float
    top_p: float


def samples_of(passes: Sequence[Pass]) -> list[int]:
    return [sample for one in passes for sample in one.samples]


def solve_shard(sampler: CheckpointSampler, shard: Shard, passes: Sequence[Pass], seed: int) -> list[SolvedRow]:
    """Every solution of a shard, by problem. A problem whose prompt is too long counts as wrong."""
    solve_set: SolveSet = shard.set
    prompts = [generator_prompt(sampler.template, sampler.tokenizer, problem) for _, problem in shard.items]
    fitting = [p for p, prompt in enumerate(prompts) if len(prompt) <= sampler.max_prompt]
    numbers = [shard.items[p][0] for p in fitting]
    chosen = [prompts[p] for p in fitting]
    responses: dict[tuple[int, int], tuple] = {}  # (number, sample) -> tokens, is_truncated
    for samples, temperature, top_p in passes if fitting else ():
        # No two seeds or sets share randomness; the first 4 of 8 samples equal the 4 of another run.
        row_PM = np.array([[number * MAX_SAMPLES + max(0, sample) for sample in samples] for number in numbers])
        key = rng.step_key(seed, "evaluate", solve_set.name)
        rollout = sampler.sample(chosen, row_PM, key, temperature, top_p)
        keys = [(number, sample) for number in numbers for sample in samples]
        responses |= dict(zip(keys, zip(rollout.tokens, rollout.is_truncated_B, strict=True), strict=True))
    return _rows(sampler, solve_set, shard.items, responses, samples_of(passes))


def _rows(
    sampler: CheckpointSampler,
    solve_set: SolveSet,
    problems: Sequence[tuple[int, Problem]],
    responses: dict[tuple[int, int], tuple],
    samples: list[int],
) -> list[SolvedRow]:
    rows = []
    for number, problem in problems:
        for sample in samples:
            tokens, is_truncated = responses.get((number, sample), ((), False))
            text = sampler.tokenizer.decode(tokens)
            parsed = parse_solution(text, solve_set.min_steps)
            row = SolvedRow(
                number=number, sample=sample, problem_id=problem.id, question=problem.question, gold=problem.answer,
                size=problem.size, text=text, answer=parsed.answer, answer_class=NO_ANSWER, is_correct=False,
                format_score=float(parsed.format_score), num_steps=len(parsed.steps), is_truncated=bool(is_truncated),
                num_tokens=len(tokens), is_too_long=(number, sample) not in responses, grader="",
            )
            rows.append(row)
    return _graded(solve_set, rows)


def _graded(solve_set: SolveSet, rows: Sequence[SolvedRow]) -> list[SolvedRow]:
    problems = dict(solve_set.problems)
    report = grade_solutions(solve_set, [problems[row.number] for row in rows], [row.text for row in rows])
    keys = [(row.number, row.sample) for row in rows]
    classes = _classes(keys, [row.answer for row in rows], report.correct, solve_set.grade_kind)
    graded_by = version_of(solve_set.is_correct)
    return [
        dataclasses.replace(
            row, answer_class=classes[key], is_correct=bool(is_correct), grader=failure, graded_by=graded_by
        )
        for key, row, is_correct, failure in zip(keys, rows, report.correct, report.failures, strict=True)
    ]


def _classes(keys: list, answers: list, correct: Sequence[bool], kind: str) -> dict[tuple[int, int], int]:
    groups: dict[int, list[int]] = {}
    for index, (number, sample) in enumerate(keys):
        if sample != GREEDY:
            groups.setdefault(number, []).append(index)
    members = list(groups.values())
    found = answer_classes(
        [[answers[i] for i in group] for group in members], [[correct[i] for i in group] for group in members], kind
    )
    classes = dict.fromkeys(keys, NO_ANSWER)
    for group, numbers in zip(members, found, strict=True):
        classes |= {keys[i]: number for i, number in zip(group, numbers, strict=True)}
    return classes


def read_solved(shard: Shard, samples: list[int]) -> list[SolvedRow] | None:
    """The stored rows of a shard, graded again if the grader's file was edited; None if incomplete.

    Raises ValueError if the rows belong to other problems, or the grader failed.
    """
    solve_set: SolveSet = shard.set
    rows = read_shard(shard.path, SolvedRow)
    wanted = [(number, sample, problem) for number, problem in shard.items for sample in samples]
    if rows is None or len(rows) != len(wanted):
        return None
    for row, (number, sample, problem) in zip(rows, wanted, strict=True):
        found = (row.number, row.sample, row.problem_id, row.question, row.gold)
        if found != (number, sample, problem.id, problem.question, problem.answer):
            raise ValueError(f"{shard.path} holds a solution of {row.problem_id}, {row.question[:60]!r}, but its "
                             f"problem is now {problem.id}, {problem.question[:60]!r}: the rows of {solve_set.name} "
                             "have changed since; bring the old ones back, or choose another --out")
    if any(row.graded_by != version_of(solve_set.is_correct) for row in rows):
        rows = _graded(solve_set, rows)
        if hosts.is_first():
            write_part(shard.path, rows)
    return rows


def claims_of(solve_set: SolveSet, rows: Sequence[SolvedRow]) -> list[Claim]:
    problems = dict(solve_set.problems)
    return [
        Claim(
            row.number, row.sample, make_solution(solve_set, problems[row.number], row.text, (), row.is_correct),
            may_be_judged=not row.is_too_long,
        )
        for row in rows
    ]


class Written(NamedTuple):
    """A verification that was sampled."""

    text: str
    is_truncated: bool
    num_tokens: int
    p_verdict: float | None


def judge_shard(
    sampler: CheckpointSampler, shard: Shard, votes: int, temperature: float, num_samples: int, seed: int
) -> list[JudgedRow]:
    """`votes` verifications of every claim, by claim. `num_samples`: solutions of each problem."""
    prompts = [_claim_prompt(sampler, claim) for claim in shard.items]
    asked = [c for c, prompt in enumerate(prompts) if prompt is not None]
    read, written = asked, {}
    if sampler.is_sampled and asked:
        read = [c for c in asked if isinstance(shard.set, SolveSet) and shard.items[c].sample != GREEDY]
        places = [shard.items[c].number * (num_samples + 1) + shard.items[c].sample + 1 for c in asked]
        row_PM = np.array([[place * votes + vote for vote in range(votes)] for place in places]) % 2**31  # int32
        key = rng.step_key(seed, "judge", shard.set.name)
        written = _write(sampler, {c: prompts[c][0] for c in asked}, set(read), row_PM, key, temperature)
    solutions = [shard.items[c].solution for c in read]
    found = read_solutions(sampler, [prompts[c][0] for c in read], solutions) if read else []
    readings = dict(zip(read, found, strict=True))
    return [
        _judged_row(claim, vote, prompts[c], sampler.stops, written.get((c, vote)), readings.get(c))
        for c, claim in enumerate(shard.items)
        for vote in range(votes)
    ]


def _write(
    sampler: CheckpointSampler, prompts: dict[int, list[int]], read: set[int], row_PM: np.ndarray,
    key: np.ndarray, temperature: float,
) -> dict[tuple[int, int], Written]:
    """(claim, vote) -> verification. The probabilities of the claims in `read` are read."""
    rollout = sampler.sample(list(prompts.values()), row_PM, key, temperature)
    tokens = dict(zip([(c, vote) for c in prompts for vote in range(row_PM.shape[1])], rollout.tokens, strict=True))
    wanted = [place for place in tokens if place[0] in read]
    found = mark_probabilities(sampler.tokenizer, make_logits_fn(sampler), [prompts[c] for c, _ in wanted],
                               [tokens[place] for place in wanted]) if wanted else []
    p_verdict = {place: p for place, (_, p) in zip(wanted, found, strict=True)}
    return {place: Written(sampler.tokenizer.decode(ids), bool(is_cut), len(ids), p_verdict.get(place))
            for (place, ids), is_cut in zip(tokens.items(), rollout.is_truncated_B, strict=True)}


def _claim_prompt(sampler: CheckpointSampler, claim: Claim) -> tuple[list[int], bool] | None:
    """Prompt ids and whether the solution was shortened; None if there is nothing to judge, or no room."""
    if not claim.may_be_judged:
        return None
    solution = claim.solution
    try:
        return verifier_prompt(
            sampler.template, sampler.tokenizer, solution.problem, solution.text, len(solution.steps),
            sampler.max_prompt,
        )
    except ValueError:  # too long even without the solution
        return None


def _judged_row(
    claim: Claim, vote: int, prompt: tuple | None, stops: bool, written: Written | None, reading: Reading | None
) -> JudgedRow:
    solution, source = claim.solution, written or reading
    text = source.text if source else ""
    parsed = parse_verification(text, len(solution.steps), solution.format_score, stops)
    return JudgedRow(
        number=claim.number, sample=claim.sample, vote=vote, claim=digest(solution.problem.question, solution.text),
        text=text, verdict=parsed.verdict, judgements=parsed.judgements, is_aligned=parsed.aligned,
        format_score=float(parsed.format_score), is_truncated=source is not None and source.is_truncated,
        num_tokens=written.num_tokens if written else 0, is_shortened=prompt is not None and prompt[1],
        is_too_long=prompt is None, num_prompt=len(prompt[0]) if written else 0,
        num_scored=reading.num_tokens if reading else 0, p_verdict=written.p_verdict if written else None,
        p_scored=reading.p_verdict if reading else None,
    )


def read_judged(shard: Shard, votes: int) -> list[JudgedRow] | None:
    """The stored rows of a shard; None if they are incomplete or of other solutions."""
    rows = read_shard(shard.path, JudgedRow)
    wanted = [
        (claim.number, claim.sample, vote, digest(claim.solution.problem.question, claim.solution.text))
        for claim in shard.items for vote in range(votes)
    ]
    if rows is None or [(row.number, row.sample, row.vote, row.claim) for row in rows] != wanted:
        return None
    return rows


def as_verification(row: JudgedRow) -> Verification:
    return Verification(row.text, row.judgements, row.verdict, row.format_score, row.is_aligned, ())


def first_wrong(row: JudgedRow) -> int | None:
    """The first step judged wrong, or NO_ERROR; None if misaligned."""
    if not row.is_aligned:
        return None
    return next((k for k, judgement in enumerate(row.judgements) if not judgement), NO_ERROR)


def voted_first_wrong(rows: Sequence[JudgedRow]) -> int | None:
    """The first wrong step by majority of the aligned votes. The earliest vote breaks ties."""
    cast = [index for row in rows if (index := first_wrong(row)) is not None]
    return Counter(cast).most_common(1)[0][0] if cast else None


def scores_of(rows: Sequence[JudgedRow]) -> dict[str, float]:
    """Share of CORRECT verdicts, and mean share of approved steps, of one solution over its votes. Of a verifier that
    stops at the first error: the share of the steps before it."""
    approved = [row.judgements.count(True) / len(row.judgements) if row.is_aligned else 0.0 for row in rows]
    return {"verdict": float(np.mean([row.verdict == "CORRECT" for row in rows])), "steps": float(np.mean(approved))}


def probabilities_of(rows: Sequence[JudgedRow], is_written: bool) -> dict[str, float]:
    """P(CORRECT) of one solution, 0 without a verdict: the mean of what is written, and as read in one pass."""
    probability = {"probability": float(np.mean([row.p_verdict or 0.0 for row in rows]))} if is_written else {}
    return probability | {"scored": rows[0].p_scored or 0.0}
