"""Divides an answer of kind "math" into its parts: a single value, or items and the brackets around them."""
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from tango_jax.grading.notation import clock, is_number

MAX_SIGNS = 4  # `\pm` signs in one item; each one doubles the number of items


class Form(NamedTuple):
    """A single value, or items in brackets, in a list without brackets or in a union."""

    text: str  # the value, or the whole text if there are items
    label: str = ""  # the part before `=` or `\in`
    brackets: str = ""  # "()", "[]", "(]", "[)", "{}", "," for a list without brackets, "u" for a union
    items: tuple["Form", ...] = ()


# ------------------------------------------------------------------------------------------------------ plain text

_REPLACED = tuple((re.compile(pattern), new) for pattern, new in (
    (r"\\(?:left|right|m?[bB]igg?[lrm]?|displaystyle|textstyle)(?![a-zA-Z])\.?", ""),
    (r"(?<!\\)\\[,;:! ]|~", " "),
    (r"\\[$]|(?<!\\)[$]|[€£¥₹]", ""),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\l(?:brace|vert)(?![a-zA-Z])", lambda found: r"\{" if "brace" in found[0] else "|"),
    (r"\\r(?:brace|vert)(?![a-zA-Z])", lambda found: r"\}" if "brace" in found[0] else "|"),
    (r"\\(?:lbrack)(?![a-zA-Z])", "["), (r"\\(?:rbrack)(?![a-zA-Z])", "]"),
    (r"\\langle(?![a-zA-Z])", "("), (r"\\rangle(?![a-zA-Z])", ")"),
    (r"\\(?:leqslant|leq|leqq)(?![a-zA-Z])|≤|<=", r"\\le "), (r"\\(?:geqslant|geq|geqq)(?![a-zA-Z])|≥|>=", r"\\ge "),
    (r"\\(?:neq(?![a-zA-Z])|not\s*=)|≠", r"\\ne "),
    (r"\\lt(?![a-zA-Z])", "<"), (r"\\gt(?![a-zA-Z])", ">"), (r"\\cong(?![a-zA-Z])|\\simeq(?![a-zA-Z])", r"\\approx "),
    (r":=|==", "="),
    (r"\\(?:mathbf|mathit|mathsf|mathtt|boldsymbol|bm|mathnormal)\s*\{([^{}]*)\}", r"\1"),
    (r"\\(?:mathrm|textrm)\s*\{\s*([0-9.]+|[a-zA-Z])\s*\}", r"\1"),
    (r"\\(?:text[a-z]+|mathrm|mbox|hbox)\s*(?=\{)", r"\\text"),
    (r"\\text\s*\{\s*[.!]?\s*\}", " "),
    (r"(?:,\s*)?(?:\\text\s*\{\s*(?:and|or)\s*\}|(?<![\\a-zA-Z])(?:and|or)(?![a-zA-Z]))(?:\s*,)?", ", "),
    (r"\\(?:land|lor|wedge|vee)(?![a-zA-Z])", ", "),
    (r"\\text\s*\{\s*(?:percent(?:age)?|pct)\s*\}|(?<![a-zA-Z])(?:percent(?:age)?|pct)(?![a-zA-Z])", r"\\%"),
    (r"(?<![\\a-zA-Z])(sqrt|pi|sin|cos|tan|log|ln|infty)(?![a-zA-Z])", r"\\\1 "),
    (r"(?<![\\a-zA-Z])inf(?:inity)?(?![a-zA-Z])", r"\\infty "),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\\{\s*\\\}", r"\\emptyset "),
    (r"\s+", " "), (r" ?, +| ,", ", "),
))


def plain(text: str) -> str:
    """Gives each command, separator and bracket one spelling."""
    for pattern, new in _REPLACED:
        text = pattern.sub(new, text)
    return text.strip()


# ---------------------------------------------------------------------------------------------------------- reading

_TOKEN = re.compile(r"\\(?:[a-zA-Z]+|.)|.", re.DOTALL)
_OPENING, _CLOSING = {"(": ")", "[": "]", r"\{": "}", "{": ""}, (")", "]", r"\}", "}")
_HEAD, _GROUP = re.compile(r"(?<![\d.])\d{1,3}$"), re.compile(r"\d{3}(?!\d)")
RELATION = re.compile(r"=|<|>|\\(?:le|ge|ne|in|approx)(?![a-zA-Z])")
_LABEL_NOISE = re.compile(r"[_^](?:\{[^{}]*\}|\\?[a-zA-Z]+|\d)|\([^()]*\)|\\text\{[^{}]*\}")
_NAMES = re.compile(r"\(\s*\\?[a-zA-Z]+(?:_\{?\w\}?)?(?:\s*,\s*\\?[a-zA-Z]+(?:_\{?\w\}?)?)+\s*\)")
_WORDS = r"[a-zA-Z.°/'()-]+(?:\^\{?-?\d\}?)?(?:\s+[a-zA-Z.°/'()-]+(?:\^\{?-?\d\}?)?){0,4}"
_POWER = r"(?:\^\{?-?\d\}?)?"
_TEXT_UNIT = re.compile(r"(?<=[\w)}\]%])\s*\^?\{?\\text\s*\{\s*(" + _WORDS + r")\s*\}\}?" + _POWER + "$")
_COMMON_UNITS = (
    r"[mck]m|kg|mg|lbs?|oz|ft|in|inch(?:es)?|feet|foot|yards?|yd|miles?|mph|km/h|kmh|met(?:er|re)s?|centimet(?:er|re)s?"
    r"|kilomet(?:er|re)s?|lit(?:er|re)s?|ml|gallons?|grams?|kilograms?|pounds?|dollars?|cents?|degrees?|deg|radians?|rad"
    r"|hours?|hrs?|minutes?|mins?|seconds?|secs?|days?|weeks?|months?|years?|units?|sq|square|cubic|men|women|people"
    r"|students?|apples?|coins?|points?|times|ways|th|st|nd|rd"
)
_BARE_UNIT = re.compile(r"(?<=[\d})])\s*\^?\{?(?:(?:" + _COMMON_UNITS + r")(?![a-zA-Z])\s*){1,2}\}?" + _POWER + "$")
_LETTER_UNIT = re.compile(r"(?<=\d)\s*[msghlL](?:\^\{?[23]\}?)?$")
_NO_UNITS = frozenset(
    "and or not nor but no is are to than versus vs either neither plus minus over if when where except zero one two"
    " three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen"
    " nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion half third"
    " quarter".split()
)


def read(text: str, may_be_unit: bool = False) -> Form | None:
    """Parse a plain text; None if an item is empty or the brackets do not match."""
    text = _without_unit(text.strip(), may_be_unit)
    parts = _items(text)
    if parts is None or not all(part.strip() for part in parts):
        return None
    if len(parts) > 1:
        return _collect(text, ",", parts, may_be_unit)
    text = parts[0]
    label, body = _label(text)
    if label:
        form = read(body, may_be_unit)
        return None if form is None or form.label else _labelled(text, label, form)
    pieces = split(text, r"\cup")
    if len(pieces) > 1:
        return _collect(text, "u", pieces, may_be_unit) if all(piece.strip() for piece in pieces) else None
    return _read_brackets(text, may_be_unit)


def _labelled(text: str, label: str, form: Form) -> Form:
    """`(x,y)=(3,4)` is read as `x=3,y=4`."""
    names = [name.strip() for name in label[1:-1].split(",")] if _NAMES.fullmatch(label) else []
    if form.brackets != "()" or len(names) != len(form.items) or any(item.label for item in form.items):
        return form._replace(label=label)
    items = (item._replace(label=name) for item, name in zip(form.items, names, strict=True))
    return Form(text, "", ",", tuple(items))


def _read_brackets(text: str, may_be_unit: bool) -> Form | None:
    opening = r"\{" if text.startswith(r"\{") else text[:1]
    closing = r"\}" if text.endswith(r"\}") else text[-1:]
    if opening not in _OPENING or closing not in _CLOSING or not _is_enclosed(text):
        signed = _both_signs(text)
        return Form(text) if len(signed) == 1 else _collect(text, ",", signed, may_be_unit)
    inner = text[len(opening) : -len(closing)].strip()
    parts = _items(inner, is_in_brackets=opening != "{")
    if parts is None or not all(part.strip() for part in parts):
        return None
    if len(parts) == 1 and opening + closing not in ("[)", "(]"):
        return read(parts[0], may_be_unit)
    signed = [text] if opening in (r"\{", "{") else _both_signs(text)
    if len(signed) > 1 or opening == "{":  # the braces of a LaTeX group are invisible, so they bracket nothing
        return _collect(text, ",", signed if len(signed) > 1 else parts, may_be_unit)
    return _collect(text, opening[-1] + closing[-1], parts, may_be_unit)


def _collect(text: str, brackets: str, parts: Sequence[str], may_be_unit: bool) -> Form | None:
    r"""An item that is itself a list without brackets (`1 \pm 2`) adds its items."""
    items: list[Form] = []
    for part in parts:
        item = read(part, may_be_unit)
        if item is None:
            return None
        is_spread = item.brackets == "," and brackets in (",", "{}")
        items += [one._replace(label=one.label or item.label) for one in item.items] if is_spread else [item]
    return Form(text, "", brackets, tuple(items))


def _items(text: str, is_in_brackets: bool = False) -> list[str] | None:
    """Splits at outer commas, and joins groups of thousands (rule 3 of `rules.py`)."""
    parts = split(text, ",")
    if parts is None:
        return None
    items: list[str] = []
    start = 0
    for end in range(1, len(parts) + 1):
        if end < len(parts) and not parts[end].startswith(" "):
            continue
        run = parts[start:end]
        is_number = len(run) > 1 and _HEAD.search(run[0]) and all(map(_GROUP.match, run[1:]))
        is_number = is_number and all(len(group) == 3 for group in run[1:-1])
        if is_number and is_in_brackets:
            is_number = any(group.startswith("0") for group in run[1:])
        items += ["".join(run)] if is_number else run
        start = end
    return items


def split(text: str, separator: str) -> list[str] | None:
    """Splits outside of all brackets; None if the brackets do not match."""
    depth, parts, start = 0, [], 0
    for token in _TOKEN.finditer(text):
        kind = token[0]
        if kind in _OPENING:
            depth += 1
        elif kind in _CLOSING:
            depth -= 1
            if depth < 0:
                return None
        elif kind == separator and depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
    return None if depth else [*parts, text[start:]]


def _is_enclosed(text: str) -> bool:
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in _OPENING) - (token[0] in _CLOSING)
        if depth == 0:
            return token.end() == len(text)
    return False


