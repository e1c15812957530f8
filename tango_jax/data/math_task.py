"""The math task: problem files, text to imitate and a fixed pool, put together for one run.

In: the `task` part of a config and each role's tokenizer. Out: a Task. Stage of the loop: once, at the start of a run.
"""

from collections.abc import Callable
from typing import NamedTuple

from ml_collections import ConfigDict

from tango_jax.data.gsm8k_examples import make_gsm8k_examples
from tango_jax.data.problem_sets import load_problems, make_problem_order, resolve, split_problems
from tango_jax.data.prompt_lengths import make_num_tokens, make_tokens_over
from tango_jax.data.rows import read_rows
from tango_jax.data.tagged_examples import make_tagged_examples, read_tagged_rows
from tango_jax.data.task import SftExample, Task
from tango_jax.data.tokenizer import Tokenizer


class _StageOne(NamedTuple):
    """Text to imitate, and what is measured on it."""

    sft_example: Callable
    roles: tuple[str, ...]
    note: str
    heldout_ids: frozenset[str] = frozenset()
    pool_solution: Callable | None = None
    gold_steps: Callable | None = None


def make_math(config: ConfigDict, tokenizers: dict[str, Tokenizer]) -> Task:
    """The task of `config.task` with name math.

    Raises:
        ValueError: a file that cannot be read, too few problems within the limits, or two sets that are graded
            differently.
    """
    task, limit = config.task, config.generator.max_prompt
    num_tokens_fn, row_format = make_num_tokens(config, tokenizers), task.row_format or None
    stage_one = _make_stage_one(config, tokenizers)
    train_set = load_problems(task.train, row_format)
    # What the pool or the held-out loss is measured on is not trained on either.
    problems = [problem for problem in train_set.problems if problem.id not in stage_one.heldout_ids]
    num_validation = 0 if task.test else task.validation
    split = split_problems(
        problems, num_tokens_fn, limit, num_validation, config.rl.prompts_per_step, seed=task.data_seed
    )
    notes, test = [f"{task.train}: {split.describe()}"], split.validation
    if task.test:
        test_set = load_problems(task.test, row_format)
        if test_set.grade_kind != train_set.grade_kind:
            raise ValueError(f"task.train={task.train} is graded as {train_set.grade_kind}, task.test={task.test} as "
                             f"{test_set.grade_kind}: take two sets that are graded alike")
        test_split = split_problems(test_set.problems, num_tokens_fn, limit, 0, 1, seed=task.data_seed)
        test = test_split.train
        notes.append(f"{task.test}: {len(test)} test problems, {test_split.num_too_long} left out for their length; "
                     f"evaluation takes {min(len(test), config.eval.problems)}")
    return Task(
        name=task.name,
        grade_kind=train_set.grade_kind,
        min_steps=task.min_steps,
        train_problem=make_problem_order(split.train, config.seed),
        # Shuffled too: some files are sorted by subject, and an evaluation may take the first few only.
        test_problem=make_problem_order(test, task.data_seed),
        num_test=len(test),
        pool_solution=stage_one.pool_solution,
        gold_steps=stage_one.gold_steps,
        sft_example=stage_one.sft_example,
        sft_roles=stage_one.roles,
        notes=(*notes, stage_one.note),
    )


def _make_stage_one(config: ConfigDict, tokenizers: dict[str, Tokenizer]) -> _StageOne:
    task = config.task
    if not task.stage_one:

        def no_example(role: str, part: str, index: int) -> SftExample:
            raise ValueError(f"task.stage_one is empty: there is nothing to imitate in stage 1 of the {role}")

        return _StageOne(no_example, (), "no text to imitate and no fixed pool (task.stage_one is empty)")
    tokens_over_fn = make_tokens_over(config, tokenizers)
    if task.stage_one == "gsm8k":
        source, row_format = resolve(task.train, task.row_format or None)
        rows = read_rows(source)
        if row_format not in (None, "gsm8k"):
            raise ValueError(f"task.stage_one=gsm8k needs worked answers with #### n, and the rows of {task.train} "
                             f"are of the kind {row_format}: give a file of tagged solutions")
        made = make_gsm8k_examples(rows, task.validation, task.data_seed, task.min_steps, tokens_over_fn)

        def sft_example(role: str, part: str, index: int) -> SftExample:
            return SftExample(*made.sft_example(role, part, index))

        return _StageOne(
            sft_example,
            ("generator", "verifier"),
            f"stage 1: {made.num_train} worked answers, {made.num_heldout} held out for loss and pool; "
            f"{made.num_too_long} left out for their length",
            made.heldout_ids,
            made.pool_solution,
            made.gold_steps,
        )
    is_for_verifier = config.verifier.sft.steps > 0 and not config.verifier.init_from
    rows = read_tagged_rows(task.stage_one, is_for_verifier)
    tagged = make_tagged_examples(rows, task.validation, task.data_seed, tokens_over_fn)
    return _StageOne(
        tagged.sft_example,
        ("generator", "verifier") if is_for_verifier else ("generator",),
        f"{task.stage_one}: {tagged.num_train} solutions to imitate, {tagged.num_heldout} held out; "
        f"{tagged.num_too_long} left out for their length; no fixed pool",
    )
