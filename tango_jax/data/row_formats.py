"""Converts raw rows to problems. A reader returns (question, answer, size), or None for a row of another task."""

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
    check_keys,
    decoded_of,
    encodable,
    refuse_left_out,
    shortened,
    text_of,
    value_of,
)
from tango_jax.data.rows import Row
from tango_jax.records import Problem


class RowFormat(NamedTuple):
    wanted: str  # description of the keys that a row must have, for error messages
    grade_kind: str  # tango_jax.grading.grade's `kind`
    read: Callable[[Fields], Content | None]
    has_repeats: bool = False  # whether files contain each problem once per style of instruction


def to_problem(row: Row, row_format: str) -> Problem | None:
    """None for a row of another task, such as code among mathematics. ValueError: a field is missing or invalid."""
    chosen = ROW_FORMATS[row_format]
    try:
        check_keys(row.fields)
        content = chosen.read(row.fields)
        if content is not None:
            encodable("question", content[0])
            encodable("answer", content[1])
    except BadRow as error:
        found = ", ".join(map(str, row.fields)) or "none"
        raise ValueError(f"{row.where}: {error}; keys found: {found}; keys wanted of a row in the format {row_format}: "
                         f"{chosen.wanted}") from error
    return None if content is None else Problem(row.id, *content)


def detect_format(fields: Fields) -> str:
    """"math" if the keys indicate no other format."""
    for name, keys in _TELLING_KEYS.items():
        has_question = any(str(key).lower() in ("question", "problem") for key in fields)
        if keys <= fields.keys() and not (name == "cruxeval" and has_question):
            return name
    return "gsm8k" if GSM8K_MARK in str(fields.get("answer")) else "math"


def _read_math(fields: Fields) -> Content:
    """Keys may have any case (`Problem`, `Answer`)."""
    fields = {str(key).lower(): value for key, value in fields.items()}
    refuse_left_out(fields)
    question = text_of(fields, "problem" if fields.get("question") is None and "problem" in fields else "question")
    level = re.fullmatch(r"(?:Level )?(\d)", str(fields.get("level")))  # MATH's difficulty, 1 to 5; 0: there is none
    return question, answer_text(value_of(fields, "answer")), int(level[1]) if level else 0


def _read_gsm8k(fields: Fields) -> Content:
    """The size is the worked answer's number of lines."""
    refuse_left_out(fields)
    worked = text_of(fields, "answer")
    if GSM8K_MARK not in worked:
        raise BadRow(f"'answer' has no {GSM8K_MARK} before the number: {worked[-60:]!r}")
    lines = [line for line in worked.split(GSM8K_MARK)[0].splitlines() if line.strip()]
    return text_of(fields, "question"), answer_text(worked), len(lines)


def _read_verl(fields: Fields) -> Content | None:
    ability = fields.get("ability")
    if isinstance(ability, str) and not ability.lower().startswith("math"):
        return None
    refuse_left_out(fields, "prompt")
    reward_model = decoded_of(value_of(fields, "reward_model"))
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise BadRow(f"'reward_model' must be an object with 'ground_truth', not {shortened(reward_model)}")
    question = strip_wrapping(_user_turn(decoded_of(value_of(fields, "prompt"))))
    return question, answer_text(reward_model["ground_truth"]), 0


def _read_olympiadbench(fields: Fields) -> Content:
    context, unit = fields.get("context"), fields.get("unit")
    refuse_left_out({key: value for key, value in fields.items() if key != "context" or not isinstance(value, str)})
    parts = [context.strip()] if isinstance(context, str) and context.strip() else []
    parts.append(text_of(fields, "question" if "question" in fields else "problem"))
    if fields.get("is_multiple_answer") is True:
        parts.append("There is more than one answer: give all of them, separated by commas.")
    if isinstance(unit, str) and unit.strip():
        parts.append(f"The answer is in the unit {unit.strip()}; give the value alone.")
    answer = answer_text(value_of(fields, "answer" if "final_answer" not in fields else "final_answer"))
    answer = re.sub(r"\$\s*,\s*\$", "$, $", answer)  # with a space, two answers cannot be read as one number
    return "\n".join(parts), re.sub(r"(?<!\\)\$", "", answer).strip() or answer, 0


# Instructions around a question that contradict our prompts' layout.
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
    question = question.strip()
    for prefix, suffix in _WRAPPINGS:
        prefix, suffix = prefix.strip(), suffix.strip()
        if question.startswith(prefix) and question.endswith(suffix):
            question = question.removeprefix(prefix).removesuffix(suffix).strip()
    if not question:
        raise BadRow("the question is empty")
    return question


def has_system_turn(fields: Fields) -> bool:
    """Whether the `prompt` has a system turn that says something; the reader leaves it out."""
    prompt = decoded_of(fields.get("prompt"))
    turns = prompt if isinstance(prompt, list) else []
    return any(isinstance(m, dict) and m.get("role") == "system" and str(m.get("content") or "").strip() for m in turns)


def _user_turn(prompt: Any) -> str:
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    messages = [m for m in prompt if isinstance(m, dict)] if isinstance(prompt, list) else []
    turns = [m["content"] for m in messages if m.get("role") == "user" and "content" in m]
    others = [m for m in messages if m.get("role") not in ("user", "system")]
    if len(turns) > 1 or others:
        roles = ", ".join(str(m.get("role")) for m in messages)
        raise BadRow(f"'prompt' has the turns {roles}; a problem has one user turn: put the conversation into it")
    if not turns or not isinstance(turns[0], str):
        raise BadRow(f"'prompt' must be a list of chat messages with a user turn, not {shortened(prompt)}")
    return turns[0]


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
# Keys that identify a format, the most specific formats first; "math" is the fallback.
_TELLING_KEYS = {
    "tablebench": {"qtype", "table"},
    "cruxeval": {"code", "input", "output"},
    "bgqa": {"example", "label"},
    "strategyqa": {"facts", "question", "answer"},
    "verl": {"prompt", "reward_model"},
    "olympiadbench": {"question", "final_answer"},
}
