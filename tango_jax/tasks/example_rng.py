"""What the synthetic tasks share: random numbers by seed, split and index, and steps of one move or two."""

import numpy as np

SPLITS = {
    "rl": 1,
    "test": 2,
    "pool": 3,
    "sft_generator": 4,
    "sft_verifier": 5,
    "sft_generator_heldout": 6,
    "sft_verifier_heldout": 7,
    "rl_verifier": 8,
    "rl_curriculum": 9,
    "sft_second_try": 10,
    "sft_second_try_heldout": 11,
    "sft_second_judgement": 12,
    "sft_second_judgement_heldout": 13,
    "sft_informed": 14,
    "sft_informed_heldout": 15,
}

DOUBLE = "two at once: "  # begins the kind of a step that makes two moves
DOUBLE_ERROR = 2  # the generator's teacher errs twice as often in such a step
EASY_ERROR = 0.02  # error rate of the synthetic teachers on what is not hard


def example_rng(seed: int, split: str, index: int, stream: int = 0) -> np.random.Generator:
    """The random generator of an example. Another `stream` gives other examples."""
    return np.random.default_rng((seed, SPLITS[split], index, stream))


def draw_step_sizes(rng: np.random.Generator, moves: int, double_steps: float) -> list[int]:
    """How many of the moves each step of a teacher's solution makes: two with probability `double_steps`, else one."""
    if not double_steps:
        return [1] * moves
    sizes = []
    while (left := moves - sum(sizes)) > 0:
        sizes.append(2 if left > 1 and rng.random() < double_steps else 1)
    return sizes


def by_step(moves: list, sizes: list[int]) -> list[list]:
    """The moves of each step."""
    moves = iter(moves)
    return [[next(moves) for _ in range(size)] for size in sizes]


def written_sizes(solution: str, move: str) -> list[int]:
    """How often each step of a well-formed solution has the text `move`, which every move has once."""
    return [step.count(move) for step in solution.split("</step>")[:-1]]
