"""One turn of either role: a method's function (method/tango.py) samples and rewards, then the policy is updated."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from tango_jax.grading import FAILURES, GradeReport
from tango_jax.loop.breakdown import Broken, names_memory
from tango_jax.loop.gather import gather
from tango_jax.loop.scoring import read_marks, response_logps
from tango_jax.method.lesson import advantages_of, digest_of
from tango_jax.method.load import Method
from tango_jax.method.texts import (
    build_prompts,
    read_responses,
    rollout_metrics,
    scored_verification,
    with_parents,
)
from tango_jax.method.turn import Turn, cursors_after
from tango_jax.records import (
    Memory,
    Problem,
    Responses,
    Rollout,
    Solution,
    States,
    TrainState,
    TurnResult,
    problem_of,
)
from tango_jax.rl.packing import action_mask, pack_minibatch
from tango_jax.rl.policy import Policy
from tango_jax.rl.schedule import Place
from tango_jax.runtime import hosts, rng
from tango_jax.runtime.checks import require
from tango_jax.runtime.timers import PhaseTimer
from tango_jax.sampling.sampler import SampleRequest
from tango_jax.tasks.own_grader import Grading
from tango_jax.tasks.task import Task
from tango_jax.text.prompts import OWN, SOLVE, Prompt
from tango_jax.text.templates import step_row
from tango_jax.tracking.turn_flops import turn_flops
from tango_jax.tracking.turn_metrics import over_updates, turn_metrics

# Timer phases: of sampling, and of reading what was sampled.
PHASES = {"generator": ("sample", "grade"), "verifier": ("verify", "verify")}


@dataclasses.dataclass(frozen=True)
class RunContext:
    config: ConfigDict
    task: Task
    policies: Mapping[str, Policy]  # by role
    references: Mapping[str, Callable[[], dict]]  # role -> Policy.reference_fn, of the roles whose loss has a KL term
    timer: PhaseTimer
    method: Method | None = None  # None: roles respond, as in an evaluation, and nothing is trained
    show_fn: Callable[[str], None] = lambda part: None  # takes what a turn or an evaluation is at

    @property
    def own(self) -> Mapping[str, Prompt]:
        """The roles' own prompts."""
        return self.method.own if self.method else OWN


def run_turn(context: RunContext, states: States, memory: Memory, place: Place) -> TurnResult:
    """Raises ValueError: the function returned no lesson, or results that differ between processes; Broken: logits or
    losses are not finite."""
    role, method = place.role, context.method
    t = Turn(context.config, context.task, place, memory, method.algorithms[role], PolicyWork(context, states),
             method.own_rewards.get(role, ()), method.rehearsals[role].calls, method.own)
    lesson = method.turns[role](t)
    t.wait_for_grades()
    adv_BT = advantages_of(lesson, role, context.config)
    check_alike(context.config, role, digest_of(lesson, adv_BT))
    state, update_metrics = update_policy(context, states[role], lesson.responses, adv_BT)
    memory = (lesson.memory or memory).replace(
        turn=memory.turn, cursors=cursors_after(context.config.rl, memory.cursors, role, t.draws)
    )
    metrics = turn_metrics(t, lesson, update_metrics) | turn_flops(t, lesson, context.policies)
    states = states | dict.fromkeys(context.policies[role].roles, state)
    return TurnResult(states, metrics, t.sampled, lesson, adv_BT, memory)


def check_alike(config: ConfigDict, role: str, digest: Hashable) -> None:
    """Raise ValueError, in every process, if they made different results of the same responses."""
    require(len(set(hosts.join_parts([digest]))) == 1, f"arm={config.arm}, the {role}'s turn: processes have different "
            "results for the same responses: a turn must be a function of the Turn alone")


@dataclasses.dataclass(frozen=True)
class PolicyWork:
    context: RunContext
    states: States

    def respond(self, prompt: Prompt, parents: Sequence, samples: int, path: tuple[str | int, ...]) -> Responses:
        key_data = rng.step_key(self.context.config.seed, *path)
        return respond(self.context, self.states, prompt.role, parents, samples, key_data, prompt=prompt)

    def grade(self, problems: Sequence[Problem], texts: Sequence[str]) -> GradeReport:
        # Graded once: another process might run into another time limit.
        with self.context.timer("grade"):
            return Grading(self.context.task, hosts.own_part(problems), hosts.own_part(texts)).report()

    def reference_logps(self, responses: Responses, prompt: Prompt) -> np.ndarray:
        policy = self.context.policies[responses.role]
        prompts, is_cut_P = build_prompts(policy, prompt, responses.parents)
        doing, config = f"scoring with the {policy.role}'s reference", self.context.config
        with self.context.timer("update"), names_memory(doing, ["score"], config, policy):  # as all scores
            weights = self.context.references[responses.role]()
            logp_BT = response_logps(policy, weights, responses.replace(prompts=prompts))
        is_cut_B = np.repeat(is_cut_P, responses.group_size)
        return np.where(is_cut_B[:, None], np.float32(np.nan), logp_BT)


