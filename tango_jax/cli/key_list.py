"""The list of the configuration's keys that --keys prints."""

import argparse
import contextlib
import textwrap
from collections.abc import Sequence
from typing import Any

from tango_jax.config import ROLES
from tango_jax.defaults import KEYS
from tango_jax.runtime.checks import require
from tango_jax.runtime.failures import drop_broken_output
from tango_jax.runtime.keys import Change, Key

WIDTH = 120


def describe_keys(part: str = "") -> str:
    """Keys with `part` in their names; a key of both roles once, as ROLE.name. Raises ValueError if there are none."""
    first, second = (f"{role}." for role in ROLES)
    keys = {f"ROLE.{name.removeprefix(first)}" if name.startswith(first) else name: key
            for name, key in KEYS.items() if not name.startswith(second)}
    found = {name: key for name, key in keys.items()
             if any(part in one for one in (name, name.replace("ROLE.", first), name.replace("ROLE.", second)))}
    require(bool(found), f"--keys={part}: no key has this in its name; --keys lists all")
    return "\n".join(_described(name, key) for name, key in found.items())


def _described(name: str, key: Key) -> str:
    facts = [str(key.allowed)] if key.allowed else []
    if key.change is not Change.NEVER:
        facts.append(f"change on resume: {key.change.value}")
    shown = f"{name}={'(empty)' if key.default in ('', (), {}) else key.default}"
    lines = textwrap.wrap(" ".join([key.meaning, *(f"[{fact}]" for fact in facts)]), WIDTH - 4)
    return "\n    ".join([shown, *lines])


class ListKeys(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        with contextlib.suppress(BrokenPipeError):  # as in `--keys | head`
            print(describe_keys(str(values)), flush=True)
        drop_broken_output()
        parser.exit()
