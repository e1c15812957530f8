"""Checked access to a raw row's fields. Errors are BadRow; `row_formats.to_problem` adds file, line and keys."""

import json
import math
import re
from typing import Any

from tango_jax.grading.answer import number_text
from tango_jax.runtime.checks import shortened

Fields = dict[str, Any]
Content = tuple[str, str, int]  # question, gold answer, size (see records.Problem)

GSM8K_MARK = "####"
_GROUPED_NUMBER = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NEEDED_TEXT = re.compile(
    "options|choices|context|body|passages?|paragraphs?|premises?|article|document|facts|tables?|input"
)
_NEEDED_IMAGE = re.compile(r"(decoded_)?images?(_?\d+)?|pictures?|figures?|diagrams?")


class BadRow(Exception):
    """An error in a row; `to_problem` adds the row's location."""


def value_of(fields: Fields, key: str) -> Any:
    if fields.get(key) is None:
        raise BadRow(f"{key!r} is missing" if key not in fields else f"{key!r} is null")
    return fields[key]


def text_of(fields: Fields, key: str, may_be_empty: bool = False) -> str:
    value = value_of(fields, key)
    if not isinstance(value, str) or not (value.strip() or may_be_empty):
        raise BadRow(f"{key!r} must be a non-empty string, not {shortened(value)}")
    return encodable(key, value.strip())


def encodable(key: str, text: str) -> str:
    """BadRow: half of a surrogate pair, which JSON may hold and no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"{key!r} contains {text[error.start]!r}, half of a surrogate pair, at character {error.start}: "
                     "write the whole character") from error
    return text


def check_keys(fields: Fields) -> None:
    """BadRow: two keys differ only in case. Some readers ignore case and would read just one of them."""
    seen: Fields = {}
    for key in fields:
        if (other := seen.setdefault(str(key).lower(), key)) != key:
            raise BadRow(f"the keys {other!r} and {key!r} differ only in case: remove or rename one of them")


def refuse_left_out(fields: Fields, place: str = "question") -> None:
    """BadRow: a non-empty unread column belongs to the problem and would not reach the prompt, the text of `place`."""
    for key, value in fields.items():
        name = str(key).lower()
        if _NEEDED_TEXT.fullmatch(name) and not _is_empty(value):
            raise BadRow(f"{name!r} would be left out of the prompt: put it into {place!r}, and remove the key")
        if _NEEDED_IMAGE.fullmatch(name) and not _is_empty(value):
            raise BadRow(f"{name!r} would be left out of the prompt, which is text alone: remove the key, or the row "
                         "if its problem needs the image")


def _is_empty(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return all(map(_is_empty, value))
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def decoded_of(value: Any) -> Any:
    """Decodes a value that some files store as JSON text."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def answer_text(value: Any) -> str:
    """The grader's form of a gold answer: 27 for 27.0, the element of a list of one. After GSM8K's `####`, the rest of
    the line counts, without commas between digits."""
    if isinstance(value, (list, tuple)):
        if len(value) != 1:
            raise BadRow(f"the answer is a list of {len(value)}; it must have one element: {shortened(value)}")
        return answer_text(value[0])
    if not isinstance(value, (str, int, float)) or value != value or value in (math.inf, -math.inf):
        raise BadRow(f"the answer must be a string or a number, not {shortened(value)}")
    text = number_text(value) if isinstance(value, (int, float)) else value.strip()
    if GSM8K_MARK in text:
        text, *_ = text.rsplit(GSM8K_MARK, 1)[1].splitlines() or [""]
        text = text.strip()
        if not text:
            raise BadRow(f"no answer follows {GSM8K_MARK} on its line: write the answer there")
        text = text.replace(",", "") if _GROUPED_NUMBER.fullmatch(text) else text
    if not text:
        raise BadRow("the answer is empty")
    return text
