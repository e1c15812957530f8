"""Prompt templates. A template is one of the names below, the path of a text file, or its text.

It may use {problem}, {solution} and {num_steps}, or for a process reward model {problem} and {step}, which are replaced
literally: LaTeX braces need no escaping.
"""

import bisect
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tango_jax.grading import parse_solution
from tango_jax.records import Problem
from tango_jax.runtime.checks import cut, local_path, require
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

_JUDGE_EACH = """You are given a problem and a proposed solution in {num_steps} steps. Check the steps in order: \
say briefly what each step does, whether it is right given the problem and the steps before it, and close it with \
\\boxed{CORRECT} or \\boxed{INCORRECT}. """
_LAYOUT = """ in this layout:
<step_verification>
<step>what the step does and whether it holds. \\boxed{CORRECT}</step>
</step_verification>
<final_verification>\\boxed{CORRECT}</final_verification>

Example. Problem: A box holds 3 red and 4 blue balls, and 2 more red balls are put in. How many balls are there?
Solution: <think><step>At first there are 3 + 4 = 7 balls.</step><step>With 2 more there are 7 + 2 = 10.</step>"""
_EXAMPLE = """</think>\
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
VERIFIER_MATH = _JUDGE_EACH + """Then judge the final answer in the same way. Write exactly {num_steps} step \
blocks, one for each step of the solution,""" + _LAYOUT + _EXAMPLE
# verifier.stop_at_first_error. The third step of its example is not judged.
VERIFIER_MATH_FIRST_ERROR = _JUDGE_EACH + """Stop at the first step that is wrong: write no block for the steps after \
it. Then judge the final answer in the same way: it is INCORRECT if a step is wrong. Write one step block for each \
step up to there, or exactly {num_steps} step blocks if no step is wrong,""" + _LAYOUT + """<step>So there are 10 \
balls.</step>""" + _EXAMPLE

# For models trained from scratch: instructions would teach them nothing. They learn the format in stage 1.
GENERATOR_PLAIN = "{problem}\n"
VERIFIER_PLAIN = "{problem}\n{solution}\n{num_steps}\n"

FIRST_ERROR = "math_first_error"
# For process reward models, which write nothing: {step} and what follows it are repeated for each step, and whether the
# step is correct is read at the last token of what follows. As in TRL's PRMTrainer, and on Qwen2.5-Math-PRM's page.
STEP = "{step}"
PRM_TRL = "{problem}{step}\n"
PRM_QWEN = """<|im_start|>system
Please reason step by step, and put your final answer within \\boxed{}.<|im_end|>
<|im_start|>user
{problem}<|im_end|>
<|im_start|>assistant
{step}<extra_0>"""
PRM_TEMPLATES = {"linear": "trl_prm", "mlp": "qwen_prm"}  # by ModelConfig.score_head

TEMPLATES = {
    ("generator", "math"): GENERATOR_MATH,
    ("verifier", "math"): VERIFIER_MATH,
    ("verifier", FIRST_ERROR): VERIFIER_MATH_FIRST_ERROR,
    ("generator", "plain"): GENERATOR_PLAIN,
    ("verifier", "plain"): VERIFIER_PLAIN,
    ("generator", "last_letter"): GENERATOR_PLAIN,  # an earlier name, which finished runs have in their settings
    ("verifier", "last_letter"): VERIFIER_PLAIN,
    ("verifier", "trl_prm"): PRM_TRL,
    ("verifier", "qwen_prm"): PRM_QWEN,
}
# The number of steps assumed when problems are filtered by the length of their prompts.
MANY_STEPS = 99
FIELDS = {"generator": ("{problem}",), "verifier": ("{problem}", "{solution}", "{num_steps}")}


class PromptTooLong(ValueError):
    """A prompt that does not fit its limit even without a solution."""


def load_template(role: str, name: str) -> str:
    """A `name` with {problem} in it is the text. Raises ValueError: `name` is neither known nor a readable file, or a
    field is missing. A verifier's text with {step} and without {solution} is for a process reward model."""
    if (role, name) in TEMPLATES:
        return TEMPLATES[role, name]
    is_file = is_template_file(role, name)
    text, shown = (_read_template(role, name), f" file {name}") if is_file else (name, f"={cut(repr(name))}")
    if role == "verifier" and has_steps(text):
        missing = ["{problem} before {step}"] * ("{problem}" not in text.partition(STEP)[0])
    else:
        missing = [field for field in FIELDS[role] if field not in text]
    if missing:
        raise ValueError(f"{role}.template{shown} lacks {', '.join(missing)}")
    return text


