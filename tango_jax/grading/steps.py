"""Parser for generator responses: steps, boxed answer, format score.

No function raises on any text, and every scan is a single pass: `<step>(.*?)</step>` is quadratic with many open tags.
"""
import re
from dataclasses import dataclass

# A box; the extra backslash of `\\boxed{`; escapes such as `\{`, which do not group; braces, which do.
_BRACE_TOKEN = re.compile(r"\\boxed\{|\\(?=\\boxed\{)|\\.|[{}]", re.DOTALL)
# Inside a box, a quoted string is skipped: the brace in `\boxed{'}'}` closes nothing. Unlike primes and apostrophes, it
# begins and ends on one line, where a Python literal may.
_STRING = "|".join(rf"{quote}(?:\\[^\n]|(?!\\boxed\{{)[^{quote}\\\n])*{quote}" for quote in "'\"")
_TOKEN_IN_BOX = re.compile(
    rf"(?:(?<=[\[({{,:])|(?<=[\[({{,:] ))[bB]?(?:{_STRING})(?=\s*(?:[,\]):}}.]|\\\}}))|{_BRACE_TOKEN.pattern}",
    re.DOTALL,
)

BAD_ANSWER_PENALTY = 0.8
NO_STEPS_PENALTY = 0.8
FEW_STEPS_PENALTY = 0.4


@dataclass(frozen=True)
class ParsedSolution:
    step_spans: tuple[tuple[int, int], ...]  # (start, end) characters of each step, tags included
    steps: tuple[str, ...]  # text inside each step, tags excluded
    answer: str | None  # text inside the last box of the first answer block; None if there is none
    format_score: float  # in [0, 1]


def parse_solution(text: str, min_steps: int = 3) -> ParsedSolution:
    """Fewer steps than `min_steps`, but at least one, cost 0.4 of the format score."""
    spans = find_blocks(text, "step")
    block = first_block(text, "answer")
    return ParsedSolution(
        step_spans=spans,
        steps=tuple(inner_text(text, span, "step") for span in spans),
        answer=None if block is None else last_boxed(block),
        format_score=_format_score(block, len(spans), min_steps),
    )


def _format_score(answer_block: str | None, num_steps: int, min_steps: int) -> float:
    if answer_block is None:
        return 0.0
    score = 1.0
    if not is_single_box(answer_block.strip()):
        score -= BAD_ANSWER_PENALTY
    if num_steps == 0:
        score -= NO_STEPS_PENALTY
    elif num_steps < min_steps:
        score -= FEW_STEPS_PENALTY
    return clamp_score(score)


def clamp_score(score: float) -> float:
    """Removes the rounding error of sums such as 1 - 0.8, too."""
    return round(min(1.0, max(0.0, score)), 10)


def find_blocks(text: str, tag: str) -> tuple[tuple[int, int], ...]:
    """(start, end) of each `<tag>...</tag>`, tags included; a block ends at the first closing tag."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    spans = []
    start = text.find(opening)
    while start >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            break
        end += len(closing)
        spans.append((start, end))
        start = text.find(opening, end)
    return tuple(spans)


def inner_text(text: str, span: tuple[int, int], tag: str) -> str:
    return text[span[0] + len(tag) + 2 : span[1] - len(tag) - 3]


def first_block(text: str, tag: str) -> str | None:
    spans = find_blocks(text, tag)
    return inner_text(text, spans[0], tag) if spans else None


def last_boxed(text: str) -> str | None:
    r"""The content of the balanced `\boxed{}` that starts last, or None; of nested boxes, the innermost."""
    boxes = _closed_boxes(text)
    if not boxes:
        return None
    start, end = max(boxes)
    return text[start + len(r"\boxed{") : end - 1]


def is_single_box(text: str) -> bool:
    return (0, len(text)) in _closed_boxes(text) and text != r"\boxed{}"


def _closed_boxes(text: str) -> list[tuple[int, int]]:
    open_groups: list[int | None] = []  # start of a box, or None for a plain group
    boxes = []
    num_open = 0  # number of boxes in `open_groups`
    token = _BRACE_TOKEN.search(text)
    while token is not None:
        kind = token.group()
        if kind == r"\boxed{":
            open_groups.append(token.start())
            num_open += 1
        elif kind == "{":
            open_groups.append(None)
        elif kind == "}" and open_groups:
            start = open_groups.pop()
            if start is not None:
                boxes.append((start, token.end()))
                num_open -= 1
        token = (_TOKEN_IN_BOX if num_open else _BRACE_TOKEN).search(text, token.end())
    return boxes
