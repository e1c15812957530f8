"""One turn of either role, as the data flows: problems -> calls of roles -> reward -> credit -> update.

Nothing here keeps state: a turn takes the two train states and the host counters and returns new ones. What happens in
it is data, a `TurnPlan` of the arm (arms.py).
"""

import dataclasses

import jax
import numpy as np
from ml_collections import ConfigDict

from tango_jax.arms import ARMS, Call
from tango_jax.loop.rollouts import RunContext, respond
from tango_jax.records import Batch, Counters, Responses, Rollout, States, TrainState, TurnResult
from tango_jax.rl.credit import CREDITS, reward_fn
from tango_jax.rl.packing import pack_minibatch
from tango_jax.rl.policy import Policy
from tango_jax.rl.schedule import Turn
from tango_jax.rl.update import over_updates
from tango_jax.runtime import rng
from tango_jax.sharding.layouts import fetch
from tango_jax.tracking.scores import verifier_scores

_KEYS = {"generator": "solve", "verifier": "verify"}  # the streams of random numbers that the roles sample from


def run_turn(context: RunContext, states: States, counters: Counters, turn: Turn) -> TurnResult:
    """The turn that the schedule asks for.

    P problems -> for each call, its responses to what the call before it gave -> one reward a response and one
    advantage a token of the role that learns -> its update.
    """
    config, role = context.config, turn.role
    plan = ARMS[config.arm].turns[role]
    problems, counters = next_problems(context, counters)
    answers, parents = {}, problems
    for call in plan.calls:
        key_data = rng.step_key(config.seed, _KEYS[call.role], turn.index)
        answers[call.role] = respond(context, states, call.role, parents, samples_of(config, call), key_data)
        parents = answers[call.role].records
    learner = answers[role]
    is_action_BT = action_mask(context.policies[role], learner.rollout)
    reward = reward_fn(config, role, plan.reward)(answers, config.rl)
    credit = CREDITS[plan.credit](config, turn, answers, reward.reward_B, is_action_BT, counters)
    state, update_metrics = update_policy(context, states[role], learner, credit.signal.adv_BT, is_action_BT)
    metrics = {name: value for responses in answers.values() for name, value in responses.metrics.items()}
    metrics |= reward.metrics | credit.metrics | _turn_metrics(role, answers, reward.reward_B) | update_metrics
    return TurnResult(states | {role: state}, credit.counters, metrics, answers, credit.signal)


def next_problems(context: RunContext, counters: Counters) -> tuple[list, Counters]:
    """The next P training problems, and the cursor behind them."""
    count, start = context.config.rl.prompts_per_step, counters.cursor
    problems = [context.task.train_problem(index) for index in range(start, start + count)]
    return problems, dataclasses.replace(counters, cursor=start + count)


def samples_of(config: ConfigDict, call: Call) -> int:
    """M, the responses of a call to each of its prompts."""
    return config.rl[call.samples] if call.samples else 1


def action_mask(policy: Policy, rollout: Rollout) -> np.ndarray:
    """bool[B, max_response]: sampled tokens, EOS included; truncated responses left out where the config says so."""
    length_B = np.array([len(tokens) for tokens in rollout.tokens])
    if policy.config.loss.mask_overlong:
        length_B = np.where(rollout.is_truncated_B, 0, length_B)
    return np.arange(policy.config.max_response)[None, :] < length_B[:, None]


def update_policy(
    context: RunContext, state: TrainState, learner: Responses, adv_BT: np.ndarray, is_action_BT: np.ndarray
) -> tuple[TrainState, dict[str, float]]:
    """All updates that a batch gets, epochs x minibatches: the new state, and metrics over all of them."""
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
                updates.append(device_metrics)  # read once all are under way
        metrics = over_updates(jax.device_get(updates), policy.config.loss.epochs)
        state = policy.parked(state)
    return state, {f"{policy.role}/{name}": value for name, value in metrics.items()}


def _scored(context: RunContext, policy: Policy, state: TrainState, batch: Batch) -> Batch:
    """The batch with the log-probs that its loss asks for: of the reference, and of the policy before any update."""
    if policy.config.loss.kl_coef > 0:
        reference = fetch(context.references[policy.role], policy.shardings.params)
        batch = batch.replace(ref_logp_NZRT=policy.score(reference, batch))
    if policy.updates_per_batch > 1:
        batch = batch.replace(old_logp_NZRT=policy.score(state.params, batch))
    return batch


def _turn_metrics(role: str, answers: dict[str, Responses], reward_B: np.ndarray) -> dict[str, float]:
    """What a turn shows beside its rewards: groups that teach nothing, and how well verdicts agree with the facts."""
    group_size = answers[role].group_size
    is_equal_P = np.ptp(reward_B.reshape(-1, group_size), axis=1) == 0
    metrics = {f"{role}/groups_without_signal": float(is_equal_P.mean())}
    if role == "generator":
        metrics["generator/steps_mean"] = np.mean([len(solution.steps) for solution in answers[role].records])
    if "verifier" in answers:
        judged = answers["verifier"]
        # Beside the generator's turn, of several verifications of a solution the first.
        every, prefix = (judged.group_size, "verifier/live_") if role == "generator" else (1, "verifier/")
        scores = verifier_scores(judged.owners[::every], judged.records[::every])
        metrics |= {f"{prefix}{name}": value for name, value in scores.items()}
    return metrics
