r"""Parsing and grading of model text: step spans, boxed answers, judgements, verdicts and correctness of answers.

Takes response texts and gold answers; returns the facts from which rewards are computed. Stage of the loop: between
sampling and the rewards. Importing this package starts no process and loads neither jax nor the math library: `grade`
and `grade_many` start worker processes when they first need them.

The parsers differ from the code published with the paper (arXiv 2505.15034) as follows:
1. A verifier block without a judgement yields None. The published pattern lets such a block swallow the next one.
2. Spaces and newlines may surround the box of the verdict. The published pattern finds no verdict in that case.
3. An unreadable verdict always costs 0.8 of the format score. The published code accepts any text that ends with a box.
4. The final section must directly follow the first step section. The published code allows text between them when a
   second step section follows that text.
5. The answer block must be exactly one balanced box. The published code accepts anything that begins with `\boxed{`
   and ends with `}`.

How often the comparison of answers agrees with labels, beside math-verify 0.9 alone, which does part of the work:

| answers | rows | correct | grader: precision, recall | math-verify: the same |
|---|---|---|---|---|
| four models, GSM8K | 5,265 | 2,001 | 1.0000, 1.0000 | 1.0000, 1.0000 |
| grading.jsonl | 66 | 46 | 1.0000, 1.0000 | 0.9189, 0.7391 |

The first row is of answers that models of 6B and 175B parameters gave, with and without a verifier, published with
their labels (openai/grade-school-math, MIT): numbers, which both get right. The second is of the fixture
`tests/fixtures/grading.jsonl`, whose LaTeX was chosen and labelled with this grader in mind. Answers of models in LaTeX
with independent labels were not at hand. `PYTHONPATH=tests python -m support.grader_table FILE` prints the table and
every answer in dispute.
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
