"""Random numbers of the synthetic tasks, by seed, split and index."""

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

EASY_ERROR = 0.02  # error rate of the synthetic teachers on what is not hard


def example_rng(seed: int, split: str, index: int, stream: int = 0) -> np.random.Generator:
    """The random generator of an example. Another `stream` gives other examples."""
    return np.random.default_rng((seed, SPLITS[split], index, stream))
