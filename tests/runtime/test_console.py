"""Progress in a log file: first and last step, at most one line per interval between, and an honest time left."""

import errno
import io
import threading

import pytest

from support.processes import HANG_S
from tango_jax.runtime import console as consoles
from tango_jax.runtime.console import Console, format_number, format_seconds


class Clock:
    """Time that passes only when the test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def log():
    return io.StringIO()


@pytest.fixture
def clock():
    return Clock()


def lines(log: io.StringIO) -> list[str]:
    """The log without the wall clock at the start of its lines."""
    return [line.split(" ", 1)[1] for line in log.getvalue().splitlines()]


def test_log_lines_are_spaced_in_time_and_end_with_the_last_step(log, clock):
    with Console(stream=log, interval_s=5.0, clock=clock).stage("stage 2/2 RL", total=12) as stage:
        for step in range(12):
            clock.now += 2.0
            stage.advance(phase="generator step", reward=0.123456, mean_length=80)
            # The first step includes compiling; the estimate starts with the second.
            assert stage.seconds_per_step() == (2.0 if step else None), step
    # 2 s a step: the first at 2 s, then one every three steps (6 s) as the interval of 5 s is over, then the last.
    assert lines(log) == ["stage 2/2 RL · generator step 1/12 · reward 0.123 mean length 80"] + [
        f"stage 2/2 RL · generator step {step}/12 · reward 0.123 mean length 80 · 2.00 s/step · {left} left"
        for step, left in [(4, "16.0 s"), (7, "10.0 s"), (10, "4.0 s"), (12, "0.0 s")]
    ] + ["stage 2/2 RL · finished after 24.0 s"]


def test_a_log_file_says_what_a_stage_begins_with(log, clock):
    with Console(stream=log, interval_s=0.0, clock=clock).stage("RL", total=2) as stage:
        stage.begin("evaluation")  # may take minutes
        for turn in (1, 2):
            stage.begin(f"turn {turn}")
            stage.advance(phase=f"turn {turn}")
    assert [line.split(" · ")[1] for line in lines(log)] == [
        "evaluation begins", "turn 1 1/2", "turn 2 2/2", "finished after 0.0 s",
    ]


def test_a_log_says_what_a_long_step_is_at(log, clock):
    console = Console(stream=log, clock=clock)

    def tick(seconds: float) -> list[str]:
        before = len(lines(log))
        clock.now += seconds
        console.tick()
        return lines(log)[before:]

    assert tick(100.0) == []  # no stage is open
    with console.stage("RL", total=2) as stage:
        assert tick(30.0) == ["RL · step 0/2 · 30.0 s so far"]
        stage.begin("evaluation")
        stage.show("0 of 96 solutions sampled")
        assert tick(29.0) == []
        stage.show("32 of 96 solutions sampled")
        assert tick(1.0) == ["RL · evaluation · 32 of 96 solutions sampled · 30.0 s so far"]
        stage.show("grading solutions")
        assert tick(5.0) == []
        assert tick(60.0) == ["RL · evaluation · grading solutions · 1 min 35 s so far"]
        stage.begin("turn 1")
        assert tick(60.0) == ["RL · turn 1 · 1 min 00 s so far"]
        stage.advance(phase="turn 1")
        stage.show("saving a checkpoint")
        assert tick(40.0) == ["RL · turn 1 1/2 · saving a checkpoint · 40.0 s since then"]
    assert tick(100.0) == []


def test_short_steps_have_no_lines_besides_their_own(log, clock):
    console = Console(stream=log, interval_s=5.0, clock=clock)
    with console.stage("RL", total=100) as stage:
        for turn in range(100):
            stage.begin(f"turn {turn}")
            stage.show("update of the generator")
            clock.now += 4.0
            console.tick()
            stage.advance(phase=f"turn {turn}")
    assert not [line for line in lines(log) if "so far" in line or "since" in line]


class Signalling(io.StringIO):
    """Sets an event when it is written to, and may be full."""

    def __init__(self, is_full: bool):
        super().__init__()
        self.is_full, self.written = is_full, threading.Event()

    def write(self, text: str) -> int:
        self.written.set()
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_thread_looks_at_a_log(monkeypatch, is_full):
    """What it cannot write is the program's to report."""
    monkeypatch.setattr(consoles, "QUIET_S", 0.0)
    monkeypatch.setattr(consoles, "LOOK_S", 0.001)
    failed, stream = [], Signalling(is_full)
    monkeypatch.setattr(threading, "excepthook", failed.append)
    console = Console(stream=stream)
    console.stage_open = console.stage("RL", total=1)
    with console.heartbeat():
        assert stream.written.wait(HANG_S)
    assert ("RL · step 0/1" in stream.getvalue()) is not is_full
    assert failed == [] and "heartbeat" not in {thread.name for thread in threading.enumerate()}


def test_a_silent_console_has_no_thread():
    with Console(enabled=False).heartbeat():
        assert "heartbeat" not in {thread.name for thread in threading.enumerate()}


def test_time_left_follows_recent_steps_and_ignores_those_of_an_earlier_run(log, clock):
    with Console(stream=log, interval_s=0.0, clock=clock).stage("RL", total=150, done=50) as stage:
        clock.now += 100.0  # compiling
        stage.advance()
        for _ in range(30):
            clock.now += 3.0
            stage.advance()
    assert lines(log)[0] == "RL · resuming at step 50/150"
    assert lines(log)[1] == "RL · step 51/150"
    assert lines(log)[-2] == "RL · step 81/150 · 3.00 s/step · 3 min 27 s left"
    assert lines(log)[-1] == "RL · stopped at step 81/150 after 3 min 10 s"


def test_the_last_step_is_logged_when_a_stage_fails(log, clock):
    console = Console(stream=log, interval_s=60.0, clock=clock)
    with pytest.raises(ValueError), console.stage("RL", total=9) as stage:
        for _ in range(2):
            clock.now += 1.0
            stage.advance()
        raise ValueError
    assert [line.split(" · ")[1] for line in lines(log)] == ["step 1/9", "step 2/9", "stopped at step 2/9 after 2.0 s"]


def test_other_processes_are_silent(log):
    console = Console(enabled=False, stream=log)
    console.log("text")
    console.table("t", ["a"], [[1]])
    with console.stage("RL", total=1) as stage:
        stage.begin("step")
        stage.advance()
    assert log.getvalue() == ""


def test_text_is_not_taken_for_markup_and_tables_hold_every_cell(log):
    console = Console(stream=log)
    console.log("loss [0.1] [bold]" + "x" * 300)
    console.table("Parameters", ["name", "size"], [["w[0]", 12], ["b", 0.5]])
    assert log.getvalue().splitlines()[0] == "loss [0.1] [bold]" + "x" * 300
    assert [line.split() for line in log.getvalue().splitlines()[-3:-1]] == [["w[0]", "12"], ["b", "0.5"]]
    console.table("a title that is wider than its table", ["a"], [[1]])
    assert "a title that is wider than its table" in log.getvalue().splitlines()


def test_formats():
    assert [format_number(value) for value in (7, 0.000123456, 12345.6, float("nan"), None, "x")] == [
        "7", "0.000123", "12346", "nan", "None", "x"]
    assert [format_seconds(value) for value in (0.04, 59.94, 59.96, 125, 3599.6, 11220)] == [
        "0.0 s", "59.9 s", "1 min 00 s", "2 min 05 s", "1 h 00 min", "3 h 07 min"]
