"""One turn of either role, in the order of the data flow: problems -> calls of roles -> reward -> credit -> update.

The role that learns is rewarded as soon as it has responded: in the generator's turns, its reward is the grade's, and
the verifier, which is asked after that, takes part in the credit alone.

Turns are stateless: a turn takes the two train states and the host counters and returns new ones. What happens in it is
declared by a `TurnPlan` of the arm (arms.py).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from tango_jax.arms import Call
from tango_jax.loop.breakdown import Broken
from tango_jax.loop.dynamic_sampling import sample_until_full
from tango_jax.loop.responses import CALL_TEXTS
from tango_jax.records import Answers, Counters, Responses, Rewards, Rollout, States, TrainState, TurnResult
from tango_jax.rl.algorithms import algorithm_of
from tango_jax.rl.credit import TurnSoFar
from tango_jax.rl.family import joined
from tango_jax.rl.informed import teacher_scores
from tango_jax.rl.labels import ABOUT, LABELS
from tango_jax.rl.own_method import Method
from tango_jax.rl.packing import pack_minibatch
from tango_jax.rl.policy import Policy
from tango_jax.rl.practice import candidates_of, half_right, with_passes
from tango_jax.rl.schedule import Turn, problems_of_a_turn
from tango_jax.rl.trust import Asked, asked_about, warmup_metrics, with_verdicts
from tango_jax.runtime import hosts, rng
from tango_jax.runtime.timers import PhaseTimer
from tango_jax.sampling.sampler import SampleRequest
from tango_jax.tasks.task import Task
from tango_jax.tracking.turn_metrics import over_updates, rollout_metrics, turn_metrics


@dataclasses.dataclass(frozen=True)
class RunContext:
    """What turns and evaluations of a run read. `run.run_stages` makes it before it compiles, and gives it the
    console's `show_fn` when stage 2 begins; this file, measure.py, compilation.py and output.py read it."""

    config: ConfigDict
    task: Task
    policies: Mapping[str, Policy]  # by role
    references: Mapping[str, Callable[[], dict]]  # role -> Policy.reference_fn, of the roles whose loss has a KL term
    timer: PhaseTimer
    method: Method | None = None  # None: roles respond, as in an evaluation, and nothing is trained
    show_fn: Callable[[str], None] = lambda part: None  # takes what a turn or an evaluation is at


def run_turn(context: RunContext, states: States, counters: Counters, turn: Turn) -> TurnResult:
    """Run one turn of the schedule.

    P problems -> for each call, responses to the records of the previous call -> one reward per response and one
    advantage per token for the role that learns -> the update of that role. The calls after that of this role are made
    when its rewards are known.
    """
    role, plan = turn.role, context.method.arm.turns[turn.role]
    answers, reward, sampling_metrics = sample_and_reward(context, states, counters, turn)
    rest, rl = plan.calls_after(role), context.config.rl
    asked = asked_about(context.config, answers[role], counters) if rest else None
    answers |= make_later_calls(context, states, rest, answers[role].records, asked, turn)
    learner = joined(answers, plan.learners(role))
    is_action_BT = action_mask(context.policies[role], learner.rollout)
    reference_fn = context.references.get(role)
    teacher_logp_BT = teacher_scores(plan.teacher, context.policies[role], reference_fn, learner, is_action_BT)
    counters = counters.take(plan.problems, problems_of_a_turn(rl, plan.problems))
    counters = with_passes(with_verdicts(counters, rl, role, answers), rl, answers["generator"].records)
    trust_P = None if asked is None else asked.trust_P
    so_far = TurnSoFar(context.config, turn, answers, reward.reward_B, is_action_BT, counters, trust_P, teacher_logp_BT)
    credit = context.method.credits[role](so_far)
    state, update_metrics = update_policy(context, states[role], learner, credit.adv_BT, is_action_BT)
    trust_metrics = asked.metrics(rl) if asked else warmup_metrics(rl, turn, counters)
    metrics = turn_metrics(role, answers, sampling_metrics, reward.metrics, trust_metrics, credit.metrics,
                           update_metrics)  # fmt: skip
    return TurnResult(states | dict.fromkeys(context.policies[role].roles, state), metrics, answers, reward, credit)


def sample_and_reward(
    context: RunContext, states: States, counters: Counters, turn: Turn
) -> tuple[Answers, Rewards, dict[str, float]]:
    """The first half of a turn: the next problems, the calls up to that of the role that learns, and its rewards; then
    metrics of the sampling itself."""
    role, rl = turn.role, context.config.rl
    plan = context.method.arm.turns[role]
    taken, problem_fn = counters.cursors.get(plan.problems, 0), context.task.stream(plan.problems)
    drawn = rl.prompts_per_step * candidates_of(rl, plan.problems)

    def sample_batch(number: int) -> tuple[Answers, Rewards]:
        start = taken + number * drawn
        problems = [problem_fn(index) for index in range(start, start + drawn)]
        if drawn > rl.prompts_per_step:
            problems = half_right(problems, rl.prompts_per_step, counters.passes)
        answers = make_calls(context, states, plan.calls_until(role), problems, turn, number)
        with context.timer("grade"):
            return answers, context.method.rewards[role](answers, rl)

    algorithm = algorithm_of(context.config[role].loss.algorithm)
    return sample_until_full(sample_batch, role, algorithm, 1 + rl.dynamic_sampling)


