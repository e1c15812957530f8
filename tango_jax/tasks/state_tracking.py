"""State tracking, a synthetic task whose steps depend on each other.

A state is a string of the letters a to e. A problem numbers the swaps to make and ends with the start state (`#1 1-3 #2
2-5 start bdaec`). Each step repeats one swap and writes the state after it (`#1 1-3 adbec`); the answer is the last
state. A transformer of constant depth is not expected to compose swaps of five letters without writing down the states
between (arXiv 2404.08819), so a verdict has to rest on the steps. Every example is a pure function of (seed, split,
index).

The SFT teachers err on purpose. For "hard" swaps, of positions far apart, the generator's usually moves the later
letter forward and shifts those between, and the verifier's often makes the same mistake. A solution with mistakes ends
in the right state about once in 100.

With `task.double_steps` solutions choose their number of steps: a step may make two swaps and write only the state
after both (`#1 1-3 #2 2-5 aebdc`). There the generator's teacher errs twice as often.
"""

import dataclasses
import functools
import itertools
import re

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

SIZES = ("swaps",)  # what a problem has a number of: task.sft_swaps, task.rl_swaps, task.test_swaps
LETTERS = "abcde"
Swap = tuple[int, int]  # two positions of the state, counted from 1, the lower one first
SWAPS: tuple[Swap, ...] = tuple(itertools.combinations(range(1, len(LETTERS) + 1), 2))
RIGHT_KINDS = ("hard swap", "easy swap")  # of correct steps, see `step_kinds`
HARD_DISTANCE = 3  # 3 of the 10 swaps are of positions this far apart: 1-4, 1-5 and 2-5
ALPHABET = f"{LETTERS}0123456789-}}\n "
_STATE = f"[{LETTERS}]{{{len(LETTERS)}}}"
_STEP = re.compile(rf"#(\d+) (\d-\d) (?:#(\d+) (\d-\d) )?({_STATE})")
_QUESTION_SWAP = re.compile(r"#\d+ (\d)-(\d)")
_START = "start "


@dataclasses.dataclass(frozen=True)
class StateTrackingConfig:
    swaps: tuple[int, int]  # range of their number, inclusive (low, high)
    hard_error: float  # probability that the teacher makes a mistake in a hard swap
    easy_error: float  # the same for all other swaps; a mistake in a swap of neighbours changes nothing
    reading_error: float  # probability that the verifier's teacher makes a mistake in a hard swap
    claim_noise: float = 0.0  # probability that a step of a solution to be verified writes a random permutation
    double_steps: float = 0.0  # probability that a step of the teacher's makes two swaps


def split_config(task: ConfigDict, split: str) -> StateTrackingConfig:
    (swaps,) = size_ranges(task, split, SIZES)
    noise = task.claim_noise if split == "sft" else 0.0
    return StateTrackingConfig(swaps, task.hard_error, EASY_ERROR, task.reading_error, noise, task.double_steps)


def symbols(max_swaps: int) -> list[str]:
    """Numbers and swaps are one token each."""
    numbers = [f"#{k}" for k in range(1, max_swaps + 1)]
    return [*CONTRACT_SYMBOLS, *numbers, *(f" {swap_text(swap)} " for swap in SWAPS), _START, ", says "]


def tokenizer_model(task: ConfigDict) -> bytes:
    return train_sentencepiece(ALPHABET, symbols(largest_size(task, "swaps")))


def longest_texts(swaps: int) -> dict[str, int]:
    """Token counts of the texts in the template "plain", with BOS and EOS. (Steps that make two swaps are shorter.)"""
    state = len(LETTERS)
    question = 3 + 2 * swaps + state
    solution = 7 + (4 + state) * swaps + state
    return {
        "generator prompt": question,
        "generator response": solution,
        "verifier prompt": question + solution + 1 + len(str(swaps)),
        "verifier response": 8 + (9 + 2 * state) * swaps,
    }


def swap_text(swap: Swap) -> str:
    return f"{swap[0]}-{swap[1]}"


def apply_swap(state: str, swap: Swap) -> str:
    first, second = swap
    return state[: first - 1] + state[second - 1] + state[first : second - 1] + state[first - 1] + state[second:]


def apply_mistaken(state: str, swap: Swap) -> str:
    """The letter of the second position moves to the first one, and those from there on shift by one. For neighbours
    this is right."""
    first, second = swap
    return state[: first - 1] + state[second - 1] + state[first - 1 : second - 1] + state[second:]


def is_hard(swap: Swap) -> bool:
    return swap[1] - swap[0] >= HARD_DISTANCE


