"""Arrays that cannot be computed with are found, whatever their type and place in a tree."""

import jax
import ml_dtypes
import numpy as np
import pytest

from tango_jax.runtime.trees import LARGEST, first_not_finite


def tree(dtype, value=0.0) -> dict:
    norm = np.zeros(4, np.float32)
    norm[3] = value
    with np.errstate(over="ignore"):
        return {"embed": np.ones((3, 2), dtype), "layers": {"norm": norm.astype(dtype)}, "step": np.int32(2**31 - 1)}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_one_element_is_enough(dtype):
    assert first_not_finite(tree(dtype)) is None
    for value in (np.nan, np.inf, -np.inf, 1e38, -1e19):
        assert first_not_finite(tree(dtype, value)) == "layers/norm", value
        assert first_not_finite(tree(dtype, value) | {"embed": np.full((3, 2), np.nan, dtype)}) == "embed"


def test_large_values_that_are_still_of_use():
    values = {"a": np.float32([LARGEST / 2, -LARGEST / 2, 1e-45]), "b": np.float16([65504.0]), "c": np.zeros(0)}
    assert first_not_finite(values) is None
    assert first_not_finite({}) is None


def test_arrays_that_are_spread_over_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    good, bad = np.zeros(16, np.float32), np.float32([0] * 9 + [np.nan] + [0] * 6)
    assert first_not_finite({"a": jax.device_put(good, place)}) is None
    assert first_not_finite({"a": jax.device_put(good, place), "b": jax.device_put(bad, place)}) == "b"
