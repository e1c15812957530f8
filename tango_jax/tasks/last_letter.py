"""Last-letter concatenation, a synthetic task that runs anywhere.

A problem numbers its words (`cat#1 dog#2`). A solution names the last letter of each word, one per step, then joins
them. Every example is a pure function of (seed, split, index).

The SFT teachers err on purpose: for words that end in a "hard" letter, the generator's usually names the next letter of
the alphabet, and the verifier's often reads that letter too. Reinforcement learning has to correct both.

With `task.double_steps` solutions choose their number of steps: a step may name two words (`#1 ends in t and #2 ends in
g`), in which the generator's teacher errs twice as often.
"""

import dataclasses
import re
import string

import numpy as np
from ml_collections import ConfigDict

from tango_jax.records import Problem
from tango_jax.tasks.example_rng import (
    DOUBLE,
    DOUBLE_ERROR,
    EASY_ERROR,
    by_step,
    draw_step_sizes,
    example_rng,
    written_sizes,
)
from tango_jax.tasks.sizes import largest_size, size_ranges
from tango_jax.text.character_tokenizer import CONTRACT_SYMBOLS, train_sentencepiece
from tango_jax.text.templates import judged

SIZES = ("words", "letters")  # what a problem has a number of: task.sft_words, task.sft_letters and so on
ALPHABET = string.ascii_lowercase + string.digits + "}\n "
HARD_LETTERS = "bdfhjlnpr"  # none is the successor of another
RIGHT_KINDS = ("easy letter", "hard letter")  # of correct steps, see `step_kinds`
KINDS = (*RIGHT_KINDS, "next letter of the alphabet", "another letter", "another number")
_ENDS, _AND = " ends in ", " and "
_MOVE = re.compile(rf"#(\d+){_ENDS}([a-z])")
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
    double_steps: float = 0.0  # probability that a step of the teacher's names two words


def split_config(task: ConfigDict, split: str) -> LastLetterConfig:
    words, letters = size_ranges(task, split, SIZES)
    noise = task.claim_noise if split == "sft" else 0.0
    return LastLetterConfig(words, letters, task.hard_error, EASY_ERROR, task.reading_error, noise, task.double_steps)


def symbols(max_words: int, double_steps: float = 0.0) -> list[str]:
    numbers = [f"#{k}" for k in range(1, max_words + 1)]
    # The order fixes the token ids, and so the result of every seed.
    own = [_ENDS, " reads ", ", says ", *([_AND] if double_steps else [])]
    return [*CONTRACT_SYMBOLS[:-3], *numbers, *CONTRACT_SYMBOLS[-3:], *own]


def tokenizer_model(task: ConfigDict) -> bytes:
    return train_sentencepiece(ALPHABET, symbols(largest_size(task, "words"), task.double_steps))


def longest_texts(words: int, letters: int) -> dict[str, int]:
    """Token counts of the texts in the template "plain", with BOS and EOS. (Steps that name two words are shorter.)"""
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
    """Step k is correct if it names number k and the last letter of word k. Where steps may name two words, a step is
    correct if it goes on at the number that is due. (A step in another form takes up one.)"""
    return tuple(kind.removeprefix(DOUBLE) in RIGHT_KINDS for kind in step_kinds(problem, steps))


def step_kinds(problem: Problem, steps: tuple[str, ...]) -> tuple[str, ...]:
    """Hard or easy letters for a correct step, else the kind of mistake; of two words, the worse one."""
    words, named, kinds = question_words(problem.question), 0, []
    for step in steps:
        moves = [_MOVE.fullmatch(move) for move in step.split(_AND)]
        if None in moves or len(moves) > 2:
            kinds.append("another form")
            named += 1
            continue
        found = [_move_kind(words, named + place, move) for place, move in enumerate(moves, 1)]
        kinds.append(DOUBLE * (len(moves) - 1) + max(found, key=KINDS.index))
        named += len(moves)
    return tuple(kinds)


def _move_kind(words: list[str], k: int, move: re.Match[str]) -> str:
    if k > len(words) or move[1] != str(k):
        return "another number"
    letter = words[k - 1][-1]
    if move[2] == letter:
        return "hard letter" if letter in HARD_LETTERS else "easy letter"
    return "next letter of the alphabet" if move[2] == confuse(letter) else "another letter"


