"""Raw rows to problems: one small function per shape of row, in a table keyed by name with the grade kind of each.

Stage of the loop: between reading a data file (`rows.py`) and the training or evaluation set (`problem_sets.py`).
A reader returns (question, answer, size), or None for a row that belongs to another task of the same file.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from tango_jax.data.out_of_domain import read_bgqa, read_cruxeval, read_strategyqa, read_tablebench
from tango_jax.data.row_fields import (
    GSM8K_MARK,
    BadRow,
    Content,
    Fields,
    answer_text,
    decoded_of,
    encodable,
    shortened,
    text_of,
    value_of,
)
from tango_jax.data.rows import Row
from tango_jax.records import Problem


class RowFormat(NamedTuple):
    """How to read one kind of row."""

    wanted: str  # the keys that a row must have, in words
    grade_kind: str  # tango_jax.grading.grade's `kind`
    read: Callable[[Fields], Content | None]
    has_repeats: bool = False  # files that hold each problem once per style of instruction


def to_problem(row: Row, row_format: str) -> Problem | None:
    """The problem of a row, or None for a row of another task (code in a file that also holds mathematics, say).

    Raises:
        ValueError: a field is missing or is not what it should be; names file, line, the keys found and those wanted.
    """
    chosen = ROW_FORMATS[row_format]
    try:
        content = chosen.read(row.fields)
        if content is not None:
            encodable("question", content[0])
            encodable("answer", content[1])
    except BadRow as error:
        found = ", ".join(map(str, row.fields)) or "none"
        raise ValueError(f"{row.where}: {error}; keys found: {found}; keys wanted: {chosen.wanted}") from error
    return None if content is None else Problem(row.id, *content)


def detect_format(fields: Fields) -> str:
    """The name of the format that a row's keys point to; "math" where nothing else does."""
    for name, keys in _TELLING_KEYS.items():
        if keys <= fields.keys():
            return name
    return "gsm8k" if GSM8K_MARK in str(fields.get("answer")) else "math"


def _read_math(fields: Fields) -> Content:
    """`question` or `problem`, and `answer`, in any case (`Problem`, `Answer`)."""
    fields = {str(key).lower(): value for key, value in fields.items()}
    question = text_of(fields, "question" if fields.get("question") is not None else "problem")
    return question, answer_text(value_of(fields, "answer")), _level(fields.get("level"))


def _read_gsm8k(fields: Fields) -> Content:
    """A worked answer that ends in `#### n`; size = its number of lines."""
    worked = text_of(fields, "answer")
    if GSM8K_MARK not in worked:
        raise BadRow(f"'answer' has no {GSM8K_MARK} before the number: {worked[-60:]!r}")
    lines = [line for line in worked.split(GSM8K_MARK)[0].splitlines() if line.strip()]
    return text_of(fields, "question"), answer_text(worked), len(lines)


def _read_verl(fields: Fields) -> Content | None:
    """The user turn of `prompt` without the wrapping that asks for another answer format, and the ground truth.

    Rows whose `ability` is not mathematics are of another task.
    """
    ability = fields.get("ability")
    if isinstance(ability, str) and not ability.lower().startswith("math"):
        return None
    reward_model = decoded_of(value_of(fields, "reward_model"))
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise BadRow(f"'reward_model' must be an object with 'ground_truth', not {shortened(reward_model)}")
    question = strip_wrapping(_user_turn(decoded_of(value_of(fields, "prompt"))))
    return question, answer_text(reward_model["ground_truth"]), 0


def _read_olympiadbench(fields: Fields) -> Content:
    """Context, question, unit and number of answers make the question. The grader does not want dollar signs."""
    context, unit = fields.get("context"), fields.get("unit")
    parts = [context.strip()] if isinstance(context, str) and context.strip() else []
    parts.append(text_of(fields, "question" if "question" in fields else "problem"))
    if fields.get("is_multiple_answer") is True:
        parts.append("There is more than one answer: give all of them, separated by commas.")
    if isinstance(unit, str) and unit.strip():
        parts.append(f"The answer is in the unit {unit.strip()}; give the value alone.")
    answer = answer_text(value_of(fields, "answer" if "final_answer" not in fields else "final_answer"))
    return "\n".join(parts), re.sub(r"(?<!\\)\$", "", answer).strip() or answer, 0


# Instructions that data sets wrap around a question; they contradict the layout that our prompts ask for.
_WRAPPINGS = (
    ("", "\n\nPresent the answer in LaTex format: \\boxed{Your answer}"),  # Eurus-2-RL-Data
    ("", " Let's think step by step and output the final answer after \"####\"."),  # verl's GSM8K
    ("", " Let's think step by step and output the final answer within \\boxed{}."),  # verl's MATH
    (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n",
        '\n\nRemember to put your answer on its own line after "Answer:".',
    ),  # DAPO
)


def strip_wrapping(question: str) -> str:
    """The question without a wrapping that is known, else as it is."""
    question = question.strip()
    for prefix, suffix in _WRAPPINGS:
        prefix, suffix = prefix.strip(), suffix.strip()
        if question.startswith(prefix) and question.endswith(suffix):
            question = question.removeprefix(prefix).removesuffix(suffix).strip()
    if not question:
        raise BadRow("the question is empty")
    return question


def _user_turn(prompt: Any) -> str:
    """The last user message of a chat, or a prompt that is a plain text."""
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    messages = prompt if isinstance(prompt, list) else []
    turns = [m["content"] for m in messages if isinstance(m, dict) and m.get("role") == "user" and "content" in m]
    if not turns or not isinstance(turns[-1], str):
        raise BadRow(f"'prompt' must be a list of chat messages with a user's, not {shortened(prompt)}")
    return turns[-1]


def _level(value: Any) -> int:
    """MATH's difficulty, 1 to 5, as a number or as `Level 3`; 0 where there is none."""
    digits = re.fullmatch(r"(?:Level )?(\d)", str(value))
    return int(digits[1]) if digits else 0


ROW_FORMATS = {
    "math": RowFormat("question or problem, and answer", "math", _read_math),
    "gsm8k": RowFormat("question, answer (ending in #### n)", "math", _read_gsm8k),
    "verl": RowFormat("prompt (chat messages), reward_model.ground_truth", "math", _read_verl),
    "olympiadbench": RowFormat("question, final_answer (a list of one) or answer", "math", _read_olympiadbench),
    "bgqa": RowFormat("example, label (proved, disproved or unknown)", "choice", read_bgqa),
    "cruxeval": RowFormat("code, input, output", "python", read_cruxeval),
    "strategyqa": RowFormat("question, facts (a list), answer (true or false)", "choice", read_strategyqa),
    "tablebench": RowFormat("qtype, question, table (columns, data), answer", "text", read_tablebench, True),
}
# Keys that a format has and "math" has not, most telling first.
_TELLING_KEYS = {
    "tablebench": {"qtype", "table"},
    "cruxeval": {"code", "input", "output"},
    "bgqa": {"example", "label"},
    "strategyqa": {"facts", "question", "answer"},
    "verl": {"prompt", "reward_model"},
    "olympiadbench": {"question", "final_answer"},
}