def has_steps(template: str) -> bool:
    """Whether a verifier's template is for a process reward model."""
    return STEP in template and "{solution}" not in template


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
    the problem has passed the length filter. Raises PromptTooLong: even that does not fit. A process reward model's
    prompt (`step_row`) loses whole steps.
    """
    if has_steps(template):
        row = step_row(template, tokenizer, problem, solution, max_prompt)
        if len(row.tokens) > max_prompt:
            raise _too_long(problem, len(row.tokens), max_prompt)
        return row.tokens, row.is_cut
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
        raise _too_long(problem, min(lengths.values()), max_prompt)
    return build(longest_that_fits(solution, lambda text: len(build(text, stated)), max_prompt), stated), True


def _too_long(problem: Problem, count: int, max_prompt: int) -> PromptTooLong:
    return PromptTooLong(
        f"the verifier's prompt for problem {problem.id} has {count} tokens without the solution; the limit is "
        f"{max_prompt}: raise verifier.max_prompt or filter the problem"
    )


def asks_to_stop(template: str, otherwise: bool) -> bool:
    """Whether a verifier's template of this name asks it to stop at the first error; `otherwise`: of another text."""
    return {"math": False, FIRST_ERROR: True}.get(template, otherwise)


class StepRow(NamedTuple):
    """What a process reward model reads."""

    tokens: list[int]
    ends: list[int]  # for each step, the index of the token at which it is judged
    is_cut: bool  # there are further steps


def step_row(template: str, tokenizer: Tokenizer, problem: Problem, solution: str, max_prompt: int) -> StepRow:
    """The problem and as many of the solution's steps as `max_prompt` tokens hold. Problem, steps and marks are encoded
    one by one, as in TRL; between special tokens that is the same as all at once."""
    before, _, mark = template.partition(STEP)
    tokens = tokenizer.encode_prompt(fill(before, problem=tokenizer.as_text(problem.question)))
    steps, ends, mark_ids = parse_solution(solution).steps, [], tokenizer.encode_fn(mark)
    for step in steps:
        more = [*tokenizer.encode_fn(tokenizer.as_text(step)), *mark_ids]
        if len(tokens) + len(more) > max_prompt:
            break
        tokens = [*tokens, *more]
        ends.append(len(tokens) - 1)
    return StepRow(tokens, ends, len(ends) < len(steps))


def check_template(name: str, template: str, score_head: str, tokenizer: Tokenizer) -> None:
    """Raises ValueError: a template for a model that writes and a process reward model, or the other way round; or one
    whose mark is no token. `name`: the setting that holds the template."""
    require(has_steps(template) == bool(score_head), f"{name} " + (
        "is for a model that writes, and this checkpoint is a process reward model: set it to "
        f"{PRM_TEMPLATES.get(score_head)}, or to a text with {{problem}} and {{step}}" if score_head else
        "has {step}, as for a process reward model, and this checkpoint is a language model: choose another"))
    if not score_head:
        return
    require(tokenizer.chat_fn is None, f"{name} of a process reward model has all turns in it: leave use_chat out")
    mark = template.partition(STEP)[2]
    require(bool(mark), f"{name} ends in {{step}}: put the text after it at whose last token a step is judged")
    is_token = len(tokenizer.encode_fn(mark)) == 1
    require(is_token or not mark.startswith("<"), f"{name} judges each step at {mark}, which the tokenizer of this "
            "checkpoint does not have as one token: use the tokenizer that was published with the model")


def longest_that_fits(text: str, length_fn: Callable[[str], int], limit: int) -> str:
    prefixes = range(1, len(text) + 1)
    return text[: bisect.bisect_right(prefixes, limit, key=lambda length: length_fn(text[:length]))]


def judged_by_scores(p_steps: Sequence[float], num_steps: int) -> str:
    """The verification that stands for a process reward model's probabilities, for reports: steps of at least 1/2 are
    CORRECT. It has no verdict if there are steps without a probability, and those before are correct."""
    are_right = [p >= 0.5 for p in p_steps]
    text = judged([f"P(CORRECT) = {p:.3f}" for p in p_steps], are_right)
    is_open = all(are_right) and not 0 < num_steps == len(are_right)
    return text.partition("<final_verification>")[0] if is_open else text


def judged(remarks: Sequence[str], are_right: Sequence[bool], end: str = "", is_right: bool | None = None) -> str:
    """A verification to imitate. `is_right`: the answer; None: it is if all steps are. `end` follows each line."""
    verdict = all(are_right) if is_right is None else is_right
    marks = ["CORRECT" if right else "INCORRECT" for right in (*are_right, verdict)]
    pairs = zip(remarks, marks[:-1], strict=True)
    blocks = "".join(f"<step>{remark} \\boxed{{{mark}}}</step>{end}" for remark, mark in pairs)
    final = f"<final_verification>\\boxed{{{marks[-1]}}}</final_verification>"
    return f"<step_verification>{end}{blocks}</step_verification>{end}{final}"
