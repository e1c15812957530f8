"""Loads what a run's settings name of its method, and tries the user's functions on made-up responses.

Takes the configuration and the task; returns the method. Runs at the start of a run, so that a function that fails does
so now, and not after hours of stage 1.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from tango_jax.arms import ARMS
from tango_jax.loop.responses import make_solution, make_verification
from tango_jax.records import Counters, Problem, Responses, Rollout, Solution, Verification
from tango_jax.rl.algorithms import ALGORITHMS
from tango_jax.rl.credit import TurnSoFar
from tango_jax.rl.family import joined
from tango_jax.rl.own_method import CREDITS, REWARDS, Method, load_method
from tango_jax.rl.schedule import Turn
from tango_jax.runtime.checks import require
from tango_jax.tasks.task import Task
from tango_jax.tracking.turn_metrics import rollout_metrics, turn_metrics


def try_method(config: ConfigDict, task: Task) -> Method:
    """The method that the configuration names. Functions of the user's are called on a right and an empty response to
    the first problem.

    Raises:
        ValueError: a function cannot be loaded, raises an error, or does not return what it should (rl/own_method.py).
    """
    method = load_method(config)
    pairs = [_made_up(task, is_empty) for is_empty in (False, True)]
    try:
        for role, own in method.own_rewards.items():
            for solution, verification in pairs:
                own.of(*((solution, solution.problem) if role == "generator" else (verification, solution)))
        for role, plan in method.arm.turns.items():
            own = plan.reward not in REWARDS or plan.credit not in CREDITS
            if own or config.arm not in ARMS or config[role].loss.algorithm not in ALGORITHMS:
                _try_turn(config, method, role, pairs)
    except ValueError as error:
        raise ValueError(f"{error}; the response was made up to try the function before the run") from error
    return method


def _try_turn(
    config: ConfigDict, method: Method, role: str, pairs: Sequence[tuple[Solution, Verification]]
) -> None:
    """See `_make_turn`. Whatever does not fit becomes a ValueError of one line."""
    try:
        _make_turn(config, method, role, pairs)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"arm={config.arm}, turns[{role!r}]: its calls, reward, credit and {role}.loss.algorithm="
                         f"{config[role].loss.algorithm} do not fit ({type(error).__name__}: {error})") from error


def _make_turn(
    config: ConfigDict, method: Method, role: str, pairs: Sequence[tuple[Solution, Verification]]
) -> None:
    """A turn of the role, without its update: two solutions of a problem, or two verifications of a solution, and what
    follows them where the plan asks for it."""
    solutions, verifications = map(list, zip(*pairs, strict=True))
    solutions = solutions if role == "generator" else solutions[:1]
    made = {"generator": _responses("generator", [solutions[0].problem], solutions),
            "verifier": _responses("verifier", solutions, verifications)}  # fmt: skip
    judged = made["verifier"].next_parents
    made["second_solution"] = dataclasses.replace(_responses("generator", judged[:1], solutions[:1]), places=[0])
    made["second_judgement"] = _responses("verifier", judged, verifications)
    plan = method.arm.turns[role]
    answers = {call.name: made[call.name] for call in plan.calls_until(role)}
    reward = method.rewards[role](answers, config.rl)  # later calls are made when the rewards are known
    answers |= {call.name: made[call.name] for call in plan.calls_after(role)}
    learner = joined(answers, plan.learners(role))
    length_B = np.array([len(record.token_ends) for record in learner.records])
    is_action_BT = np.arange(length_B.max())[None, :] < length_B[:, None]
    teacher_logp_BT = np.zeros(is_action_BT.shape, np.float32) if plan.teacher else None
    so_far = TurnSoFar(config, Turn(0, role, role, 0), answers, reward.reward_B, is_action_BT, Counters(),
                       teacher_logp_BT=teacher_logp_BT)  # fmt: skip
    credit = method.credits[role](so_far)
    algorithm = config[role].loss.algorithm
    require(np.shape(credit.adv_BT) == is_action_BT.shape and np.isfinite(credit.adv_BT).all(),
            f"{role}.loss.algorithm={algorithm}: its advantages are of shape {list(np.shape(credit.adv_BT))}; there "
            f"must be a finite number for each token, {list(is_action_BT.shape)}")
    turn_metrics(role, answers, reward.metrics, credit.metrics)


def _responses(role: str, parents: list, records: list) -> Responses:
    lengths = [len(record.token_ends) for record in records]
    rollout = Rollout(
        tokens=tuple(np.ones(length, np.int32) for length in lengths),
        logps=tuple(np.zeros(length, np.float32) for length in lengths),
        is_truncated_B=np.zeros(len(records), bool), decode_steps=max(lengths), row_steps=sum(lengths),
    )  # fmt: skip
    metrics = rollout_metrics(role, rollout)
    return Responses(role, parents, [[1]] * len(parents), len(records) // len(parents), rollout, records, metrics)


def _made_up(task: Task, is_empty: bool) -> tuple[Solution, Verification]:
    """A right solution and its verification, in all their tags; or two empty responses, which models also give."""
    problem, num_steps = task.train_problem(0), max(task.min_steps, 1)
    solved, judged = ("", "") if is_empty else _tagged(problem, num_steps)
    solution = make_solution(task, problem, solved, _ends(solved), is_correct=not is_empty)
    return solution, make_verification(solution, judged, _ends(judged), is_truncated=False)


def _tagged(problem: Problem, num_steps: int) -> tuple[str, str]:
    steps = "".join(f"<step>step {number}</step>\n" for number in range(1, num_steps + 1))
    blocks = "<step>right \\boxed{CORRECT}</step>\n" * num_steps
    return (f"<think>\n{steps}</think>\n<answer>\\boxed{{{problem.answer}}}</answer>",
            f"<step_verification>\n{blocks}</step_verification>\n"
            "<final_verification>\\boxed{CORRECT}</final_verification>")


def _ends(text: str) -> range:
    """One token a character."""
    return range(1, len(text) + 1)
