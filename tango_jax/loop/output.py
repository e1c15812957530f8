"""What a run writes after turns and evaluations: metrics.jsonl, rollouts/, checkpoints/ and progress."""

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path

from tango_jax.loop.best import Best
from tango_jax.loop.breakdown import check_params, explained
from tango_jax.loop.describe import describe_turn
from tango_jax.loop.measure import Measured
from tango_jax.loop.resume import RunState, save
from tango_jax.loop.turn import RunContext
from tango_jax.records import Memory, States, TurnResult
from tango_jax.rl.schedule import Place, Schedule, evaluations_before, generator_steps_after, turn_at
from tango_jax.runtime.checkpoint import Checkpointer
from tango_jax.runtime.console import Stage
from tango_jax.tracking.loggers import RunLog
from tango_jax.tracking.rollout_dump import RolloutDump
from tango_jax.tracking.turn_metrics import sampled_per_second


@dataclasses.dataclass(frozen=True)
class RunOutput:
    context: RunContext
    schedule: Schedule
    log: RunLog
    dump: RolloutDump
    checkpointer: Checkpointer
    progress: Stage
    fingerprints: Mapping[str, str]  # what the run started from; see `resume.fingerprints_of`
    workdir: Path
    began: float  # time.monotonic(), less the seconds of earlier attempts

    def explained(self, doing: str) -> contextlib.AbstractContextManager:
        return explained(doing, self.context.config, self.workdir, self.checkpointer.latest_step)

    def write_turn(self, place: Place, result: TurnResult, began: float, turns_done: int) -> None:
        """`began`: time.monotonic(). `turns_done` also counts the turns skipped after this one."""
        timer = self.context.timer
        with timer("dump"):
            formula = result.lesson.formula or self.context.method.algorithms[place.role].formula
            self.dump.write(place, result, formula)
        seconds = time.monotonic() - began
        timing = timer.pop() | {"time/turn_s": seconds}
        timing["throughput/sampled_tokens_per_s"] = sampled_per_second(result.metrics, timing)
        row = {"generator_step": place.generator_step} | result.metrics | timing
        self.log.write(place.index + 1, place.phase, row)
        shown = {
            "outcome": result.metrics.get("generator/reward/outcome"),
            "verdicts_right": result.metrics.get("verifier/reward/correctness"),
        }
        shown = {name: value for name, value in shown.items() if value is not None}
        self.progress.advance(turns_done - place.index, phase=describe_turn(place, self.schedule), **shown)
        if turns_done > place.index + 1:
            until = self.context.config.rl.warmup_until
            self.progress.log(f"the warm-up has reached rl.warmup_until={until:g}, and ends after {place.index + 1} of "
                              f"{turns_done} turns")

    def write_evaluation(self, turns_done: int, measured: Measured) -> None:
        step = generator_steps_after(self.schedule, turns_done - 1) if turns_done else 0
        number = evaluations_before(self.context.config, self.schedule, turns_done)
        self.dump.write_evaluation(number, turns_done, step, measured.solutions, measured.verifications,
                                   measured.second_tries)
        row = {"generator_step": step} | measured.metrics | self.context.timer.pop()
        self.log.write(turns_done, "eval", row)

    def save(self, states: States, memory: Memory, owes_evaluation: bool, best: Best | None) -> None:
        """Files are written while the next turn runs. Raises FloatingPointError: parameters are not finite; ValueError:
        this checkpoint or the one before cannot be written."""
        with self.explained(f"the check of the parameters that turn {memory.turn} would save"):
            last = turn_at(self.schedule, max(memory.turn - 1, 0)).role
            check_params({last: states[last]} | states)  # of one policy, the role that was trained last is named
        self.progress.show("saving a checkpoint")
        with self.context.timer("checkpoint"):  # in the row of what comes next: this turn's is written
            seconds = time.monotonic() - self.began
            run_state = RunState(states, memory, self.log.position(), seconds, owes_evaluation, best, self.fingerprints)
            save(self.checkpointer, run_state, self.context.policies)
