"""Config files: a path or a shipped config's name in, the ConfigDict of its `get_config` out.

With `def get_config(argument="", *, model)` the command needs --model=VALUE; `model: Annotated[str, "a folder"]` says
what that is. `complete(config, given)` in the file runs after --config.key=value, to set what follows from other
settings; `given` are the keys of the command line. A run's config.json serves as a config, too.
"""

import contextlib
import difflib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from tango_jax.config import default_config, flatten, read_settings
from tango_jax.defaults import KEYS, NAMES_A_FUNCTION
from tango_jax.runtime.checks import Mistakes, cut, local_path, require, shortened
from tango_jax.runtime.keys import Range
from tango_jax.runtime.user_code import MAX_PATH, run_file, what_failed


class ConfigFile(NamedTuple):
    path: str  # as it is named in messages
    get_config: Callable[..., Any]
    complete: Callable[..., None] | None  # (config, names of the keys that the command line sets)
    arguments: Mapping[str, bool]  # those that get_config takes by name only -> whether it needs them
    takes_argument: bool = True  # whether get_config takes one by position
    meanings: Mapping[str, str] = {}  # of those taken by name: the text in typing.Annotated[str, "text"]

    def make(self, argument: str = "", arguments: Mapping[str, str | None] | None = None) -> ConfigDict:
        """The result of `get_config`, with the keys and types of `default_config`. Raises ValueError."""
        given, mistakes = arguments or {}, Mistakes()
        for name, value in given.items():
            if mistakes.require(name in self.arguments, f"{self.path} takes no argument --{name}{self._described()}"):
                mistakes.require(bool(value), f"--{name} has no value: write --{name}=VALUE")
        needed = [name for name, is_needed in self.arguments.items() if is_needed and name not in given]
        missing, each = " and ".join(f"--{name}=VALUE" for name in needed), "it" if len(needed) == 1 else "them"
        meanings = "".join(f"; --{name} is {self.meanings[name]}" for name in needed if name in self.meanings)
        mistakes.require(not needed, f"{self.path} needs {missing}: give {each}{meanings}")
        mistakes.require(self.takes_argument or not argument, f"{self.path} takes no argument, and was given "
                         f":{shortened(argument)}: leave it out, and set keys with --config.key=value")
        mistakes.raise_all()
        with _executed(self.path):
            config = self.get_config(*([argument] * self.takes_argument), **given)
            if isinstance(config, ConfigDict):
                flatten(config)  # a file can make one that cannot be read
        if not isinstance(config, ConfigDict):
            raise ValueError(f"{self.path}: get_config returned {shortened(config)}, not a ConfigDict: start it "
                             "with config = default_config() and end it with return config")
        self._check(config)
        return config

    def completed(self, config: ConfigDict, given: frozenset[str] = frozenset()) -> ConfigDict:
        """After the file's `complete`, if any, which leaves the `given` keys alone. Raises ValueError."""
        if self.complete is None:
            return config
        with _executed(self.path, told=ValueError):
            self.complete(config, given)
            flatten(config)
        self._check(config)
        return config

    def _check(self, config: ConfigDict) -> None:
        mistakes = Mistakes()
        with mistakes.collected(f"{self.path}: "):
            check_keys(config)
        mistakes.raise_all()

    def _described(self) -> str:
        names = " and ".join(f"--{name}" for name in self.arguments)
        return f"; it takes {names}" if names else ", nor any other by name"


def load_shipped(name: str, argument: str = "", **arguments: str) -> ConfigDict:
    """A shipped config, for another config file to change and return. Raises ValueError.

        config = load_shipped("last_letter")
        config.rl.generator_steps = 100
    """
    opened = open_config(str(_shipped_file(name)))
    return opened.completed(opened.make(argument, arguments))


def shipped_configs() -> dict[str, Path]:
    package = Path(__file__).parents[1]
    # Installed: in the package (pyproject.toml). In a checkout: next to it.
    folder = package / "configs"
    if not folder.is_dir():
        folder = package.parent / "configs"
    return {file.stem: file for file in sorted(folder.glob("*.py"))}


def open_config(file: str) -> ConfigFile:
    """Run a Python file, or read a run's config.json or a shipped config. Raises ValueError."""
    if file.endswith(".json"):
        stored = stored_config(file)
        return ConfigFile(file, lambda _: stored, None, {})
    if not file.endswith(".py"):
        file = str(_shipped_file(file))
    elif not local_path("--config", file).is_file():
        raise ValueError(_no_config(file))
    with _executed(file):
        functions = vars(run_file(file))
    get_config, complete = functions.get("get_config"), functions.get("complete")
    if not callable(get_config):
        raise ValueError(f"{file} has no function get_config()")
    complete = complete if callable(complete) else None
    try:
        parameters = inspect.signature(get_config).parameters.values()
    except (TypeError, ValueError):  # some callables do not say what they take
        return ConfigFile(file, get_config, complete, {})
    named = {one.name: one.default is one.empty for one in parameters if one.kind is one.KEYWORD_ONLY}
    takes_argument = any(one.kind not in (one.KEYWORD_ONLY, one.VAR_KEYWORD) for one in parameters)
    texts = {one.name: getattr(one.annotation, "__metadata__", ()) for one in parameters}
    meanings = {name: str(text[0]) for name, text in texts.items() if text}
    return ConfigFile(file, get_config, complete, named, takes_argument, meanings)


