"""What processes tell each other arrives whole, whatever its size."""

import numpy as np
import pytest

from support.together import Together
from tango_jax.runtime import hosts

FIRST, CHUNK = 4096, 2**20
# Bytes of a value in each of three processes, and the messages that the largest takes.
SIZES = [((0, 1, 2), 1), ((FIRST - 70, FIRST - 7, FIRST), 2), ((10, CHUNK + FIRST - 60, 3 * CHUNK), 4),
         ((CHUNK, CHUNK, 0), 2)]


@pytest.mark.parametrize("sizes, messages", SIZES)
def test_values_of_any_size_arrive(monkeypatch, sizes, messages):
    values = [np.random.default_rng(size).bytes(size) for size in sizes]
    together = Together(monkeypatch, 3)
    assert together.run(lambda index: hosts.join_parts([values[index], index])) == [
        [values[0], 0, values[1], 1, values[2], 2]] * 3
    assert together.exchanged == [[(FIRST,)] + [(CHUNK,)] * (messages - 1)] * 3  # the shapes that are compiled


def test_arrays_keep_their_bits(monkeypatch):
    arrays = [np.array([1.5, -0.0, np.nan, np.inf], np.float32), np.array([2**31 - 1, -5], np.int32)]
    for found in Together(monkeypatch, 2).run(lambda index: hosts.join_parts(arrays[index : index + 1])):
        assert [one.dtype for one in found] == [one.dtype for one in arrays]
        assert [one.tobytes() for one in found] == [one.tobytes() for one in arrays]


def test_a_mistake_of_one_is_raised_in_all(monkeypatch):
    def work(index: int) -> None:
        hosts.raise_mistake("the second failed" * (index == 1))

    errors = Together(monkeypatch, 3).run(work)
    assert [str(error) for error in errors] == [f"the second failed{hosts.ONCE_MENDED}"] * 3
