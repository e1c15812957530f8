"""Examples of the synthetic tasks are pure functions of seed, split and index."""

import pytest

from tango_jax.tasks import last_letter, state_tracking
from tango_jax.tasks.last_letter import LastLetterConfig
from tango_jax.tasks.state_tracking import StateTrackingConfig

LETTERS = LastLetterConfig(words=(2, 4), letters=(3, 5), hard_error=0.8, easy_error=0.05, reading_error=0.6)
SWAPS = StateTrackingConfig(swaps=(2, 5), hard_error=0.8, easy_error=0.05, reading_error=0.6)


@pytest.mark.parametrize("name", ["problem", "generator_example", "verifier_example", "mixed_solution"])
@pytest.mark.parametrize("module, config", [(last_letter, LETTERS), (state_tracking, SWAPS)], ids=["letters", "swaps"])
def test_examples_are_functions_of_seed_split_and_index(module, config, name):
    def make(seed: int, split: str, index: int):
        made = getattr(module, name)(config, seed, split, index)
        return made[:2] if name == "mixed_solution" else made  # without its random generator

    first = [make(0, "rl", index) for index in range(8)]
    # In another order, and after other calls: nothing is carried over.
    again = [make(0, "rl", index) for index in reversed(range(8))]
    assert first == again[::-1]
    others = [make(1, "rl", 0), make(0, "test", 0), make(0, "rl", 8)]
    texts = [str(item) for item in first + others]
    assert len(set(texts)) == len(texts)
