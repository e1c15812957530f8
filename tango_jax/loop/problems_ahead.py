"""Checks the problems that a run will take before any long work."""

import itertools
from collections import Counter
from collections.abc import Iterator

from ml_collections import ConfigDict

from tango_jax.loop.measure import evaluated_problems
from tango_jax.method.load import Method
from tango_jax.method.turn import problems_of_a_draw
from tango_jax.records import Problem
from tango_jax.rl.policy import Policy
from tango_jax.rl.schedule import Schedule, turn_at
from tango_jax.tasks.prompt_lengths import check_lengths
from tango_jax.tasks.task import Task

MOST_CHECKED = 5_000  # problems, the first ones; a few seconds of work


def check_problems(
    config: ConfigDict, policies: dict[str, Policy], task: Task, schedule: Schedule, method: Method
) -> None:
    """Raise ValueError if a prompt is too long for its role."""
    if config.task.name == "math":
        return  # problems from files: those that are too long are left out already
    problems = itertools.islice(problems_ahead(config, task, schedule, method), MOST_CHECKED)
    tokenizers = {role: policy.tokenizer for role, policy in policies.items()}
    check_lengths(config, tokenizers, problems, f"task.name={config.task.name}",
                  further=method.further_prompts("verifier"))


def problems_ahead(config: ConfigDict, task: Task, schedule: Schedule, method: Method) -> Iterator[Problem]:
    """The evaluation's, then those that turns may draw, each once."""
    yield from evaluated_problems(config, task)
    taken, seen = Counter(), set()
    for index in range(schedule.num_turns):
        role = turn_at(schedule, index).role
        for stream, count in method.rehearsals[role].draws.items():
            problem_fn = task.stream(stream)
            for _ in range(count * problems_of_a_draw(config.rl, role)):
                place = (problem_fn, taken[stream])
                if place not in seen:  # two streams may have the same problems
                    yield problem_fn(taken[stream])
                seen.add(place)
                taken[stream] += 1
