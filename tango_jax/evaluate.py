"""Greedy evaluation of both roles: the generator on held-out problems, the verifier on fixed and on live solutions."""

import numpy as np

from tango_jax import rng
from tango_jax.cycle import solve, verify
from tango_jax.grading import grade
from tango_jax.prompts.read import make_solution
from tango_jax.records import Solution, Verification
from tango_jax.scores import verifier_scores


def fixed_pool(task, size: int) -> list[Solution]:
    """The solutions on which the verifier is measured throughout: the same in every run of a task; maybe none."""
    pool = []
    if task.pool_solution is None:
        return pool
    for index in range(size):
        problem, text = task.pool_solution(index)
        pool.append(make_solution(task, problem, text, [], grade(text, problem.answer, task.grade_kind)))
    return pool


def evaluate_generator(loop, states, key_data) -> tuple[dict, list[Solution]]:
    """Greedy accuracy on the held-out problems, in all and by problem size; and the solutions."""
    asked, there_are = loop.config.eval.problems, loop.task.num_test
    problems = [loop.task.test_problem(index) for index in range(asked if there_are is None else min(asked, there_are))]
    solutions, rollout, _ = solve(loop, states, problems, 1, key_data, is_greedy=True)
    metrics = {
        "generator/accuracy": np.mean([solution.is_correct for solution in solutions]),
        "generator/format": np.mean([solution.format_score for solution in solutions]),
        "generator/eval_truncation_rate": rollout.is_truncated_B.mean(),
    }
    if all(solution.gold_steps is not None for solution in solutions):
        labels = [label for solution in solutions for label in solution.gold_steps]
        metrics["generator/step_accuracy"] = np.mean(labels) if labels else 0.0
    for size in sorted({solution.problem.size for solution in solutions}):
        chosen = [solution.is_correct for solution in solutions if solution.problem.size == size]
        metrics[f"generator/accuracy_by_size/{size}"] = np.mean(chosen)
    return metrics, solutions


def evaluate_verifier(loop, states, solutions, key_data, prefix: str) -> tuple[dict, list[Verification]]:
    """Greedy verification of the solutions, scored; and the verifications."""
    verifications, *_ = verify(loop, states, solutions, 1, key_data, is_greedy=True)
    scores = verifier_scores(solutions, verifications)
    return {f"verifier/{prefix}/{name}": value for name, value in scores.items()}, verifications


def evaluate(loop, states, pool: list[Solution]) -> tuple[dict, list[Solution], list[Verification]]:
    """Both roles, greedy: metrics, the generator's solutions, and the verifier's answers to them."""
    key_data = rng.step_key(loop.config.seed, "evaluate")
    metrics, solutions = evaluate_generator(loop, states, key_data)
    live, verifications = evaluate_verifier(loop, states, solutions, key_data, "live")
    fixed = evaluate_verifier(loop, states, pool, key_data, "pool")[0] if pool else {}
    return metrics | fixed | live, solutions, verifications
