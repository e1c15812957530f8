"""Commands that take a config file: arguments in; a checked configuration and a workdir out."""

import argparse
import functools
import sys
from ast import literal_eval
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tango_jax.cli.arguments import CHOICES, Parser
from tango_jax.cli.config_file import ConfigFile, did_you_mean, element_type, is_like, open_config, with_settings
from tango_jax.cli.ranges import check_values
from tango_jax.cli.validation import validate
from tango_jax.config import ROLES, default_config, flatten, read_settings
from tango_jax.defaults import KEYS
from tango_jax.runtime.checks import Mistakes, cut, folder_to_write, local_path, require, shortened
from tango_jax.runtime.failures import drop_broken_output, ends_in_one_line
from tango_jax.weights.source import NUMERICS

# (config, keys of the command line): sets what the command decides, and returns the keys that then count as given.
Decide = Callable[[ConfigDict, Collection[str]], Collection[str]]
BUCKETS = {"prompt_buckets": "max_prompt", "cache_buckets": "max_response"}


def load_config(path: str, overrides: Sequence[str] | Mapping[str, Any] = (), **arguments: str) -> ConfigDict:
    """`get_config` of a config, with overrides applied. Raises ValueError with everything that is wrong.

    Args:
        path: `FILE.py`, a shipped config's name, or a run's `config.json`; `:arg` after it goes to get_config.
        overrides: `key.path=value` texts, or a mapping, {"key.path": value}.
        arguments: get_config's arguments by name, such as `model` and `problems` of own_problems.
    """
    if isinstance(overrides, str) or not all(isinstance(one, str) for one in overrides):
        raise ValueError(f"overrides={shortened(overrides)} must be a list, such as ['rl.warmup_steps=1'], or a "
                         "mapping, such as {'rl.warmup_steps': 1}")
    file, argument = _split(path)
    mistakes = Mistakes()
    config = _loaded(open_config(file), argument, overrides, arguments, mistakes)
    mistakes.raise_all()
    return config


def load_options(parser: Parser, options: argparse.Namespace, overrides: Sequence[str]) -> ConfigDict:
    """From what `parser.parse_overrides` returned. Raises ValueError."""
    mistakes = Mistakes()
    config = _load_options(parser, options, overrides, mistakes)
    mistakes.raise_all()
    return config


def _load_options(
    parser: Parser, options: argparse.Namespace, overrides: Sequence[str], mistakes: Mistakes,
    decide: Decide | None = None,
) -> ConfigDict | None:
    """`load_options` that notes mistakes; None if there is no configuration."""
    with mistakes.collected():
        file, argument = _split(options.config)
        opened = open_config(file)
        known = {name: value for name, value in options.config_arguments.items() if name in opened.arguments}
        with mistakes.collected():
            parser.refuse_others(options, opened.arguments)
        return _loaded(opened, argument, overrides, known, mistakes, decide)
    return None


def _split(path: str) -> tuple[str, str]:
    # A run's folder may have a colon in its name.
    file, _, argument = (path, "", "") if path.endswith(".json") else path.partition(":")
    return file, argument


def _loaded(
    opened: ConfigFile, argument: str, overrides: Sequence[str] | Mapping[str, Any], arguments: dict[str, str],
    mistakes: Mistakes, decide: Decide | None = None,
) -> ConfigDict | None:
    """Overrides that do not fit are noted. None if `complete` needs all of them."""
    config, count = opened.make(argument, arguments), len(mistakes.messages)
    for override in overrides:
        with mistakes.collected():
            if isinstance(overrides, Mapping):
                config = with_settings(config, {override: overrides[override]})
            else:
                apply_override(config, override)
    given = frozenset(override.partition("=")[0] for override in overrides)
    if decide is not None:
        given = given.union(decide(config, given))
    if opened.complete is not None:
        if len(mistakes.messages) > count:
            return None
        check_values(flatten(config))  # with which it computes
    config = opened.completed(config, given)
    _drop_buckets(config, given)
    return config.lock()


def apply_override(config: ConfigDict, override: str) -> None:
    """Set `key.path=value`. Raises ValueError for an unknown key or another type."""
    name, separator, text = override.partition("=")
    if not separator:
        raise ValueError(f"--config.{cut(override)} has no value: write --config.key=value")
    if any(key.startswith(f"{name}.") for key in KEYS):
        raise ValueError(f"--config.{name} is a group of keys: set one of them (--keys={name} lists them)")
    if name not in KEYS:
        raise ValueError(f"unknown config key {cut(repr(name))}{did_you_mean(name)}")
    *groups, key = name.split(".")
    group = functools.reduce(getattr, groups, config)
    group[key] = _parse_like(group[key], text, name)


