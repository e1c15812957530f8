"""The argument parser of every command: arguments in; a namespace out, or a mistake as one line.

It is argparse with the command's docstring as its help. Options are written in full, and a mistake is a ValueError for
the command's `main` to print, rather than a usage message and an exit.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import IO, NoReturn

from tango_jax.cli.config_file import shipped_configs
from tango_jax.runtime.checks import cut
from tango_jax.runtime.failures import drop_broken_output

MAX_MESSAGE = 400  # characters; argparse repeats whatever it was given
OVERRIDE = "--config."
DEFAULT_CONFIG = "last_letter"


class Parser(argparse.ArgumentParser):
    """The parser of `python -m tango_jax.<command>`, or `tango-<command>`. Every mistake raises ValueError."""

    def __init__(self, command: str, doc: str, usage: str | None = None):
        script = f"tango-{command}"
        is_script = os.path.basename(sys.argv[0]) == script
        super().__init__(
            prog=script if is_script else f"python -m tango_jax.{command}",
            usage=usage,
            description=doc.strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def add_config(self, default: str | None = DEFAULT_CONFIG) -> None:
        """Add --config and describe --config.key=value, which `parse_overrides` takes."""
        described = f"; default: {default}" if default else ""
        self.add_argument("--config", metavar="FILE", default=default,
                          help="a Python file, the config.json of a run, or the name of a shipped configuration "
                          f"({', '.join(shipped_configs())}); FILE:arg hands arg to its get_config{described}")
        # Shown in the help; any of these is left over by `parse_known_args`.
        self.add_argument_group("overrides", f"{OVERRIDE}key=value replaces a value of the configuration, such as "
                                f"{OVERRIDE}rl.gamma=0.5.\nEvery key and its default is in tango_jax/defaults.py. Of a "
                                "setting given twice, the last one counts.")

    def parse_overrides(self, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
        """Options, and the `key=value` of each --config.key=value or --config.key value, in the order given.

        Raises:
            ValueError: an argument that is unknown, missing, or of another type.
        """
        options, rest = self.parse_known_args(argv)
        overrides, unknown = [], []
        for argument in rest:
            if argument.startswith(OVERRIDE):
                overrides.append(argument.removeprefix(OVERRIDE))
            elif overrides and "=" not in overrides[-1]:
                overrides[-1] += f"={argument}"
            else:
                unknown.append(argument)
        self.refuse(unknown)
        return options, overrides

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Options and positional arguments, in any order. Raises ValueError as `parse_overrides`."""
        options, rest = self.parse_known_intermixed_args(args, namespace)
        self.refuse(rest)
        return options

    def refuse(self, unknown: list[str]) -> None:
        if unknown:
            self.error(f"unknown argument {cut(repr(unknown[0]))}")

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{cut(message, MAX_MESSAGE)}; --help shows the usage")

    def print_help(self, file: IO[str] | None = None) -> None:
        super().print_help(file)
        drop_broken_output()  # `--help | head` closes the pipe