def respond(
    context: RunContext, states: States, role: str, parents: Sequence, group_size: int, key_data: np.ndarray,
    is_greedy: bool = False, prompt: Prompt | None = None,
) -> Responses:
    """Sample a role's responses about each parent. Solutions are graded meanwhile: the first read of a grade waits for
    all, and the counts of failures are then in the metrics. Raises Broken in every process if logits are not finite."""
    prompt, policy, timer = prompt or context.own[role], context.policies[role], context.timer
    if policy.model_config.score_head:
        return _judge_by_scores(context, states[role].weights, prompt, parents, group_size)
    if prompt.is_scored:
        context.show_fn(f"reading the marks of {len(parents)} solutions")
        with timer("verify"), names_memory(f"scoring with the {role}", ["score"], context.config, policy):
            return read_marks(policy, states[role].weights, prompt, parents, group_size, key_data,
                              context.method.most_read(context.config))
    (first, last), (sample_phase, read_phase) = hosts.own_range(len(parents)), PHASES[role]
    with timer(sample_phase):
        prompts, is_cut = build_prompts(policy, prompt, parents)
        request = SampleRequest(
            prompts=prompts[first:last],
            group_size=group_size,
            key_data=key_data,
            temperature=0.0 if is_greedy else policy.config.temperature,
            top_p=policy.config.top_p,
            top_k=policy.config.top_k,
            # Numbered over all processes: a response does not depend on how many share the work.
            row_numbers=np.arange(first * group_size, last * group_size),
            ended_fn=_show_ended(context.show_fn, prompt, (last - first) * group_size),
        )
        rollout = _sample(context, policy, states[role].weights, request)
    context.show_fn(f"reading what the {role} wrote")
    owners = [parent for parent in parents for _ in range(group_size)]
    with timer(read_phase):
        own_owners = owners[first * group_size : last * group_size]
        is_soft = context.config.rl.step_reward == "probability" and not is_greedy
        records = read_responses(prompt, context.task, policy.tokenizer, own_owners, rollout,
                                 context.config.verifier.stop_at_first_error, is_soft)
        grading = None if role == "verifier" else Grading(context.task, list(map(problem_of, own_owners)),
                                                          [record.text for record in records])
    if not hosts.is_alone():
        with timer("exchange"):
            records, rollout = gather(records, rollout)
    metrics = rollout_metrics(prompt.name, rollout, prompts)
    if prompt is not OWN["generator"]:
        metrics |= _shortened(prompt, is_cut)
    kind = "" if prompt is SOLVE else f"{prompt.name}_"
    grades = grading and _grades_later(grading, timer, metrics, kind, len(records))
    records = with_parents(records, owners, grades)
    return Responses(role, parents, prompts, group_size, rollout, records, metrics, prompt.name)


def _grades_later(
    grading: Grading, timer: PhaseTimer, metrics: dict[str, float], kind: str, count: int
) -> list[Callable[[], bool]]:
    """A function for each grade. The first that is called waits for all, and adds the counts of failures to the
    metrics."""

    @functools.cache
    def grades() -> tuple[bool, ...]:
        with timer("grade"):
            report = grading.report()
        if grading.beside_s:
            timer.add("grade_beside", grading.beside_s)
        metrics.update({f"grader/{kind}{name}": getattr(report, name) for name in FAILURES})
        return report.correct

    return [lambda row=row: grades()[row] for row in range(count)]


def _show_ended(show_fn: Callable[[str], None], prompt: Prompt, total: int) -> Callable[[int], None]:
    names = {"generator": "solutions", "verifier": "verifications"}
    what, share = names.get(prompt.name, f"{prompt.name} responses"), "" if hosts.is_alone() else " of this process"

    def show(ended: int) -> None:
        show_fn(f"{ended} of {total} {what}{share} sampled")

    show(0)
    return show


