"""Step rewards weighted by the verifier's measured accuracy, and which solutions it judges.

With `rl.trust` or `rl.judge`, `solve` of this file replaces tango.solve. In the published method the verifier judges
all solutions and every judgement counts (`rl.judge=all`, `rl.trust=()`).

The measure is the F1 score of accepting a solution (rejecting none of its steps), if one in twenty were right. It needs
grades alone: all steps of a right solution are taken to be right. Trust rises linearly from 0 at the lower limit of
`rl.trust` to 1 at the upper. The same measure ends the verifier's warm-up (`rl.warmup_until`).

The measure reads the written marks, also with `rl.step_reward=probability`. Probabilities are less noisy than marks, so
trust is then rather too low. Of a verifier that stops at the first error, the judged steps count.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from tango_jax.method.rewards import graded, judged_steps, right_B, step_metrics
from tango_jax.method.tango import share_of_one_outcome
from tango_jax.method.turn import Turn
from tango_jax.records import Lesson, Memory, Responses, Solution, StepRewards, Verification
from tango_jax.rl.advantages import average_over_verifications
from tango_jax.rl.schedule import Place, alpha_of
from tango_jax.runtime.checks import require
from tango_jax.runtime.rng import step_key

# Per turn, for the generator's turns and the verifier's: about the last seven, and five, count.
DECAY, PRACTICE_DECAY = 0.85, 0.8
PRIOR = 24.0  # weight of the verifier's turns, as a number of steps of right solutions in the generator's turns
# Judged at least, where there are as many: fewer if the step rewards of fewer solutions depend on it.
RIGHT_JUDGED, WRONG_JUDGED = 8, 16
SHARE_RIGHT = 0.05  # of solutions, for the F1 score


class Evidence(NamedTuple):
    """Judgements of graded solutions, decayed from turn to turn; saved with every checkpoint. Several verifications of
    a solution count as one in the generator's turns, by their mean; in the verifier's turns each counts, but see
    `_as_in_solving`."""

    # Of the generator's turns: judged steps of right solutions, and those that are rejected.
    right_steps: float = 0.0
    right_rejected: float = 0.0
    # Wrong solutions, and those of which no step is rejected.
    wrong: float = 0.0
    wrong_accepted: float = 0.0
    # Of the verifier's turns: the same four, and the right solutions.
    practised_steps: float = 0.0
    practised_rejected: float = 0.0
    practised_wrong: float = 0.0
    practised_accepted: float = 0.0
    practised_right: float = 0.0
    practised_unjudged: float = 0.0  # steps of right solutions after a rejected one, at which the verifier stopped

    def after_solving(
        self, is_correct_B: np.ndarray, num_steps_B: np.ndarray, rejected_B: np.ndarray, share_B: np.ndarray | float = 1
    ) -> "Evidence":
        """`share_B`: what each verification counts."""
        return Evidence(*_faded(self[:4], _counts(is_correct_B, num_steps_B, rejected_B, share_B), DECAY), *self[4:])

    def after_practice(
        self, is_correct_B: np.ndarray, num_steps_B: np.ndarray, rejected_B: np.ndarray,
        unjudged_B: np.ndarray | int = 0,
    ) -> "Evidence":
        unjudged = (is_correct_B * unjudged_B).sum()
        new = (*_counts(is_correct_B, num_steps_B, rejected_B, 1), is_correct_B.sum(), unjudged)
        return Evidence(*self[:4], *_faded(self[4:], new, PRACTICE_DECAY))

    def rates(self, num_steps: float) -> tuple[float, float]:
        """Shares of right and of wrong solutions of `num_steps` steps that are accepted, with no step rejected.

        The verifier's turns are the prior; without any, all steps count as rejected. The share of wrong ones is one
        standard error above its estimate.
        """
        rejected = (self.right_rejected + PRIOR * self._expected()) / (self.right_steps + PRIOR)
        return (1.0 - rejected) ** num_steps, _upper_share(self.wrong_accepted, self.wrong)

    def practised_rates(self) -> tuple[float, float]:
        """The same of the verifier's turns."""
        all_steps = self.practised_steps + self.practised_unjudged
        num_steps = all_steps / self.practised_right if self.practised_right else 1.0
        return (1.0 - self._expected()) ** num_steps, _upper_share(self.practised_accepted, self.practised_wrong)

    def _expected(self) -> float:
        """Share of rejected steps of right solutions in the verifier's turns; without any, 1."""
        return self.practised_rejected / self.practised_steps if self.practised_steps else 1.0


