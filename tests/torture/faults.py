"""Disks that fill up or fail, and folders that others remove, at any moment of a run: it ends with one line or not at
all, and the same command then ends as a run that nothing disturbed, bit for bit.

A moment is a number: that of an access to the workdir which writes, makes, renames or removes something. So all moments
at which a disk can fail are equally likely, and a case can be repeated from its seed. The runs go one after another
in one process of their own, which compiles once.
"""

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from support.paths import CONFIGS, ROOT
from support.policies import policies_of
from tango_jax.cli import session as runtime
from tango_jax.cli.command_line import load_config
from tango_jax.cli.validation import validate
from tango_jax.loop.run import run_or_resume
from tango_jax.runtime import termination
from tango_jax.runtime.failures import CommandEnd
from torture.outcome import Outcome
from torture.runs import SMALL, difference, environment, shapes_of

ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
KINDS = ("errno", "file_size", "full", "workdir_removed", "metrics_removed", "terminated", "compile_cache")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGING = {"os.mkdir": 0, "os.rename": 1, "os.remove": 0, "os.truncate": 0}  # event -> which argument is the path
FULL_BYTES = 24 << 20  # of the small file system, where one can be mounted


def disk_faults(count: int, seed: int, folder: Path, overrides: tuple[str, ...] = SMALL,
                kinds: tuple[str, ...] = KINDS) -> Outcome:
    """`count` runs with a random fault at a random moment, each then started again without it.

    Args:
        overrides: of configs/tiny.py.
        kinds: of KINDS, drawn evenly.
    """
    folder.mkdir(parents=True, exist_ok=True)
    case = {"count": count, "seed": seed, "base": str(folder), "overrides": overrides, "kinds": kinds}
    # A mount of its own is gone with the process, whatever happens to it.
    command = [sys.executable, "-m", "torture.faults", json.dumps(case)]
    mounting = subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode == 0
    done = subprocess.run(["unshare", "-m", *command] if mounting else command, cwd=ROOT, check=False, text=True,
                          env=environment(), capture_output=True)
    result = folder / "outcome.json"
    if not result.exists():
        return Outcome(count, 0, [f"seed {seed}: no outcome, exit code {done.returncode}: {done.stderr[-2000:]}"])
    return Outcome(*json.loads(result.read_text()))


# ------------------------------------------------------------------------------- inside the process that has the runs


class Disk:
    """Counts what is done below a folder, and calls `fault` at a chosen number."""

    def __init__(self):
        self.folder, self.count, self.moment, self.fault = None, 0, None, None
        self.error: int | None = None  # from the fault on, what every access ends with
        self._is_inside = False
        sys.addaudithook(self._hear)

    def watch(self, folder: Path, moment: int | None = None, fault: Callable[[], None] | None = None) -> None:
        self.folder, self.count, self.moment, self.fault, self.error = f"{folder}/", 0, moment, fault, None

    def _hear(self, event: str, arguments: tuple) -> None:
        if self.folder is None or self._is_inside:
            return
        if event == "open":
            path, is_writing = arguments[0], bool((arguments[2] or 0) & _WRITING)
        elif event in _CHANGING:
            path, is_writing = arguments[_CHANGING[event]], True
        else:
            return
        if not is_writing or not isinstance(path, (str, Path)) or not str(path).startswith(self.folder):
            return
        self.count += 1
        if self.count == self.moment:
            self._is_inside = True
            try:
                self.fault()
            finally:
                self._is_inside = False
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error), str(path))


class Ended(NamedTuple):
    """How a run ended."""

    code: object  # the text after an error, the number of a SystemExit, or None for an orderly end
    text: str  # of standard output and standard error
    bug: str  # another exception than SystemExit


