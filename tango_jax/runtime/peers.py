"""One process's error ends the others at once: they may wait for it inside XLA, where no exception reaches them.

jax's coordination service, which all have joined, passes on the last line and the exit code.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator

import jax
from jax._src import distributed  # jax has no public name for its coordination service

from tango_jax.runtime import failures

LOOK_S = 1.0  # between two looks at the service
_KEY = "tango_jax/ended"


def announce(line: str, code: int) -> None:
    """Tell the other processes to end with this line and exit code, and wait until they have looked."""
    client = distributed.global_state.client
    if client is None:
        return
    where = f"(in process {jax.process_index()} of {jax.process_count()})"
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one was quicker, or the service is gone
        client.key_value_set(_KEY, json.dumps([f"{line} {where}", code]))
    time.sleep(2 * LOOK_S)  # the service may be part of this process


@contextlib.contextmanager
def ends_with_others() -> Iterator[None]:
    """A thread ends the process as soon as another one has announced its end."""
    client, over = distributed.global_state.client, threading.Event()
    if client is None:
        yield
        return
    thread = threading.Thread(target=_watch, args=(client, over), name="peers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _watch(client, over: threading.Event) -> None:
    while not over.wait(LOOK_S):
        try:
            line, code = json.loads(client.key_value_try_get(_KEY))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                continue
            return  # the service is gone: jax ends the process
        if not over.is_set():
            failures.drop_broken_output()
            print(line, file=sys.stderr, flush=True)
            os._exit(code)
