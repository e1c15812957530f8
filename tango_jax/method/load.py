"""Loads what the settings name of a method, and rehearses it.

`loss.algorithm`, `loss.term`, `rewards` and the arm may name user functions, whose errors become a ValueError of one
line.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.method.arms import Arm, TurnFunction, turns_of
from tango_jax.method.own_arm import arm_of, read_arm
from tango_jax.method.rehearsal import Rehearsal, made_up_task, rehearse
from tango_jax.method.relatives import MAJORITY
from tango_jax.method.turn import MAX_SCORED_TOKENS, Call, Turn
from tango_jax.records import Lesson
from tango_jax.rl.algorithms import ALGORITHMS, Algorithm, algorithm_of
from tango_jax.rl.loss_term import load_loss_term
from tango_jax.rl.own_reward import OwnReward, load_own_rewards
from tango_jax.runtime import hosts
from tango_jax.runtime.checks import Mistakes, require
from tango_jax.runtime.failures import OutOfMemory
from tango_jax.runtime.user_code import UserFunction
from tango_jax.tasks.own_grader import check_goes_by_answer
from tango_jax.tasks.registry import LOOKED_AT, example_problem, teaches_further_prompts
from tango_jax.tasks.task import Task
from tango_jax.text.prompts import OWN, PROMPTS, SCORED, SECOND_JUDGEMENT, SECOND_TRY, Prompt

# Errors of sampling, not of the function that called it.
NOT_OF_THE_TURN = (FloatingPointError, jax.errors.JaxRuntimeError, OutOfMemory, hosts.Preempted)


class Method(NamedTuple):
    arm: Arm
    turns: Mapping[str, TurnFunction]  # by role
    algorithms: Mapping[str, Algorithm]  # by role
    own_rewards: Mapping[str, tuple[OwnReward, ...]]  # by role, functions that score one response
    rehearsals: Mapping[str, Rehearsal]  # by the role that is trained

    def further_prompts(self, role: str) -> tuple[Prompt, ...]:
        """Of a role, all but its own. Stage 1 may have examples of them, see `taught_prompts`."""
        found = [prompt for rehearsal in self.rehearsals.values() for prompt in rehearsal.prompts]
        own = self.own[role]
        return tuple(dict.fromkeys(prompt for prompt in found if prompt.role == role and prompt is not own))

    def taught_prompts(self, role: str) -> tuple[str, ...]:
        """Names of the further prompts that stage 1 can have examples of: nobody has some of a user's."""
        return tuple(prompt.name for prompt in self.further_prompts(role) if PROMPTS.get(prompt.name) == prompt)

    @property
    def own(self) -> Mapping[str, Prompt]:
        """By role, the prompt that turns and evaluations take if they name none."""
        return own_prompts(self.arm)

    def most_read(self, config: ConfigDict) -> int:
        """Solutions whose marks a turn or an evaluation may read: all calls share one program."""
        calls = [call for rehearsal in self.rehearsals.values() for call in rehearsal.calls.values()]
        read = [call.prompts for call in calls if call.prompt.is_scored]
        return max(config.eval.problems, config.eval.pool, *read)

    def samples_of(self, role: str) -> set[int]:
        calls = [call for rehearsal in self.rehearsals.values() for call in rehearsal.calls.values()]
        return {call.samples for call in calls if call.prompt.role == role}

    @property
    def streams(self) -> set[str]:
        return {stream for rehearsal in self.rehearsals.values() for stream in rehearsal.draws}

    def stage_one_kind(self, roles: Sequence[str] = ROLES, is_taught: bool = True) -> str:
        """Sets the stage 1 of these roles apart from other arms'; or "". `is_taught`: further prompts have
        examples."""
        return _kind(self.arm, roles, {role: self.taught_prompts(role) for role in ROLES if is_taught})


def own_prompts(arm: Arm) -> Mapping[str, Prompt]:
    return {**OWN, "verifier": SCORED} if arm.is_scored else OWN


class Parts(NamedTuple):
    arm: Arm
    algorithms: dict[str, Algorithm]
    own_rewards: dict[str, tuple[OwnReward, ...]]


def load_parts(config: ConfigDict) -> Parts:
    """Raises ValueError with all mistakes at once."""
    mistakes, own_rewards, algorithms, arm = Mistakes(), {}, {}, None
    with mistakes.collected():
        arm = arm_of(config)
    with mistakes.collected():
        own_rewards = load_own_rewards(config)
    for role in ROLES:
        with mistakes.collected():
            algorithms[role] = algorithm_of(config[role].loss.algorithm, f"{role}.loss.algorithm")
        with mistakes.collected():
            load_loss_term(role, config[role].loss)
    mistakes.require(
        arm is None or not arm.is_scored or not config.verifier.stop_at_first_error, f"the verifier of "
        f"arm={config.arm} does not write, and with verifier.stop_at_first_error=True it would stop writing: set it to "
        "False",
    )
    mistakes.raise_all()
    return Parts(arm, algorithms, own_rewards)


