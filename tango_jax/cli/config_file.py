"""A config file, run: its path or a shipped config's name in, the ConfigDict of its `get_config` out.

Config files are Python, so anything can go wrong in them; every mistake becomes one line. The config.json that a run
keeps in its workdir can be given instead, to repeat that run. Stage: the start of every command that takes --config.
"""

import difflib
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tango_jax.config import default_config, flatten
from tango_jax.runtime.checks import cut, local_path, shortened
from tango_jax.runtime.model_text import on_one_line
from tango_jax.runtime.user_code import MAX_PATH, run_file, what_failed


def load_shipped(name: str, argument: str = "") -> ConfigDict:
    """The configuration of a shipped config, for a config file of one's own to change and return.

        config = load_shipped("last_letter")
        config.rl.generator_steps = 100

    Raises:
        ValueError: no shipped config has this name; the message lists those there are.
    """
    return run_config_file(str(_shipped_file(name)), argument)


def shipped_configs() -> dict[str, Path]:
    """The file of each shipped config, by its name."""
    package = Path(__file__).parents[1]
    # Installed, they lie in the package (see pyproject.toml); in a checkout, beside it.
    folder = package / "configs"
    if not folder.is_dir():
        folder = package.parent / "configs"
    return {file.stem: file for file in sorted(folder.glob("*.py"))}


def run_config_file(file: str, argument: str) -> ConfigDict:
    """The result of `get_config(argument)`; it has the keys and types of `default_config`.

    Args:
        file: the path of a Python file, the config.json of a run, or the name of a shipped config.
        argument: what is handed to `get_config`.

    Raises:
        ValueError: no such file or name, a mistake in the file (with its line), or a result that is no complete
            configuration.
    """
    if file.endswith(".json"):
        return stored_config(file)
    if not file.endswith(".py"):
        file = str(_shipped_file(file))
    elif not local_path("--config", file).is_file():
        raise ValueError(_no_config(file))
    try:
        get_config = vars(run_file(file)).get("get_config")
        config = get_config(argument) if callable(get_config) else None
        if isinstance(config, ConfigDict):
            flatten(config)  # a file can make one that cannot be read
    except (Exception, SystemExit) as error:  # whatever a file can raise is a mistake in that file
        raise ValueError(what_failed(file, None, error)) from error
    if not callable(get_config):
        raise ValueError(f"{file} has no function get_config(arg)")
    if not isinstance(config, ConfigDict):
        raise ValueError(f"{file}: get_config returned {shortened(config)}, and not a ConfigDict: start it with "
                         "config = default_config() and end it with return config")
    try:
        check_keys(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return config


def stored_config(file: str) -> ConfigDict:
    """The settings that a run keeps in its workdir as config.json; keys that it does not have are at their defaults.

    Raises:
        ValueError: no such file, or it holds something else than settings.
    """
    try:
        settings = json.loads(local_path("--config", file).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(_no_config(file)) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({on_one_line(str(error))}): name the config.json of a run") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{file} holds {shortened(settings)}, and not the settings of a run: name its config.json")
    try:
        return with_settings(default_config(), settings)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def with_settings(config: ConfigDict, settings: Mapping[str, Any]) -> ConfigDict:
    """A copy of the configuration with other values of some keys, {"rl.gamma": 0.5, ...}.

    As with --config.key=value, a list serves as a tuple, and a whole number as a float, where the default is one.

    Raises:
        ValueError: there is no such key, or its default is of another type.
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
            raise ValueError(f"{key}={shortened(value)} must be of type {type(default).__name__}, like its default "
                             f"{default!r}")
        *groups, name = key.split(".")
        functools.reduce(getattr, groups, config)[name] = value
    return config.lock()


def check_keys(config: ConfigDict) -> None:
    """Raises ValueError where keys of the configuration are missing, unknown, or of another type than their default.

    A locked ConfigDict lets all of it pass where a file unlocks it, replaces a group, or sets None.
    """
    found, known = flatten(config), flatten(default_config())
    if missing := [key for key in known if key not in found]:
        raise ValueError(f"the config lacks {', '.join(missing[:5])}: start from default_config() and take nothing out")
    for key in found:
        if key not in known:
            raise ValueError(f"unknown config key {key!r}{did_you_mean(key)}")
    for key, value in found.items():
        if not is_like(known[key], value, key):
            raise ValueError(f"{key}={shortened(value)} must be of type {type(known[key]).__name__}, like its default "
                             f"{known[key]!r}")


def is_like(default: Any, value: Any, key: str) -> bool:
    """Whether a value has the type of its default, and a tuple's elements theirs."""
    if type(value) is not type(default):
        return False
    # Every tuple of the config holds integers, but for the names of arms.
    kind = str if key == "ablation.arms" else int
    return not isinstance(value, tuple) or all(type(item) is kind for item in value)


def did_you_mean(key: str) -> str:
    """The end of an error message about a key that does not exist."""
    near = difflib.get_close_matches(key, flatten(default_config()), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else "; see tango_jax/defaults.py for every key"


def _shipped_file(name: str) -> Path:
    files = shipped_configs()
    if name not in files:
        raise ValueError(_no_config(name))
    return files[name]


def _no_config(text: str) -> str:
    """The message about a config that does not exist, with the nearest shipped name."""
    names = list(shipped_configs())
    near = difflib.get_close_matches(Path(text).stem, names, n=1, cutoff=0.5)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return (f"config {cut(repr(text), MAX_PATH)} is not a Python file that exists, nor a shipped config{meant}; "
            f"the shipped ones are {', '.join(names)}")
