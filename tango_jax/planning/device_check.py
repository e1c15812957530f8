"""Checks a device: whether its numbers are right, and how long a short run takes (`bench --check`).

check.json and check.md are written after every row. Each step is a process (device_steps.py), and this one touches no
device: a step that fails, hangs or is killed is a line of the table, and the next one starts afresh.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import tango_jax
from tango_jax.runtime.atomic import write_atomically, write_json_atomic
from tango_jax.runtime.checks import cut
from tango_jax.runtime.console import format_seconds
from tango_jax.runtime.failures import FAILED, INTERRUPTED, leave
from tango_jax.runtime.model_text import on_one_line
from tango_jax.runtime.termination import PARENT_VARIABLE

TITLES = {"devices": "devices and versions", "parity": "parity of attention, sampler, int8 and adapters",
          "sizes": "layers of a 7B model, beside the plan", "quickstart": "the quickstart, shortened",
          "smollm2": "SmolLM2-135M on last_letter"}
KINDS = tuple(TITLES)  # of steps
JSON_NAME, MARKDOWN_NAME = "check.json", "check.md"
WAITING, RUNNING, DONE, ERROR, CUT = "not begun", "running", "done", "failed", "cut off"


class Step(NamedTuple):
    kind: str
    title: str
    command: tuple[str, ...]


def steps_of(size: str) -> list[Step]:
    return [Step(kind, title, (sys.executable, "-m", "tango_jax.planning.device_steps", kind, size))
            for kind, title in TITLES.items()]


def check_device(
    out: Path, kinds: Sequence[str], size: str, minutes: float, log_fn: Callable[[str], None] = print
) -> dict:
    """Run the steps of these kinds for at most `minutes`; returns the report, also written to `out`. Devices are always
    listed. Ctrl-C ends the running step and the command."""
    began = time.monotonic()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    steps = [step for step in steps_of(size) if step.kind in (KINDS[0], *kinds)]
    entries = [{"kind": step.kind, "title": step.title, "status": WAITING, "seconds": 0.0, "error": "", "rows": []}
               for step in steps]
    report = {"began": now, "size": size, "minutes": minutes, "seconds": 0.0, "steps": entries}

    def write() -> None:
        report["seconds"] = time.monotonic() - began
        write_json_atomic(out / JSON_NAME, report)
        write_atomically(out / MARKDOWN_NAME, markdown(report))

    for step, entry in zip(steps, entries, strict=True):
        left = 60 * minutes - (time.monotonic() - began)
        log_fn(f"[{time.monotonic() - began:.0f} s] {step.title} ...")
        if left > 0:
            _run(step, entry, left, write)
        else:
            entry["error"] = f"the {minutes:g} minutes of --minutes were over"
        write()
        log_fn(f"[{time.monotonic() - began:.0f} s] {outcome(entry)}")
    return report


def _run(step: Step, entry: dict, limit_s: float, write_fn: Callable[[], None]) -> None:
    began, is_over = time.monotonic(), threading.Event()
    entry["status"] = RUNNING
    write_fn()
    paths = [str(Path(tango_jax.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {PARENT_VARIABLE: str(os.getpid()), "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryFile() as log:
        # A new session, out of reach of Ctrl-C and ended as a whole: a run has workers.
        process = subprocess.Popen(step.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                                   text=True, env=environment, start_new_session=True)

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
    """A row of a step. A killed process may leave half a line."""
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
    except ProcessLookupError:
        pass


def exit_code(report: dict) -> int:
    rows = [row for step in report["steps"] for row in step["rows"]]
    is_good = all(step["status"] == DONE for step in report["steps"]) and not any("error" in row for row in rows)
    return 0 if is_good and all(row.get("within", True) for row in rows) else FAILED


def markdown(report: dict) -> str:
    steps = report["steps"]
    parts = [
        "# tango_jax: a first check of a device",
        f"Begun {report['began']}, {format_seconds(report['seconds'])} in all; sizes: {report['size']}. Seconds are "
        "medians.",
        table([{"step": step["title"], "s": f"{step['seconds']:.0f}", "outcome": outcome(step)} for step in steps]),
    ]
    for step in steps:
        if step["rows"]:
            parts += [f"## {step['title']}", table(step["rows"])]
    return "\n\n".join(parts) + "\n"


def outcome(step: dict) -> str:
    rows, found = step["rows"], [step["status"]]
    compared, errors = [row for row in rows if "within" in row], [row["error"] for row in rows if "error" in row]
    if compared:
        outside = sum(not row["within"] for row in compared)
        found.append(f"{len(compared)} comparisons, {outside} outside of what is allowed")
    if errors:
        found.append(f"{len(errors)} failed: {errors[0]}")
    return "; ".join([*found, *filter(None, [step["error"]])])


def table(rows: list[dict]) -> str:
    """A Markdown table with a column for every key. No text can end a cell or a line."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(name)) for name in columns] for row in rows)]
    return "\n".join("| " + " | ".join(on_one_line(cell).replace("|", r"\|") for cell in line) + " |" for line in lines)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