def load_method(config: ConfigDict, task: Task | None = None, is_checked: bool = True) -> Method:
    """`task`: to try user functions with; None: a made-up one, and rewards are not tried. `is_checked`: False: the
    settings need not suit the turns yet. Raises ValueError as `load_parts`; or a rehearsal failed (rehearsal.py), or
    the settings do not suit the turns."""
    arm, algorithms, own_rewards = load_parts(config)
    turns = {role: _named(config, role, turn, _is_own(arm.turns[role]))
             for role, turn in turns_of(arm, config.rl).items()}
    rehearsed_with, rehearsals = task or made_up_task(example_problem(config)), {}
    for role, turn in turns.items():
        tried = own_rewards.get(role, ()) if task else ()
        try:
            rehearsals[role] = rehearse(turn, role, config, algorithms[role], rehearsed_with, tried,
                                        own_prompts(arm))
        except ValueError as error:
            place = f"arm={config.arm}, the {role}'s turn: "
            text = str(error).removeprefix(place).replace(hosts.ONCE_MENDED, "")  # nothing has begun
            raise ValueError(f"{place}{text}; the responses were made up to try the method before the run") from error
    method = Method(arm, turns, algorithms, own_rewards, rehearsals)
    if is_checked:
        _check(config, method)
    return method


def stage_one_kind(config: ConfigDict, arm: str | Mapping[str, Any], roles: Sequence[str] = ROLES) -> str:
    """How the stage 1 of these roles of an arm differs from the one of the settings: one policy, marks without remarks,
    or further prompts; empty: it does not. `arm`: its name, or its record as a run stores it (tracking/provenance.py).
    """
    config = config.copy_and_resolve_references()
    imitate = [role for role in ROLES if config[role].sft.steps and not config[role].init_from]
    if isinstance(arm, str):
        config.arm = arm
        method = load_method(config, is_checked=False)
        record, taught = method.arm, {role: method.taught_prompts(role) for role in ROLES}
    else:
        record, taught = read_arm(arm), arm["further_prompts"]
    if "verifier" in imitate and (record.is_one_policy or config.verifier.adapter == "generator"):
        imitate = roles = ROLES  # every batch has examples of both
    imitate = [role for role in imitate if role in roles]
    kind = _kind(record, imitate, taught if imitate and teaches_further_prompts(config) else {})
    return kind.removeprefix("one_policy").lstrip(",") if config.verifier.adapter == "generator" else kind


def _kind(arm: Arm, roles: Sequence[str], taught: Mapping[str, Sequence[str]]) -> str:
    has_marks = arm.is_scored and "verifier" in roles
    further = [name for role in roles for name in taught.get(role, ())]
    return ",".join([*["one_policy"] * arm.is_one_policy, *["marks_alone"] * has_marks, *further])


def _is_own(turn: TurnFunction) -> bool:
    return not getattr(turn, "__module__", "").startswith(f"{__package__}.")


def _named(config: ConfigDict, role: str, turn: TurnFunction, is_own: bool) -> Callable[[Turn], Lesson]:
    function = UserFunction("arm", f"{config.arm}, the {role}'s turn", turn)

    def named_turn(t: Turn) -> Lesson:
        try:
            return function.call(t) if is_own else turn(t)
        except ValueError as error:
            if isinstance(error.__cause__, NOT_OF_THE_TURN):
                raise error.__cause__ from None
            raise error if is_own else ValueError(f"arm={config.arm}, the {role}'s turn: {error}") from error

    return named_turn


