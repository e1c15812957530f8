r"""Whether an answer has a form that may be compared with its gold answer: two LaTeX texts in, True or False out.

Stage of the loop: grading, kind "math", in the worker processes. The math library alone is too lenient to give rewards:
it drops text that it cannot read and takes the last member of a chain, so that a policy that is rewarded for it learns
to write `x=8=7` or `7 \text{ apples and 8 pears}`. Here an answer is read into its parts, and the library compares
single values, relations and matrices only. The rules, where "the gold has one" always permits the same to the answer:

1. One answer, one candidate. Items are separated by `,`, `;`, `\quad`, "and" and "or" (words, `\text`, `\land`,
   `\lor`), and `\pm` makes two of one. An answer has as many items as its gold answer, repetitions included: for 7
   none of `7,7`, `7 or 8`, `\{7,7\}`, `[7,7]`, `(7,7)`, `\pm 7`. Brackets around one item, `(7)` or `\{7\}`, change
   nothing.
2. Lists without brackets and sets have no order; tuples and intervals have. A list or set may stand for a tuple or an
   open interval, and a list in any brackets for a list. Else brackets must be the same: `[1,2)` is not `[1,2]`.
3. Thousands are groups of three digits after 1 to 3 digits, separated by `{,}`, `,\!`, a blank or a thin space (see
   `tidy_math`) or by commas with no blank. Directly inside brackets such a comma separates items, unless a group
   begins with 0: `(5,120)` is a pair, `(5,020)` a number. A comma with a blank always separates items.
4. One relation. An answer may begin with a label and `=` or `\in`: letters, symbols and words without a digit outside
   of indices and arguments, and no sign in front (`x=`, `f(2)=`, `AB+BC=`, `\text{Area}=`; not `8=`, `8x=`, `-x=`).
   Chains (`x=8=7`), inequalities and equations without a label need a gold answer of that kind; an inequality may
   also stand for an interval or union, and the other way round. Labels that differ leave the decision to the library
   (x=5 is not y=5). `\sqrt{2} \approx 1.41` is its first member, if the second, a decimal number, is within 1 %.
5. Units do not count: words without a digit behind a number, in `\text` or from a list of common units, with a power,
   and currency signs. No "and", "or", "not" or number word may be among them, and no other text in the answer.
   `7\%` and `50\%` equal 7 and 0.5, as the library has it, and degrees equal their number.
6. Variables are those of the gold answer (and e and i). A letter too much is no unit, except a common one (m, s, g, h,
   l) directly behind a plain number where the gold answer has no letters.
7. Commands are those of ordinary expressions: fractions, roots, powers, logarithms, trigonometry, binomials, rounding
   brackets. Sums, products over an index, integrals, limits, derivatives, gcd, max, min, mod and determinants restate
   the question, `\phantom`, `\boxed`, `\tag` and the like hide something, `\cup`, `\infty`, `\mathbb` belong to sets.
8. Characters beyond letters, digits and ordinary signs are refused, which the library would drop: `7 @ 8`, `7α`. So are
   two numbers with only a blank between them, a percent sign with anything behind it, and an empty item.
9. A base is part of the number: 52_8 is not 52_9. Without one the base of the gold answer is meant; 7_{10} is 7.
10. Two decimal numbers are equal to a relative 1e-6; the library rounds to six decimals, whatever the size.
"""
import itertools
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import NamedTuple

from tango_jax.grading.forms import RELATION, Form, is_number, outer_relations, plain, read, split

CLOSENESS = Decimal("1e-6")
APPROXIMATION = 0.01


class Library(NamedTuple):
    """What the math library decides."""

    is_same: Callable[[str, str], bool]  # (gold, answer): equal values, relations or matrices
    is_near: Callable[[str, str, float], bool]  # (exact, decimal, tolerance): equal numbers up to a relative tolerance


def is_equal(gold: str, answer: str, library: Library) -> bool:
    """Whether the two tidied texts are equal under the rules above. Raises what the library raises."""
    gold, answer = plain(gold), plain(answer)
    gold_form, form = read(gold), read(answer, may_be_unit=not _letters(gold))
    if gold_form is None or form is None:
        return False
    return _Comparison(gold, answer, library).is_equal(gold_form, form)


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
_CONSTANTS = frozenset("ei")
_BASED = re.compile(r"([0-9A-Z]+)_\{?(\d+)\}?")
_SCIENTIFIC = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))\s*(?:\\times|\\cdot)\s*10\^\{?([+-]?\d{1,3})\}?")