class Driver:
    """Runs, one after another, with the same compiled functions."""

    def __init__(self, base: Path, overrides: tuple[str, ...]):
        self.base, self.disk = base, Disk()
        termination._watch.end_if_free = _end_if_free
        self.config = load_config(str(CONFIGS / "tiny.py"), [f"compile_cache={base / 'cache'}", *overrides])
        validate(self.config)
        self.policies = policies_of(self.config)
        self.expected = base / "undisturbed"
        self.disk.watch(self.expected)
        ended = self.run(self.expected)
        assert ended.code is None and not ended.bug, ended
        self.moments = self.disk.count
        self.shapes = shapes_of(self.policies)

    def run(self, workdir: Path, **changes: str) -> Ended:
        config = self.config.copy_and_resolve_references()
        config.update(changes)
        code, bug = None, ""
        with _captured() as captured:
            try:
                with runtime.session(config, workdir) as console:
                    run_or_resume(config, workdir, console, self.policies)
            except SystemExit as error:
                code = str(error) if isinstance(error, CommandEnd) else error.code
            except Exception as error:  # what a user would see as a traceback
                bug = f"{type(error).__name__}: {error}"
        return Ended(code, "".join(captured), bug)

    def case(self, kind: str, rng: np.random.Generator, workdir: Path) -> str:
        """The problem, or an empty text."""
        moment, changes = int(rng.integers(1, self.moments + 1)), {}
        number, size, room = ERRNOS[rng.integers(len(ERRNOS))], int(rng.integers(1, 4000)), int(rng.integers(0, 30_000))
        if kind == "full" and not _mount(workdir):
            kind = "file_size"
        faults = {
            "errno": lambda: setattr(self.disk, "error", number),
            "file_size": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY)),
            "full": lambda: _fill(workdir, room),
            "workdir_removed": lambda: shutil.rmtree(workdir, ignore_errors=True),
            "metrics_removed": lambda: [path.unlink() for path in _open_metrics(workdir)],
            "terminated": _terminate_if_held,
            "compile_cache": lambda: None,
        }
        if kind == "compile_cache":
            changes = {"compile_cache": str(Path(__file__) / "below_a_file")}
        self.disk.watch(workdir, moment, faults[kind])
        ended = self.run(workdir, **changes)
        self.disk.watch(workdir)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        (workdir / "ballast").unlink(missing_ok=True)
        termination._watch.is_terminated = False
        problem = problem_of_end(ended)
        if kind == "compile_cache" and not problem:
            is_warned = ended.text.count("warning: compile_cache") == 1
            problem = "" if ended.code is None and is_warned else f"not a run with a warning: {ended}"
            problem = problem or difference(workdir, self.expected, self.shapes)
        else:
            problem = problem or self._problem_of_resuming(workdir)
        _unmount(workdir)
        return f"{kind} at {moment} of {self.moments}: {problem}" if problem else ""

    def _problem_of_resuming(self, workdir: Path) -> str:
        again = self.run(workdir)
        if again.code is not None or again.bug:
            return f"does not go on: {again}"
        return difference(workdir, self.expected, self.shapes)


def problem_of_end(ended: Ended) -> str:
    if ended.bug or "Traceback" in ended.text or "Exception ignored" in ended.text:
        return f"a traceback: {ended}"
    if ended.code in (None, termination.PREEMPTED):
        return ""
    is_one_line = isinstance(ended.code, str) and ended.code.startswith("error: ") and "\n" not in ended.code
    return "" if is_one_line and len(ended.code) < 1000 else f"not one line: {ended}"


def _open_metrics(workdir: Path) -> list[Path]:
    """The file that is being written, if it is a stage that writes one."""
    links = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")
             if os.path.islink(f"/proc/self/fd/{number}")]
    return [Path(link) for link in links if link.startswith(f"{workdir}/") and link.endswith("/metrics.jsonl")]


def _terminate_if_held() -> None:
    """Where nothing is held back the signal would end this process; terms.py does that with others."""
    if termination._watch.is_held:
        os.kill(os.getpid(), signal.SIGTERM)


def _end_if_free() -> None:
    """In place of the end of the process, which other runs share: the end of a run."""
    watch = termination._watch
    if watch.is_terminated and not watch.is_held and threading.current_thread() is threading.main_thread():
        watch.is_terminated = False
        raise SystemExit(termination.PREEMPTED)


def _fill(workdir: Path, room: int) -> None:
    """Leave so many bytes on the file system."""
    with contextlib.suppress(OSError), open(workdir / "ballast", "wb", buffering=0) as file:
        status = os.statvfs(workdir)
        os.posix_fallocate(file.fileno(), 0, max(1, status.f_bavail * status.f_frsize - room))


def _mount(workdir: Path) -> bool:
    workdir.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={FULL_BYTES}", "none", str(workdir)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _unmount(workdir: Path) -> None:
    if os.path.ismount(workdir):
        subprocess.run(["umount", "-l", str(workdir)], check=True)


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """All that is printed, by C++ as well. Through a pipe: a limit on the size of files must not reach it."""
    lines, (reader, writer), kept = [], os.pipe(), (os.dup(1), os.dup(2))

    def read() -> None:
        with open(reader, encoding="utf-8", errors="replace") as pipe:
            lines.extend(pipe)

    thread = threading.Thread(target=read)
    thread.start()
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(writer)
    try:
        yield lines
    finally:
        for number, stream in enumerate((sys.stdout, sys.stderr)):
            stream.flush()
            os.dup2(kept[number], number + 1)
            os.close(kept[number])
        thread.join()


def _drive(count: int, seed: int, base: str, overrides: list[str], kinds: list[str]) -> None:
    driver, rng, failures = Driver(Path(base), tuple(overrides)), np.random.default_rng(seed), []
    for number in range(count):
        workdir = driver.base / f"case_{number}"
        problem = driver.case(kinds[number % len(kinds)], rng, workdir)
        if problem:
            failures.append(f"seed {seed}, fault {number}, {problem}")
        else:
            shutil.rmtree(workdir, ignore_errors=True)
        Path(base, "outcome.json").write_text(json.dumps([number + 1, number + 1 - len(failures), failures]))


if __name__ == "__main__":
    _drive(**json.loads(sys.argv[1]))
