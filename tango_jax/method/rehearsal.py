"""A rehearsal runs a turn's function on made-up responses before anything long begins.

It finds a turn's calls, what is trained on, and which problems are drawn, for compilation, planning, stage 1 and
validation. Faulty user functions fail here.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.grading import GradeReport, until_first_error
from tango_jax.method.lesson import advantages_of, digest_of
from tango_jax.method.texts import make_solution, make_verification, rollout_metrics, with_parents
from tango_jax.method.turn import Call, Calls, Turn
from tango_jax.records import Lesson, Memory, Problem, Responses, Rollout, Solution, problem_of
from tango_jax.rl.algorithms import Algorithm
from tango_jax.rl.own_reward import OwnReward
from tango_jax.rl.packing import action_mask
from tango_jax.rl.schedule import Place
from tango_jax.runtime.checks import require, shortened
from tango_jax.tasks.task import Task
from tango_jax.text.prompts import OWN, Fields, Prompt

MADE_UP = Problem("made up", "What is 1 + 1?", "2", size=1)
# The kinds that responses take in turn: all alike, and mixed as in a real turn.
SCENARIOS = {"right": ("right",), "wrong": ("wrong",), "mixed": ("right", "wrong", "empty", "wrong", "right"),
             "empty": ("empty",)}
WRONG_ANSWER = "made up"
LONGEST = 128  # tokens of a made-up response


class Trained(NamedTuple):
    prompts: int  # at most
    samples: int
    is_joined: bool = False  # see Responses
    is_scored: bool = False  # its marks are read, see Rollout.others


class Rehearsal(NamedTuple):
    calls: Calls
    learner: Trained
    scored: tuple[Call, ...]  # by the reference policy, to another prompt
    draws: Mapping[str, int]  # by stream
    metrics: tuple[str, ...]  # names
    labels: bool  # whether labels take the place of grades
    digests: tuple[int, ...]  # of its results, which must be the same in all processes
    example: tuple[Turn, Lesson]  # of mixed responses

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return tuple(dict.fromkeys(call.prompt for call in (*self.calls.values(), *self.scored)))

    @property
    def resamples(self) -> bool:
        """Whether dynamic sampling may draw further batches: of a turn with `t.until_full`."""
        turn, _ = self.example
        return bool(turn.repeated)


def made_up_task(problem: Problem | None) -> Task:
    """A task of one problem whose steps are all right."""
    problem = problem or MADE_UP
    return Task("made up", "string", 1, lambda _: problem, lambda _: problem, curriculum_problem=lambda _: problem,
                gold_steps=lambda _, steps: (True,) * len(steps))


def rehearse(
    turn_fn: Callable[[Turn], Lesson], role: str, config: ConfigDict, algorithm: Algorithm, task: Task,
    own_rewards: Sequence[OwnReward] = (), own: Mapping[str, Prompt] = OWN,
) -> Rehearsal:
    """Run a turn in all SCENARIOS. Raises ValueError: its result does not fit, its calls depend on the responses, or it
    is no function of them."""
    config = _with_short_responses(config)
    run_fn = functools.partial(_run, turn_fn, role, config, algorithm, task, own_rewards, own)
    runs = {name: run_fn(kinds) for name, kinds in SCENARIOS.items()}
    again = run_fn(SCENARIOS["mixed"])
    require(again.digest == runs["mixed"].digest, "with the same responses it has another result each time: a turn "
            "must be a function of the Turn alone, without a clock or random numbers")
    first = runs["mixed"].turn
    for name, run in runs.items():
        is_alike = run.turn.calls.keys() == first.calls.keys() and run.turn.draws == first.draws
        require(is_alike, f"its calls depend on the responses: {_listed(first)} where they are mixed, "
                f"{_listed(run.turn)} where all are {name}; always make the same calls, with an empty list of parents "
                "if need be")
    calls = {key: _one_call([run.turn.calls[key] for run in runs.values()]) for key in first.calls}
    learners = [run.lesson.responses for run in runs.values()]
    sizes = {Trained(one.most_prompts or len(one.prompts), one.group_size, one.is_joined,
                     one.rollout.others is not None) for one in learners}
    require(len(sizes) == 1, f"the number of responses that are trained on depends on data ({_shown(sizes)}): join "
            "them with most_prompts=, the largest number possible")
    require(not own_rewards or first.adds_own_reward, f"{role}.rewards is set, and the turn does not add it: use "
            "graded or agreement (tango_jax.method.rewards), or t.with_own_reward")
    metrics = tuple({**first.metrics, **runs["mixed"].lesson.metrics, **runs["mixed"].lesson.reward.metrics})
    return Rehearsal(calls, sizes.pop(), tuple(first.scored), dict(first.draws), metrics, first.has_labels,
                     tuple(run.digest for run in runs.values()), runs["mixed"][:2])


def _with_short_responses(config: ConfigDict) -> ConfigDict:
    """Arrays over the tokens of a real turn are large."""
    short = config.copy_and_resolve_references()
    for role in ROLES:
        short[role].max_response = min(config[role].max_response, LONGEST)
    return short


class _Run(NamedTuple):
    turn: Turn
    lesson: Lesson
    digest: int


def _run(
    turn_fn: Callable[[Turn], Lesson], role: str, config: ConfigDict, algorithm: Algorithm, task: Task,
    own_rewards: Sequence[OwnReward], own: Mapping[str, Prompt], kinds: tuple[str, ...],
) -> _Run:
    phase = role if role == "generator" else "warmup"
    work = _MadeUp(config, task, kinds)
    t = Turn(config, task, Place(0, role, phase, 0), Memory(), algorithm, work, own_rewards, own=own)
    lesson = turn_fn(t)
    adv_BT = advantages_of(lesson, role, config)
    of_responses = {name: None for one in t.everything() for name in one.metrics}
    names = [*t.metrics, *lesson.reward.metrics, *lesson.metrics, *of_responses]
    twice = sorted({name for name in names if names.count(name) > 1})
    require(not twice, f"two parts of a turn have metrics named {' and '.join(twice)}: rename those that the "
            "turn returns")
    return _Run(t, lesson, digest_of(lesson, adv_BT))


def _one_call(made: Sequence[Call]) -> Call:
    shown, most = f"t.sample(..., prompt={made[0].prompt.name})", max(one.at_most for one in made)
    counts, samples = {one.prompts for one in made}, {one.samples for one in made}
    require(len(samples) == 1, f"{shown} takes {min(samples)} to {max(samples)} samples, depending on earlier samples: "
            "take one number")
    require(bool(most) or len(counts) == 1, f"{shown} has {min(counts)} to {max(counts)} parents, depending on "
            "data: give at_most=, the largest number possible")
    require(not most or max(counts) <= most, f"{shown} has {max(counts)} parents, and at_most={most}: raise it")
    return Call(made[0].prompt, most or counts.pop(), samples.pop())


def _listed(t: Turn) -> str:
    return ", ".join(name for name, _ in t.calls) or "none"


def _shown(sizes: set[Trained]) -> str:
    return ", ".join(f"{one.prompts} x {one.samples}" for one in sorted(sizes))


class _MadeUp:
    """Responses are of the `kinds`, in turn."""

    def __init__(self, config: ConfigDict, task: Task, kinds: tuple[str, ...]):
        self._config, self._task, self._kinds = config, task, kinds
        self._solutions: dict[tuple[Problem, str], Solution] = {}  # parsed once for all samples of a problem

    def respond(self, prompt: Prompt, parents: Sequence, samples: int, _: tuple) -> Responses:
        for is_plain in (False, True):
            fields = prompt.fields(parents[0], is_plain)
            require(isinstance(fields, Fields), f"the prompt {prompt.name} returned {shortened(fields)}; it must "
                    "return Fields (tango_jax.text.prompts)")
        owners = [parent for parent in parents for _ in range(samples)]
        kinds = itertools.cycle(self._kinds)
        made = [self._record(prompt.role, owner, kind) for owner, kind in zip(owners, kinds, strict=False)]
        lengths = [len(record.token_ends) for record in made]
        rollout = Rollout(
            tokens=tuple(np.ones(length, np.int32) for length in lengths),
            logps=tuple(np.zeros(length, np.float32) for length in lengths),
            is_truncated_B=np.zeros(len(made), bool), decode_steps=max(lengths), row_steps=max(sum(lengths), 1),
        )
        if prompt.is_scored:  # the first tokens stand for the marks
            others = (np.where(np.arange(len(record.token_ends)) < len(record.judgements), 1, -1) for record in made)
            rollout = dataclasses.replace(rollout, others=tuple(others))
        metrics = rollout_metrics(prompt.name, rollout, [[1]] * len(parents))
        return Responses(prompt.role, parents, [[1]] * len(parents), samples, rollout, with_parents(made, owners),
                         metrics, prompt.name)

    def reference_logps(self, responses: Responses, prompt: Prompt) -> np.ndarray:
        prompt.fields(responses.parents[0], False)
        return np.zeros(action_mask(self._config[responses.role], responses.rollout).shape, np.float32)

    def grade(self, problems: Sequence[Problem], texts: Sequence[str]) -> GradeReport:
        correct = tuple(WRONG_ANSWER not in text for text in texts)
        return GradeReport(correct, errors=0, timeouts=0, overlong=0, failures=("",) * len(correct))

    def _record(self, role: str, owner: Any, kind: str) -> Any:
        most, task = self._config[role].max_response, self._task
        if role == "generator":
            problem = problem_of(owner)
            if (problem, kind) not in self._solutions:
                answer = problem.answer if kind == "right" else WRONG_ANSWER
                text, ends = _solution_text(answer, kind, task.min_steps, most)
                self._solutions[problem, kind] = make_solution(task, problem, text, ends, is_correct=kind == "right")
            return self._solutions[problem, kind]
        steps = owner.steps if isinstance(owner, Solution) else getattr(owner, "blocks", ())
        return _verification(kind, len(steps), getattr(owner, "format_score", 1.0), most,
                             self._config.verifier.stop_at_first_error)


@functools.cache
def _solution_text(answer: str, kind: str, min_steps: int, most: int) -> tuple[str, tuple[int, ...]]:
    steps = "".join(f"<step>step {number}</step>\n" for number in range(1, max(min_steps, 2) + 1))
    text = "" if kind == "empty" else f"<think>\n{steps}</think>\n<answer>\\boxed{{{answer}}}</answer>"
    return text, _token_ends(text, most)


@functools.cache
def _verification(kind: str, num_steps: int, format_score: float, most: int, stops: bool) -> Any:
    mark = "CORRECT" if kind == "right" else "INCORRECT"
    blocks = f"<step>read \\boxed{{{mark}}}</step>\n" * num_steps
    text = "" if kind == "empty" else (f"<step_verification>\n{blocks}</step_verification>\n"
                                       f"<final_verification>\\boxed{{{mark}}}</final_verification>")
    text = until_first_error(text) if stops else text
    judged = Solution(MADE_UP, "", ("",) * num_steps, (), format_score, True, None)
    said = make_verification(judged, text, _token_ends(text, most), False, stops)
    return dataclasses.replace(said, p_steps=tuple(None if mark is None else float(mark) for mark in said.judgements))


def _token_ends(text: str, most: int) -> tuple[int, ...]:
    count = max(min(len(text), most), 1)
    return tuple(len(text) * (number + 1) // count for number in range(count))
