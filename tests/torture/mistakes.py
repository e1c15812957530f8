"""A hundred mistakes of a user, over all commands: each must end at once, in one clear line, and leave nothing behind.

In: how many, and a seed that chooses among them. Out: how many were tried and survived, and what is wrong with the
others. The commands run in this process, as their `main` is called from a shell.
"""

import contextlib
import dataclasses
import importlib
import io
import os
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from support.tiny_checkpoints import write_tiny_folder
from tango_jax.config import default_config, flatten
from tango_jax.defaults import KEYS
from tango_jax.runtime.keys import Range
from tango_jax.runtime.timers import CompileCounter
from torture.mistake_list import BASES, IN_THE_ENVIRONMENT, WRITTEN, write_files
from torture.outcome import Outcome

# What an error line tells to do begins with one of these, or is a limit that says it already.
HINTS = ("must", "choose", "give", "name", "raise", "lower", "use ", "write", "set ", "take", "try", "did you mean",
         "is not one of", "start", "leave", "create", "ask", "see ", "--help", "invalid", "expected", "required",
         "restore", "line ", "pip install", "add ", "is neither", "no rows", "filter", "fetch", "let ")


MOST_LINES = 8


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One command line; see mistake_list.py for what stands in braces."""

    command: str
    arguments: tuple[str, ...]
    names: str  # what the error line must hold: the setting or the value that is wrong
    environment: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        words = [*(f"{name}={value}" for name, value in self.environment), self.command, *self.arguments]
        return " ".join(word if len(word) <= 80 else f"{word[:77]}..." for word in words)


def mistakes(count: int = 100, seed: int = 0) -> Outcome:
    """Make `count` mistakes, drawn by `seed`."""
    drawn = list(_drawn(count, random.Random(seed)))
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder) / "files")
        model = Path(folder) / "model"
        if any("{model}" in argument for mistake in drawn for argument in mistake.arguments):
            write_tiny_folder(model)
        failures = []
        for number, mistake in enumerate(drawn):
            place = Path(folder) / f"place_{number}"
            place.mkdir()
            failures += [f"{mistake}: {fault}" for fault in _faults(mistake, place, files, model)[:1]]
    return Outcome(len(drawn), len(drawn) - len(failures), failures)


def _drawn(count: int, rng: random.Random) -> Iterator[Mistake]:
    """Those of the list, in random order; where there are not enough, numbers of the config that are out of range."""
    written = []
    for command, *added, names in WRITTEN:
        base = added.pop(0) if added and isinstance(added[0], tuple) else BASES[command]
        written.append(Mistake(command, (*base, *added), names))
    written += [Mistake(command, BASES[command], names, env) for command, env, names in IN_THE_ENVIRONMENT]
    rng.shuffle(written)
    yield from written[:count]
    settings = flatten(default_config())
    keys = [key for key, value in settings.items() if isinstance(KEYS[key].allowed, Range) and value != ()]
    for key in rng.choices(keys, k=max(0, count - len(written))):
        value = rng.choice(("-7.0", "1e999") if isinstance(settings[key], float) else ("-7", str(2**40)))
        text = f"({value},)" if isinstance(settings[key], tuple) else value
        command = rng.choice(("train", "sft", "ablate", "plan"))
        yield Mistake(command, (*BASES[command], f"--config.{key}={text}"), f"{key}=")


def _faults(mistake: Mistake, place: Path, files: Path, model: Path) -> list[str]:
    """What is wrong with the end of a command, most telling first; nothing if it is as it should be."""
    names = {"work": str(place / "work"), "files": str(files), "model": str(model)}
    arguments = [_filled(argument, names) for argument in mistake.arguments]
    before = _listed(place, files)
    with CompileCounter() as compiles:
        code, out, err = _run(mistake.command, arguments, dict(mistake.environment), place)
    errors = [line for line in err.splitlines() if "error: " in line]
    others = [line for line in err.splitlines() if line not in errors and not line.startswith(("usage: ", " "))]
    faults = []
    if "Traceback" in err + out:
        faults.append(f"a traceback that ends in {err.strip().splitlines()[-1]!r}")
    if code in (0, None):
        faults.append("it ended with code 0")
    # A value can break several limits, each of which is told in a line of its own.
    if not errors or others or len(errors) > MOST_LINES:
        faults.append(f"{len(errors)} error lines and {len(others)} others: {err[-300:]!r}")
    elif not any(mistake.names in line for line in errors):
        faults.append(f"{mistake.names!r} is not in {errors}")
    elif silent := [line for line in errors if not any(hint in line for hint in HINTS)]:
        faults.append(f"it does not say what to do: {silent}")
    if changed := sorted(set(_listed(place, files)) ^ set(before)):
        faults.append(f"it left {changed}")
    if compiles.compilations:
        faults.append(f"it came after {len(compiles.compilations)} compilations")
    return faults


def _filled(text: str, names: dict[str, str]) -> str:
    """The text with its {names} replaced; other braces stay."""
    for name, value in names.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _listed(*folders: Path) -> list[str]:
    return [str(path) for folder in folders for path in sorted(folder.rglob("*"))]


def _run(command: str, arguments: list[str], environment: dict, place: Path) -> tuple[int | None, str, str]:
    """(exit code, standard output, standard error) of a command's `main`, started in an empty folder."""
    main = importlib.import_module(f"tango_jax.{command}").main
    handler, out, err = signal.getsignal(signal.SIGTERM), io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(place), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ, environment), mock.patch("sys.stdin", io.StringIO()),
    ):
        try:
            code = main(arguments)
        except SystemExit as stopped:  # a text is printed and the code is 1, as Python does at its end
            code = stopped.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
        except Exception:
            traceback.print_exc()
            code = 1
        finally:
            signal.signal(signal.SIGTERM, handler)
    return code, out.getvalue(), err.getvalue()
