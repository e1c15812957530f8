r"""Parsing and grading of model text: steps, boxed answers, judgements, verdicts, correctness.

Importing this package starts no process and loads neither jax nor the math library; `grade` and `grade_many` start
workers when they need them.

The parsers differ from the paper's published code (arXiv 2505.15034):

1. A verifier block without a judgement yields None. The published pattern lets it swallow the next block.
2. Spaces and newlines may surround the verdict's box. The published pattern then finds no verdict.
3. An unreadable verdict costs 0.8 of the format score. The published code accepts any text that ends with a box.
4. The final section directly follows the first step section. The published code allows text and a second one between.
5. The answer block is one balanced box. The published code accepts `\boxed{`, anything, `}`.

The comparison agrees with the labels of all 5,265 answers of four models to GSM8K (openai/grade-school-math), as
math-verify 0.9 alone does. On the 66 rows of `tests/fixtures/grading.jsonl`, written with this grader in mind,
precision and recall are 1 (math-verify: 0.92 and 0.74). `PYTHONPATH=tests python -m support.grader_table FILE` prints
both and every answer in dispute.
"""
from tango_jax.grading.grader import (
    FAILURES,
    TEXT_FORMATS,
    GradeReport,
    answer_of,
    check_grader,
    close_pool,
    grade,
    grade_many,
)
from tango_jax.grading.steps import ParsedSolution, parse_solution
from tango_jax.grading.verdict import (
    ParsedVerification,
    find_marks,
    parse_verification,
    until_first_error,
    why_misaligned,
)

__all__ = [
    "FAILURES",
    "TEXT_FORMATS",
    "GradeReport",
    "ParsedSolution",
    "ParsedVerification",
    "answer_of",
    "check_grader",
    "close_pool",
    "find_marks",
    "grade",
    "grade_many",
    "parse_solution",
    "parse_verification",
    "until_first_error",
    "why_misaligned",
]