def _named_letter(rng: np.random.Generator, letter: str, hard_error: float, easy_error: float) -> str:
    is_wrong = rng.random() < (hard_error if letter in HARD_LETTERS else easy_error)
    return confuse(letter) if is_wrong else letter


def solution_text(letters: list[str], sizes: list[int]) -> str:
    """`sizes`: how many letters each step names."""
    moves = [f"#{k}{_ENDS}{letter}" for k, letter in enumerate(letters, 1)]
    steps = "".join(f"<step>{_AND.join(step)}</step>" for step in by_step(moves, sizes))
    return f"<think>{steps}</think><answer>\\boxed{{{''.join(letters)}}}</answer>"


def verification_text(readings: list[str], claims: list[str], sizes: list[int]) -> str:
    pairs = list(zip(readings, claims, strict=True))
    remarks = [f"#{k} reads {reading}, says {claim}" for k, (reading, claim) in enumerate(pairs, 1)]
    is_right = [reading == claim for reading, claim in pairs]
    return judged([_AND.join(step) for step in by_step(remarks, sizes)], list(map(all, by_step(is_right, sizes))))


def generator_example(config: LastLetterConfig, seed: int, split: str, index: int) -> tuple[Problem, str]:
    rng = example_rng(seed, split, index)
    words = _words(rng, config)
    letters, sizes = _teacher_letters(rng, words, config.hard_error, config)
    return _problem(words, f"last_letter/{split}/{index}"), solution_text(letters, sizes)


def _teacher_letters(
    rng: np.random.Generator, words: list[str], hard_error: float, config: LastLetterConfig
) -> tuple[list[str], list[int]]:
    """(the letters that the generator's teacher names, how many each of its steps names)."""
    sizes = draw_step_sizes(rng, len(words), config.double_steps)
    factors = [DOUBLE_ERROR if size == 2 else 1 for size in sizes for _ in range(size)]
    letters = [
        _named_letter(rng, word[-1], factor * hard_error, factor * config.easy_error)
        for word, factor in zip(words, factors, strict=True)
    ]
    return letters, sizes


def mixed_solution(
    config: LastLetterConfig, seed: int, split: str, index: int
) -> tuple[Problem, str, np.random.Generator]:
    """(problem, solution, random generator). Half of the solutions err on hard letters, at a rate from U(0, 1).

    `claim_noise` is for stage 1: if nearly all claims are correct, some models learn to copy the claim.
    """
    rng = example_rng(seed, split, index)
    words = _words(rng, config)
    hard_error = rng.random() if rng.random() < 0.5 else 0.0
    letters, sizes = _teacher_letters(rng, words, hard_error, config)
    letters = [chr(ord("a") + rng.integers(0, 26)) if rng.random() < config.claim_noise else letter
               for letter in letters]
    return _problem(words, f"last_letter/{split}/{index}"), solution_text(letters, sizes), rng


def verifier_example(config: LastLetterConfig, seed: int, split: str, index: int) -> tuple[Problem, str, str]:
    problem, solution, rng = mixed_solution(config, seed, split, index)
    words = question_words(problem.question)
    claims, sizes = _claims(solution)
    return problem, solution, verification_text(_readings(rng, words, config), claims, sizes)


def _claims(solution: str) -> tuple[list[str], list[int]]:
    return [move[2] for move in _MOVE.finditer(solution)], written_sizes(solution, _ENDS)


def _readings(rng: np.random.Generator, words: list[str], config: LastLetterConfig) -> list[str]:
    return [_named_letter(rng, word[-1], config.reading_error, config.easy_error) for word in words]


def further_example(
    config: LastLetterConfig, seed: int, split: str, index: int, prompt: str
) -> tuple[Problem, str, str, str]:
    """(problem, solution, verification, response) for a further prompt (text/prompts.py). A second try writes what the
    verification reads. A second judgement errs like the first. A verifier that sees the answer does not err."""
    problem, solution, rng = mixed_solution(config, seed, split, index)
    words = question_words(problem.question)
    claims, sizes = _claims(solution)
    if prompt == "informed":
        return problem, solution, "", verification_text([word[-1] for word in words], claims, sizes)
    readings = _readings(rng, words, config)
    verification = verification_text(readings, claims, sizes)
    if prompt == "second_try":
        return problem, solution, verification, solution_text(readings, sizes)
    return problem, solution, verification, verification_text(_readings(rng, words, config), readings, sizes)
