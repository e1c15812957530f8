r"""Parsing and grading of model text: step spans, boxed answers, judgements, verdicts and correctness of answers.

Importing this package starts no process and loads neither jax nor the math library: `grade` and `grade_many` start
worker processes when they first need them.

The parsers differ from the code published with the paper (arXiv 2505.15034) as follows:
1. A verifier block without a judgement yields None. The published pattern lets such a block swallow the next one.
2. Spaces and newlines may surround the box of the verdict. The published pattern finds no verdict in that case.
3. An unreadable verdict always costs 0.8 of the format score. The published code accepts any text that ends with a box.
4. The final section must directly follow the first step section. The published code allows text between them when a
   second step section follows that text.
5. The answer block must be exactly one balanced box. The published code accepts anything that begins with `\boxed{`
   and ends with `}`.

The comparison agrees with the labels of all 5,265 answers that four models gave to GSM8K problems
(openai/grade-school-math), as math-verify 0.9 alone does. On the 66 rows of `tests/fixtures/grading.jsonl`, whose LaTeX
was chosen and labelled with this grader in mind, precision and recall are 1; math-verify has 0.92 and 0.74.
`PYTHONPATH=tests python -m support.grader_table FILE` prints both, and every answer in dispute.
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
from tango_jax.grading.verdict import ParsedVerification, parse_verification, why_misaligned

__all__ = [
    "FAILURES",
    "TEXT_FORMATS",
    "GradeReport",
    "ParsedSolution",
    "ParsedVerification",
    "answer_of",
    "check_grader",
    "close_pool",
    "grade",
    "grade_many",
    "parse_solution",
    "parse_verification",
    "why_misaligned",
]
