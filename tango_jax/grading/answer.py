"""Compares an answer with its gold answer where the text alone decides."""
import ast
import re
import warnings
from decimal import Decimal

KINDS = ("math", "string", "python", "choice", "text")
MAX_CHARS = 1000
MAX_NESTING = 50

# East Asian keyboards write full-width characters. NFKC would also turn x² into x2. The wave of 3～5 is left out: it
# means a range, and `~` is a space in LaTeX.
_HALF_WIDTH = {ord("\u3000"): " "} | {code: code - ord("！") + ord("!") for code in range(ord("！"), ord("～"))}
_UNICODE_MATH = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "√": r"\sqrt ", "π": r"\pi ", "∞": r"\infty ",
    "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "∅": r"\emptyset ", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
})
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
_SUPERSCRIPT_RUN = re.compile(f"[{_SUPERSCRIPTS}]+")
_PLAIN_DIGITS = str.maketrans(_SUPERSCRIPTS, "0123456789")
_ROOT = re.compile(r"√\s*(\d+(?:\.\d+)?)")  # needs braces: `\sqrt12` would be read as the root of 1, times 2
# A comma or semicolon separates items, with or without spaces around it; `{,}` and `,\!` belong to groups of digits.
_BLANK = r"(?:\s|~|(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z]))*"
_SEPARATOR = re.compile(rf"{_BLANK}(?:(?<!\{{),(?!\\!)|,(?!\}}|\\!)|(?<!\\);)(?:;|{_BLANK[:-1]})*")
# `1{,}000`, `1,\!000`, `1\,000` and `1 000` are one number; `1, 000`, `1 00` and `1234 000` are not.
_DIGIT_GROUPS = re.compile(
    r"(?<!\d)\d{1,3}(?:(?:(?:\{,\}\s*|,(?=\\!))(?:\\!\s*)*|(?<!\\)\\[,;:! ]|~| )\d{3})+(?!\d)"
)
_QUAD = re.compile(r"\s*\\q?quad(?![a-zA-Z])(?:\s|\\q?quad(?![a-zA-Z]))*")
_SPACING = re.compile(r"(?<!\\)\\[;:!]|~")
_MATH_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_CURRENCY_WORD = re.compile(r"(?<=[\d}])\s*dollars?$")

_TEXT_COMMAND = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|operatorname|mbox|hbox|emph)\s*\{([^{}]*)\}"
)
_LOOKS = re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])")
_FRACTION_SIZE = re.compile(r"\\[dt]frac(?![a-zA-Z])")
_IDLE_BLANK = re.compile(r"(?<!\w)\s+|\s+(?!\w)")  # a space between two letters or digits may separate them
_LISTED_THOUSAND = re.compile(r",\s+\d{3}")  # `1, 200` is two numbers, `1,200` is one
_INTEGER = re.compile(r"[+-]?(?:[0-9]{1,300}|[0-9]{1,3}(?:,[0-9]{3})+)")
_OPTION = re.compile(r"\(?([a-z])[.):](?:\s.*)?", re.DOTALL)
_TYPEWRITER = re.compile(r"\\(?:text(?:tt|rm|bf)?|math(?:tt|rm))\{(.*)\}", re.DOTALL)
_ESCAPED = re.compile(r"\\([{}_#%&$])")
_SAME_CHOICE = {"yes": "true", "no": "false"}
_LITERAL_ERRORS = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


def number_text(value: float) -> str:
    """27 for 27.0, and 0.00001 for 1e-05. True and False remain words."""
    if not isinstance(value, float):
        return str(value)
    return str(int(value)) if value.is_integer() else format(Decimal(str(value)), "f")  # "f": without an exponent


def half_width(text: str) -> str:
    return text.translate(_HALF_WIDTH)


def matches_exactly(gold: str, answer: str) -> bool:
    """Equal up to surrounding whitespace. An empty answer matches nothing."""
    return answer.strip() == gold.strip() != ""


def matches_choice(gold: str, answer: str) -> bool:
    """Whether both choose one option letter or word, in any case and width: `(B)` and `B. 12`. Yes counts as True and
    No as False, because a question for one pair is often answered with the other."""
    gold_choice, choice = _choice(gold), _choice(answer)
    return choice == gold_choice != ""


def matches_python(gold: str, answer: str) -> bool:
    r"""Whether both are equal strings or Python literals under `==`, except that a bool never equals a number. An
    answer that is no literal is tried again without LaTeX: `\texttt{...}`, escaped braces, dollar signs."""
    if matches_exactly(gold, answer):
        return True
    if is_too_big(gold) or is_too_big(answer):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns about invalid escapes, which are common in model text
        try:
            gold_value = ast.literal_eval(gold.strip())
        except _LITERAL_ERRORS:
            return False
        for text in (answer.strip(), _without_latex(answer)):
            try:
                return _same_literal(gold_value, ast.literal_eval(text))
            except _LITERAL_ERRORS:
                continue
    return False


