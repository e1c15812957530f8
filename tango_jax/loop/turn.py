"""One turn of either role, in the order of the data flow: problems -> calls of roles -> reward -> credit -> update.

Turns are stateless: a turn takes the two train states and the host counters and returns new ones. What happens in it is
declared by a `TurnPlan` of the arm (arms.py).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from tango_jax.arms import ARMS
from tango_jax.grading import FAILURES, grade_many
from tango_jax.loop.breakdown import Broken
from tango_jax.loop.responses import make_solution, make_verification
from tango_jax.records import (
    Batch,
    Counters,
    Problem,
    Responses,
    Rollout,
    Solution,
    States,
    TrainState,
    TurnResult,
)
from tango_jax.rl.credit import CREDITS, TurnSoFar, turn_reward
from tango_jax.rl.own_reward import OwnReward
from tango_jax.rl.packing import pack_minibatch
from tango_jax.rl.policy import Policy
from tango_jax.rl.schedule import Turn
from tango_jax.runtime import hosts, rng
from tango_jax.runtime.timers import PhaseTimer
from tango_jax.sampling.sampler import SampleRequest
from tango_jax.sharding.layouts import fetch
from tango_jax.tasks.task import Task
from tango_jax.text.templates import generator_prompt, verifier_prompt
from tango_jax.tracking.turn_metrics import over_updates, rollout_metrics, turn_metrics

_KEYS = {"generator": "solve", "verifier": "verify"}  # random streams that the roles sample from


@dataclasses.dataclass(frozen=True)
class RunContext:
    """What every turn reads; built once and never changed."""

    config: ConfigDict
    task: Task
    policies: dict[str, Policy]  # by role
    references: dict  # role -> parameters of its reference policy for the KL
    timer: PhaseTimer
    # By role, where the user has named a function.
    own_rewards: dict[str, OwnReward] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RoleText:
    """The role-specific parts of a call: how prompts are built, and how responses are parsed."""

    prompts: Callable  # (policy, parents) -> (token ids of each prompt, {count: value over all parents})
    read: Callable  # (context, parents of this process, rollout, group_size) -> (records, {count: value to be summed})
    sample_phase: str  # phase names in the timer
    read_phase: str


def run_turn(context: RunContext, states: States, counters: Counters, turn: Turn) -> TurnResult:
    """Run one turn of the schedule.

    P problems -> for each call, responses to the records of the previous call -> one reward per response and one
    advantage per token for the role that learns -> the update of that role.
    """
    config, role = context.config, turn.role
    plan = ARMS[config.arm].turns[role]
    problems, counters = next_problems(context, counters)
    answers, parents = {}, problems
    for call in plan.calls:
        key_data = rng.step_key(config.seed, _KEYS[call.role], turn.index)
        samples = config.rl[call.samples] if call.samples else 1
        answers[call.role] = respond(context, states, call.role, parents, samples, key_data)
        parents = answers[call.role].records
    learner = answers[role]
    is_action_BT = action_mask(context.policies[role], learner.rollout)
    with context.timer("grade"):
        reward = turn_reward(plan.reward, answers, config.rl, context.own_rewards.get(role))
    credit = CREDITS[plan.credit](TurnSoFar(config, turn, answers, reward.reward_B, is_action_BT, counters))
    signal = dataclasses.replace(credit.signal, own_reward_B=reward.own_B)
    state, update_metrics = update_policy(context, states[role], learner, signal.adv_BT, is_action_BT)
    metrics = {name: value for responses in answers.values() for name, value in responses.metrics.items()}
    metrics |= reward.metrics | credit.metrics | turn_metrics(role, answers, reward.reward_B) | update_metrics
    return TurnResult(states | {role: state}, credit.counters, metrics, answers, signal)


def next_problems(context: RunContext, counters: Counters) -> tuple[list, Counters]:
    """The next P training problems, and the counters with the cursor advanced past them."""
    count, start = context.config.rl.prompts_per_step, counters.cursor
    problems = [context.task.train_problem(index) for index in range(start, start + count)]
    return problems, dataclasses.replace(counters, cursor=start + count)


def respond(
    context: RunContext, states: States, role: str, parents: Sequence, group_size: int, key_data: np.ndarray,
    is_greedy: bool = False,
) -> Responses:
    """Sample (or decode greedily) `group_size` responses of a role to each parent.

    Raises:
        Broken: in every process, if the logits were not finite in any of them.
    """
    policy, text, timer = context.policies[role], ROLE_TEXTS[role], context.timer
    first, last = hosts.own_range(len(parents))
    with timer(text.sample_phase):
        prompts, counts = text.prompts(policy, parents)
        request = SampleRequest(
            prompts=prompts[first:last],
            group_size=group_size,
            key_data=key_data,
            temperature=0.0 if is_greedy else policy.config.temperature,
            top_p=policy.config.top_p,
            top_k=policy.config.top_k,
            # Numbers over all processes, so that how many of them share the work changes no response.
            row_numbers=np.arange(first * group_size, last * group_size),
        )
        rollout = _sample(context, policy, states[role].params, request)
    with timer(text.read_phase):
        records, own_counts = text.read(context, parents[first:last], rollout, group_size)
    records, rollout = hosts.gather(records), _gather_rollout(rollout)
    for one in hosts.gather([own_counts]):
        counts = {name: counts.get(name, 0) + one.get(name, 0) for name in (*counts, *one)}
    return Responses(role, parents, prompts, group_size, rollout, records, rollout_metrics(role, rollout) | counts)


def _generator_prompts(policy: Policy, problems: Sequence[Problem]) -> tuple[list[list[int]], dict]:
    return [generator_prompt(policy.template, policy.tokenizer, problem) for problem in problems], {}


def _verifier_prompts(policy: Policy, solutions: Sequence[Solution]) -> tuple[list[list[int]], dict]:
    """Build the prompts; solutions that are too long for the prompt are cut off at the end and counted."""
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


def _read_verifications(context: RunContext, solutions: Sequence[Solution], rollout: Rollout, group_size: int):
    tokenizer = context.policies["verifier"].tokenizer
    owners = [solution for solution in solutions for _ in range(group_size)]
    decoded = [tokenizer.decode_with_ends(tokens) for tokens in rollout.tokens]
    verifications = [
        make_verification(solution, text, ends, is_truncated)
        for solution, (text, ends), is_truncated in zip(owners, decoded, rollout.is_truncated_B, strict=True)
    ]
    return verifications, {}


ROLE_TEXTS = {
    "generator": RoleText(_generator_prompts, _read_solutions, "sample", "grade"),
    "verifier": RoleText(_verifier_prompts, _read_verifications, "verify", "verify"),
}


def _sample(context: RunContext, policy: Policy, params: Any, request: SampleRequest) -> Rollout:
    """Sample responses to this process's prompts, of which there may be none."""
    with context.timer("reshard"):  # concerns every process, also one without a prompt
        weights = jax.block_until_ready(policy.sampler.layout(params))
    rollout, mistake = Rollout((), (), np.zeros(0, bool), 0, 0), ""
    if request.prompts:
        try:
            rollout = policy.sampler.sample(weights, request)
        except FloatingPointError as error:
            mistake = str(error)
    mistake = next(filter(None, hosts.gather([mistake])), "")
    if mistake:
        raise Broken(policy.role, f"cannot sample from the {policy.role}: {mistake}")
    return rollout


