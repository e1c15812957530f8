"""SIGTERM, which schedulers send before they take a machine away, and Ctrl-C (SIGINT).

While a run has unsaved work (`hold`), a signal sets a flag; the run reads it between steps and while sampling, saves
and stops. At other times a signal ends the process at once: saved files stay whole. A second Ctrl-C raises
KeyboardInterrupt anywhere. tango_jax/__init__.py calls this first, so nothing here imports jax.
"""

import contextlib
import os
import signal
import threading
import time

PREEMPTED = 75  # exit code: the state is saved, run the command again (EX_TEMPFAIL)
INTERRUPTED = 130  # exit code after Ctrl-C, as shells count it
PARENT_VARIABLE = "TANGO_JAX_PARENT"  # number of the process that a command is to end with
PARENT_POLL_S = 1.0

_WHEN = "will save and stop, at the latest after this step"
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it


class _Watch:
    is_terminated = False  # SIGTERM came
    is_interrupted = False  # Ctrl-C came while there was unsaved work
    is_held = False  # there is unsaved work
    is_starting = True  # nothing has been done, and nobody catches a KeyboardInterrupt yet
    is_silent = False

    def on_signal(self, *_) -> None:
        if self.is_held and not self.is_terminated:
            self.say(f"told to stop (SIGTERM): {_WHEN}\n")
        self.is_terminated = True
        self.end_if_free()

    def on_interrupt(self, *_) -> None:
        if self.is_starting:
            _end("interrupted before anything was done; run the same command again\n", INTERRUPTED)
        if self.is_interrupted or not self.is_held:
            raise KeyboardInterrupt
        self.is_interrupted = True
        self.say(f"interrupted: {_WHEN}; press Ctrl-C again to stop without saving\n")

    def end_if_free(self) -> None:
        if self.is_terminated and not self.is_held:
            _end("told to stop (SIGTERM), nothing was lost; run the same command again to resume\n", PREEMPTED)

    def say(self, message: str) -> None:
        if not self.is_silent:
            _write(message)


_watch = _Watch()


def watch(is_starting: bool = False, is_silent: bool = False) -> None:
    """Install the handlers; again after a library has replaced them, as jax does when it joins other processes.

    Does nothing outside the main thread, where Python allows no handlers. Ctrl-C is left alone where it is ignored (a
    shell's background job) or handled. `is_starting`: Ctrl-C ends the process without a KeyboardInterrupt. `is_silent`:
    another process prints the messages.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    _watch.is_starting, _watch.is_silent = is_starting, is_silent
    signal.signal(signal.SIGTERM, _watch.on_signal)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _watch.on_interrupt)


def is_requested() -> bool:
    return _watch.is_terminated or _watch.is_interrupted


def is_interrupted() -> bool:
    """Whether Ctrl-C is the only reason to stop."""
    return _watch.is_interrupted and not _watch.is_terminated


def leave_interrupts() -> None:
    """Give Ctrl-C back to Python, for a program that called a command and goes on."""
    _watch.is_interrupted = False
    if signal.getsignal(signal.SIGINT) == _watch.on_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def hold() -> None:
    _watch.is_held = True


def release() -> None:
    """Everything is saved: act on a signal that came, and at once on later ones. May raise KeyboardInterrupt."""
    _watch.is_held = False
    _watch.end_if_free()
    if _watch.is_interrupted:
        raise KeyboardInterrupt


def end_with_parent() -> None:
    """End as by SIGTERM once process PARENT_VARIABLE is gone, to free the workdir. Children get no such variable."""
    number = os.environ.pop(PARENT_VARIABLE, "")

    def wait() -> None:
        while str(os.getppid()) == number:  # an orphan gets another parent
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    if number:
        threading.Thread(target=wait, name="parent", daemon=True).start()


def _write(message: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, message.encode())


def _end(message: str, code: int) -> None:
    _write((_SHOW_CURSOR if os.isatty(2) else "") + message)
    # Not sys.exit: a library may catch its exception.
    os._exit(code)
