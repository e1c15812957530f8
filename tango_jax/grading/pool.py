"""Worker processes that compare answers with the math library.

Workers are fresh interpreters that live until `close`: forking a process that runs jax deadlocks, and a new process per
answer costs a second. Rewards must not depend on the machine's load, so limits count a worker's processor time.
`limit_s` interrupts Python; `deadline_s` ends a worker stuck in C, as in 9**9**9. After STALL_FACTOR deadlines of
wall-clock time without a reply, a worker is replaced.
"""
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tango_jax.grading import wire

LIMIT_S = 2  # processor time of one try of an answer, in whole seconds
DEADLINE_S = 2.5  # processor time of one try; with MAX_TRIES, an answer costs at most 5 s
STALL_FACTOR = 24  # deadlines of wall-clock time; a worker that got 1/24 of a core meanwhile reaches its own deadline
START_LIMIT_S = 240.0  # wall-clock time; importing sympy is slow on a cold network file system or a busy machine
MAX_FAILED_STARTS = 3
MAX_TRIES = 2  # tries of a pair that ran out of time or whose worker was killed from outside
DEFAULT_MAX_WORKERS = 16


class Reply(NamedTuple):
    status: str  # correct, wrong, timeout or error
    detail: str = ""
    is_final: bool = True  # False for a timeout or a worker that was killed from outside: a later try may differ


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen
    deadline: float  # wall-clock time: of the start, then of the current pair
    is_ready: bool = False
    pair: int | None = None
    buffer: bytearray = field(default_factory=bytearray)


