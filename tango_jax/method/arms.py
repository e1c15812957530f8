"""The arms of an experiment. An arm says which roles are trained, and by which turns.

Schedules, figures, reports and plans read its fields; a rehearsal (rehearsal.py) finds out what its turns do.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

from ml_collections import ConfigDict

from tango_jax.method import baselines, practice, relatives, scored, tango, trust
from tango_jax.method.turn import Turn
from tango_jax.records import Lesson

TurnFunction = Callable[[Turn], Lesson]

# Okabe-Ito colours, which colour-blind readers can distinguish; line style and marker differ as well, for print.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY, BLACK = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6E6E6E", "#000000")


@dataclasses.dataclass(frozen=True)
class Look:
    colour: str
    dash: str  # a line style of Matplotlib: -, --, -. or :
    marker: str  # a name in tracking/curves.py MARKERS


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train. `turns` has a function for every trained role."""

    help: str  # one line for --help, logs and reports
    label: str  # for legends
    look: Look
    turns: Mapping[str, TurnFunction]  # role -> its turn
    is_interleaved: bool = True  # False: the verifier is trained only in its warm-up
    needs_gold_steps: bool = False  # the task must provide step labels
    is_one_policy: bool = False  # both roles are one policy, as with verifier.adapter=generator
    uses_verifier: bool = True  # a turn samples from the verifier
    is_scored: bool = False  # the verifier does not write: its marks are read in one pass, also in evaluations

    def __post_init__(self):
        if isinstance(self.turns, Mapping):  # runs of a process share the table: an arm is copied, never changed
            object.__setattr__(self, "turns", MappingProxyType(dict(self.turns)))


ARMS: Mapping[str, Arm] = MappingProxyType({
    "tango": Arm(
        "generator and verifier take turns (the method)", "Tango (trained together)", Look(VERMILION, "-", "circle"),
        {"generator": tango.solve, "verifier": tango.judge},
    ),
    "grpo": Arm(
        "generator alone, outcome reward only", "GRPO (no verifier)", Look(BLUE, "--", "square"),
        {"generator": baselines.solve_alone}, uses_verifier=False,
    ),
    "fixed_verifier": Arm(
        "the verifier is fixed after stage 1, never trained with RL", "fixed verifier",
        Look(GREEN, "-.", "triangle-up"), {"generator": tango.solve},
    ),
    "fixed_verifier_warm": Arm(
        "the verifier trained in the warm-up only, then fixed", "fixed verifier, warmed up", Look(SKY, "-", "cross"),
        {"generator": tango.solve, "verifier": tango.judge}, is_interleaved=False,
    ),
    "fixed_generator": Arm(
        "the verifier alone, on solutions of a fixed generator", "fixed generator",
        Look(PURPLE, ":", "diamond"), {"verifier": tango.judge},
    ),
    "gold_steps": Arm(
        "step labels from the task instead of a verifier (an upper bound)", "gold step labels",
        Look(ORANGE, "--", "triangle-down"), {"generator": baselines.solve_with_gold_steps}, needs_gold_steps=True,
        uses_verifier=False,
    ),
    "grpo_curriculum": Arm(
        "generator alone, also on problems as short as the verifier's", "GRPO with a curriculum",
        Look(BLACK, ":", "x"), {"generator": baselines.solve_curriculum}, uses_verifier=False,
    ),
    "self_verify": Arm(
        "one policy that solves and learns to verify its own solutions", "one policy, self-verified",
        Look(GREY, "-", "diamond"), {"generator": baselines.solve_alone, "verifier": tango.judge}, is_one_policy=True,
    ),
    "no_labels": Arm(
        "majority answers that the verifier confirms, in place of gold answers", "no labels",
        Look(GREY, "-.", "cross"),
        {"generator": relatives.solve_without_labels, "verifier": relatives.judge_without_labels}, is_one_policy=True,
    ),
    "second_try": Arm(
        "one policy that answers again where its own verdict is INCORRECT", "second try",
        Look(GREEN, "--", "x"), {"generator": relatives.solve_twice, "verifier": tango.judge}, is_one_policy=True,
    ),
    "taught_verifier": Arm(
        "a verifier that also imitates itself with the gold answer in its prompt", "taught verifier",
        Look(PURPLE, "-", "triangle-up"), {"generator": tango.solve, "verifier": relatives.judge_informed},
    ),
    "meta_judged": Arm(
        "a verifier whose verifications are judged as well", "judged verifications",
        Look(BLUE, "-.", "triangle-down"), {"generator": tango.solve, "verifier": relatives.judge_and_be_judged},
    ),
    "scored": Arm(
        "a verifier that does not write: its marks are read in one pass, drawn and rewarded", "scored marks, drawn",
        Look(ORANGE, "-", "square"), {"generator": tango.solve, "verifier": scored.judge_drawn}, is_scored=True,
    ),
    "scored_exact": Arm(
        "a verifier that does not write: the likelihood of the grade by its marks is raised", "scored marks, exact",
        Look(BLACK, "-.", "circle"), {"generator": tango.solve, "verifier": scored.judge_exactly}, is_scored=True,
    ),
})
DEFAULT_ARM = next(iter(ARMS))


def turns_of(arm: Arm, rl: ConfigDict) -> dict[str, TurnFunction]:
    """The arm's turns, changed by `rl.trust`, `rl.judge` and `rl.practice`."""
    turns = dict(arm.turns)
    if (rl.trust or rl.judge != "all") and turns.get("generator") is tango.solve:
        turns["generator"] = trust.solve
    if rl.trust and "verifier" in turns:
        turns["verifier"] = trust.remembering(turns["verifier"])
    if rl.practice != "all":
        turns = {role: practice.remembering(turn) for role, turn in turns.items()}
    return turns
