"""Progress of a long run: a line every few seconds, and every half minute during a long step."""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import rich.console
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from tango_jax.runtime.model_text import for_terminal, on_one_line

SPEED_WINDOW = 20  # steps that the speed is taken from
PLAIN_WIDTH = 160
QUIET_S, LOOK_S = 30.0, 5.0  # seconds without a line after which a log says what is being done, between two looks


class Console:
    """Prints a run's progress. Processes other than the first are silent (`enabled` false)."""

    def __init__(self, enabled: bool = True, stream: TextIO | None = None, interval_s: float = 5.0,
                 clock: Callable[[], float] = time.monotonic):
        self.enabled = enabled
        self.doing = ""  # title of the newest stage, for a message at the end
        self.interval_s = interval_s
        self.clock = clock
        self.stage_open: Stage | None = None
        self._line_at = clock()
        stream = stream or sys.stdout
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.separator = " · " if "utf" in self.encoding.lower() else " | "
        self.rich = rich.console.Console(file=stream, quiet=not enabled, highlight=False, markup=False, emoji=False,
                                         force_terminal=False, force_jupyter=False,
                                         width=None if stream.isatty() else PLAIN_WIDTH)

    def log(self, text: str) -> None:
        self.rich.print(Text(for_terminal(text, self.encoding)), soft_wrap=True)
        self._line_at = self.clock()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        def cell(value: Any) -> Text:
            return Text(on_one_line(format_number(value), self.encoding))

        self.rich.print(cell(title), soft_wrap=True)  # as a table's title it would break at the table's width
        table = Table(box=SIMPLE)
        for index, name in enumerate(columns):
            numeric = bool(rows) and all(isinstance(row[index], (int, float)) for row in rows)
            table.add_column(cell(name), justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(cell, row))
        self.rich.print(table)
        self._line_at = self.clock()

    def stage(self, title: str, total: int, done: int = 0) -> "Stage":
        return Stage(self, title, total, done)

    @contextlib.contextmanager
    def heartbeat(self) -> Iterator[None]:
        """A thread calls `tick`: the program may be inside XLA for minutes."""
        if not self.enabled:
            yield
            return
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(LOOK_S):
                try:
                    self.tick()
                except OSError:  # a full disk or a closed pipe, which the program's next line reports
                    return

        thread = threading.Thread(target=look, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def tick(self) -> None:
        """After QUIET_S without a line, log what the open stage is doing."""
        stage = self.stage_open
        if stage is not None and self.clock() - self._line_at >= QUIET_S:
            self.log(f"{_wall_clock()} {stage.describe()}")


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Say on standard error what takes a while; a terminal clears the line afterwards."""
    text = on_one_line(text)
    console = rich.console.Console(stderr=True, highlight=False, markup=False, emoji=False, force_jupyter=False)
    if not console.is_terminal:
        print(f"{text} ...", file=sys.stderr, flush=True)
        yield
        return
    with console.status(Text(text)):
        yield


class Stage:
    def __init__(self, console: Console, title: str, total: int, done: int):
        self._console, self._total, self._done = console, total, done
        self._title = on_one_line(title, console.encoding)
        self._phase, self._metrics = "step", {}
        self._is_begun, self._part = False, ""  # whether the phase is under way, and how far it has come
        self._marks: deque[tuple[float, int]] = deque(maxlen=SPEED_WINDOW + 1)
        self._first_step, self._announced = True, False
        self._started = self._since = 0.0  # since when what is being done now is being done
        self._printed_at: float | None = None
        self._printed_done = -1

    def __enter__(self) -> "Stage":
        self._console.doing, self._console.stage_open = self._title, self
        self._started = self._since = self._console.clock()
        self._marks.append((self._started, self._done))
        if self._done:
            self.log(f"resuming at step {self._done}/{self._total}")
        return self

    def __exit__(self, *exception) -> None:
        self._console.stage_open = None
        if self._printed_done != self._done and not self._first_step:
            self._print_line()
        seconds = format_seconds(self._console.clock() - self._started)
        verb = "finished" if self._done >= self._total else f"stopped at step {self._done}/{self._total}"
        self.log(f"{verb} after {seconds}")

    def begin(self, phase: str) -> None:
        self._phase, self._metrics = on_one_line(phase, self._console.encoding), {}
        self._is_begun, self._part, self._since = True, "", self._console.clock()
        if not self._announced:
            self.log(f"{self._phase} begins")
        self._announced = True

    def show(self, part: str) -> None:
        """Progress within the step, for `tick`."""
        self._part = on_one_line(part, self._console.encoding)

    def log(self, text: str) -> None:
        self._console.log(f"{_wall_clock()} {self._title}{self._console.separator}{text}")

    def describe(self) -> str:
        seconds = format_seconds(self._console.clock() - self._since)
        phase = self._phase if self._is_begun else f"{self._phase} {self._done}/{self._total}"
        passed = f"{seconds} {'so far' if self._is_begun or self._first_step else 'since then'}"
        parts = [self._title, phase, self._part, passed]
        return self._console.separator.join(part for part in parts if part)

    def advance(self, n: int = 1, phase: str = "step", **key_metrics: Any) -> None:
        self._done += n
        self._phase, self._metrics = on_one_line(phase, self._console.encoding), key_metrics
        now = self._console.clock()
        self._is_begun, self._part, self._since = False, "", now
        if self._first_step:  # it includes compiling and would spoil the estimate of the rest
            self._first_step = False
            self._marks.clear()
        self._marks.append((now, self._done))
        if not self._console.enabled:
            return
        waited = self._printed_at is None or now - self._printed_at >= self._console.interval_s
        if waited or self._done == self._total:
            self._print_line()

    def seconds_per_step(self) -> float | None:
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        return (end - start) / (last - first) if last > first else None

    def _print_line(self) -> None:
        numbers = " ".join(f"{name.replace('_', ' ')} {format_number(value)}" for name, value in self._metrics.items())
        parts = [f"{_wall_clock()} {self._title}", f"{self._phase} {self._done}/{self._total}",
                 on_one_line(numbers, self._console.encoding)]
        if (seconds := self.seconds_per_step()) is not None:
            left = format_seconds(seconds * max(self._total - self._done, 0))
            parts += [f"{seconds:.2f} s/step", f"{left} left"]
        self._console.log(self._console.separator.join(part for part in parts if part))
        self._printed_at, self._printed_done = self._console.clock(), self._done


def format_number(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """12.3 s, 2 min 05 s, 3 h 07 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    seconds = round(seconds)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


def _wall_clock() -> str:
    return time.strftime("%H:%M:%S")
