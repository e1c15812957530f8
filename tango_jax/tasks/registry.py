"""All tasks, including those that users define."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType

from ml_collections import ConfigDict

from tango_jax.config import ROLES
from tango_jax.grading import until_first_error
from tango_jax.records import Problem
from tango_jax.runtime.user_code import is_user_code
from tango_jax.tasks import last_letter, state_tracking
from tango_jax.tasks.math_task import make_math
from tango_jax.tasks.own_grader import grader_of, try_grader
from tango_jax.tasks.prompt_lengths import check_lengths
from tango_jax.tasks.sizes import SPLITS, Range, describe_sizes, size_ranges
from tango_jax.tasks.task import SftExample, Task
from tango_jax.tasks.user_task import make_user_task
from tango_jax.text.character_tokenizer import printable_model
from tango_jax.text.mark_rows import without_remarks
from tango_jax.text.prompts import PROMPTS, Prompt
from tango_jax.text.templates import FIELDS, STEP, TEMPLATES, load_template
from tango_jax.text.tokenizer import Tokenizer, unreadable_characters

# Tasks that make their problems and text to imitate. The modules have the same functions.
SYNTHETIC: Mapping[str, ModuleType] = {"last_letter": last_letter, "state_tracking": state_tracking}
TASKS = (*SYNTHETIC, "math")
LOOKED_AT = 64  # problems whose characters, and where no bound is known prompt lengths, are checked at the start
SHOWN = 5  # characters that a warning shows


def make_task(
    config: ConfigDict, tokenizers: dict[str, Tokenizer], further: Mapping[str, Sequence[Prompt]] | None = None,
    has_remarks: bool = True,
) -> Task:
    """Make the task `config.task.name`. `further`: further prompts by role (`Method.further_prompts`). `has_remarks`:
    stage 1's verifications keep their remarks, which a verifier that does not write has no use for.

    Raises ValueError: a file cannot be read, too few problems fit, or the task lacks what the settings require.
    """
    task = _make(config, tokenizers, (further or {}).get("verifier", ()), has_remarks)
    for role in ROLES:
        if config[role].sft.steps and not config[role].init_from and role not in task.sft_roles:
            raise ValueError(f"{role}.sft.steps={config[role].sft.steps}, but task.name={config.task.name} has no text "
                             f"for the {role} to imitate: set the steps to 0, or give the task an sft_example")
    names = {role: tuple(prompt.name for prompt in prompts) for role, prompts in (further or {}).items()}
    # Nobody has written examples of a user's prompt, also where it has the name of another.
    taught = {role: tuple(one.name for one in prompts if task.further_example and PROMPTS.get(one.name) == one)
              for role, prompts in (further or {}).items()}
    if task.sft_example and any(taught.values()):
        task = task._replace(sft_example=_with_further(taught, task))
    if missing := [name for role in task.sft_roles if config[role].sft.steps for name in names.get(role, ())
                   if name not in taught[role]]:
        task = task._replace(notes=(*task.notes, f"stage 1 has no examples of {', '.join(missing)}: task.name="
                                    f"{config.task.name} makes none (further_example)"))
    if config.verifier.stop_at_first_error and task.sft_example:
        task = task._replace(sft_example=_with_verifications(until_first_error, task.sft_example))
    if not has_remarks and task.sft_example:
        task = task._replace(sft_example=_with_verifications(without_remarks, task.sft_example))
    if grader := grader_of(config.task):
        task = task._replace(is_correct=grader)
    notes = (*task.notes, *try_grader(task, task.train_problem(0)), *_unknown_notes(config, task, tokenizers))
    return task._replace(notes=notes)


def teaches_further_prompts(config: ConfigDict) -> bool:
    """Whether stage 1 of the task has examples of further prompts."""
    has_own = is_user_code(config.task.name)
    return _make(config, {}, ()).further_example is not None if has_own else config.task.name != "math"


def _with_further(further: Mapping[str, tuple[str, ...]], task: Task) -> Callable[[str, str, int], SftExample]:
    def sft_example(role: str, split: str, index: int) -> SftExample:
        names = ("", *further.get(role, ()))
        number, which = divmod(index, len(names))
        name = names[which]
        return task.further_example(name, split, number) if name else task.sft_example(role, split, number)

    return sft_example


def _with_verifications(
    rewrite_fn: Callable[[str], str], sft_example: Callable[[str, str, int], SftExample]
) -> Callable[[str, str, int], SftExample]:
    """Verifications, to imitate or in a prompt, are rewritten."""

    def rewritten(role: str, split: str, index: int) -> SftExample:
        example = sft_example(role, split, index)
        response = rewrite_fn(example.response) if role == "verifier" else example.response
        return example._replace(response=response, verification=rewrite_fn(example.verification))

    return rewritten


def _unknown_notes(config: ConfigDict, task: Task, tokenizers: dict[str, Tokenizer]) -> list[str]:
    if not tokenizers:
        return []
    problems = [task.train_problem(index) for index in range(LOOKED_AT)]
    texts, notes = [text for problem in problems for text in (problem.question, problem.answer)], []
    for role, tokenizer in tokenizers.items():
        instructions = load_template(role, config[role].template)
        for field in (*FIELDS[role], STEP):
            instructions = instructions.replace(field, "")
        for source, read in (("the problems have", texts), (f"the {role}'s template has", [instructions])):
            if unknown := unreadable_characters(tokenizer, read):
                more = f" and {len(unknown) - SHOWN} more characters" if len(unknown) > SHOWN else ""
                notes.append(f"warning: {source} {', '.join(map(repr, unknown[:SHOWN]))}{more}, for which the {role}'s "
                             "tokenizer has no token: its model can neither read nor write them")
    return notes


def example_solution(config: ConfigDict) -> tuple[Problem, str] | None:
    """A held-out problem with a solution, of a synthetic task; None for others, whose files may be gone."""
    return _make_synthetic(config).pool_solution(0) if config.task.name in SYNTHETIC else None


def tokenizer_model(config: ConfigDict) -> bytes:
    """For a role without a checkpoint."""
    name = config.task.name
    return SYNTHETIC[name].tokenizer_model(config.task) if name in SYNTHETIC else printable_model()


def example_problem(config: ConfigDict) -> Problem | None:
    """A problem of a synthetic task; None for others, whose files may be gone."""
    return _make_synthetic(config).train_problem(0) if config.task.name in SYNTHETIC else None


def _make(
    config: ConfigDict, tokenizers: dict[str, Tokenizer], further: Sequence[Prompt], has_remarks: bool = True
) -> Task:
    if config.task.name == "math":
        return make_math(config, tokenizers, further, has_remarks)
    if is_user_code(config.task.name):
        return make_user_task(config, tokenizers, further)
    is_counted = all(
        TEMPLATES.get((role, config[role].template)) == TEMPLATES[role, "plain"] and not config[role].checkpoint
        for role in ROLES
    )
    # Config validation counts tokens only for the plain template, the own tokenizer and the roles' own prompts.
    if tokenizers and (not is_counted or further):
        _check_synthetic_prompts(config, tokenizers, further)
    return _make_synthetic(config)


def _check_synthetic_prompts(
    config: ConfigDict, tokenizers: dict[str, Tokenizer], further: Sequence[Prompt]
) -> None:
    """Check that the largest problems fit when other tokenizers split their text."""
    task, module = config.task, SYNTHETIC[config.task.name]
    for split in SPLITS:
        highest = {
            size: (high, high)
            for size, (_, high) in zip(module.SIZES, size_ranges(task, split, module.SIZES), strict=True)
        }
        largest = dataclasses.replace(module.split_config(task, split), **highest)
        problems = (module.problem(largest, task.data_seed, "test", index) for index in range(LOOKED_AT))
        check_lengths(config, tokenizers, problems, describe_sizes(task, split, module.SIZES), has_ids=False,
                      further=further)


def _make_synthetic(config: ConfigDict) -> Task:
    task = config.task
    module, seed, stream = SYNTHETIC[task.name], task.data_seed, config.seed
    sft, rl, verifier, test = (module.split_config(task, split) for split in SPLITS)
    main = module.SIZES[0]
    curriculum = dataclasses.replace(rl, **{main: (getattr(verifier, main)[0], getattr(rl, main)[1])})

    def pool_solution(index: int) -> tuple[Problem, str]:
        return module.mixed_solution(test, seed, "pool", index)[:2]

    def sft_example(role: str, split: str, index: int) -> SftExample:
        name = f"sft_{role}" + ("" if split == "train" else "_heldout")
        if role == "generator":
            problem, solution = module.generator_example(sft, seed, name, index)
            return SftExample(problem, "", 0, solution)
        problem, solution, verification = module.verifier_example(sft, seed, name, index)
        return SftExample(problem, solution, _num_steps(solution), verification)

    def further_example(prompt: str, split: str, index: int) -> SftExample:
        name = f"sft_{prompt}" + ("" if split == "train" else "_heldout")
        problem, solution, verification, response = module.further_example(sft, seed, name, index, prompt)
        return SftExample(problem, solution, _num_steps(solution), response, prompt, verification)

    return Task(
        name=task.name,
        grade_kind="string",
        min_steps=task.min_steps,
        train_problem=lambda index: module.problem(rl, seed, "rl", index, stream),
        test_problem=lambda index: module.problem(test, seed, "test", index),
        num_test=None,
        pool_solution=pool_solution,
        gold_steps=module.gold_steps,
        step_kinds=module.step_kinds,
        sft_example=sft_example,
        further_example=further_example,
        sft_roles=ROLES,
        verifier_problem=lambda index: module.problem(verifier, seed, "rl_verifier", index, stream),
        # Without shorter problems for the verifier, the curriculum would equal the generator's problems.
        curriculum_problem=(
            (lambda index: module.problem(curriculum, seed, "rl_curriculum", index, stream))
            if task[f"verifier_{main}"] else None
        ),
    )


def turn_sizes(config: ConfigDict, draws: Mapping[str, Iterable[str]]) -> str:
    """Sizes of a synthetic task's problems in each role's turns; "" of other tasks. `draws`: streams by role."""
    task = config.task
    if task.name not in SYNTHETIC:
        return ""
    main = SYNTHETIC[task.name].SIZES[0]
    (rl,), (verifier,) = (size_ranges(task, split, (main,)) for split in ("rl", "verifier"))
    sizes = {"train": rl, "verifier": verifier, "curriculum": (verifier[0], rl[1])}
    return f"{main} of a problem: " + ", ".join(
        f"{role} turns {' and '.join(_shown(sizes[stream]) for stream in streams)}" for role, streams in draws.items()
    )


def _num_steps(solution: str) -> int:
    return solution.count("</step>")


def _shown(sizes: Range) -> str:
    low, high = sizes
    return str(low) if low == high else f"{low} to {high}"