class WorkerPool:
    """Up to `size` workers, started on demand. Thread-safe: it runs one batch at a time."""

    def __init__(
        self, size: int | None = None, limit_s: int = LIMIT_S, deadline_s: float = DEADLINE_S,
        stall_s: float | None = None,
    ):
        """`limit_s` and `deadline_s` are processor time, `stall_s` is wall-clock time."""
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.size = min(DEFAULT_MAX_WORKERS, cpus) if size is None else size
        if self.size < 1 or int(limit_s) != limit_s or not 0 < limit_s < deadline_s:
            raise ValueError(
                f"grading pool: size={self.size}, limit_s={limit_s}, deadline_s={deadline_s}; "
                "use a size of at least 1 and a whole number of seconds below the deadline"
            )
        self._limit_s, self._deadline_s = int(limit_s), deadline_s
        self._stall_s = STALL_FACTOR * deadline_s if stall_s is None else stall_s
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()

    def run(self, pairs: Sequence[tuple[str, str]]) -> list[Reply]:
        """One reply per (gold, answer) pair. RuntimeError: workers cannot start."""
        with self._lock:
            batch = _Batch(pairs)
            try:
                while not batch.is_done():
                    self._start_workers(batch)
                    self._hand_out(batch)
                    self._collect(batch)
                    self._expire(batch)
            finally:
                # Busy only after an interrupted batch; a late reply must not reach the next one.
                for worker in [worker for worker in self._workers if worker.pair is not None]:
                    self._remove(worker)
            return batch.replies

    def close(self) -> None:
        with self._lock:
            for worker in list(self._workers):
                self._remove(worker)

    def _start_workers(self, batch: "_Batch") -> None:
        for _ in range(min(self.size, batch.num_open()) - len(self._workers)):
            process = self._start_process()
            worker = _Worker(process, time.monotonic() + START_LIMIT_S)
            self._workers.append(worker)
            self._selector.register(process.stdout, selectors.EVENT_READ, worker)

    def _start_process(self) -> subprocess.Popen:
        start = Path(__file__).with_name("worker_start.py")
        limits = (str(self._limit_s), str(self._deadline_s))
        try:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", str(start), *limits, *_import_path()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
        except OSError as error:  # out of processes or memory
            raise RuntimeError(f"the math grader cannot start: {error}") from error

    def _hand_out(self, batch: "_Batch") -> None:
        for worker in list(self._workers):
            if worker.is_ready and worker.pair is None and batch.queue:
                worker.pair = batch.queue.popleft()
                worker.deadline = time.monotonic() + self._stall_s
                gold, answer = batch.pairs[worker.pair]
                try:
                    worker.process.stdin.write(wire.pack({"id": worker.pair, "gold": gold, "answer": answer}))
                except BrokenPipeError:  # the worker died while idle, so this pair has not been tried
                    batch.queue.appendleft(worker.pair)
                    worker.pair = None
                    self._remove(worker)

    def _collect(self, batch: "_Batch") -> None:
        waiting = [worker.deadline for worker in self._workers if worker.pair is not None or not worker.is_ready]
        if not waiting:
            return
        for key, _ in self._selector.select(max(0.0, min(waiting) - time.monotonic())):
            worker = key.data
            data = os.read(worker.process.stdout.fileno(), 1 << 16)
            if not data:
                self._handle_exit(worker, batch)
                continue
            worker.buffer += data
            while (message := wire.take_message(worker.buffer)) is not None:
                self._accept(worker, message, batch)

    def _accept(self, worker: _Worker, message: dict[str, Any], batch: "_Batch") -> None:
        if "fatal" in message:
            self._remove(worker)
            reason = " ".join(message["fatal"].split())
            raise RuntimeError(f"the math grader cannot start: {reason}; pip install 'math-verify[antlr4_13_2]'")
        if "ready" in message:
            worker.is_ready, self._failed_starts = True, 0
            return
        if "begun" in message:
            worker.deadline = time.monotonic() + self._stall_s
            return
        assert message["id"] == worker.pair, (message, worker.pair)
        if message["status"] == "timeout":
            batch.retry(worker.pair, Reply("timeout", message["detail"], is_final=False))
        else:
            batch.replies[worker.pair] = Reply(message["status"], message["detail"])
        worker.pair = None

    def _expire(self, batch: "_Batch") -> None:
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.deadline < now]:
            if not worker.is_ready:
                self._handle_exit(worker, batch)
            elif worker.pair is not None:
                batch.retry(worker.pair, Reply("timeout", f"no reply in {self._stall_s} s", is_final=False))
                self._remove(worker)

    def _handle_exit(self, worker: _Worker, batch: "_Batch") -> None:
        code = self._remove(worker, grace_s=1.0)
        if not worker.is_ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                self._failed_starts = 0
                raise RuntimeError(
                    f"the math grader cannot start: {MAX_FAILED_STARTS} workers in a row ended or hung before they "
                    f"were ready, the last with exit code {code}; try `{sys.executable} -c 'import math_verify'`"
                )
        elif worker.pair is not None and code == -signal.SIGVTALRM:
            batch.retry(worker.pair, Reply("timeout", f"over {self._deadline_s} s", is_final=False))
        elif worker.pair is not None:
            batch.retry(worker.pair, Reply("error", f"worker died with exit code {code}", is_final=False))

    def _remove(self, worker: _Worker, grace_s: float = 0.0) -> int:
        """Returns the exit code. A worker about to exit gets `grace_s` for it."""
        self._workers.remove(worker)
        self._selector.unregister(worker.process.stdout)
        try:
            worker.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
        worker.process.stdin.close()
        worker.process.stdout.close()
        return worker.process.returncode


class _Batch:
    def __init__(self, pairs: Sequence[tuple[str, str]]):
        self.pairs = pairs
        self.queue = deque(range(len(pairs)))
        self.replies: list[Reply | None] = [None] * len(pairs)
        self._tries = [1] * len(pairs)

    def is_done(self) -> bool:
        return None not in self.replies

    def num_open(self) -> int:
        return self.replies.count(None)

    def retry(self, pair: int, last_reply: Reply) -> None:
        if self._tries[pair] < MAX_TRIES:
            self._tries[pair] += 1
            self.queue.append(pair)  # after the others, because most retried pairs fail again
        else:
            self.replies[pair] = last_reply


def _import_path() -> list[str]:
    """Leaves out the working folder, which `python -m` puts first: its files could shadow the grader's imports."""
    try:
        working_folder = os.getcwd()
    except FileNotFoundError:  # removed meanwhile
        working_folder = ""
    return [path for path in sys.path if os.path.isabs(path) and path != working_folder]
