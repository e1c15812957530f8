"""Settings that follow from a problem file, from the models and from the machine (configs/own_problems.py).

Lengths are counted with the roles' tokenizers, or roughly in a plan without them. Memory is by arithmetic
(estimates.py); `python -m tango_jax.plan` compiles the run and is exact.
"""

import contextlib
import math
from collections.abc import Collection, Sequence

import numpy as np
from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.data.problem_sets import load_problems, question_key
from tango_jax.loop.init_from import runs_before
from tango_jax.method.load import load_method
from tango_jax.method.turn import problems_of_a_draw
from tango_jax.models.head_precision import LEAST_CAPABILITY
from tango_jax.models.transformer import ModelConfig
from tango_jax.planning.costs import num_parameters
from tango_jax.planning.job import Job
from tango_jax.planning.machines import GIB, Machine, Scale, planned_machine, this_machine
from tango_jax.planning.own_batches import (
    asked_arms,
    choose_adapters,
    describe_batches,
    set_batches,
    sized_jobs,
    trained_roles,
)
from tango_jax.planning.problem_lengths import Lengths, prompt_lengths, read_as, rounded
from tango_jax.planning.sources import OpenSettings, describe_form, describe_rough_counts, open_sources
from tango_jax.records import Problem
from tango_jax.runtime.checks import Mistakes, shortened
from tango_jax.runtime.console import working
from tango_jax.tasks.self_text import GATE, LOOKED_AT, SELF
from tango_jax.tasks.splits import draw_questions
from tango_jax.text.prompts import SECOND_JUDGEMENT, SECOND_TRY, Prompt
from tango_jax.weights.source import kind_of

LEAST_RESPONSE = 64  # tokens; shorter limits leave no room for a solution in steps
STAGE_ONE_STEPS = 32  # updates of a round of stage 1, which imitates some dozens of samples
STAGE_ONE_TURNS = 16  # a round of stage 1 samples from as many problems as so many turns
SMALL_MODEL = 1e9  # parameters, below which stage 1 learns at 5e-5 (configs/smollm2_gsm8k.py)
SPARE = 64  # tokens: how much longer a solution may be in another tokenizer


def fit(config: ConfigDict, given: Collection[str] = (), machine: Machine | None = None) -> None:
    """Set everything that follows from the problems, the models and the machine, except the keys in `given`, and notes
    that say why.

    `machine`: by default the machine of `planned_for`, or else this one. A plan downloads nothing. Raises ValueError
    where problems or a checkpoint cannot be read, problems are too few or too long, or the models are too large.
    """
    settings, arm = OpenSettings(config, given), config.arm
    try:
        config.arm = next(iter(asked_arms(settings)), arm)
        _fit(settings, machine)
    finally:
        config.arm = arm


