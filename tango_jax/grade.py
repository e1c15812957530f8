"""Grade a file of responses: reads JSONL rows {"text", "gold", "kind"?} and writes them with "correct" added.

    python -m tango_jax.grade --file=rows.jsonl --out=graded.jsonl

checks answers by hand, or audits the grader. "gold" is the reference answer, and "kind" how to compare with it: math
(the default), string, python, choice or text. The last line on standard error says how many are correct.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tango_jax.cli.arguments import Parser
from tango_jax.grading import grade_many
from tango_jax.grading.answer import KINDS
from tango_jax.runtime import failures
from tango_jax.runtime.atomic import write_atomically
from tango_jax.runtime.checks import file_to_write, local_path

DEFAULT_KIND = "math"
MAX_SHOWN = 200  # characters of a value in an error message
CHUNK = 256  # rows between two updates of the progress bar


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 after one line on standard error that says what to change."""
    try:
        args = _parse_args(argv)
        if args.out is not None:
            args.out = file_to_write("--out", args.out)
            if not args.out.parent.is_dir():
                raise ValueError(f"--out={args.out}: there is no folder {args.out.parent}; create it first")
        file = local_path("--file", args.file)
        if not file.is_file():
            raise ValueError(f"--file={args.file} is not a file: name a JSONL file of responses")
        rows = read_rows(file)
        graded, summary = grade_rows(rows)
        _write_rows(graded, args.out)
    except failures.EXPECTED as error:
        return failures.report(error, 2)
    print(summary, file=sys.stderr)
    return 0


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read and validate all rows of a JSONL file. ValueError names the file, the line and what is wrong with it."""
    rows = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = _checked(json.loads(line.decode("utf-8-sig")))
                json.dumps(row)  # deeply nested JSON can be readable but not writable
                rows.append(row)
            except ValueError as error:  # not UTF-8, not JSON, or not a row
                raise ValueError(f"{path}, line {number}: {error}") from error
            except RecursionError as error:
                raise ValueError(f"{path}, line {number}: lists or objects nested too deeply to be read; a row is "
                                 'a flat object {"text", "gold", "kind"?}') from error
    return rows


def grade_rows(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the rows with "correct" added, in order, and a one-line summary."""
    correct: list[bool] = [False] * len(rows)
    errors = timeouts = overlong = 0
    with _progress() as progress:
        task = progress.add_task("grading", total=len(rows))
        for kind in KINDS:
            of_kind = [index for index, row in enumerate(rows) if row.get("kind", DEFAULT_KIND) == kind]
            for start in range(0, len(of_kind), CHUNK):
                chosen = of_kind[start : start + CHUNK]
                texts, golds = ([rows[index][key] for index in chosen] for key in ("text", "gold"))
                report = grade_many(texts, golds, kind)
                for index, is_correct in zip(chosen, report.correct, strict=True):
                    correct[index] = is_correct
                errors += report.errors
                timeouts += report.timeouts
                overlong += report.overlong
                progress.advance(task, len(chosen))
    graded = [{**row, "correct": is_correct} for row, is_correct in zip(rows, correct, strict=True)]
    counts = f"{errors} errors, {timeouts} timeouts, {overlong} overlong"
    return graded, f"{sum(correct)} of {len(rows)} correct; counted as wrong because grading failed: {counts}"


def _progress() -> Progress:
    """A transient progress bar on standard error; hidden if that is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _checked(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f'a row must be an object {{"text", "gold"}}, not {type(row).__name__}')
    missing = [key for key in ("text", "gold") if key not in row]
    if missing:
        raise ValueError(f"no {missing[0]!r} among the keys {_shown(sorted(row))}; a row needs 'text' and 'gold'")
    if not isinstance(row["text"], str):
        raise ValueError(f"'text' is {_shown(row['text'])}; it must be the text of a response")
    gold = row["gold"]
    if not isinstance(gold, (str, bool, int, float)) or not str(gold).strip() or gold != gold:
        raise ValueError(f"'gold' is {_shown(gold)}; it must be a non-empty text or a number")
    kind = row.get("kind", DEFAULT_KIND)
    if kind not in KINDS:
        raise ValueError(f"'kind' is {_shown(kind)}; use one of {', '.join(KINDS)}, or leave it out for {DEFAULT_KIND}")
    return row


def _shown(value: Any) -> str:
    """The repr of a value on one line for an error message, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _write_rows(rows: Sequence[dict[str, Any]], out: Path | None) -> None:
    """Write to standard output, or atomically to a file."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if out is None:
        sys.stdout.write(lines)
        sys.stdout.flush()
        return
    write_atomically(out, lines)


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("grade", __doc__)
    parser.add_argument("--file", required=True, help="JSONL file with the rows")
    parser.add_argument("--out", help="where to write the graded rows (default: standard output)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
