"""How often the grader agrees with labels of answers, beside math-verify alone.

Prints the table that `tango_jax/grading/__init__.py` has:

    PYTHONPATH=tests python -m support.grader_table example_model_solutions.jsonl

The file is grade_school_math/data/example_model_solutions.jsonl of github.com/openai/grade-school-math (MIT): answers
to the test problems of GSM8K by models of 6B and 175B parameters, with and without a verifier, and whether each is
correct. After the table come the answers about which a grader and the label differ.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from support.paths import FIXTURES
from tango_jax.grading import grade_many


class Labelled(NamedTuple):
    """A model's answer, the answer that is right, and whether somebody found them equal."""

    answer: str
    gold: str
    is_correct: bool


def published(path: Path) -> list[Labelled]:
    """The answers in OpenAI's file; a solution that ends before its answer is left out."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        Labelled(found[-1], row["ground_truth"].rsplit("A: ", 1)[1].strip(), solution["is_correct"])
        for row in rows for solution in row.values()
        if isinstance(solution, dict) and (found := re.findall(r"^A: *(.*\S)", solution["solution"], re.MULTILINE))
    ]


def written_here() -> list[Labelled]:
    rows = [json.loads(line) for line in (FIXTURES / "grading.jsonl").read_text().splitlines()]
    return [Labelled(row["answer"], row["gold"], row["correct"]) for row in rows if row.get("kind", "math") == "math"]


def by_grader(rows: Sequence[Labelled]) -> list[bool]:
    texts = [rf"\boxed{{{row.answer}}}" for row in rows]
    report = grade_many(texts, [row.gold for row in rows], text_format="boxed")
    assert not report.timeouts, f"{report.timeouts} answers took too long: start again when the machine is less busy"
    return list(report.correct)


def by_math_verify(rows: Sequence[Labelled]) -> list[bool]:
    """As its documentation begins, with the default settings; without its limits of time."""
    from math_verify import parse, verify

    def read(latex: str) -> list:
        return parse(f"${latex}$", parsing_timeout=None)

    return [verify(read(row.gold), read(rf"\boxed{{{row.answer}}}"), timeout_seconds=None) for row in rows]


def precision_and_recall(found: Sequence[bool], rows: Sequence[Labelled]) -> tuple[float, float]:
    both = sum(is_found and row.is_correct for is_found, row in zip(found, rows, strict=True))
    return both / sum(found), both / sum(row.is_correct for row in rows)


def main() -> None:
    differing = []
    print("| answers | rows | correct | grader: precision, recall | math-verify: the same |\n|---|---|---|---|---|")
    for name, rows in {"four models, GSM8K": published(Path(sys.argv[1])), "grading.jsonl": written_here()}.items():
        cells = [name, f"{len(rows):,}", f"{sum(row.is_correct for row in rows):,}"]
        for judge in (by_grader, by_math_verify):
            found = judge(rows)
            cells.append("{:.4f}, {:.4f}".format(*precision_and_recall(found, rows)))
            differing += [f"{judge.__name__}: {is_found} for {row}" for is_found, row in zip(found, rows, strict=True)
                          if is_found != row.is_correct]
        print(f"| {' | '.join(cells)} |")
    print("\n".join(["", *dict.fromkeys(differing)]))


if __name__ == "__main__":
    main()
