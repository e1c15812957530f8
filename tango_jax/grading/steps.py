"""Parser for generator responses: step spans, the boxed answer and the format score.

Model text can be anything, so no function raises on it, and every scan is a single pass: lazy regular expressions such
as `<step>(.*?)</step>` take quadratic time when many tags are left open.
"""
import re
from dataclasses import dataclass

# In order: the start of a box; the extra backslash of `\\boxed{`, which is skipped by itself; escapes such as `\{` and
# `\\`, which do not group; and braces, which do.
_BRACE_TOKEN = re.compile(r"\\boxed\{|\\(?=\\boxed\{)|\\.|[{}]", re.DOTALL)
# Inside a box, a quoted string of a Python literal is skipped, so that the brace in `\boxed{'}'}` closes nothing. To
# distinguish it from primes and apostrophes, it must begin and end on one line, where a literal may begin and end.
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
    """The parsed parts of one generator response."""

    step_spans: tuple[tuple[int, int], ...]  # (start, end) characters of each step, tags included
    steps: tuple[str, ...]  # text inside each step, tags excluded
    answer: str | None  # text inside the last box of the first answer block; None if there is none
    format_score: float  # in [0, 1]


def parse_solution(text: str, min_steps: int = 3) -> ParsedSolution:
    """Parse the steps, the answer and the format score of one generator response.

    Args:
        min_steps: a solution with at least one step but fewer than this many loses 0.4 of its format score.
    """
    spans = find_blocks(text, "step")
    block = first_block(text, "answer")
    return ParsedSolution(
        step_spans=spans,
        steps=tuple(inner_text(text, span, "step") for span in spans),
        answer=None if block is None else last_boxed(block),
        format_score=_format_score(block, len(spans), min_steps),
    )


def _format_score(answer_block: str | None, num_steps: int, min_steps: int) -> float:
    """Return 1 minus the penalties, or 0 without an answer block. At most one of the two step penalties applies."""
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
    """Clamp a score to [0, 1] and remove the rounding error of sums such as 1 - 0.8."""
    return round(min(1.0, max(0.0, score)), 10)


def find_blocks(text: str, tag: str) -> tuple[tuple[int, int], ...]:
    """The spans, tags included, of the non-overlapping `<tag>...</tag>`; each ends at the first closing tag."""
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
    """The text between the tags of a span."""
    return text[span[0] + len(tag) + 2 : span[1] - len(tag) - 3]


def first_block(text: str, tag: str) -> str | None:
    """The text inside the first closed `<tag>...</tag>`, or None."""
    spans = find_blocks(text, tag)
    return inner_text(text, spans[0], tag) if spans else None


def last_boxed(text: str) -> str | None:
    r"""The text inside the balanced `\boxed{}` that starts last, or None; of nested boxes, the innermost."""
    boxes = _closed_boxes(text)
    if not boxes:
        return None
    start, end = max(boxes)
    return text[start + len(r"\boxed{") : end - 1]


def is_single_box(text: str) -> bool:
    r"""Whether the text is one balanced, non-empty `\boxed{...}` and nothing else."""
    return (0, len(text)) in _closed_boxes(text) and text != r"\boxed{}"


def _closed_boxes(text: str) -> list[tuple[int, int]]:
    """The spans of all balanced boxes, in the order in which they close."""
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