class _Comparison(NamedTuple):
    gold: str  # the plain texts as a whole
    answer: str
    library: Library

    def is_equal(self, gold: Form, form: Form) -> bool:
        if not gold.label and form.label and outer_relations(gold.text):
            form = Form(_whole(form))
        if gold.label and form.label:
            is_other = not _TEXT.fullmatch(form.label) and _squeezed(gold.label) != _squeezed(form.label)
            if is_other:
                return not gold.items and not form.items and self._ask_relation(gold, form)
        elif gold.label and not gold.items and _letters(gold.text) and outer_relations(form.text) == ["="]:
            return self._ask_relation(gold, form)
        if not gold.items and not form.items:
            return self._is_value(gold.text, form.text)
        if len(gold.items) == len(form.items) and self._are_items(gold, form):
            return True
        return self._is_rewritten_set(gold, form)

    def _are_items(self, gold: Form, form: Form) -> bool:
        kinds = (gold.brackets, form.brackets)
        if set(kinds) <= {",", "{}"} or kinds in ((",", "()"), (",", "[]"), ("u", "u")):
            return self._match(gold.items, form.items)
        if kinds == ("u", ","):
            return all(map(_is_order, form.items)) and self._match(gold.items, form.items)
        is_ordered = kinds[0] == kinds[1] != "u" or kinds in (("()", ","), ("()", "{}"), ("{}", "()"))
        return is_ordered and all(itertools.starmap(self.is_equal, zip(gold.items, form.items, strict=True)))

    def _match(self, golds: Sequence[Form], forms: Sequence[Form]) -> bool:
        """Whether every gold item finds one of its own among the answer's, in any order."""
        left = list(forms)
        for gold in sorted(golds, key=lambda one: all(_squeezed(one.text) != _squeezed(form.text) for form in forms)):
            ranked = sorted(left, key=lambda form: _squeezed(form.text) != _squeezed(gold.text))
            found = next((form for form in ranked if self.is_equal(gold, form)), None)
            if found is None:
                return False
            left.remove(found)
        return True

    def _is_rewritten_set(self, gold: Form, form: Form) -> bool:
        """Whether the answer writes the gold set in another way: as a solved inequality, or with set operations."""
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
        numbers = _number(gold), _number(text)
        if None not in numbers and abs(numbers[0] - numbers[1]) > CLOSENESS * abs(numbers[0]):
            return False
        based = _BASED.fullmatch(gold), _BASED.fullmatch(text)
        if based[1]:
            return based[1].groups() == based[0].groups() if based[0] else based[1][2] == "10" and based[1][1] == gold
        if based[0]:
            return text == based[0][1]
        relations, gold_relations = outer_relations(text), outer_relations(gold)
        if relations == [r"\approx"] and not gold_relations:
            return self._is_approximation(gold, text)
        if len(relations) != len(gold_relations):
            return self._is_rewritten_set(Form(gold), Form(text))
        if _is_solved(Form(gold)) and not _is_solved(Form(text)):
            return False
        return self._may_be_read(gold, text, bool(relations)) and self.library.is_same(gold, text)

    def _is_approximation(self, gold: str, text: str) -> bool:
        exact, decimal = (part.strip() for part in text.split(r"\approx"))
        if not is_number(decimal) or not self._may_be_read(gold, exact, False):
            return False
        return self._is_value(gold, exact) and self.library.is_near(exact, decimal, APPROXIMATION)

    def _may_be_read(self, gold: str, text: str, is_relation: bool) -> bool:
        """Rules 6 to 8, of a value or a whole text that the library will read."""
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


def _whole(form: Form) -> str:
    """The text that was read, label included."""
    if not form.label:
        return form.text
    return form.text if form.items else f"{form.label}={form.text}"


def _is_order(form: Form) -> bool:
    return not form.items and bool(_ORDER.search(form.text))


def _is_solved(form: Form) -> bool:
    """Whether it is an inequality between one variable and numbers: `x < 2`, `1 \\le x < 2`; not `3x + 1 < 7`."""
    if not _is_order(form):
        return False
    members = [member.strip() for member in RELATION.split(form.text)]
    names = [member for member in members if _letters(member) - _CONSTANTS]
    return len(names) == 1 and len(members) <= 3 and bool(_NAME.fullmatch(names[0]))


def _is_set(text: str) -> bool:
    """Whether it is a set of numbers, which set operations may write: an interval, an inequality, a union."""
    return bool(_ORDER.search(text) or re.search(r"\\(?:cup|cap|infty|mathbb|emptyset|in)(?![a-zA-Z])", text)) or (
        text[:1] in "[(" and text[-1:] in "])" and len(split(text[1:-1], ",") or ()) == 2
    )


def _letters(text: str) -> frozenset[str]:
    """The variables: letters, and Greek ones as commands."""
    text = _TEXT.sub(" ", text)
    greek = re.findall(
        r"\\(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|chi|psi"
        r"|omega)(?![a-zA-Z])", text, re.IGNORECASE)  # fmt: skip
    return frozenset(greek) | {char for char in _COMMAND.sub(" ", text) if char.isalpha()}


def _number(text: str) -> Decimal | None:
    """The value of a decimal number, or of one times a power of ten."""
    scientific = _SCIENTIFIC.fullmatch(text)
    if scientific:
        return Decimal(scientific[1]).scaleb(int(scientific[2]))
    return Decimal(text) if is_number(text) else None


def _squeezed(text: str) -> str:
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", text)
