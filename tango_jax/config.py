"""The configuration: config files, command-line overrides, and what is kept of it in a workdir.

`configs/*.py` expose `get_config(arg)` and start from `default_config()` (defaults.py has every key). The result is
locked: a key that does not exist is refused with the nearest one that does.
"""

import json
import sys
from ast import literal_eval
from pathlib import Path

from ml_collections import ConfigDict

from tango_jax.cli.config_file import did_you_mean, flatten, is_like, run_config_file
from tango_jax.defaults import ARMS, default_config, optimizer_config, role_config
from tango_jax.runtime import hosts
from tango_jax.runtime.atomic import write_atomically
from tango_jax.runtime.checks import cut, folder_to_write
from tango_jax.runtime.manifest import complete_steps
from tango_jax.runtime.model_text import error_line

__all__ = [
    "ARMS", "check_config", "check_same_settings", "default_config", "flatten", "keep_config", "load_config",
    "optimizer_config", "parse_command_line", "role_config", "save_config", "validate",
]  # fmt: skip


# A run may go on on other machines: these change no result beyond rounding.
ANY_HARDWARE = (
    "compile_cache", "distributed.", "generator.mesh.", "verifier.mesh.", "generator.model.attention",
    "verifier.model.attention",
)  # fmt: skip
# Another run's workdir may have moved, as it does with an ablation that goes on on another machine: the checkpoint of
# stage 2 knows the bits of the parameters that it started from, and without one nothing depends on them yet.
ANY_PLACE = ("generator.init_from", "verifier.init_from")
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
    """`check_config`, then `keep_config`: where the next thing that is written depends on the settings.

    The first process does; all of them must call it.

    Raises:
        ValueError: see `check_config`; or the file cannot be written.
    """
    check_config(config, path, may_change)
    hosts.in_first(lambda: keep_config(config, path))


def check_config(
    config: ConfigDict, path: Path, may_change: tuple[str, ...] = (), may_move: tuple[str, ...] = ()
) -> None:
    """Insist that nothing differs that a resumed run depends on, before any work; nothing is written.

    Keys that start with one of `may_change`, of ANY_HARDWARE or of ANY_WATCHING, are free to differ; those of
    `may_move` from one path to another, for a caller that compares the contents.

    The first process does; all of them must call it.

    Raises:
        ValueError: the run in this folder was made with other settings (names them), or its settings are gone.
    """
    hosts.in_first(lambda: _check(config, path, may_change, may_move))


def _check(config: ConfigDict, path: Path, may_change: tuple[str, ...], may_move: tuple[str, ...]) -> None:
    made = _made_in(path.parent)
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if not made:
            return  # no run yet; or one that was killed before there was anything that its settings matter to
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise ValueError(
            f"{path} {reason}, and without it nobody can tell whether {made} was made with these settings: put back a "
            "copy (a run of the same settings in a new workdir writes the same file), or choose another --workdir"
        ) from error
    check_same_settings(config, path, may_change, may_move)


def _made_in(workdir: Path) -> Path | None:
    """Something in a workdir that a run of other settings must not go on from; None: nothing."""
    for directory in (workdir / "checkpoints", *sorted(workdir.glob("sft/*/checkpoints"))):
        if steps := complete_steps(directory):
            return directory / str(steps[-1])
    return next((path for path in (workdir / "summary.json", workdir / "parts") if path.exists()), None)


def keep_config(config: ConfigDict, path: Path) -> None:
    """Write the settings of a run, unless the file holds them already. Raises OSError."""
    text = _as_json(config)
    if not path.is_file() or path.read_bytes() != text.encode():
        write_atomically(path, text)


def check_same_settings(
    config: ConfigDict, path: Path, may_change: tuple[str, ...] = (), may_move: tuple[str, ...] = ()
) -> None:
    """See `check_config`; also raises ValueError where there is no such file, and runs in this process alone."""
    try:
        old, new = json.loads(path.read_text()), json.loads(_as_json(config))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): give the workdir of a run") from error
    moved = [key for key in may_move if old.get(key) and new.get(key)]
    changed = [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old | new)
        if old.get(key) != new.get(key)
        and not key.startswith((*may_change, *ANY_HARDWARE, *ANY_WATCHING))
        and key not in moved
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
    from tango_jax.cli import validation

    validation.check(config)
