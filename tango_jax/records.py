"""Every record that passes between stages of the loop, in the order of the data flow.

Axis letters are those of README.md (Reading the code). Host records hold NumPy arrays or Python tuples; `Batch` and
`TrainState` are pytrees that are passed to the jitted steps.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import struct


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem of a task, which makes it; the generator's prompt and the grader read it."""

    id: str
    question: str
    answer: str  # the gold answer, in the form that the grader expects
    size: int = 0  # task-specific difficulty, for reports (number of words or swaps)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """What the sampler returns: B = P x M responses, prompt-major, on the host. Parsing, packing and metrics
    read it."""

    tokens: tuple[np.ndarray, ...]  # B x int32[length], sampled ids with the stop token kept
    logps: tuple[np.ndarray, ...]  # B x float32[length], log-probs under the sampling distribution
    is_truncated_B: np.ndarray  # bool, response reached the length limit without a stop token
    decode_steps: int  # decode steps of the whole call, for throughput metrics
    row_steps: int  # rows x steps computed; the excess over the sampled tokens was wasted on finished rows


@dataclasses.dataclass(frozen=True)
class Solution:
    """A generator response, decoded, parsed and graded. loop/responses.py makes it; the verifier's prompt, reward and
    credit functions, evaluations and the rollout dump read it."""

    problem: Problem
    text: str
    steps: tuple[str, ...]  # inner text of each step block
    step_ends: tuple[int, ...]  # index of the response token with the last character of each block
    format_score: float
    is_correct: bool
    gold_steps: tuple[bool, ...] | None  # step labels from the task, if it provides them
    token_ends: tuple[int, ...] = ()  # number of characters complete after each response token
    is_truncated: bool = False
    label: bool | None = None  # what training takes for the grade (rl/labels.py); None: the grade

    @property
    def is_right(self) -> bool:
        """Whether training takes it for right."""
        return self.is_correct if self.label is None else self.label


@dataclasses.dataclass(frozen=True)
class Verification:
    """A verifier response to one solution, decoded and parsed. loop/responses.py makes it; reward and credit functions,
    evaluations and the rollout dump read it."""

    text: str
    judgements: tuple[bool | None, ...]
    verdict: str  # CORRECT, INCORRECT or INVALID
    format_score: float
    is_aligned: bool
    blocks: tuple[str, ...]  # text of each verification block
    token_ends: tuple[int, ...] = ()  # number of characters complete after each response token
    is_truncated: bool = False


@dataclasses.dataclass(frozen=True)
class Judged:
    """A solution and a verification of it, which the prompts of a second try and of a second judgement hold."""

    solution: Solution
    verification: Verification

    @property
    def problem(self) -> Problem:
        """The problem that was solved."""
        return self.solution.problem

    @property
    def steps(self) -> tuple[str, ...]:
        """What a second judgement takes for steps: the blocks of the verification."""
        return self.verification.blocks

    @property
    def format_score(self) -> float:
        """That of the verification."""
        return self.verification.format_score


@dataclasses.dataclass(frozen=True)
class Responses:
    """Result of one call in a turn: M responses of a role to each of P prompts, prompt-major, parsed and graded.
    `loop.turn.respond` makes it; reward and credit functions, packing, metrics and the rollout dump read it."""

    role: str
    parents: Sequence[Problem] | Sequence[Solution] | Sequence[Judged]  # P, what the prompts are about
    prompts: list[list[int]]  # P lists of token ids
    group_size: int  # M
    rollout: Rollout
    records: list[Solution] | list[Verification]  # B
    metrics: dict[str, float]  # lengths, truncation, grader failures
    # The places of `parents` among the records of the call before, if they are only a part of them.
    places: Sequence[int] | None = None
    most_prompts: int | None = None  # that such responses can have in any turn; None: always P

    @property
    def next_parents(self) -> list:
        """What the next call of a turn answers: solutions, or verifications with what they are about."""
        if isinstance(next(iter(self.records), None), Verification):
            return [Judged(owner, record) for owner, record in zip(self.owners, self.records, strict=True)]
        return self.records

    @property
    def owners(self) -> list:
        """The parent of each of the B responses."""
        return [parent for parent in self.parents for _ in range(self.group_size)]


Answers = Mapping[str, Responses]  # name of a call -> what was responded to it in a turn, in their order


@dataclasses.dataclass(frozen=True)
class Term:
    """A part of a reward or an advantage, weight x value, under the name by which the report shows it. Reward and
    credit functions make it; the rollout dump reads it."""

    name: str
    weight: float | np.ndarray  # one for all rows, or float32 [B]
    value: np.ndarray  # float32: [B] of a reward, [B, T] of an advantage


class Rewards(NamedTuple):
    """One reward for every response of the role that learns. A reward function makes it (rl/credit.py); the credit
    function reads `reward_B`, the rollout dump `reward_B` and `terms`, the turn's row of metrics.jsonl `metrics`."""

    reward_B: np.ndarray  # float32
    metrics: dict[str, float]
    terms: tuple[Term, ...] = ()  # what reward_B is the sum of; empty: the report shows it alone


