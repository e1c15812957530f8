"""Ends a process with the one that started it, as if that had sent SIGTERM: saved, where the command can save.

A command that starts others (tango_jax.ablate) names itself in their environment. If it is killed without a chance to
tell them, they notice, and do not go on as orphans that keep their workdirs locked. Nothing here imports jax.
"""

import os
import signal
import threading
import time

PARENT_VARIABLE = "TANGO_JAX_PARENT"  # number of the process that a command is to end with
POLL_S = 1.0


def end_with_parent() -> None:
    """Watch the process that PARENT_VARIABLE names, if there is one, from a thread. Call it after `termination.watch`.

    The variable is removed from the environment: processes that this one starts have another parent.
    """
    number = os.environ.pop(PARENT_VARIABLE, "")
    if number:
        threading.Thread(target=_wait, args=(number,), name="parent", daemon=True).start()


def _wait(number: str) -> None:
    while str(os.getppid()) == number:  # an orphan gets another parent
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
