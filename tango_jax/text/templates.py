"""Prompt templates. A template is one of the names below, the path of a text file, or its text.

It may use {problem}, {solution} and {num_steps}, which are replaced literally: LaTeX braces need no escaping.
"""

import bisect
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence

from tango_jax.records import Problem
from tango_jax.runtime.checks import cut, local_path
from tango_jax.text.tokenizer import Tokenizer

GENERATOR_MATH = """Solve the problem below. Think in small steps and wrap every step in its own tags, then give the \
final answer in a box. Use exactly this layout:
<think>
<step>first step</step>
<step>second step</step>
</think>
<answer>\\boxed{final answer}</answer>

Problem:
{problem}

Solution:
"""

VERIFIER_MATH = """You are given a problem and a proposed solution in {num_steps} steps. Check the steps in order: \
say briefly what each step does, whether it is right given the problem and the steps before it, and close it with \
\\boxed{CORRECT} or \\boxed{INCORRECT}. Then judge the final answer in the same way. Write exactly {num_steps} step \
blocks, one for each step of the solution, in this layout:
<step_verification>
<step>what the step does and whether it holds. \\boxed{CORRECT}</step>
</step_verification>
<final_verification>\\boxed{CORRECT}</final_verification>

Example. Problem: A box holds 3 red and 4 blue balls, and 2 more red balls are put in. How many balls are there?
Solution: <think><step>At first there are 3 + 4 = 7 balls.</step><step>With 2 more there are 7 + 2 = 10.</step></think>\
<answer>\\boxed{10}</answer>
Verification:
<step_verification>
<step>It adds the two colours: 3 + 4 = 7, which is right. \\boxed{CORRECT}</step>
<step>It adds the 2 new balls, but 7 + 2 is 9, not 10. \\boxed{INCORRECT}</step>
</step_verification>
<final_verification>\\boxed{INCORRECT}</final_verification>

Problem:
{problem}

Solution in {num_steps} steps:
{solution}

Verification:
"""

# For models trained from scratch: instructions would teach them nothing. They learn the format in stage 1.
GENERATOR_PLAIN = "{problem}\n"
VERIFIER_PLAIN = "{problem}\n{solution}\n{num_steps}\n"

TEMPLATES = {
    ("generator", "math"): GENERATOR_MATH,
    ("verifier", "math"): VERIFIER_MATH,
    ("generator", "plain"): GENERATOR_PLAIN,
    ("verifier", "plain"): VERIFIER_PLAIN,
    ("generator", "last_letter"): GENERATOR_PLAIN,  # an earlier name, which finished runs have in their settings
    ("verifier", "last_letter"): VERIFIER_PLAIN,
}
# The number of steps assumed when problems are filtered by the length of their prompts.
MANY_STEPS = 99
FIELDS = {"generator": ("{problem}",), "verifier": ("{problem}", "{solution}", "{num_steps}")}


class PromptTooLong(ValueError):
    """A prompt that does not fit its limit even without a solution."""


def load_template(role: str, name: str) -> str:
    """A `name` with {problem} in it is the text. Raises ValueError: `name` is neither known nor a readable file, or a
    field is missing."""
    if (role, name) in TEMPLATES:
        return TEMPLATES[role, name]
    is_file = is_template_file(role, name)
    text, shown = (_read_template(role, name), f" file {name}") if is_file else (name, f"={cut(repr(name))}")
    missing = [field for field in FIELDS[role] if field not in text]
    if missing:
        raise ValueError(f"{role}.template{shown} lacks {', '.join(missing)}")
    return text


def is_template_file(role: str, name: str) -> bool:
    return (role, name) not in TEMPLATES and "{problem}" not in name


def _read_template(role: str, name: str) -> str:
    path = local_path(f"{role}.template", name)
    if not path.is_file():
        known = ", ".join(known for known_role, known in TEMPLATES if known_role == role)
        raise ValueError(f"{role}.template={name!r} is neither one of {known} nor a file, nor a text with "
                         "{problem} in it")
    try:
        return path.read_text(encoding="utf-8-sig")  # editors may write a byte-order mark, which is no part of a prompt
    except UnicodeDecodeError as error:
        raise ValueError(f"{role}.template file {name} is not UTF-8 text ({error}): save it as UTF-8") from error


def templates_digest(templates: Mapping[str, str]) -> str:
    """From {role: text}: a run knows by it whether a template file has changed."""
    return hashlib.sha256(json.dumps(dict(templates)).encode()).hexdigest()


def fill(template: str, **fields: str) -> str:
    # In one pass: a problem or solution may contain a field's name.
    return re.sub(rf"\{{({'|'.join(fields)})\}}", lambda match: fields[match[1]], template)


def generator_prompt(template: str, tokenizer: Tokenizer, problem: Problem) -> list[int]:
    return tokenizer.encode_prompt(fill(template, problem=tokenizer.as_text(problem.question)))


def verifier_prompt(
    template: str, tokenizer: Tokenizer, problem: Problem, solution: str, num_steps: int, max_prompt: int
) -> tuple[list[int], bool]:
    """Return the prompt ids, and whether the end of the solution was cut off to fit `max_prompt` tokens.

    Model text never causes an error: if the number of steps leaves no room, the prompt states MANY_STEPS, with which
    the problem has passed the length filter. Raises PromptTooLong: even that does not fit.
    """

    question = tokenizer.as_text(problem.question)

    def build(text: str, count: int) -> list[int]:
        fields = {"num_steps": str(count), "problem": question, "solution": tokenizer.as_text(text)}
        return tokenizer.encode_prompt(fill(template, **fields))

    ids = build(solution, num_steps)
    if len(ids) <= max_prompt:
        return ids, False
    lengths = {count: len(build("", count)) for count in (num_steps, MANY_STEPS)}
    stated = next((count for count, length in lengths.items() if length <= max_prompt), None)
    if stated is None:
        raise PromptTooLong(
            f"the verifier's prompt for problem {problem.id} has {min(lengths.values())} tokens without the solution; "
            f"the limit is {max_prompt}: raise verifier.max_prompt or filter the problem"
        )
    return build(longest_that_fits(solution, lambda text: len(build(text, stated)), max_prompt), stated), True


def longest_that_fits(text: str, length_fn: Callable[[str], int], limit: int) -> str:
    prefixes = range(1, len(text) + 1)
    return text[: bisect.bisect_right(prefixes, limit, key=lambda length: length_fn(text[:length]))]


def judged(remarks: Sequence[str], are_right: Sequence[bool], end: str = "", is_right: bool | None = None) -> str:
    """A verification to imitate. `is_right`: the answer; None: it is if all steps are. `end` follows each line."""
    verdict = all(are_right) if is_right is None else is_right
    marks = ["CORRECT" if right else "INCORRECT" for right in (*are_right, verdict)]
    pairs = zip(remarks, marks[:-1], strict=True)
    blocks = "".join(f"<step>{remark} \\boxed{{{mark}}}</step>{end}" for remark, mark in pairs)
    final = f"<final_verification>\\boxed{{{marks[-1]}}}</final_verification>"
    return f"<step_verification>{end}{blocks}</step_verification>{end}{final}"
