"""The sizes that axis letters take while functions of the package run: `logits_BTV` has three axes, B, T and V long."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from support.paths import ROOT

PACKAGE = str(ROOT / "tango_jax")
SUFFIX = re.compile(r"_*[a-z][a-z0-9_]*_([A-Z0-9]+)")
# Arrays that a function takes with any further axes.
LEADING_AXES_ONLY = {"x_ZQ", "x_Q", "picked_ZR", "x_BT"}


def letters_of(name: str) -> str:
    """The axes in an array's name; empty if it has none."""
    found = SUFFIX.fullmatch(name)
    return found[1] if found else ""


def sizes_of(variables: dict[str, Any]) -> tuple[dict[str, int], list[str]]:
    """The size of each letter among variables of one function, and a line for each array that disagrees.

    Arrays are whatever has a `shape`, and integers named by one letter are sizes. An axis of 1 agrees with any size:
    it is broadcast.
    """
    sizes = {name: value for name, value in variables.items()
             if re.fullmatch("[A-Z]", name) and isinstance(value, int)}
    wrong = []
    for name, value in variables.items():
        letters = letters_of(name)
        shape = getattr(value, "shape", None) if letters else None
        if not isinstance(shape, tuple):
            continue
        if len(shape) < len(letters) or (len(shape) > len(letters) and name not in LEADING_AXES_ONLY):
            wrong.append(f"{name} has shape {shape}")
            continue
        for letter, size in zip(letters, shape, strict=False):
            if letter.isdigit():
                expected, is_right = int(letter), size == int(letter)
            else:
                expected = sizes.setdefault(letter, size)
                is_right = 1 in (size, expected) or size == expected
                sizes[letter] = size if expected == 1 else expected
            if not is_right:
                wrong.append(f"{name} has shape {shape}, and {letter} is {expected}")
    return sizes, wrong


@contextmanager
def checked_sizes() -> Iterator[tuple[set[str], list[str]]]:
    """While it is open, checks the local variables of each function of the package that returns.

    Yields the names of the functions that had arrays with letters, and the lines of those whose sizes disagree.
    """
    seen, wrong = set(), []

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "return" and code.co_filename.startswith(PACKAGE):
            sizes, lines = sizes_of(frame.f_locals)
            seen.update([code.co_name] if sizes else [])
            wrong.extend(f"{code.co_filename.removeprefix(PACKAGE)}, {code.co_qualname}: {line}" for line in lines)

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        yield seen, wrong
    finally:
        sys.setprofile(before)
