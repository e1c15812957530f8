"""Checks of the task's settings before any work: sizes of synthetic problems, data files of math, lengths."""

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.data.problem_sets import BENCHMARKS, detected_format, load_problems
from tango_jax.data.rows import HUB_PREFIX, check_hub_id
from tango_jax.method.load import Method
from tango_jax.method.own_arm import arm_or_none
from tango_jax.rl.packing import sft_pack_shape
from tango_jax.runtime.checks import Mistakes
from tango_jax.runtime.user_code import is_user_code
from tango_jax.tasks.own_grader import grader_of
from tango_jax.tasks.registry import SYNTHETIC, TASKS
from tango_jax.tasks.sizes import SPLITS, describe_sizes, size_ranges
from tango_jax.tasks.tagged_examples import read_stage_one
from tango_jax.tasks.user_task import load_user_task
from tango_jax.tasks.worked_examples import read_examples
from tango_jax.text.mark_rows import blank_marks
from tango_jax.text.tokenizer import load_sentencepiece

FILE_KEYS = ("train", "test", "stage_one", "examples")  # of task; for problems from files
LENGTHS = tuple(f"{role}.{name}" for role in ROLES for name in ("max_", "pack_length", "sft.pack_length"))


def check_task(config: ConfigDict, mistakes: Mistakes, method: Method | None) -> None:
    """Note what is wrong; `method`: None if it is mistaken. Reads local data files; does not contact the hub."""
    with mistakes.collected():
        grader_of(config.task)
    if is_user_code(config.task.name):
        mistakes.require(config.task.stage_one != "self", f"task.stage_one=self needs task.name=math, and task.name="
                         f"{config.task.name} has texts of its own to imitate: leave task.stage_one empty")
        with mistakes.collected():
            load_user_task(config)
    elif not mistakes.one_of("task.name", config.task.name, TASKS):
        return
    elif config.task.name in SYNTHETIC:
        for key in FILE_KEYS:
            mistakes.require(
                not config.task[key], f"task.{key}={config.task[key]} is not read by task.name={config.task.name}, "
                "which makes its own problems: leave it out, set task.name=math, or use --config=own_problems "
                "--model=MODEL --problems=FILE"
            )
        _check_sizes(config, mistakes, method)
        if not mistakes.is_about("task.", *LENGTHS):
            _check_lengths(config, mistakes)
    else:
        _check_math(config, mistakes, method)


def _check_math(config: ConfigDict, mistakes: Mistakes, method: Method | None) -> None:
    task = config.task
    for role in ROLES:
        mistakes.require(bool(config[role].checkpoint), f"{role}.checkpoint is empty, and task.name=math has no "
                         "tokenizer: name a folder, a hub id or a .gguf file")
        mistakes.require(config[role].sft.steps == 0 or bool(config[role].init_from) or bool(task.stage_one),
                         f"{role}.sft.steps={config[role].sft.steps} needs text to imitate: set task.stage_one to "
                         "self, gsm8k or a file, or the steps to 0")
    for needed, is_needed in (("step labels", method and method.arm.needs_gold_steps),
                              ("a curriculum", method and "curriculum" in method.streams)):
        mistakes.require(not is_needed, f"arm={config.arm} needs a task with {needed}; task.name=math has none: choose "
                         f"another arm, or task.name={' or '.join(SYNTHETIC)}")
    if task.stage_one or not task.test:
        mistakes.require(task.validation >= 1, f"task.validation={task.validation} must be at least 1")
    mistakes.require(bool(task.train),
                     f"task.train is empty: name a problem file, a hub id or one of {', '.join(BENCHMARKS)}")
    if task.train:
        _check_count(config, mistakes)
    if task.test:
        with mistakes.collected("task.test: "):
            _count_problems(task.test)
    mistakes.require(not task.test or task.test != task.train, f"task.test={task.test} is task.train as well, and "
                     "evaluation is on problems that are not trained on: leave it empty, and task.validation problems "
                     "are held out, or name others")
    mistakes.require(not task.examples or task.stage_one == "self", f"task.examples={task.examples} is read with "
                     f"task.stage_one=self only, and it is {task.stage_one!r}: leave it out, or set it to self")
    if task.stage_one == "self":
        _check_own_samples(config, mistakes)
    elif task.stage_one == "gsm8k":
        with mistakes.collected():
            _check_worked_answers(task)
    elif task.stage_one:
        _check_tagged(config, mistakes)


def _check_count(config: ConfigDict, mistakes: Mistakes) -> None:
    task = config.task
    # A file for stage 1 has its held-out rows.
    aside = task.validation * ((task.stage_one == "gsm8k") + (not task.test))
    wanted, count = config.rl.prompts_per_step + aside, None
    with mistakes.collected("task.train: "):
        count = _count_problems(task.train)
    mistakes.require(count is None or count >= wanted, f"task.train={task.train} has {count} problems; a batch takes "
                     f"rl.prompts_per_step={config.rl.prompts_per_step}, and {aside} are set aside (task.validation): "
                     "lower them, or give more problems")


def _count_problems(source: str) -> int | None:
    if source in BENCHMARKS:
        return None
    if source.startswith(HUB_PREFIX):
        check_hub_id(source)
        return None
    return len(load_problems(source).problems)


