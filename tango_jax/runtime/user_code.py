"""Runs users' code. Its errors become one-line ValueErrors with file and line.

Settings name it as `FILE.py:name`, `package.module:name` or, within `given`, `python:name` (an object).
"""

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import os
import re
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tango_jax.runtime.checks import cut, local_path
from tango_jax.runtime.model_text import on_one_line
from tango_jax.runtime.object_text import text_of

MAX_PATH, MAX_TEXT = 300, 500  # characters of a path, and of the text of an error, in a message
_numbers = itertools.count()  # for the names of modules
GIVEN = "python"  # in the place of a file or module: an object that this process was handed
_given = contextvars.ContextVar("_given", default=None)  # {name: object}
_running = contextvars.ContextVar("_running", default=())  # files that are being run
GUARD = 'under `if __name__ == "__main__":`'

# Seconds to score or grade one response; a hanging function ends the run with its name.
CALL_LIMIT_S = 60


class LoadsItself(BaseException):
    """A running file would run itself again. No Exception: it must reach that file's `run_file`."""


@dataclasses.dataclass(frozen=True)
class UserFunction:
    """A function that a setting names. Its error becomes a ValueError with setting, file and line."""

    key: str  # the setting
    name: str  # its value
    function: Callable

    @property
    def place(self) -> tuple[str, int | None]:
        """File and first line; without Python source, what the setting names."""
        function = inspect.unwrap(self.function)
        code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
        return (code.co_filename, code.co_firstlineno) if code else (self.name.rpartition(":")[0], None)

    def call(self, *args: Any, about: str = "", limit_s: int = 0) -> Any:
        """`about`: end of an error message. `limit_s`: seconds; 0: no limit; main thread only. Raises ValueError."""
        try:
            with _time_limit(limit_s):
                return self.function(*args)
        except (Exception, SystemExit) as error:  # a user's function can raise anything
            raise self._error(what_failed(*self.place, error), about) from error

    def refuse(self, reason: str, about: str = "") -> NoReturn:
        raise self._error(f"{_shown_place(*self.place)}: {reason}", about)

    def _error(self, reason: str, about: str) -> ValueError:
        return ValueError(f"{self.key}={cut(self.name, MAX_PATH)}: {reason}{about and f' ({about})'}")


def is_user_code(text: str) -> bool:
    return ":" in text


def load_function(key: str, text: str, parameters: tuple[str, ...]) -> UserFunction:
    """The function in the setting `key`; must take `parameters` by position. Raises ValueError."""
    function = _find(key, text)
    if not callable(function):
        place, _, name = text.rpartition(":")
        raise ValueError(f"{key}={cut(text, MAX_PATH)}: {cut(place, MAX_PATH)} has no function {name!r}")
    loaded = UserFunction(key, text, function)
    try:
        inspect.signature(loaded.function).bind(*parameters)
    except TypeError as error:
        loaded.refuse(f"{error}; it is called as {text.rpartition(':')[2]}({', '.join(parameters)})")
    except ValueError:
        pass  # some callables of compiled libraries do not say what they take
    return loaded


def load_object(key: str, text: str, kind: type) -> Any:
    """The record in the setting `key`. Raises ValueError, also if it is no `kind`."""
    value = _find(key, text, "record")
    if not isinstance(value, kind):
        raise ValueError(f"{key}={cut(text, MAX_PATH)} is {_article(type(value).__name__)}; it must be "
                         f"{_article(kind.__name__)} ({kind.__module__})")
    return value


