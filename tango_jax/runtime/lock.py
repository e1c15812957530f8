"""One run at a time in a workdir.

The kernel locks `<workdir>/run.lock` and frees it however the process ends. In a job the first process holds it.
"""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from tango_jax.runtime import hosts
from tango_jax.runtime.console import Console

LOCK_FILE = "run.lock"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # from file systems that cannot lock


@contextlib.contextmanager
def locked(workdir: Path, console: Console) -> Iterator[None]:
    """All processes must call this. Raises ValueError if the workdir is in use or cannot be written."""
    workdir, was_there = Path(workdir), os.path.lexists(workdir)
    file = workdir / LOCK_FILE
    # A soft lock would outlive a process killed on another host.
    lock = FileLock(file, fallback_to_soft=False)
    try:
        hosts.in_first(lambda: _acquire(lock, workdir, console))
        yield
    finally:
        with contextlib.suppress(OSError):  # a file that stays blocks no start
            if lock.is_locked and file.read_text() == _own_name():
                file.unlink()
        lock.release()
        if not was_there:
            with contextlib.suppress(OSError):  # it fails if anything is in the folder
                workdir.rmdir()


def _acquire(lock: FileLock, workdir: Path, console: Console) -> None:
    file = workdir / LOCK_FILE
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
        file.write_text(_own_name())
    except Timeout:
        raise ValueError(f"{workdir} is in use by {_holder(file)}: let it end, or choose another folder") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise ValueError(f"{workdir} cannot be locked ({error.strerror}): choose a folder that can be "
                             "written") from error
        console.log(f"warning: {workdir} cannot be locked ({error.strerror}): start no second run in it, or they would "
                    "damage each other's files")


def _holder(file: Path) -> str:
    for _ in range(100):  # the name is written just after the file is locked
        with contextlib.suppress(OSError):  # the holder has ended meanwhile
            if name := file.read_text():
                return "another run in this process" if name == _own_name() else name
        time.sleep(0.01)
    return "another process"


def _own_name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