def _check_worked_answers(task: ConfigDict) -> None:
    if task.train in BENCHMARKS or task.train.startswith(HUB_PREFIX) or not task.train:
        return
    try:
        found = detected_format(task.train)
    except ValueError:
        return  # noted already
    if found != "gsm8k":
        raise ValueError(f"task.stage_one=gsm8k needs worked answers that end in #### n, but the rows "
                         f"of task.train={task.train} have the format {found}: name a file of tagged solutions, or "
                         "set task.stage_one= with generator.sft.steps=0 and verifier.sft.steps=0, as "
                         "--config=own_problems does")


def _check_own_samples(config: ConfigDict, mistakes: Mistakes) -> None:
    steps = {role: config[role].sft.steps for role in ROLES}
    mistakes.require(any(steps.values()), f"task.stage_one=self, and generator.sft.steps={steps['generator']} and "
                     f"verifier.sft.steps={steps['verifier']} imitate nothing: set the updates of a round, or leave "
                     "task.stage_one empty")
    learns = steps["verifier"] and not config.verifier.init_from
    mistakes.require(not (learns and config.verifier.stop_at_first_error), "task.stage_one=self makes verifications "
                     "that judge all steps, and verifier.stop_at_first_error=True: set it to False, or "
                     "verifier.sft.steps=0")
    with mistakes.collected("task.examples: "):
        read_examples(config)


def _check_tagged(config: ConfigDict, mistakes: Mistakes) -> None:
    task = config.task
    with mistakes.collected():
        if task.stage_one.startswith(HUB_PREFIX):
            check_hub_id(task.stage_one)
            return
        is_for_verifier = config.verifier.sft.steps > 0 and not config.verifier.init_from
        rows, heldout = read_stage_one(task.stage_one, is_for_verifier, config.verifier.stop_at_first_error)
        mistakes.require(len(rows) > task.validation or bool(heldout), f"task.stage_one={task.stage_one} has "
                         f"{len(rows)} rows, and task.validation={task.validation} sets all of them aside: give more "
                         "rows, or lower it")


def check_ranges(task: ConfigDict, mistakes: Mistakes) -> None:
    """Of the sizes of a synthetic task, before a problem is made."""
    for split in SPLITS if task.name in SYNTHETIC else ():
        for size in SYNTHETIC[task.name].SIZES:
            key, may_be_empty = f"{split}_{size}", split in ("verifier", "test")
            value = tuple(task.get(key, ()))
            mistakes.require(
                (may_be_empty and not value) or (len(value) == 2 and value[0] <= value[1]),
                f"task.{key}={value} must be (low, high) with 1 <= low <= high{', or empty' * may_be_empty}",
            )


def _check_sizes(config: ConfigDict, mistakes: Mistakes, method: Method | None) -> None:
    task, main = config.task, SYNTHETIC[config.task.name].SIZES[0]
    own, rl = tuple(task[f"verifier_{main}"]), tuple(task[f"rl_{main}"])
    if own and rl:
        mistakes.require(own[0] <= rl[-1], f"task.verifier_{main}={own} begins above the longest problems of the "
                         f"generator, task.rl_{main}={rl}: lower it")
    needs_curriculum = method is not None and "curriculum" in method.streams
    mistakes.require(bool(own) or not needs_curriculum, f"arm={config.arm} needs task.verifier_{main}, the size of the "
                     "short problems of its curriculum: set it, such as to (2, 4)")


def _check_lengths(config: ConfigDict, mistakes: Mistakes) -> None:
    """For each limit, name the first split with problems longer than it."""
    task, arm = config.task, arm_or_none(config)
    sizes = SYNTHETIC[task.name].SIZES
    too_short: set[str] = set()  # limits
    for split in SPLITS:
        highest = [high for _, high in size_ranges(task, split, sizes)]
        longest_texts = SYNTHETIC[task.name].longest_texts(*highest)
        if arm is not None and arm.is_scored:  # marks without remarks, of a step for each word or swap
            tokenizer = load_sentencepiece(SYNTHETIC[task.name].tokenizer_model(task))
            longest_texts["verifier response"] = len(blank_marks(tokenizer, highest[0]))
        for what, tokens in longest_texts.items():
            role, kind = what.split()
            limit = f"{role}.max_{kind}"
            if config[role].checkpoint or limit in too_short:  # its tokenizer counts otherwise: make_task checks
                continue
            # Sampled text may be cut at its limit; problems and gold solutions must fit.
            fits = mistakes.require(
                tokens <= config[role][f"max_{kind}"],
                f"{limit}={config[role][f'max_{kind}']} cannot hold the longest {what} of "
                f"{describe_sizes(task, split, sizes)}: {tokens} tokens; raise the limit or shorten the problems",
            )
            too_short |= set() if fits else {limit}
        for role in [role for role in ROLES if split == "sft" and not config[role].checkpoint]:
            limit = sft_pack_shape(config[role]).row_length
            longest = longest_texts[f"{role} prompt"] + longest_texts[f"{role} response"]
            # Without a set length, rows are as long as both limits together; then the limits are the mistake.
            mistakes.require(
                longest <= limit or mistakes.is_about(f"{role}.max_"),
                f"{role}.sft.pack_length={limit} cannot hold the longest training sequence of the sft split: {longest} "
                "tokens; raise it or set it to 0",
            )
