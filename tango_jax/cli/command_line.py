"""The command line of the commands that take a config file: arguments in; a checked configuration and a workdir out."""

import sys
from ast import literal_eval
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tango_jax.cli.arguments import Parser
from tango_jax.cli.config_file import did_you_mean, is_like, run_config_file
from tango_jax.cli.validation import validate
from tango_jax.runtime.checks import cut, folder_to_write
from tango_jax.runtime.model_text import error_line

DEFAULT_CONFIG = "last_letter"


def load_config(path: str, overrides: list[str] = ()) -> ConfigDict:
    """`get_config` of a config, with `key.path=value` overrides applied.

    Args:
        path: `FILE.py`, or the name of a shipped config such as `last_letter`; `:arg` behind it goes to get_config. Or
            the `config.json` of a run.
        overrides: each one `key.path=value`.

    Raises:
        ValueError: see `run_config_file`; an override names no key, or has another type.
    """
    # The folder of a run's own settings may have any name.
    file, _, argument = (path, "", "") if path.endswith(".json") else path.partition(":")
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


def _parse_like(old: Any, text: str, name: str):
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


def parse_command_line(
    command: str, doc: str, argv: Sequence[str] | None, default_workdir: str
) -> tuple[ConfigDict, Path]:
    """`--config=FILE[:arg] --config.key=value ... --workdir=DIR` -> (validated config, workdir).

    Ends the process after --help, which shows `doc`, and with one line after a user's mistake.
    """
    parser = Parser(command, doc, usage="%(prog)s --config=FILE[:arg] [--config.key=value ...] [--workdir=DIR]")
    parser.add_config()
    parser.add_argument("--workdir", metavar="DIR", default=default_workdir,
                        help="folder of results and checkpoints; the same command resumes in it; default: %(default)s")
    try:
        options, overrides = parser.parse_overrides(argv)
        workdir = folder_to_write("--workdir", options.workdir)
        config = load_config(options.config, overrides)
        validate(config)
    except ValueError as error:
        sys.exit(error_line(error))
    return config, workdir