def _both_signs(text: str) -> list[str]:
    r"""Two values if there is a `\mp`, else one per choice of signs."""
    signs = re.findall(r"\\(?:pm|mp)(?![a-zA-Z])", text)
    if not signs or len(signs) > MAX_SIGNS:
        return [text]
    if r"\mp" in signs:
        choices = [["+-"[sign == r"\mp"] for sign in signs], ["-+"[sign == r"\mp"] for sign in signs]]
    else:
        choices = itertools.product("+-", repeat=len(signs))
    between = re.split(r"\\(?:pm|mp)(?![a-zA-Z])", text)
    return ["".join(itertools.chain(*zip(between, [*choice, ""], strict=True))) for choice in choices]


def _label(text: str) -> tuple[str, str]:
    r"""(label, rest) if the only relation is an `=` or `\in` after a label, else ("", text)."""
    for separator in ("=", r"\in"):
        parts = split(text, separator)
        if len(parts) == 2 and parts[1].strip() and len(outer_relations(text)) == 1 and _is_label(parts[0].strip()):
            return parts[0].strip(), parts[1].strip()
    return "", text


def _is_label(text: str) -> bool:
    words = " ".join(re.findall(r"\\text\{([^{}]*)\}", text)).lower().split()
    core = _LABEL_NOISE.sub(" ", text)
    has_name = any(char.isalpha() for char in text)
    return has_name and not _NO_UNITS & set(words) and not re.search(r"\d|^-|\\(?:pm|mp)", core + " ".join(words))


def outer_relations(text: str) -> list[str]:
    depth, found = 0, []
    for token in _TOKEN.finditer(text):
        depth += (token[0] in _OPENING) - (token[0] in _CLOSING)
        if depth == 0 and RELATION.fullmatch(token[0]):
            found.append(token[0])
    return found


def _without_unit(text: str, may_be_letter: bool) -> str:
    if clock(text):
        return text  # "a.m." and "p.m." are no units: they tell two times apart
    found = _TEXT_UNIT.search(text)
    if found:
        words = re.split(r"[^a-z]+", found[1].lower())
        return text if _NO_UNITS & set(words) else text[: found.start()].strip()
    whole = re.fullmatch(r"\\text\s*\{\s*([0-9.,/ +-]+)\}", text)
    if whole:
        return whole[1].strip()
    found = _BARE_UNIT.search(text)
    if found:
        return text[: found.start()].strip()
    found = _LETTER_UNIT.search(text) if may_be_letter else None
    return text[: found.start()] if found and is_number(text[: found.start()]) else text
