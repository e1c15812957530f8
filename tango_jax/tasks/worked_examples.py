"""Worked examples that a prompt shows, so that a model that never learned the tags writes them.

Stage 1 without a teacher (loop/self_stage_one.py) samples with them. `task.examples` names a file of one's own, in the
form of `task.stage_one` (tagged_examples.py). The examples here are of school mathematics. The verifier is shown the
first ones, the generator the first without a mistake.

Where the verifier is shown examples it is also told, of each of them and of the solution to judge, what is known: the
grade of the answer, and the number of a damaged step. This is the rationalisation of STaR (arXiv 2203.14465, section
3.3), for models that call every solution right without it. What is imitated has the plain prompt, without that line.
"""

import dataclasses
from collections.abc import Sequence

from ml_collections import ConfigDict

from tango_jax.data.rows import read_rows
from tango_jax.grading import parse_solution, parse_verification
from tango_jax.records import Problem, Solution
from tango_jax.runtime.checks import require
from tango_jax.tasks.tagged_examples import TaggedRow, read_tagged_rows
from tango_jax.text.prompts import OWN, Fields, Prompt
from tango_jax.text.templates import judged

# Question, steps, answer, remarks on the steps, which steps are right, and whether the answer is.
_MATH = (
    ("Sam has 6 marbles and finds 3 more. How many marbles does Sam have?",
     ("6 + 3 = 9 marbles.", "So Sam has 9 marbles."), "9",
     ("6 + 3 = 9.", "This is the sum of both."), (True, True), True),
    ("What is 17 + 25?",
     ("The tens are 10 + 20 = 30.", "The ones are 7 + 5 = 13.", "Together this is 30 + 13 = 43."), "43",
     ("10 + 20 = 30.", "7 + 5 is 12, not 13.", "It adds its two sums, 30 + 13 = 43."), (True, False, True), False),
    ("A shop sells pens for 3 dollars each. Tom buys 4 pens and pays with 20 dollars. How many dollars does he get "
     "back?",
     ("4 pens cost 4 * 3 = 12 dollars.", "Tom pays with 20 dollars.", "He gets back 20 - 12 = 8 dollars."), "8",
     ("4 pens at 3 dollars cost 4 * 3 = 12.", "The problem says so.", "20 - 12 = 8 is what is left."),
     (True, True, True), True),
    ("Anna reads 12 pages a day. How many pages does she read in a week?",
     ("A week has 7 days.", "She reads 7 * 12 = 94 pages.", "In a week she reads 84 pages."), "84",
     ("A week has 7 days.", "7 * 12 is 84, not 94.", "84 pages is what 7 days of 12 pages make."),
     (True, False, True), True),
    ("A bag holds 5 nuts. How many nuts are in 3 bags?",
     ("3 * 5 = 18 nuts.", "So 18 nuts are in 3 bags."), "18",
     ("3 * 5 is 15, not 18.", "It repeats the 18."), (False, True), False),
    ("Mia has 11 stickers and gives away 4. How many stickers are left?",
     ("11 - 4 = 7 stickers.", "So 7 stickers are left."), "7",
     ("11 - 4 = 7.", "This is what is left."), (True, True), True),
    ("A box holds 6 eggs. How many eggs are in 4 boxes?",
     ("4 * 6 = 24 eggs.", "So 24 eggs are in 4 boxes."), "24",
     ("4 * 6 = 24.", "This is the product."), (True, True), True),
    ("What is 6 * 14?",
     ("6 times the ten is 6 * 10 = 60.", "6 times the ones is 6 * 4 = 24.", "Together this is 60 + 24 = 84."), "84",
     ("6 * 10 = 60.", "6 * 4 = 24.", "60 + 24 = 84."), (True, True, True), True),
    ("A train needs 3 hours for 150 km. How many km does it drive in 5 hours at that speed?",
     ("In one hour it drives 150 / 3 = 50 km.", "It drives for 5 hours.", "In 5 hours it drives 5 * 50 = 250 km."),
     "250",
     ("150 / 3 = 50.", "The problem says so.", "5 * 50 = 250."), (True, True, True), True),
)
# Most examples in a prompt. The last of the verifier's five has a wrong answer: small models repeat the verdict that
# they saw last.
SHOWN = 5


