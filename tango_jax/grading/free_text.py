"""Comparison of short free-text answers (kind "text"): names, numbers and ordered lists of them."""
import re
import unicodedata
from decimal import Decimal

from tango_jax.grading.answer import half_width

_LATEX_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|tt)?|math(?:rm|bf)|mbox)\s*\{([^{}]*)\}")
_ESCAPED = re.compile(r"\\([%$#&_{}])")
_SIGNS = str.maketrans("–—−‐‑’‘“”", "-----''\"\"")
_ARTICLE = re.compile(r"(?:the|an?)\s+")
_ITEM_GAP = re.compile(r" ?(?:;|,(?!\d{3}(?!\d))) ?")  # the comma in 1,000 does not separate items
_NUMBER = re.compile(r"(-?)[$€£]?(\d{0,18}(?:,\d{3}){0,5}(?:\.\d{1,18})?) ?%?")


def matches_text(gold: str, answer: str) -> bool:
    """Whether both are the same words, number, or ordered list. Ignored are case, width, a leading article, quotes,
    dollar and percent signs, a final period and a number's notation. An empty answer matches nothing."""
    gold_items, items = _items(gold), _items(answer)
    if len(gold_items) != len(items) or not any(items):
        return False
    return all(gold == item or ((number := _number(gold)) is not None and number == _number(item))
               for gold, item in zip(gold_items, items, strict=True))


def _items(text: str) -> list[str]:
    text = _ESCAPED.sub(r"\1", _LATEX_TEXT.sub(r"\1", text))
    # Not NFKC, which would turn 2² into 22.
    text = unicodedata.normalize("NFC", half_width(text)).translate(_SIGNS).casefold()
    return [_plain(item) for item in _ITEM_GAP.split(_plain(text).strip("[]"))]


def _plain(text: str) -> str:
    text = " ".join(text.split()).strip("\"'`*").removesuffix(".").strip()
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    return _ARTICLE.sub("", text, count=1) if _ARTICLE.match(text) else text


def _number(text: str) -> Decimal | None:
    match = _NUMBER.fullmatch(text)
    digits = "" if match is None else match[2].replace(",", "")
    if not any(char.isdigit() for char in digits):
        return None
    return Decimal(digits) * (-1 if match[1] else 1)
