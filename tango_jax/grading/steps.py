"""Parse a generator response: its text in; step spans, the boxed answer and the format score out.

Stage of the loop: right after sampling. Everything here reads model text, so nothing raises on it, and every scan is
a single pass: lazy regular expressions such as `<step>(.*?)</step>` are quadratic when many tags are left open.
"""
import re
from dataclasses import dataclass

# A box opens; the extra backslash of `\\boxed{` is skipped on its own; `\{`, `\}` and `\\` do not group; a brace does.
_BRACE_TOKEN = re.compile(r"\\boxed\{|\\(?=\\boxed\{)|\\.|[{}]", re.DOTALL)
# Inside a box, a quoted string of a Python literal is passed over: the brace of `\boxed{'}'}` ends nothing. It begins
# where a literal may begin and ends, on the same line, where one may end, which tells it from primes and apostrophes.
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
    """What one generator response says."""

    step_spans: tuple[tuple[int, int], ...]  # (start, end) characters of each step, tags included
    steps: tuple[str, ...]  # text inside each step, tags excluded
    answer: str | None  # text inside the last box of the first answer block; None without one
    format_score: float  # in [0, 1]


def parse_solution(text: str, min_steps: int = 3) -> ParsedSolution:
    """Steps, answer and format score of one generator response.

    `min_steps`: a solution with at least one step but fewer than this many loses 0.4 of its format score.
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
    """1 minus the penalties, 0 without an answer block. The two step penalties exclude each other."""
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
    """Into [0, 1], without the dust that sums such as 1 - 0.8 leave."""
    return round(min(1.0, max(0.0, score)), 10)


def find_blocks(text: str, tag: str) -> tuple[tuple[int, int], ...]:
    """Spans (tags included) of every non-overlapping `<tag>...</tag>`, each ending at the first closing tag."""
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
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = text.find(opening)
    if start < 0:
        return None
    end = text.find(closing, start + len(opening))
    return None if end < 0 else text[start + len(opening) : end]


def last_boxed(text: str) -> str | None:
    r"""The text inside the last balanced `\boxed{}`, or None. Of nested boxes the innermost starts last."""
    boxes = _closed_boxes(text)
    if not boxes:
        return None
    start, end = max(boxes)
    return text[start + len(r"\boxed{") : end - 1]


def is_single_box(text: str) -> bool:
    r"""Whether the text is one balanced `\boxed{...}` with something inside, and nothing else."""
    return (0, len(text)) in _closed_boxes(text) and text != r"\boxed{}"


def _closed_boxes(text: str) -> list[tuple[int, int]]:
    """Spans of all balanced boxes, in the order in which they close."""
    open_groups: list[int | None] = []  # start of a box, or None for a plain group
    boxes = []
    num_open = 0  # of the boxes among them
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
