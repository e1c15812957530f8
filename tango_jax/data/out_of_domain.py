"""Row readers for the evaluation sets outside mathematics: facts, code, tables or choices go into the question."""

from collections.abc import Sequence
from typing import Any

from tango_jax.data.row_fields import BadRow, Content, Fields, answer_text, decoded_of, shortened, text_of, value_of


def read_bgqa(fields: Fields) -> Content:
    answers = {"proved": "True", "disproved": "False", "unknown": "Uncertain"}
    label = text_of(fields, "label")
    if label not in answers:
        raise BadRow(f"'label' is {label!r}; it must be one of {', '.join(answers)}")
    request = (
        "Answer True if the game state, the rules and the preferences prove it, False if they disprove it, and "
        "Uncertain if they do neither."
    )
    return f"{text_of(fields, 'example')}\n{request}", answers[label], 0


def read_cruxeval(fields: Fields) -> Content:
    arguments = text_of(fields, "input", may_be_empty=True)
    question = f"Here is a Python function.\n\n{text_of(fields, 'code')}\n\nWhat does f({arguments}) return?"
    return f"{question} Answer with a Python literal.", text_of(fields, "output"), 0


def read_strategyqa(fields: Fields) -> Content:
    facts, answer = value_of(fields, "facts"), value_of(fields, "answer")
    if not isinstance(facts, list) or not all(isinstance(fact, str) for fact in facts):
        raise BadRow(f"'facts' must be a list of sentences, not {shortened(facts)}")
    if not isinstance(answer, bool):
        raise BadRow(f"'answer' must be true or false, not {shortened(answer)}")
    known = "\n".join(fact.strip() for fact in facts)
    question = f"Facts:\n{known}\n\nQuestion: {text_of(fields, 'question')} Answer True for yes or False for no."
    return question, str(answer), len(facts)


def read_tablebench(fields: Fields) -> Content | None:
    """None for rows that ask for an analysis or a chart."""
    if text_of(fields, "qtype") not in ("NumericalReasoning", "FactChecking"):
        return None
    table = decoded_of(value_of(fields, "table"))
    if not isinstance(table, dict) or not all(isinstance(table.get(key), list) for key in ("columns", "data")):
        raise BadRow(f"'table' must hold the lists 'columns' and 'data', not {shortened(table)}")
    if not all(isinstance(line, list) for line in table["data"]):
        raise BadRow("'data' of the table must be a list of lists")
    question = f"{markdown_table(table['columns'], table['data'])}\n\n{text_of(fields, 'question')}"
    question += " Answer with the value alone; separate several values by commas."
    return question, answer_text(value_of(fields, "answer")), len(table["data"])


def markdown_table(columns: Sequence[Any], lines: Sequence[Sequence[Any]]) -> str:
    head = [_line(columns), _line(["---"] * len(columns))]
    return "\n".join([*head, *(_line(line) for line in lines)])


def _line(cells: Sequence[Any]) -> str:
    texts = ("" if cell is None else " ".join(str(cell).split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(texts)} |"
