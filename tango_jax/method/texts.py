"""Texts of both roles: prompts to token ids, and sampled tokens to parsed records."""

import dataclasses
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from tango_jax.grading import parse_solution, parse_verification
from tango_jax.records import Problem, Rollout, Solution, Verification, problem_of
from tango_jax.rl.policy import Policy
from tango_jax.tasks.task import Task
from tango_jax.text.marks import of_judgements, sampled_probabilities
from tango_jax.text.prompts import Prompt, prompt_ids
from tango_jax.text.templates import PromptTooLong, judged_by_scores
from tango_jax.text.tokenizer import Tokenizer, token_of_character


def build_prompts(policy: Policy, prompt: Prompt, parents: Sequence) -> tuple[list[list[int]], list[bool]]:
    """Also whether the end of its text was cut off. Raises ValueError in every process: a prompt is too long even
    without it."""
    try:
        built = [prompt_ids(prompt, policy.template, policy.tokenizer, one, policy.config.max_prompt)
                 for one in parents]
    except PromptTooLong as error:
        raise ValueError(f"{error}; a workdir keeps its max_prompt, so to raise it choose a new --workdir") from error
    return [ids for ids, _ in built], [is_cut for _, is_cut in built]


def read_responses(
    prompt: Prompt, task: Task, tokenizer: Tokenizer, owners: Sequence, rollout: Rollout,
    stops: bool = False, needs_probabilities: bool = False,
) -> list[Solution] | list[Verification]:
    """Parse the responses of this process: records without their parents and grades (`with_parents`).
    `stops`: see `parse_verification`. `needs_probabilities`: verifications have `p_steps`."""
    decoded = [tokenizer.decode_with_ends(tokens) for tokens in rollout.tokens]
    rows = zip(owners, decoded, rollout.is_truncated_B, strict=True)
    if prompt.role == "verifier":
        said = [make_verification(parent, text, ends, is_cut, stops) for parent, (text, ends), is_cut in rows]
        if not needs_probabilities:
            return said
        sampled = zip(said, rollout.tokens, decoded, rollout.logps, strict=True)
        return [
            dataclasses.replace(one, p_steps=of_judgements(
                sampled_probabilities(tokenizer, tokens, text, ends, logps), one.judgements))
            for one, tokens, (text, ends), logps in sampled
        ]
    return [make_solution(task, problem_of(parent), text, ends, False, is_cut) for parent, (text, ends), is_cut in rows]


def with_parents(records: Sequence, owners: Sequence, grades: Sequence | None = None) -> list:
    """`grades` of solutions: bools, or functions without arguments that return one; None: they have theirs."""
    return [
        dataclasses.replace(record, of=owner) if isinstance(record, Verification)
        else dataclasses.replace(record, problem=problem_of(owner), after=None if isinstance(owner, Problem) else owner,
                                 is_correct=record.is_correct if grades is None else grades[row])
        for row, (record, owner) in enumerate(zip(records, owners, strict=True))
    ]


def make_solution(
    task: Task, problem: Problem, text: str, ends: Sequence[int], is_correct: bool, is_truncated: bool = False
) -> Solution:
    """`ends`: the number of characters complete after each token."""
    parsed = parse_solution(text, task.min_steps)
    return Solution(
        problem=problem,
        text=text,
        steps=parsed.steps,
        step_ends=tuple(token_of_character(ends, end - 1) for _, end in parsed.step_spans),
        format_score=parsed.format_score,
        is_correct=bool(is_correct),
        gold_steps=task.gold_steps(problem, parsed.steps) if task.gold_steps else None,
        token_ends=array("i", ends),
        is_truncated=bool(is_truncated),
    )


def make_verification(
    judged: Any, text: str, ends: Sequence[int], is_truncated: bool, stops: bool = False
) -> Verification:
    """Parse a verification of a solution; of anything else no steps are expected. `stops`: see `parse_verification`."""
    steps = judged.steps if isinstance(judged, Solution) else getattr(judged, "blocks", ())
    parsed = parse_verification(text, len(steps), getattr(judged, "format_score", 1.0), stops)
    return Verification(
        text=text,
        judgements=parsed.judgements,
        verdict=parsed.verdict,
        format_score=parsed.format_score,
        is_aligned=parsed.aligned,
        blocks=parsed.blocks,
        token_ends=array("i", ends),
        is_truncated=bool(is_truncated),
    )


def scored_verification(solution: Solution, p_steps: Sequence[float]) -> Verification:
    """The judgements of a process reward model, which writes nothing: the text is made of its probabilities."""
    made = make_verification(solution, judged_by_scores(p_steps, len(solution.steps)), (), is_truncated=False)
    return dataclasses.replace(made, p_steps=tuple(p_steps))


def rollout_metrics(name: str, rollout: Rollout, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    length_B = np.array([len(tokens) for tokens in rollout.tokens])
    metrics = {
        f"{name}/length_mean": length_B.mean(),
        f"{name}/length_max": length_B.max(),
        f"{name}/truncation_rate": rollout.is_truncated_B.mean(),
    }
    if rollout.others is not None:  # each prompt and its marks were read once, whatever was drawn from them
        read = sum(map(len, prompts)) + length_B[:: len(length_B) // len(prompts)].sum()
        return metrics | {f"{name}/tokens_sampled": 0, f"{name}/tokens_scored": read}
    return metrics | {
        f"{name}/tokens_sampled": length_B.sum(),
        f"{name}/decode_waste": 1.0 - length_B.sum() / rollout.row_steps if rollout.row_steps else 0.0,
    }
