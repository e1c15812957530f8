"""One turn of either role, as the data flows: problems -> rollouts -> judgements -> rewards -> advantages -> update.

Nothing here keeps state: a turn takes the two train states and the host counters and returns new ones.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import numpy as np

from tango_jax.loop.rollouts import Loop, solve, verify
from tango_jax.records import Batch, Rollout, Signal, Solution, Verification
from tango_jax.rl import advantages, losses, rewards
from tango_jax.rl.packing import TrainSequence, pack
from tango_jax.rl.policy import Policy, pack_shape
from tango_jax.rl.schedule import Turn, alpha_at
from tango_jax.runtime import hosts, rng
from tango_jax.sharding.placement import fetch, place_batch
from tango_jax.text.templates import generator_prompt
from tango_jax.tracking.scores import verifier_scores

STEP_LABELS = {  # where each arm's step rewards come from
    "tango": "verifier",
    "fixed_verifier": "verifier",
    "fixed_verifier_warm": "verifier",
    "grpo": "none",
    "gold_steps": "gold",
    "fixed_generator": "none",
}

# Metrics of the updates of a batch, see `over_updates`.
LARGEST_OF_UPDATES = ("logprob_gap_max", "update_ratio")
MEANS_OF_UPDATES = ("loss", "grad_norm")


@dataclasses.dataclass(frozen=True)
class Counters:
    """Training state that lives on the host; saved with every checkpoint."""

    turn: int = 0  # turns made
    cursor: int = 0  # next training problem
    label_counts: tuple[float, float] = (0.0, 0.0)  # EMA of incorrect and correct solutions seen by the verifier


class TurnResult(NamedTuple):
    states: dict
    counters: Counters
    metrics: dict
    solutions: list[Solution]
    verifications: list[Verification] | None
    signal: Signal


def run_turn(loop: Loop, states: dict, counters: Counters, turn: Turn) -> TurnResult:
    """The turn that the schedule asks for."""
    return (generator_turn if turn.role == "generator" else verifier_turn)(loop, states, counters, turn)


def generator_turn(loop: Loop, states: dict, counters: Counters, turn: Turn) -> TurnResult:
    """P problems -> M solutions each -> judged step by step -> update of the generator."""
    rl, policy, loss = loop.config.rl, loop.generator, loop.generator.config.loss
    problems, counters = next_problems(loop, counters)
    solutions, rollout, metrics = solve(loop, states, problems, rl.samples_per_prompt, solve_key(loop, turn))
    verifications, labels, verify_metrics = judge(loop, states, solutions, turn)

    is_correct_B = np.array([solution.is_correct for solution in solutions])
    format_B = np.array([solution.format_score for solution in solutions])
    reward_B = rewards.generator_outcome_reward_B(is_correct_B, format_B, rl.outcome_weight, rl.format_weight)
    is_action_BT = action_mask(policy, rollout)
    adv_BT = advantages.outcome_advantages(loss.algorithm, reward_B, is_action_BT, rl.samples_per_prompt, loss.use_std)
    alpha, step_metrics, adv_outcome_BT, adv_step_BT = 0.0, {}, adv_BT, None
    if labels is not None:
        alpha = alpha_at(turn.generator_step, rl.generator_steps, rl.alpha_initial, rl.alpha_final, rl.alpha_schedule)
        adv_step_BT, step_metrics = step_advantages(loop, solutions, labels, is_action_BT)
        adv_BT = advantages.blend(adv_BT, adv_step_BT, alpha)

    prompts = [generator_prompt(policy.template, policy.tokenizer, problem) for problem in problems]
    state, update_metrics = update_policy(loop, policy, states["generator"], prompts, rollout, adv_BT, is_action_BT)
    metrics |= {
        "generator/reward/outcome": is_correct_B.mean(),
        "generator/reward/format": format_B.mean(),
        "generator/steps_mean": np.mean([len(solution.steps) for solution in solutions]),
        "generator/alpha": alpha,
        "generator/groups_without_signal": zero_variance_share(reward_B, rl.samples_per_prompt),
        **step_metrics,
        **(verifier_quality(solutions, verifications[:: len(labels)], "verifier/live_") if verifications else {}),
        **verify_metrics,
        **update_metrics,
    }
    signal = Signal(reward_B, adv_outcome_BT, adv_BT, adv_step_BT, alpha, labels)
    return TurnResult(states | {"generator": state}, counters, metrics, solutions, verifications, signal)


def verifier_turn(loop: Loop, states: dict, counters: Counters, turn: Turn) -> TurnResult:
    """P problems -> one solution each -> M verifications of it -> class-aware update of the verifier."""
    rl, policy, loss = loop.config.rl, loop.verifier, loop.verifier.config.loss
    problems, counters = next_problems(loop, counters)
    solutions, _, metrics = solve(loop, states, problems, 1, solve_key(loop, turn))
    group_size = rl.samples_per_prompt
    key_data = verify_key(loop, turn)
    verifications, rollout, prompts, verify_metrics = verify(loop, states, solutions, group_size, key_data)

    is_correct_B = np.repeat([solution.is_correct for solution in solutions], group_size)
    format_B = np.array([verification.format_score for verification in verifications])
    verdicts = [verification.verdict for verification in verifications]
    reward_B, correctness_B = rewards.verifier_reward_B(verdicts, is_correct_B, format_B, rl.gamma)
    is_action_BT = action_mask(policy, rollout)
    adv_outcome_BT = advantages.outcome_advantages(loss.algorithm, reward_B, is_action_BT, group_size, loss.use_std)
    label_counts = advantages.update_label_counts(np.array(counters.label_counts), is_correct_B, rl.label_count_decay)
    class_weight_B = advantages.class_weights_B(label_counts, is_correct_B)
    adv_BT = adv_outcome_BT * class_weight_B[:, None]

    state, update_metrics = update_policy(loop, policy, states["verifier"], prompts, rollout, adv_BT, is_action_BT)
    owners = [solution for solution in solutions for _ in range(group_size)]
    metrics |= {
        "verifier/reward/correctness": correctness_B.mean(),
        "verifier/reward/format": format_B.mean(),
        "verifier/groups_without_signal": zero_variance_share(reward_B, group_size),
        "verifier/solutions_correct": is_correct_B.mean(),
        "verifier/label_count_incorrect": label_counts[0],
        "verifier/label_count_correct": label_counts[1],
        **verifier_quality(owners, verifications, "verifier/"),
        **verify_metrics,
        **update_metrics,
    }
    counters = dataclasses.replace(counters, label_counts=tuple(map(float, label_counts)))
    signal = Signal(reward_B, adv_outcome_BT, adv_BT, class_weight_B=class_weight_B)
    return TurnResult(states | {"verifier": state}, counters, metrics, solutions, verifications, signal)


def next_problems(loop: Loop, counters: Counters) -> tuple[list, Counters]:
    """The next P training problems, and the cursor behind them."""
    count, start = loop.config.rl.prompts_per_step, counters.cursor
    problems = [loop.task.train_problem(index) for index in range(start, start + count)]
    return problems, dataclasses.replace(counters, cursor=start + count)


def solve_key(loop: Loop, turn: Turn):
    return rng.step_key(loop.config.seed, "solve", turn.index)


def verify_key(loop: Loop, turn: Turn):
    return rng.step_key(loop.config.seed, "verify", turn.index)


def judge(loop: Loop, states, solutions, turn: Turn):
    """Step labels of each solution as the arm has it: (verifications or None, list of label lists or None, metrics of
    the verifications).

    With several verifications per solution (they stand together) there are as many label lists; their advantages are
    averaged.
    """
    source, count = STEP_LABELS[loop.config.arm], loop.config.rl.verifications_per_solution
    if source == "gold":
        return None, [[solution.gold_steps for solution in solutions]], {}
    if source == "none":
        return None, None, {}
    verifications, *_, metrics = verify(loop, states, solutions, count, verify_key(loop, turn))
    labels = [[v.judgements if v.is_aligned else None for v in verifications[first::count]] for first in range(count)]
    return verifications, labels, metrics


def step_advantages(loop: Loop, solutions, labels, is_action_BT) -> tuple[np.ndarray, dict]:
    """Step advantages averaged over the label lists, with the share of solutions that have step rewards."""
    loss, group_size = loop.generator.config.loss, loop.config.rl.samples_per_prompt
    step_ends = [solution.step_ends for solution in solutions]
    parts, rewarded, total = [], [], []
    for judgements in labels:
        reward_BT, is_end_BT = rewards.step_reward_BT(judgements, step_ends, is_action_BT.shape[1])
        parts.append(
            advantages.step_advantages(
                loss.algorithm, reward_BT, is_end_BT, is_action_BT, group_size, loss.use_std, loss.step_scale
            )
        )
        rewarded.append(is_end_BT.any(axis=1).mean())
        total.append(reward_BT.sum(axis=1).mean())
    metrics = {"generator/reward/step": np.mean(total), "generator/step_rewarded_share": np.mean(rewarded)}
    return advantages.average_over_verifications(parts), metrics


def action_mask(policy: Policy, rollout: Rollout) -> np.ndarray:
    """bool[B, max_response]: sampled tokens, EOS included; truncated responses left out where the config says so."""
    length_B = np.array([len(tokens) for tokens in rollout.tokens])
    if policy.config.loss.mask_overlong:
        length_B = np.where(rollout.is_truncated_B, 0, length_B)
    return np.arange(policy.config.max_response)[None, :] < length_B[:, None]


def update_policy(loop: Loop, policy: Policy, state, prompts, rollout: Rollout, adv_BT, is_action_BT):
    """All updates that this batch gets (epochs x minibatches): the new state, and metrics of all (`over_updates`)."""
    loss = policy.config.loss
    with loop.timer("update"):
        batches = []
        for number in range(loss.minibatches):
            batch = minibatch(policy, number, prompts, rollout, adv_BT, is_action_BT)
            if loss.kl_coef > 0:
                reference = fetch(loop.references[policy.role], policy.shardings.params)
                batch = batch.replace(ref_logp_NZRT=policy.score(reference, batch))
                del reference  # it may be a copy, of something that waits in host memory
            if policy.updates_per_batch > 1:
                batch = batch.replace(old_logp_NZRT=policy.score(state.params, batch))
            batches.append(batch)
        state, updates = policy.fetched(state), []
        for _ in range(loss.epochs):
            for batch in batches:
                state, device_metrics = policy.update(state, batch)
                updates.append(device_metrics)  # read once all are under way
        metrics = over_updates(jax.device_get(updates), loss.epochs)
        state = policy.parked(state)
    return state, {f"{policy.role}/{name}": value for name, value in metrics.items()}


def over_updates(updates: list[dict], epochs: int) -> dict[str, float]:
    """One figure for all updates that a batch got; with a single update each is that update's own.

    `loss` and `grad_norm` are means over updates, of which each counts alike; `tokens` are the action tokens of the
    batch; `logprob_gap_max` and `update_ratio` are the largest; all others are means over tokens, so that minibatches
    weigh as many as they have. `kl_first` is the KL of the first update alone, which the policy has not moved before.
    """
    tokens = np.array([metrics.get("tokens", 0) for metrics in updates], np.float64)
    share = tokens / tokens.sum() if tokens.any() else np.full(len(updates), 1 / len(updates))
    figures = {}
    for name in updates[0]:
        values = np.array([metrics[name] for metrics in updates], np.float64)
        if name == "tokens":
            figures[name] = values.sum() / epochs
        elif name in LARGEST_OF_UPDATES:
            figures[name] = values.max()
        else:
            figures[name] = values.mean() if name in MEANS_OF_UPDATES else np.sum(share * values)
    if "kl" in figures:
        figures["kl_first"] = updates[0]["kl"]
    return {name: float(value) for name, value in figures.items()}


def minibatch(policy: Policy, number: int, prompts, rollout: Rollout, adv_BT, is_action_BT) -> Batch:
    """Every n-th prompt with its responses, from prompt `number` on; weights are those of the whole minibatch, the
    rows those of this process."""
    loss, group_size = policy.config.loss, len(rollout.tokens) // len(prompts)
    is_chosen_B = (np.arange(len(rollout.tokens)) // group_size) % loss.minibatches == number
    weight_BT = np.zeros(is_action_BT.shape, np.float32)
    weight_BT[is_chosen_B] = losses.token_weights_BT(
        is_action_BT[is_chosen_B], loss.aggregation, policy.config.max_response
    )
    first, last = hosts.own_range(len(prompts))
    mine = [b for b in range(first * group_size, last * group_size) if is_chosen_B[b]]
    sequences = [
        TrainSequence(
            prompt=prompts[b // group_size],
            response=rollout.tokens[b],
            weight=weight_BT[b, : len(rollout.tokens[b])],
            adv=adv_BT[b, : len(rollout.tokens[b])],
            sampler_logp=rollout.logps[b],
        )
        for b in mine
    ]
    most_prompts = math.ceil(math.ceil(len(prompts) / jax.process_count()) / loss.minibatches)
    batch = pack(
        sequences,
        pack_shape(policy.config),
        most_prompts * group_size,
        most_prompts,
        policy.placement.num_local_shards,
    )
    return place_batch(policy.placement, batch)


def zero_variance_share(reward_B: np.ndarray, group_size: int) -> float:
    """Share of groups in which every sample has the same reward: they teach nothing."""
    return float((np.ptp(reward_B.reshape(-1, group_size), axis=1) == 0).mean())


def verifier_quality(solutions, verifications, prefix: str) -> dict:
    """How often each verdict was given, and how well steps and verdicts agree with the facts."""
    return {f"{prefix}{name}": value for name, value in verifier_scores(solutions, verifications).items()}