@contextlib.contextmanager
def given(objects: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """{key: object} -> {key: `python:name`}, valid within the block. `name` is a function's name or a record's label.
    A list of objects becomes a list of names."""
    named: dict[str, Any] = {}
    names = {key: [_add(named, one) for one in value] if isinstance(value, list) else _add(named, value)
             for key, value in objects.items()}
    token = _given.set(named)
    try:
        yield names
    finally:
        _given.reset(token)


def _add(named: dict[str, Any], value: Any) -> str:
    name = getattr(value, "__name__", None) or getattr(value, "label", None) or type(value).__name__
    name = re.sub(r"\W+", "_", name).strip("_") or "object"
    name += f"_{len(named) + 1}" * (name in named and named[name] is not value)
    named[name] = value
    return f"{GIVEN}:{name}"


class Source(NamedTuple):
    path: Path
    content: bytes


def source_digest(text: str) -> str:
    return hashlib.sha256(b"".join(source.content for source in sources("function", text))).hexdigest()


def sources(key: str, text: str) -> list[Source]:
    """The file that a setting names, and files of functions in what it names; not what they import. Raises ValueError.

    An object of this process becomes NAME.txt (object_text.py), which is no path. Other paths are absolute.
    """
    value, (place, _, name) = _find(key, text), text.rpartition(":")
    if place == GIVEN:
        try:
            return [Source(Path(f"{name}.txt"), text_of(value, name).encode())]
        except ValueError as error:
            raise ValueError(f"{key}={text}: {error}") from error
    named = place if place.endswith(".py") else getattr(sys.modules[place], "__file__", None) or place
    written = [UserFunction(key, "", function).place[0] for function in _functions_in(value)]
    paths = [local_path("path", one) for one in dict.fromkeys([named, *filter(None, written)])]
    package = Path(__file__).parents[1]  # whose source the commit tells
    return [Source(path.absolute(), path.read_bytes()) for path in paths
            if path.is_file() and package not in path.absolute().parents]


def _functions_in(value: Any) -> Iterator[Callable]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, (Mapping, tuple, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _functions_in(item)
    elif callable(value):
        yield value


def _find(key: str, text: str, noun: str = "function") -> Any:
    place, _, name = text.rpartition(":")
    shown = f"{key}={cut(text, MAX_PATH)}"
    if not place or not name:
        raise ValueError(f"{shown} must be FILE.py:name or package.module:name")
    if place == GIVEN:
        found = _given.get() or {}
        if name not in found:
            raise ValueError(f"{shown} was handed over by a Python program: call tango_jax.train.train with it again")
        return found[name]
    if place.endswith(".py"):
        path = local_path(key, place)
        if not path.is_file():
            raise ValueError(f"{shown}: there is no file {cut(place, MAX_PATH)}; write FILE.py:{noun}, relative to "
                             "the current folder, or with a whole path")
    try:
        module = _module_of_source(place, path.read_bytes()) if place.endswith(".py") else _import(place)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{shown}: {what_failed(place, None, error)}") from error
    if not hasattr(module, name):
        is_main = module is sys.modules["__main__"]
        yet = f" so far: define it above what loads it, or put that {GUARD}" if is_main else ""
        raise ValueError(f"{shown}: {cut(place, MAX_PATH)} has no {noun} {name!r}{yet}")
    return getattr(module, name)


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def run_file(path: str, source: bytes | None = None) -> types.ModuleType:
    """Run a Python file, or `source` in its place. The running script is not run again: its module is returned as it
    is. Raises ValueError if the file runs itself, and whatever it raises."""
    # Import would mistake a version compiled within the same second for the new one.
    file = local_path("path", path)
    main = sys.modules["__main__"]
    if os.path.realpath(getattr(main, "__file__", None) or "") == (place := os.path.realpath(file)):
        return main
    if place in _running.get():
        raise LoadsItself
    code = compile(importlib.util.decode_source(file.read_bytes() if source is None else source), path, "exec")
    module = types.ModuleType(f"tango_user_code_{next(_numbers)}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # where dataclasses look up the module of a class
    _make_importable(file.parent)
    before = _running.set((*_running.get(), place))
    try:
        exec(code, module.__dict__)
    except LoadsItself:
        raise ValueError(f"it starts a command that loads this file again: put the start {GUARD}") from None
    finally:
        _running.reset(before)
    return module


def what_failed(file: str, line: int | None, error: BaseException) -> str:
    """The error with file and line: the file's last line in the traceback, or else `line`."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError) and not lines:  # in the file itself: nothing of it has run
        line, text = error.lineno, on_one_line(error.msg)
    else:
        # str() of a KeyError is the repr of its argument.
        message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        line, text = lines[-1] if lines else line, on_one_line(message or "no message")
    if isinstance(error, AttributeError):  # of a locked ConfigDict, which lists all of its keys
        text, _, keys = text.partition(" Other fields present")
        text += "".join(f" {hint}?" for hint in re.findall(r'Did you mean "\w+"', keys))
    # A ValueError is written for people; others need their name.
    name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{_shown_place(file, line)}: {name}{cut(text, MAX_TEXT)}"


def _shown_place(file: str, line: int | None) -> str:
    return cut(file, MAX_PATH) + (f", line {line}" if line else "")


@functools.cache
def _module_of_source(path: str, source: bytes) -> types.ModuleType:
    """Run once for all functions in it, and again after a change."""
    return run_file(path, source)


def _import(name: str) -> types.ModuleType:
    _make_importable(Path.cwd())
    return importlib.import_module(name)


def _make_importable(folder: Path) -> None:
    if str(folder.absolute()) not in sys.path:
        sys.path.append(str(folder.absolute()))  # at the end, where it hides no package


@contextlib.contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError; Python interrupts only the main thread."""
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_) -> NoReturn:
        raise TimeoutError(f"not done after {seconds} seconds, the limit of a call")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)  # None: a handler that was not installed from Python
