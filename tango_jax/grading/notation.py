"""Notations of a single value without label and unit: decimals, powers of ten, repeating decimals, times and dates."""
import re
from decimal import Decimal

_DECIMAL = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(_DECIMAL)
_EXPONENT = re.compile(rf"({_DECIMAL})[eE]([+-]?\d{{1,3}})")
_SCIENTIFIC = re.compile(rf"({_DECIMAL})\s*(?:\\times|\\cdot)\s*10\^\{{?([+-]?\d{{1,3}})\}}?")
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\overline\s*\{\s*(\d+)\s*\}")
_CLOCK = re.compile(
    r"(?:0(?=\d:))?(\d|1\d|2[0-4]):([0-5]\d)(?:\s*(?:\\text\s*\{\s*)?([ap])\.?\s?m\.?\s*\}?)?", re.IGNORECASE
)
_FRACTION = re.compile(r"(\d+)\s*/\s*(\d+)|\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\}")
_DATE = re.compile(r"\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])")


def is_number(text: str) -> bool:
    return bool(_NUMBER.fullmatch(text))


def number_of(text: str) -> Decimal | None:
    """A decimal number, perhaps times a power of ten; else None."""
    scientific = _SCIENTIFIC.fullmatch(text) or _EXPONENT.fullmatch(text)
    if scientific:
        return Decimal(scientific[1]).scaleb(int(scientific[2]))
    return Decimal(text) if is_number(text) else None


def with_power_of_ten(text: str) -> str:
    r"""`3e5` as `3 \times 10^{5}`: the library would multiply by Euler's number."""
    return _EXPONENT.sub(r"\1 \\times 10^{\2}", text) if _EXPONENT.fullmatch(text) else text


def with_fractions(text: str) -> str:
    def fraction(found: re.Match) -> str:
        start, period = found[1] + found[2], found[3]
        numerator = int(start + period) - int(start or "0")
        return rf"\frac{{{numerator}}}{{{10 ** len(found[2]) * (10 ** len(period) - 1)}}}"

    return _REPEATING.sub(fraction, text)


def clock(text: str) -> tuple[int, int, str] | None:
    """(hour, minute, "a", "p" or "") of `4:30` or `04:30 p.m.`, else None."""
    found = _CLOCK.fullmatch(text)
    return None if found is None else (int(found[1]), int(found[2]), (found[3] or "").lower())


def is_same_time(gold: str, text: str) -> bool:
    time = clock(gold)
    return time is not None and time == clock(text)


def is_own_ratio(gold: str, text: str) -> bool:
    """`4/25` is the ratio `4:25`."""
    found = _FRACTION.fullmatch(text)
    return found is not None and gold == f"{found[1] or found[3]}:{found[2] or found[4]}"


def is_date(text: str) -> bool:
    return bool(_DATE.fullmatch(text))