def _random_state(rng: np.random.Generator) -> str:
    return "".join(LETTERS[place] for place in rng.permutation(len(LETTERS)))


def _draw(rng: np.random.Generator, config: StateTrackingConfig) -> tuple[str, list[Swap]]:
    start, count = _random_state(rng), rng.integers(config.swaps[0], config.swaps[1] + 1)
    return start, [SWAPS[number] for number in rng.integers(0, len(SWAPS), size=count)]


def true_states(start: str, swaps: list[Swap]) -> list[str]:
    return list(itertools.accumulate(swaps, apply_swap, initial=start))[1:]


def question_parts(question: str) -> tuple[str, list[Swap]]:
    swaps = [(int(first), int(second)) for first, second in _QUESTION_SWAP.findall(question)]
    return question.rpartition(_START)[2], swaps


def _problem(start: str, swaps: list[Swap], problem_id: str) -> Problem:
    question = f"{' '.join(_numbered(swaps))} {_START}{start}"
    return Problem(problem_id, question, true_states(start, swaps)[-1], size=len(swaps))


def problem(config: StateTrackingConfig, seed: int, split: str, index: int, stream: int = 0) -> Problem:
    """Another `stream` gives other problems of the same kind."""
    return _problem(*_draw(example_rng(seed, split, index, stream), config), f"state_tracking/{split}/{index}")


def gold_steps(problem: Problem, steps: tuple[str, ...]) -> tuple[bool, ...]:
    """Step k is correct if it names number k and swap k, and its state follows from the previous written state: of the
    nearest earlier well-formed step, or the start. A step that returns to the true state in another way is wrong. Where
    steps may make two swaps, a step is correct if it goes on at the swap that is due. (One in another form takes up
    one.)"""
    return tuple(kind.removeprefix(DOUBLE) in RIGHT_KINDS for kind in step_kinds(problem, steps))


def step_kinds(problem: Problem, steps: tuple[str, ...]) -> tuple[str, ...]:
    """Hard or easy swaps for a correct step, else the kind of mistake. Of two swaps, hard if one of them is."""
    start, swaps = question_parts(problem.question)
    written, made, kinds = start, 0, []
    for step in steps:
        match = _STEP.fullmatch(step)
        if match is None:
            kinds.append("another form")
            made += 1
            continue
        named = [move for move in (match.groups()[:2], match.groups()[2:4]) if move[0]]
        due = swaps[made : made + len(named)]
        kinds.append(DOUBLE * (len(named) - 1) + _step_kind(named, made + 1, due, written, match[5]))
        made += len(named)
        written = match[5]
    return tuple(kinds)


def _step_kind(named: list[tuple[str, str]], first: int, due: list[Swap], before: str, after: str) -> str:
    if named != [(str(k), swap_text(swap)) for k, swap in enumerate(due, first)]:
        return "another swap"
    if after == functools.reduce(apply_swap, due, before):
        return "hard swap" if any(map(is_hard, due)) else "easy swap"
    shifted = {before}  # what a mistake in one swap or in both leads to
    for swap in due:
        shifted = {make(state, swap) for state in shifted for make in (apply_swap, apply_mistaken)}
    return "letters shifted, not swapped" if after in shifted else "another state"


def solution_text(swaps: list[Swap], states: list[str], sizes: list[int]) -> str:
    """`states`: after each step. `sizes`: how many swaps each step makes."""
    written = zip(by_step(_numbered(swaps), sizes), states, strict=True)
    steps = "".join(f"<step>{' '.join(moves)} {state}</step>" for moves, state in written)
    return f"<think>{steps}</think><answer>\\boxed{{{states[-1]}}}</answer>"


def verification_text(swaps: list[Swap], readings: list[str], claims: list[str], sizes: list[int]) -> str:
    written = list(zip(by_step(_numbered(swaps), sizes), readings, claims, strict=True))
    remarks = [f"{' '.join(moves)} {reading}, says {claim}" for moves, reading, claim in written]
    return judged(remarks, [reading == claim for _, reading, claim in written])


def _numbered(swaps: list[Swap]) -> list[str]:
    return [f"#{k} {swap_text(swap)}" for k, swap in enumerate(swaps, 1)]


def _made(rng: np.random.Generator, state: str, step: list[Swap], hard_error: float, easy_error: float) -> str:
    """The state after the swaps of a step, each of which may go wrong."""
    for swap in step:
        is_wrong = rng.random() < (hard_error if is_hard(swap) else easy_error)
        state = (apply_mistaken if is_wrong else apply_swap)(state, swap)
    return state


