"""What a model's own samples give to imitate: rows in the form that `task.stage_one=FILE` takes."""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tango_jax.grading import parse_solution, parse_verification
from tango_jax.records import Problem
from tango_jax.tasks.arithmetic import has_short_decimals, number_text, value_of
from tango_jax.tasks.tagged_examples import TaggedRow

SELF = "self"  # the value of task.stage_one, the keys' group, and the folder in the workdir
GATE = 0.8  # share of samples by the plain prompt that are well formed, from which on turns teach the rest
LOOKED_AT = 32  # such samples before and after a round: a share of .8 is then known to about .07

_TAG = re.compile(r"</?\w+>")
_LAYOUT = re.compile(r"<think>( <step> </step>)+ </think> <answer> </answer>")

# A computation and its result, as in `7 + 5 = 12`.
_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
_COMPUTATION = re.compile(rf"(\(?{_NUMBER}(?:[ ()]*[-+*/][ (]*{_NUMBER}\)?)+) *= *({_NUMBER})(?![\d.,]*\d)")


class Claim(NamedTuple):
    """A solution to judge."""

    problem: Problem
    text: str
    num_steps: int
    is_right: bool  # the grade of its answer
    damaged: int | None = None  # the step into which a mistake was put; the answer is as it was


def closed(text: str, tag: str) -> str:
    """Up to the first end of this tag: after worked examples, a model may go on with a problem of its own."""
    head, end, _ = text.partition(f"</{tag}>")
    return f"{head}{end}".strip()


def has_layout(text: str) -> bool:
    """Whether it has exactly the tags of the text contract, in order and closed. The format score checks only steps
    and answer."""
    return _LAYOUT.fullmatch(" ".join(_TAG.findall(text))) is not None


def is_well_formed(text: str, min_steps: int, is_strict: bool = False) -> bool:
    """Whether the format score is full, and no step begins in another: small models write `<step>` twice. `is_strict`:
    and whether it has the layout, since `<thought>` or a missing `<think>` would be imitated."""
    parsed = parse_solution(text, min_steps)
    is_formed = parsed.format_score == 1.0 and not any("<step>" in step for step in parsed.steps)
    return is_formed and (not is_strict or has_layout(text))


def keep_solutions(
    problems: Sequence[Problem], texts: Sequence[Sequence[tuple[str, bool]]], most: int, min_steps: int,
    is_strict: bool = False, fits_fn: Callable[[TaggedRow], bool] = lambda row: True,
) -> list[TaggedRow]:
    """Of each problem's (text, is right) at most `most` different ones that are right, well formed and short enough
    (`fits_fn`)."""
    kept = []
    for problem, own in zip(problems, texts, strict=True):
        good = dict.fromkeys(text for text, is_right in own if is_right and is_well_formed(text, min_steps, is_strict))
        rows = (TaggedRow(problem, text, len(parse_solution(text).steps), "") for text in good)
        kept += list(filter(fits_fn, rows))[:most]  # all are tried, so that a count does not depend on their order
    return kept


def claims_of(
    problems: Sequence[Problem], texts: Sequence[Sequence[tuple[str, bool]]], min_steps: int, seed: int
) -> list[Claim]:
    """All well-formed solutions, and right ones with a damaged step as well. Of different problems first."""
    claims, seen = [], set()
    for place, own in enumerate(itertools.zip_longest(*texts)):  # first samples, second samples, ...
        for number, (problem, sample) in enumerate(zip(problems, own, strict=True)):
            text, is_right = sample or ("", False)
            if not is_well_formed(text, min_steps) or (problem.id, text) in seen:
                continue
            seen.add((problem.id, text))
            claim = Claim(problem, text, len(parse_solution(text).steps), is_right)
            claims.append(claim)
            if is_right and (found := damage(claim, np.random.default_rng((seed, place, number)))):
                claims.append(found)
    return claims


def choose_claims(claims: Sequence[Claim], count: int) -> list[Claim]:
    """At most `count` claims, the kinds in turns: half are wrong, a quarter right, a quarter right with a damaged step.
    A kind with too few claims is not filled up. A count of 1 gives one wrong and one right claim."""
    kinds: dict[str, list[Claim]] = {"wrong": [], "right": [], "damaged": []}
    for claim in claims:
        kinds[_kind(claim)].append(claim)
    wrong, right = kinds["wrong"][: max(1, count // 2)], kinds["right"][: count - count // 2 - count // 4]
    return _in_turns(wrong, _in_turns(right, kinds["damaged"][: count // 4]))


def _kind(claim: Claim) -> str:
    return "damaged" if claim.damaged is not None else "right" if claim.is_right else "wrong"


def damage(claim: Claim, rng: np.random.Generator) -> Claim | None:
    """One step's result is replaced by another number, so that the step is certainly wrong; steps after it and the
    answer stay. None: no step has a computation that holds."""
    spans = parse_solution(claim.text).step_spans
    places = [(step, match) for step, (start, end) in enumerate(spans)
              for match in _COMPUTATION.finditer(claim.text, start, end) if _holds(match)]
    if not places:
        return None
    step, match = places[rng.integers(len(places))]
    value = value_of(match[2])
    others = [value + 1, value + 10, 2 * value + 2, *[value - less for less in (1, 10) if value > less]]
    wrong = number_text(others[rng.integers(len(others))], has_commas="," in match[2])
    return claim._replace(text=f"{claim.text[: match.start(2)]}{wrong}{claim.text[match.end(2):]}", damaged=step)


def _holds(match: re.Match) -> bool:
    value = value_of(match[2])
    return value is not None and value_of(match[1]) == value and has_short_decimals(value)


def agrees(claim: Claim, verification: str) -> bool:
    """Whether a verification is well formed, its verdict agrees with the grade, and it finds the damaged step."""
    found = parse_verification(verification, claim.num_steps)
    return (found.aligned and found.format_score == 1.0 and found.verdict == ("INCORRECT", "CORRECT")[claim.is_right]
            and (claim.damaged is None or found.judgements[claim.damaged] is False))


def keep_verifications(
    claims: Sequence[Claim], texts: Sequence[Sequence[str]], most: int,
    fits_fn: Callable[[TaggedRow], bool] = lambda row: True,
) -> list[TaggedRow]:
    """At most `most` different verifications of each claim, which agree with its label and are short enough
    (`fits_fn`). Right and wrong solutions are balanced, in turns. Half of the right ones have a damaged step, if there
    are enough."""
    kept: dict[str, list[TaggedRow]] = {"wrong": [], "right": [], "damaged": []}
    for claim, own in zip(claims, texts, strict=True):
        good = dict.fromkeys(text for text in own if agrees(claim, text))
        rows = (TaggedRow(claim.problem, claim.text, claim.num_steps, text) for text in good)
        kept[_kind(claim)] += list(filter(fits_fn, rows))[:most]
    right = _in_turns(kept["damaged"], kept["right"])
    count = min(len(right), len(kept["wrong"]))
    return _in_turns(right[:count], kept["wrong"][:count])


def _in_turns(*lists: list) -> list:
    return [row for rows in itertools.zip_longest(*lists) for row in rows if row is not None]


def as_fields(row: TaggedRow) -> dict[str, str]:
    """A line of the file."""
    fields = {"question": row.problem.question, "solution": row.solution}
    return fields | ({"verification": row.verification} if row.verification else {})
