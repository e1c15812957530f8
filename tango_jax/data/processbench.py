"""ProcessBench: solutions whose first wrong step is known. A file or hub split in, rows out.

Source: huggingface.co/datasets/Qwen/ProcessBench (arXiv 2412.06559, Apache-2.0), four subsets of 400 to 1,000 rows
{id, generator, problem, steps, final_answer_correct, label}. Stage of the loop: none; evaluation of the verifier.
"""

from pathlib import Path
from typing import NamedTuple

from tango_jax.data.row_fields import BadRow, Fields, decoded_of, shortened, text_of, value_of
from tango_jax.data.rows import Row, read_rows

SUBSETS = ("gsm8k", "math", "olympiadbench", "omnimath")
WANTED = "problem, steps (a list of texts), label (index of the first wrong step, -1 if there is none)"
NO_ERROR = -1


class ProcessBenchRow(NamedTuple):
    """One solution by steps."""

    id: str
    problem: str
    steps: tuple[str, ...]
    label: int  # index of the first wrong step, from 0; NO_ERROR where all are right
    is_answer_correct: bool  # right answers are reached by wrong steps too


def hub_source(subset: str) -> str:
    return f"hub:Qwen/ProcessBench/{subset}"


def load_processbench(source: str | Path) -> tuple[ProcessBenchRow, ...]:
    """Every row of a local file or a hub id, in order.

    Raises:
        ValueError: nothing there, or a row that cannot be read; names file, line, the keys found and those wanted.
    """
    return tuple(_read(row) for row in read_rows(source))


def solution_text(steps: tuple[str, ...]) -> str:
    """The steps as a generator would have written them: each, unchanged, in a block of its own. No answer is known."""
    blocks = "\n".join(f"<step>{step}</step>" for step in steps)
    return f"<think>\n{blocks}\n</think>"


def _read(row: Row) -> ProcessBenchRow:
    try:
        steps, label = _steps(row.fields), value_of(row.fields, "label")
        if type(label) is not int or not NO_ERROR <= label < len(steps):
            raise BadRow(f"'label' is {shortened(label)}; it must be an index of the {len(steps)} steps, or {NO_ERROR}")
        is_correct = row.fields.get("final_answer_correct")
        name = row.fields.get("id")
        return ProcessBenchRow(
            id=name if isinstance(name, str) and name else row.id,
            problem=text_of(row.fields, "problem"),
            steps=steps,
            label=label,
            is_answer_correct=is_correct if isinstance(is_correct, bool) else label == NO_ERROR,
        )
    except BadRow as error:
        found = ", ".join(map(str, row.fields)) or "none"
        raise ValueError(f"{row.where}: {error}; keys found: {found}; keys wanted: {WANTED}") from error


def _steps(fields: Fields) -> tuple[str, ...]:
    steps = decoded_of(value_of(fields, "steps"))
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) for step in steps):
        raise BadRow(f"'steps' must be a list of texts with at least one, not {shortened(steps)}")
    return tuple(steps)
