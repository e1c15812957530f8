"""Files that are written tensor by tensor are those of safetensors itself."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tango_jax.weights.safetensors_files import create_file, write_tensor, write_tensors

TENSORS = {
    "b.wide": np.arange(6, dtype=np.float32).reshape(2, 3), "a.half": np.ones((3, 1), np.float16),
    "c.double": np.full(2, np.pi), "a.brain": np.array([[1, 2, 3]], ml_dtypes.bfloat16),
    "z.\u00e9": np.ones(1, np.float32), "a.wide": np.zeros((2, 2), np.float32),
}


@pytest.mark.parametrize("names", [tuple(TENSORS), ("a.brain",), ("b.wide", "a.half")])
def test_the_bytes_are_those_of_the_library(tmp_path, names):
    tensors = {name: TENSORS[name] for name in names}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    write_tensors(tensors, tmp_path / "ours")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_tensors_are_written_in_any_order_and_layout(tmp_path):
    places = create_file(tmp_path / "file", TENSORS)
    for name in sorted(places, reverse=True):
        write_tensor(places[name], np.asfortranarray(TENSORS[name]))
    for name, array in load_file(tmp_path / "file").items():
        assert array.dtype == TENSORS[name].dtype
        np.testing.assert_array_equal(array, TENSORS[name])


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(OSError) as found:
        create_file(tmp_path / "none" / "file", TENSORS)
    assert found.value.filename == str(tmp_path / "none" / "file") and found.value.strerror
    [place] = {create_file(tmp_path / "file", {"a": np.zeros(2)})["a"]}
    with pytest.raises(OSError, match="No space left on device"):
        write_tensor(place._replace(file=type(tmp_path)("/dev/full")), np.zeros(10**6))
