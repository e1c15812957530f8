"""Greedy evaluation of both roles, of the verifier on a fixed pool and on live solutions."""

import logging
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from tango_jax.grading import FAILURES
from tango_jax.loop.turn import RunContext, respond
from tango_jax.method.load import Method
from tango_jax.method.relatives import second_try_metrics
from tango_jax.method.texts import make_solution, make_verification
from tango_jax.records import Problem, Responses, Solution, States, Verification
from tango_jax.runtime import rng
from tango_jax.tasks.own_grader import grade_solutions
from tango_jax.tasks.task import Task
from tango_jax.text.prompts import SECOND_TRY
from tango_jax.tracking.scores import generator_scores, verifier_scores

log = logging.getLogger(__name__)


class Measured(NamedTuple):
    metrics: dict[str, float]
    solutions: list[Solution]
    verifications: list[Verification]
    second_tries: dict[int, Solution]  # by the place of the solution, of an arm that has them


def _pool_texts(task: Task, size: int) -> list[tuple[Problem, str]]:
    """Each once: a task may have fewer than `size`."""
    if task.pool_solution is None:
        return []
    return [task.pool_solution(index) for index in range(size if task.num_pool is None else min(size, task.num_pool))]


def fixed_pool(task: Task, size: int) -> list[Solution]:
    """Equal in every run of a task; may be empty."""
    chosen = _pool_texts(task, size)
    if not chosen:
        return []
    report = grade_solutions(task, [problem for problem, _ in chosen], [text for _, text in chosen])
    if failed := sum(getattr(report, name) for name in FAILURES):
        log.warning("%d of the %d solutions of the fixed pool count as wrong, because the grader could not judge them",
                    failed, len(chosen))
    return [
        make_solution(task, problem, text, [], is_correct)
        for (problem, text), is_correct in zip(chosen, report.correct, strict=True)
    ]


def evaluated_problems(config: ConfigDict, task: Task) -> list[Problem]:
    asked, there_are = config.eval.problems, task.num_test
    return [task.test_problem(index) for index in range(asked if there_are is None else min(asked, there_are))]


def measured_names(config: ConfigDict, task: Task, method: Method) -> list[str]:
    """The scores that every evaluation has, except those by problem size. Of live solutions only their problems are
    known; scores that need solutions with and without a wrong step are left out."""
    live = [make_solution(task, problem, "", [], True) for problem in evaluated_problems(config, task)]
    judged = {"live": live}
    if chosen := _pool_texts(task, config.eval.pool):
        judged["pool"] = [make_solution(task, problem, text, [], True) for problem, text in chosen]
    names = [f"generator/{name}" for name in generator_scores(live, [False]) if "/" not in name]
    for kind, solutions in judged.items():
        unread = [make_verification(solution, "", [], False) for solution in solutions]
        names += [f"verifier/{kind}/{name}" for name in verifier_scores(solutions, unread)]
    if SECOND_TRY in method.further_prompts("generator"):
        names += [name.replace("/", "/eval_") for name in second_try_metrics(live, [])]
    return names


def evaluate_roles(context: RunContext, states: States, pool: list[Solution]) -> Measured:
    key_data = rng.step_key(context.config.seed, "evaluate")
    problems = evaluated_problems(context.config, context.task)
    solved = respond(context, states, "generator", problems, 1, key_data, is_greedy=True)
    judged = respond(context, states, "verifier", solved.records, 1, key_data, is_greedy=True)
    metrics = _generator_metrics(solved)
    if pool:
        metrics |= _verifier_metrics(respond(context, states, "verifier", pool, 1, key_data, is_greedy=True), "pool")
        metrics["verifier/pool/solutions"] = len(pool)
    metrics |= _verifier_metrics(judged, "live")
    tried_metrics, second_tries = _try_again(context, states, judged, key_data)
    return Measured(metrics | tried_metrics, solved.records, judged.records, second_tries)


def _try_again(
    context: RunContext, states: States, judged: Responses, key_data: np.ndarray
) -> tuple[dict[str, float], dict[int, Solution]]:
    """Also the tries by the place of the solution; empty if the arm has none."""
    if context.method is None or SECOND_TRY not in context.method.further_prompts("generator"):
        return {}, {}
    rejected = [place for place, one in enumerate(judged) if one.verdict == "INCORRECT"]
    tried = []
    if rejected:
        parents = [judged[place] for place in rejected]
        tried = respond(context, states, "generator", parents, 1, key_data, is_greedy=True, prompt=SECOND_TRY).records
    figures = second_try_metrics(judged.parents, tried)
    metrics = {name.replace("/", "/eval_"): value for name, value in figures.items()}
    return metrics, dict(zip(rejected, tried, strict=True))


def _generator_metrics(solved: Responses) -> dict[str, float]:
    scores = generator_scores(solved.records, solved.rollout.is_truncated_B)
    names = {"truncation_rate": "eval_truncation_rate"}  # `truncation_rate` is the name of the training metric
    metrics = {f"generator/{names.get(name, name)}": value for name, value in scores.items()}
    metrics["generator/problems"] = len(solved.records)
    # Answers that count as wrong because grading failed; training has other names for them.
    return metrics | {f"grader/eval_{name}": solved.metrics[f"grader/{name}"] for name in FAILURES}


def _verifier_metrics(judged: Responses, prefix: str) -> dict[str, float]:
    scores = verifier_scores(judged.parents, judged.records)
    scores |= {name: judged.metrics[f"verifier/{name}"] for name in ("truncation_rate", "shortened_rate")}
    return {f"verifier/{prefix}/{name}": value for name, value in scores.items()}
