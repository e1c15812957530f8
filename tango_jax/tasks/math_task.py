"""The math task: problem files, text to imitate and a fixed pool."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.data.problem_sets import ProblemSet, load_problems, question_key, resolve
from tango_jax.data.row_formats import detect_format
from tango_jax.data.rows import read_rows
from tango_jax.data.teacher_rows import FILES
from tango_jax.records import Problem
from tango_jax.tasks.gsm8k_examples import Gsm8kExamples, make_gsm8k_examples
from tango_jax.tasks.prompt_lengths import Over, make_num_tokens, make_over
from tango_jax.tasks.splits import draw_questions, make_problem_order, split_problems
from tango_jax.tasks.tagged_examples import TaggedExamples, make_tagged_examples, read_stage_one
from tango_jax.tasks.task import SftExample, Task
from tango_jax.tasks.worked_examples import examples_of, read_examples
from tango_jax.text.prompts import Prompt
from tango_jax.text.tokenizer import Tokenizer


class _StageOne(NamedTuple):
    sft_example: Callable
    roles: tuple[str, ...]
    note: str
    heldout: frozenset[str] = frozenset()  # `question_key` of the problems used for measurements
    unfit: tuple[Problem, ...] = ()  # would be held out, but are too long for what this arm imitates
    pool_solution: Callable | None = None
    num_pool: int | None = None
    gold_steps: Callable | None = None
    fingerprint: str = ""


def make_math(
    config: ConfigDict, tokenizers: dict[str, Tokenizer], further: Sequence[Prompt] = (), has_remarks: bool = True
) -> Task:
    """`further`: the verifier's further prompts; `has_remarks`: see `make_task`.

    Raises ValueError: a file cannot be read, too few problems fit, or training and test are graded differently.
    """
    task, limit = config.task, config.generator.max_prompt
    num_tokens_fn = make_num_tokens(config, tokenizers, further)
    train_set = load_problems(task.train)
    # A question used for measurements is trained on in neither stage, whichever row it is in.
    num_validation = 0 if task.test else task.validation
    validation = draw_questions(train_set.problems, num_validation, task.data_seed)
    test_set = _load_test(task, train_set) if task.test else None
    test_problems = test_set.problems if test_set else ()
    evaluated = validation | {question_key(problem.question) for problem in test_problems}
    stage_one = _make_stage_one(config, make_over(config, tokenizers, further, has_remarks), evaluated)
    tested = evaluated - validation  # `split_problems` knows the validation
    set_aside = stage_one.heldout | tested
    problems = [problem for problem in train_set.problems if question_key(problem.question) not in set_aside]
    if tested and not problems:
        raise ValueError(f"none of the {len(train_set.problems)} problems of task.train={task.train} is left to train "
                         f"on: the others are in task.test={task.test}, or held out of stage 1; choose another "
                         "task.test")
    split = split_problems(
        problems, num_tokens_fn, limit, num_validation, config.rl.prompts_per_step, task.data_seed, validation
    )
    notes, test = [f"{task.train}: {split.describe()}"], split.validation
    own_tokens_fn = make_num_tokens(config, tokenizers)
    lost = [problem for problem in (*problems, *test_problems)
            if further and own_tokens_fn(problem) <= limit < num_tokens_fn(problem)]
    if lost:
        notes.append(f"{len(lost)} problems are left out because the verifier's further prompts would be too long: "
                     "arms without these prompts have them, so their runs are no pairs")
    if train_set.num_other:
        notes.append(f"{task.train}: {train_set.num_other} further rows are of another kind, or repeat others, and are "
                     "left out")
    for source, loaded in {task.train: train_set, task.test: test_set}.items():
        if loaded and loaded.num_system:
            notes.append(f"{source}: {loaded.num_system} of {len(loaded.problems)} problems have a system turn, which "
                         "is left out of the prompt: put what a problem needs into its user turn")
    if task.test:
        test_split = split_problems(test_problems, num_tokens_fn, limit, 0, 1, seed=task.data_seed)
        test = test_split.train
        notes.append(f"{task.test}: {len(test)} test problems, {test_split.num_too_long} left out because of their "
                     f"length; evaluation uses {min(len(test), config.eval.problems)}")
        if known := _shared(train_set.problems, test_problems):
            notes.append(f"{task.train}: {known} problems are left out because {task.test} has the same questions")
    return Task(
        name=task.name,
        grade_kind=train_set.grade_kind,
        min_steps=task.min_steps,
        train_problem=make_problem_order(split.train, config.seed),
        # Shuffled: some files are sorted by subject, and an evaluation may use only the first few.
        test_problem=make_problem_order(test, task.data_seed),
        num_test=len(test),
        pool_solution=stage_one.pool_solution,
        num_pool=stage_one.num_pool,
        gold_steps=stage_one.gold_steps,
        sft_example=stage_one.sft_example,
        sft_roles=stage_one.roles,
        notes=(*notes, stage_one.note),
        fingerprint=_fingerprint(train_set.problems, test_problems, *filter(None, [lost, stage_one.unfit])),
        sft_fingerprint=stage_one.fingerprint,
    )


def _load_test(task: ConfigDict, train_set: ProblemSet) -> ProblemSet:
    """Raises ValueError if `task.test` is graded in another way than the training set."""
    test_set = load_problems(task.test)
    if test_set.grade_kind != train_set.grade_kind:
        raise ValueError(f"task.train={task.train} is graded as {train_set.grade_kind}, task.test={task.test} as "
                         f"{test_set.grade_kind}: choose two sets with the same kind of grading")
    return test_set


def _fingerprint(*sets: Sequence[Problem]) -> str:
    digest = hashlib.sha256()
    for problems in sets:
        digest.update(f"{len(problems)}\n".encode())
        for problem in problems:
            digest.update(f"{problem.question!r} {problem.answer!r}\n".encode())
    return digest.hexdigest()


def _shared(problems: Sequence[Problem], others: Sequence[Problem]) -> int:
    known = {question_key(problem.question) for problem in others}
    return sum(question_key(problem.question) in known for problem in problems)


def _make_stage_one(
    config: ConfigDict, over_fn: Callable[[str, SftExample], Over], excluded: frozenset[str]
) -> _StageOne:
    task = config.task
    if not task.stage_one:

        def no_example(role: str, part: str, index: int) -> SftExample:
            raise ValueError(f"task.stage_one is empty: there is nothing to imitate in stage 1 of the {role}")

        return _StageOne(no_example, (), "no text to imitate and no fixed pool (task.stage_one is empty)")
    if task.stage_one == "self":
        rows = read_examples(config)
        shown = {role: examples_of(role, rows, task.min_steps) for role in ROLES}

        def shown_example(role: str, part: str, index: int) -> SftExample:
            return shown[role][index % len(shown[role])].example(role)

        counts = " and ".join(f"{len(own)} to the {role}" for role, own in shown.items())
        return _StageOne(shown_example, tuple(role for role in ROLES if shown[role]),
                         f"stage 1: own samples; of the worked examples, prompts may show {counts}",
                         fingerprint=_fingerprint_of_rows(rows))
    if task.stage_one == "gsm8k":
        source, row_format = resolve(task.train)
        rows = read_rows(source)
        row_format = row_format or detect_format(rows[0].fields)
        if row_format != "gsm8k":
            raise ValueError(f"task.stage_one=gsm8k needs worked answers with #### n, but the rows of {task.train} "
                             f"have the format {row_format}: give a file of tagged solutions")
        made = make_gsm8k_examples(rows, task.validation, task.data_seed, task.min_steps, over_fn, excluded)
        pool = min(config.eval.pool, made.num_heldout)
        return _StageOne(
            made.sft_example,
            ROLES,
            f"stage 1: {made.num_train} worked answers, {made.num_heldout} held out for loss and pool, which "
            f"has {pool} solutions; {_left_out(made)}",
            made.heldout,
            made.unfit,
            made.pool_solution,
            made.num_heldout,
            made.gold_steps,
            fingerprint=_fingerprint_of_rows(rows),
        )
    is_for_verifier = config.verifier.sft.steps > 0 and not config.verifier.init_from
    rows = read_stage_one(task.stage_one, is_for_verifier, config.verifier.stop_at_first_error)
    roles = ROLES if is_for_verifier else ("generator",)
    tagged = make_tagged_examples(rows, task.validation, task.data_seed, over_fn, roles, excluded)
    return _StageOne(
        tagged.sft_example,
        roles,
        f"{task.stage_one}: {tagged.num_train} solutions to imitate, {tagged.num_heldout} held out"
        f"{f' ({FILES[1]})' if rows.heldout else ''}; {_left_out(tagged)}; no fixed pool",
        tagged.heldout,
        tagged.unfit,
        fingerprint=_fingerprint_of_rows((*rows.rows, *rows.heldout)),
    )


def _fingerprint_of_rows(rows: Iterable) -> str:
    return hashlib.sha256("\n".join(map(repr, rows)).encode()).hexdigest()


def _left_out(made: Gsm8kExamples | TaggedExamples) -> str:
    text = f"{made.num_too_long} left out because of their length"
    if made.num_shortened:
        text += f", {made.num_shortened} of them because the verifier's prompt would cut off the solution"
    if made.num_excluded:
        text += f"; {made.num_excluded} left out because their questions are used for evaluation"
    return text
