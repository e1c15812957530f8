"""The configuration: config files, command-line overrides, and what is kept of it in a workdir.

`configs/*.py` expose `get_config(arg)` and start from `default_config()` (defaults.py has every key). The result is
locked: a key that does not exist is refused with the nearest one that does.
"""

import json
import sys
from ast import literal_eval
from pathlib import Path

from ml_collections import ConfigDict

from tango_jax import hosts
from tango_jax.checks import cut, folder_to_write
from tango_jax.config_file import did_you_mean, flatten, is_like, run_config_file
from tango_jax.defaults import ARMS, default_config, optimizer_config, role_config
from tango_jax.model_text import error_line

__all__ = [
    "ARMS", "check_same_settings", "default_config", "flatten", "load_config", "optimizer_config", "parse_command_line",
    "role_config", "save_config", "validate",
]  # fmt: skip


# A run may go on on other machines: these change no result beyond rounding.
ANY_HARDWARE = (
    "distributed.", "generator.mesh.", "verifier.mesh.", "generator.model.attention", "verifier.model.attention"
)
# A run may be watched otherwise: these change no result at all.
ANY_WATCHING = ("loggers.", "alarms.", "rollouts.")


def load_config(path: str, overrides: list[str] = ()) -> ConfigDict:
    """`get_config` of a Python file, with `key.path=value` overrides applied. `FILE:arg` hands `arg` to get_config.

    Raises:
        ValueError: see `run_config_file`; an override names no key, or has another type.
    """
    file, _, argument = path.partition(":")
    config = run_config_file(file, argument)
    for override in overrides:
        _apply_override(config, override)
    return config.lock()


def _apply_override(config: ConfigDict, override: str) -> None:
    name, separator, text = override.partition("=")
    if not separator:
        raise ValueError(f"--config.{cut(override)} has no value: write --config.key=value")
    node, keys = config, name.split(".")
    for depth, key in enumerate(keys):
        if not isinstance(node, ConfigDict) or key not in node:
            unknown = ".".join(keys[: depth + 1])
            raise ValueError(f"unknown config key {unknown!r} in --config.{cut(override)}{did_you_mean(name)}")
        node = node if depth == len(keys) - 1 else node[key]
    old = node[keys[-1]]
    if isinstance(old, ConfigDict):
        raise ValueError(f"--config.{name} is a group of keys ({', '.join(old)}); set one of them")
    node[keys[-1]] = _parse_like(old, text, name)


def _parse_like(old, text: str, name: str):
    """The text as a value of the old one's type."""
    if isinstance(old, str):
        return text
    try:
        value = literal_eval(text)
        if isinstance(old, float) and type(value) is int:
            value = float(value)
    except (ValueError, SyntaxError, TypeError, OverflowError, RecursionError, MemoryError):
        value = text
    if isinstance(old, tuple) and isinstance(value, list):
        value = tuple(value)
    if not is_like(old, value, name):
        raise ValueError(f"--config.{name}={cut(text)} must be of type {type(old).__name__}, like its default {old!r}")
    return value


def parse_command_line(doc: str, argv: list[str], default_workdir: str) -> tuple[ConfigDict, Path]:
    """`--config=FILE[:arg] --config.key=value ... --workdir=DIR` -> (validated config, workdir).

    Prints `doc` and ends on --help; ends with one line on a user's mistake.
    """
    if "--help" in argv or "-h" in argv:
        print(doc.strip() + "\n\nusage: --config=FILE[:arg] [--config.key=value ...] [--workdir=DIR]\n")
        print("Every key with its default is in tango_jax/defaults.py. Of a setting given twice, the last one counts.")
        sys.exit(0)
    try:
        path, workdir, overrides = "configs/last_letter.py", default_workdir, []
        for argument in argv:
            if argument.startswith("--config="):
                path = argument.removeprefix("--config=")
            elif argument.startswith("--config."):
                overrides.append(argument.removeprefix("--config."))
            elif argument.startswith("--workdir="):
                workdir = argument.removeprefix("--workdir=")
            else:
                raise ValueError(f"unknown argument {argument!r}; --help shows the usage")
        folder = folder_to_write("--workdir", workdir)
        config = load_config(path, overrides)
        validate(config)
    except ValueError as error:
        sys.exit(error_line(error))
    return config, folder


def save_config(config: ConfigDict, path: Path, may_change: tuple[str, ...] = ()) -> None:
    """Write the config, or, where one was written before, insist that nothing differs that a resumed run depends on.

    Keys that start with one of `may_change`, of ANY_HARDWARE or of ANY_WATCHING, are free to differ.

    The first process does; all of them must call it.

    Raises:
        ValueError: the run in this folder was made with other settings (names them), or it cannot be written.
    """
    mistake = ""
    if hosts.is_first():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                check_same_settings(config, path, may_change)
            path.write_text(_as_json(config))
        except (ValueError, OSError) as error:
            mistake = str(error)
    if mistake := hosts.from_first(mistake):
        raise ValueError(mistake)


def check_same_settings(config: ConfigDict, path: Path, may_change: tuple[str, ...] = ()) -> None:
    """See `save_config`, which wrote the file."""
    try:
        old, new = json.loads(path.read_text()), json.loads(_as_json(config))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): give the workdir of a run") from error
    changed = [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old | new)
        if old.get(key) != new.get(key) and not key.startswith((*may_change, *ANY_HARDWARE, *ANY_WATCHING))
    ]
    if changed:
        raise ValueError(
            f"{path.parent} holds a run with other settings ({'; '.join(changed[:5])}): "
            "resume with the same ones, or choose another --workdir"
        )


def _as_json(config: ConfigDict) -> str:
    return json.dumps(flatten(config), indent=1, default=list, sort_keys=True)


def validate(config: ConfigDict) -> None:
    """Every check that needs no data, before any work. Raises ValueError with the numbers and the fix."""
    from tango_jax import validation

    validation.check(config)
