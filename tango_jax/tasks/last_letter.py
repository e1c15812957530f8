"""Last-letter concatenation, a synthetic task that runs anywhere.

A problem numbers its words (`cat#1 dog#2`). A solution names the last letter of each word, one per step, then joins
them. Every example is a pure function of (seed, split, index).

The SFT teachers err on purpose: for words that end in a "hard" letter, the generator's usually names the next letter of
the alphabet, and the verifier's often reads that letter too. Reinforcement learning has to correct both.
"""

import dataclasses
import re
import string

import numpy as np
from ml_collections import ConfigDict

from tango_jax.records import Problem
from tango_jax.tasks.example_rng import EASY_ERROR, example_rng
from tango_jax.tasks.sizes import largest_size, size_ranges
from tango_jax.text.character_tokenizer import CONTRACT_SYMBOLS, train_sentencepiece
from tango_jax.text.templates import judged

SIZES = ("words", "letters")  # what a problem has a number of: task.sft_words, task.sft_letters and so on
ALPHABET = string.ascii_lowercase + string.digits + "}\n "
HARD_LETTERS = "bdfhjlnpr"  # none is the successor of another
RIGHT_KINDS = ("hard letter", "easy letter")  # of correct steps, see `step_kinds`
_STEP = re.compile(r"#(\d+) ends in ([a-z])")
_WORD = re.compile(r"([a-z]+)#\d+")


@dataclasses.dataclass(frozen=True)
class LastLetterConfig:
    """Ranges are inclusive (low, high)."""

    words: tuple[int, int]
    letters: tuple[int, int]
    hard_error: float  # probability that the teacher names the wrong letter for a hard ending
    easy_error: float  # the same for all other endings
    reading_error: float  # probability that the verifier's teacher misreads a hard ending
    claim_noise: float = 0.0  # probability that a step of a solution to be verified names a random letter


def split_config(task: ConfigDict, split: str) -> LastLetterConfig:
    words, letters = size_ranges(task, split, SIZES)
    noise = task.claim_noise if split == "sft" else 0.0
    return LastLetterConfig(words, letters, task.hard_error, EASY_ERROR, task.reading_error, noise)


def symbols(max_words: int) -> list[str]:
    numbers = [f"#{k}" for k in range(1, max_words + 1)]
    # The order fixes the token ids, and so the result of every seed.
    return [*CONTRACT_SYMBOLS[:-3], *numbers, *CONTRACT_SYMBOLS[-3:], " ends in ", " reads ", ", says "]


def tokenizer_model(task: ConfigDict) -> bytes:
    return train_sentencepiece(ALPHABET, symbols(largest_size(task, "words")))


def longest_texts(words: int, letters: int) -> dict[str, int]:
    """Token counts of the texts in the template "plain", with BOS and EOS."""
    question = 1 + words * (letters + 2)
    solution = 6 * words + 7
    return {
        "generator prompt": question,
        "generator response": solution,
        "verifier prompt": question + solution + 3,
        "verifier response": 11 * words + 8,
    }


def confuse(letter: str) -> str:
    return chr((ord(letter) - ord("a") + 1) % 26 + ord("a"))


def _words(rng: np.random.Generator, config: LastLetterConfig) -> list[str]:
    count = rng.integers(config.words[0], config.words[1] + 1)
    lengths = rng.integers(config.letters[0], config.letters[1] + 1, size=count)
    return ["".join(chr(ord("a") + c) for c in rng.integers(0, 26, size=length)) for length in lengths]


def question_words(question: str) -> list[str]:
    return _WORD.findall(question)


def _problem(words: list[str], problem_id: str) -> Problem:
    question = " ".join(f"{word}#{k}" for k, word in enumerate(words, 1))
    return Problem(problem_id, question, "".join(word[-1] for word in words), size=len(words))


def problem(config: LastLetterConfig, seed: int, split: str, index: int, stream: int = 0) -> Problem:
    """Another `stream` gives other problems of the same kind."""
    return _problem(_words(example_rng(seed, split, index, stream), config), f"last_letter/{split}/{index}")


def gold_steps(problem: Problem, steps: tuple[str, ...]) -> tuple[bool, ...]:
    """Step k is correct if it names number k and the last letter of word k."""
    return tuple(kind in RIGHT_KINDS for kind in step_kinds(problem, steps))