def _counts(
    is_correct_B: np.ndarray, num_steps_B: np.ndarray, rejected_B: np.ndarray, share_B: np.ndarray | float
) -> tuple[float, ...]:
    """Judged steps of right solutions, those rejected, wrong solutions, those of which no step is rejected."""
    right_B, wrong_B, accepted_B = share_B * is_correct_B, share_B * ~is_correct_B, rejected_B == 0
    return (right_B * num_steps_B).sum(), (right_B * rejected_B).sum(), wrong_B.sum(), (wrong_B * accepted_B).sum()


def _faded(counts: Sequence[float], more: Sequence[float], decay: float) -> list[float]:
    return [decay * old + float(new) for old, new in zip(counts, more, strict=True)]


def _upper_share(accepted: float, count: float) -> float:
    """One standard error above the accepted share, with half a solution added, so that it is never 0."""
    count, share = count + 1.0, (accepted + 0.5) / (count + 1.0)
    return min(share + math.sqrt(share * (1.0 - share) / count), 1.0)


def f1_of(rates: tuple[float, float], share_right: float = SHARE_RIGHT) -> float:
    """2 p s / (p s + (1 - p) b + p), where shares s of right and b of wrong solutions are accepted, and p are right."""
    of_right, of_wrong = rates
    accepted = share_right * of_right + (1.0 - share_right) * of_wrong
    return 2.0 * share_right * of_right / (accepted + share_right)


def trust_of(rates: tuple[float, float], limits: Sequence[float]) -> float:
    """Trust in [0, 1] at these rates of acceptance; 1 if `limits` (`rl.trust`) are empty."""
    if not limits:
        return 1.0
    low, high = limits
    return float(np.clip((f1_of(rates) - low) / (high - low), 0.0, 1.0))


def solve(t: Turn) -> Lesson:
    """tango.solve, in which some solutions are judged, and trust multiplies the weight alpha. It remembers the
    judgements of groups that dynamic sampling kept."""
    solutions, reward = t.until_full(
        lambda problems: graded(t, t.sample("generator", problems, t.rl.samples_per_prompt))
    )
    has_signal_P = t.algorithm.has_signal_P(right_B(solutions).astype(np.float32), solutions)
    steps = [len(one.steps) for one in solutions if one.steps]  # the others match no judgements
    rates = Evidence(*t.memory.evidence).rates(float(np.mean(steps or [1])))
    choice = choose(t.rl, right_B(solutions), has_signal_P, rates)
    chosen = [solutions[row] for row in np.flatnonzero(choice.is_judged_B)]
    judged = t.sample("verifier", chosen, t.rl.verifications_per_solution, at_most=len(solutions))
    trust_B = np.repeat(choice.trust_P, solutions.group_size)
    steps = [_only(one, trust_B > 0) for one in judged_steps(t, solutions, judged)]
    outcome_BT = t.algorithm.outcome(reward, solutions)
    steps_BT = average_over_verifications([t.algorithm.step(one, solutions) for one in steps])
    alpha_B = alpha_of(t.generator_step, t.rl, share_of_one_outcome(t, solutions)) * trust_B
    terms = {"outcome": (1 - alpha_B, outcome_BT), "steps": (alpha_B, steps_BT)}
    metrics = step_metrics(steps, alpha_B) | choice.metrics(t.rl)
    memory = t.memory
    if t.rl.trust and len(judged):
        aligned = [one for one in judged.records if one.is_aligned]
        times = Counter(id(one.of) for one in aligned)
        share_B = np.array([1 / times[id(one.of)] for one in aligned])
        evidence = Evidence(*memory.evidence).after_solving(*_verdicts(aligned)[:3], share_B)
        memory = memory.replace(evidence=tuple(evidence))
    return Lesson(solutions, reward, terms, metrics, memory, steps)


def remembering(judge: Callable[[Turn], Lesson]) -> Callable[[Turn], Lesson]:
    """A verifier's turn that counts its judgements: all that were sampled, since dynamic sampling leaves out
    verifications that agree with each other."""

    @functools.wraps(judge)
    def judge_and_remember(t: Turn) -> Lesson:
        lesson = judge(t)
        if not t.rl.trust:
            return lesson
        memory = lesson.memory or t.memory
        random = np.random.default_rng(step_key(t.config.seed, "trust", t.place.role_step))
        judged = [one for responses in t.judgements() for one in _as_in_solving(responses, t.rl, random)]
        require(judged and all(isinstance(one.of, Solution) for one in judged), f"rl.trust={tuple(t.rl.trust)} "
                "measures judgements of solutions, and this turn samples none: set rl.trust=()")
        verdicts = _verdicts(judged)
        memory = memory.replace(evidence=tuple(Evidence(*memory.evidence).after_practice(*verdicts)))
        metrics = dict(lesson.metrics) | warmup_metrics(t.rl, t.place, memory)
        return dataclasses.replace(lesson, memory=memory, metrics=metrics)

    return judge_and_remember


