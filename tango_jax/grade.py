r"""Grade a file of responses: JSONL rows {"text", "gold", "kind"?} in; the same rows with "correct" and "reason" out.

    python -m tango_jax.grade --file=rows.jsonl --out=graded.jsonl

checks answers by hand, or audits the grader. "gold" is the reference answer, and "kind" how to compare with it: math
(the default), string, python, choice or text. The last line on standard error says how many are correct.

The text is a response as the generator is trained to write it:

    <think>
    <step>3 + 4 = 7</step>
    <step>twice that is 14</step>
    </think>
    <answer>\boxed{14}</answer>

The last \boxed{...} in the first <answer>...</answer> is graded; steps are ignored. With --format=boxed, the last
\boxed{...} of the whole text is graded, and no tags are needed. A row without a box is wrong, and its reason says so.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tango_jax.cli.arguments import Parser
from tango_jax.data.rows import why_not_json
from tango_jax.grading import TEXT_FORMATS, answer_of, grade_many
from tango_jax.grading.answer import KINDS
from tango_jax.runtime.atomic import write_atomically
from tango_jax.runtime.checks import cut, file_to_write, local_path
from tango_jax.runtime.failures import ends_in_one_line
from tango_jax.runtime.model_text import on_one_line

DEFAULT_KIND = "math"
MAX_SHOWN = 200  # characters of a value in an error message
MAX_ANSWER = 80  # characters of an answer in a reason
NO_BLOCK = "no <answer>...</answer> block"
CHUNK = 256  # rows between two updates of the progress bar
FAILED = {
    "error": "the math library failed on it",
    "timeout": "comparing it took too long",
    "overlong": "it is too long or too deeply nested to compare",
}


def main(argv: Sequence[str] | None = None) -> int:
    with ends_in_one_line():
        args = _parse_args(argv)
        if args.out is not None:
            args.out = file_to_write("--out", args.out)
            if not args.out.parent.is_dir():
                raise ValueError(f"--out={args.out}: there is no folder {args.out.parent}; create it first")
        file = local_path("--file", args.file)
        if not file.is_file():
            raise ValueError(f"--file={args.file} is not a file: name a JSONL file of responses")
        rows, skipped = read_rows(file, args.skip_bad_rows)
        graded, summary = grade_rows(rows, args.format)
        _write_rows(graded, args.out)
        if skipped:
            summary += f"; {len(skipped)} bad rows skipped, the first: {on_one_line(skipped[0])}"
        print(summary, file=sys.stderr)
    return 0


def read_rows(path: Path, skip_bad_rows: bool = False) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a JSONL file, and a message for each skipped row. Raises ValueError for a bad row unless it is
    skipped."""
    rows, skipped = [], []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                rows.append(_parsed(line))
            except ValueError as error:
                message = f"{path}, line {number}: {error}"
                if not skip_bad_rows:
                    raise ValueError(f"{message}; --skip_bad_rows leaves such rows out") from error
                skipped.append(message)
    return rows, skipped


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
        json.dumps(row)  # deeply nested JSON can be readable but not writable
    except RecursionError as error:
        raise ValueError("lists or objects nested too deeply to be read; a row is a flat object "
                         '{"text", "gold", "kind"?}') from error
    except ValueError as error:
        raise ValueError(why_not_json(line, error)) from error
    return _checked(row)


def grade_rows(rows: Sequence[dict[str, Any]], text_format: str = "tagged") -> tuple[list[dict[str, Any]], str]:
    """The rows with "correct" and "reason", and a one-line summary."""
    graded: list[dict[str, Any]] = [{} for _ in rows]
    counts: Counter[str] = Counter()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("grading", total=len(rows))
        for kind in KINDS:
            of_kind = [index for index, row in enumerate(rows) if row.get("kind", DEFAULT_KIND) == kind]
            for start in range(0, len(of_kind), CHUNK):
                chosen = of_kind[start : start + CHUNK]
                texts, golds = ([rows[index][key] for index in chosen] for key in ("text", "gold"))
                report = grade_many(texts, golds, kind, text_format)
                for index, is_correct, failure in zip(chosen, report.correct, report.failures, strict=True):
                    reason = reason_of(rows[index]["text"], is_correct, failure, text_format)
                    graded[index] = {**rows[index], "correct": is_correct, "reason": reason}
                counts.update(errors=report.errors, timeouts=report.timeouts, overlong=report.overlong)
                progress.advance(task, len(chosen))
    failed = ", ".join(f"{counts[name]} {name}" for name in ("errors", "timeouts", "overlong"))
    correct = sum(row["correct"] for row in graded)
    summary = f"{correct} of {len(rows)} correct; counted as wrong because grading failed: {failed}"
    if graded and all(row["reason"] == NO_BLOCK for row in graded):
        summary += r"; no text has an <answer> block: --format=boxed grades the last \boxed{...} anywhere in a text"
    return graded, summary


def reason_of(text: str, is_correct: bool, failure: str, text_format: str) -> str:
    answer = answer_of(text, text_format)
    if answer is None and text_format == "tagged":
        has_block = "<answer>" in text and "</answer>" in text[text.find("<answer>") :]
        return r"no \boxed{...} in the <answer> block" if has_block else NO_BLOCK
    if answer is None:
        return r"no \boxed{...}"
    shown = cut(answer, MAX_ANSWER)
    if failure:
        return f"the answer is {shown}, and {FAILED[failure]}"
    return f"the answer {shown} {'equals' if is_correct else 'differs from'} the gold answer"


def _checked(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f'a row must be an object {{"text", "gold"}}, not {type(row).__name__}')
    missing = [key for key in ("text", "gold") if key not in row]
    if missing:
        raise ValueError(f"no {missing[0]!r} among the keys {_shown(sorted(row))}; a row needs 'text' and 'gold'")
    if not isinstance(row["text"], str):
        raise ValueError(f"'text' is {_shown(row['text'])}; it must be the text of a response")
    gold = row["gold"]
    if not isinstance(gold, (str, bool, int, float)) or not str(gold).strip() or (
        isinstance(gold, float) and not math.isfinite(gold)
    ):
        raise ValueError(f"'gold' is {_shown(gold)}; it must be a non-empty text or a number")
    kind = row.get("kind", DEFAULT_KIND)
    if kind not in KINDS:
        raise ValueError(f"'kind' is {_shown(kind)}; use one of {', '.join(KINDS)}, or leave it out for {DEFAULT_KIND}")
    return row


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _write_rows(rows: Sequence[dict[str, Any]], out: Path | None) -> None:
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
    parser.add_argument("--format", choices=TEXT_FORMATS, default="tagged",
                        help="tagged: the answer is in an <answer> block, as in training; boxed: in the last box of "
                        "the text; default: %(default)s")
    parser.add_flag("--skip_bad_rows", "leave out rows that cannot be graded, and count them, instead of ending at the "
                    "first one")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
