"""Greedy evaluation of both roles: the generator on held-out problems, the verifier on fixed and on live solutions."""

import numpy as np

from tango_jax import rng
from tango_jax.cycle import verifier_prompts
from tango_jax.grading import grade
from tango_jax.prompts.read import make_solution, read_solutions, read_verifications
from tango_jax.prompts.templates import generator_prompt
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
    policy = loop.generator
    asked, there_are = loop.config.eval.problems, loop.task.num_test
    problems = [loop.task.test_problem(index) for index in range(asked if there_are is None else min(asked, there_are))]
    prompts = [generator_prompt(policy.template, policy.tokenizer, problem) for problem in problems]
    weights = policy.sampler.layout(states["generator"].params)
    rollout = policy.sampler.sample(weights, prompts, 1, key_data, 0.0)
    solutions, _ = read_solutions(loop.task, policy.tokenizer, problems, rollout, 1)
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
    policy = loop.verifier
    weights = policy.sampler.layout(states["verifier"].params)
    rollout = policy.sampler.sample(weights, verifier_prompts(policy, solutions)[0], 1, key_data, 0.0)
    verifications = read_verifications(policy.tokenizer, solutions, rollout, 1)
    scores = verifier_scores(solutions, verifications)
    return {f"verifier/{prefix}/{name}": value for name, value in scores.items()}, verifications


def evaluate(loop, states, pool: list[Solution]) -> tuple[dict, list[Solution], list[Verification]]:
    """Both roles, greedy: metrics, the generator's solutions, and the verifier's answers to them."""
    key_data = rng.step_key(loop.config.seed, "evaluate")
    metrics, solutions = evaluate_generator(loop, states, key_data)
    live, verifications = evaluate_verifier(loop, states, solutions, key_data, "live")
    fixed = evaluate_verifier(loop, states, pool, key_data, "pool")[0] if pool else {}
    return metrics | fixed | live, solutions, verifications
