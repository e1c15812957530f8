"""One run at a time in a workdir: a second start is refused before it touches anything.

`<workdir>/run.lock` is a lease of `filelock`: a file that only one process can create, on any file system that hosts
share. What a kill or a power cut leaves behind is taken over by the next start on the same host, where the holder is
looked up by its number and its start. A start on another host, or in another container, cannot look it up: it is
refused as soon as the holder's heartbeat, the file's time of change, moves, and takes over once that has stood still
for HEARTBEAT_TIMEOUT_S. With several processes in a job, the first one holds the lock.

What the library lacks: runs in one process, a wait in which all processes of a job agree, and who is named.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from filelock import OwnerRecord, SoftFileLease, Timeout

from tango_jax.runtime import hosts
from tango_jax.runtime.console import Console

LOCK_FILE = "run.lock"
HEARTBEAT_S = 10.0
HEARTBEAT_TIMEOUT_S = 120.0  # a holder on another host that has sent no heartbeat for so long is gone
POLL_S = 0.5
_held_here: dict[str, SoftFileLease] = {}  # by folder: the leases of runs in this process


class _Attempt(NamedTuple):
    state: str  # held, wait or refused
    text: str = ""


@contextlib.contextmanager
def locked(workdir: Path, console: Console) -> Iterator[None]:
    """Keep the workdir, which is made if need be, for this job while the block runs; all its processes must call it.

    Raises:
        ValueError: another run is at work there (names it), or the lock cannot be written.
    """
    workdir, logged, was_there = Path(workdir), "", os.path.lexists(workdir)
    lease = SoftFileLease(
        workdir / LOCK_FILE, lease_duration=HEARTBEAT_TIMEOUT_S, heartbeat_interval=HEARTBEAT_S,
        on_compromise=lambda _: console.log(f"warning: {workdir / LOCK_FILE} was removed, or another run has taken it "
                                            "over: two runs in one folder would damage each other's files"),
    )
    folder = os.path.realpath(workdir)
    attempts = _attempts(lease, workdir, is_first_here=_held_here.setdefault(folder, lease) is lease)
    try:
        # Repeated exchanges: the other processes of the job must not sit in a single one until the timeout is over.
        while (attempt := hosts.from_first(next(attempts) if hosts.is_first() else None)).state == "wait":
            if attempt.text != logged:
                console.log(logged := attempt.text)
            time.sleep(POLL_S)
        if attempt.state == "refused":
            raise ValueError(attempt.text)
        if attempt.text:
            console.log(attempt.text)
        yield
    finally:
        try:
            lease.release()
        except OSError as error:  # must not take the place of what the run itself ends with
            console.log(f"warning: {lease.lock_file} could not be removed ({error.strerror}): the next start takes it "
                        "over")
        if _held_here.get(folder) is lease:
            del _held_here[folder]
        if not was_there:
            with contextlib.suppress(OSError):  # it fails if anything is in the folder
                workdir.rmdir()


def _attempts(lease: SoftFileLease, workdir: Path, is_first_here: bool) -> Iterator[_Attempt]:
    """Try to take the lock once for every item; the last one is held or refused."""
    if not is_first_here:
        yield _refusal(workdir, "another run in this process")
        return
    began, here, before, first_seen, nameless = time.monotonic(), "", None, None, 0
    while True:
        try:
            if lease.is_lock_held_by_us:  # by a run of this process that has ended, but could not remove it
                os.unlink(lease.lock_file)
            before = lease.owner or before
            lease.acquire(blocking=False)  # makes the folder
        except Timeout:
            here, owner, changed_ns = here or _this_host(), lease.owner, _changed_ns(lease)
        except OSError as error:
            yield _Attempt("refused", f"{workdir} cannot be locked ({error.strerror}): choose a folder that can be "
                                      "written")
            return
        else:
            yield _Attempt("held", f"{workdir} was left by {_named(before)}, which is gone" if before else "")
            return
        nameless = 0 if owner else nameless + 1  # while its name is written, or because it was killed before
        first_seen = first_seen or (owner and (owner, changed_ns))
        if owner and (owner.hostname == here or (owner, changed_ns) != first_seen):
            yield _refusal(workdir, _named(owner))
            return
        if nameless * POLL_S > HEARTBEAT_S or time.monotonic() - began > 2 * HEARTBEAT_TIMEOUT_S:
            yield _Attempt("refused", f"{workdir} is locked, and cannot be taken over: if it is certain that nothing "
                                      f"runs there, delete {lease.lock_file} and start again")
            return
        yield _Attempt("wait", f"{workdir} was taken by {_named(owner)}: watching for up to {HEARTBEAT_TIMEOUT_S:.0f} "
                               "s whether it is still at work" if owner else "")


def _refusal(workdir: Path, name: str) -> _Attempt:
    return _Attempt("refused", f"{workdir} is in use by {name}: let it end, or choose another folder")


def _named(owner: OwnerRecord) -> str:
    return f"process {owner.pid} on {owner.hostname.partition('?')[0]}"  # after it: a container's own numbers


def _changed_ns(lease: SoftFileLease) -> int | None:
    try:
        return os.stat(lease.lock_file).st_mtime_ns
    except FileNotFoundError:
        return None


def _this_host() -> str:
    """The name that a lease gives this host and container, as one says itself: the library has no other way to ask."""
    with tempfile.TemporaryDirectory() as folder, SoftFileLease(Path(folder) / LOCK_FILE) as own:
        return own.owner.hostname
