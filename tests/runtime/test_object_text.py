"""What an object is made of, as text: it differs wherever the objects would do something else."""

import dataclasses
import functools
import re
import threading

import numpy as np
import pytest

from tango_jax.runtime.object_text import text_of

SCALE = 1.0


def weighted(weight, values=(1, 2)):
    def reward(solution):
        return weight * values[0]

    return reward


def reading(solution):
    return helped(solution)


def helped(solution):
    return SCALE


def by_default(solution, weight=1.0, *, bias=0.0):
    return weight + bias


def other_default(weight):
    def reward(solution, weight=weight):
        return weight

    return reward


@dataclasses.dataclass
class Weighted:
    weight: float = 1.0

    def __call__(self, solution):
        return self.weight

    def reward(self, solution):
        return self.weight


class Slotted:
    __slots__ = ("weight",)

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, solution):
        return self.weight


def decorated(function, weight):
    @functools.wraps(function)
    def wrapper(solution):
        return weight * function(solution)

    return wrapper


@pytest.mark.parametrize("make", [
    weighted, Weighted, Slotted, other_default,
    lambda weight: weighted(1.0, values=[weight, {"b": weight}]),
    lambda weight: weighted(np.array([0.0, weight])),
    lambda weight: weighted(np.full(1000, weight)),
    lambda weight: weighted(re.compile(str(weight))),
    lambda weight: weighted(weighted(weight)),
    lambda weight: Weighted(weight).reward,
    lambda weight: functools.partial(by_default, weight=weight),
    lambda weight: functools.partial(Weighted(weight), 3),
    lambda weight: functools.cache(weighted(weight)),
    lambda weight: decorated(by_default, weight),
    lambda weight: decorated(decorated(by_default, weight), 2.0),
    lambda weight: {"a": [weighted(weight)], weight: 1},
    lambda weight: {weight, 3},
], ids=lambda make: make.__name__)
def test_what_an_object_holds_counts(make):
    assert text_of(make(0.5), "it") == text_of(make(0.5), "it") != text_of(make(0.9), "it")
    assert " at 0x" not in text_of(make(0.5), "it")


def test_what_a_function_reads_from_its_module_counts(monkeypatch):
    before = text_of(reading, "it")
    assert "def reading" in before and "def helped" in before
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert text_of(reading, "it") != before


def test_functions_of_one_line_and_without_a_source_differ():
    first, second = [lambda x: x + 1, lambda x: x - 1]
    assert text_of(first, "it") != text_of(second, "it")
    typed = {}
    exec("def f(x):\n    return x.a\ndef g(x):\n    return x.b\ndef h(x):\n    return [x.a + 2 for _ in x]", typed)
    assert len({text_of(typed[name], "it") for name in "fgh"}) == 3


def test_a_circle_ends_and_code_of_packages_counts_by_its_name():
    def fact(n):
        return n * fact(n - 1)

    assert text_of(fact, "it").count("def fact") == 1
    assert "def" not in text_of(np.clip, "it") and text_of(np.clip, "it") != text_of(np.sum, "it")


@pytest.mark.parametrize("held", [threading.Lock(), open(__file__), (each for each in "ab")])
def test_what_has_no_content_is_refused(held):
    with pytest.raises(ValueError, match=r"^it holds a value that cannot be compared .* resumed \(cannot pickle"):
        text_of(weighted(held), "it")