def _check(config: ConfigDict, method: Method) -> None:
    rl, rehearsals, mistakes, shown = config.rl, method.rehearsals, Mistakes(), f"arm={config.arm}"
    roles = {call.prompt.role for rehearsal in rehearsals.values() for call in rehearsal.calls.values()}
    has_verifier, verb = "verifier" in roles, "sample" if "verifier" in roles else "do not sample"
    mistakes.require(method.arm.uses_verifier == has_verifier, f"{shown} has uses_verifier={method.arm.uses_verifier}, "
                     f"and its turns {verb} from the verifier: set it to {has_verifier}")
    for role, rehearsal in rehearsals.items():
        _check_turn(config, role, rehearsal, method, mistakes)
        others = ", ".join(prompt.name for prompt in rehearsal.prompts
                           if prompt.role == "verifier" and prompt.is_scored != method.arm.is_scored)
        mistakes.require(not method.arm.is_scored or not others, f"{shown} has is_scored=True, so that its "
                         f"verifier does not write, and the {role}'s turn samples from it with the prompt "
                         f"{others}: name no prompt, or set is_scored=False")
        # Stage 1 and evaluations teach and measure one form.
        mistakes.require(method.arm.is_scored or not others, f"{shown} has is_scored=False, so that its verifier "
                         f"writes, and the {role}'s turn reads its marks with the prompt {others}, which has "
                         "is_scored=True: name no prompt, or set is_scored=True in the arm")
    is_own = "generator" in method.turns and _is_own(method.arm.turns["generator"])
    is_trusted = "generator" in rehearsals and "generator/judged_share" in rehearsals["generator"].metrics
    mistakes.require(
        not (rl.trust or rl.judge != "all") or not is_own or is_trusted, f"rl.trust={tuple(rl.trust)} and rl.judge="
        f"{rl.judge} change tango.solve, and the generator's turn of {shown} does not use it: build the turn on "
        "tango_jax.method.trust.solve, or set rl.trust=() and rl.judge=all",
    )
    if "generator" in rehearsals:
        lesson = rehearsals["generator"].example[1]
        if lesson.step_rewards or "steps" in lesson.terms:
            _check_alpha(rl, mistakes)
            if any(call.prompt.role == "verifier" for call in rehearsals["generator"].calls.values()):
                _check_judgements(rl, config.generator.loss, mistakes)
    mistakes.raise_all()


def _check_alpha(rl: ConfigDict, mistakes: Mistakes) -> None:
    mistakes.require(
        rl.alpha_schedule != "exponential" or min(rl.alpha_initial, rl.alpha_final) > 0,
        f"an exponential alpha schedule cannot start or end at 0 (alpha_initial={rl.alpha_initial}, "
        f"alpha_final={rl.alpha_final}): use rl.alpha_schedule=linear, or arm=grpo for no step rewards",
    )
    mistakes.require(
        rl.alpha_schedule != "signal" or not rl.dynamic_sampling,
        "rl.alpha_schedule=signal follows the share of groups whose answers are all right or all wrong, and "
        f"rl.dynamic_sampling={rl.dynamic_sampling} replaces these groups: choose another schedule, or "
        "rl.dynamic_sampling=0",
    )


def _check_judgements(rl: ConfigDict, loss: ConfigDict, mistakes: Mistakes) -> None:
    """Of step rewards by the verifier; the task's step labels are always there, and are marks."""
    mistakes.require(
        rl.judge == "all" or not rl.dynamic_sampling, f"rl.judge={rl.judge} judges groups whose answers are all right "
        f"or all wrong, and rl.dynamic_sampling={rl.dynamic_sampling} replaces these groups: set rl.judge=all, or "
        "rl.dynamic_sampling=0",
    )
    mistakes.require(
        rl.judge == "all" or loss.algorithm != "reinforce_pp" or loss.step_norm != "elements",
        f"rl.judge={rl.judge} leaves solutions without step rewards, and generator.loss.algorithm=reinforce_pp with "
        "generator.loss.step_norm=elements compares with these as zeros: set rl.judge=all, or another step_norm",
    )
    mistakes.require(
        rl.step_reward == "mark" or loss.step_norm != "first_error", f"rl.step_reward={rl.step_reward} replaces the "
        "marks, and generator.loss.step_norm=first_error looks for the first INCORRECT among them: set "
        "rl.step_reward=mark, or another step_norm",
    )


