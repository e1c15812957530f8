"""The arms of an experiment: which roles are trained, and what happens in a turn of each.

An arm is one record: an entry of ARMS, or one of a user's own (tasks/own_arm.py). Schedules, turns, figures, reports
and plans read its fields; no other code in the package refers to an arm by name.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

# Okabe-Ito colours, which colour-blind readers can distinguish; line style and marker differ as well, for print.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY, BLACK = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6E6E6E", "#000000")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Call:
    """One role responds `samples` times to each prompt. The first call of a turn answers problems; each later call
    answers the records of the previous call: the verifier judges what the generator wrote. With a `text`, a role
    answers another prompt, which holds a solution and its verification."""

    role: str
    samples: str  # key of `config.rl` with the number of responses to each prompt; empty: one
    labels: str = ""  # what solutions are labelled by: a name in rl/labels.py LABELS; empty: the grade
    about: str = ""  # which records of the previous call it answers: a name in rl/labels.py ABOUT; empty: all
    text: str = ""  # second_solution (a generator's) or second_judgement (a verifier's); empty: the role's own prompt

    @property
    def name(self) -> str:
        """The name of what it responds, among the answers of a turn and in metrics."""
        return self.text or self.role


@dataclasses.dataclass(frozen=True)
class TurnPlan:
    """A turn of the role that is updated in it: its calls in order, then one reward and one credit function."""

    calls: tuple[Call, ...]
    # The name of a function of rl/credit.py, FILE.py:name of a function like those, or the function itself. (Names and
    # not functions, because this file must not import rl/.) The function of `config.<role>.reward` is added.
    reward: str | Callable
    credit: str | Callable
    problems: str = "train"  # which of the task's problems: a name in tasks/task.py STREAMS
    learns: tuple[str, ...] = ()  # names of the calls whose responses are trained on; empty: the role's own
    # Of the role that learns, the prompt with which its reference policy scores its responses for the credit function:
    # informed (the verifier's with the gold answer, rl/informed.py); empty: none.
    teacher: str = ""

    def learners(self, role: str) -> tuple[str, ...]:
        """The names of the calls whose responses are rewarded and trained on in a turn of `role`."""
        return self.learns or (role,)

    def calls_until(self, role: str) -> tuple[Call, ...]:
        """Its calls up to and including the last of `role`, which is then rewarded. The calls after it are made later:
        dynamic sampling and `rl.judge` choose by the rewards and grades which responses they are about."""
        last = max(index for index, call in enumerate(self.calls) if call.role == role)
        return self.calls[: last + 1]

    def calls_after(self, role: str) -> tuple[Call, ...]:
        """The other calls, see `calls_until`."""
        return self.calls[len(self.calls_until(role)) :]


@dataclasses.dataclass(frozen=True)
class Look:
    """The style of an arm's curve."""

    colour: str
    dash: str  # a line style of Matplotlib: -, --, -. or :
    marker: str  # a name in tracking/curves.py MARKERS


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train. `turns` has a plan for every role that is trained."""

    help: str  # one line for --help, logs and reports
    label: str  # for legends
    look: Look
    turns: Mapping[str, TurnPlan]  # role -> TurnPlan; frozen, so that no built-in arm can be changed in place
    is_interleaved: bool = True  # False: the verifier is trained only in its warm-up
    needs_gold_steps: bool = False  # the task must provide step labels
    is_one_policy: bool = False  # both roles are one policy, as with verifier.adapter=generator

    def __post_init__(self):
        if isinstance(self.turns, Mapping):  # tasks/own_arm.py names the mistake of a user otherwise
            object.__setattr__(self, "turns", MappingProxyType(dict(self.turns)))

    @property
    def asks_verifier(self) -> bool:
        """Whether a turn of the arm has responses of the verifier."""
        return any(call.role == "verifier" for plan in self.turns.values() for call in plan.calls)

    @property
    def needs_curriculum(self) -> bool:
        """Whether the task must provide a curriculum."""
        return any(plan.problems == "curriculum" for plan in self.turns.values())

    def further_texts(self, role: str) -> tuple[str, ...]:
        """The prompts of a role beside its own, which stage 1 has examples of as well."""
        texts = [call.text for plan in self.turns.values() for call in plan.calls if call.role == role]
        teachers = [plan.teacher for learner, plan in self.turns.items() if learner == role]
        return tuple(dict.fromkeys(filter(None, (*texts, *teachers))))

    @property
    def stage_one_kind(self) -> str:
        """What makes its stage 1 another one than that of the other arms; empty: nothing."""
        return ",".join([*["one_policy"] * self.is_one_policy, *self.further_texts("generator"),
                         *self.further_texts("verifier")])  # fmt: skip


_SOLVE = Call("generator", "samples_per_prompt")
SOLVE_ALONE = TurnPlan((_SOLVE,), reward="outcome_reward", credit="outcome_credit")
SOLVE_WITH_GOLD_STEPS = TurnPlan((_SOLVE,), reward="outcome_reward", credit="gold_steps_credit")
SOLVE_AND_BE_JUDGED = TurnPlan(
    (_SOLVE, Call("verifier", "verifications_per_solution")), reward="outcome_reward", credit="judged_steps_credit"
)
SOLVE_CURRICULUM = TurnPlan((_SOLVE,), reward="outcome_reward", credit="outcome_credit", problems="curriculum")
JUDGE = TurnPlan(
    (Call("generator", ""), Call("verifier", "samples_per_prompt")),
    reward="verdict_reward", credit="class_balanced_credit", problems="verifier",
)  # fmt: skip
_SOLVE_BY_MAJORITY = Call("generator", "samples_per_prompt", labels="majority")
SOLVE_WITHOUT_LABELS = TurnPlan(
    (_SOLVE_BY_MAJORITY, Call("verifier", "")), reward="outcome_reward", credit="verified_majority_credit"
)
JUDGE_WITHOUT_LABELS = TurnPlan(
    (_SOLVE_BY_MAJORITY, Call("verifier", "samples_per_prompt", about="one_of_either_label")),
    reward="verdict_reward", credit="class_balanced_credit", problems="verifier",
)  # fmt: skip
SOLVE_TWICE = TurnPlan(
    (_SOLVE, Call("verifier", ""), Call("generator", "", about="rejected", text="second_solution")),
    reward="second_try_reward", credit="second_try_credit", learns=("generator", "second_solution"),
)  # fmt: skip
JUDGE_INFORMED = dataclasses.replace(JUDGE, credit="informed_credit", teacher="informed")
JUDGE_AND_BE_JUDGED = dataclasses.replace(
    JUDGE, calls=(*JUDGE.calls, Call("verifier", "", text="second_judgement")), reward="twice_judged_reward"
)

ARMS: Mapping[str, Arm] = MappingProxyType({
    "tango": Arm(
        "generator and verifier take turns (the method)", "Tango (trained together)", Look(VERMILION, "-", "circle"),
        {"generator": SOLVE_AND_BE_JUDGED, "verifier": JUDGE},
    ),
    "grpo": Arm(
        "generator alone, outcome reward only", "GRPO (no verifier)", Look(BLUE, "--", "square"),
        {"generator": SOLVE_ALONE},
    ),
    "fixed_verifier": Arm(
        "the verifier is fixed after stage 1, never trained with RL", "fixed verifier",
        Look(GREEN, "-.", "triangle-up"), {"generator": SOLVE_AND_BE_JUDGED},
    ),
    "fixed_verifier_warm": Arm(
        "the verifier trained in the warm-up only, then fixed", "fixed verifier, warmed up", Look(SKY, "-", "cross"),
        {"generator": SOLVE_AND_BE_JUDGED, "verifier": JUDGE}, is_interleaved=False,
    ),
    "fixed_generator": Arm(
        "the verifier alone, on solutions of a fixed generator", "fixed generator",
        Look(PURPLE, ":", "diamond"), {"verifier": JUDGE},
    ),
    "gold_steps": Arm(
        "step labels from the task instead of a verifier (an upper bound)", "gold step labels",
        Look(ORANGE, "--", "triangle-down"), {"generator": SOLVE_WITH_GOLD_STEPS}, needs_gold_steps=True,
    ),
    "grpo_curriculum": Arm(
        "generator alone, on problems that are also as short as the verifier's", "GRPO with a curriculum",
        Look(BLACK, ":", "x"), {"generator": SOLVE_CURRICULUM},
    ),
    # One policy learns to solve and to verify its own solutions, in turns, after Self-Verification (arXiv 2506.01369)
    # and Learning to Self-Verify (arXiv 2602.07594); RISE (arXiv 2505.13445) has both kinds of rows in one batch.
    "self_verify": Arm(
        "one policy that solves and learns to verify its own solutions", "one policy, self-verified",
        Look(GREY, "-", "diamond"), {"generator": SOLVE_ALONE, "verifier": JUDGE}, is_one_policy=True,
    ),
    # No gold answer in training: the majority's answer is taken for it where the verifier confirms it. After CoVerRL
    # (arXiv 2603.17775), which has one policy for both roles; evaluations and metrics keep the grade.
    "no_labels": Arm(
        "answers of the majority in place of gold answers, where the verifier confirms them", "no labels",
        Look(GREY, "-.", "cross"), {"generator": SOLVE_WITHOUT_LABELS, "verifier": JUDGE_WITHOUT_LABELS},
        is_one_policy=True,
    ),
    # One policy, which solves again where its own verdict is INCORRECT, and sees both (PAG, arXiv 2506.10406); one
    # group holds first and second tries (Critique-GRPO, arXiv 2506.03106).
    "second_try": Arm(
        "one policy that answers again where its own verdict is INCORRECT", "second try",
        Look(GREEN, "--", "x"), {"generator": SOLVE_TWICE, "verifier": JUDGE}, is_one_policy=True,
    ),
    # The verifier also imitates its initial self with the gold answer in the prompt (self-trained verification, arXiv
    # 2605.30290), token by token on its own samples.
    "taught_verifier": Arm(
        "a verifier that also imitates itself with the gold answer in its prompt", "taught verifier",
        Look(PURPLE, "-", "triangle-up"), {"generator": SOLVE_AND_BE_JUDGED, "verifier": JUDGE_INFORMED},
    ),
    # The verifier's reward is multiplied by what it says of its own verification (DeepSeekMath-V2, arXiv 2511.22570).
    "meta_judged": Arm(
        "a verifier whose verifications are judged as well", "judged verifications",
        Look(BLUE, "-.", "triangle-down"), {"generator": SOLVE_AND_BE_JUDGED, "verifier": JUDGE_AND_BE_JUDGED},
    ),
})  # fmt: skip
DEFAULT_ARM = next(iter(ARMS))
