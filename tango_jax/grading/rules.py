r"""Rules for the form of an answer, applied before the math library compares it with its gold answer.

The library alone is too lenient for a reward: it drops what it cannot parse and takes the last member of a chain, so a
policy learns to write `x=8=7` or `7 \text{ apples and 8 pears}`. Here an answer is parsed into parts, and the library
compares only single values, relations and matrices. Whatever the gold answer contains is allowed in the answer.

1. One answer has one candidate. `,`, `;`, `\quad`, "and" and "or" (words, `\text`, `\land`, `\lor`) separate items, and
   `\pm` makes two. The numbers of items must be equal: for 7, `7,7`, `7 or 8`, `\{7,7\}`, `[7,7]` and `\pm 7` are
   wrong. Brackets around one item change nothing.
2. Lists without brackets and sets are unordered; tuples and intervals are ordered. A list or set may stand for a tuple
   or an open interval, and a list in any brackets for a list. Other brackets must be equal: `[1,2)` is not `[1,2]`.
   Labels tell items apart: `x=3, y=4` equals `y=4, x=3` and `(3,4)`, but not `4,3`. `(x,y)=(3,4)` is `x=3, y=4`.
3. Groups of thousands are separated by `{,}`, `,\!`, a space, a thin space, or a comma without a space. Directly inside
   brackets such a comma separates items, unless a group begins with 0: `(5,120)` is a pair, `(5,020)` a number. A comma
   with a space separates items. `3e5` and `3E5` are numbers, except within an expression.
4. There is at most one relation. A label before `=` or `\in` has letters, symbols and words, no digit outside of
   indices and arguments, and no leading sign (`f(2)=`, `AB+BC=`, `\text{Area}=`; not `8=`, `8x=`, `-x=`). A gold answer
   is an equation, without a label, if its left side is a sum in x, y or z (`x^2+y^2=4`), or a power or sum with
   letters on the right (`y^2=8x`). Chains, inequalities and equations need a gold answer of the same kind; inequalities
   and intervals or unions may stand for each other. If labels differ, the library decides, but y may stand for f(x).
   `\sqrt{2} \approx 1.41` counts as its first member if the decimal is within 1 %.
5. Units are ignored: currency signs, and words after a number in `\text` or from a list, perhaps with a power; not
   "and", "or", "not" or a number word. `50\%` equals 50 and 0.5; degrees equal their number.
6. Variables are those of the gold answer, e and i. An extra letter is no unit, except m, s, g, h or l directly after a
   plain number when the gold answer has no letters.
7. Only ordinary commands are allowed: fractions, roots, powers, logarithms, trigonometry, binomials, rounding brackets.
   Sums, integrals, limits, gcd, max, mod and the like restate the question; `\phantom`, `\boxed` and `\tag` hide text.
   `\cup`, `\infty` and `\mathbb` are for sets.
8. Characters that the library would drop are rejected (`7 @ 8`, `7α`), and so are two numbers separated by a space
   alone, anything after a percent sign, and an empty item.
9. A base is part of the number: 52_8 is not 52_9. A number without one has the base of the gold answer; 7_{10} is 7.
10. Decimal numbers must agree to a relative 1e-6: the library rounds to six decimals at any magnitude. A decimal and an
   exact number without unknowns must agree to 2e-6, so that 0.333333 is a third.
11. Gold answers such as `4:30` (no spaces, 00 to 59) are times of day, and `2020-01-05` is a date. They are compared as
   text, except for a leading zero of the hour. "a.m." and "p.m." must be equal. `3:2` and `16 : 10` are ratios. `4:25`
   could be both and counts as a time; the fraction `4/25` is right, too.
12. A repeating decimal is its fraction: `0.1\overline{6}` equals `\frac16`. The reverse is wrong.
13. An option's letter may precede a value, as in `\textbf{(C)}\ 12`, if the gold answer has no such letter.
"""
import itertools
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import NamedTuple

from tango_jax.grading.forms import RELATION, Form, outer_relations, plain, read, split
from tango_jax.grading.notation import (
    clock,
    is_date,
    is_number,
    is_own_ratio,
    is_same_time,
    number_of,
    with_fractions,
    with_power_of_ten,
)

CLOSENESS, CLOSENESS_TO_EXACT = Decimal("1e-6"), 2e-6
APPROXIMATION = 0.01