@contextlib.contextmanager
def _executed(file: str, told: type[Exception] | tuple = ()) -> Iterator[None]:
    """Execute a config file's code in the block. Raises ValueError if it fails; errors of types `told` pass.

    It must replace nothing in this package: no record of the run would show it, and workers would not have it.
    """
    before = _contents()
    try:
        yield
    except told:
        raise
    except (Exception, SystemExit) as error:  # whatever a file can raise is a mistake in that file
        raise ValueError(what_failed(file, None, error)) from error
    after = _contents()
    replaced = [name for name, value in before.items() if after.get(name) is not value]
    require(not replaced, f"{file} replaces {cut(', '.join(replaced))} in the package, and no record of a run would "
            f"show it; {NAMES_A_FUNCTION}, or edit a copy of the package")


def _contents() -> dict[str, Any]:
    """{dotted name: value} of the package's modules and their tables."""
    modules = {name: vars(module) for name, module in list(sys.modules.items()) if name.startswith("tango_jax.")}
    tables = {f"{name}.{key}": value for name, names in modules.items() for key, value in names.items()
              if isinstance(value, dict) and not key.startswith("__")}
    return {f"{name}.{key}": value for name, held in (modules | tables).items() for key, value in held.items()
            if callable(value) or not str(key).startswith("_")}


def stored_config(file: str) -> ConfigDict:
    """The settings in a run's config.json, with defaults for missing keys. Raises ValueError."""
    path = local_path("--config", file)
    require(os.path.exists(path), _no_config(file))
    settings = read_settings(path)
    try:
        return with_settings(default_config(), settings)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def with_settings(config: ConfigDict, settings: Mapping[str, Any]) -> ConfigDict:
    """A copy with other values, {"rl.gamma": 0.5, ...}. Raises ValueError.

    A list serves as a tuple, and a whole number as a float.
    """
    config, known = config.copy_and_resolve_references(), flatten(default_config())
    for key, value in settings.items():
        if key not in known:
            raise ValueError(f"unknown config key {shortened(key)}{did_you_mean(str(key))}")
        default = known[key]
        if isinstance(default, tuple) and isinstance(value, list):
            value = tuple(value)
        elif isinstance(default, float) and type(value) is int:
            value = float(value)
        if not is_like(default, value, key):
            raise ValueError(_wrong_type(key, value, default))
        *groups, name = key.split(".")
        functools.reduce(getattr, groups, config)[name] = value
    return config.lock()


def check_keys(config: ConfigDict) -> None:
    """Raises ValueError for keys that are missing, unknown, or of another type than their default.

    A file can get them past a locked ConfigDict: by unlocking, replacing a group, or setting None.
    """
    found, known = flatten(config), flatten(default_config())
    if missing := [key for key in known if key not in found]:
        raise ValueError(f"the config lacks {', '.join(missing[:5])}: start from default_config() and take nothing out")
    mistakes = Mistakes()
    for key, value in found.items():
        if key not in known:
            mistakes.add(f"unknown config key {key!r}{did_you_mean(key)}")
        elif not is_like(known[key], value, key):
            mistakes.add(_wrong_type(key, value, known[key]))
    mistakes.raise_all()


def _wrong_type(key: str, value: Any, default: Any) -> str:
    hint = f"; {NAMES_A_FUNCTION}" if any(map(callable, value if isinstance(value, tuple) else (value,))) else ""
    return f"{key}={shortened(value)} must be of type {type(default).__name__}, like its default {default!r}{hint}"


def is_like(default: Any, value: Any, key: str) -> bool:
    if type(value) is not type(default):
        return False
    return not isinstance(value, tuple) or all(type(item) is element_type(key) for item in value)


def element_type(key: str) -> type:
    allowed = KEYS[key].allowed
    return type(allowed.low) if isinstance(allowed, Range) else str


def did_you_mean(key: str) -> str:
    """The end of a message about an unknown key."""
    likeness = {one: difflib.SequenceMatcher(None, one, key).ratio() for one in flatten(default_config())}
    best = max(likeness, key=likeness.get)  # of several that are as near, the one that is declared first
    return f"; did you mean {best}?" if likeness[best] >= 0.5 else "; see --keys for every key"


def _shipped_file(name: str) -> Path:
    files = shipped_configs()
    if name not in files:
        raise ValueError(_no_config(name))
    return files[name]


def _no_config(text: str) -> str:
    names = list(shipped_configs())
    near = difflib.get_close_matches(Path(text).stem, names, n=1, cutoff=0.5)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return (f"config {cut(repr(text), MAX_PATH)} is not a Python file that exists, nor a shipped config{meant}; "
            f"choose one of the shipped ones: {', '.join(names)}")
