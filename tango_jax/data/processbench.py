"""ProcessBench: solutions whose first wrong step is known, to evaluate the verifier. Four subsets of 400 to 1,000 rows
of huggingface.co/datasets/Qwen/ProcessBench (arXiv 2412.06559, Apache-2.0)."""

from pathlib import Path
from typing import NamedTuple

from tango_jax.data.row_fields import BadRow, Fields, decoded_of, shortened, text_of, value_of
from tango_jax.data.rows import Row, read_rows

SUBSETS = ("gsm8k", "math", "olympiadbench", "omnimath")
WANTED = "problem, steps (a list of strings), label (index of the first wrong step, -1 if there is none)"
NO_ERROR = -1


class ProcessBenchRow(NamedTuple):
    id: str
    problem: str
    steps: tuple[str, ...]
    label: int  # index of the first wrong step, from 0; NO_ERROR if all are correct
    is_answer_correct: bool  # not implied by `label`: wrong steps can lead to a correct answer


def hub_source(subset: str) -> str:
    return f"hub:Qwen/ProcessBench/{subset}"


def load_processbench(source: str | Path) -> tuple[ProcessBenchRow, ...]:
    """ValueError: no such source, or an invalid row."""
    return tuple(_read(row) for row in read_rows(source))


def solution_text(steps: tuple[str, ...]) -> str:
    """The solution in tags, as a generator would write it, without an answer, which is not known."""
    blocks = "\n".join(f"<step>{step}</step>" for step in steps)
    return f"<think>\n{blocks}\n</think>"


def _read(row: Row) -> ProcessBenchRow:
    try:
        steps, label = steps_of(row.fields), value_of(row.fields, "label")
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


def steps_of(fields: Fields) -> tuple[str, ...]:
    """BadRow: no list of strings."""
    steps = decoded_of(value_of(fields, "steps"))
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) for step in steps):
        raise BadRow(f"'steps' must be a non-empty list of strings, not {shortened(steps)}")
    return tuple(steps)
