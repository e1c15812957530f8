"""Checks of the task's settings, made before any work: sizes of synthetic problems, data files of math, and lengths."""

from ml_collections import ConfigDict

from tango_jax.arms import ARMS
from tango_jax.data.problem_sets import BENCHMARKS, load_problems
from tango_jax.data.row_formats import ROW_FORMATS
from tango_jax.data.rows import HUB_PREFIX, check_hub_id
from tango_jax.rl.packing import pack_shape, sft_pack_shape
from tango_jax.runtime.checks import at_least, one_of, require
from tango_jax.runtime.user_code import is_user_code
from tango_jax.tasks.registry import SYNTHETIC, TASKS
from tango_jax.tasks.sizes import SPLITS, describe_sizes, size_ranges
from tango_jax.tasks.tagged_examples import read_stage_one
from tango_jax.tasks.user_task import load_user_task

ROLES = ("generator", "verifier")


def check_task(config: ConfigDict) -> None:
    """Raises ValueError on the first mistake. Local data files are read; the hub is not asked."""
    if is_user_code(config.task.name):
        load_user_task(config)
        return
    one_of("task.name", config.task.name, TASKS)
    if config.task.name in SYNTHETIC:
        _check_sizes(config)
        _check_lengths(config)
    else:
        _check_math(config)


def _check_math(config: ConfigDict) -> None:
    task = config.task
    for role in ROLES:
        require(bool(config[role].checkpoint), f"{role}.checkpoint is empty, and task.name=math has no tokenizer: "
                "name a folder, a hub id or a .gguf file")
        require(config[role].sft.steps == 0 or bool(config[role].init_from) or bool(task.stage_one),
                f"{role}.sft.steps={config[role].sft.steps} needs text to imitate: set task.stage_one to gsm8k or "
                "a file, or the steps to 0")
    for needed, is_needed in (("step labels", "needs_gold_steps"), ("a curriculum", "needs_curriculum")):
        require(not getattr(ARMS[config.arm], is_needed), f"arm={config.arm} needs a task with {needed}; "
                f"task.name=math has none: choose another arm, or task.name={' or '.join(SYNTHETIC)}")
    if task.row_format:
        one_of("task.row_format", task.row_format, ROW_FORMATS)
    if task.stage_one or not task.test:
        at_least("task.validation", task.validation, 1)
    require(bool(task.train), f"task.train is empty: name a problem file, a hub id or one of {', '.join(BENCHMARKS)}")
    aside = task.validation * (bool(task.stage_one) + (not task.test))
    wanted = config.rl.prompts_per_step + aside
    count = _count_problems("task.train", task.train, task.row_format)
    require(count is None or count >= wanted, f"task.train={task.train} has {count} problems; a batch takes "
            f"rl.prompts_per_step={config.rl.prompts_per_step}, and {aside} are set aside (task.validation): lower "
            "them, or give more problems")
    if task.test:
        _count_problems("task.test", task.test, task.row_format)
    if task.stage_one not in ("", "gsm8k"):
        _check_tagged(config)


def _count_problems(name: str, source: str, row_format: str) -> int | None:
    """Problems of a local file; None for what the hub holds."""
    try:
        if source in BENCHMARKS:
            return None
        if source.startswith(HUB_PREFIX):
            check_hub_id(source)
            return None
        return len(load_problems(source, row_format or None).problems)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _check_tagged(config: ConfigDict) -> None:
    task = config.task
    if task.stage_one.startswith(HUB_PREFIX):
        check_hub_id(task.stage_one)
        return
    is_for_verifier = config.verifier.sft.steps > 0 and not config.verifier.init_from
    rows, heldout = read_stage_one(task.stage_one, is_for_verifier)
    require(len(rows) > task.validation or bool(heldout), f"task.stage_one={task.stage_one} has {len(rows)} rows, of "
            f"which task.validation={task.validation} are set aside: give more rows, or lower it")


def _check_sizes(config: ConfigDict) -> None:
    task, main = config.task, SYNTHETIC[config.task.name].SIZES[0]
    for split in SPLITS:
        for size in SYNTHETIC[task.name].SIZES:
            key, may_be_empty = f"{split}_{size}", split in ("verifier", "test")
            value = tuple(task.get(key, ()))
            require(
                (may_be_empty and not value) or (len(value) == 2 and value[0] <= value[1]),
                f"task.{key}={value} must be (low, high) with 1 <= low <= high{', or empty' * may_be_empty}",
            )
    own, rl = tuple(task[f"verifier_{main}"]), tuple(task[f"rl_{main}"])
    if own:
        require(own[0] <= rl[1], f"task.verifier_{main}={own} begins above the longest problems of the generator, "
                f"task.rl_{main}={rl}: lower it")
    require(bool(own) or not ARMS[config.arm].needs_curriculum, f"arm={config.arm} needs task.verifier_{main}, the "
            "size of the short problems of its curriculum: set it, such as to (2, 4)")


def _check_lengths(config: ConfigDict) -> None:
    """No problem of any split may be longer than its role's limits."""
    task = config.task
    sizes = SYNTHETIC[task.name].SIZES
    for split in SPLITS:
        highest = (high for _, high in size_ranges(task, split, sizes))
        longest_texts = SYNTHETIC[task.name].longest_texts(*highest)
        for what, tokens in longest_texts.items():
            role, kind = what.split()
            if config[role].checkpoint:  # its tokenizer counts otherwise: problems.make_task checks
                continue
            limit = config[role][f"max_{kind}"]
            # A sampled response is cut at its limit and a sampled solution may be longer than the gold one; what must
            # fit is the material itself.
            require(
                tokens <= limit,
                f"{role}.max_{kind}={limit} cannot hold the longest {what} of {describe_sizes(task, split, sizes)}: "
                f"{tokens} tokens; raise the limit or shorten the problems",
            )
        for role in [role for role in ROLES if not config[role].checkpoint]:
            length = {
                "sft": (sft_pack_shape(config[role]).row_length, "sft.pack_length", longest_texts[f"{role} response"]),
                "rl": (pack_shape(config[role]).row_length, "pack_length", config[role].max_response),
            }.get("rl" if split == role else split)
            if length is None or (split != "sft" and config[role].share_prompts):
                continue
            limit, key, response = length
            longest = longest_texts[f"{role} prompt"] + response
            require(
                longest <= limit,
                f"{role}.{key}={limit} cannot hold the longest training sequence of the {split} "
                f"split: {longest} tokens; raise it or set it to 0",
            )
