"""A first check of a device: are its numbers right, how fast is it, and is that what the plan expects.

In: a folder, and how much to do. Out: check.json and check.md in it, written anew after every row. Stage: `bench
--check`, which launch/check_device.sh runs. Each step is a process of its own (device_steps.py), and this one touches
no device: a step that fails, hangs or takes its process down is a line of the table, and the next one begins anew.
"""

import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import tango_jax
from tango_jax.planning.device_steps import SIZES
from tango_jax.runtime.atomic import write_atomically, write_json_atomic
from tango_jax.runtime.checks import cut
from tango_jax.runtime.console import format_seconds
from tango_jax.runtime.failures import FAILED, INTERRUPTED, leave
from tango_jax.runtime.model_text import on_one_line
from tango_jax.runtime.termination import PARENT_VARIABLE

KINDS = ("devices", "parity", "quickstart", "models")  # of steps
JSON_NAME, MARKDOWN_NAME = "check.json", "check.md"
WAITING, RUNNING, DONE, ERROR, CUT = "not begun", "running", "done", "failed", "cut off"


class Step(NamedTuple):
    """One process."""

    kind: str
    title: str
    command: tuple[str, ...]


class CheckOptions(NamedTuple):
    """What the command line says."""

    out: Path
    kinds: tuple[str, ...]
    size: str  # empty: by the platform
    minutes: float  # after which no step goes on
    runs: int


def own_step(kind: str, title: str, *arguments: object) -> Step:
    """A step of device_steps.py."""
    return Step(kind, title, (sys.executable, "-m", "tango_jax.planning.device_steps", *map(str, arguments)))


def later_steps(size: str, runs: int) -> list[Step]:
    """What follows the devices, the most telling first."""
    steps = [own_step("parity", "parity of attention, sampler, int8 and adapters", "parity", size),
             own_step("quickstart", "the quickstart, shortened", "quickstart", size)]  # fmt: skip
    for rank in (0, SIZES[size].parity.rank):
        for timed in SIZES[size].models:
            title = f"{timed.model}, {f'adapters of rank {rank}' if rank else 'all parameters'}"
            steps.append(own_step("models", title, "model", size, timed.model, rank, runs))
    return steps


def check_device(options: CheckOptions, log_fn: Callable[[str], None] = print) -> dict:
    """Run the steps and return the report, which is then in the folder as well.

    The devices are always asked, since sizes follow from them. On Ctrl-C the step that runs is ended, and the command
    with it; what was measured is there.

    Raises:
        OSError: the folder cannot be written to.
    """
    began = time.monotonic()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report = {"began": now, "size": options.size, "minutes": options.minutes, "seconds": 0.0, "steps": []}

    def add(steps: list[Step]) -> list[tuple[Step, dict]]:
        """Each step with its entry in the report, which it has before it begins."""
        pairs = [(step, {"kind": step.kind, "title": step.title, "status": WAITING, "seconds": 0.0, "error": "",
                         "rows": []}) for step in steps if step.kind in ("devices", *options.kinds)]  # fmt: skip
        report["steps"] += [entry for _, entry in pairs]
        return pairs

    def write() -> None:
        report["seconds"] = time.monotonic() - began
        write_json_atomic(options.out / JSON_NAME, report)
        write_atomically(options.out / MARKDOWN_NAME, markdown(report))

    waiting = add([own_step("devices", "devices and versions", "devices", "")])
    waiting += add(later_steps(options.size, options.runs)) if options.size else []
    while waiting:
        (step, entry), left = waiting.pop(0), 60 * options.minutes - (time.monotonic() - began)
        log_fn(f"[{time.monotonic() - began:.0f} s] {step.title} ...")
        if left > 0:
            _run(step, entry, left, write)
        else:
            entry["error"] = f"the {options.minutes:g} minutes of --minutes were over"
        if not report["size"]:
            platforms = [row["which"] for row in entry["rows"] if row["what"] == "platform"]
            report["size"] = "device" if platforms and platforms != ["cpu"] else "cpu"
            waiting += add(later_steps(report["size"], options.runs))
        write()
        log_fn(f"[{time.monotonic() - began:.0f} s] {outcome(entry)}")
    return report


