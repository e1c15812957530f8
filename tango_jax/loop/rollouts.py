"""One call of a turn: a role responds to problems or solutions; out come parsed, graded records.

Stage: the first half of a turn, and all of an evaluation. Every process does its share of the work, and all of them
get the whole result.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from tango_jax.grading import FAILURES, grade_many, parse_solution, parse_verification
from tango_jax.loop.breakdown import Broken
from tango_jax.records import Problem, Responses, Rollout, Solution, States, Verification
from tango_jax.rl.policy import Policy
from tango_jax.runtime import hosts
from tango_jax.runtime.timers import PhaseTimer
from tango_jax.tasks.task import Task
from tango_jax.text.templates import generator_prompt, verifier_prompt
from tango_jax.text.tokenizer import token_of_character


@dataclasses.dataclass(frozen=True)
class RunContext:
    """What every turn reads: built once, never changed."""

    config: ConfigDict
    task: Task
    policies: dict[str, Policy]  # by role
    references: dict  # role -> parameters that its KL is measured against
    timer: PhaseTimer


@dataclasses.dataclass(frozen=True)
class RoleText:
    """What sets a role apart from the other: what it is asked, and how its words are read."""

    prompts: Callable  # (policy, parents) -> (token ids of each prompt, {count: value over all parents})
    read: Callable  # (context, parents of this process, rollout, group_size) -> (records, {count: value to be summed})
    sample_phase: str  # names in the timer
    read_phase: str


def respond(
    context: RunContext,
    states: States,
    role: str,
    parents: Sequence,
    group_size: int,
    key_data: np.ndarray,
    is_greedy: bool = False,
) -> Responses:
    """`group_size` responses of a role to each parent, sampled or greedy.

    Raises:
        Broken: in every process, if the logits of any were not finite.
    """
    policy, text, timer = context.policies[role], ROLE_TEXTS[role], context.timer
    first, last = hosts.own_range(len(parents))
    with timer(text.sample_phase):
        prompts, counts = text.prompts(policy, parents)
        own = prompts[first:last]
        rollout = _sample(context, policy, states[role].params, own, len(parents), group_size, key_data, is_greedy)
    with timer(text.read_phase):
        records, own_counts = text.read(context, parents[first:last], rollout, group_size)
    records, rollout = hosts.gather(records), _gather_rollout(rollout)
    for one in hosts.gather([own_counts]):
        counts = {name: counts.get(name, 0) + one.get(name, 0) for name in (*counts, *one)}
    return Responses(role, parents, prompts, group_size, rollout, records, _rollout_metrics(role, rollout) | counts)


def _generator_prompts(policy: Policy, problems: Sequence[Problem]) -> tuple[list[list[int]], dict]:
    return [generator_prompt(policy.template, policy.tokenizer, problem) for problem in problems], {}


def _verifier_prompts(policy: Policy, solutions: Sequence[Solution]) -> tuple[list[list[int]], dict]:
    """A solution that is too long for the prompt loses its end, and is counted."""
    limit = policy.config.max_prompt
    built = [
        verifier_prompt(policy.template, policy.tokenizer, s.problem, s.text, len(s.steps), limit) for s in solutions
    ]
    shortened = sum(is_shortened for _, is_shortened in built)
    counts = {"verifier/prompts_shortened": shortened, "verifier/shortened_rate": shortened / len(solutions)}
    return [ids for ids, _ in built], counts


def _read_solutions(context: RunContext, problems: Sequence[Problem], rollout: Rollout, group_size: int):
    task, tokenizer = context.task, context.policies["generator"].tokenizer
    owners = [problem for problem in problems for _ in range(group_size)]
    decoded = [tokenizer.decode_with_ends(tokens) for tokens in rollout.tokens]
    report = grade_many([text for text, _ in decoded], [problem.answer for problem in owners], task.grade_kind)
    solutions = [
        make_solution(task, problem, text, ends, is_correct, is_truncated)
        for problem, (text, ends), is_correct, is_truncated in zip(
            owners, decoded, report.correct, rollout.is_truncated_B, strict=True
        )
    ]
    return solutions, {f"grader/{name}": getattr(report, name) for name in FAILURES}


def make_solution(
    task: Task, problem: Problem, text: str, ends: Sequence[int], is_correct: bool, is_truncated: bool = False
) -> Solution:
    """Parse one response of the generator; `ends` are the characters complete after each token."""
    parsed = parse_solution(text, task.min_steps)
    return Solution(
        problem=problem,
        text=text,
        steps=parsed.steps,
        step_ends=tuple(token_of_character(ends, end - 1) for _, end in parsed.step_spans),
        format_score=parsed.format_score,
        is_correct=bool(is_correct),
        gold_steps=task.gold_steps(problem, parsed.steps) if task.gold_steps else None,
        token_ends=tuple(ends),
        is_truncated=bool(is_truncated),
    )


def _read_verifications(context: RunContext, solutions: Sequence[Solution], rollout: Rollout, group_size: int):
    tokenizer = context.policies["verifier"].tokenizer
    owners = [solution for solution in solutions for _ in range(group_size)]
    decoded = [tokenizer.decode_with_ends(tokens) for tokens in rollout.tokens]
    verifications = [
        make_verification(solution, text, ends, is_truncated)
        for solution, (text, ends), is_truncated in zip(owners, decoded, rollout.is_truncated_B, strict=True)
    ]
    return verifications, {}


def make_verification(solution: Solution, text: str, ends: Sequence[int], is_truncated: bool) -> Verification:
    """Parse one response of the verifier to a solution; `ends` are the characters complete after each token."""
    parsed = parse_verification(text, len(solution.steps), solution.format_score)
    return Verification(
        text=text,
        judgements=parsed.judgements,
        verdict=parsed.verdict,
        format_score=parsed.format_score,
        is_aligned=parsed.aligned,
        blocks=parsed.blocks,
        token_ends=tuple(ends),
        is_truncated=bool(is_truncated),
    )


ROLE_TEXTS = {
    "generator": RoleText(_generator_prompts, _read_solutions, "sample", "grade"),
    "verifier": RoleText(_verifier_prompts, _read_verifications, "verify", "verify"),
}


def _sample(
    context: RunContext, policy: Policy, params: Any, prompts: list[list[int]], num_prompts: int, group_size: int,
    key_data: np.ndarray, is_greedy: bool,
) -> Rollout:
    """Responses to this process's share of `num_prompts` prompts; a row's randomness depends on its number in all."""
    with context.timer("reshard"):  # concerns every process, also one without a prompt
        weights = jax.block_until_ready(policy.sampler.layout(params))
    rollout, mistake, config = Rollout((), (), np.zeros(0, bool), 0, 0), "", policy.config
    if prompts:
        first = hosts.own_range(num_prompts)[0] * group_size
        numbers = np.arange(first, first + len(prompts) * group_size)
        sampling = (0.0,) if is_greedy else (config.temperature, config.top_p, config.top_k)
        try:
            rollout = policy.sampler.sample(weights, prompts, group_size, key_data, *sampling, row_numbers=numbers)
        except FloatingPointError as error:
            mistake = str(error)
    mistake = next(filter(None, hosts.gather([mistake])), "")
    if mistake:
        raise Broken(policy.role, f"cannot sample from the {policy.role}: {mistake}")
    return rollout


def _gather_rollout(rollout: Rollout) -> Rollout:
    """The processes' rollouts as one."""
    return Rollout(
        tokens=tuple(hosts.gather(rollout.tokens)),
        logps=tuple(hosts.gather(rollout.logps)),
        is_truncated_B=np.array(hosts.gather(rollout.is_truncated_B), bool),
        decode_steps=max(hosts.gather([rollout.decode_steps])),
        row_steps=sum(hosts.gather([rollout.row_steps])),
    )


def _rollout_metrics(role: str, rollout: Rollout) -> dict[str, float]:
    length_B = np.array([len(tokens) for tokens in rollout.tokens])
    return {
        f"{role}/length_mean": length_B.mean(),
        f"{role}/length_max": length_B.max(),
        f"{role}/truncation_rate": rollout.is_truncated_B.mean(),
        f"{role}/tokens_sampled": length_B.sum(),
        f"{role}/decode_waste": 1.0 - length_B.sum() / rollout.row_steps,
    }