def _fit(settings: OpenSettings, machine: Machine | None) -> None:
    config, mistakes = settings.config, Mistakes()
    problems: tuple[Problem, ...] = ()
    test: tuple[Problem, ...] = ()
    with mistakes.collected("task.train: "):
        problems = load_problems(config.task.train).problems
    if config.task.test:
        with mistakes.collected("task.test: "):
            test = load_problems(config.task.test).problems
    if mistakes.messages:  # reading the tokenizers takes a while
        for checkpoint in dict.fromkeys(config[role].checkpoint for role in ROLES):
            with mistakes.collected():
                kind_of(checkpoint)
        mistakes.raise_all()
    planned = machine or planned_machine()
    machine = planned or this_machine(config)
    if not machine.is_cpu:
        for role in ROLES:
            settings.put(f"{role}.model.compute_dtype", "bfloat16")
            if machine.platform == "tpu" or (machine.capability or 0) >= LEAST_CAPABILITY:
                settings.put(f"{role}.model.head_precision", "bfloat16_x3")
    names = " and ".join(dict.fromkeys(config[role].checkpoint for role in ROLES))
    with working(f"reading the sizes and the tokenizer of {names}"):
        sources = open_sources(settings, mistakes, is_planned=planned is not None)
    mistakes.raise_all()
    scale = machine.scale
    models = {role: source.model_config for role, source in sources.items()}
    tokenizers = {role: source.tokenizer for role, source in sources.items()}
    with working(f"counting the tokens of {len(problems) + len(test)} problems"):
        lengths = prompt_lengths(config, problems, tokenizers)
        test_lengths = prompt_lengths(config, test, tokenizers) if test else None
    row_format, worked = read_as(config, sources["generator"].tokenizer)
    set_lengths(settings, scale, lengths, models, worked, mistakes)
    mistakes.raise_all()
    training, heldout = set_split(settings, scale, problems, lengths, test, test_lengths, mistakes)
    mistakes.raise_all()
    set_turns(settings, scale, training, heldout)
    stage_one = set_stage_one(settings, scale, models, training)
    with working(f"choosing batches for {machine.devices} x {machine.platform} of {machine.memory / GIB:.1f} GiB"):
        models, adapters = choose_adapters(settings, models, machine)
        set_batches(settings, models, machine, mistakes)
    mistakes.raise_all()
    jobs = sized_jobs(settings, models, machine)
    counts = (f"{training} for training, of {len(problems)} in {config.task.train}, and {heldout} for evaluation, of "
              f"{len(test)} in {config.task.test}" if test else
              f"{training} for training and {heldout} held out, of {len(problems)} in {config.task.train}")
    lines = (
        f"problems: {counts}, read as {row_format}: the answer of the first is {shortened(problems[0].answer)}; "
        + " and ".join(f"the {role}'s prompts are {describe_form(config[role], tokenizers[role])}" for role in ROLES),
        *(describe_lengths(role, lengths[role], config[role], models[role]) for role in ROLES),
        *adapters,
        describe_batches(jobs),
        describe_turns(jobs, training),
        *stage_one,
        *describe_rough_counts(config, tokenizers),
        "all of these can be set: --config.key=value" + ("; --print-config shows every key" if planned is None else ""),
    )
    config.notes = "\n".join((config.notes, *lines) if "notes" in settings.given else lines)


def _further_prompts(settings: OpenSettings) -> dict[str, set[Prompt]]:
    """Of all arms."""
    found: dict[str, set[Prompt]] = {role: set() for role in ROLES}
    config = settings.config.copy_and_resolve_references()
    for arm in asked_arms(settings):
        config.arm = arm
        with contextlib.suppress(ValueError):  # another check says so
            method = load_method(config, is_checked=False)
            found = {role: found[role] | set(method.further_prompts(role)) for role in ROLES}
    return found


