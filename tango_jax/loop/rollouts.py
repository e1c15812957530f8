"""The sampling half of a turn: problems or solutions in; parsed, graded rollouts out.

Each process does its share of the work; all get the whole result. Used by the turns of `cycle.py` and by evaluation.
"""

from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from tango_jax.grading import FAILURES
from tango_jax.loop.breakdown import Broken
from tango_jax.loop.read import read_solutions, read_verifications
from tango_jax.records import Rollout
from tango_jax.rl.policy import Policy
from tango_jax.runtime import hosts
from tango_jax.tasks.task import Task
from tango_jax.text.templates import generator_prompt, verifier_prompt
from tango_jax.tracking.metrics import PhaseTimer


class Loop(NamedTuple):
    """What every turn reads: built once, never changed."""

    config: ConfigDict
    task: Task
    generator: Policy
    verifier: Policy
    references: dict  # role -> parameters that KL is measured against
    timer: PhaseTimer


def solve(loop: Loop, states, problems, group_size: int, key_data, is_greedy: bool = False):
    """The generator's solutions, parsed and graded: (solutions, rollout, metrics).

    Each process does its share of the work; all get the whole result.
    """
    policy = loop.generator
    mine = hosts.own_part(problems)
    with loop.timer("sample"):
        prompts = [generator_prompt(policy.template, policy.tokenizer, problem) for problem in mine]
        params = states["generator"].params
        rollout = sample(loop, policy, params, prompts, len(problems), group_size, key_data, is_greedy)
    with loop.timer("grade"):
        solutions, report = read_solutions(loop.task, policy.tokenizer, mine, rollout, group_size)
    solutions, rollout = hosts.gather(solutions), gather_rollout(rollout)
    reports = hosts.gather([report])
    metrics = rollout_metrics("generator", rollout)
    metrics |= {
        f"grader/{name}": sum(getattr(report, name) for report in reports)
        for name in FAILURES
    }
    return solutions, rollout, metrics


def verify(loop: Loop, states, solutions, group_size: int, key_data, is_greedy: bool = False):
    """The verifier's answers to each solution: (verifications, rollout, prompts, metrics); shared like `solve`."""
    policy = loop.verifier
    with loop.timer("verify"):
        prompts, shortened = verifier_prompts(policy, solutions)
        start, stop = hosts.own_range(len(solutions))
        params, mine = states["verifier"].params, prompts[start:stop]
        rollout = sample(loop, policy, params, mine, len(solutions), group_size, key_data, is_greedy)
        verifications = read_verifications(policy.tokenizer, solutions[start:stop], rollout, group_size)
        verifications, rollout = hosts.gather(verifications), gather_rollout(rollout)
    metrics = rollout_metrics("verifier", rollout) | {
        "verifier/prompts_shortened": shortened,
        "verifier/shortened_rate": shortened / len(solutions),
    }
    return verifications, rollout, prompts, metrics


def verifier_prompts(policy: Policy, solutions) -> tuple[list[list[int]], int]:
    """Prompt ids for each solution, and how many solutions were shortened to fit."""
    built = [
        verifier_prompt(
            policy.template,
            policy.tokenizer,
            solution.problem,
            solution.text,
            len(solution.steps),
            policy.config.max_prompt,
        )
        for solution in solutions
    ]
    return [ids for ids, _ in built], sum(is_shortened for _, is_shortened in built)


def sample(
    loop: Loop, policy: Policy, params, prompts, num_prompts: int, group_size: int, key_data, is_greedy: bool
) -> Rollout:
    """Responses to this process's share of `num_prompts` prompts; a row's randomness depends on its number in all.

    Raises:
        Broken: in every process, if the logits of any were not finite.
    """
    with loop.timer("reshard"):  # concerns every process, also one without a prompt
        weights = jax.block_until_ready(policy.sampler.layout(params))
    rollout, mistake = Rollout((), (), np.zeros(0, bool), 0, 0), ""
    if prompts:
        try:
            rollout = _sample_own(policy, weights, prompts, num_prompts, group_size, key_data, is_greedy)
        except FloatingPointError as error:
            mistake = str(error)
    mistake = next(filter(None, hosts.gather([mistake])), "")
    if mistake:
        raise Broken(policy.role, f"cannot sample from the {policy.role}: {mistake}")
    return rollout


def _sample_own(
    policy: Policy, weights, prompts, num_prompts: int, group_size: int, key_data, is_greedy: bool
) -> Rollout:
    config = policy.config
    first = hosts.own_range(num_prompts)[0] * group_size
    numbers = np.arange(first, first + len(prompts) * group_size)
    temperature, filters = (0.0, ()) if is_greedy else (config.temperature, (config.top_p, config.top_k))
    return policy.sampler.sample(
        weights, prompts, group_size, key_data, temperature, *filters, row_numbers=numbers
    )


def gather_rollout(rollout: Rollout) -> Rollout:
    """The processes' rollouts as one."""
    return Rollout(
        tokens=tuple(hosts.gather(rollout.tokens)),
        logps=tuple(hosts.gather(rollout.logps)),
        is_truncated_B=np.array(hosts.gather(rollout.is_truncated_B), bool),
        decode_steps=max(hosts.gather([rollout.decode_steps])),
        row_steps=sum(hosts.gather([rollout.row_steps])),
    )


def rollout_metrics(role: str, rollout: Rollout) -> dict:
    length_B = np.array([len(tokens) for tokens in rollout.tokens])
    return {
        f"{role}/length_mean": length_B.mean(),
        f"{role}/length_max": length_B.max(),
        f"{role}/truncation_rate": rollout.is_truncated_B.mean(),
        f"{role}/tokens_sampled": length_B.sum(),
        f"{role}/decode_waste": 1.0 - length_B.sum() / rollout.row_steps,
    }
