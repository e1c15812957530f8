"""Every key has a declaration, and what this does not allow is refused before any work."""

import math
import re

import pytest

from support.paths import ROOT
from tango_jax.cli.command_line import load_config
from tango_jax.cli.key_list import describe_keys
from tango_jax.cli.ranges import check_values
from tango_jax.cli.validation import validate
from tango_jax.config import default_config, flatten
from tango_jax.defaults import KEYS
from tango_jax.models import attention, decode_attention, head_precision, int8, lora, transformer
from tango_jax.rl import losses, schedule
from tango_jax.runtime.keys import LARGEST_INT, OneOf, Range

DEFAULTS = flatten(default_config())
NUMERIC = [name for name, key in KEYS.items() if isinstance(key.allowed, Range)]
FLOATS = [name for name in NUMERIC if isinstance(KEYS[name].allowed.low, float)]
NAMES = {"ablation.arms", *(f"{role}.{name}" for role in ("generator", "verifier")  # tuples of texts
                            for name in ("model.lora.targets", "rewards"))}


@pytest.fixture(scope="module")
def tiny():
    return flatten(load_config(str(ROOT / "configs/tiny.py")))


def test_every_number_has_a_range_and_every_key_a_meaning():
    numbers = [name for name, value in DEFAULTS.items() if type(value) in (int, float, tuple)]
    assert set(numbers) - set(NUMERIC) == NAMES and len(numbers) > 100
    assert KEYS.keys() == DEFAULTS.keys()
    assert [name for name, key in KEYS.items() if not key.meaning.endswith(".")] == []


@pytest.mark.parametrize("name, choices", [
    ("generator.model.attention", attention.ATTENTION_KINDS),
    ("generator.model.decode_attention", decode_attention.DECODE_ATTENTION_KINDS),
    ("generator.model.sample_cache_dtype", int8.SAMPLE_DTYPES), ("generator.model.remat", transformer.REMAT_MODES),
    ("generator.model.head_precision", (*head_precision.HEAD_PRECISIONS, "bfloat16")),
    ("generator.loss.kl_kind", losses.KL_KINDS),
    ("generator.loss.aggregation", losses.WEIGHT_KINDS), ("generator.loss.ratio", ("token", "sequence")),
    ("generator.model.lora.targets", lora.MATRICES),
    ("generator.model.lora.base_dtype", ("", "float32", "bfloat16", "int8")),
    ("generator.sft.optimizer.schedule", ("constant", "cosine")), ("rl.alpha_schedule", schedule.ALPHA_KINDS),
])
def test_the_choices_are_those_that_the_code_knows(name, choices):
    assert KEYS[name].allowed.texts == tuple(choices)


def test_what_is_not_one_of_the_choices_is_refused(tiny):
    for name, key in KEYS.items():
        if isinstance(key.allowed, OneOf):
            value = ("nonsense",) if name in NAMES else "nonsense"
            shown = rf"{name}=\('nonsense',\): 'nonsense'" if name in NAMES else f"{name}='nonsense'"
            with pytest.raises(ValueError, match=f"^{shown} is not one of "):
                check_values(tiny | {name: value})
    with pytest.raises(ValueError, match="='float16' is not one of float32, bfloat16: float16 needs loss scaling"):
        check_values(tiny | {"verifier.model.compute_dtype": "float16"})


def test_the_defaults_are_allowed(tiny):
    assert check_values(DEFAULTS) is None and check_values(tiny) is None


def test_the_list_of_keys():
    every = describe_keys()
    for name in KEYS:
        shown = name.replace("generator.", "ROLE.").replace("verifier.", "ROLE.")
        assert every.count(f"\n{shown}=") + every.startswith(f"{shown}=") == 1, name
    assert describe_keys("rl.gamma") == (
        "rl.gamma=0.8\n    Weight of the verifier's format score in its reward. [at least 0 and at most 100]")
    assert describe_keys("verifier.mesh.fsdp").startswith("ROLE.mesh.fsdp=-1\n")
    shown = " ".join(describe_keys("generator.mesh.fsdp").split())
    assert "change on resume: yes, a run may go on with other devices]" in shown
    with pytest.raises(ValueError, match="--keys=nonsense: no key has this in its name"):
        describe_keys("nonsense")


