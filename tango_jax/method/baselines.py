"""Baselines: a generator without a verifier, or with the task's step labels."""

from tango_jax.method.rewards import graded, step_metrics, step_rewards
from tango_jax.method.tango import share_of_one_outcome
from tango_jax.method.turn import Turn
from tango_jax.records import Lesson
from tango_jax.rl.schedule import alpha_of


def solve_alone(t: Turn, stream: str = "train") -> Lesson:
    """GRPO: all tokens of a response share its reward."""
    solutions, reward = t.until_full(
        lambda problems: graded(t, t.sample("generator", problems, t.rl.samples_per_prompt)), stream
    )
    return Lesson(solutions, reward, {"outcome": (1.0, t.algorithm.outcome(reward, solutions))},
                  {"generator/alpha": 0.0})


def solve_curriculum(t: Turn) -> Lesson:
    """GRPO on problems that are also as short as the verifier's."""
    return solve_alone(t, "curriculum")


def solve_with_gold_steps(t: Turn) -> Lesson:
    """The task's step labels replace the verifier's: a verifier without faults."""
    solutions, reward = t.until_full(
        lambda problems: graded(t, t.sample("generator", problems, t.rl.samples_per_prompt))
    )
    steps = step_rewards(t, solutions, [solution.gold_steps for solution in solutions])
    alpha = alpha_of(t.generator_step, t.rl, share_of_one_outcome(t, solutions))
    steps_BT = t.algorithm.step(steps, solutions)
    terms = {"outcome": (1 - alpha, t.algorithm.outcome(reward, solutions)), "steps": (alpha, steps_BT)}
    return Lesson(solutions, reward, terms, step_metrics([steps], alpha), step_rewards=[steps])
