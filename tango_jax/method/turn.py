"""What a turn may do: sample, score and grade, draw problems, and read settings, schedule and memory.

A method maps a `Turn` to a `Lesson` (records.py), as in tango.py. It makes the same calls whatever the data are: only
the number of parents may depend on them. So a rehearsal knows what to compile, and with one seed all arms see the same
problems and random numbers.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from ml_collections import ConfigDict

from tango_jax.grading import GradeReport
from tango_jax.method import practice
from tango_jax.method.dynamic_sampling import Batch, chosen_batch, over_batches
from tango_jax.records import Memory, Problem, Responses, Rewards, Rollout, Solution, StepRewards, Term
from tango_jax.rl.algorithms import Algorithm
from tango_jax.rl.own_reward import OwnReward
from tango_jax.rl.packing import action_mask
from tango_jax.rl.schedule import Place
from tango_jax.rl.step_norm import ELEMENTS, step_advantage_BT
from tango_jax.runtime.checks import require
from tango_jax.runtime.user_code import UserFunction, is_user_code
from tango_jax.tasks.task import STREAMS, Task
from tango_jax.text.prompts import OWN, PROMPTS, Prompt

MAX_SCORED_TOKENS = 2**24  # of `Turn.reference_logps`: above that, float32 cannot tell the places of tokens apart


class Work(Protocol):
    """Samples, scores and grades for a turn: with policies in the loop, made up in a rehearsal."""

    def respond(self, prompt: Prompt, parents: Sequence, samples: int, path: tuple[str | int, ...]) -> Responses:
        """Sample `samples` responses to each parent. `path` names the random numbers."""

    def reference_logps(self, responses: Responses, prompt: Prompt) -> np.ndarray:
        """See `Turn.reference_logps`."""

    def grade(self, problems: Sequence[Problem], texts: Sequence[str]) -> GradeReport:
        """Whether the answers in these texts are right."""


class Call(NamedTuple):
    """A call of a turn; `prompts` is the most that there can be."""

    prompt: Prompt
    prompts: int
    samples: int
    at_most: int = 0  # as `Turn.sample` was told


Calls = dict[tuple[str, int], Call]  # (name of the prompt, calls of that prompt before) -> call


RewardFn = Callable[["Turn", Responses], tuple[Responses, Rewards]]  # such as `rewards.graded`


class Advantages:
    """The algorithm of a role with its settings: rewards in, float32 [B, T] out, 0 off the actions."""

    def __init__(self, algorithm: Algorithm, role: str, config: ConfigDict):
        self.algorithm, self.config = algorithm, config
        self._key, self._is_own = f"{role}.loss.algorithm", is_user_code(config.loss.algorithm)

    def outcome(self, reward: Rewards, responses: Responses) -> np.ndarray:
        """On all tokens of a response. Raises ValueError for groups of different sizes, unless the algorithm compares
        each alone."""
        return self._by_group(self.algorithm.outcome_fn, responses, reward.reward_B)

    def step(self, rewards: StepRewards, responses: Responses) -> np.ndarray:
        """Advantages by the rewards of the steps (`loss.step_norm`); raises as `outcome`."""
        if self.config.loss.step_norm == ELEMENTS:
            return self._by_group(self.algorithm.step_fn, responses, rewards.reward_BT, rewards.is_end_BT)
        form_fn = functools.partial(step_advantage_BT, self.config.loss.step_norm, self.algorithm.baseline_fn,
                                    not self.algorithm.compares_groups_alone)
        is_right_B = np.array([solution.is_right for solution in responses], bool)
        y_BT = np.where(rewards.reward_BT > 0, 1.0, -1.0) if rewards.y_BT is None else rewards.y_BT
        num_steps_B = np.array([len(set(solution.step_ends)) for solution in responses])
        return self._by_group(form_fn, responses, y_BT, rewards.is_end_BT, num_steps_B, is_right_B)

    def _by_group(self, equation: Callable[..., np.ndarray], responses: Responses, *rows: np.ndarray) -> np.ndarray:
        is_action_BT, loss = action_mask(self.config, responses.rollout), self.config.loss
        if not responses.is_joined:
            return self._called(equation, *rows, is_action_BT, responses.group_size, loss)
        setting = f"{responses.role}.loss.algorithm={loss.algorithm}"
        require(self.algorithm.compares_groups_alone, f"it compares groups of different sizes, and {setting} cannot: "
                "choose an algorithm that compares each group alone, such as grpo")
        adv_BT = np.zeros(is_action_BT.shape, np.float32)
        for group in responses.groups():
            parts = (values[group] for values in (*rows, is_action_BT))
            adv_BT[group] = self._called(equation, *parts, len(group), loss)
        return adv_BT

    def _called(self, equation: Callable[..., np.ndarray], *args: Any) -> np.ndarray:
        if not self._is_own:
            return equation(*args)
        function, shape = UserFunction(self._key, self.config.loss.algorithm, equation), args[-3].shape
        adv_BT = np.asarray(function.call(*args))
        if adv_BT.shape != shape or not np.isfinite(adv_BT).all():
            why = " and not finite" if adv_BT.shape == shape else ""
            function.refuse(f"its advantages are of shape {list(adv_BT.shape)}{why}; there must be a finite number for "
                            f"each token, {list(shape)}")
        return adv_BT.astype(np.float32)

    def has_signal_P(self, reward_B: np.ndarray, responses: Responses) -> np.ndarray:
        """bool, whether any response of a group has an outcome advantage by these rewards."""
        signal_fn = self.algorithm.has_signal_fn
        if self._is_own:
            signal_fn = UserFunction(self._key, self.config.loss.algorithm, signal_fn).call
        if not responses.is_joined:
            return signal_fn(reward_B.reshape(-1, responses.group_size))
        return np.array([signal_fn(reward_B[rows][None])[0] for rows in responses.groups()], bool)


class Turn:
    """One turn of a role, from the first problem to the lesson."""

    def __init__(
        self, config: ConfigDict, task: Task, place: Place, memory: Memory, algorithm: Algorithm, work: Work,
        own_rewards: Sequence[OwnReward] = (), rehearsed: Calls | None = None, own: Mapping[str, Prompt] = OWN,
    ):
        self.config, self.task, self.memory = config, task, memory
        self.rl = config.rl
        self.role, self.place, self.generator_step = place.role, place, place.generator_step
        self.algorithm = Advantages(algorithm, place.role, config[place.role])
        self.sampled: list[Responses] = []  # all responses of the turn, by calls; of a dynamic batch, those chosen
        self.metrics: dict[str, float] = {}  # of `until_full`, the mean of its calls
        self.draws: Counter[str] = Counter()  # by stream
        self.adds_own_reward = self.has_labels = False
        self.calls: Calls = {}  # of the turn so far; of several batches, the largest
        self.repeated: set[tuple[str, int]] = set()  # of `calls`, those that dynamic sampling makes for each batch
        self.scored: list[Call] = []
        self._work, self._own_rewards, self._rehearsed, self._own = work, own_rewards, rehearsed, own
        self._batch, self._numbers, self._everything, self._full = 0, Counter(), [], []

    def sample(
        self, role: str, parents: Sequence, samples: int = 1, prompt: Prompt | None = None, at_most: int = 0
    ) -> Responses:
        """`samples` responses of a role to its prompt about each parent, decoded, parsed and graded. The grading may go
        on while the turn does: the first read of a grade waits for those of the whole call. In arms with `is_scored`
        the verifier's marks are read, not written: one verification has the likelier mark of each step, several are
        drawn.

        `parents`: problems for the generator's prompt, solutions for the verifier's; see text/prompts.py. `at_most`:
        the most parents that there can be, where their number depends on data. Raises ValueError: there are more
        parents or samples than the rehearsal has seen.
        """
        prompt, parents = prompt or self._own[role], list(parents)
        require(prompt.role == role, f"t.sample({role!r}, ..., prompt={prompt.name}): this is a {prompt.role}'s "
                f"prompt; give one of the {role}")
        self._note((prompt.name, self._number("name", prompt.name)), Call(prompt, len(parents), samples, at_most))
        stream = prompt.stream or prompt.name  # prompts of one stream are numbered together: no two calls share a key
        number = self._number("stream", stream)
        path = (stream, self.role, self.place.role_step, self._batch, *(number,) * (number > 0))
        said = self._work.respond(prompt, parents, samples, path) if parents else _nothing(prompt, samples)
        said = said.replace(most_prompts=at_most or None)
        self.sampled.append(said)
        self._everything.append(said)
        return said

    def _number(self, kind: str, name: str) -> int:
        self._numbers[kind, name] += 1
        return self._numbers[kind, name] - 1

    def _note(self, key: tuple[str, int], call: Call) -> None:
        self.calls[key] = max(self.calls.get(key, call), call, key=lambda one: one.prompts)
        if self._rehearsed is None:
            return
        shown, seen = f"t.sample(..., prompt={key[0]}), call {key[1] + 1} of that prompt,", self._rehearsed.get(key)
        require(seen is not None, f"{shown} was not made in the rehearsal of the turn: make the same calls whatever "
                "the data are; their parents may be an empty list")
        require(call.prompts <= seen.prompts and call.samples == seen.samples, f"{shown} has {call.prompts} parents "
                f"with {call.samples} samples each, and the rehearsal had at most {seen.prompts} with {seen.samples}: "
                "give at_most=, the largest number possible")

    def problems(self, stream: str = "train") -> list[Problem]:
        """The next `rl.prompts_per_step` problems of a stream (tasks/task.py STREAMS)."""
        return self._draw(stream, self._site(stream), 0)

    def until_full(
        self, sample_fn: Callable[[list[Problem]], tuple[Responses, Rewards]], stream: str = "train"
    ) -> tuple[Responses, Rewards]:
        """Responses to `rl.prompts_per_step` problems, with their rewards. With `rl.dynamic_sampling` (DAPO, arXiv
        2503.14476), more batches are drawn until so many problems have responses whose rewards differ. `sample_fn`:
        problems -> (responses to train on, their rewards); it may make several calls."""
        rewards = []

        def sample(problems: list[Problem]) -> Responses:
            responses, reward = sample_fn(problems)
            rewards.append(reward)
            return responses

        _, rewarded_fn = self.until_full_later(sample, lambda _, responses: (responses, rewards[-1]), stream)
        return rewarded_fn()

    def until_full_later(
        self, sample_fn: Callable[[list[Problem]], Responses], reward_fn: RewardFn, stream: str = "train"
    ) -> tuple[Responses, Callable[[], tuple[Responses, Rewards]]]:
        """The sampled responses, and a function that returns what `reward_fn` does: responses, perhaps labelled, and
        their rewards. What a turn samples before it calls the function is sampled while the solutions are graded.
        Dynamic sampling needs the rewards, and waits for them here."""
        site = self._site(stream)
        if self.rl.dynamic_sampling:
            chosen = self._chosen(sample_fn, reward_fn, stream, site)
            return chosen.responses, lambda: (chosen.responses, chosen.reward)
        responses = sample_fn(self._draw(stream, site, 0))

        @functools.cache
        def rewarded() -> tuple[Responses, Rewards]:
            learner, reward = reward_fn(self, responses)
            signal_P = self.algorithm.has_signal_P(reward.reward_B, learner)
            self._note_full({f"{self.role}/groups_without_signal": 1.0 - float(signal_P.mean())})
            return learner, reward

        return responses, rewarded

    def _chosen(
        self, sample_fn: Callable[[list[Problem]], Responses], reward_fn: RewardFn, stream: str, site: int
    ) -> Batch:
        batches, before, numbers, most = [], self.sampled, self._numbers, 1 + self.rl.dynamic_sampling
        calls_before = set(self.calls)
        while len(batches) < most and sum(batch.has_signal.sum() for batch in batches) < self.rl.prompts_per_step:
            self.sampled, self._batch = [], len(batches)
            self._numbers = numbers.copy()  # each batch makes the same calls, numbered after those before
            problems = self._draw(stream, site, len(batches))
            responses, reward = reward_fn(self, sample_fn(problems))
            signal_P = self.algorithm.has_signal_P(reward.reward_B, responses)
            batches.append(Batch.of(problems, self.sampled, responses, reward, signal_P))
        self.repeated |= self.calls.keys() - calls_before
        chosen, metrics = chosen_batch(batches, self.role)
        self._note_full(metrics)
        self._batch, self.sampled = 0, before + chosen.sampled
        return chosen

    def _note_full(self, metrics: dict[str, float]) -> None:
        self._full.append(metrics)
        self.metrics = over_batches(self._full)

    def wait_for_grades(self) -> None:
        """Returns when no grade is missing. All processes call this, and read grades, at the same places: what they
        found is exchanged."""
        for responses in self._everything:
            if responses.role == "generator" and len(responses):
                _ = responses[0].is_correct  # waits for the whole call

    def everything(self, name: str = "") -> list[Responses]:
        """All that was sampled, or all to prompts of this name, before dynamic sampling chose from it."""
        return [one for one in self._everything if name in ("", one.name)]

    def solutions(self) -> list[Solution]:
        """All first tries that were sampled, whatever the prompt, before dynamic sampling chose from them."""
        return [one for responses in self._everything if responses.role == "generator" for one in responses
                if one.after is None]

    def judgements(self) -> list[Responses]:
        """All verifications sampled with the verifier's own prompt; if there are none, those of a user's prompts."""
        other = [one for one in self._everything if one.role == "verifier" and one.name not in PROMPTS]
        return self.everything("verifier") or other

    def reference_logps(self, responses: Responses, prompt: Prompt) -> np.ndarray:
        """Log-probs of the sampled tokens by the trained role's reference policy, to another prompt about the same
        parents.

        float32 [B, T]; 0 off the actions, NaN in rows whose prompt has no room for its whole text. Raises ValueError:
        the responses, or the prompt, are of the other role.
        """
        require(self.role == responses.role == prompt.role, f"t.reference_logps(responses of the {responses.role}, "
                f"prompt={prompt.name} of the {prompt.role}) in a turn of the {self.role}: only the role that a turn "
                "trains has its reference at hand")
        self.scored.append(Call(prompt, responses.most_prompts or len(responses.prompts), responses.group_size))
        return self._work.reference_logps(responses, prompt)

    def grade(self, problems: Sequence[Problem], texts: Sequence[str]) -> GradeReport:
        """Whether each text's answer solves its problem, by the task's grader."""
        return self._work.grade(problems, texts)

    def labelled(self, solutions: Responses, label_B: Sequence[bool]) -> Responses:
        """The solutions with labels, which training takes for the grade. ValueError: they have been judged."""
        asked = {id(parent) for responses in self._everything for parent in responses.parents}
        require(asked.isdisjoint(map(id, solutions)), "t.labelled(...): these solutions have already been judged "
                "with their old labels: label them first")
        records = [dataclasses.replace(one, label=bool(label)) for one, label in zip(solutions, label_B, strict=True)]
        new, self.has_labels = solutions.replace(records=records), True
        for sampled in (self.sampled, self._everything):
            sampled[:] = [new if one is solutions else one for one in sampled]
        return new

    def with_own_reward(self, responses: Responses, reward: Rewards) -> Rewards:
        """Adds the rewards by the functions `config.ROLE.rewards`, with their weights, to responses of the trained
        role. The metrics are of first tries."""
        if responses.role != self.role:
            return reward
        self.adds_own_reward = True
        if self._own_rewards:
            self.wait_for_grades()  # each process rewards a part, and may read any grade of it
        is_first_B = np.array([getattr(one, "after", None) is None for one in responses])
        for own in self._own_rewards:
            own_B = own.of_all(responses)
            mean = (own_B[is_first_B] if is_first_B.any() else own_B).mean()
            reward = Rewards(reward.reward_B + own.weight * own_B, reward.metrics | {own.metric: mean},
                             (*reward.terms, Term(own.shown, own.weight, own_B)))
        return reward

    def _site(self, stream: str) -> int:
        require(stream in STREAMS, f"there is no stream of problems {stream!r}: choose one of {', '.join(STREAMS)}")
        self.draws[stream] += 1
        return self.draws[stream] - 1

    def _draw(self, stream: str, site: int, number: int) -> list[Problem]:
        count = self.rl.prompts_per_step * practice.candidates_of(self.rl, self.role)
        # Each draw reserves the most problems that dynamic sampling could use: arms that use fewer stay in step.
        start = self.memory.cursors.get(stream, 0) + (site * (1 + self.rl.dynamic_sampling) + number) * count
        problem_fn = self.task.stream(stream)
        # New records: responses are told apart by the record of their problem, and a task may return one twice.
        problems = [dataclasses.replace(problem_fn(index)) for index in range(start, start + count)]
        return practice.half_right(problems, self.rl.prompts_per_step, self.memory.passes)


def cursors_after(rl: ConfigDict, cursors: Mapping[str, int], role: str, draws: Mapping[str, int]) -> dict[str, int]:
    """By stream, the problems taken after a turn of this role with these draws."""
    return {**cursors, **{stream: cursors.get(stream, 0) + count * problems_of_a_draw(rl, role)
                          for stream, count in draws.items()}}


def problems_of_a_draw(rl: ConfigDict, role: str) -> int:
    return (1 + rl.dynamic_sampling) * rl.prompts_per_step * practice.candidates_of(rl, role)


def _nothing(prompt: Prompt, samples: int) -> Responses:
    rollout = Rollout((), (), np.zeros(0, bool), 0, 0, () if prompt.is_scored else None)
    return Responses(prompt.role, [], [], samples, rollout, [], {}, prompt.name)


def joined(parts: Sequence[Responses], most_prompts: int) -> Responses:
    """The responses to several calls as one batch to train on; those to one problem form a group. The update is
    compiled for `most_prompts`, the most in any turn."""
    roles = sorted({part.role for part in parts})
    require(len(roles) == 1, f"joined responses are of {' and of '.join(roles)}: a turn trains one role")
    parts = [part for part in parts if len(part)]
    rollouts = [part.rollout for part in parts]
    rollout = Rollout(
        tokens=sum((one.tokens for one in rollouts), ()),
        logps=sum((one.logps for one in rollouts), ()),
        is_truncated_B=np.concatenate([one.is_truncated_B for one in rollouts]),
        decode_steps=sum(one.decode_steps for one in rollouts),
        row_steps=sum(one.row_steps for one in rollouts),
        others=None if rollouts[0].others is None else sum((one.others for one in rollouts), ()),
    )
    prompts = [prompt for part in parts for prompt in part.prompts for _ in range(part.group_size)]
    owners, records = ([one for part in parts for one in getattr(part, name)] for name in ("owners", "records"))
    return Responses(parts[0].role, owners, prompts, 1, rollout, records, {}, parts[0].name, most_prompts, True)