def make_later_calls(
    context: RunContext, states: States, calls: Sequence[Call], records: Sequence, asked: Asked | None, turn: Turn
) -> dict[str, Responses]:
    """The calls after that of the role that learns, about all of its records, or about those that are `asked` about."""
    if asked is None:
        return make_calls(context, states, calls, records, turn)
    places = np.flatnonzero(asked.is_asked_B)
    if not places.size:
        return {}
    answers = make_calls(context, states, calls, [records[place] for place in places], turn)
    first = calls[0].role
    return answers | {first: dataclasses.replace(answers[first], places=places)}


def make_calls(
    context: RunContext, states: States, calls: Sequence[Call], parents: Sequence, turn: Turn, batch: int = 0
) -> dict[str, Responses]:
    """Make calls in order, each about the records of the previous one, the first about `parents`.

    The random stream depends on the role that learns and the number of its turns so far, which do not differ between
    arms: arms with the same seed see the same problems at the same generator step, and draw the same random numbers.
    """
    answers, previous = {}, ""
    for call in calls:
        path = (CALL_TEXTS[call.name].stream, turn.role, turn.role_step, batch)
        samples = context.config.rl[call.samples] if call.samples else 1
        key_data = rng.step_key(context.config.seed, *path)
        minibatches = context.config[turn.role].loss.minibatches
        places = ABOUT[call.about](answers[previous], minibatches) if call.about else None
        about = parents if places is None else [parents[place] for place in places]
        if call.text and not about:  # nothing was rejected: there is no second try
            break
        said = respond(context, states, call.role, about, samples, key_data, text=call.text)
        if call.labels:
            said = LABELS[call.labels](said, context.task)
        answers[call.name], previous = dataclasses.replace(said, places=places), call.name
        parents = said.next_parents
    return answers


def respond(
    context: RunContext, states: States, role: str, parents: Sequence, group_size: int, key_data: np.ndarray,
    is_greedy: bool = False, text: str = "",
) -> Responses:
    """Sample (or decode greedily) `group_size` responses of a role to each parent, to the prompt of its own or, with
    `text`, to another (arms.py, Call.text).

    Raises:
        Broken: in every process, if the logits were not finite in any of them.
    """
    name, policy, timer = text or role, context.policies[role], context.timer
    asked, (first, last) = CALL_TEXTS[name], hosts.own_range(len(parents))
    with timer(asked.sample_phase):
        prompts, counts = asked.prompts(policy, parents)
        request = SampleRequest(
            prompts=prompts[first:last],
            group_size=group_size,
            key_data=key_data,
            temperature=0.0 if is_greedy else policy.config.temperature,
            top_p=policy.config.top_p,
            top_k=policy.config.top_k,
            # Rows are numbered over all processes: a response does not depend on how many of them share the work.
            row_numbers=np.arange(first * group_size, last * group_size),
            ended_fn=asked.ended_fn(context.show_fn, (last - first) * group_size),
        )
        rollout = _sample(context, policy, states[role].weights, request)
    context.show_fn(asked.reading)
    with timer(asked.read_phase):
        records, own_counts = asked.read(context.task, policy.tokenizer, parents[first:last], rollout, group_size)
    records, rollout = hosts.join_parts(records), _gather_rollout(rollout)
    for one in hosts.join_parts([own_counts]):
        counts = {name: counts.get(name, 0) + one.get(name, 0) for name in (*counts, *one)}
    return Responses(role, parents, prompts, group_size, rollout, records, rollout_metrics(name, rollout) | counts)


def _sample(context: RunContext, policy: Policy, weights: Any, request: SampleRequest) -> Rollout:
    """Sample responses to this process's prompts; there may be none."""
    with context.timer("reshard"):  # concerns every process, also one without a prompt
        laid_out = jax.block_until_ready(policy.sampler.layout(weights))
    rollout, mistake = Rollout((), (), np.zeros(0, bool), 0, 0), ""
    if request.prompts:
        try:
            rollout = policy.sampler.sample(laid_out, request)
        except FloatingPointError as error:
            mistake = str(error)
    mistake = next(filter(None, hosts.join_parts([mistake])), "")
    if mistake:
        raise Broken(policy.role, f"cannot sample from the {policy.role}: {mistake}")
    return rollout


def _gather_rollout(rollout: Rollout) -> Rollout:
    """Join the rollouts of all processes."""
    return Rollout(
        tokens=tuple(hosts.join_parts(rollout.tokens)),
        logps=tuple(hosts.join_parts(rollout.logps)),
        is_truncated_B=np.array(hosts.join_parts(rollout.is_truncated_B), bool),
        decode_steps=max(hosts.join_parts([rollout.decode_steps])),
        row_steps=sum(hosts.join_parts([rollout.row_steps])),
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
    context.show_fn(f"update of the {learner.role}")
    has_moved = int(state.step) > 0  # away from its reference
    with context.timer("update"):
        batches = []
        for number in range(policy.config.loss.minibatches):
            batch = pack_minibatch(policy.config, policy.placement, number, learner, adv_BT, is_action_BT)
            batches.append(policy.with_scores(batch, state.weights, context.references.get(policy.role)))
        state, updates = policy.updated(state, batches)
        metrics = over_updates(jax.device_get(updates), policy.config.loss.epochs)
    if has_moved:
        metrics.pop("kl_first", None)
    return state, {f"{policy.role}/{name}": value for name, value in metrics.items()}
