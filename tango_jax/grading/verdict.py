"""Parser for verifier responses: judgements, verdict, format score.

Step blocks count only inside the first closed `<step_verification>` section. The verdict is the first one behind it, or
else the first one.
"""
import re
from dataclasses import dataclass

from tango_jax.grading.steps import clamp_score, find_blocks, first_block, inner_text

_SECTION_OPEN, _SECTION_CLOSE = "<step_verification>", "</step_verification>"
_FINAL_OPEN, _FINAL_CLOSE = "<final_verification>", "</final_verification>"
_VERDICT = re.compile(rf"{_FINAL_OPEN}\s*\\(?ai:box(?:ed)?\{{(CORRECT|INCORRECT)\}})\.?\s*{_FINAL_CLOSE}")
_BOX_ENDINGS = tuple(f"\\{command}{{{word}}}" for command in ("box", "boxed") for word in ("correct", "incorrect"))

BAD_VERDICT_PENALTY = 0.8
NO_BLOCKS_PENALTY = 0.8
WRONG_COUNT_PENALTY = 0.8
STRAY_TEXT_PENALTY = 0.4
# Below it, a solution's step count is too unreliable to require of the verifier.
MIN_GENERATOR_FORMAT = 0.6


@dataclass(frozen=True)
class ParsedVerification:
    # One per block; None if the block contains no judgement. Of a verifier that stops at the first error: one per step,
    # None after the error.
    judgements: tuple[bool | None, ...]
    verdict: str  # CORRECT, INCORRECT or INVALID
    format_score: float  # in [0, 1]
    aligned: bool  # one judgement for every step of the solution, which has at least one step
    blocks: tuple[str, ...]  # text inside each block, tags excluded


def parse_verification(
    text: str, num_steps: int, generator_format_score: float = 1.0, stops: bool = False
) -> ParsedVerification:
    """`num_steps` and `generator_format_score` describe the solution. `stops`: the verifier is to stop at the first
    step that it judges INCORRECT (`verifier.stop_at_first_error`).

    It judges the steps up to there; later ones are not judged. Blocks after the first INCORRECT are not read, and lower
    the format score as any wrong count does, so a verifier learns to stop, and none of its judgements is lost before.
    Without an INCORRECT it must judge all steps.
    """
    blocks = tuple(block for _, block in _blocks(text))
    marks, verdict = find_marks(text)
    judgements = tuple(None if mark is None else text[slice(*mark)].lower() == "correct" for mark in marks)
    num_judged, is_judged = sum(judgement is not None for judgement in judgements), None not in judgements
    is_count_right = num_judged == num_steps
    if stops and False in judgements[:num_steps]:
        num_judged = judgements.index(False) + 1
        is_judged = None not in judgements[:num_judged]
        is_count_right = is_judged and len(judgements) == num_judged
        if is_judged:
            judgements = judgements[:num_judged] + (None,) * (num_steps - num_judged)
    return ParsedVerification(
        judgements=judgements,
        verdict="INVALID" if verdict is None else text[slice(*verdict)].upper(),
        format_score=_format_score(text.strip(), blocks, is_count_right, generator_format_score),
        aligned=is_judged and 0 < num_steps == len(judgements),
        blocks=blocks,
    )


def until_first_error(text: str) -> str:
    """A verification without the blocks after its first INCORRECT."""
    marks, _ = find_marks(text)
    is_wrong = [mark is not None and text[slice(*mark)].lower() == "incorrect" for mark in marks]
    if True not in is_wrong:
        return text
    ends = [start + len(block + "</step>") for start, block in _blocks(text)]
    return text[: ends[is_wrong.index(True)]] + text[ends[-1] :]


def find_marks(text: str) -> tuple[list[tuple[int, int] | None], tuple[int, int] | None]:
    """(start, end) of the word CORRECT or INCORRECT in each block, and in the verdict; None: there is none."""
    marks = []
    for start, block in _blocks(text):
        tail = block.rstrip().removesuffix(".")
        is_marked = tail[-32:].lower().endswith(_BOX_ENDINGS)
        marks.append((start + tail.rindex("{") + 1, start + len(tail) - 1) if is_marked else None)
    # A block may quote a verdict from the solution; the verifier's follows its section.
    sections = find_blocks(text, "step_verification")
    verdict = _VERDICT.search(text, sections[0][1] - len(_SECTION_CLOSE) if sections else 0) or _VERDICT.search(text)
    return marks, None if verdict is None else verdict.span(1)


def _blocks(text: str) -> list[tuple[int, str]]:
    """Where the inner text of each step block begins, and that text."""
    sections = find_blocks(text, "step_verification")
    if not sections:
        return []
    section = inner_text(text, sections[0], "step_verification")
    offset = sections[0][0] + len(_SECTION_OPEN + "<step>")
    return [(offset + span[0], inner_text(section, span, "step")) for span in find_blocks(section, "step")]


def why_misaligned(judgements: tuple[bool | None, ...], num_steps: int) -> str:
    """Why there is not one judgement for each step; empty if there is."""
    if len(judgements) != num_steps or num_steps == 0:
        return f"{_counted(len(judgements), 'judgement')} for {_counted(num_steps, 'step')}"
    missing = ", ".join(str(k) for k, judgement in enumerate(judgements, 1) if judgement is None)
    return f"no judgement of step {missing}" if missing else ""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def _format_score(text: str, blocks: tuple[str, ...], is_count_right: bool, generator_format_score: float) -> float:
    """0 unless the text is a step section followed by a final section."""
    final_start = _final_section_start(text)
    if final_start is None:
        return 0.0
    score = 1.0
    if _VERDICT.match(text, final_start) is None:
        score -= BAD_VERDICT_PENALTY
    if not blocks:
        score -= NO_BLOCKS_PENALTY
    elif not is_count_right and generator_format_score >= MIN_GENERATOR_FORMAT - 1e-9:
        score -= WRONG_COUNT_PENALTY
    section = first_block(text, "step_verification")
    edges = [0, *(edge for span in find_blocks(section, "step") for edge in span), len(section)]
    if any(section[start:end].strip() for start, end in zip(edges[::2], edges[1::2], strict=True)):
        score -= STRAY_TEXT_PENALTY
    return clamp_score(score)


def _final_section_start(text: str) -> int | None:
    """None unless the text has both sections in order. A second answer may lie between, as in the published code."""
    if not text.startswith(_SECTION_OPEN) or not text.endswith(_FINAL_CLOSE):
        return None
    section_end = text.find(_SECTION_CLOSE)
    if section_end < 0:
        return None
    rest = text[section_end + len(_SECTION_CLOSE) :].lstrip()
    return len(text) - len(rest) if rest.startswith(_FINAL_OPEN) else None