class Library(NamedTuple):
    """The comparisons that the math library makes."""

    is_same: Callable[[str, str], bool]  # (gold, answer): equal values, relations or matrices
    is_near: Callable[[str, str, float], bool]  # (exact, decimal, tolerance): equal numbers up to a relative tolerance


def is_equal(gold: str, answer: str, library: Library) -> bool:
    """Whether two tidied texts are equal under the rules above. Exceptions of the library propagate."""
    gold, answer = plain(gold), plain(answer)
    if not _OPTION.match(gold):
        answer = _OPTION.sub("", answer)
    if r"\overline" not in gold:
        answer = with_fractions(answer)
    gold_form, form = read(gold), read(answer, may_be_unit=not _letters(gold))
    if gold_form is None or form is None:
        return False
    return _Comparison(gold, answer, library).is_equal(_with_equations(gold_form), form)


# -------------------------------------------------------------------------------------------------------- comparing

_COMMAND = re.compile(r"\\(?:begin|end)\s*\{[^{}]*\}|\\(?:[a-zA-Z]+|.)", re.DOTALL)
_ALLOWED = frozenset(
    r"""\frac \sqrt \cdot \times \div \pi \binom \% \{ \} \circ \degree \log \ln \lg \exp \sin \cos \tan \cot \sec \csc
    \arcsin \arccos \arctan \sinh \cosh \tanh \lfloor \rfloor \lceil \rceil \vert""".split()
)
_SET_COMMANDS = frozenset(r"\cup \cap \setminus \infty \mathbb \emptyset \in \backslash".split())
_MATRICES = frozenset(rf"\{edge}{{{kind}matrix}}" for edge in ("begin", "end") for kind in ("p", "b", ""))
_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 +-*/^_()[]{}|.!%\\=<>,")
_ORDER = re.compile(r"<|>|\\(?:le|ge)(?![a-zA-Z])")
_NAME = re.compile(r"(?:[a-zA-Z]|\\[a-zA-Z]+)(?:_(?:\{[^{}]*\}|\w))?(?:\([a-zA-Z]\))?")
_TEXT = re.compile(r"\\text\s*\{[^{}]*\}")
_INDEX_OR_CALL = re.compile(r"_(?:\{[^{}]*\}|\\?\w)|\\?[a-zA-Z]+(?:\^\{?-1\}?)?\([^()]*\)")
_FUNCTION_OF_X = re.compile(r"y|[a-zA-Z](?:\^\{?-1\}?)?\(x\)")
_POWER_OR_SUM, _COORDINATE = re.compile(r"\^\{?\d|.[+-]"), re.compile(r"(?<![a-zA-Z\\])[xyz](?![a-zA-Z])")
_OPTION = re.compile(r"\\text\s*\{\s*\([A-E]\)\s*\}\s*(?=\S)")
_CONSTANTS = frozenset("ei")
_BASED = re.compile(r"([0-9A-Z]+)_\{?(\d+)\}?")


