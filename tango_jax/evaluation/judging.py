r"""A verifier's judgements of given solutions, and the probability with which it writes each mark.

P(CORRECT) of a mark is read at the first token at which `\boxed{CORRECT}` and `\boxed{INCORRECT}` differ in the
verifier's tokenizer, after the prompt and all that the verification says before it: p(CORRECT's token) / (p(CORRECT's
token) + p(INCORRECT's token)), from the model's own logits (temperature 1), in a pass over the whole text. A word in
lower case is compared with the other in lower case.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tango_jax.data.processbench import solution_text, steps_of
from tango_jax.data.row_fields import BadRow, text_of
from tango_jax.data.rows import Row
from tango_jax.evaluation.shards import digest
from tango_jax.grading import parse_solution
from tango_jax.method.texts import make_verification, scored_verification
from tango_jax.records import Problem, Solution, Verification
from tango_jax.runtime import rng
from tango_jax.runtime.atomic import write_atomically
from tango_jax.runtime.checks import require
from tango_jax.runtime.console import Console
from tango_jax.sampling.checkpoint_sampler import CheckpointSampler, CheckpointSamplerSettings, open_checkpoint_sampler
from tango_jax.sampling.given_text import LogitsFn, make_logits_fn, make_text_reader, probability_of
from tango_jax.text.mark_rows import blank_marks, marks_alone
from tango_jax.text.marks import Mark, find_deciding_tokens, of_judgements
from tango_jax.text.prompts import solution_of
from tango_jax.text.templates import StepRow, step_row, verifier_prompt
from tango_jax.text.tokenizer import Tokenizer
from tango_jax.weights.workdir import identify_weights

SPLITS = {"blank_line": r"\n\s*\n", "line": r"\n"}
WANTED = "problem, and either steps (a list of strings) or solution (a text)"
_NO_LIMIT = 1 << 30
_DIGITS = 6  # significant, of a probability that is stored; in the last ones, batches differ by rounding


@dataclasses.dataclass(frozen=True)
class JudgeSettings:
    split: str = ""  # one of SPLITS, for solutions without <step> tags
    samples: int = 1  # verifications of a solution; 1: greedy, more: sampled
    temperature: float = 1.0  # of several samples
    scored: bool = False  # nothing is sampled: the marks stand in a text without remarks
    seed: int = 0
    sampler: CheckpointSamplerSettings = CheckpointSamplerSettings(rows=64, default_tokens=4096)


class Claim(NamedTuple):
    """A row to judge."""

    fields: dict[str, Any]
    solution: Solution
    prompt: list[int]
    digest: str  # of the prompt


class Place(NamedTuple):
    """Where a mark's probability is read."""

    row: list[int]  # prompt and verification
    index: int  # of the token after which the two words differ
    correct: int  # the next token of each word
    incorrect: int


class Reading(NamedTuple):
    """Of a solution, by a verifier that writes nothing."""

    text: str  # a verification with its marks
    p_verdict: float | None  # P(CORRECT); None: there is no step
    num_tokens: int  # of the pass, with the prompt; 0: there is none
    is_truncated: bool = False  # the marks are longer than a response may be, and none is read


