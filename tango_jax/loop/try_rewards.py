"""Loads the reward functions of users and tries them on made-up responses.

Takes the configuration and the task; returns the functions by role. Runs at the start of a run, so that a function
that fails does so now, and not after hours of stage 1.
"""

from collections.abc import Iterator

from ml_collections import ConfigDict

from tango_jax.loop.responses import make_solution, make_verification
from tango_jax.records import Solution, Verification
from tango_jax.rl.own_reward import OwnReward, load_own_rewards
from tango_jax.tasks.task import Task


def load_and_try_rewards(config: ConfigDict, task: Task) -> dict[str, OwnReward]:
    """The reward functions that the configuration names, by role, each called on two responses to the first problem.

    Raises:
        ValueError: a function cannot be loaded, raises an error, or does not return a number (rl/own_reward.py).
    """
    own_rewards = load_own_rewards(config)
    for role, own in own_rewards.items():
        for solution, verification in _made_up_responses(task):
            try:
                own.of(*((solution, solution.problem) if role == "generator" else (verification, solution)))
            except ValueError as error:
                raise ValueError(f"{error}; the response was made up to try the function before the run") from error
    return own_rewards


def _made_up_responses(task: Task) -> Iterator[tuple[Solution, Verification]]:
    """A right solution and its verification, in all their tags; and two empty responses, which models also give."""
    problem, num_steps = task.train_problem(0), max(task.min_steps, 1)
    steps = "".join(f"<step>step {number}</step>\n" for number in range(1, num_steps + 1))
    solved = f"<think>\n{steps}</think>\n<answer>\\boxed{{{problem.answer}}}</answer>"
    blocks = "<step>right \\boxed{CORRECT}</step>\n" * num_steps
    judged = (f"<step_verification>\n{blocks}</step_verification>\n"
              "<final_verification>\\boxed{CORRECT}</final_verification>")
    for solution_text, verification_text in ((solved, judged), ("", "")):
        # One token a character.
        solution = make_solution(task, problem, solution_text, range(1, len(solution_text) + 1),
                                 is_correct=bool(solution_text))
        ends = range(1, len(verification_text) + 1)
        yield solution, make_verification(solution, verification_text, ends, is_truncated=False)