def set_lengths(
    settings: OpenSettings, scale: Scale, lengths: dict[str, Lengths], models: dict[str, ModelConfig], worked: int,
    mistakes: Mistakes,
) -> None:
    """Set limits and buckets of both roles. The verifier's prompt has room for a whole solution."""
    generator, verifier = settings.config.generator, settings.config.verifier
    positions = {role: model.max_position for role, model in models.items()}
    most = positions["generator"] - LEAST_RESPONSE
    settings.put("generator.max_prompt", min(rounded(lengths["generator"].limit), most))
    room = positions["generator"] - generator.max_prompt
    settings.put("generator.max_response", min(rounded(max(scale.response, 1.5 * worked)), room))
    needed = rounded(lengths["verifier"].limit + generator.max_response + SPARE)
    if models["verifier"].score_head:  # it writes nothing
        reserved = 0
    else:
        settings.put("verifier.max_response", rounded(1.25 * generator.max_response))
        if positions["verifier"] - needed < verifier.max_response:
            most = max(positions["verifier"] // 4, LEAST_RESPONSE)
            settings.put("verifier.max_response", min(verifier.max_response, most))
        reserved = verifier.max_response
    # Long solutions that do not fit are cut off, and counted in the metrics.
    settings.put("verifier.max_prompt", min(needed, positions["verifier"] - reserved))
    further = _further_prompts(settings)
    for role in ROLES:
        own = settings.config[role]
        if {SECOND_TRY, SECOND_JUDGEMENT} & further[role]:
            added = verifier.max_response + (generator.max_response + SPARE if role == "generator" else 0)
            settings.put(f"{role}.max_prompt", min(own.max_prompt + added, positions[role] - own.max_response))
        writes = not models[role].score_head
        least = lengths[role].limit + LEAST_RESPONSE * ((role == "verifier") + writes)
        mistakes.require(
            least <= positions[role],
            f"{settings.config.task.train}: the {role}'s prompts have up to {lengths[role].limit} tokens, which leaves "
            f"too few of the {positions[role]} positions of {own.checkpoint} for a response: give shorter problems, or "
            "a model with more positions",
        )
        settings.put(f"{role}.cache_buckets", (own.max_response // 2,) if own.max_response >= 256 else ())
        usual = rounded(np.percentile(lengths[role].tokens, 90) + (generator.max_response if role == "verifier" else 0))
        settings.put(f"{role}.prompt_buckets", (usual,) if 2 * usual <= own.max_prompt else ())


def describe_lengths(role: str, lengths: Lengths, config: ConfigDict, model: ModelConfig) -> str:
    left_out = int((lengths.tokens > config.max_prompt).sum())
    without = " without the solution" if role == "verifier" else ""
    return (f"lengths of the {role}: prompts of {int(lengths.tokens.min())} to {lengths.longest} tokens{without}, "
            f"median {lengths.median}: max_prompt={config.max_prompt}"
            + (f", which leaves {left_out} out" if left_out else "")
            + ("" if model.score_head else f"; max_response={config.max_response}"))


def set_split(
    settings: OpenSettings, scale: Scale, problems: tuple[Problem, ...], lengths: dict[str, Lengths],
    test: tuple[Problem, ...], test_lengths: dict[str, Lengths] | None, mistakes: Mistakes,
) -> tuple[int, int]:
    """Set how many problems are held out; returns the numbers for training and for evaluation. Questions of `test`
    are not trained on. Without it some of `problems` are held out."""
    config = settings.config
    # What a run before did not train on stays aside.
    before = next(iter(runs_before(config).values()), {})
    settings.put("task.validation", before.get("task.validation", min(scale.evaluated, max(1, len(problems) // 10))))
    settings.put("task.data_seed", before.get("task.data_seed", config.task.data_seed))
    if test_lengths is None:
        set_aside = draw_questions(problems, config.task.validation, config.task.data_seed)
    else:
        set_aside = frozenset(question_key(problem.question) for problem in test)
    is_set_aside = np.array([question_key(problem.question) in set_aside for problem in problems], bool)
    training = {role: lengths[role].tokens[~is_set_aside] for role in ROLES}
    heldout = {role: (lengths[role].tokens[is_set_aside] if test_lengths is None else test_lengths[role].tokens)
               for role in ROLES}
    count, heldout_count = count_fitting(config, training), count_fitting(config, heldout)
    # Questions that stage 1 is measured on are not trained on (tasks/math_task.py).
    aside = config.task.validation if config.task.stage_one == "gsm8k" else 0
    left = max(0, count - aside)
    if len(training["generator"]) and len(heldout["generator"]):
        if not count:
            require_room(config, config.task.train, "training", training, mistakes)
        if not heldout_count:
            require_room(config, config.task.test or config.task.train, "evaluation", heldout, mistakes)
        if left or not count:  # the reason is told above
            return left, heldout_count
    mistakes.add(f"{config.task.train}: of {len(problems)} problems with "
                 f"{len({question_key(problem.question) for problem in problems})} different questions, {left} are "
                 f"left for training and {heldout_count} for evaluation (task.validation={config.task.validation}): "
                 "give more problems, or name others to evaluate on as task.test")
    return left, heldout_count


def count_fitting(config: ConfigDict, tokens: dict[str, np.ndarray]) -> int:
    return int(np.logical_and.reduce([tokens[role] <= config[role].max_prompt for role in ROLES]).sum())


def require_room(
    config: ConfigDict, source: str, use: str, tokens: dict[str, np.ndarray], mistakes: Mistakes
) -> None:
    for role in ROLES:
        limit, without = config[role].max_prompt, " without the solution" if role == "verifier" else ""
        mistakes.require(
            bool((tokens[role] <= limit).any()),
            f"{role}.max_prompt={limit} leaves no problem of {source} for {use}: the {role}'s shortest prompt has "
            f"{tokens[role].min()} tokens{without}, and the longest {tokens[role].max()}; raise {role}.max_prompt, or "
            "give shorter problems",
        )
    mistakes.require(
        not all((tokens[role] <= config[role].max_prompt).any() for role in ROLES),
        f"no problem of {source} for {use} fits both generator.max_prompt={config.generator.max_prompt} and "
        f"verifier.max_prompt={config.verifier.max_prompt}: raise them, or give shorter problems",
    )


def set_turns(settings: OpenSettings, scale: Scale, training: int, heldout: int) -> None:
    rl = settings.config.rl
    settings.put("rl.prompts_per_step", min(scale.prompts, training))
    settings.put("rl.samples_per_prompt", scale.samples)
    steps = math.ceil(scale.passes * training / rl.prompts_per_step)
    settings.put("rl.generator_steps", min(steps, scale.steps))
    settings.put("rl.warmup_steps", min(40, math.ceil(rl.generator_steps / 10)))
    settings.put("eval.every", math.ceil(rl.generator_steps / 5))
    settings.put("eval.problems", min(heldout, scale.evaluated))
    settings.put("checkpoint.every", min(10, math.ceil(rl.generator_steps / 5)))


def set_stage_one(
    settings: OpenSettings, scale: Scale, models: dict[str, ModelConfig], training: int
) -> list[str]:
    """A stage 1 of own samples, which a role that follows its prompt leaves out (loop/self_stage_one.py), and one that
    goes on from another run. None where `given` has 0 updates of every role that would learn. Returns a line that says
    so."""
    config, arms = settings.config, asked_arms(settings).values()
    # A verifier that does not write is not taught to, and one experiment has one stage 1.
    is_taught = any(arm.uses_verifier for arm in arms) and not any(arm.is_scored for arm in arms)
    goes_on = {role for role in ROLES if config.fork_of or config[role].init_from
               or kind_of(config[role].checkpoint) == "workdir"}
    taught = [role for role in ROLES if role not in goes_on
              and (role == "generator" or is_taught and not models[role].score_head)]
    learns = any(config[role].sft.steps or f"{role}.sft.steps" not in settings.given for role in taught)
    if learns:
        settings.put("task.stage_one", SELF)
    if config.task.stage_one != SELF:
        return []
    settings.put("self.problems", min(STAGE_ONE_TURNS * scale.prompts, training))
    settings.put("self.samples", scale.samples)
    for role in taught:
        small = num_parameters(models[role]) < SMALL_MODEL
        settings.put(f"{role}.sft.steps", STAGE_ONE_STEPS)
        settings.put(f"{role}.sft.batch_size", scale.prompts)
        settings.put(f"{role}.sft.rows_per_micro_batch", 1)
        settings.put(f"{role}.sft.eval_examples", scale.prompts)
        settings.put(f"{role}.sft.eval_every", STAGE_ONE_STEPS // 4)
        settings.put(f"{role}.sft.checkpoint_every", STAGE_ONE_STEPS // 4)
        settings.put(f"{role}.sft.optimizer.lr", 5e-5 if small else 1e-5)
        settings.put(f"{role}.sft.optimizer.schedule", "cosine")
        settings.put(f"{role}.sft.optimizer.warmup_steps", STAGE_ONE_STEPS // 8)
    own, problems = config[SELF], min(config[SELF].problems, training)  # each is taken once
    learners = [role for role in taught if config[role].sft.steps]
    if not learners:
        return []
    steps = ", ".join(f"{role}.sft.steps={config[role].sft.steps}" for role in learners)
    few = f" ({problems} are there)" if problems < own.problems else ""
    return [f"stage 1: the run first looks at up to {min(LOOKED_AT, problems)} samples of the "
            f"{' and of the '.join(learners)}. If less than {100 * GATE:.0f} % of a role's samples follow its prompt's "
            f"layout, it learns the layout from its own samples: up to self.rounds={own.rounds} rounds of "
            f"self.problems={own.problems}{few} x self.samples={own.samples} = {problems * own.samples} samples and "
            f"updates ({steps}). Without it: --config.task.stage_one="]


def describe_turns(jobs: Sequence[Job], training: int) -> str:
    config, rl, trained = jobs[0].config, jobs[0].config.rl, trained_roles(jobs)
    warmup = f"rl.warmup_steps={rl.warmup_steps}" if "verifier" in trained and rl.warmup_steps else "no warm-up"
    whole, may = math.ceil(training / problems_of_a_draw(rl, "generator")), "may " if rl.dynamic_sampling else ""
    draws = f" ({whole} {may}draw every problem once)" if "generator" in trained else ""
    return (f"turns: rl.generator_steps={rl.generator_steps}{draws} after {warmup}, an evaluation every "
            f"{config.eval.every}, a checkpoint of {jobs[0].checkpoint_bytes / 1e9:.1f} GB every "
            f"{config.checkpoint.every} turns (checkpoint.keep={config.checkpoint.keep})")
