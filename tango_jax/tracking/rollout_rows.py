"""One turn's rollouts as self-contained JSON objects, from the question to the advantages.

Takes the turn's place in the schedule and its TurnResult, and returns one dict per response of the role that is
updated, prompt-major; of an evaluation, one dict per problem. Runs after a turn, before rollout_dump.py writes the rows
to rollouts/*.jsonl, which `tango_jax.report` reads.
"""

import string
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from ml_collections import ConfigDict

from tango_jax.grading.steps import find_blocks
from tango_jax.records import Credit, Problem, Rewards, Solution, Term, TurnResult, Verification
from tango_jax.rl.algorithms import algorithm_of
from tango_jax.rl.credit import step_reward_BT
from tango_jax.rl.family import groups_with_second
from tango_jax.rl.schedule import Turn

# (problem, steps) -> the kind of each step, see Task.step_kinds; None: the task names none.
StepKinds = Callable[[Problem, tuple[str, ...]], tuple[str, ...]] | None
# A character stands for its place, 0 to 63, in the codes that the report's page reads (viewer/paint.js).
ALPHABET = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"


def turn_rows(config: ConfigDict, turn: Turn, result: TurnResult, step_kinds_fn: StepKinds = None) -> list[dict]:
    """Return every rollout of a turn. `result` holds the whole batch."""
    dicts = {
        "generator": [_solution(solution, step_kinds_fn) for solution in result.solutions],
        "verifier": [_verification(verification) for verification in result.verifications or ()],
    }
    for name, responses in result.answers.items():
        if name not in dicts:  # a second try or a second judgement
            item_of = _solution_of(step_kinds_fn) if responses.role == "generator" else _verification
            dicts[name] = [item_of(record) for record in responses.records]
    for name, responses in result.answers.items():
        for item, record, logp_T in zip(dicts[name], responses.records, responses.rollout.logps, strict=True):
            item |= {"token_lengths": lengths_code(record.token_ends), "token_surprise": surprise_code(logp_T)}
    make_rows = _generator_rows if turn.role == "generator" else _verifier_rows
    rows = make_rows(result, dicts["generator"], dicts["verifier"])
    _add_further(rows, result, dicts)
    loss, learner = config[turn.role].loss, result.answers[turn.role]
    formula, M = algorithm_of(loss.algorithm).formula, learner.group_size
    learners, second = learner.records, result.answers.get("second_solution")
    groups = [_group(rewards) for rewards in groups_with_second(result.reward.reward_B, learner, second)]
    return [
        {
            "turn": turn.index + 1,  # as `step` in metrics.jsonl
            "row": b,
            "rows_in_turn": len(rows),
            "role": turn.role,
            "phase": turn.phase,
            "generator_step": turn.generator_step,
            "group": b // M,
            "sample": b % M,
        }
        | groups[b // M]
        | row
        | {"reward": _reward(result.reward, b), "formula": formula}
        | {"advantage": _advantage(result.credit, b, record.token_ends)}
        | {"notes": _notes(row, loss.mask_overlong and record.is_truncated)}
        for b, (row, record) in enumerate(zip(rows, learners, strict=True))
    ]


def _add_further(rows: list[dict], result: TurnResult, dicts: dict[str, list[dict]]) -> None:
    """Add to the rows of a turn the second try or the second judgement that followed each."""
    if second := result.answers.get("second_solution"):
        firsts = len(rows)  # their rewards and advantages come before those of second tries
        for number, (place, item) in enumerate(zip(second.places, dicts["second_solution"], strict=True)):
            b = firsts + number
            advantage = _advantage(result.credit, b, second.records[number].token_ends)
            rows[place]["second_solution"] = item | {"reward": _reward(result.reward, b), "advantage": advantage}
    for row, item in zip(rows, dicts.get("second_judgement", ()), strict=False):
        row["second_judgement"] = item


def evaluation_rows(
    turns_done: int, generator_step: int, solutions: Sequence[Solution], verifications: Sequence[Verification],
    second_tries: Mapping[int, Solution], step_kinds_fn: StepKinds = None,
) -> list[dict]:  # fmt: skip
    """Return a row for every problem of an evaluation after `turns_done` turns, which is greedy and has no rewards;
    `second_tries`: those there are, by the place of the solution."""
    return [
        {"turn": turns_done, "row": b, "rows_in_turn": len(solutions), "role": "evaluation", "phase": "eval"}
        | {"generator_step": generator_step, "group": b, "sample": 0, "group_rewards": []}
        | {"problem": _problem(solution), "solution": _solution(solution, step_kinds_fn)}
        | {"verifications": [_verification(verification)], "step_rewards": [], "reward": None, "advantage": None}
        | ({"second_solution": _solution(second_tries[b], step_kinds_fn)} if b in second_tries else {})
        for b, (solution, verification) in enumerate(zip(solutions, verifications, strict=True))
    ]


def _generator_rows(result: TurnResult, written: list[dict], said: list[dict]) -> list[dict]:
    """The rows of a generator turn, with its solutions and verifications as they are `written` and `said`."""
    solutions, credit = result.solutions, result.credit
    said_of: dict[int, list[dict]] = {b: [] for b in range(len(solutions))}
    if judged := result.answers.get("verifier"):
        places = range(len(solutions)) if judged.places is None else judged.places
        for index, item in enumerate(said):
            said_of[places[index // judged.group_size]].append(item)
    steps_by_label = [
        step_reward_BT(labels, [solution.step_ends for solution in solutions], credit.adv_BT.shape[1])
        for labels in credit.labels or ()
    ]
    return [
        {"problem": _problem(solution), "solution": written[b], "verifications": said_of[b]}
        # One list per verification of the solution (or of the task's labels), y_k / K each; null without step rewards.
        | {"step_rewards": [_step_rewards(labels[b]) if is_end_BT[b].any() else None
                            for labels, (_, is_end_BT) in zip(credit.labels or (), steps_by_label, strict=True)]}
        | {"step_formula": f"±1 / K, K = {len(solution.step_ends)}"}
        for b, solution in enumerate(solutions)
    ]  # fmt: skip


def _verifier_rows(result: TurnResult, written: list[dict], said: list[dict]) -> list[dict]:
    """The rows of a verifier turn; see `_generator_rows`."""
    rows, judged = [], result.answers["verifier"]
    for b, verification in enumerate(said):
        parent = b // judged.group_size
        place = parent if judged.places is None else judged.places[parent]  # of the solution that it judges
        rows.append({"problem": _problem(result.solutions[place]), "solution": written[place],
                     "verifications": [verification], "step_rewards": [], "step_formula": ""})  # fmt: skip
    return rows


def _group(reward_M: np.ndarray) -> dict:
    """The rewards of a group, those of second tries last, with their mean and std (ddof=1); a response that is alone in
    its group has neither."""
    is_alone = len(reward_M) == 1
    return {"group_rewards": [_number(value) for value in reward_M],
            "group_mean": None if is_alone else _number(reward_M.mean(dtype=np.float64)),
            "group_std": None if is_alone else _number(reward_M.std(ddof=1, dtype=np.float64))}  # fmt: skip


def _notes(row: dict, is_masked: bool) -> list[str]:
    """What a reader of the advantages has to know besides."""
    notes = []
    if is_masked:
        notes.append("The response was cut off, and is masked out of the loss (mask_overlong).")
    if row["step_rewards"] and not any(row["step_rewards"]):
        notes.append("No step has a reward: no labels match the steps.")
    return notes


def _reward(reward: Rewards, b: int) -> dict:
    """The reward of a response, and the terms weight x value that it is the sum of, by their names."""
    terms = [{"name": term.name, "weight": _weight(term, b), "value": _number(term.value[b])}
             for term in reward.terms]  # fmt: skip
    return {"total": _number(reward.reward_B[b]), "terms": terms}


def _weight(term: Term, b: int) -> float:
    return _number(term.weight if np.ndim(term.weight) == 0 else term.weight[b])


def _problem(solution: Solution) -> dict:
    problem = solution.problem
    return {"id": problem.id, "question": problem.question, "answer": problem.answer, "size": problem.size}


def _solution(solution: Solution, step_kinds_fn: StepKinds) -> dict:
    kinds = {"step_kinds": list(step_kinds_fn(solution.problem, solution.steps))} if step_kinds_fn else {}
    return {
        "text": solution.text,
        "steps": [list(span) for span in find_blocks(solution.text, "step")],  # characters, tags included
        "step_ends": list(solution.step_ends),  # tokens
        "gold_steps": None if solution.gold_steps is None else list(solution.gold_steps),
        "is_correct": solution.is_correct,
        "format": solution.format_score,
        "tokens": len(solution.token_ends),
        "is_truncated": solution.is_truncated,
    } | kinds


def _solution_of(step_kinds_fn: StepKinds) -> Callable[[Solution], dict]:
    return lambda solution: _solution(solution, step_kinds_fn)


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
    }


def block_spans(text: str) -> list[list[int]]:
    """Character spans of the blocks that the parser reads: those of the first closed section."""
    opening, closing = "<step_verification>", "</step_verification>"
    start = text.find(opening)
    end = text.find(closing, start + len(opening))
    if start < 0 or end < 0:
        return []
    offset = start + len(opening)
    return [[offset + first, offset + last] for first, last in find_blocks(text[offset:end], "step")]


def _step_rewards(labels: Sequence[bool]) -> list[float]:
    return [_number((1.0 if label else -1.0) / len(labels)) for label in labels]


def _advantage(credit: Credit, b: int, token_ends: Sequence[int]) -> dict:
    """Run-length encoded advantages: [tokens, value] of each term, whose sum by `weight` is the total.

    `total`, which the update uses, has [tokens, value, characters], the last being the text offset at the end of the
    run.
    """
    length = len(token_ends)
    total, tokens = [], 0
    for count, value in _runs(credit.adv_BT[b, :length]):
        tokens += count
        total.append([count, value, token_ends[tokens - 1]])
    terms = [{"name": term.name, "weight": _weight(term, b), "runs": _runs(term.value[b, :length])}
             for term in credit.terms]  # fmt: skip
    return {"total": total, "terms": terms}


def _runs(values_T: np.ndarray) -> list[list]:
    """Run-length encode: step advantages change only at step ends, so a few pairs replace T numbers."""
    edges = [0, *(np.flatnonzero(np.diff(values_T)) + 1).tolist(), len(values_T)]
    return [[last - first, _number(values_T[first])] for first, last in pairwise(edges) if last > first]


def surprise_code(logp_T: np.ndarray) -> str:
    """The `token_surprise` of log-probs: a character a token, -log p in tenths of a nat, at most 63."""
    levels = np.clip(np.rint(-np.asarray(logp_T, float) / 0.1), 0, len(ALPHABET) - 1).astype(int)
    return "".join(ALPHABET[level] for level in levels)


def lengths_code(token_ends: Sequence[int]) -> str:
    """The `token_lengths` of a response, from the number of characters complete after each token: a character a token;
    63 is followed by a further one, to which it is added."""
    lengths, most = np.diff(token_ends, prepend=0).tolist(), len(ALPHABET) - 1
    return "".join(ALPHABET[most] * (length // most) + ALPHABET[length % most] for length in lengths)


def _number(value: float) -> float:
    """Round to six significant digits: about float32 precision, in half the characters."""
    return float(f"{float(value):.6g}")
