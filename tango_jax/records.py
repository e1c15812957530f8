"""Every record that crosses a stage of the loop, in the order in which the data flows.

Axis letters are those of `models/transformer.py`. Host records hold NumPy arrays or Python tuples; `Batch` and
`TrainState` are pytrees that enter the jitted steps.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import struct


@dataclasses.dataclass(frozen=True)
class Problem:
    """One task instance."""

    id: str
    question: str
    answer: str  # the gold answer, as the grader wants it
    size: int = 0  # the task's own measure of difficulty (last_letter: number of words), for reports


@dataclasses.dataclass(frozen=True)
class Rollout:
    """What the sampler returns: B = P x M responses, prompt-major, on the host."""

    tokens: tuple[np.ndarray, ...]  # B x int32[length], sampled ids with the stop token kept
    logps: tuple[np.ndarray, ...]  # B x float32[length], under the sampling distribution
    is_truncated_B: np.ndarray  # bool, ended by the length limit instead of a stop token
    decode_steps: int  # decode steps of the whole call, for throughput figures
    row_steps: int  # rows x steps actually computed; against the tokens sampled, the waste of finished rows


@dataclasses.dataclass(frozen=True)
class Solution:
    """A generator response, decoded, parsed and graded."""

    problem: Problem
    text: str
    steps: tuple[str, ...]  # inner text of each step block
    step_ends: tuple[int, ...]  # response token that holds the last character of each block
    format_score: float
    is_correct: bool
    gold_steps: tuple[bool, ...] | None  # the task's own step labels, where it has them
    token_ends: tuple[int, ...] = ()  # characters complete after each response token
    is_truncated: bool = False


@dataclasses.dataclass(frozen=True)
class Verification:
    """A verifier response to one solution, decoded and parsed."""

    text: str
    judgements: tuple[bool | None, ...]
    verdict: str  # CORRECT, INCORRECT or INVALID
    format_score: float
    is_aligned: bool
    blocks: tuple[str, ...]  # the verifier's words, block by block
    token_ends: tuple[int, ...] = ()  # characters complete after each response token
    is_truncated: bool = False


@dataclasses.dataclass(frozen=True)
class Responses:
    """What one call of a turn gave: a role's M responses to each of P prompts, prompt-major, parsed and graded."""

    role: str
    parents: Sequence[Problem] | Sequence[Solution]  # P, what the prompts are about
    prompts: list[list[int]]  # P lists of token ids
    group_size: int  # M
    rollout: Rollout
    records: list[Solution] | list[Verification]  # B
    metrics: dict[str, float]  # lengths, truncation, what the grader could not judge

    @property
    def owners(self) -> list:
        """B parents, the one that each response is about."""
        return [parent for parent in self.parents for _ in range(self.group_size)]


@dataclasses.dataclass(frozen=True)
class Signal:
    """What a turn's update was made from, row by row of the role that learns; the rollout dump shows it."""

    reward_B: np.ndarray  # float32
    adv_outcome_BT: np.ndarray  # float32, normalised
    adv_BT: np.ndarray  # float32, as the update gets it
    adv_step_BT: np.ndarray | None = None  # float32, normalised; None without step labels
    alpha: float = 0.0  # generator: adv = (1 - alpha) outcome + alpha step
    labels: list | None = None  # generator: step labels of each solution, one list for each verification of it
    class_weight_B: np.ndarray | None = None  # verifier: adv = weight of the solution's class x outcome


@dataclasses.dataclass(frozen=True)
class Counters:
    """Training state that lives on the host; saved with every checkpoint."""

    turn: int = 0  # turns made
    cursor: int = 0  # next training problem
    label_counts: tuple[float, float] = (0.0, 0.0)  # EMA of incorrect and correct solutions seen by the verifier


@struct.dataclass
class Batch:
    """Packed sequences for scoring and updates: N micro-batches, each of Z shards of R rows of T tokens.

    NumPy on the host, where Z counts the shards of this process; `sharding.place_batch` joins those of all processes.
    Where prompts are shared, a shard also has Q prefixes of X tokens: a prompt without its last token, which every
    response in the shard's rows that point to it attends to. Q is 0 where they are not.
    """

    prefix_token_NZQX: Any  # int32
    prefix_length_NZQ: Any  # int32
    prefix_of_NZR: Any  # int32, the prefix that a row's sequences continue
    token_NZRT: Any  # int32
    position_NZRT: Any  # int32, place in the sequence, the prefix counted
    segment_NZRT: Any  # int32, 1.. per sequence of a row, 0 = padding
    is_action_NZRT: Any  # bool, token was sampled (EOS included; prompt and padding excluded)
    weight_NZRT: Any  # float32, share of each action token in the loss (losses.token_weights_BT)
    adv_NZRT: Any  # float32
    sampler_logp_NZRT: Any  # float32, from the rollout
    old_logp_NZRT: Any  # float32, of the policy before the first update on this batch (unused when there is one)
    ref_logp_NZRT: Any  # float32, of the reference policy (unused when beta is 0)
    num_micro: Any  # int32[], micro-batches in use; the rest of N is padding that no one computes


@struct.dataclass
class TrainState:
    """What an update reads and writes; donated to it."""

    params: Any
    opt_state: Any
    step: jax.Array  # int32[], updates made


States = dict[str, TrainState]  # by role


@dataclasses.dataclass(frozen=True)
class TurnResult:
    """What a turn changed, and all that it did on the way."""

    states: States
    counters: Counters
    metrics: dict[str, float]
    answers: dict[str, Responses]  # by the role that responded, in the order of the calls
    signal: Signal

    @property
    def solutions(self) -> list[Solution]:
        return self.answers["generator"].records

    @property
    def verifications(self) -> list[Verification] | None:
        """None in a turn without a verifier."""
        return self.answers["verifier"].records if "verifier" in self.answers else None
