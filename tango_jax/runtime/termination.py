"""Handling of SIGTERM, which schedulers send before they preempt a machine, and of Ctrl-C (SIGINT).

Both end a command at once, or as soon as its work is saved: SIGTERM with code 75, which tells a launcher to start the
same command again, Ctrl-C with code 130. Active from the first line of a resumable command (see tango_jax/__init__.py)
to its end, so nothing here imports jax.

Python runs signal handlers only between its own instructions, which XLA's compiler or a long read from a network disk
can delay for minutes. So a thread waits for SIGTERM as well and ends the process even then. This is safe whenever
nothing has been done since the last save, because all files are written so that a kill at any moment loses only the
work since then. When there is unsaved work, `hold` defers the exit until `release`, and a message says at once when
that will be. Ctrl-C comes from a person, who may press it again: the second one is a KeyboardInterrupt wherever the
program is.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable

PREEMPTED = 75  # exit code: the state is saved, run the command again (EX_TEMPFAIL)
INTERRUPTED = 130  # exit code after Ctrl-C, as shells count it

_MESSAGE = "told to stop (SIGTERM): everything is saved; run the same command again to resume\n"
_TERMINATED_AT_START = "told to stop (SIGTERM) before anything was done; run the same command again\n"
_INTERRUPTED_AT_START = "interrupted before anything was done; run the same command again\n"
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it


class _Watch:
    """The state of the signal handling; there is one instance, since there is one handler per process."""

    def __init__(self):
        self.lock = threading.RLock()  # re-entrant: the handler may run in a thread that holds the lock
        self.is_terminated = False  # SIGTERM came
        self.is_interrupted = False  # Ctrl-C came while there was unsaved work
        self.is_held = False
        self.is_starting = True  # nothing has been done, and nobody catches a KeyboardInterrupt yet
        self.when_fn: Callable[[], str] = lambda: "will save and stop after this step"

    def on_signal(self, *_) -> None:
        with self.lock:
            is_news, self.is_terminated = not self.is_terminated, True
            if is_news and self.is_held and (when := self.when_fn()):
                _say(f"told to stop (SIGTERM): {when}\n")
            self.end_if_free()

    def on_interrupt(self, *_) -> None:
        if self.is_starting:
            _end(_INTERRUPTED_AT_START, INTERRUPTED)
        if self.is_interrupted or not self.is_held:
            raise KeyboardInterrupt
        self.is_interrupted = True
        if when := self.when_fn():
            _say(f"interrupted: {when}; press Ctrl-C again to stop without saving\n")

    def end_if_free(self) -> None:
        if self.is_terminated and not self.is_held:
            _end(_TERMINATED_AT_START if self.is_starting else _MESSAGE, PREEMPTED)


_watch = _Watch()


def watch(is_starting: bool = False) -> None:
    """Install the handlers; call it again after a library replaced that of SIGTERM, as jax does when joining others.

    Does nothing outside the main thread, where Python allows no signal handlers: SIGTERM then ends the process as
    usual. Ctrl-C is left alone where it is ignored, as in a shell's background jobs, or handled by another program.

    Args:
        is_starting: the command is not far enough to say what is saved; Ctrl-C ends it at once.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    _watch.is_starting = is_starting
    signal.signal(signal.SIGTERM, _watch.on_signal)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _watch.on_interrupt)
    before = signal.set_wakeup_fd(-1)
    if before != -1:  # already set by an earlier call, or by an event loop: the handler must suffice
        signal.set_wakeup_fd(before)
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(reader, writer), name="SIGTERM", daemon=True).start()


def announce(when_fn: Callable[[], str]) -> None:
    """From now on `when_fn` says when a command with unsaved work will stop, as a signal's message does at once.

    It runs in a signal handler or in a thread, and so may neither print nor wait for a lock; "" prints nothing.
    """
    _watch.when_fn = when_fn


def is_requested() -> bool:
    """Whether the command is to stop once its work is saved."""
    return _watch.is_terminated or _watch.is_interrupted


def is_interrupted() -> bool:
    """Whether Ctrl-C is the only reason to stop."""
    return _watch.is_interrupted and not _watch.is_terminated


def leave_interrupts() -> None:
    """Give Ctrl-C back to Python: a program that called a command goes on without it."""
    _watch.is_interrupted = False
    if signal.getsignal(signal.SIGINT) == _watch.on_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def hold() -> None:
    """From now on only record the signals, because there is unsaved work. A second call does nothing."""
    with _watch.lock:
        _watch.is_held = True


def release() -> None:
    """Everything is saved: stop now if a signal came meanwhile, and from now on as soon as one comes.

    Raises:
        KeyboardInterrupt: the signal was Ctrl-C.
    """
    with _watch.lock:
        _watch.is_held = False
        _watch.end_if_free()
    if _watch.is_interrupted:
        raise KeyboardInterrupt


def _wait(reader: socket.socket, writer: socket.socket) -> None:
    """Wait for signals: the C part of Python's signal handling writes the number of each signal to `writer`."""
    while numbers := reader.recv(64):
        if signal.SIGTERM in numbers:
            _watch.on_signal()


def _say(message: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, message.encode())


def _end(message: str, code: int) -> None:
    _say((_SHOW_CURSOR if os.isatty(2) else "") + message)
    # Not sys.exit: libraries on the way out may catch an exception that they do not know.
    os._exit(code)
