"""Turns without models: what the roles say is given, so that advantages can be worked out by hand."""

from collections.abc import Callable, Sequence

import numpy as np
from ml_collections import ConfigDict

from tango_jax.config import default_config
from tango_jax.grading import GradeReport
from tango_jax.method.texts import with_parents
from tango_jax.method.turn import Turn
from tango_jax.records import Memory, Problem, Responses, Rollout, Solution, Verification
from tango_jax.rl.algorithms import algorithm_of
from tango_jax.rl.own_reward import OwnReward
from tango_jax.rl.schedule import Place
from tango_jax.tasks.own_grader import Grading
from tango_jax.tasks.task import Task
from tango_jax.text.prompts import Prompt

PROBLEM = Problem("p", "q", "b")
LOGP = -0.5  # of every sampled token
TOKENS = 5  # at most, of a response


def solution(is_correct: bool = True, format_score: float = 1.0, tokens: int = 2, steps: Sequence[str] = ("s",),
             step_ends: Sequence[int] = (0,), text: str = "t") -> Solution:
    ends = tuple(range(1, tokens + 1))
    return Solution(PROBLEM, text, tuple(steps), tuple(step_ends), format_score, is_correct, None, ends)


def verification(verdict: str = "CORRECT", judgements: Sequence[bool | None] = (True,), format_score: float = 1.0,
                 is_aligned: bool = True, tokens: int = 2) -> Verification:
    ends = tuple(range(1, tokens + 1))
    return Verification("v", tuple(judgements), verdict, format_score, is_aligned, ("b",) * len(judgements), ends)


def rollout_of(lengths: Sequence[int], first: int = 1) -> Rollout:
    """Responses of so many tokens; those of response b have the id `first` + b."""
    return Rollout(
        tokens=tuple(np.full(length, first + b, np.int32) for b, length in enumerate(lengths)),
        logps=tuple(np.full(length, LOGP, np.float32) for length in lengths),
        is_truncated_B=np.zeros(len(lengths), bool), decode_steps=max(lengths, default=0), row_steps=sum(lengths),
    )


def responses_of(role: str, parents: Sequence, group_size: int, records: Sequence, name: str = "") -> Responses:
    """The records as responses to these parents."""
    owners = [parent for parent in parents for _ in range(group_size)]
    rollout = rollout_of([len(record.token_ends) for record in records])
    return Responses(role, list(parents), [[place] for place in range(len(parents))], group_size, rollout,
                     with_parents(list(records), owners), {}, name or role)


class Said:
    """The work of a turn whose responses are given: the records of each prompt by its name, in the order of the rows
    over all calls."""

    def __init__(self, said: dict[str, Sequence], task: Task, reference_fn: Callable | None = None):
        self.left = {name: list(records) for name, records in said.items()}
        self.task, self.reference_fn = task, reference_fn
        self.asked: list[tuple[str, list]] = []  # (prompt, parents) of each call

    def respond(self, prompt: Prompt, parents: Sequence, samples: int, _: tuple) -> Responses:
        self.asked.append((prompt.name, list(parents)))
        count, left = len(parents) * samples, self.left[prompt.name]
        assert len(left) >= count, f"{prompt.name}: {count} responses are asked for, and {len(left)} are given"
        self.left[prompt.name] = left[count:]
        return responses_of(prompt.role, parents, samples, left[:count], prompt.name)

    def reference_logps(self, responses: Responses, prompt: Prompt) -> np.ndarray:
        return self.reference_fn(responses)

    def grade(self, problems: Sequence[Problem], texts: Sequence[str]) -> GradeReport:
        return Grading(self.task, problems, texts).report()


def task_of(kind: str = "string", is_correct: Callable | None = None) -> Task:
    """Problems whose gold answer is b."""
    def problem(index: int) -> Problem:
        return Problem(str(index), "q", "b")

    return Task("t", kind, 1, problem, problem, is_correct=is_correct)


def settings(prompts: int, samples: int, **rl: object) -> ConfigDict:
    """Of turns of so many problems and samples."""
    config = default_config()
    config.rl.prompts_per_step, config.rl.samples_per_prompt = prompts, samples
    config.rl.update(rl)
    for role in ("generator", "verifier"):
        config[role].max_response = TOKENS
    return config


def turn_of(config: ConfigDict, role: str, said: dict[str, Sequence], *, memory: Memory | None = None,
            phase: str = "", own_rewards: Sequence[OwnReward] = (), task: Task | None = None,
            reference_fn: Callable | None = None) -> Turn:
    """The first turn of a role, in which the roles say what is given by the name of its prompt."""
    task = task or task_of()
    return Turn(config, task, Place(0, role, phase or role, 0), memory or Memory(),
                algorithm_of(config[role].loss.algorithm), Said(said, task, reference_fn), own_rewards)
