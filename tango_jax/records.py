"""The records of the loop, in the order of the data flow. Axis letters: tango_jax/README.md."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import struct


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem of a task; the generator's prompt and the grader read it."""

    id: str
    question: str
    answer: str  # the gold answer, in the form that the grader expects
    size: int = 0  # task-specific difficulty, for reports (number of words or swaps)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """B = P x M sampled responses, prompt-major, on the host."""

    tokens: tuple[np.ndarray, ...]  # B x int32[length], sampled ids with the stop token kept
    logps: tuple[np.ndarray, ...]  # B x float32[length], log-probs under the sampling distribution
    is_truncated_B: np.ndarray  # bool, response reached the length limit without a stop token
    decode_steps: int  # decode steps of the whole call, for throughput metrics
    row_steps: int  # rows x steps computed; the excess over the sampled tokens was wasted on finished rows
    # B x int32[length], of texts that were read and not sampled: the other word's token at each mark (mark_rows.py),
    # -1 elsewhere. The log-prob of a mark is its token's among these two. None: everything was sampled.
    others: tuple[np.ndarray, ...] | None = None

    def rows(self, chosen: slice) -> "Rollout":
        others = self.others and self.others[chosen]
        return dataclasses.replace(self, tokens=self.tokens[chosen], logps=self.logps[chosen], others=others,
                                   is_truncated_B=self.is_truncated_B[chosen])


class _FoundLater:
    """A field of a record. Its value may be given as a function without arguments, which the first reader calls."""

    def __set_name__(self, owner: type, name: str):
        self._name = name

    def __get__(self, record: Any, owner: type | None = None) -> Any:
        if record is None:
            raise AttributeError(self._name)  # for dataclasses: the field has no default
        value = record.__dict__[self._name]
        if callable(value):
            value = record.__dict__[self._name] = value()
        return value

    def __set__(self, record: Any, value: Any) -> None:
        record.__dict__[self._name] = value


@dataclasses.dataclass(frozen=True)
class Solution:
    """A generator response, decoded, parsed and graded (method/texts.py)."""

    problem: Problem
    text: str
    steps: tuple[str, ...]  # inner text of each step block
    step_ends: tuple[int, ...]  # index of the response token with the last character of each block
    format_score: float
    is_correct: bool = _FoundLater()  # of a turn's solutions: the first read waits for the grades of the whole call
    gold_steps: tuple[bool, ...] | None  # step labels from the task, if it provides them
    # Number of characters complete after each response token, as an array of Python's: it is compared by values, and
    # sent between processes as bytes.
    token_ends: Sequence[int] = dataclasses.field(default=(), hash=False)
    is_truncated: bool = False
    label: bool | None = None  # what training takes for the grade, such as the majority's opinion; None: the grade
    after: Any = None  # what its prompt showed beside the problem: of a second try, the Verification of the first

    @property
    def is_right(self) -> bool:
        return self.is_correct if self.label is None else self.label


@dataclasses.dataclass(frozen=True)
class Verification:
    """A verifier response, decoded and parsed (method/texts.py)."""

    text: str
    # One for each step where it is aligned, None of a step that is not judged (`verifier.stop_at_first_error`).
    judgements: tuple[bool | None, ...]
    verdict: str  # CORRECT, INCORRECT or INVALID
    format_score: float
    is_aligned: bool
    blocks: tuple[str, ...]  # text of each verification block
    token_ends: Sequence[int] = dataclasses.field(default=(), hash=False)  # as of a Solution
    is_truncated: bool = False
    of: Any = None  # what it judges: a Solution; of a second judgement, a Verification
    # P(CORRECT) of each judgement, of a verifier that reads marks or gives scores, and where rl.step_reward=probability
    # needs it (text/marks.py); None: there is no mark.
    p_steps: tuple[float | None, ...] = ()


def problem_of(record: Any) -> Problem:
    """The problem that a response or a prompt's parent belongs to; of several records, the first's problem."""
    if isinstance(record, Problem):
        return record
    if isinstance(record, Solution):
        return record.problem
    if isinstance(record, Verification):
        return problem_of(record.of)
    return problem_of(record[0])