class _Comparison(NamedTuple):
    gold: str  # the two whole texts, after `plain`
    answer: str
    library: Library

    def is_equal(self, gold: Form, form: Form) -> bool:
        if not gold.label and form.label and form.brackets != "u" and outer_relations(gold.text):
            form = Form(_whole(form))  # the gold answer is a relation, so the label belongs to the answer's relation
        if gold.label and form.label:
            if not _TEXT.fullmatch(form.label) and not _is_same_label(gold.label, form.label):
                return not gold.items and not form.items and self._ask_relation(gold, form)
        elif gold.label and not gold.items and _letters(gold.text) and outer_relations(form.text) == ["="]:
            return self._ask_relation(gold, form)
        if not gold.items and not form.items:
            return self._is_value(gold.text, form.text)
        if len(gold.items) == len(form.items) and self._are_items(gold, form):
            return True
        return self._is_rewritten_set(gold, form)

    def _are_items(self, gold: Form, form: Form) -> bool:
        # Rule 2: lists, sets and unions match in any order; tuples and intervals match item by item.
        kinds = (gold.brackets, form.brackets)
        if set(kinds) <= {",", "{}"} or kinds in ((",", "()"), (",", "[]"), ("u", "u")):
            return self._match(gold.items, form.items)
        if kinds in (("u", ","), (",", "u")):
            listed, union = (form, gold) if kinds[1] == "," else (gold, form)
            # Inequalities that together hold everywhere, `x > 1, x < 3`, are meant to hold at once.
            is_union = all(map(_is_order, listed.items)) and self._match(gold.items, form.items)
            return is_union and not self.library.is_same(union.text, r"(-\infty,\infty)")
        is_ordered = kinds[0] == kinds[1] != "u" or kinds in (("()", ","), ("()", "{}"), ("{}", "()"))
        return is_ordered and all(itertools.starmap(self.is_equal, zip(gold.items, form.items, strict=True)))

    def _match(self, golds: Sequence[Form], forms: Sequence[Form]) -> bool:
        return all(itertools.starmap(self._match_group, _groups(golds, forms)))

    def _match_group(self, golds: Sequence[Form], forms: Sequence[Form]) -> bool:
        left = list(forms)
        for gold in sorted(golds, key=lambda one: all(_squeezed(one.text) != _squeezed(form.text) for form in forms)):
            ranked = sorted(left, key=lambda form: _squeezed(form.text) != _squeezed(gold.text))
            found = next((form for form in ranked if self.is_equal(gold, form)), None)
            if found is None:
                return False
            left.remove(found)
        return True

    def _is_rewritten_set(self, gold: Form, form: Form) -> bool:
        """Whether the answer is the gold set as a solved inequality or with set operations."""
        is_range, is_gold_range = _is_solved(form), _is_solved(gold)
        if not (_is_set(gold.text) and (is_range or _is_set(form.text))):
            return False
        if not (is_range or is_gold_range or re.search(r"\\(?:cup|cap|setminus|mathbb)", gold.text + form.text)):
            return False
        return self._may_be_read(gold.text, form.text, True) and self.library.is_same(gold.text, form.text)

    def _ask_relation(self, gold: Form, form: Form) -> bool:
        gold_text, text = _whole(gold), _whole(form)
        return self._may_be_read(gold_text, text, True) and self.library.is_same(gold_text, text)

    def _is_value(self, gold: str, text: str) -> bool:
        if _squeezed(gold) == _squeezed(text):
            return True
        if gold.endswith("%") != text.endswith("%"):
            bare, other = (re.sub(r"\\?%$", "", part).strip() for part in (gold, text))
            if bare and other and self._is_value(bare, other):
                return True
        if clock(gold):
            return is_same_time(gold, _squeezed(text)) or is_own_ratio(gold, _squeezed(text))
        if is_date(gold):
            return False  # the library would subtract
        numbers = number_of(gold), number_of(text)
        if None not in numbers and abs(numbers[0] - numbers[1]) > CLOSENESS * abs(numbers[0]):
            return False
        based = _BASED.fullmatch(gold), _BASED.fullmatch(text)
        if based[1]:
            return based[1].groups() == based[0].groups() if based[0] else based[1][2] == "10" and based[1][1] == gold
        if based[0]:
            return text == based[0][1]
        gold, text = with_power_of_ten(gold), with_power_of_ten(text)
        relations, gold_relations = outer_relations(text), outer_relations(gold)
        if relations == [r"\approx"] and not gold_relations:
            return self._is_approximation(gold, text)
        if len(relations) != len(gold_relations):
            return self._is_rewritten_set(Form(gold), Form(text))
        if relations == gold_relations == [r"\ne"]:
            # The library cannot compare two of these, so their sides are compared.
            sides, gold_sides = ([side.strip() for side in split(part, r"\ne")] for part in (text, gold))
            return any(all(map(self._is_value, gold_sides, order)) for order in (sides, sides[::-1]))
        if _is_solved(Form(gold)) and not _is_solved(Form(text)):
            return False
        if not self._may_be_read(gold, text, bool(relations)):
            return False
        if (numbers[0] is None) != (numbers[1] is None):
            exact, number = (text, numbers[0]) if numbers[1] is None else (gold, numbers[1])
            decimal = format(number, "f")
            if "." in decimal and "%" not in exact and not _letters(exact) - _CONSTANTS:
                return self.library.is_near(exact, decimal, CLOSENESS_TO_EXACT)
        return self.library.is_same(gold, text)

    def _is_approximation(self, gold: str, text: str) -> bool:
        exact, decimal = (part.strip() for part in text.split(r"\approx"))
        if not is_number(decimal) or not self._may_be_read(gold, exact, False):
            return False
        return self._is_value(gold, exact) and self.library.is_near(exact, decimal, APPROXIMATION)

    def _may_be_read(self, gold: str, text: str, is_relation: bool) -> bool:
        """Whether rules 6 to 8 let the text be parsed."""
        allowed = _ALLOWED | set(_COMMAND.findall(gold))
        if _is_set(gold):
            allowed |= _SET_COMMANDS
        if is_relation:
            allowed |= {r"\le", r"\ge"}
        if _MATRICES & allowed:
            allowed |= _MATRICES | {r"\\"}
        commands = set(_COMMAND.findall(text))
        letters = _letters(text) - _letters(gold) - _CONSTANTS
        return (
            set(text) <= _CHARACTERS | set(gold)
            and (commands - letters) <= allowed
            and (not letters or (is_relation and not _letters(gold) and len(letters) == 1))
            and set(_TEXT.findall(text)) <= set(_TEXT.findall(gold))
            and not re.search(r"\d \d|\d\s*_|%\s*[^\s)}\]]|\(\s*\)", text.replace(r"\%", "%"))
            and text.count("|") % 2 == 0
        )


