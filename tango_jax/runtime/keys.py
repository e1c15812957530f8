"""The types of configuration keys; defaults.py and role_defaults.py declare them. Ranges serve options, too."""

import enum
from typing import Any, NamedTuple

import numpy as np

from tango_jax.runtime.rng import MAX_SEED

LARGEST_INT = 2**31 - 1  # counters on devices are int32
LARGEST_FLOAT = float(np.finfo(np.float32).max)
SMALLEST_FLOAT = float(np.finfo(np.float32).tiny)  # XLA flushes what is smaller to zero
# Samples per problem. A response's row number is problem number x MAX_SAMPLES + sample number.
MAX_SAMPLES = 1024


class Range(NamedTuple):
    """Allowed numbers. A float is checked as written and rounded to float32."""

    low: float
    high: float  # LARGEST_INT and LARGEST_FLOAT: whatever a device can hold
    is_above: bool = False  # `low` itself is not allowed
    is_below: bool = False  # `high` itself is not allowed
    also: float | None = None  # one value outside the range with a meaning of its own
    why: str = ""  # the reason or the fix, for the end of the error message

    def check(self, shown: str, value: float) -> None:
        if value == self.also:
            return
        held = _in_float32(value) if isinstance(value, float) else value
        if self._holds(value) and self._holds(held):
            return
        note = f" (float32 rounds it to {held:g})" if self._holds(value) else ""
        raise ValueError(f"{shown} must {self._words(value)}{note}{self.why}")

    def __str__(self) -> str:
        also = f"{self.also:g}, or " if self.also is not None else ""
        low = f"{'above' if self.is_above else 'at least'} {self.low:g}"
        if self.high in (LARGEST_INT, LARGEST_FLOAT):
            return f"{also}{low}"
        return f"{also}{low} and {'below' if self.is_below else 'at most'} {self.high:.10g}"

    def _holds(self, value: float) -> bool:
        # NaN is in no range: it compares false.
        is_high_enough = value > self.low if self.is_above else value >= self.low
        return is_high_enough and (value < self.high if self.is_below else value <= self.high)

    def _words(self, value: float) -> str:
        also = f"be {self.also:g}, or " if self.also is not None else ""
        low = f"{'above' if self.is_above else 'at least'} {self.low}"
        if self.high not in (LARGEST_INT, LARGEST_FLOAT):
            if not self.is_above and not self.is_below:
                return f"{also}lie between {self.low} and {self.high}"
            return f"{also}be {low} and {'below' if self.is_below else 'at most'} {self.high}"
        if value <= self.low:
            return f"{also}be {low}"
        return f"{also}be {'a finite number, ' * isinstance(value, float)}{low} and at most {self.high:.10g}"


def _in_float32(value: float) -> float:
    with np.errstate(over="ignore", under="ignore"):
        held = float(np.float32(value))
    return 0.0 if abs(held) < SMALLEST_FLOAT else held


COUNT = Range(1, LARGEST_INT)
COUNT_OR_NONE = Range(0, LARGEST_INT)  # 0 has a meaning of its own: off, all, or as many as are needed
DEVICES = Range(1, LARGEST_INT, also=-1)
SEED = Range(0, MAX_SEED)
SHARE = Range(0.0, 1.0)
SHARE_ABOVE_ZERO = Range(0.0, 1.0, is_above=True)
SHARE_BELOW_ONE = Range(0.0, 1.0, is_below=True)
NOT_NEGATIVE = Range(0.0, LARGEST_FLOAT)
POSITIVE = Range(0.0, LARGEST_FLOAT, is_above=True)
WEIGHT = Range(0.0, 100.0)
# Logits divided by a temperature stay finite in float32.
SAMPLED_TEMPERATURE = Range(1e-6, 1e6)
TEMPERATURE = SAMPLED_TEMPERATURE._replace(also=0.0, why="; 0 is greedy")
TRAINED_TEMPERATURE = SAMPLED_TEMPERATURE._replace(
    why=": a greedy policy has nothing to learn from (evaluation is greedy by itself)"
)


class OneOf(NamedTuple):
    texts: tuple[str, ...]
    why: str = ""  # the reason or the fix, for the end of the error message

    def check(self, shown: str, value: str) -> None:
        if value not in self.texts:
            raise ValueError(f"{shown} is not one of {self}{self.why}")

    def __str__(self) -> str:
        return ", ".join(text or "(empty)" for text in self.texts)


class Change(enum.Enum):
    """Whether a resumed run or a repeated command may change a setting."""

    NEVER = "no"
    # Fixed to the end of a run, so that it can be repeated to the bit.
    ROUNDING = "no; runs that differ in it can be compared"
    HARDWARE = "yes, a run may go on with other devices"  # changes results by rounding alone
    PLACE = "only to another path of the same run"
    WATCHING = "yes, it changes no result"
    EXPERIMENT = "yes, runs can be added to an experiment"


class Key(NamedTuple):
    """A value has the type of `default`; each element of a tuple is checked."""

    default: Any
    # Numbers or texts; None: any text, True or False, or what validation.py checks.
    allowed: Range | OneOf | None
    meaning: str
    change: Change = Change.NEVER


Group = dict[str, "Key | Group"]  # keys by name


def flat_keys(group: Group, prefix: str = "") -> dict[str, Key]:
    """{"rl.gamma": Key}, nested groups included."""
    found = {}
    for name, value in group.items():
        found |= {prefix + name: value} if isinstance(value, Key) else flat_keys(value, f"{prefix}{name}.")
    return found