def _judge_by_scores(
    context: RunContext, weights: Any, prompt: Prompt, solutions: Sequence[Solution], group_size: int
) -> Responses:
    """The judgements of a process reward model, which samples nothing. Those of a group are the same."""
    policy, (first, last) = context.policies["verifier"], hosts.own_range(len(solutions))
    require(prompt is OWN["verifier"], f"the verifier is a process reward model, which has no prompt {prompt.name}: "
            "take a verifier that writes, or judge with its own prompt")
    with context.timer("verify"):
        rows = [step_row(policy.template, policy.tokenizer, one.problem, one.text, policy.config.max_prompt)
                for one in solutions]
        context.show_fn(f"judging {last - first} solutions")
        found = _on_devices(context, policy, weights, "scoring with the verifier", "score with the verifier", [],
                            lambda laid_out: policy.reader.step_probabilities(laid_out, rows[first:last]))
        records = [scored_verification(solution, p_steps)
                   for solution, p_steps in zip(solutions[first:last], found, strict=True) for _ in range(group_size)]
    count = len(records)
    nothing = (np.zeros(0, np.int32),) * count, (np.zeros(0, np.float32),) * count
    rollout = Rollout(*nothing, np.zeros(count, bool), decode_steps=0, row_steps=0)
    if not hosts.is_alone():
        with context.timer("exchange"):
            records, rollout = gather(records, rollout)
    records = with_parents(records, [solution for solution in solutions for _ in range(group_size)])
    prompts = [row.tokens for row in rows]
    metrics = rollout_metrics(prompt.name, rollout, prompts) | _shortened(prompt, [row.is_cut for row in rows])
    metrics[f"{prompt.name}/tokens_scored"] = sum(map(len, prompts))
    return Responses("verifier", solutions, prompts, group_size, rollout, records, metrics, prompt.name)


def _shortened(prompt: Prompt, is_cut: Sequence[bool]) -> dict[str, float]:
    return {f"{prompt.name}/prompts_shortened": sum(is_cut), f"{prompt.name}/shortened_rate": np.mean(is_cut)}


def _sample(context: RunContext, policy: Policy, weights: Any, request: SampleRequest) -> Rollout:
    def work(laid_out: dict) -> Rollout:
        return policy.sampler.sample(laid_out, request)

    nothing, whose = Rollout((), (), np.zeros(0, bool), 0, 0), f"the {policy.role}"
    return _on_devices(context, policy, weights, f"sampling from {whose}", f"sample from {whose}", nothing,
                       work if request.prompts else lambda laid_out: nothing)


def _on_devices(
    context: RunContext, policy: Policy, weights: Any, doing: str, do: str, nothing: Any,
    work_fn: Callable[[dict], Any],
) -> Any:
    """What `work_fn` makes of the weights in the layout of sampling. Raises Broken in every process if one's logits are
    not finite."""
    # Concerns every process, also one without a prompt.
    layout_of = f"the layout of the {policy.role}'s weights"
    with context.timer("reshard"), names_memory(layout_of, ["reshard"], context.config, policy):
        laid_out = jax.block_until_ready(policy.sampler.layout(weights))
    result, mistake = nothing, ""
    try:
        with names_memory(doing, ["sample"], context.config, policy):
            result = work_fn(laid_out)
    except FloatingPointError as error:
        mistake = str(error)
    mistake = next(filter(None, hosts.join_parts([mistake])), "")
    if mistake:
        raise Broken(policy.role, f"cannot {do}: {mistake}")
    return result


def update_policy(
    context: RunContext, state: TrainState, learner: Responses, adv_BT: np.ndarray
) -> tuple[TrainState, dict[str, float]]:
    """All epochs x minibatches; metrics are over all of them."""
    policy = context.policies[learner.role]
    is_action_BT = action_mask(policy.config, learner.rollout)
    context.show_fn(f"update of the {learner.role}")
    has_moved = int(state.step) > 0  # away from its reference
    with context.timer("update"), names_memory(f"the update of the {policy.role}", ["update"], context.config, policy):
        batches = []
        for number in range(policy.config.loss.minibatches):
            batch = pack_minibatch(policy.config, policy.placement, number, learner, adv_BT, is_action_BT)
            with names_memory(f"scoring for the update of the {policy.role}", ["score"], context.config, policy):
                batches.append(policy.with_scores(batch, state.weights, context.references.get(policy.role)))
        state, updates = policy.updated(state, batches)
        metrics = over_updates(jax.device_get(updates), policy.config.loss.epochs)
    if has_moved:
        metrics.pop("kl_first", None)
    return state, {f"{policy.role}/{name}": value for name, value in metrics.items()}