@dataclasses.dataclass(frozen=True)
class Counters:
    """Training state on the host; saved with every checkpoint. A turn takes those before it and returns those after it;
    credit functions read them, and may return others."""

    turn: int = 0  # turns completed
    cursors: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by stream (task.py), for the next turn
    label_counts: tuple[float, float] = (0.0, 0.0)  # EMA of incorrect and correct solutions seen by the verifier
    evidence: tuple[float, ...] = ()  # fields of rl/trust.py Evidence; empty: none so far
    passes: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)  # see rl/practice.py

    def take(self, stream: str, count: int) -> "Counters":
        """The counters after `count` more problems of a stream."""
        return dataclasses.replace(self, cursors={**self.cursors, stream: self.cursors.get(stream, 0) + count})


class Credit(NamedTuple):
    """One advantage for every token of these responses. A credit function makes it (rl/credit.py); the update reads
    `adv_BT`, the next turn `counters`, the rollout dump `adv_BT`, `terms` and `labels`, metrics.jsonl `metrics`."""

    adv_BT: np.ndarray  # float32
    counters: Counters  # those after the turn
    metrics: dict[str, float]
    terms: tuple[Term, ...] = ()  # what adv_BT is the sum of; empty: the report shows it alone
    labels: list | None = None  # of the generator's steps: n_inference lists of B entries, see steps_credit


@struct.dataclass
class Batch:
    """Packed sequences for scoring and updates: N micro-batches, each with Z shards of R rows of T tokens.

    On the host these are NumPy arrays, and Z counts the shards of this process; `sharding.place_batch` joins those of
    all processes. A micro-batch is a Batch whose fields have lost the N axis and kept their names. With shared prompts,
    each shard also has Q prefixes of X tokens. A prefix is a prompt without its last token, to which the responses of
    all rows that refer to it attend. Without shared prompts, Q is 0.
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


def with_base(base: dict | None, params: dict) -> dict:
    """What forward passes take: the base with the trained parameters in it. Nothing is copied."""
    if not base:
        return params
    return {**base, "layers": {**base["layers"], **params["layers"]}}


@struct.dataclass
class TrainState:
    """The state that an update (rl/update.py) reads and writes; its buffers are donated to the update. Sampling and
    scoring read its weights, checkpoints hold all of it but the base."""

    params: Any  # what is trained
    opt_state: Any
    step: jax.Array  # int32[], number of updates
    # What is not: the parameters that adapters belong to (models/lora.py), which both roles may share; {}: none. It is
    # neither donated nor saved.
    base: Any = struct.field(default_factory=dict)

    @property
    def weights(self) -> dict:
        """What forward passes take."""
        return with_base(self.base, self.params)


States = dict[str, TrainState]  # by role


@dataclasses.dataclass(frozen=True)
class TurnResult:
    """What `loop.turn.run_turn` returns: the loop takes the states and counters, the rollout dump all other fields."""

    states: States
    metrics: dict[str, float]
    answers: Answers
    reward: Rewards
    credit: Credit

    @property
    def counters(self) -> Counters:
        """The counters after the turn."""
        return self.credit.counters

    @property
    def solutions(self) -> list[Solution]:
        return self.answers["generator"].records

    @property
    def verifications(self) -> list[Verification] | None:
        """None in a turn without a verifier."""
        return self.answers["verifier"].records if "verifier" in self.answers else None