def _run(step: Step, entry: dict, limit_s: float, write_fn: Callable[[], None]) -> None:
    """Run one step for at most so long; its rows, and how it ended, come into the entry."""
    began, is_over = time.monotonic(), threading.Event()
    entry["status"] = RUNNING
    write_fn()
    paths = [str(Path(tango_jax.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {PARENT_VARIABLE: str(os.getpid()), "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryFile() as log:
        # A session of its own, which Ctrl-C does not reach and which is ended as a whole: a run has workers.
        process = subprocess.Popen(step.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                                   text=True, env=environment, start_new_session=True)  # fmt: skip

        def end() -> None:
            is_over.set()
            _kill(process)

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            for line in process.stdout:
                _take(entry, line)
                entry["seconds"] = time.monotonic() - began
                write_fn()
            process.wait()
        except KeyboardInterrupt:
            entry |= {"status": CUT, "error": "interrupted"}
            write_fn()
            leave("interrupted; what was measured until then is written", INTERRUPTED)
        finally:
            timer.cancel()
            _kill(process)
            process.wait()
            process.stdout.close()
        entry["seconds"] = time.monotonic() - began
        if is_over.is_set():
            entry |= {"status": CUT, "error": f"after {limit_s:.0f} s, when the minutes of --minutes were over"}
        elif process.returncode:
            log.seek(0)
            said = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            code = process.returncode
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            entry |= {"status": ERROR, "error": entry["error"] or on_one_line(cut(": ".join([how, *said[-1:]]), 300))}
        else:
            entry["status"] = DONE


def _take(entry: dict, line: str) -> None:
    """A row of a step. A process that is killed may leave half a line."""
    try:
        found = json.loads(line)
    except ValueError:
        return
    if "failed" in found:
        entry["error"] = on_one_line(found["failed"])
    else:
        entry["rows"].append(found)


def _kill(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has ended, and all that it started
        pass


def exit_code(report: dict) -> int:
    """0 where every step is done and every comparison within what is allowed."""
    rows = [row for step in report["steps"] for row in step["rows"]]
    is_good = all(step["status"] == DONE for step in report["steps"]) and not any("error" in row for row in rows)
    return 0 if is_good and all(row.get("within", True) for row in rows) else FAILED


# ----------------------------------------------------------------------------------------------------------- the page


def markdown(report: dict) -> str:
    """check.md, of a report that may be unfinished."""
    size, steps = report["size"] or "not known yet", report["steps"]
    parts = [
        "# tango_jax: a first check of a device",
        f"Begun {report['began']}, {format_seconds(report['seconds'])} in all; sizes: {size}. Seconds are medians. "
        "Predicted is what a plan says (`tango_jax/planning/README.md`), of a CPU from its measured rates.",
        table([{"step": step["title"], "s": f"{step['seconds']:.0f}", "outcome": outcome(step)} for step in steps]),
    ]
    for step in steps:
        if step["rows"]:
            parts += [f"## {step['title']}", table(step["rows"])]
    return "\n\n".join(parts) + "\n"


def outcome(step: dict) -> str:
    """How a step stands, in a few words."""
    rows, found = step["rows"], [step["status"]]
    compared, errors = [row for row in rows if "within" in row], [row["error"] for row in rows if "error" in row]
    if compared:
        outside = sum(not row["within"] for row in compared)
        found.append(f"{len(compared)} comparisons, {outside} outside of what is allowed")
    if errors:
        found.append(f"{len(errors)} failed: {errors[0]}")
    return "; ".join([*found, *filter(None, [step["error"]])])


def table(rows: list[dict]) -> str:
    """A Markdown table with a column for every key; what stands in its cells can end neither cell nor line."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(name)) for name in columns] for row in rows)]
    return "\n".join("| " + " | ".join(on_one_line(cell).replace("|", r"\|") for cell in line) + " |" for line in lines)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