def is_too_big(text: str) -> bool:
    """Whether parsing is too risky."""
    if len(text) > MAX_CHARS:
        return True
    depth = 0
    for char in half_width(text):
        if char in "([{":
            depth += 1
            if depth > MAX_NESTING:
                return True
        elif char in ")]}":
            depth = max(0, depth - 1)
    return False


def quick_math_match(gold: str, answer: str) -> bool | None:
    """Compares tidied texts; None if the math library has to decide. Bare words are compared as strings, because the
    library multiplies their letters: anagrams would be equal."""
    if answer == "":
        return False
    if _squeeze(answer) == _squeeze(gold):
        return True
    gold_word, word = _bare_word(gold), _bare_word(answer)
    if gold_word and word:
        return gold_word == word
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
        return int(gold.replace(",", "")) == int(answer.replace(",", ""))
    return None


def tidy_math(text: str) -> str:
    """Plain LaTeX without delimiters, spaced digit groups and a final period; symbols and separators in one
    spelling."""
    text = half_width(text).strip()
    for opening, closing in _MATH_DELIMITERS:
        inner = text[len(opening) : -len(closing)]
        if text == opening + inner + closing and opening not in inner and closing not in inner:
            text = inner.strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    text = _SUPERSCRIPT_RUN.sub(lambda run: f"^{{{run.group().translate(_PLAIN_DIGITS)}}}", text)
    text = _ROOT.sub(r"\\sqrt{\1}", text).translate(_UNICODE_MATH).replace(r"\varnothing", r"\emptyset")
    text = _SEPARATOR.sub(lambda found: "," if found[0] == "," else ", ", text)
    text = _QUAD.sub(lambda gap: ", " if _is_separator(text, gap) else " ", text)
    text = _DIGIT_GROUPS.sub(lambda number: re.sub(r"\D", "", number[0]), text)
    text = _SPACING.sub(" ", text).replace(r"\degree", r"^\circ")
    return _CURRENCY_WORD.sub("", text).strip()


def _is_separator(text: str, gap: re.Match) -> bool:
    """Whether the quad space is between two items, not at an end, beside a comma or before a word."""
    before, after = text[: gap.start()], text[gap.end() :]
    return bool(before and after) and before[-1] != "," and not after.startswith((",", r"\text", r"\mbox", r"\mathrm"))


def _squeeze(text: str) -> str:
    if _LISTED_THOUSAND.search(text):
        return text
    return _IDLE_BLANK.sub("", _LOOKS.sub("", _FRACTION_SIZE.sub(r"\\frac", text)))


def _bare_word(text: str) -> str | None:
    """The letters of a text of words only, else None. Case matters only for a single letter."""
    text = _TEXT_COMMAND.sub(r"\1", text).strip("*`\"' ").removesuffix(".")
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    letters = "".join(text.split())
    if not letters.isalpha():
        return None
    return letters if len(letters) == 1 else letters.casefold()


def _without_latex(text: str) -> str:
    text = text.strip().strip("$`").strip()
    wrapped = _TYPEWRITER.fullmatch(text)
    return _ESCAPED.sub(r"\1", wrapped[1] if wrapped else text).strip()


def _choice(text: str) -> str:
    text = _TEXT_COMMAND.sub(r"\1", half_width(text)).strip().strip("$*`\"'").strip().casefold()
    option = _OPTION.fullmatch(text)
    choice = option.group(1) if option else text.removesuffix(".").strip("()").strip()
    return _SAME_CHOICE.get(choice, choice)


def _same_literal(left: object, right: object) -> bool:
    """`==`, with bool and int apart at any depth."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        items = list(right.items())
        return len(left) == len(right) and all(_takes_match(item, items) for item in left.items())
    if isinstance(left, (set, frozenset)) and isinstance(right, (set, frozenset)):
        elements = list(right)
        return len(left) == len(right) and all(_takes_match(element, elements) for element in left)
    if isinstance(left, (list, tuple)) and type(left) is type(right):
        return len(left) == len(right) and all(_same_literal(x, y) for x, y in zip(left, right, strict=True))
    return type(left) not in (list, tuple) and left == right


def _takes_match(element: object, candidates: list) -> bool:
    for index, candidate in enumerate(candidates):
        if _same_literal(element, candidate):
            del candidates[index]
            return True
    return False