def read_examples(config: ConfigDict) -> list[TaggedRow]:
    """Raises ValueError: the file cannot be read, its texts are not tagged, or a role that needs examples has none."""
    task, taught = config.task, [role for role in OWN if config[role].sft.steps and not config[role].init_from]
    rows = _shipped()
    if task.examples:
        first = read_rows(task.examples)[0].fields
        has_verifications = any(str(key).lower() == "verification" for key in first)
        rows = read_tagged_rows(task.examples, "verifier" in taught or has_verifications)
    for role in taught:
        shown = examples_of(role, rows, task.min_steps)
        what = f"a solution without a mistake in at least task.min_steps={task.min_steps} steps" * (role == "generator")
        source = f"task.examples={task.examples}" if task.examples else "the shipped examples"
        require(bool(shown), f"{source}: none can be shown to the {role}, which needs "
                f"{what or 'a verification'}: give such examples in a file, task.examples=FILE")
    return rows


def examples_of(role: str, rows: list[TaggedRow], min_steps: int) -> list[TaggedRow]:
    """Those that the role's prompt shows."""
    if role == "verifier":
        return [row for row in rows if row.verification][:SHOWN]
    return [row for row in rows
            if parse_solution(row.solution, min_steps).format_score == 1.0 and not _has_mistake(row)][:SHOWN]


def prompt_with(role: str, rows: list[TaggedRow]) -> Prompt:
    """The role's own prompt with these examples before the problem, in the words of the template `math`; the verifier's
    also with what the Solution's `is_correct` and `gold_steps` say, after the solution."""
    shown = "".join(map(_as_solved if role == "generator" else _as_judged, rows))

    def fields(parent: object, is_plain: bool) -> Fields:
        own = OWN[role].fields(parent, is_plain)
        told = f"\n\n{known_of(parent.is_correct, parent.gold_steps or ())}" if isinstance(parent, Solution) else ""
        return own._replace(question=shown + own.question, text=own.text + told)

    return Prompt(f"{role}_with_examples", role, fields)


def _as_solved(row: TaggedRow) -> str:
    return f"{row.problem.question}\n\nSolution:\n{row.solution}\n\nProblem:\n"


def _as_judged(row: TaggedRow) -> str:
    found = parse_verification(row.verification, row.num_steps)
    return (f"{row.problem.question}\n\nSolution in {row.num_steps} steps:\n{row.solution}\n\n"
            f"{known_of(found.verdict == 'CORRECT', found.judgements)}\n\nVerification:\n{row.verification}\n\n"
            "Problem:\n")


def known_of(is_right: bool, steps: Sequence[bool | None]) -> str:
    """The line that the verifier is told: of a wrong answer no step, since a grade says nothing of steps."""
    if not is_right:
        return "The final answer is wrong."
    wrong = f", and step {steps.index(False) + 1} is wrong" if False in steps else ""
    return f"The final answer is right{wrong}."


def with_known(solution: Solution, is_right: bool, damaged: int | None) -> Solution:
    """For `prompt_with`. `damaged`: the one step that is known to be wrong."""
    steps = None if damaged is None else tuple(step != damaged for step in range(damaged + 1))
    return dataclasses.replace(solution, is_correct=is_right, gold_steps=steps)


def _has_mistake(row: TaggedRow) -> bool:
    found = parse_verification(row.verification, row.num_steps)
    return bool(row.verification) and not (found.verdict == "CORRECT" and all(found.judgements))


def _shipped() -> list[TaggedRow]:
    rows = []
    for number, (question, steps, answer, remarks, marks, is_right) in enumerate(_MATH):
        blocks = "".join(f"<step>{step}</step>\n" for step in steps)
        solution = f"<think>\n{blocks}</think>\n<answer>\\boxed{{{answer}}}</answer>"
        verification = judged(remarks, marks, end="\n", is_right=is_right)
        rows.append(TaggedRow(Problem(f"example {number}", question, answer), solution, len(steps), verification))
    return rows
