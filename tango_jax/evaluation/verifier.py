"""Judging by the verifier: takes a shard of claims; returns verifications and the first errors that they report."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tango_jax.data.processbench import NO_ERROR
from tango_jax.evaluation.sets import Claim
from tango_jax.evaluation.shards import JudgedRow, Shard, digest, read_shard
from tango_jax.grading import parse_verification
from tango_jax.records import Verification
from tango_jax.runtime import rng
from tango_jax.sampling.checkpoint_sampler import CheckpointSampler
from tango_jax.text.templates import verifier_prompt


def judge_shard(
    sampler: CheckpointSampler, shard: Shard, votes: int, temperature: float, num_samples: int, seed: int
) -> list[JudgedRow]:
    """`votes` verifications of every claim, claim by claim; `num_samples`: the solutions of each problem."""
    prompts = [_prompt(sampler, claim) for claim in shard.items]
    asked = [c for c, prompt in enumerate(prompts) if prompt is not None]
    responses: dict[tuple[int, int], tuple] = {}  # (claim, vote) -> tokens, is_truncated
    if asked:
        places = [shard.items[c].number * (num_samples + 1) + shard.items[c].sample + 1 for c in asked]
        row_PM = np.array([[place * votes + vote for vote in range(votes)] for place in places]) % 2**31  # int32
        key = rng.step_key(seed, "judge", shard.set.name)
        rollout = sampler.sample([prompts[c][0] for c in asked], row_PM, key, temperature)
        keys = [(c, vote) for c in asked for vote in range(votes)]
        responses = dict(zip(keys, zip(rollout.tokens, rollout.is_truncated_B, strict=True), strict=True))
    return [
        _row(sampler, claim, vote, prompts[c], responses.get((c, vote)))
        for c, claim in enumerate(shard.items)
        for vote in range(votes)
    ]


def _prompt(sampler: CheckpointSampler, claim: Claim) -> tuple[list[int], bool] | None:
    """Prompt ids and whether the solution was shortened; None if there is nothing to judge, or no room."""
    if not claim.may_be_judged:
        return None
    solution = claim.solution
    try:
        return verifier_prompt(
            sampler.template, sampler.tokenizer, solution.problem, solution.text, len(solution.steps),
            sampler.max_prompt,
        )  # fmt: skip
    except ValueError:  # too long even without the solution
        return None


def _row(
    sampler: CheckpointSampler, claim: Claim, vote: int, prompt: tuple | None, response: tuple | None
) -> JudgedRow:
    tokens, is_truncated = response or ((), False)
    solution, text = claim.solution, sampler.tokenizer.decode(tokens)
    parsed = parse_verification(text, len(solution.steps), solution.format_score)
    return JudgedRow(
        number=claim.number, sample=claim.sample, vote=vote, claim=digest(solution.problem.question, solution.text),
        text=text, verdict=parsed.verdict, judgements=parsed.judgements, is_aligned=parsed.aligned,
        format_score=float(parsed.format_score), is_truncated=bool(is_truncated), num_tokens=len(tokens),
        is_shortened=prompt is not None and prompt[1], is_too_long=prompt is None,
    )  # fmt: skip


def read_judged(shard: Shard, votes: int) -> list[JudgedRow] | None:
    """The rows of an earlier attempt at a shard; None if they are incomplete or of other solutions."""
    rows = read_shard(shard.path, JudgedRow)
    wanted = [
        (claim.number, claim.sample, vote, digest(claim.solution.problem.question, claim.solution.text))
        for claim in shard.items for vote in range(votes)
    ]  # fmt: skip
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
    """The first wrong step by majority of the aligned votes; the earliest vote breaks ties."""
    cast = [index for row in rows if (index := first_wrong(row)) is not None]
    return Counter(cast).most_common(1)[0][0] if cast else None


def scores_of(rows: Sequence[JudgedRow]) -> dict[str, float]:
    """Share of CORRECT verdicts, and mean share of approved steps, of one solution over its votes."""
    approved = [sum(row.judgements) / len(row.judgements) if row.is_aligned else 0.0 for row in rows]
    return {"verdict": float(np.mean([row.verdict == "CORRECT" for row in rows])), "steps": float(np.mean(approved))}
