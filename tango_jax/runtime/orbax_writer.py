"""Orbax as a run needs it: saving in a daemon thread, without its own tracebacks, and through a first Ctrl-C."""

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable

import jax
import numpy as np
import orbax.checkpoint as ocp

log = logging.getLogger(__name__)


def make_orbax() -> ocp.Checkpointer:
    # Replicated arrays are written by one device: splitting the work would compile slices in the middle of the run.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(type_handler_registry=registry), record=ocp.JsonCheckpointHandler()))


def in_daemon_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread that does not keep the process alive, and wait for it.

    The threads that Orbax starts inherit this. After a save that failed they wait ten minutes for folders that nobody
    makes any more, and the process, which has said its error, would wait for them.
    """
    errors = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (raised again below)
            errors.append(error)

    thread = threading.Thread(target=run, name="save", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@contextlib.contextmanager
def quiet_orbax():
    """Silence the tracebacks that Orbax, asyncio and the writer threads print for every array that cannot be written.

    The error raised here says the same in one line. The threads may fail after it, so they stay silenced after an
    error.
    """
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels, hook = [logger.level for logger in loggers], sys.unraisablehook
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = _unraisable_but_for_writers
    yield
    sys.unraisablehook = hook
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def _unraisable_but_for_writers(unraisable) -> None:
    """Ignore writes that finish after Orbax has given up the others: nothing awaits their result."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


@contextlib.contextmanager
def interrupt_waits():
    """Defer a first Ctrl-C until the block is done; a second one interrupts the block at once."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # Python allows signal handlers in the main thread only
        return
    held = []

    def hold(signum, frame):
        if held:
            raise KeyboardInterrupt
        held.append((signum, frame))
        log.warning("stopping once the checkpoint is written; press Ctrl-C again to stop without it")

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        handler(*held[0])
