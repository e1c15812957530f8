r"""Compare short free-text answers (names, numbers, lists of them): two strings in, True or False out.

Stage of the loop: grading, kind "text", for answers read from a table or a passage. Stricter than a measure of overlap:
wording may differ in looks only, numbers in the way they are written.
"""
import re
import unicodedata
from decimal import Decimal

_LATEX_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|tt)?|math(?:rm|bf)|mbox)\s*\{([^{}]*)\}")
_ESCAPED = re.compile(r"\\([%$#&_{}])")
_SIGNS = str.maketrans("–—−‐‑’‘“”", "-----''\"\"")
_ARTICLE = re.compile(r"(?:the|an?)\s+")
_ITEM_GAP = re.compile(r" ?(?:;|,(?!\d{3}(?!\d))) ?")  # the comma of 1,000 separates nothing
_NUMBER = re.compile(r"(-?)[$€£]?(\d{0,18}(?:,\d{3}){0,5}(?:\.\d{1,18})?) ?%?")


def matches_text(gold: str, answer: str) -> bool:
    """The same words in any case, the same number (1,200.0 is 1200, 12% is 12), or the same list in the same order.

    A leading article, quotes, dollar signs and a final period do not count. An empty answer matches nothing.
    """
    gold_items, items = _items(gold), _items(answer)
    if len(gold_items) != len(items) or not any(items):
        return False
    return all(_same_item(*pair) for pair in zip(gold_items, items, strict=True))


def _items(text: str) -> list[str]:
    text = _ESCAPED.sub(r"\1", _LATEX_TEXT.sub(r"\1", text))
    # Not NFKC: it would make 22 of 2².
    text = unicodedata.normalize("NFC", text).translate(_SIGNS).casefold()
    return [_plain(item) for item in _ITEM_GAP.split(_plain(text).strip("[]"))]


def _plain(text: str) -> str:
    text = " ".join(text.split()).strip("\"'`*").removesuffix(".").strip()
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    return _ARTICLE.sub("", text, count=1) if _ARTICLE.match(text) else text


def _same_item(gold: str, item: str) -> bool:
    gold_number, number = _number(gold), _number(item)
    if gold_number is not None and number is not None:
        return gold_number == number
    return gold == item


def _number(text: str) -> Decimal | None:
    match = _NUMBER.fullmatch(text)
    digits = "" if match is None else match[2].replace(",", "")
    if not any(char.isdigit() for char in digits):
        return None
    return Decimal(digits) * (-1 if match[1] else 1)
