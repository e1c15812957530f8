"""One run at a time in a workdir: a second start is refused before it touches anything.

In: a workdir. Out: `<workdir>/run.lock`, which is there while a run goes on and says which process it is. Stage: the
start of every command that writes into a workdir (train, sft, ablate, generate, evaluate). Commands that only read need
no lock.

The lock proper is one of the operating system on that file (POSIX, `fcntl.lockf`). It ends with its process, whatever
ends that: what SIGKILL, an abort or a power cut leaves behind is taken over by the next start on the same machine, and
of several starts at the same moment exactly one gets it. Child processes do not inherit it, so a grading worker that
outlives its parent does not keep it (`flock` would). A process must not open its own lock file a second time, because
closing that would drop the lock. NFS 4, Lustre with `-o flock`, GPFS and CephFS share such locks between hosts, and
drop those of a host that is lost (NFS 4 after a lease of about 90 s).

Other file systems keep such locks to one host (Lustre with `localflock`, NFS with `nolock`, most buckets), or have
none. Therefore the holder also writes its name into the file, and touches the file every HEARTBEAT_S. A start on
another host watches it: it is refused as soon as the file's time of change moves, and takes over once that has stood
still for HEARTBEAT_TIMEOUT_S, so that no lock blocks a run for ever. (A job that is queued again after its host was
lost waits no longer than that.) Only a lock that the file system itself still keeps by then, for a host that is silent,
needs somebody who deletes the file; the error says so. Where there are no locks at all, the holder's process is looked
up on the same machine by its number and its start, because numbers are used again. What cannot be told apart on such
file systems is two hosts that start at the same moment. With several processes in a job, the first one holds the lock.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tango_jax.runtime import hosts
from tango_jax.runtime.console import Console

LOCK_FILE = "run.lock"
HEARTBEAT_S = 10.0
HEARTBEAT_TIMEOUT_S = 120.0  # a holder on another host that has sent no heartbeat for so long is gone
STALE_S = 1800.0  # a file this old needs no watching: clocks of hosts that share a disk differ by less
POLL_S = 0.5
CONFLICT_WAIT_S = 2.0  # where there are no locks: of several starts at the same moment, the last one to write stays
# Lock files of this process: the system's locks keep out other processes only, not another thread of this one.
_held_here: set[str] = set()
_held_here_guard = threading.Lock()
_TAKEN, _UNSUPPORTED = (errno.EACCES, errno.EAGAIN), (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Holder(NamedTuple):
    """Who holds a workdir, as it stands in the file."""

    host: str
    pid: int
    began: str  # when the process began, in the units of its system
    machine: str  # a start of a machine (its boot id), which all containers on it share
    namespace: str  # in which `pid` counts
    since: str
    token: str  # tells two holders apart that are otherwise alike

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


@contextlib.contextmanager
def hold(workdir: Path, console: Console) -> Iterator[None]:
    """Keep the workdir, which is made if need be, for this job while the block runs; all its processes must call it.

    Raises:
        ValueError: another run is at work there (names it), or the lock cannot be written.
    """
    lock, logged = _WorkdirLock(Path(workdir)), ""
    try:
        # Repeated exchanges: the other processes of the job must not sit in a single one until the timeout is over.
        while (attempt := hosts.from_first(lock.attempt() if hosts.is_first() else None)).state == "wait":
            if attempt.text != logged:
                console.log(logged := attempt.text)
            time.sleep(POLL_S)
        if attempt.state == "refused":
            raise ValueError(attempt.text)
        if attempt.text:
            console.log(attempt.text)
        yield
    finally:
        lock.release()


class _Attempt(NamedTuple):
    """The outcome of one try to take the lock."""

    state: str  # held, wait or refused
    text: str = ""


class _WorkdirLock:
    """The lock as the first process has it: tried until it is held or refused, then kept by heartbeats."""

    def __init__(self, workdir: Path):
        self._workdir, self._path = workdir, workdir / LOCK_FILE
        self._this_holder, self._descriptor, self._made_workdir = _this_process(), None, False
        self._reserved = ""  # its name in _held_here
        self._began, self._first_heartbeat = time.monotonic(), None
        self._stop = threading.Event()
        self._heartbeat_thread = threading.Thread(target=self._send_heartbeats, daemon=True)

    def attempt(self) -> _Attempt:
        """One try."""
        descriptor = None
        try:
            if not self._workdir.exists():
                self._workdir.mkdir(parents=True, exist_ok=True)
                self._made_workdir = True
            if not self._reserve():
                return self._refuse("another run in this process")
            # Opened anew each time: on NFS that asks the server, and the file may be another one by now.
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            attempt = self._decide(descriptor)
        except OSError as error:
            attempt = _Attempt("refused", f"{self._workdir} cannot be locked ({error.strerror}): choose a folder that "
                                          "can be written")
        if attempt.state == "held":
            self._descriptor = descriptor
            self._heartbeat_thread.start()
        else:
            self._unreserve()
            if descriptor is not None:
                os.close(descriptor)  # which drops a lock on it
        return attempt

    def _reserve(self) -> bool:
        """Whether no other thread of this process has the lock, or tries to take it."""
        with _held_here_guard:
            if (name := os.path.realpath(self._path)) in _held_here:
                return False
            _held_here.add(name)
            self._reserved = name
            return True

    def _unreserve(self) -> None:
        with _held_here_guard:
            _held_here.discard(self._reserved)
            self._reserved = ""

    def release(self) -> None:
        """Release the lock if it is held, and remove a workdir that was made for it and is still empty."""
        if self._descriptor is None:
            self._unreserve()
            return
        self._stop.set()
        self._heartbeat_thread.join()
        with contextlib.suppress(OSError):
            # Removed while it is locked: whoever has opened it meanwhile sees that it no longer has that name.
            if _is_file_at(self._path, self._descriptor):
                self._path.unlink()
            if self._made_workdir:
                self._workdir.rmdir()  # fails if anything is in it
        os.close(self._descriptor)
        self._descriptor = None
        self._unreserve()

    def _decide(self, descriptor: int) -> _Attempt:
        lock = _try_lock(descriptor)
        if not _is_file_at(self._path, descriptor):
            return _Attempt("wait")  # its holder has just ended
        holder, waited = _read(descriptor), time.monotonic() - self._began
        status = self._holder_status(holder, lock, os.fstat(descriptor).st_mtime_ns)
        if status == "alive":
            return self._refuse(holder)
        if status == "gone" and lock != "taken":
            return self._take_over(descriptor, lock, holder)
        if holder is None:  # it has the lock, and writes its name at once
            return self._refuse(None) if waited > CONFLICT_WAIT_S else _Attempt("wait")
        if waited > HEARTBEAT_TIMEOUT_S:
            return _Attempt("refused", f"{self._workdir} is locked by {holder}, which cannot be asked from here and "
                                       f"has been silent for {HEARTBEAT_TIMEOUT_S:.0f} s: if it is certain that "
                                       f"nothing runs there, delete {self._path} and start again")
        return _Attempt("wait", f"{self._workdir} was taken by {holder}: watching for up to "
                                f"{HEARTBEAT_TIMEOUT_S:.0f} s whether it is still at work")

    def _holder_status(self, holder: Holder | None, lock: str, mtime_ns: int) -> str:
        """Whether the process that wrote the file last is "alive" or "gone", or "unknown"."""
        if holder is None:
            return "unknown" if lock == "taken" else "gone"
        if holder.machine == self._this_holder.machine and lock != "unsupported":
            return "alive" if lock == "taken" else "gone"  # the system knows
        if (holder.machine, holder.namespace) == (self._this_holder.machine, self._this_holder.namespace):
            return "alive" if _process_start(holder.pid) == holder.began else "gone"
        self._first_heartbeat = self._first_heartbeat or (holder, mtime_ns)
        if (holder, mtime_ns) != self._first_heartbeat:
            return "alive"
        is_old = time.time() - mtime_ns / 1e9 > STALE_S or time.monotonic() - self._began > HEARTBEAT_TIMEOUT_S
        return "gone" if is_old else "unknown"

    def _take_over(self, descriptor: int, lock: str, holder: Holder | None) -> _Attempt:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(self._this_holder._asdict()).encode(), 0)
        os.fsync(descriptor)
        if lock == "unsupported":
            time.sleep(CONFLICT_WAIT_S)
            if (last := self._read_anew()) != self._this_holder:
                return self._refuse(last)
        return _Attempt("held", f"{self._workdir} was left by {holder}, which is gone" if holder else "")

    def _read_anew(self) -> Holder | None:
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            return _read(descriptor)
        finally:
            os.close(descriptor)

    def _refuse(self, holder: Holder | str | None) -> _Attempt:
        name = holder or "a process that has just started"
        return _Attempt("refused", f"{self._workdir} is in use by {name}: let it end, or choose another folder")

    def _send_heartbeats(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):  # whatever is wrong with the disk, the run finds out for itself
                os.utime(self._descriptor)


def _try_lock(descriptor: int) -> str:
    """Try to take the system's lock: "ours", "taken" or "unsupported"."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return "taken"
        if error.errno in _UNSUPPORTED:
            return "unsupported"
        raise
    return "ours"


def _is_file_at(path: Path, descriptor: int) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read(descriptor: int) -> Holder | None:
    """None: nobody has written yet, or a kill came in between."""
    try:
        return Holder(**json.loads(os.pread(descriptor, 2**16, 0)))
    except (ValueError, TypeError):
        return None


def _this_process() -> Holder:
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        began=_process_start(os.getpid()),
        machine=boot_id.read_text().strip() if boot_id.exists() else socket.gethostname(),
        namespace=os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else "",
        since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        token=secrets.token_hex(8),
    )


def _process_start(pid: int) -> str:
    """When a process began; "dead" if there is none of that number, "" where the system does not tell."""
    try:
        # The name, in brackets, may hold anything; after it come the state and, as 20th, the start.
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return "dead" if fields[0] == "Z" else fields[19]
    except FileNotFoundError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "dead"
    except PermissionError:
        pass  # it belongs to somebody else
    return ""
