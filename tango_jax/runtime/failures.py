"""One-line messages for errors of the environment or the user. A bug in this program keeps its traceback.

Nothing here imports jax.
"""

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from tango_jax.runtime.checks import SettingsError
from tango_jax.runtime.model_text import error_line
from tango_jax.runtime.termination import INTERRUPTED

FAILED = 1  # the machine or the model: a full disk, no memory, a loss that is not finite
MISTAKE = 2  # something that the user can mend: arguments, settings, files

# FloatingPointError: a loss that is not finite. RuntimeError: XLA, jax, the grader.
EXPECTED = (ValueError, FloatingPointError, OSError, MemoryError, RuntimeError)
_BUGS = (NotImplementedError, RecursionError)  # subclasses of RuntimeError

_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "see `ulimit -f`",
    errno.EROFS: "name another folder",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.ENOENT: "was it removed during the run?",
    errno.ESTALE: "was it removed during the run?",
    errno.EIO: "the disk or the network file system is failing",
    errno.EMFILE: "see `ulimit -n`",
}
# XLA messages that blame no argument; some are ValueErrors.
XLA_CODES = ("UNKNOWN:", "INTERNAL:", "UNAVAILABLE:", "ABORTED:", "CANCELLED:", "DEADLINE_EXCEEDED:",
             "FAILED_PRECONDITION:", "RESOURCE_EXHAUSTED:", "DATA_LOSS:")
_MAX_LENGTH = 400  # of a library's message, in characters


class OutOfMemory(RuntimeError):
    """A device's memory is full; the message names the phase and what to lower."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether XLA could not get memory of a device, and nothing has explained it yet."""
    return isinstance(error, (RuntimeError, ValueError)) and "RESOURCE_EXHAUSTED" in str(error) and not isinstance(
        error, OutOfMemory)


def typed_command(command: str) -> str:
    is_script = os.path.basename((sys.argv or [""])[0]).startswith("tango-")
    return f"tango-{command}" if is_script else f"python -m tango_jax.{command}"


def is_bug(error: BaseException) -> bool:
    return not isinstance(error, EXPECTED) or isinstance(error, _BUGS)


def describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename is not None else f"{_place(error)}: "
        advice = _ADVICE.get(error.errno)
        return _line(f"{place}{error.strerror}{f' ({advice})' if advice else ''}")
    if isinstance(error, MemoryError) or str(error).startswith("RESOURCE_EXHAUSTED"):
        return (f"{first_line(error) or 'out of memory'} (in {_place(error)}); `{typed_command('plan')}` shows how "
                "much memory a run needs; it depends on row_buckets, cache_tokens, rows_per_micro_batch and lengths")
    if isinstance(error, RuntimeError) and not isinstance(error, OutOfMemory):
        return f"{first_line(error) or type(error).__name__} (in {_place(error)})"
    return " ".join(str(error).splitlines())


def last_line(error: Exception) -> str:
    """A command's last line, or several for a SettingsError. Raises a bug again."""
    if is_bug(error):
        raise error
    mistakes = error.messages if isinstance(error, SettingsError) else (describe(error),)
    return "\n".join(map(error_line, mistakes))


def exit_code(error: Exception) -> int:
    """MISTAKE for arguments, settings and files, else FAILED."""
    return MISTAKE if isinstance(error, ValueError) and not str(error).startswith(XLA_CODES) else FAILED


class CommandEnd(SystemExit):
    """Ends a command: the text is its last line, `code` its exit code."""

    def __init__(self, line: str, code: int):
        super().__init__(line)
        self.code = code


def leave(line: str, code: int) -> NoReturn:
    drop_broken_output()
    print(line, file=sys.stderr, flush=True)
    raise CommandEnd(line, code)


@contextlib.contextmanager
def ends_in_one_line(when_interrupted: str = "nothing was written") -> Iterator[None]:
    """Ends a command that does not resume with one line and an exit code, on a mistake, a failure or Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        leave(f"interrupted; {when_interrupted}", INTERRUPTED)
    except EXPECTED as error:
        leave(last_line(error), exit_code(error))


def drop_broken_output() -> None:
    """Python would fail at exit on a closed pipe."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _place(error: BaseException) -> str:
    package = str(Path(__file__).parents[1])
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(package)] or frames
    return f"{Path(own[-1].filename).name}, {own[-1].name}" if own else "this program"


def first_line(error: BaseException) -> str:
    return _line(str(error))


def _line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= _MAX_LENGTH else f"{line[:_MAX_LENGTH]} ..."
