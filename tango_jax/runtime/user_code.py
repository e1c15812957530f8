"""Loads user-defined functions named in the configuration: `FILE.py:name`, or `package.module:name` if installed.

Takes the text of a setting and returns the function, at the start of a run. Config files are code already, so this
executes nothing that the user has not chosen to run.
"""

import functools
import importlib
import importlib.util
import types
from collections.abc import Callable

from tango_jax.runtime.checks import cut, local_path
from tango_jax.runtime.model_text import on_one_line


def is_user_code(text: str) -> bool:
    """Whether a setting names a user-defined function rather than a built-in name."""
    return ":" in text


def load_function(key: str, text: str) -> Callable:
    """Return the function that the setting `key` names.

    Raises:
        ValueError: no such file, module or function, or an error while loading it; the message names the setting.
    """
    place, _, name = text.rpartition(":")
    try:
        module = _run_file(place) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # a user's file can raise anything
        raise ValueError(f"{key}={cut(text)}: {type(error).__name__}: {on_one_line(str(error))}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{key}={cut(text)}: {place} has no function {name!r}")
    return function


@functools.cache
def _run_file(path: str) -> types.ModuleType:
    source = importlib.util.decode_source(local_path("path", path).read_bytes())
    module = types.ModuleType("tango_user_code")
    module.__file__ = path
    exec(compile(source, path, "exec"), module.__dict__)
    return module