def judge_rows(
    rows: Sequence[Row], verifier: str, settings: JudgeSettings, console: Console, out: Path | None = None
) -> list[dict[str, Any]]:
    """Each row's fields with `verifications`, `mean` and `digest`. With `out`, rows are written as they are judged, and
    those that the file already holds are not judged again.

    Raises ValueError, before the weights are read: a row cannot be judged, or `out` is by another verifier or settings.
    """
    sampler = open_verifier(verifier, settings.sampler, settings.scored)
    settings = dataclasses.replace(settings, scored=sampler.reads_marks)
    if not sampler.is_sampled:  # it reads the same each time
        settings = dataclasses.replace(settings, samples=1)
    claims = [read_claim(row, settings, sampler) for row in rows]
    who = digest(repr((verifier, *identify_weights(verifier, "verifier"), sampler.template, settings.samples,
                       settings.temperature, settings.scored, settings.seed, settings.sampler.use_chat,
                       settings.sampler.dtype, sampler.sampler.config.cache_buckets[-1])))
    found = {} if out is None else _read_judged(out, who)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    missing = list({claim.digest: claim for claim in claims if claim.digest not in found}.values())
    if missing:
        with console.stage("Judging", len(claims), len(claims) - len(missing)) as progress:
            logits_fn = make_logits_fn(sampler := sampler.with_weights())
            judge_fn = functools.partial(_judge, sampler, logits_fn)
            if sampler.source.model_config.score_head:
                judge_fn = functools.partial(_judge_by_scores, sampler)
            size = max(1, settings.sampler.rows // settings.samples)
            for part in (missing[start : start + size] for start in range(0, len(missing), size)):
                new = {claim.digest: {**result, "digest": f"{who}-{claim.digest}"}
                       for claim, result in zip(part, judge_fn(part, settings), strict=True)}
                found |= new
                if out is not None:
                    with open(out, "a", encoding="utf-8") as file:
                        file.writelines(_line(claim.fields | new[claim.digest]) for claim in part)
                progress.advance(len(part), phase="solution")
    results = [claim.fields | found[claim.digest] for claim in claims]
    if out is not None:
        write_atomically(out, "".join(map(_line, results)))  # in the order of the rows
    return results


def open_verifier(name: str, settings: CheckpointSamplerSettings, is_scored: bool = False) -> CheckpointSampler:
    """Marks are read if `is_scored`, and always of a verifier that was trained so. Raises ValueError as
    `open_checkpoint_sampler`."""
    sampler = open_checkpoint_sampler("verifier", name, settings)
    if not is_scored or sampler.source.model_config.score_head:
        return sampler
    return dataclasses.replace(sampler, reads_marks=True, stops=False)


def read_claim(row: Row, settings: JudgeSettings, sampler: CheckpointSampler) -> Claim:
    """Raises ValueError with the row's place: a field is missing, or its prompt is too long."""
    try:
        solution = _read_solution(row, settings.split)
    except BadRow as error:
        keys = ", ".join(map(str, row.fields)) or "none"
        raise ValueError(f"{row.where}: {error}; keys found: {keys}; keys wanted: {WANTED}") from error
    # Without a limit: what is judged is the whole solution, never a part of it.
    prompt, _ = verifier_prompt(sampler.template, sampler.tokenizer, solution.problem, solution.text,
                                len(solution.steps), _NO_LIMIT)
    require(len(prompt) <= sampler.max_prompt,
            f"{row.where}: with its {len(solution.steps)} steps the prompt has {len(prompt)} tokens; the limit is "
            f"{sampler.max_prompt}: raise --max_prompt, or leave the row out")
    if settings.scored:
        longest = sampler.sampler.config.longest
        tokens = len(prompt) + len(blank_marks(sampler.tokenizer, len(solution.steps)))
        require(tokens <= longest, f"{row.where}: with marks for its {len(solution.steps)} steps it has {tokens} "
                                   f"tokens; the limit is {longest}: raise --max_new, or leave the row out")
    return Claim(row.fields, solution, prompt, digest(repr(prompt)))


def _read_solution(row: Row, split: str) -> Solution:
    problem = Problem(row.id, text_of(row.fields, "problem"), "")
    if row.fields.get("steps") is not None:
        steps = steps_of(row.fields)
        return solution_of(problem, solution_text(steps), len(steps))
    text = text_of(row.fields, "solution")
    if steps := parse_solution(text).steps:
        return solution_of(problem, text, len(steps))
    if not split:
        raise BadRow(f"'solution' has no <step> tags: cut it into steps with --split={' or --split='.join(SPLITS)}")
    steps = tuple(part.strip() for part in re.split(SPLITS[split], text) if part.strip())
    return solution_of(problem, solution_text(steps), len(steps))


def _judge(
    sampler: CheckpointSampler, logits_fn: LogitsFn, claims: Sequence[Claim], settings: JudgeSettings
) -> list[dict[str, Any]]:
    samples = settings.samples
    if settings.scored:
        responses = [(blank_marks(sampler.tokenizer, len(claim.solution.steps)), False) for claim in claims]
    else:
        # By what is judged, not by its place: other rows in the file change nothing.
        number_PM = np.array([[int(digest(claim.digest, str(sample)), 16) % 2**31 for sample in range(samples)]
                              for claim in claims])
        temperature = settings.temperature if samples > 1 else 0.0
        rollout = sampler.sample([claim.prompt for claim in claims], number_PM, rng.step_key(settings.seed, "judge"),
                                 temperature)
        responses = list(zip(rollout.tokens, rollout.is_truncated_B, strict=True))
    owners = [claim for claim in claims for _ in range(samples)]
    probabilities = mark_probabilities(
        sampler.tokenizer, logits_fn, [claim.prompt for claim in owners], [tokens for tokens, _ in responses])
    verifications = [
        _verification(sampler, claim.solution, *response, *found, settings.scored)
        for claim, response, found in zip(owners, responses, probabilities, strict=True)
    ]
    groups = [verifications[start : start + samples] for start in range(0, len(verifications), samples)]
    return [{"verifications": group, "mean": _means(group)} for group in groups]


def _judge_by_scores(
    sampler: CheckpointSampler, claims: Sequence[Claim], settings: JudgeSettings
) -> list[dict[str, Any]]:
    """By a process reward model: one verification. `p_verdict` is the lowest probability of a step."""
    verifications = []
    for found in score_solutions(sampler, [claim.solution for claim in claims]):
        verifications.append({
            "judgements": list(found.judgements), "p_steps": _rounded(found.p_steps), "verdict": found.verdict,
            "p_verdict": _rounded(_lowest(found)), "text": "", "is_aligned": found.is_aligned, "is_truncated": False})
    return [{"verifications": [one], "mean": _means([one])} for one in verifications]


def score_solutions(sampler: CheckpointSampler, solutions: Sequence[Solution]) -> list[Verification]:
    """By a process reward model with weights; of a long solution, the steps that fit into `max_prompt`."""
    reader = make_text_reader(sampler.source.model_config, sampler.sampler)
    found = reader.step_probabilities(sampler.weights, _step_rows(sampler, solutions))
    return [scored_verification(*pair) for pair in zip(solutions, found, strict=True)]


def _step_rows(sampler: CheckpointSampler, solutions: Sequence[Solution]) -> list[StepRow]:
    return [step_row(sampler.template, sampler.tokenizer, solution.problem, solution.text, sampler.max_prompt)
            for solution in solutions]


def read_solutions(
    sampler: CheckpointSampler, prompts: Sequence[list[int]], solutions: Sequence[Solution]
) -> list[Reading]:
    """By a sampler with weights, in one pass: a process reward model's steps, or else the marks in a verification
    without remarks. Nothing is read where the marks have more tokens than a response may."""
    if sampler.source.model_config.score_head:
        found = zip(score_solutions(sampler, solutions), _step_rows(sampler, solutions), strict=True)
        return [Reading(one.text, _lowest(one), len(row.tokens) if one.p_steps else 0) for one, row in found]
    limit = sampler.sampler.config.cache_buckets[-1]
    marks = [blank_marks(sampler.tokenizer, len(one.steps)) for one in solutions]
    # Without steps there is a text, without a verdict.
    without_steps = marks_alone([]).partition("<final_verification>")[0]
    are_cut = [len(tokens) > limit for tokens in marks]
    readings = [Reading("" if is_cut else without_steps, None, 0, is_cut) for is_cut in are_cut]
    read = [c for c, is_cut in enumerate(are_cut) if solutions[c].steps and not is_cut]
    found = mark_probabilities(
        sampler.tokenizer, make_logits_fn(sampler), [prompts[c] for c in read], [marks[c] for c in read])
    for c, (p_steps, _) in zip(read, found, strict=True):
        tokens = len(prompts[c]) + len(marks[c])
        readings[c] = Reading(marks_alone([p >= 0.5 for p in p_steps]), math.prod(p_steps), tokens)
    return readings


def _lowest(found: Verification) -> float | None:
    """P(CORRECT) by a process reward model; None where there is no verdict, as of a solution that was cut and is right
    so far."""
    return None if found.verdict == "INVALID" else min(found.p_steps)


def _rounded(value: Any) -> Any:
    """A probability, None, or a list of them. Significant digits, so that products of many steps still differ."""
    if isinstance(value, Sequence):
        return [_rounded(one) for one in value]
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def mark_probabilities(
    tokenizer: Tokenizer, logits_fn: LogitsFn, prompts: Sequence[list[int]], responses: Sequence[Sequence[int]]
) -> list[tuple[list[float | None], float | None]]:
    """P(CORRECT) of each step block's mark and of the verdict, for each response; None: it has no such mark."""
    placed = [_places(tokenizer, prompt, tokens) for prompt, tokens in zip(prompts, responses, strict=True)]
    places = [place for row in placed for place in row if place is not None]
    rows = {id(place.row): place.row for place in places}
    chosen = sorted({token for place in places for token in (place.correct, place.incorrect)})
    logits = dict(zip(rows, logits_fn(list(rows.values()), chosen), strict=True)) if rows else {}

    def probability(place: Place | None) -> float | None:
        if place is None:
            return None
        of_words = logits[id(place.row)][place.index, [chosen.index(place.correct), chosen.index(place.incorrect)]]
        return probability_of(*of_words)

    found = [[probability(place) for place in row] for row in placed]
    return [(row[:-1], row[-1]) for row in found]


def _places(tokenizer: Tokenizer, prompt: list[int], tokens: Sequence[int]) -> list[Place | None]:
    """Of each step block's mark, and of the verdict. Where the model spelled its text with other tokens than its
    tokenizer, the tokenizer's are read."""
    row = [*prompt, *map(int, tokens)]

    def place(mark: Mark) -> Place:
        read, index = ([*prompt, *mark.spelled], mark.place) if mark.token is None else (row, mark.token)
        return Place(read, len(prompt) + index - 1, mark.correct, mark.incorrect)

    return [None if mark is None else place(mark)
            for mark in find_deciding_tokens(tokenizer, *tokenizer.decode_with_ends(tokens))]


def _verification(
    sampler: CheckpointSampler, solution: Solution, tokens: Sequence[int], is_truncated: bool,
    p_steps: list[float | None], p_verdict: float | None, is_scored: bool,
) -> dict[str, Any]:
    parsed = make_verification(solution, *sampler.tokenizer.decode_with_ends(tokens), is_truncated, sampler.stops)
    judgements, verdict = list(parsed.judgements), parsed.verdict
    p_steps = list(of_judgements(p_steps, judgements))
    if is_scored:  # the text has CORRECT everywhere, so its own verdict would say so
        judgements, p_verdict = [p >= 0.5 for p in p_steps], math.prod(p_steps) if p_steps else None
        verdict = ("CORRECT" if all(judgements) else "INCORRECT") if judgements else "INVALID"
    return {"judgements": judgements, "p_steps": _rounded(p_steps), "verdict": verdict,
            "p_verdict": _rounded(p_verdict), "text": "" if is_scored else parsed.text, "is_aligned": parsed.is_aligned,
            "is_truncated": bool(is_truncated)}


def _means(verifications: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the steps, over the verifications that judge each step once; of the verdict, over those that have one.

    Of a verifier that stops at the first error, a step that it does not reach is not correct, and has a probability
    only where every aligned verification reaches it: those that do are not a fair sample.
    """
    aligned = [one for one in verifications if one["is_aligned"]]
    p_verdicts = [one["p_verdict"] for one in verifications if one["p_verdict"] is not None]

    def mean(values: Sequence) -> Any:
        return _rounded(np.mean(values, axis=0).tolist()) if len(values) else None

    p_steps = mean(np.array([one["p_steps"] for one in aligned], float))  # NaN in place of None
    return {"p_steps": p_steps and [None if math.isnan(p) else p for p in p_steps], "p_verdict": mean(p_verdicts),
            "correct_steps": mean([[mark is True for mark in one["judgements"]] for one in aligned]),
            "correct_verdict": mean([one["verdict"] == "CORRECT" for one in verifications])}


def summary(results: Sequence[dict[str, Any]]) -> str:
    verifications = [one for result in results for one in result["verifications"]]
    invalid = sum(one["verdict"] == "INVALID" for one in verifications)
    misaligned = sum(not one["is_aligned"] for one in verifications)
    text = (f"solutions: {len(results)}, verifications: {len(verifications)}, of which {invalid} without a verdict "
            f"(INVALID), {misaligned} without one judgement for each step")
    if verifications and invalid == len(verifications):
        text += ("; this model does not write the marks: is it a verifier, and --template its own? --scored reads "
                 "probabilities without them")
    return text


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, default=str) + "\n"  # parquet has dates


def _read_judged(out: Path, who: str) -> dict[str, dict[str, Any]]:
    """{digest of a prompt: its result} of an earlier call. ValueError: a line is by another verifier or settings."""
    if not out.exists():
        return {}
    *lines, torn = out.read_text(encoding="utf-8", errors="replace").split("\n")
    found = {}
    # One unfinished line alone may be anybody's file.
    for number, line in enumerate(lines or [torn] * bool(torn), 1):
        try:
            row = json.loads(line)
            judge, _, claim = row["digest"].partition("-")
            result = {name: row[name] for name in ("verifications", "mean", "digest")}
        except (ValueError, TypeError, KeyError, AttributeError):
            judge = ""
        require(judge == who, f"{out}, line {number}, was not written by this verifier with these settings: choose "
                              "another --out, or remove the file")
        found[claim] = result
    if torn:  # by a kill
        write_atomically(out, "".join(f"{line}\n" for line in lines))
    return found
