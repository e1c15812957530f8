"""Progress of a long run: on a terminal a live bar with a line of numbers below it; anywhere else (a file, CI,
TERM=dumb) plain lines, one every few seconds, and during a step that takes minutes one every half minute.

What a message quotes of models and data files can neither steer the terminal nor fail to be encoded.
"""

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

import rich.console
from rich.box import SIMPLE
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from tango_jax.runtime.model_text import for_terminal, on_one_line

# Steps the speed is taken from: enough for a turn of both roles, few enough to forget the time spent compiling.
SPEED_WINDOW = 20
PLAIN_WIDTH = 160
# Seconds without a line after which a log says what is being done, and how often a thread looks whether they are over.
QUIET_S, LOOK_S = 30.0, 5.0


class Console:
    """Where a run speaks; with `enabled` false (every process but the first) it is silent."""

    def __init__(self, enabled: bool = True, stream: TextIO | None = None, interval_s: float = 5.0,
                 clock: Callable[[], float] = time.monotonic):
        self.enabled = enabled
        self.doing = ""  # title of the newest stage, for a message at the end
        self.interval_s = interval_s
        self.clock = clock
        self.stage_open: Stage | None = None
        self._line_at = clock()
        stream = stream or sys.stdout
        self.live = stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.separator = " · " if "utf" in self.encoding.lower() else " | "
        self.rich = rich.console.Console(file=stream, quiet=not enabled, highlight=False, markup=False, emoji=False,
                                         force_terminal=self.live, force_jupyter=False,
                                         width=None if self.live else PLAIN_WIDTH)

    def log(self, text: str) -> None:
        """Print text; above the bar if one is shown."""
        self.rich.print(Text(for_terminal(text, self.encoding)), soft_wrap=True)
        self._line_at = self.clock()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print a table; columns that hold only numbers are aligned to the right."""
        def cell(value: Any) -> Text:
            return Text(on_one_line(format_number(value), self.encoding))

        table = Table(box=SIMPLE, title=cell(title), title_justify="left")
        for index, name in enumerate(columns):
            numeric = bool(rows) and all(isinstance(row[index], (int, float)) for row in rows)
            table.add_column(cell(name), justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(cell, row))
        self.rich.print(table)
        self._line_at = self.clock()

    def stage(self, title: str, total: int, done: int = 0) -> "Stage":
        """A context manager for `total` steps; an earlier run has made `done` of them."""
        return Stage(self, title, total, done)

    @contextlib.contextmanager
    def heartbeat(self) -> Iterator[None]:
        """While the block runs, a thread calls `tick`: the program itself may be in XLA's code for minutes."""
        if self.live or not self.enabled:  # a live bar has a thread of its own
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
        """Log what the open stage is doing if there has been no line for QUIET_S."""
        stage = self.stage_open
        if stage is not None and self.clock() - self._line_at >= QUIET_S:
            self.log(f"{_wall_clock()} {stage.describe()}")


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Say on standard error what takes a while: a line that is gone afterwards on a terminal, a plain one elsewhere."""
    text = on_one_line(text)
    console = rich.console.Console(stderr=True, highlight=False, markup=False, emoji=False, force_jupyter=False)
    if not console.is_terminal:
        print(f"{text} ...", file=sys.stderr, flush=True)
        yield
        return
    with console.status(Text(text)):
        yield


class Stage:
    """Progress through one stage; made by Console.stage."""

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
        self._bar: LiveBar | None = None

    def __enter__(self) -> "Stage":
        self._console.doing, self._console.stage_open = self._title, self
        self._started = self._since = self._console.clock()
        self._marks.append((self._started, self._done))
        if self._done:
            self.log(f"resuming at step {self._done}/{self._total}")
        if self._console.enabled and self._console.live:
            self._bar = LiveBar(self._console.rich, self._title, self._total, self._done)
            self._bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self._console.stage_open = None
        if self._bar is not None:
            self._bar.stop()
        elif self._printed_done != self._done and not self._first_step:
            self._print_line()
        seconds = format_seconds(self._console.clock() - self._started)
        verb = "finished" if self._done >= self._total else f"stopped at step {self._done}/{self._total}"
        self.log(f"{verb} after {seconds}")

    def begin(self, phase: str) -> None:
        """Show what is being done; without a live bar only once, as a line is printed for whatever is done later."""
        self._phase, self._metrics = on_one_line(phase, self._console.encoding), {}
        self._is_begun, self._part, self._since = True, "", self._console.clock()
        if self._bar is not None:
            self._draw()
        elif not self._announced:
            self.log(f"{self._phase} begins")
        self._announced = True

    def show(self, part: str) -> None:
        """Say how far the step has come: on a terminal at once, in a log once the step has been silent for long."""
        self._part = on_one_line(part, self._console.encoding)
        if self._bar is not None:
            self._draw()

    def log(self, text: str) -> None:
        """Log a line of the stage."""
        self._console.log(f"{_wall_clock()} {self._title}{self._console.separator}{text}")

    def describe(self) -> str:
        """What is being done, how far it has come, and for how long."""
        seconds = format_seconds(self._console.clock() - self._since)
        phase = self._phase if self._is_begun else f"{self._phase} {self._done}/{self._total}"
        passed = f"{seconds} {'so far' if self._is_begun or self._first_step else 'since then'}"
        parts = [self._title, phase, self._part, passed]
        return self._console.separator.join(part for part in parts if part)

    def advance(self, n: int = 1, phase: str = "step", **key_metrics: Any) -> None:
        """Note that `n` more steps are done; the key metrics shown are those of the last call."""
        self._done += n
        self._phase, self._metrics = on_one_line(phase, self._console.encoding), key_metrics
        now = self._console.clock()
        self._is_begun, self._part, self._since = False, "", now
        if self._first_step:  # it includes compiling and would spoil the estimate of the rest
            self._first_step = False
            self._marks.clear()
        self._marks.append((now, self._done))
        if self._bar is not None:
            self._draw()
        if self._bar is not None or not self._console.enabled:
            return
        waited = self._printed_at is None or now - self._printed_at >= self._console.interval_s
        if waited or self._done == self._total:
            self._print_line()

    def seconds_per_step(self) -> float | None:
        """Mean over the recent steps, or None before the first one."""
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        return (end - start) / (last - first) if last > first else None

    def _draw(self) -> None:
        speed = self._console.separator.join(self._speed())
        self._bar.show(self._done, self._phase, speed, self._part or self._numbers())

    def _numbers(self) -> str:
        text = " ".join(f"{name.replace('_', ' ')} {format_number(value)}" for name, value in self._metrics.items())
        return on_one_line(text, self._console.encoding)

    def _speed(self) -> list[str]:
        seconds = self.seconds_per_step()
        if seconds is None:
            return []
        left = format_seconds(seconds * max(self._total - self._done, 0))
        return [f"{seconds:.2f} s/step", f"{left} left"]

    def _print_line(self) -> None:
        parts = [f"{_wall_clock()} {self._title}", f"{self._phase} {self._done}/{self._total}", self._numbers(),
                 *self._speed()]
        self._console.log(self._console.separator.join(part for part in parts if part))
        self._printed_at, self._printed_done = self._console.clock(), self._done


class LiveBar(Progress):
    """The bar of one stage, with its numbers on a line below."""

    def __init__(self, console: rich.console.Console, title: str, total: int, done: int):
        # Not rich's own estimates of speed and time, which would count the step that compiles.
        texts = {"{task.description}": "bold", "{task.fields[phase]} {task.completed}/{task.total}": "cyan",
                 "{task.fields[speed]}": "dim"}  # fmt: skip
        columns = [TextColumn(text, style, markup=False) for text, style in texts.items()]
        super().__init__(columns[0], BarColumn(30), *columns[1:], console=console, refresh_per_second=4)
        self._shown = self.add_task(title, total=total, completed=done, phase="step", speed="", numbers="")

    def show(self, done: int, phase: str, speed: str, numbers: str) -> None:
        self.update(self._shown, completed=done, phase=phase, speed=speed, numbers=numbers)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield from (Text(f"  {task.fields['numbers']}", style="green") for task in self.tasks)


def format_number(value: Any) -> str:
    """Three significant digits for a float, everything for the rest."""
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