def _check_turn(config: ConfigDict, role: str, rehearsal: Rehearsal, method: Method, mistakes: Mistakes) -> None:
    rl, learner, shown = config.rl, config[role], f"arm={config.arm}"
    mistakes.require(
        not rehearsal.labels or (rl.judge == "all" and not rl.trust), f"{shown} labels solutions without grades, and "
        f"rl.judge={rl.judge} and rl.trust={tuple(rl.trust)} need grades: set rl.judge=all and rl.trust=()",
    )
    mistakes.require(
        MAJORITY not in rehearsal.metrics or rl.samples_per_prompt > 1, f"{shown} labels solutions by the majority "
        "answer to a problem, and rl.samples_per_prompt=1 gives only one answer: raise it",
    )
    trained = rehearsal.learner
    is_alone = trained.samples == 1 and not trained.is_joined and not trained.is_scored
    mistakes.require(
        not is_alone or not method.algorithms[role].compares_groups_alone or learner.loss.algorithm not in ALGORITHMS,
        f"{role}.loss.algorithm={learner.loss.algorithm} compares the responses to a prompt, and the turn takes only "
        f"one (rl.samples_per_prompt={rl.samples_per_prompt}): raise it to 2 or more, or set "
        f"{role}.loss.algorithm=reinforce_pp, which compares all responses of a batch",
    )
    mistakes.require(
        not trained.is_scored or trained.samples == 1, f"{shown} has is_scored=True, and the {role}'s turn trains on "
        f"{trained.samples} draws from each text, which is read once: return scored.on_one_text(t, lesson) from the "
        "turn, as scored.judge_drawn does (tango_jax/method/scored.py), or set is_scored=False",
    )
    for sampler in {call.prompt.role for call in rehearsal.calls.values()
                    if call.samples == rl.samples_per_prompt and not call.prompt.is_scored}:
        check_rows(config, sampler, "rl.samples_per_prompt", rl.samples_per_prompt, mistakes)
    if rehearsal.scored:
        mistakes.require(
            learner.top_p == 1 and not learner.top_k, f"{shown} compares the {role}'s samples with its teacher, "
            f"and {role}.top_p={learner.top_p} and {role}.top_k={learner.top_k} leave tokens out: set them "
            "to 1.0 and 0",
        )
        mistakes.require(
            learner.loss.kl_coef > 0, f"{shown} uses the reference policy of the {role} as its teacher, and "
            f"{role}.loss.kl_coef=0 removes it: set it above 0",
        )
    read = [Call(call.prompt, call.prompts, 1) for call in rehearsal.calls.values() if call.prompt.is_scored]
    for call in (*rehearsal.scored, *read):
        of, tokens = call.prompt.role, call.prompts * call.samples * config[call.prompt.role].max_response
        mistakes.require(
            tokens < MAX_SCORED_TOKENS, f"the {'verifier' if call in read else 'teacher'} of {shown} would score up to "
            f"{tokens} tokens of a turn, more than {MAX_SCORED_TOKENS - 1}: lower rl.prompts_per_step, "
            f"rl.samples_per_prompt or {of}.max_response",
        )
    mistakes.require(
        not method.arm.is_scored or config.task.stage_one != "self" or not config.verifier.sft.steps
        or bool(config.verifier.init_from), "task.stage_one=self teaches a verifier to write, and that of "
        f"{shown} does not: set verifier.sft.steps=0",
    )
    mistakes.require(
        not config.verifier.stop_at_first_error or SECOND_JUDGEMENT not in rehearsal.prompts, f"{shown} is rewarded by "
        "judgements of every remark, and with verifier.stop_at_first_error=True those after the first rejected one are "
        "missing: set it to False, or choose another arm",
    )
    for prompt in {SECOND_TRY, SECOND_JUDGEMENT} & set(rehearsal.prompts):
        least, limit = config.generator.max_response + config.verifier.max_response, config[prompt.role].max_prompt
        mistakes.require(
            limit > least, f"{shown} shows the {prompt.role} a solution and its verification, up to {least} tokens "
            f"in addition to the problem, and {prompt.role}.max_prompt={limit} is too small: raise it",
        )


def check_rows(config: ConfigDict, role: str, key: str, samples: int, mistakes: Mistakes) -> None:
    """`key`: the setting that says how many samples the role takes of a prompt."""
    rows = config[role].row_buckets[-1]
    mistakes.require(
        bool(config[role].cache_tokens) or rows % samples == 0, f"{role}.row_buckets ends in {rows}, which is not a "
        f"multiple of {key}={samples}: choose one; samples of a prompt share its cache and stay in one batch",
    )


def check_task(config: ConfigDict, method: Method, task: Task) -> None:
    """Raise ValueError if the task lacks step labels, a curriculum, or a grader that goes by `problem.answer`."""
    needed = {"step labels": ("gold_steps", method.arm.needs_gold_steps),
              "a curriculum": ("curriculum_problem", "curriculum" in method.streams)}
    for what, (field, is_needed) in needed.items():
        require(not is_needed or getattr(task, field) is not None, f"arm={config.arm} needs a task with {what}, and "
                f"task.name={config.task.name} has none: choose another arm, or give the task a {field}")
    if any(MAJORITY in rehearsal.metrics for rehearsal in method.rehearsals.values()):
        check_goes_by_answer(task, [task.train_problem(index) for index in range(LOOKED_AT)], f"arm={config.arm}")
