"""Prompts: the records that a prompt is about in, token ids out.

A `Prompt` fills the fields of any template (templates.py). SOLVE and JUDGE are the roles' own; the others belong to
relatives of the method (method/relatives.py), or to users' methods.
"""

import dataclasses
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

from tango_jax.records import Problem, Solution, Verification, problem_of
from tango_jax.text.templates import (
    GENERATOR_PLAIN,
    VERIFIER_PLAIN,
    PromptTooLong,
    fill,
    generator_prompt,
    longest_that_fits,
    verifier_prompt,
)
from tango_jax.text.tokenizer import Tokenizer


class Fields(NamedTuple):
    """`question` stands for {problem}. In the verifier's template, `text` stands for {solution}; its end is cut off
    where the prompt is too long. A generator's question that shows `text` is a function of it."""

    question: str | Callable[[str], str]
    text: str = ""
    num_steps: int = 0


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One kind of prompt.

    name: of its responses in metrics, rollouts and stage 1.
    role: generator or verifier: whose template it fills, and how the response is read.
    fields: (what the prompt is about, whether the template is plain, without instructions) -> Fields.
    stream: the name of its random numbers; empty: `name`.
    is_scored: nothing is written: the marks of `mark_rows.mark_row` are read in one pass.
    """

    name: str
    role: str
    fields: Callable[[Any, bool], Fields]
    stream: str = ""
    is_scored: bool = False


def _solve(problem: Problem, _: bool) -> Fields:
    return Fields(problem.question)


def _judge(solution: Solution, _: bool) -> Fields:
    return Fields(solution.problem.question, solution.text, len(solution.steps))


def _second_try(verification: Verification, is_plain: bool) -> Fields:
    wording = "{problem}\n{text}" if is_plain else """{problem}

An earlier solution, and what a verifier said of it:
{text}

Solve the problem once more, without the mistakes that were found."""
    problem = problem_of(verification).question
    return Fields(lambda text: fill(wording, problem=problem, text=text), _with_its_solution(verification))


def _second_judgement(verification: Verification, is_plain: bool) -> Fields:
    question = problem_of(verification).question
    if not is_plain:
        question += """

Below, in place of a solution, stand a solution and its verification. Judge the remarks of the verification in order, \
each as a step, and then whether its verdict is right."""
    return Fields(question, _with_its_solution(verification), len(verification.blocks))


def _judge_informed(solution: Solution, is_plain: bool) -> Fields:
    problem = solution.problem
    shown = f"\n{problem.answer}" if is_plain else f"\n\nThe right answer, by which to judge, is {problem.answer}."
    return Fields(problem.question + shown, solution.text, len(solution.steps))


def _with_its_solution(verification: Verification) -> str:
    return f"{verification.of.text}\n{verification.text}"


SOLVE = Prompt("generator", "generator", _solve, stream="solve")
JUDGE = Prompt("verifier", "verifier", _judge, stream="verify")
# The verifier's own prompt in arms in which it does not write (method/scored.py).
SCORED = dataclasses.replace(JUDGE, is_scored=True)
# The stream keeps an old name, so that earlier runs are reproduced.
SECOND_TRY = Prompt("second_try", "generator", _second_try, stream="second_solution")
SECOND_JUDGEMENT = Prompt("second_judgement", "verifier", _second_judgement)
# For scoring alone, never for sampling: it shows the gold answer.
INFORMED = Prompt("informed", "verifier", _judge_informed)
OWN = MappingProxyType({"generator": SOLVE, "verifier": JUDGE})
PROMPTS = MappingProxyType({one.name: one for one in (SOLVE, JUDGE, SECOND_TRY, SECOND_JUDGEMENT, INFORMED)})


def solution_of(problem: Problem, text: str, num_steps: int = 0) -> Solution:
    return Solution(problem, text, ("",) * num_steps, (), 1.0, True, None)


def verification_of(problem: Problem, solution: str, verification: str, num_steps: int = 0) -> Verification:
    judged = solution_of(problem, solution, num_steps)
    return Verification(verification, (), "INVALID", 1.0, True, judged.steps, of=judged)


def prompt_ids(
    prompt: Prompt, template: str, tokenizer: Tokenizer, parent: Any, max_prompt: int
) -> tuple[list[int], bool]:
    """Token ids, and whether the end of the text was cut off. Raises PromptTooLong: it is too long even without the
    text."""
    problem, fields = problem_of(parent), prompt.fields(parent, template in (GENERATOR_PLAIN, VERIFIER_PLAIN))
    if prompt.role == "verifier":
        asked = dataclasses.replace(problem, question=fields.question)
        return verifier_prompt(template, tokenizer, asked, fields.text, fields.num_steps, max_prompt)

    def build(text: str) -> list[int]:
        question = fields.question(text) if callable(fields.question) else fields.question
        return generator_prompt(template, tokenizer, dataclasses.replace(problem, question=question))

    ids, is_cut = build(fields.text), False
    if len(ids) > max_prompt and fields.text:
        ids, is_cut = build(longest_that_fits(fields.text, lambda text: len(build(text)), max_prompt)), True
        if len(ids) > max_prompt:  # the wording around it takes tokens as well: then the problem stands alone
            ids = generator_prompt(template, tokenizer, problem)
    if len(ids) > max_prompt:
        raise PromptTooLong(f"the generator's prompt for problem {problem.id} has {len(ids)} tokens; the limit is "
                            f"{max_prompt}: raise generator.max_prompt or filter the problem")
    return ids, is_cut