def step_kinds(problem: Problem, steps: tuple[str, ...]) -> tuple[str, ...]:
    """Hard or easy letters for a correct step, else the kind of mistake."""
    words = question_words(problem.question)

    def kind(k: int, step: str) -> str:
        match = _STEP.fullmatch(step)
        if match is None:
            return "another form"
        if k > len(words) or match[1] != str(k):
            return "another number"
        letter = words[k - 1][-1]
        if match[2] == letter:
            return "hard letter" if letter in HARD_LETTERS else "easy letter"
        return "next letter of the alphabet" if match[2] == confuse(letter) else "another letter"

    return tuple(kind(k, step) for k, step in enumerate(steps, 1))


def _named_letter(rng: np.random.Generator, letter: str, hard_error: float, easy_error: float) -> str:
    is_wrong = rng.random() < (hard_error if letter in HARD_LETTERS else easy_error)
    return confuse(letter) if is_wrong else letter


def _random_letter(rng: np.random.Generator) -> str:
    return chr(ord("a") + rng.integers(0, 26))


def solution_text(letters: list[str]) -> str:
    steps = "".join(f"<step>#{k} ends in {letter}</step>" for k, letter in enumerate(letters, 1))
    return f"<think>{steps}</think><answer>\\boxed{{{''.join(letters)}}}</answer>"


def verification_text(readings: list[str], claims: list[str]) -> str:
    pairs = list(zip(readings, claims, strict=True))
    remarks = [f"#{k} reads {reading}, says {claim}" for k, (reading, claim) in enumerate(pairs, 1)]
    return judged(remarks, [reading == claim for reading, claim in pairs])


def generator_example(config: LastLetterConfig, seed: int, split: str, index: int) -> tuple[Problem, str]:
    rng = example_rng(seed, split, index)
    words = _words(rng, config)
    letters = [_named_letter(rng, word[-1], config.hard_error, config.easy_error) for word in words]
    return _problem(words, f"last_letter/{split}/{index}"), solution_text(letters)


def mixed_solution(
    config: LastLetterConfig, seed: int, split: str, index: int
) -> tuple[Problem, str, np.random.Generator]:
    """(problem, solution, random generator). Half of the solutions err on hard letters, at a rate from U(0, 1).

    `claim_noise` is for stage 1: if nearly all claims are correct, some models learn to copy the claim.
    """
    rng = example_rng(seed, split, index)
    words = _words(rng, config)
    hard_error = rng.random() if rng.random() < 0.5 else 0.0
    letters = [_named_letter(rng, word[-1], hard_error, config.easy_error) for word in words]
    letters = [_random_letter(rng) if rng.random() < config.claim_noise else letter for letter in letters]
    return _problem(words, f"last_letter/{split}/{index}"), solution_text(letters), rng


def verifier_example(config: LastLetterConfig, seed: int, split: str, index: int) -> tuple[Problem, str, str]:
    problem, solution, rng = mixed_solution(config, seed, split, index)
    words = question_words(problem.question)
    claims = [match[2] for match in _STEP.finditer(solution)]
    return problem, solution, verification_text(_readings(rng, words, config), claims)


def _readings(rng: np.random.Generator, words: list[str], config: LastLetterConfig) -> list[str]:
    return [_named_letter(rng, word[-1], config.reading_error, config.easy_error) for word in words]


def further_example(
    config: LastLetterConfig, seed: int, split: str, index: int, prompt: str
) -> tuple[Problem, str, str, str]:
    """(problem, solution, verification, response) for a further prompt (text/prompts.py). A second try writes what the
    verification reads. A second judgement errs like the first. A verifier that sees the answer does not err."""
    problem, solution, rng = mixed_solution(config, seed, split, index)
    words = question_words(problem.question)
    claims = [match[2] for match in _STEP.finditer(solution)]
    if prompt == "informed":
        return problem, solution, "", verification_text([word[-1] for word in words], claims)
    readings = _readings(rng, words, config)
    verification = verification_text(readings, claims)
    if prompt == "second_try":
        return problem, solution, verification, solution_text(readings)
    return problem, solution, verification, verification_text(_readings(rng, words, config), readings)
