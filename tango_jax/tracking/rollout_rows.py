"""JSON objects for rollouts/*.jsonl: one per trained response of a turn, or per problem of an evaluation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from tango_jax.grading.steps import find_blocks
from tango_jax.records import Lesson, Problem, Rewards, Solution, TurnResult, Verification, problem_of
from tango_jax.rl.rewards import SOFT_STEP_FORMULA, STEP_FORMULA
from tango_jax.rl.schedule import Place

# (problem, steps) -> the kind of each step, see Task.step_kinds; None: the task names none.
StepKinds = Callable[[Problem, tuple[str, ...]], tuple[str, ...]] | None


def turn_rows(
    config: ConfigDict, place: Place, result: TurnResult, formula: str = "", step_kinds_fn: StepKinds = None
) -> list[dict]:
    """Every rollout of a turn. `formula`: the outcome advantage. A second try stands in the row of the first, and so do
    others after it ("later_tries")."""
    items = _items(result, step_kinds_fn)
    learner, reward = result.lesson.responses, result.lesson.reward
    trained = {id(record) for record in learner}
    later: dict[int, list[int]] = {}  # by the try before
    for b, record in enumerate(learner):
        if _is_later_try(record, trained):
            later.setdefault(id(record.after.of), []).append(b)

    def tries_after(record: Any) -> Iterator[dict]:
        for b in later.get(id(record), ()):
            yield items.of(learner[b]) | {"reward": _reward(reward, b), "advantage": _advantage(result, b)}
            yield from tries_after(learner[b])

    mask_overlong, rows = config[place.role].loss.mask_overlong, []
    for number, members in enumerate(learner.groups()):
        group = _group(reward.reward_B[members])
        firsts = [b for b in members if not _is_later_try(learner[b], trained)]
        for sample, b in enumerate(firsts):
            record = learner[b]
            row = group | _content(record, b, items, result.lesson)
            row |= {"reward": _reward(reward, b), "formula": formula, "advantage": _advantage(result, b)}
            if tries := list(tries_after(record)):
                row |= {"second_try": tries[0]} | ({"later_tries": tries[1:]} if tries[1:] else {})
            row["notes"] = _notes(row, mask_overlong and record.is_truncated)
            rows.append({"group": number, "sample": sample} | row)
    place_of = {
        "turn": place.index + 1,  # as `step` in metrics.jsonl
        "role": place.role, "phase": place.phase, "generator_step": place.generator_step, "rows_in_turn": len(rows),
    }
    return [place_of | {"row": b} | row for b, row in enumerate(rows)]


class _Items:
    def __init__(self, step_kinds_fn: StepKinds):
        self._step_kinds_fn, self._about = step_kinds_fn, {}

    def add(self, record: Solution | Verification, name: str) -> None:
        if isinstance(record, Verification):
            # A user's method may judge solutions with a prompt of another name.
            kind = "verifier" if isinstance(record.of, Solution) else name
            self._about.setdefault((kind, id(record.of)), []).append(record)

    def of(self, record: Solution | Verification) -> dict:
        return _verification(record) if isinstance(record, Verification) else _solution(record, self._step_kinds_fn)

    def about(self, record: Any, name: str) -> list[dict]:
        return [self.of(one) for one in self._about.get((name, id(record)), ())]


def _items(result: TurnResult, step_kinds_fn: StepKinds) -> _Items:
    items = _Items(step_kinds_fn)
    for responses in (*result.sampled, result.lesson.responses):
        for record in responses.records:
            items.add(record, responses.name)
    return items


def _is_later_try(record: Solution | Verification, trained: set[int]) -> bool:
    earlier = getattr(record, "after", None)
    return isinstance(earlier, Verification) and id(earlier.of) in trained


def _content(record: Solution | Verification, b: int, items: _Items, lesson: Lesson) -> dict:
    content = {"problem": _problem(problem_of(record))}
    if isinstance(record, Solution):
        # One list per verification (or of the task's labels); null without step rewards.
        steps = [None if (one := rewards.of_steps[b]) is None else _numbers(one) for rewards in lesson.step_rewards]
        is_soft = any(rewards.y_BT is not None for rewards in lesson.step_rewards)
        formula = (SOFT_STEP_FORMULA if is_soft else STEP_FORMULA).format(num_steps=len(record.steps))
        return content | {"solution": items.of(record), "verifications": items.about(record, "verifier"),
                          "step_rewards": steps, "step_formula": formula}
    # A user's verifier may judge several solutions at once, or something else.
    content |= {"solution": items.of(record.of) if isinstance(record.of, Solution) else None,
                "verifications": [items.of(record)], "step_rewards": [], "step_formula": ""}
    second = items.about(record, "second_judgement")
    return content | ({"second_judgement": second[0]} if second else {})


def evaluation_rows(
    turns_done: int, generator_step: int, solutions: Sequence[Solution], verifications: Sequence[Verification],
    second_tries: Mapping[int, Solution], step_kinds_fn: StepKinds = None,
) -> list[dict]:
    """A row for every problem of a greedy evaluation. `second_tries`: by the place of the solution."""
    return [
        {"turn": turns_done, "row": b, "rows_in_turn": len(solutions), "role": "evaluation", "phase": "eval"}
        | {"generator_step": generator_step, "group": b, "sample": 0, "group_rewards": []}
        | {"problem": _problem(solution.problem), "solution": _solution(solution, step_kinds_fn)}
        | {"verifications": [_verification(verification)], "step_rewards": [], "reward": None, "advantage": None}
        | ({"second_try": _solution(second_tries[b], step_kinds_fn)} if b in second_tries else {})
        for b, (solution, verification) in enumerate(zip(solutions, verifications, strict=True))
    ]


def _group(reward_M: np.ndarray) -> dict:
    """The rewards of a group, second tries last, with mean and std (ddof=1) where there are several."""
    is_alone = len(reward_M) == 1
    return {"group_rewards": [_number(value) for value in reward_M],
            "group_mean": None if is_alone else _number(reward_M.mean(dtype=np.float64)),
            "group_std": None if is_alone else _number(reward_M.std(ddof=1, dtype=np.float64))}


# Under rl.judge and rl.trust; or a task has no gold labels for these steps.
NO_LABEL_COUNTS = "the steps were not judged, or their labels do not count"


def _notes(row: dict, is_masked: bool) -> list[str]:
    notes = []
    if is_masked:
        notes.append("The response was cut off, and is masked out of the loss (mask_overlong).")
    if row["step_rewards"] and not any(row["step_rewards"]):
        judged = row["verifications"]
        is_misaligned = judged and not any(one["is_aligned"] for one in judged)
        notes.append(f"No step has a reward: {'no labels match the steps' if is_misaligned else NO_LABEL_COUNTS}.")
    return notes


def _reward(reward: Rewards, b: int) -> dict:
    terms = [{"name": term.name, "weight": _weight(term.weight, b), "value": _number(term.value[b])}
             for term in reward.terms]
    return {"total": _number(reward.reward_B[b]), "terms": terms}


def _weight(weight: float | np.ndarray, b: int) -> float:
    return _number(weight if np.ndim(weight) == 0 else weight[b])


def _problem(problem: Problem) -> dict:
    return {"id": problem.id, "question": problem.question, "answer": problem.answer, "size": problem.size}


def _solution(solution: Solution, step_kinds_fn: StepKinds) -> dict:
    further = {"step_kinds": list(step_kinds_fn(solution.problem, solution.steps))} if step_kinds_fn else {}
    if isinstance(solution.after, Verification):
        further["after_verdict"] = solution.after.verdict
    return {
        "text": solution.text,
        "steps": [list(span) for span in find_blocks(solution.text, "step")],  # characters, tags included
        "step_ends": list(solution.step_ends),  # tokens
        "gold_steps": None if solution.gold_steps is None else list(solution.gold_steps),
        "is_correct": solution.is_correct,
        "format": solution.format_score,
        "tokens": len(solution.token_ends),
        "is_truncated": solution.is_truncated,
    } | further


def _verification(verification: Verification) -> dict:
    return {
        "text": verification.text,
        "blocks": block_spans(verification.text),  # characters, tags included
        "judgements": list(verification.judgements),
        "verdict": verification.verdict,
        "is_aligned": verification.is_aligned,
        "format": verification.format_score,
        "tokens": len(verification.token_ends),
        "is_truncated": verification.is_truncated,
    } | ({"p_steps": _numbers(verification.p_steps)} if verification.p_steps else {})


def block_spans(text: str) -> list[list[int]]:
    opening, closing = "<step_verification>", "</step_verification>"
    start = text.find(opening)
    end = text.find(closing, start + len(opening))
    if start < 0 or end < 0:
        return []
    offset = start + len(opening)
    return [[offset + first, offset + last] for first, last in find_blocks(text[offset:end], "step")]


def _advantage(result: TurnResult, b: int) -> dict:
    """Run-length encoded: [tokens, value] of each term; [tokens, value, end in characters] of the weighted sum."""
    token_ends = result.lesson.responses[b].token_ends
    length = len(token_ends)
    total, tokens = [], 0
    for count, value in _runs(result.adv_BT[b, :length]):
        tokens += count
        total.append([count, value, token_ends[tokens - 1]])
    terms = [{"name": name, "weight": _weight(weight, b), "runs": _runs(value_BT[b, :length])}
             for name, (weight, value_BT) in result.lesson.terms.items()]
    return {"total": total, "terms": terms}


def _runs(values_T: np.ndarray) -> list[list]:
    edges = [0, *(np.flatnonzero(np.diff(values_T)) + 1).tolist(), len(values_T)]
    return [[last - first, _number(values_T[first])] for first, last in pairwise(edges) if last > first]


def _numbers(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else _number(value) for value in values]


def _number(value: float) -> float:
    return float(f"{float(value):.6g}")
