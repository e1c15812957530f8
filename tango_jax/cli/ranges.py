"""Checks every setting and option against its declared range; validation.py and task_validation.py check pairs."""

from collections.abc import Mapping
from typing import Any

from tango_jax.defaults import KEYS
from tango_jax.runtime.checks import Mistakes, shortened
from tango_jax.runtime.keys import Range


def check_values(settings: Mapping[str, Any]) -> None:
    """Check flat settings, {"rl.gamma": 0.8, ...}. Raises ValueError with every mistake."""
    mistakes = Mistakes()
    for key, value in settings.items():
        allowed, is_tuple = KEYS[key].allowed, isinstance(value, tuple)
        for item in () if allowed is None else value if is_tuple else (value,):
            shown = f"{key}={shortened(value)}" + (f": {shortened(item)}" if is_tuple else "")
            with mistakes.collected():
                allowed.check(shown, item)
    mistakes.raise_all()


def check_options(options: Any, ranges: Mapping[str, Range]) -> None:
    """Check options, attributes with the names in `ranges`. Raises ValueError."""
    mistakes = Mistakes()
    for name, allowed in ranges.items():
        value = getattr(options, name)
        with mistakes.collected():
            allowed.check(f"--{name}={shortened(value)}", value)
    mistakes.raise_all()
