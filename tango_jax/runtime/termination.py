"""Handling of SIGTERM, which schedulers send before they preempt a machine: exit at once, or as soon as work is saved.

Exits with code 75, which tells a launcher to start the same command again. Active from the first line of a resumable
command (see tango_jax/__init__.py) to its end, so nothing here imports jax.

Python runs signal handlers only between its own instructions, which XLA's compiler or a long read from a network disk
can delay for minutes. So a thread waits for the signal as well and ends the process even then. This is safe whenever
nothing has been done since the last save, because all files are written so that a kill at any moment loses only the
work since then. When there is unsaved work, `hold` defers the exit until `release`.
"""

import contextlib
import os
import signal
import socket
import threading

PREEMPTED = 75  # exit code: the state is saved, run the command again (EX_TEMPFAIL)

_MESSAGE = "told to stop (SIGTERM): everything is saved; run the same command again to resume\n"
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it


class _Watch:
    """The state of the signal handling; there is one instance, since there is one handler per process."""

    def __init__(self):
        self.lock = threading.RLock()  # re-entrant: the handler may run in a thread that holds the lock
        self.is_requested = False
        self.is_held = False

    def on_signal(self, *_) -> None:
        with self.lock:
            self.is_requested = True
            self.end_if_free()

    def end_if_free(self) -> None:
        if not self.is_requested or self.is_held:
            return
        message = _MESSAGE
        if os.isatty(2):
            message = _SHOW_CURSOR + message
        with contextlib.suppress(OSError):
            os.write(2, message.encode())
        # Not sys.exit: libraries on the way out may catch an exception that they do not know.
        os._exit(PREEMPTED)


_watch = _Watch()


def watch() -> None:
    """Install the SIGTERM handler; call it again after a library replaced it, as jax does when joining other processes.

    Does nothing outside the main thread, where Python allows no signal handlers: SIGTERM then ends the process as
    usual.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, _watch.on_signal)
    before = signal.set_wakeup_fd(-1)
    if before != -1:  # already set by an earlier call, or by an event loop: the handler must suffice
        signal.set_wakeup_fd(before)
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(reader, writer), name="SIGTERM", daemon=True).start()


def is_requested() -> bool:
    """Whether SIGTERM has been received."""
    return _watch.is_requested


def hold() -> None:
    """From now on only record SIGTERM, because there is unsaved work. A second call does nothing."""
    with _watch.lock:
        _watch.is_held = True


def release() -> None:
    """Everything is saved: exit now if SIGTERM came meanwhile, and from now on as soon as it comes."""
    with _watch.lock:
        _watch.is_held = False
        _watch.end_if_free()


def _wait(reader: socket.socket, writer: socket.socket) -> None:
    """Wait for signals: the C part of Python's signal handling writes the number of each signal to `writer`."""
    while numbers := reader.recv(64):
        if signal.SIGTERM in numbers:
            _watch.on_signal()