def _gather_rollout(rollout: Rollout) -> Rollout:
    """Join the rollouts of all processes."""
    return Rollout(
        tokens=tuple(hosts.gather(rollout.tokens)),
        logps=tuple(hosts.gather(rollout.logps)),
        is_truncated_B=np.array(hosts.gather(rollout.is_truncated_B), bool),
        decode_steps=max(hosts.gather([rollout.decode_steps])),
        row_steps=sum(hosts.gather([rollout.row_steps])),
    )


def action_mask(policy: Policy, rollout: Rollout) -> np.ndarray:
    """bool[B, max_response]: sampled tokens including EOS; truncated responses are masked if the config says so."""
    length_B = np.array([len(tokens) for tokens in rollout.tokens])
    if policy.config.loss.mask_overlong:
        length_B = np.where(rollout.is_truncated_B, 0, length_B)
    return np.arange(policy.config.max_response)[None, :] < length_B[:, None]


def update_policy(
    context: RunContext, state: TrainState, learner: Responses, adv_BT: np.ndarray, is_action_BT: np.ndarray
) -> tuple[TrainState, dict[str, float]]:
    """Make all updates on a batch (epochs x minibatches); return the new state, and metrics over all updates."""
    policy = context.policies[learner.role]
    with context.timer("update"):
        batches = [
            _scored(context, policy, state, pack_minibatch(policy.config, policy.placement, number, learner, adv_BT,
                                                           is_action_BT))
            for number in range(policy.config.loss.minibatches)
        ]  # fmt: skip
        state, updates = policy.fetched(state), []
        for _ in range(policy.config.loss.epochs):
            for batch in batches:
                state, device_metrics = policy.update(state, batch)
                updates.append(device_metrics)  # fetched only after all updates have been dispatched
        metrics = over_updates(jax.device_get(updates), policy.config.loss.epochs)
        state = policy.offloaded(state)
    return state, {f"{policy.role}/{name}": value for name, value in metrics.items()}


def _scored(context: RunContext, policy: Policy, state: TrainState, batch: Batch) -> Batch:
    """Add the log-probs that the loss needs: of the reference policy, and of the policy before any update."""
    if policy.config.loss.kl_coef > 0:
        reference = fetch(context.references[policy.role], policy.shardings.params)
        batch = batch.replace(ref_logp_NZRT=policy.score(reference, batch))
    if policy.updates_per_batch > 1:
        batch = batch.replace(old_logp_NZRT=policy.score(state.params, batch))
    return batch