@dataclasses.dataclass(frozen=True)
class Responses:
    """M responses of a role to each of P prompts, prompt-major, parsed and graded. As a sequence: its records."""

    role: str
    parents: Sequence  # P, what the prompts are about: problems, solutions, verifications
    prompts: list[list[int]]  # P lists of token ids
    group_size: int  # M
    rollout: Rollout
    records: list[Solution] | list[Verification]  # B
    metrics: dict[str, float]  # lengths, truncation, grader failures
    name: str = ""  # of the prompt; empty: the role's own
    most_prompts: int | None = None  # upper bound of P in any turn, for compilation; None: always P
    # From several calls, each with its prompt: responses to one problem form a group.
    is_joined: bool = False

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator:
        return iter(self.records)

    def __getitem__(self, row: int) -> Solution | Verification:
        return self.records[row]

    @property
    def owners(self) -> list:
        """One for each of the B responses."""
        return [parent for parent in self.parents for _ in range(self.group_size)]

    def replace(self, **fields: Any) -> "Responses":
        return dataclasses.replace(self, **fields)

    def by_number(self) -> list[list]:
        """M lists of P records: all first responses, all second ones, and so on."""
        return [self.records[number :: self.group_size] for number in range(self.group_size)]

    def groups(self) -> list[np.ndarray]:
        """Rows that are compared: the M responses to a prompt, or all those to a problem."""
        if not self.is_joined:
            return list(np.arange(len(self)).reshape(-1, self.group_size))
        rows: dict[int, list[int]] = {}
        for row, record in enumerate(self.records):
            rows.setdefault(id(problem_of(record)), []).append(row)
        return [np.array(members) for members in rows.values()]


@dataclasses.dataclass(frozen=True)
class Term:
    """A part of a reward or an advantage, weight x value, under its name in the report."""

    name: str
    weight: float | np.ndarray  # one for all rows, or float [B]
    value: np.ndarray  # float32: [B] of a reward, [B, T] of an advantage


class Rewards(NamedTuple):
    """A reward for each of the B responses that a turn trains on."""

    reward_B: np.ndarray  # float32
    metrics: dict[str, float]
    terms: tuple[Term, ...] = ()  # what reward_B is the sum of; empty: the report shows it alone


class StepRewards(NamedTuple):
    """Rewards of the steps of B solutions, at the token that ends each step."""

    reward_BT: np.ndarray  # float32
    is_end_BT: np.ndarray  # bool
    # B, for the report: the reward of each step, None of one that is not judged; None: they have none.
    of_steps: list[tuple[float | None, ...] | None]
    # float32, y of the steps that end in a token, the lowest of several. None: +1 or -1, the sign of the reward.
    y_BT: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a run remembers between turns; saved with every checkpoint. The loop sets `turn` and `cursors`."""

    turn: int = 0  # turns completed
    cursors: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by stream (task.py), for the next turn
    label_counts: tuple[float, float] = (0.0, 0.0)  # EMA of incorrect and correct solutions seen by the verifier
    evidence: tuple[float, ...] = ()  # fields of method/trust.py Evidence; empty: none so far
    passes: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)  # see method/practice.py
    own: Mapping[str, float] = dataclasses.field(default_factory=dict)  # for methods of users: numbers by name

    def __post_init__(self):
        own = {}
        for name, value in self.own.items():  # a checkpoint stores them as JSON, whose keys are strings
            if not (isinstance(name, str) and isinstance(value, Real) and isfinite(value)):
                raise ValueError(f"memory.own has {name!r}: {value!r}; it must have finite numbers by name (a string)")
            own[name] = float(value)
        for name, value in {"cursors": self.cursors, "passes": self.passes, "own": own}.items():
            # A turn returns a new memory: changing this one is an error.
            object.__setattr__(self, name, MappingProxyType(dict(value)))

    def replace(self, **fields: Any) -> "Memory":
        return dataclasses.replace(self, **fields)

    def stored(self) -> dict[str, Any]:
        return {field.name: dict(value) if isinstance(value := getattr(self, field.name), Mapping) else value
                for field in dataclasses.fields(self)}

    @classmethod
    def restored(cls, meta: Mapping[str, Any]) -> "Memory":
        """From `stored`; what a checkpoint lacks is as at the start."""
        passes = {key: tuple(counts) for key, counts in meta.get("passes", {}).items()}
        return cls(meta["turn"], meta["cursors"], tuple(meta["label_counts"]), tuple(meta.get("evidence", ())), passes,
                   meta.get("own", {}))


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What a turn returns: the responses to train on, their rewards, and the terms whose weighted sum is the advantage
    of each token."""

    responses: Responses  # of the role that is trained, B
    reward: Rewards
    terms: Mapping[str, tuple[float | np.ndarray, np.ndarray]]  # name -> (weight: one or [B], advantage [B, T])
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    memory: Memory | None = None  # after the turn; None: as before
    step_rewards: Sequence[StepRewards] = ()  # for the report, of the generator's solutions: one for each verification
    formula: str | None = None  # for the report, of the advantage by the reward; None: the algorithm's


