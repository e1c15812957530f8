"""Problem files and machines for the tests of configs/own_problems.py."""

import json
from pathlib import Path

from tango_jax.planning.machines import GIB, Machine

ROOMY_CPU = Machine("cpu", devices=1, memory=64 * GIB)


def write_problems(path: Path, count: int = 12, question: str = "What is {a} + {b}?") -> Path:
    """Plain rows of question and answer, all different."""
    rows = [{"question": question.format(a=index, b=index + 1), "answer": str(2 * index + 1)} for index in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
