r"""Text in, rewardable facts out: step spans, boxed answers, judgements, verdicts, and whether an answer is right.

Stage of the loop: between sampling and the rewards. Importing this package starts nothing and loads neither jax nor
the math library: `grade` and `grade_many` start worker processes when they first need them.

Where the parsers leave the code published with the paper (arXiv 2505.15034):
1. A verifier block without a judgement yields None; the published pattern lets it swallow the next block.
2. Blanks and newlines may surround the box of the verdict; the published pattern then finds no verdict.
3. A verdict that cannot be read always costs 0.8 of the format score; published, any text that ends with a box passes.
4. The final section must directly follow the first step section; published, text may stand between them when a
   second step section follows it.
5. The answer block must be exactly one balanced box; published, anything that begins with `\boxed{` and ends with `}`.
"""
from tango_jax.grading.grader import FAILURES, GradeReport, check_grader, close_pool, grade, grade_many
from tango_jax.grading.steps import ParsedSolution, parse_solution
from tango_jax.grading.verdict import ParsedVerification, parse_verification

__all__ = [
    "FAILURES",
    "GradeReport",
    "ParsedSolution",
    "ParsedVerification",
    "check_grader",
    "close_pool",
    "grade",
    "grade_many",
    "parse_solution",
    "parse_verification",
]
