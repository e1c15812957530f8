"""Notices what a user's config file changes in this package: entries of its tables, functions of its modules.

A config file is Python. It may add an arm to ARMS, or put a function of its own in the place of one of the package,
which its settings do not show. Takes the blocks in which a file is executed; returns the files of this process with
what each has changed, which a run stores (tracking/provenance.py). The record is one for the process, as is the package
that is changed in it.
"""

import contextlib
import dataclasses
import functools
import inspect
import os
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

_PACKAGE = __name__.partition(".")[0]
_MISSING = object()


@dataclasses.dataclass(frozen=True)
class Change:
    """Something of the package that a file has added, replaced or removed."""

    name: str  # tango_jax.rl.credit.CREDITS['mine'], tango_jax.rl.losses.token_losses
    holder: dict  # the table, or the names of the module
    key: Any
    value: Any  # _MISSING: it was removed

    @property
    def is_in_force(self) -> bool:
        """Whether it is still so: something later may have changed it again."""
        return self.holder.get(self.key, _MISSING) is self.value

    @property
    def text(self) -> str:
        """The new value in words that are the same in every process."""
        return "removed" if self.value is _MISSING else re.sub(r" at 0x[0-9a-f]+", "", repr(self.value))

    @property
    def file(self) -> str:
        """The file in which the new value is written; empty if it is no function, or not written in Python."""
        value = self.value.func if isinstance(self.value, functools.partial) else self.value
        value = inspect.unwrap(value) if callable(value) else None
        code = getattr(value, "__code__", None)
        return os.path.abspath(code.co_filename) if code and os.path.isfile(code.co_filename) else ""


@dataclasses.dataclass(frozen=True)
class ConfigSource:
    """A config file that this process has executed."""

    path: str  # absolute
    content: bytes | None  # what was executed; None: settings alone, which execute nothing
    is_shipped: bool
    changes: tuple[Change, ...]  # those that are in force


_sources: list[ConfigSource] = []  # the last one that was worked with is at the end


@contextlib.contextmanager
def watched(path: str, content: bytes | None = None, is_shipped: bool = False) -> Iterator[None]:
    """Note what the block changes in the package, for the config file at `path` that it executes.

    A file is executed in several blocks: when it is opened, and when its functions are called. `content` and
    `is_shipped` belong to the first. Nothing is noted where the block raises an error.
    """
    path, before = os.path.abspath(os.path.expanduser(path)), _snapshot()
    yield
    changes = {change.name: change for change in _changed_since(before)}
    known = next((source for source in _sources if source.path == path), None)
    if known is not None:
        _sources.remove(known)
        content, is_shipped = content or known.content, is_shipped or known.is_shipped
        changes = {change.name: change for change in known.changes} | changes
    _sources.append(ConfigSource(path, content, is_shipped, tuple(changes.values())))


def executed_configs() -> list[ConfigSource]:
    """The config files that this process has executed, the latest last, each with its changes that are in force."""
    return [dataclasses.replace(source, changes=tuple(change for change in source.changes if change.is_in_force))
            for source in _sources]  # fmt: skip


def _snapshot() -> dict[str, tuple[dict, dict]]:
    """{name: (names or entries, a copy of them)} of every module of the package that is loaded, and of its tables."""
    holders: dict[str, dict] = {}
    tables: dict[int, str] = {}  # id of a table -> the name under which it is in `holders`
    modules = {name: module for name, module in list(sys.modules.items())
               if name.startswith(f"{_PACKAGE}.") and name != __name__}  # fmt: skip
    for name, module in modules.items():
        holders[name] = vars(module)
        for key, value in vars(module).items():
            if not isinstance(value, dict) or key.startswith("__"):
                continue
            # Several modules may have imported a table; its entries tell which one has defined it.
            is_home = name == getattr(next(iter(value.values()), None), "__module__", None)
            if is_home or id(value) not in tables:
                holders.pop(tables.get(id(value), ""), None)
                tables[id(value)] = f"{name}.{key}"
                holders[tables[id(value)]] = value
    return {name: (holder, dict(holder)) for name, holder in holders.items()}


def _changed_since(before: dict[str, tuple[dict, dict]]) -> list[Change]:
    found = []
    for name, (holder, then) in before.items():
        is_module = name in sys.modules
        for key in [*holder, *(key for key in then if key not in holder)]:
            old, new = then.get(key, _MISSING), holder.get(key, _MISSING)
            if old is new or (is_module and _is_own_doing(key, old, new)):
                continue
            shown = f"{name}.{key}" if is_module else f"{name}[{key!r}]"
            found.append(Change(shown, holder, key, new))
    return found


def _is_own_doing(key: str, old: Any, new: Any) -> bool:
    """Whether a name of a module changes without anybody's intention: a submodule is loaded, or a private value, such
    as a pool of workers, is made when it is first needed."""
    return key.startswith("__") or isinstance(new, types.ModuleType) or (
        key.startswith("_") and not callable(old) and not callable(new)
    )