def refused(tiny, key, value) -> str:
    """The error about one value of a key, in an otherwise good configuration."""
    value = (value,) if isinstance(DEFAULTS[key], tuple) else value
    with pytest.raises(ValueError) as error:
        check_values(tiny | {key: value})
    message = str(error.value)
    assert message.startswith(f"{key}={value}") and "\n" not in message
    return message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e39])
def test_floats_are_finite_and_not_negative(tiny, value):
    for key in FLOATS:
        assert re.search(r" must (be (above|at least|0,|a finite number,)|lie between) ", refused(tiny, key, value))


@pytest.mark.parametrize("value", [-2, 2**32])
def test_integers_are_not_negative_and_fit_a_device(tiny, value):
    for key in set(NUMERIC) - set(FLOATS):
        bound = "at least [01]" if value < 0 else f"at most {LARGEST_INT}$"
        assert re.search(f" must .*({bound}|lie between [01] and [0-9]+$)", refused(tiny, key, value))


@pytest.mark.parametrize("key, value, words", [
    ("generator.optimizer.clip_norm", 1e-50, "(float32 rounds it to 0)"),
    ("generator.optimizer.lr", 1e-40, "(float32 rounds it to 0)"),  # flushed to 0
    ("verifier.sft.optimizer.b2", 1 - 1e-10, "(float32 rounds it to 1)"),  # and the bias correction to 0
    ("generator.temperature", 1e-30, "must lie between 1e-06 and "),  # logits divided by it would be infinite
])
def test_floats_are_in_range_as_a_device_holds_them(tiny, key, value, words):
    assert words in refused(tiny, key, value)


@pytest.mark.parametrize("key, value, words", [
    ("generator.optimizer.lr", math.inf, "must be a finite number, above 0.0 and at most 3.402823466e+38"),
    ("generator.optimizer.clip_norm", -1.0, "must be above 0.0"),
    ("generator.loss.entropy_coef", math.nan, "must be a finite number, at least 0.0 and at most"),
    ("verifier.sft.optimizer.b2", 1 - 1e-10, "must be at least 0.0 and below 1.0 (float32 rounds it to 1)"),
    ("generator.sft.max_heldout_loss", -1.0, "must be at least 0.0"),
    ("generator.mesh.fsdp", 0, "must be -1, or be at least 1"),
    ("eval.problems", 2**31, f"must be at least 1 and at most {LARGEST_INT}"),
])
def test_the_range_is_said_in_words(tiny, key, value, words):
    assert words in refused(tiny, key, value)


def test_elements_of_a_tuple_are_named(tiny):
    with pytest.raises(ValueError, match=r"ablation\.seeds=\(0, -1\): -1 must lie between 0 and 4294967295"):
        check_values(tiny | {"ablation.seeds": (0, -1)})


def test_values_at_the_ends_pass_and_those_just_beyond_are_refused(tiny):
    ends = {"seed": 2**32 - 1, "generate.temperature": 0.0, "generator.mesh.data": -1, "verifier.top_p": 1.0,
            "rl.gamma": 100.0, "verifier.loss.kl_coef": 0.0, "generator.sft.optimizer.b2": 0.0}
    assert check_values(tiny | ends) is None
    beyond = {"seed": 2**32, "generate.temperature": -1e-9, "generator.mesh.data": -2, "verifier.top_p": 1.0 + 1e-9,
              "rl.gamma": 100.1, "verifier.loss.kl_coef": -1e-9, "generator.sft.optimizer.b2": 1.0}
    for key, value in beyond.items():
        refused(tiny, key, value)


def test_validation_checks_the_numbers():
    with pytest.raises(ValueError, match=r"generator\.optimizer\.lr=inf must be a finite number"):
        validate(load_config(str(ROOT / "configs/tiny.py"), ["generator.optimizer.lr=1e999"]))
