"""Registry of the tasks, including those that users define.

Takes a config and tokenizers; returns a Task. Stage of the loop: once, at the start of a run.
"""

from ml_collections import ConfigDict

from tango_jax.arms import ARMS
from tango_jax.records import Problem
from tango_jax.runtime.user_code import is_user_code
from tango_jax.tasks import last_letter
from tango_jax.tasks.math_task import make_math
from tango_jax.tasks.prompt_lengths import make_num_tokens
from tango_jax.tasks.task import SftExample, Task
from tango_jax.tasks.user_task import make_user_task
from tango_jax.text.character_tokenizer import printable_model
from tango_jax.text.tokenizer import Tokenizer

TASKS = ("last_letter", "math")
ROLES = ("generator", "verifier")
Range = tuple[int, int]  # low and high, both inclusive


def make_task(config: ConfigDict, tokenizers: dict[str, Tokenizer]) -> Task:
    """Make the task that `config.task.name` specifies.

    Args:
        tokenizers: the tokenizer of each role, with which prompt lengths are measured.

    Raises:
        ValueError: a file cannot be read, the limits leave too few problems, or the task lacks something that the
            settings require.
    """
    task = _make(config, tokenizers)
    if ARMS[config.arm].needs_curriculum and task.curriculum_problem is None:
        raise ValueError(f"arm={config.arm} needs a task with a curriculum, and task.name={config.task.name} has none: "
                         "choose another arm, or give the task a curriculum_problem")
    for role in ROLES:
        if config[role].sft.steps and not config[role].init_from and role not in task.sft_roles:
            raise ValueError(f"{role}.sft.steps={config[role].sft.steps}, but task.name={config.task.name} has no text "
                             f"for the {role} to imitate: set the steps to 0, or give the task an sft_example")
    return task


def tokenizer_model(config: ConfigDict) -> bytes:
    """Return the SentencePiece model of a role without a checkpoint: last_letter's, or else printable characters."""
    return last_letter.tokenizer_model(config.task) if config.task.name == "last_letter" else printable_model()


def _make(config: ConfigDict, tokenizers: dict[str, Tokenizer]) -> Task:
    if config.task.name == "math":
        return make_math(config, tokenizers)
    if is_user_code(config.task.name):
        return make_user_task(config, tokenizers)
    is_counted = all(config[role].template == "last_letter" and not config[role].checkpoint for role in ROLES)
    if tokenizers and not is_counted:  # config validation counts the tokens of this task's own template and tokenizer
        _check_last_letter_prompts(config, tokenizers)
    return _make_last_letter(config)


def _check_last_letter_prompts(config: ConfigDict, tokenizers: dict[str, Tokenizer]) -> None:
    """Check that the largest problems fit the limits when other tokenizers split their words."""
    task, num_tokens_fn = config.task, make_num_tokens(config, tokenizers)
    for keys in last_letter.range_keys(task).values():
        words, letters = (task[key][1] for key in keys)
        rates = (task.hard_error, task.easy_error, task.reading_error)
        largest = last_letter.LastLetterConfig((words, words), (letters, letters), *rates)
        longest = max(num_tokens_fn(last_letter.problem(largest, task.data_seed, "test", index)) for index in range(64))
        if longest > config.generator.max_prompt:
            raise ValueError(
                f"{' and '.join(f'task.{key}={tuple(task[key])}' for key in keys)} make prompts of {longest} tokens, "
                f"more than generator.max_prompt={config.generator.max_prompt}, or exceed verifier.max_prompt="
                f"{config.verifier.max_prompt} by as many tokens: raise the limits or shorten the problems"
            )


def _make_last_letter(config: ConfigDict) -> Task:
    task = config.task

    def ranges(words: Range, letters: Range, claim_noise: float = 0.0) -> last_letter.LastLetterConfig:
        rates = (task.hard_error, task.easy_error, task.reading_error, claim_noise)
        return last_letter.LastLetterConfig(words, letters, *rates)

    rl, test = ranges(task.rl_words, task.rl_letters), ranges(task.test_words or task.rl_words, task.test_letters)
    verifier = ranges(task.verifier_words or task.rl_words, task.rl_letters)
    curriculum = ranges((verifier.words[0], rl.words[1]), task.rl_letters)
    sft = ranges(task.sft_words, task.sft_letters, task.claim_noise)
    seed, stream = task.data_seed, config.seed

    def pool_solution(index: int) -> tuple[Problem, str]:
        return last_letter.mixed_solution(test, seed, "pool", index)[:2]

    def sft_example(role: str, split: str, index: int) -> SftExample:
        name = f"sft_{role}" + ("" if split == "train" else "_heldout")
        if role == "generator":
            problem, solution = last_letter.generator_example(sft, seed, name, index)
            return SftExample(problem, "", 0, solution)
        problem, solution, verification = last_letter.verifier_example(sft, seed, name, index)
        return SftExample(problem, solution, problem.size, verification)

    return Task(
        name=task.name,
        grade_kind="string",
        min_steps=task.min_steps,
        train_problem=lambda index: last_letter.problem(rl, seed, "rl", index, stream),
        test_problem=lambda index: last_letter.problem(test, seed, "test", index),
        num_test=None,
        pool_solution=pool_solution,
        gold_steps=last_letter.gold_steps,
        sft_example=sft_example,
        sft_roles=("generator", "verifier"),
        notes=(f"words of a problem: generator turns {_shown(rl.words)}, verifier turns {_shown(verifier.words)}",),
        verifier_problem=lambda index: last_letter.problem(verifier, seed, "rl_verifier", index, stream),
        # Without shorter problems for the verifier, the curriculum would be the generator's own problems.
        curriculum_problem=(
            (lambda index: last_letter.problem(curriculum, seed, "rl_curriculum", index, stream))
            if task.verifier_words else None
        ),
    )


def _shown(words: Range) -> str:
    low, high = words
    return str(low) if low == high else f"{low} to {high}"