@struct.dataclass
class Batch:
    """Packed sequences: N micro-batches, each with Z shards of R rows of T tokens.

    NumPy arrays on the host, where Z counts this process's shards. A micro-batch is a Batch without the N axis. With
    shared prompts, each shard also has Q prefixes of X tokens: prompts without their last token, to which the responses
    of their rows attend. Else Q is 0, and rows hold the prompts.
    """

    prefix_token_NZQX: Any  # int32
    prefix_length_NZQ: Any  # int32
    prefix_of_NZR: Any  # int32, index of the prefix that a row's sequences continue
    token_NZRT: Any  # int32
    position_NZRT: Any  # int32, position in the sequence, including the prefix
    segment_NZRT: Any  # int32, 1, 2, ... per sequence of a row, 0 = padding
    is_action_NZRT: Any  # bool, token was sampled (includes EOS; excludes prompt and padding)
    weight_NZRT: Any  # float32, weight of each action token in the loss (losses.token_weights_BT)
    adv_NZRT: Any  # float32
    sampler_logp_NZRT: Any  # float32, from the rollout
    old_logp_NZRT: Any  # float32, of the policy before the first update on this batch (unused with one update)
    ref_logp_NZRT: Any  # float32, of the reference policy (unused if beta is 0)
    num_micro: Any  # int32[], number of micro-batches in use; the rest of N is padding that is never computed
    # int32, the earlier segment of the row that holds the prompt of a token's response; 0: its own segment does. None:
    # all are 0.
    prompt_NZRT: Any = None
    other_NZRT: Any = None  # int32, as Rollout.others, 0 elsewhere; None: log-probs are over the whole vocabulary


def with_base(base: dict | None, params: dict) -> dict:
    """The parameters of a forward pass: the base with the trained parameters in it. Nothing is copied."""
    if not base:
        return params
    return {**base, "layers": {**base["layers"], **params["layers"]}}


@struct.dataclass
class TrainState:
    """The state that an update (rl/update.py) reads and writes; its buffers are donated. Checkpoints hold all but the
    base."""

    params: Any  # what is trained
    opt_state: Any
    step: jax.Array  # int32[], number of updates
    # Frozen parameters of adapters (models/lora.py), which both roles may share. Neither donated nor saved.
    base: Any = struct.field(default_factory=dict)

    @property
    def weights(self) -> dict:
        return with_base(self.base, self.params)


States = dict[str, TrainState]  # by role


@dataclasses.dataclass(frozen=True)
class TurnResult:
    """What `loop.turn.run_turn` returns."""

    states: States
    metrics: dict[str, float]
    sampled: list[Responses]  # in the order of the calls
    lesson: Lesson
    adv_BT: np.ndarray  # float32, the sum of the lesson's terms
    memory: Memory  # after the turn
