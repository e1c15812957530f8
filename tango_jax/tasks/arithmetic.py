"""Exact arithmetic on text, such as `(48+2)/2`, for `gsm8k.py`."""

import ast
import operator
import re
from collections.abc import Mapping
from fractions import Fraction

_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?|\.\d+")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_MAX_DECIMALS = 2  # more of them come from a division that leaves a remainder


def numbers_in(text: str) -> list[Fraction]:
    """In order; 1,000 is one number."""
    return [_value(token) for token in _NUMBER.findall(text)]


def replace_numbers(text: str, replacement: Mapping[Fraction, Fraction]) -> str:
    """Replace numbers in a text; thousands separators stay."""

    def replace(match: re.Match) -> str:
        new = replacement.get(_value(match[0]))
        return match[0] if new is None else number_text(new, has_commas="," in match[0])

    return _NUMBER.sub(replace, text)


def number_text(number: Fraction, has_commas: bool = False) -> str:
    assert has_short_decimals(number), number
    value = int(number) if number.denominator == 1 else float(number)
    return f"{value:,}" if has_commas else str(value)


def has_short_decimals(number: Fraction) -> bool:
    """Whether the number is below 10^12 and has at most two decimals."""
    return (number * 10**_MAX_DECIMALS).denominator == 1 and abs(number) < 10**12


def value_of(expression: str) -> Fraction | None:
    """An expression has numbers, + - * / and brackets; None for any other text."""
    try:
        # Python rejects leading zeros and would read a comma as a tuple.
        plain = _NUMBER.sub(lambda match: match[0].replace(",", "").lstrip("0") or "0", expression.strip())
        return _evaluate(ast.parse(plain, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError(f"not arithmetic: {ast.dump(node)}")


def _value(token: str) -> Fraction:
    return Fraction(token.replace(",", ""))
