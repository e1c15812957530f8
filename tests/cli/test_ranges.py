"""Every number of the configuration has a range, and what is outside it is refused before any work."""

import fnmatch
import math

import pytest

from support.paths import ROOT
from tango_jax.cli import ranges
from tango_jax.cli.command_line import load_config
from tango_jax.cli.ranges import LARGEST_INT, RANGES, check_numbers, numbers_of, range_of
from tango_jax.cli.validation import validate
from tango_jax.config import default_config, flatten

DEFAULTS = flatten(default_config())
NUMERIC = [
    key for key, value in DEFAULTS.items()
    if numbers_of(value) or (isinstance(value, tuple) and key != "ablation.arms")
]  # fmt: skip
FLOATS = [key for key in NUMERIC if isinstance(DEFAULTS[key], float)]


@pytest.fixture(scope="module")
def tiny():
    return flatten(load_config(str(ROOT / "configs/tiny.py")))


def test_every_number_has_a_range():
    """A key that was added to defaults.py and not to RANGES fails here."""
    without = [key for key in NUMERIC if not any(fnmatch.fnmatchcase(key, pattern) for pattern in RANGES)]
    assert without == []
    assert len(NUMERIC) > 150


def test_every_row_of_the_table_is_of_use():
    first = {key: next(pattern for pattern in RANGES if fnmatch.fnmatchcase(key, pattern)) for key in NUMERIC}
    assert set(RANGES) == set(first.values())


def test_the_defaults_are_in_their_ranges(tiny):
    check_numbers(DEFAULTS)
    check_numbers(tiny)


def test_a_key_without_a_range_is_an_error():
    with pytest.raises(KeyError, match="no row for rl.new_number"):
        check_numbers({"rl.new_number": 1})


def refused(tiny, key, value) -> str:
    """The error about one value of a key, in an otherwise good configuration."""
    value = (value,) if isinstance(DEFAULTS[key], tuple) else value
    with pytest.raises(ValueError) as error:
        check_numbers(tiny | {key: value})
    message = str(error.value)
    assert message.startswith(f"{key}={value}") and "\n" not in message
    return message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e39])
def test_floats_are_finite_and_not_negative(tiny, value):
    for key in FLOATS:
        refused(tiny, key, value)


@pytest.mark.parametrize("value", [-2, 2**32])
def test_integers_are_not_negative_and_fit_a_device(tiny, value):
    for key in set(NUMERIC) - set(FLOATS):
        refused(tiny, key, value)


@pytest.mark.parametrize("key, value", [
    ("generator.optimizer.eps", 1e-50),  # 0 on a device
    ("generator.optimizer.lr", 1e-40),  # flushed to 0
    ("verifier.model.norm_eps", 1e-46),
    ("verifier.sft.optimizer.b2", 1 - 1e-10),  # 1 on a device, and the bias correction 0
    ("generator.temperature", 1e-30),  # logits divided by it would be infinite
])  # fmt: skip
def test_floats_are_in_range_as_a_device_holds_them(tiny, key, value):
    refused(tiny, key, value)


@pytest.mark.parametrize("key, value, words", [
    ("generator.optimizer.lr", math.inf, "must be a finite number, above 0.0 and at most 3.402823466e+38"),
    ("generator.optimizer.eps", -1.0, "must be above 0.0"),
    ("generator.loss.entropy_coef", math.nan, "must be a finite number, at least 0.0 and at most"),
    ("verifier.sft.optimizer.b2", 1 - 1e-10, "must be at least 0.0 and below 1.0 (float32 rounds it to 1)"),
    ("verifier.model.rope_base", -1.0, "must be at least 1.0"),
    ("generator.sft.max_heldout_loss", -1.0, "must be at least 0.0"),
    ("generator.mesh.fsdp", 0, "must be -1, or be at least 1"),
    ("eval.problems", 2**31, f"must be at least 1 and at most {LARGEST_INT}"),
])  # fmt: skip
def test_the_range_is_said_in_words(tiny, key, value, words):
    assert words in refused(tiny, key, value)


def test_elements_of_a_tuple_are_named(tiny):
    with pytest.raises(ValueError, match=r"ablation\.seeds=\(0, -1\): -1 must lie between 0 and 4294967295"):
        check_numbers(tiny | {"ablation.seeds": (0, -1)})


def test_values_at_the_ends_pass_and_those_just_beyond_are_refused(tiny):
    ends = {"seed": 2**32 - 1, "generate.temperature": 0.0, "generator.mesh.data": -1, "verifier.top_p": 1.0,
            "rl.gamma": 100.0, "verifier.loss.kl_coef": 0.0, "generator.model.norm_eps": 1.0}  # fmt: skip
    check_numbers(tiny | ends)
    beyond = {"seed": 2**32, "generate.temperature": -1e-9, "generator.mesh.data": -2, "verifier.top_p": 1.0 + 1e-9,
              "rl.gamma": 100.1, "verifier.loss.kl_coef": -1e-9, "generator.model.norm_eps": 1.1}  # fmt: skip
    for key, value in beyond.items():
        refused(tiny, key, value)


def test_validation_checks_the_numbers():
    with pytest.raises(ValueError, match=r"generator\.optimizer\.lr=inf must be a finite number"):
        validate(load_config(str(ROOT / "configs/tiny.py"), ["generator.optimizer.lr=1e999"]))


def test_the_first_row_that_fits_counts():
    assert range_of("generate.temperature") is ranges.TEMPERATURE
    assert range_of("verifier.temperature") is ranges.TRAINED_TEMPERATURE
