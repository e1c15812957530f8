"""Log-probs as characters, against codes worked by hand."""

import numpy as np
import pytest

from tango_jax.tracking.rollout_rows import ALPHABET, lengths_code, surprise_code


def test_surprise_is_counted_in_tenths_of_a_nat():
    assert surprise_code(np.float32([0.0, -0.04, -0.06, -1.0, -2.6, -6.34, -50.0])) == "AABKa__"
    assert surprise_code(np.zeros(0, np.float32)) == ""


@pytest.mark.parametrize("lengths, code", [
    ([1, 0, 3], "BAD"), ([62, 63, 64, 126], "-_A_B__A"), ([], ""),
])
def test_lengths_of_any_size_can_be_read_again(lengths, code):
    assert lengths_code(np.cumsum(lengths).tolist()) == code
    read, length = [], 0
    for char in code:
        length += ALPHABET.index(char)
        if char != ALPHABET[-1]:
            read.append(length)
            length = 0
    assert read == lengths