def _with_equations(gold: Form) -> Form:
    """Rule 4: where the left side is no label (`x^2 + y^2 = 4`), the whole equation is the answer."""
    if gold.items:
        return gold._replace(items=tuple(map(_with_equations, gold.items)))
    label = _INDEX_OR_CALL.sub("", gold.label)
    has_sum = re.search(r".\s*[+-]", label) and _COORDINATE.search(label)
    is_equation = has_sum or (_POWER_OR_SUM.search(label) and _letters(label) and _letters(gold.text) - _CONSTANTS)
    return Form(_whole(gold)) if is_equation else gold


def _groups(golds: Sequence[Form], forms: Sequence[Form]) -> list[tuple[list[Form], list[Form]]]:
    """Rule 2: items by label, if gold items have different ones. Items without such a label get those left over."""
    names = [_squeezed(gold.label) for gold in golds]
    if len(set(names) - {""}) < 2:
        return [(list(golds), list(forms))]
    left, given = list(names), [_squeezed(form.label) for form in forms]
    for index, name in enumerate(given):
        if name and name in left:
            left.remove(name)
        else:
            given[index] = ""
    groups: dict[str, tuple[list[Form], list[Form]]] = {name: ([], []) for name in names}
    for name, gold in zip(names, golds, strict=True):
        groups[name][0].append(gold)
    for name, form in zip(given, forms, strict=True):
        groups[name or left.pop(0)][1].append(form)
    return list(groups.values())


def _whole(form: Form) -> str:
    if not form.label:
        return form.text
    return form.text if form.items else f"{form.label}={form.text}"


def _is_same_label(gold: str, label: str) -> bool:
    """`y` names any function of x, such as `f(x)` or `f^{-1}(x)`."""
    gold, label = _squeezed(gold), _squeezed(label)
    return gold == label or ("y" in (gold, label) and all(map(_FUNCTION_OF_X.fullmatch, (gold, label))))


def _is_order(form: Form) -> bool:
    return not form.items and bool(_ORDER.search(form.text))


def _is_solved(form: Form) -> bool:
    r"""An inequality of one variable and numbers: `x < 2`, `1 \le x < 2`; not `3x + 1 < 7`."""
    if not _is_order(form):
        return False
    members = [member.strip() for member in RELATION.split(form.text)]
    names = [member for member in members if _letters(member) - _CONSTANTS]
    return len(names) == 1 and len(members) <= 3 and bool(_NAME.fullmatch(names[0]))


def _is_set(text: str) -> bool:
    return bool(_ORDER.search(text) or re.search(r"\\(?:cup|cap|infty|mathbb|emptyset|in)(?![a-zA-Z])", text)) or (
        text[:1] in "[(" and text[-1:] in "])" and len(split(text[1:-1], ",") or ()) == 2
    )


def _letters(text: str) -> frozenset[str]:
    text = _TEXT.sub(" ", text)
    greek = re.findall(
        r"\\(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|psi"
        r"|omega)(?![a-zA-Z])", text, re.IGNORECASE)
    return frozenset(greek) | {char for char in _COMMAND.sub(" ", text) if char.isalpha()}


def _squeezed(text: str) -> str:
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", text)
