"""Stage-1 text of both roles from the worked answers of GSM8K, for runs without a teacher.

An answer repeats every computation, as in `She sold 48/2 = <<48/2=24>>24 clips.`, and ends with `#### 72`.
"""

import re
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from tango_jax.data.row_fields import GSM8K_MARK, answer_text
from tango_jax.tasks.arithmetic import has_short_decimals, number_text, numbers_in, replace_numbers, value_of
from tango_jax.text.templates import judged

_MARK = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")  # expression, value
_OPERATION = re.compile(r"[\d)]\s*[-+*/]")


class VerifierExample(NamedTuple):
    solution: str
    verification: str
    is_right: tuple[bool, ...]  # one per step


class _Worked(NamedTuple):
    lines: tuple[str, ...]  # including the calculator's marks
    answer: str


def gsm8k_solution_text(row: dict[str, Any]) -> str:
    return _solution_text(_worked(row))


def gsm8k_verifier_example(row: dict[str, Any], seed: int, index: int) -> VerifierExample:
    """A solution, half the time with one wrong step, and its verification; deterministic in (row, seed, index).

    Later steps continue with the wrong number and count as correct. The final answer is wrong, so the verdict equals
    the grade. A row into which no such mistake fits stays correct.
    """
    rng = np.random.default_rng((seed, index))
    worked, wrong_position, remarks = _worked(row), None, {}
    if rng.random() < 0.5:
        for position in map(int, rng.permutation(len(worked.lines))):
            mistaken = _with_mistake(worked, position, row["question"], rng)
            if mistaken is not None:
                mark, wrong = _result_mark(worked.lines[position]), _result_mark(mistaken.lines[position])
                remarks = {position: f"{mark[1].strip()} = {mark[2].strip()}, not {wrong[2].strip()}."}
                worked, wrong_position = mistaken, position
                break
    is_right = tuple(position != wrong_position for position in range(len(worked.lines)))
    for position, line in enumerate(worked.lines):
        mark = _result_mark(line)
        remarks.setdefault(position, "This holds." if mark is None else f"{mark[1].strip()} = {mark[2].strip()}.")
    verification = judged([remarks[position] for position in range(len(is_right))], is_right, end="\n")
    return VerifierExample(_solution_text(worked), verification, is_right)


def _worked(row: dict[str, Any]) -> _Worked:
    lines = row["answer"].rsplit(GSM8K_MARK, 1)[0].splitlines()
    return _Worked(tuple(line.strip() for line in lines if line.strip()), answer_text(row["answer"]))


def _solution_text(worked: _Worked) -> str:
    steps = "".join(f"<step>{_MARK.sub('', line)}</step>\n" for line in worked.lines)
    return f"<think>\n{steps}</think>\n<answer>\\boxed{{{worked.answer}}}</answer>"


def _result_mark(line: str) -> re.Match | None:
    """The last computation of the line, or None; `<<24=24>>` is none."""
    marks = [mark for mark in _MARK.finditer(line) if _OPERATION.search(mark[1])]
    return marks[-1] if marks else None


def _with_mistake(worked: _Worked, position: int, question: str, rng: np.random.Generator) -> _Worked | None:
    """Carries a wrong result through to the answer; None if that is impossible."""
    mark = _result_mark(worked.lines[position])
    value = None if mark is None else value_of(mark[2])
    if value is None or value <= 0 or value_of(mark[1]) != value:
        return None
    # A number that also occurs with another meaning would be replaced in the wrong places.
    known = {*numbers_in(question), *(number for line in worked.lines[:position] for number in numbers_in(line))}
    if position + 1 < len(worked.lines) and value in known:
        return None
    for wrong in rng.permutation([value + 1, value - 1, value + 2, value + 10, value - 10, value * 2, value / 2]):
        mistaken = _carry_on(worked, position, value, wrong, known) if wrong > 0 and has_short_decimals(wrong) else None
        if mistaken is not None:
            return mistaken
    return None


def _carry_on(
    worked: _Worked, position: int, value: Fraction, wrong: Fraction, known: set[Fraction]
) -> _Worked | None:
    changed = {value: wrong}
    head, mark = worked.lines[position], _result_mark(worked.lines[position])
    rest = replace_numbers(head[mark.end() :], changed)
    if rest == head[mark.end() :]:
        return None
    lines = [*worked.lines[:position], f"{head[: mark.start()]}<<{mark[1]}={number_text(wrong)}>>{rest}"]
    for later in worked.lines[position + 1 :]:
        line = _recomputed(later, changed, known)
        if line is None:
            return None
        lines.append(line)
    answer = replace_numbers(worked.answer, changed)
    return None if answer == worked.answer else _Worked(tuple(lines), answer)


def _recomputed(line: str, changed: dict[Fraction, Fraction], known: set[Fraction]) -> str | None:
    """Adds results to `changed`; None if the line is ambiguous."""
    parts, end = [], 0
    for mark in _MARK.finditer(line):
        parts.append(replace_numbers(line[end : mark.start()], changed))
        expression, value, end = replace_numbers(mark[1], changed), value_of(mark[2]), mark.end()
        result = value_of(expression) if expression != mark[1] else value
        if value is None or result is None or result <= 0:
            return None
        if not has_short_decimals(result) or not has_short_decimals(value):
            return None
        if value_of(mark[1]) != value or changed.get(value, result) != result:
            return None
        if result != value:
            if value in known:
                return None
            changed[value] = result
        parts.append(f"<<{expression}={number_text(result)}>>")
    return "".join([*parts, replace_numbers(line[end:], changed)])
