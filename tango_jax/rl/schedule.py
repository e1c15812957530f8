"""Which role is trained in each turn, and the weight of step rewards."""

import math
from dataclasses import dataclass

from ml_collections import ConfigDict

ALPHA_KINDS = ("exponential", "linear", "cosine", "none", "signal")


def alpha_at(
    step: int, total_steps: int, initial: float, final: float, kind: str, share_of_one_outcome: float = 0.0
) -> float:
    """Weight of the step advantage at a generator step (arXiv 2505.15034).

    Args:
        step: generator steps after the warm-up, from 0, held at total_steps.
        initial, final: a0 at step 0, and a_min at total_steps.
        kind: "exponential" a0 * (a_min / a0)^(step / total_steps), both above 0; "linear"; "cosine" (half a period);
              "none" stays at a0; "signal" a_min + (a0 - a_min) u.
        share_of_one_outcome: u, the share of this batch's groups whose answers are all right or all wrong, in [0, 1].
    """
    assert kind in ALPHA_KINDS and step >= 0, (kind, step)
    done = min(step / total_steps, 1.0)
    if kind == "none":
        return float(initial)
    if kind == "signal":
        return final + (initial - final) * share_of_one_outcome
    if kind == "linear":
        return initial + (final - initial) * done
    if kind == "cosine":
        return final + 0.5 * (initial - final) * (1.0 + math.cos(math.pi * done))
    return initial * (final / initial) ** done


def alpha_of(step: int, rl: ConfigDict, share_of_one_outcome: float) -> float:
    return alpha_at(step, rl.generator_steps, rl.alpha_initial, rl.alpha_final, rl.alpha_schedule, share_of_one_outcome)


@dataclass(frozen=True)
class Place:
    index: int  # turns before it in the run
    role: str  # the one that is trained, generator or verifier
    phase: str  # warmup, generator or verifier
    generator_step: int  # generator turns before it; on a generator turn, the step of `alpha_at`

    @property
    def role_step(self) -> int:
        """Turns of this role before this one."""
        return self.generator_step if self.role == "generator" else self.index - self.generator_step


@dataclass(frozen=True)
class Schedule:
    """Warm-up turns of the verifier, then cycles of generator turns and verifier turns (arXiv 2505.15034). The run ends
    with its last generator turn, or the verifier turns that complete its cycle."""

    warmup_turns: int
    generator_turns_per_cycle: int
    verifier_turns_per_cycle: int
    generator_turns: int
    train_generator: bool = True
    train_verifier: bool = True

    @property
    def num_warmup(self) -> int:
        return self.warmup_turns if self.train_verifier else 0

    @property
    def cycle(self) -> tuple[int, int]:
        """Generator and verifier turns of a cycle."""
        return (
            self.generator_turns_per_cycle if self.train_generator else 0,
            self.verifier_turns_per_cycle if self.train_verifier else 0,
        )

    @property
    def num_turns(self) -> int:
        full_cycles, rest = divmod(self.generator_turns, self.generator_turns_per_cycle)
        return self.num_warmup + full_cycles * sum(self.cycle) + (rest if self.train_generator else 0)

    def turns(self) -> tuple[Place, ...]:
        return tuple(turn_at(self, index) for index in range(self.num_turns))


def turn_at(schedule: Schedule, index: int) -> Place:
    """Raises ValueError where the run is over."""
    if not 0 <= index < schedule.num_turns:
        raise ValueError(f"turn {index} lies outside the schedule of {schedule.num_turns} turns: raise its step counts")
    if index < schedule.num_warmup:
        return Place(index, "verifier", "warmup", 0)
    num_generator, num_verifier = schedule.cycle
    cycles_done, place = divmod(index - schedule.num_warmup, num_generator + num_verifier)
    role = "generator" if place < num_generator else "verifier"
    return Place(index, role, role, cycles_done * num_generator + min(place, num_generator))


def generator_steps_after(schedule: Schedule, index: int) -> int:
    """Generator turns made once turn `index` is over; with a fixed generator, those of arms that train it."""
    turn = turn_at(schedule, index)
    if turn.phase == "warmup":
        return 0
    if schedule.train_generator:
        return turn.generator_step + (turn.phase == "generator")
    done = index + 1 - schedule.warmup_turns
    most = done * schedule.generator_turns_per_cycle // schedule.verifier_turns_per_cycle
    return min(schedule.generator_turns, most)


def is_evaluation_due(config: ConfigDict, schedule: Schedule, index: int) -> bool:
    """After the warm-up, after every `eval.every` generator steps, and at the end."""
    is_last = index + 1 == schedule.num_turns
    if is_last or (turn_at(schedule, index).phase == "warmup" and turn_at(schedule, index + 1).phase != "warmup"):
        return True
    before = generator_steps_after(schedule, index - 1) if index else 0
    return generator_steps_after(schedule, index) // config.eval.every > before // config.eval.every


def turns_since_evaluation(config: ConfigDict, schedule: Schedule, turns_done: int) -> list[Place]:
    """The turns between the evaluation after `turns_done` turns and the one before it, the last first."""
    turns = []
    for index in reversed(range(turns_done)):
        if index + 1 < turns_done and is_evaluation_due(config, schedule, index):
            break
        turns.append(turn_at(schedule, index))
    return turns


def evaluations_before(config: ConfigDict, schedule: Schedule, turns_done: int) -> int:
    """Evaluations before the one that follows `turns_done` turns; the first is before the first turn."""
    return sum(is_evaluation_due(config, schedule, index) for index in range(turns_done - 1)) + (turns_done > 0)
