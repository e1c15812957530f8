"""SIGTERM, which schedulers send before they take a machine away: a command ends at once, or once its work is saved.

In: the signal. Out: exit code 75, which tells a launcher to start the same command again. Stage: from the first line of
a command that can go on where it stopped (see tango_jax/__init__.py) to its end; so nothing here imports jax.

Python runs the handler of a signal between two of its own instructions, which XLA's compiler or a long read from a
network disk can put off for minutes. So a thread waits for the signal as well, and ends the process in their midst.
That is safe wherever nothing has been done since the last save, because all files are written so that a kill at any
moment loses no more than the work since then. Where something would be lost, `hold` puts the end off until `release`.
"""

import contextlib
import os
import signal
import socket
import threading

PREEMPTED = 75  # exit code: what can be saved is saved, start again (EX_TEMPFAIL)

_MESSAGE = "told to stop (SIGTERM): nothing is left to save; the same command goes on from here\n"
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it


class _Watch:
    """What a process knows of the signal; there is one of it, as there is one handler."""

    def __init__(self):
        self.lock = threading.RLock()  # the handler may run in a thread that has it
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
        # Not sys.exit: an exception would have to find its way through libraries that catch what they do not know.
        os._exit(PREEMPTED)


_watch = _Watch()


def watch() -> None:
    """Take over SIGTERM, and once more where a library has taken it since, as joining other processes in jax does.

    Outside the main thread, where Python allows no handlers, it does nothing: the signal ends the process as it always
    did.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, _watch.on_signal)
    before = signal.set_wakeup_fd(-1)
    if before != -1:  # that of an earlier call, or of an event loop, beside which the handler alone must do
        signal.set_wakeup_fd(before)
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(reader, writer), name="SIGTERM", daemon=True).start()


def is_requested() -> bool:
    """Whether this process was told to stop."""
    return _watch.is_requested


def hold() -> None:
    """From here on SIGTERM is only noted: there is something to save. A second call does nothing."""
    with _watch.lock:
        _watch.is_held = True


def release() -> None:
    """All is saved: end now if SIGTERM came meanwhile, and from here on as soon as it comes."""
    with _watch.lock:
        _watch.is_held = False
        _watch.end_if_free()


def _wait(reader: socket.socket, writer: socket.socket) -> None:
    """The C part of Python's signal handling writes the number of each signal to `writer`, whoever receives it."""
    while numbers := reader.recv(64):
        if signal.SIGTERM in numbers:
            _watch.on_signal()