def _teacher_state(
    rng: np.random.Generator, state: str, step: list[Swap], hard_error: float, easy_error: float
) -> str:
    factor = DOUBLE_ERROR if len(step) == 2 else 1
    return _made(rng, state, step, factor * hard_error, factor * easy_error)


def _teacher_states(
    rng: np.random.Generator, start: str, steps: list[list[Swap]], hard_error: float, easy_error: float,
    claim_noise: float,
) -> list[str]:
    """Every step continues from the state before it, right or wrong."""
    states = [start]
    for step in steps:
        state = _teacher_state(rng, states[-1], step, hard_error, easy_error)
        states.append(_random_state(rng) if rng.random() < claim_noise else state)
    return states[1:]


def generator_example(config: StateTrackingConfig, seed: int, split: str, index: int) -> tuple[Problem, str]:
    rng = example_rng(seed, split, index)
    start, swaps = _draw(rng, config)
    sizes = draw_step_sizes(rng, len(swaps), config.double_steps)
    states = _teacher_states(rng, start, by_step(swaps, sizes), config.hard_error, config.easy_error, 0.0)
    return _problem(start, swaps, f"state_tracking/{split}/{index}"), solution_text(swaps, states, sizes)


def mixed_solution(
    config: StateTrackingConfig, seed: int, split: str, index: int
) -> tuple[Problem, str, np.random.Generator]:
    """(problem, solution, random generator). Half of the solutions err on hard swaps, at a rate from U(0, 1).

    `claim_noise` is for stage 1: if nearly all claims are correct, some models learn to copy the claim.
    """
    rng = example_rng(seed, split, index)
    start, swaps = _draw(rng, config)
    hard_error = rng.random() if rng.random() < 0.5 else 0.0
    sizes = draw_step_sizes(rng, len(swaps), config.double_steps)
    states = _teacher_states(rng, start, by_step(swaps, sizes), hard_error, config.easy_error, config.claim_noise)
    return _problem(start, swaps, f"state_tracking/{split}/{index}"), solution_text(swaps, states, sizes), rng


def verifier_example(config: StateTrackingConfig, seed: int, split: str, index: int) -> tuple[Problem, str, str]:
    """The teacher works out each state from the one written before."""
    problem, solution, rng = mixed_solution(config, seed, split, index)
    start, swaps = question_parts(problem.question)
    claims, sizes = _claims(solution)
    readings = _readings(rng, start, by_step(swaps, sizes), claims, config)
    return problem, solution, verification_text(swaps, readings, claims, sizes)


def _claims(solution: str) -> tuple[list[str], list[int]]:
    return [match[5] for match in _STEP.finditer(solution)], written_sizes(solution, "#")


def _readings(
    rng: np.random.Generator, start: str, steps: list[list[Swap]], claims: list[str], config: StateTrackingConfig
) -> list[str]:
    return [
        _made(rng, written, step, config.reading_error, config.easy_error)
        for written, step in zip([start, *claims[:-1]], steps, strict=True)
    ]


def further_example(
    config: StateTrackingConfig, seed: int, split: str, index: int, prompt: str
) -> tuple[Problem, str, str, str]:
    """(problem, solution, verification, response) for a further prompt (text/prompts.py). A second try writes on from
    the first corrected state. A second judgement errs like the first. A verifier that sees the answer does not err."""
    problem, solution, rng = mixed_solution(config, seed, split, index)
    start, swaps = question_parts(problem.question)
    claims, sizes = _claims(solution)
    steps = by_step(swaps, sizes)
    if prompt == "informed":
        before = [start, *claims[:-1]]
        right = [functools.reduce(apply_swap, step, written) for written, step in zip(before, steps, strict=True)]
        return problem, solution, "", verification_text(swaps, right, claims, sizes)
    readings = _readings(rng, start, steps, claims, config)
    verification = verification_text(swaps, readings, claims, sizes)
    if prompt == "second_judgement":
        again = _readings(rng, start, steps, claims, config)
        return problem, solution, verification, verification_text(swaps, again, readings, sizes)
    kept = next((k for k, (said, claim) in enumerate(zip(readings, claims, strict=True)) if said != claim), len(steps))
    states = [*claims[:kept], *readings[kept : kept + 1]]
    for step in steps[len(states) :]:
        states.append(_teacher_state(rng, states[-1], step, config.hard_error, config.easy_error))
    return problem, solution, verification, solution_text(swaps, states, sizes)
