"""A task: where problems come from, how answers are graded, and, where it has them, gold step labels and SFT text."""

from collections.abc import Callable
from typing import NamedTuple

from ml_collections import ConfigDict

from tango_jax.data import last_letter
from tango_jax.data.tokenizer import Tokenizer, load_sentencepiece, train_sentencepiece
from tango_jax.records import Problem


class SftExample(NamedTuple):
    """Text to imitate: the prompt's material and the response."""

    problem: Problem
    solution: str  # the generator's response, or, for the verifier, the solution that it judges
    num_steps: int
    response: str


class Task(NamedTuple):
    """Everything that depends on the task. Functions of an index are pure, so a data cursor is one integer."""

    name: str
    grade_kind: str  # tango_jax.grading.grade's `kind`
    min_steps: int
    tokenizer: Tokenizer
    train_problem: Callable[[int], Problem]
    test_problem: Callable[[int], Problem]
    pool_solution: Callable[[int], tuple[Problem, str]]  # fixed solutions that the verifier is measured on
    gold_steps: Callable[[Problem, tuple[str, ...]], tuple[bool, ...]] | None
    sft_example: Callable[[str, str, int], SftExample]  # (role, "train" or "heldout", index)


def make_task(config: ConfigDict) -> Task:
    """The task named by `config.task`."""
    return {"last_letter": _make_last_letter}[config.task.name](config)


TASKS = ("last_letter",)


def _make_last_letter(config: ConfigDict) -> Task:
    task = config.task

    def ranges(words, letters, claim_noise=0.0):
        rates = (task.hard_error, task.easy_error, task.reading_error, claim_noise)
        return last_letter.LastLetterConfig(words, letters, *rates)

    rl, test = ranges(task.rl_words, task.rl_letters), ranges(task.test_words, task.test_letters)
    sft = ranges(task.sft_words, task.sft_letters, task.claim_noise)
    max_words = max(task.sft_words[1], task.rl_words[1], task.test_words[1])
    model = train_sentencepiece(last_letter.ALPHABET, last_letter.symbols(max_words))
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
        tokenizer=load_sentencepiece(model),
        train_problem=lambda index: last_letter.problem(rl, seed, "rl", index, stream),
        test_problem=lambda index: last_letter.problem(test, seed, "test", index),
        pool_solution=pool_solution,
        gold_steps=last_letter.gold_steps,
        sft_example=sft_example,
    )