def _parse_like(old: Any, text: str, name: str):
    if isinstance(old, str):
        return text
    try:
        value = literal_eval(text.capitalize() if isinstance(old, bool) else text)  # true serves for True
        if isinstance(old, float) and type(value) is int:
            value = float(value)
    except (ValueError, SyntaxError, TypeError, OverflowError, RecursionError, MemoryError):
        value = text
    kind = element_type(name) if isinstance(old, tuple) else None
    if kind is str and isinstance(value, str):  # names without quotes: q,v or (q,v)
        value = [part.strip() for part in value.removeprefix("(").removesuffix(")").split(",") if part.strip()]
    if kind and isinstance(value, list | tuple):
        value = tuple(float(item) if kind is float and type(item) is int else item for item in value)
    if not is_like(old, value, name):
        hint = ": write true or false" if isinstance(old, bool) else ""
        is_element = type(value) is kind or (kind is float and type(value) is int)
        hint = f": write ({text},)" if is_element else hint
        raise ValueError(f"--config.{name}={cut(text)} must be of type {type(old).__name__}, like its default {old!r}"
                         f"{hint}")
    return value


def _drop_buckets(config: ConfigDict, given: frozenset[str]) -> None:
    """Drop the file's buckets above a limit of the command line, with a note."""
    for role in ROLES:
        for name, limit in BUCKETS.items():
            if f"{role}.{limit}" not in given or f"{role}.{name}" in given:
                continue
            before, most = tuple(config[role][name]), config[role][limit]
            config[role][name] = tuple(size for size in before if size < most)
            if config[role][name] != before:
                note = f"{role}.{name}={before} became {config[role][name]}, below {role}.{limit}={most}"
                config.notes = f"{config.notes}\n{note}".strip()


def _experiment(*_: Any) -> list[str]:
    """An experiment runs `ablation.arms` and not `arm`, whether the file or the command line sets them."""
    return ["ablation.arms"]


def _fork(run: str, settings: Mapping[str, Any], config: ConfigDict, given: Collection[str]) -> list[str]:
    """Take stage 1 from `run`, which has these `settings`. Neither stage 1 nor the warm-up is repeated."""
    decided = {"fork_of": run, "rl.warmup_steps": 0, "notes": ""}
    decided |= {key: settings.get(key, 0) for key in (f"{role}.sft.steps" for role in ROLES)}
    config.update_from_flattened_dict({key: value for key, value in decided.items() if key not in given})
    for role in ROLES:
        of_run = settings.get(f"{role}.init_from", "")
        if (config[role].sft.steps or of_run) and not config[role].init_from:
            config[role].init_from = of_run or run
    return ["fork_of", "rl.warmup_steps", *(f"{role}.{key}" for role in ROLES for key in ("sft.steps", "init_from"))]


def print_config(config: ConfigDict) -> None:
    defaults, lines = flatten(default_config()), []
    for key, value in flatten(config).items():
        role, _, field = key.partition(".model.")
        if field and field not in NUMERICS and role in ROLES and config[role].checkpoint:
            comment = f"  # not used: read from {role}.checkpoint"
        else:
            comment = f"  # default: {defaults[key]!r}" if value != defaults[key] else ""
        lines.append(f"{key}={value!r}{comment}")
    sys.stdout.write("\n".join([*lines, ""]))
    drop_broken_output()  # `--print-config | head` closes the pipe


def parse_command_line(
    command: str, doc: str, argv: Sequence[str] | None, default_workdir: str, choices: str = CHOICES
) -> tuple[ConfigDict, Path]:
    """`--config=FILE[:arg] --config.key=value ... --workdir=DIR` -> (validated config, workdir).

    Ends the process after --help (`doc`), --print-config and mistakes. NAME in `default_workdir`: the config's name.
    """
    parser = Parser(command, doc, usage="%(prog)s --config=FILE[:arg] [--config.key=value ...] [--workdir=DIR]")
    parser.add_config(choices)
    parser.add_argument("--workdir", metavar="DIR", default=None,
                        help="folder of results and checkpoints; the same command resumes in it; default: "
                        f"{default_workdir}")
    parser.add_flag("--print-config", "print every setting of the run, and end")
    if command == "train":
        parser.add_argument("--from", metavar="RUN", help="begin with the newest policies of another run, "
                            "with its settings (or --config) and those given here, in a new folder")
    with ends_in_one_line():
        options, overrides = parser.parse_overrides(argv)
        mistakes, workdir, config = Mistakes(), None, None
        run = vars(options).get("from")
        if run:
            source = local_path("--from", run).resolve()
            settings = source / "config.json"
            require(settings.is_file(), f"--from={run} is not the folder of a run: {settings} is missing")
            options.config = options.config or str(settings)
        with mistakes.collected():
            name = f"{source.name}_fork" if run else Path(_split(options.config)[0]).stem
            given = default_workdir.replace("NAME", name) if options.workdir is None else options.workdir
            workdir = folder_to_write("--workdir", given)
            require(not run or workdir.resolve() != source,
                    f"--workdir={given} is the run that --from names: a fork needs a folder of its own")
        decide = _experiment if command == "ablate" else None
        if run:
            with mistakes.collected():
                decide = functools.partial(_fork, run, read_settings(settings))
        config = _load_options(parser, options, overrides, mistakes, decide)
        if options.print_config and not mistakes.messages:
            print_config(config)
        with mistakes.collected():
            if config is not None:
                tried = config.copy_and_resolve_references()
                if command == "ablate":
                    tried.arm = next(iter(config.ablation.arms), config.arm)
                validate(tried)
        mistakes.raise_all()
    if options.print_config:
        sys.exit(0)
    return config, workdir