def _as_in_solving(judged: Responses, rl: ConfigDict, random: np.random.Generator) -> Sequence[Verification]:
    """The judgements of a verifier's turn, of the kind that the generator's turns use. Of marks that are read, one
    verification of a solution has the likelier ones, and several are drawn. Where the two turns differ in that, each
    solution counts once here, with marks of the other kind from the same text."""
    is_drawn = rl.verifications_per_solution > 1
    if judged.rollout.others is None or is_drawn == (judged.group_size > 1):
        return judged.records

    def marks(one: Verification) -> tuple[bool, ...]:
        limits = random.random(len(one.p_steps)) if is_drawn else 0.5
        return tuple((np.array(one.p_steps) >= limits).tolist())

    return [dataclasses.replace(one, judgements=marks(one)) for one in judged.records[:: judged.group_size]]


def warmup_metrics(rl: ConfigDict, place: Place, memory: Memory) -> dict[str, float]:
    """In a warm-up that may end early: the trust measured so far."""
    if place.phase != "warmup" or not rl.warmup_until:
        return {}
    return {"verifier/warmup_trust": trust_of(Evidence(*memory.evidence).practised_rates(), rl.trust)}


def turns_done(rl: ConfigDict, place: Place, memory: Memory) -> int:
    """Turns of the schedule over after `place`. The rest of a warm-up that ends early is over as well: the generator's
    turns keep their numbers, and so their problems."""
    reached = warmup_metrics(rl, place, memory).get("verifier/warmup_trust", 0.0)
    return rl.warmup_steps if rl.warmup_until and reached >= rl.warmup_until else place.index + 1


class Choice(NamedTuple):
    """Which solutions of a generator's turn are judged, and how much their judgements count."""

    is_judged_B: np.ndarray  # bool
    trust_P: np.ndarray  # float64 in [0, 1]: `trust` in the groups whose step rewards count, 0 in the others
    trust: float
    rates: tuple[float, float]  # from which it follows

    def metrics(self, rl: ConfigDict) -> dict[str, float]:
        share = {"generator/judged_share": self.is_judged_B.mean()}
        if not rl.trust:  # nothing is measured
            return share
        right, wrong = self.rates
        return share | {"generator/trust": self.trust, "verifier/right_accepted": right,
                        "verifier/wrong_accepted_upper": wrong}


def choose(
    rl: ConfigDict, is_correct_B: np.ndarray, has_signal_P: np.ndarray, rates: tuple[float, float]
) -> Choice:
    """Choose the solutions of groups whose step rewards count and, where trust is measured, some for the measure alone.
    `has_signal_P`: groups whose outcomes give an advantage."""
    trust = trust_of(rates, rl.trust)
    group_size = len(is_correct_B) // len(has_signal_P)
    has_right_P = is_correct_B.reshape(-1, group_size).any(axis=1)
    counts_P = {"all": np.ones_like(has_signal_P), "silent": ~has_signal_P, "failed": ~has_right_P}[rl.judge]
    is_judged_B = np.repeat(counts_P & (trust > 0), group_size)
    if rl.trust:
        needed = min(counts_P.sum() * group_size / (RIGHT_JUDGED + WRONG_JUDGED), 1.0)
        for is_kind_B, least in ((is_correct_B, RIGHT_JUDGED), (~is_correct_B, WRONG_JUDGED)):
            missing = max(math.ceil(least * needed) - int((is_judged_B & is_kind_B).sum()), 0)
            is_judged_B[_spread(np.flatnonzero(is_kind_B & ~is_judged_B), missing)] = True
    return Choice(is_judged_B, trust * counts_P, trust, rates)


def _only(rewards: StepRewards, counts_B: np.ndarray) -> StepRewards:
    of_steps = [one if counts else None for one, counts in zip(rewards.of_steps, counts_B, strict=True)]
    return StepRewards(rewards.reward_BT * counts_B[:, None], rewards.is_end_BT & counts_B[:, None], of_steps,
                       rewards.y_BT)


def _verdicts(judged: Sequence[Verification]) -> tuple[np.ndarray, ...]:
    """Whether each solution is right, and how many of its steps are judged, rejected and not judged. Without judgements
    that do not match the steps."""
    judged = [verification for verification in judged if verification.is_aligned]
    rejected_B, unjudged_B = (np.array([one.judgements.count(mark) for one in judged], int) for mark in (False, None))
    num_steps_B = np.array([len(one.of.steps) for one in judged], int)
    return right_B([one.of for one in judged]), num_steps_B - unjudged_B, rejected_B, unjudged_B


def _spread(rows: np.ndarray, count: int) -> np.ndarray:
    """At most `count` rows, at even distances: neighbours answer the same problem."""
    count = min(count, len(rows))
    return rows[np.arange(count) * len(rows) // max(count, 1)]
