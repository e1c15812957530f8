"""Hostile answers through the grader: what kills, hangs or fools it, in one batch with ordinary answers."""

import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

from tango_jax.grading import close_pool, grade_many
from torture.outcome import Outcome

BATCH = 150
GOLDS = ("7", "7", "7", "x=7", r"\frac{7}{3}", "(2,5)")  # of the hostile answers, most of which aim at 7


class Case(NamedTuple):
    """One answer, its gold answer, and what the grader must say."""

    answer: str
    gold: str
    is_right: bool


def hostile_answers(count: int = 300, seed: int = 0) -> Outcome:
    """Grade `count` hostile answers, which are all wrong, among as many ordinary ones, half of them right.

    An answer survives if it is graded as it should be; an exception loses its whole batch.
    """
    rng = random.Random(seed)
    makers = [maker for maker, share in HOSTILE for _ in range(share)]
    order = list(itertools.islice(itertools.cycle(rng.sample(makers, len(makers))), count))
    cases = [Case(maker(rng), rng.choice(GOLDS), False) for maker in order]
    cases += [ordinary(rng, is_right=index % 2 == 0) for index in range(count)]
    rng.shuffle(cases)
    failures = []
    try:
        for start in range(0, len(cases), BATCH):
            failures += grade_batch(cases[start : start + BATCH])
    finally:
        close_pool()
    return Outcome(len(cases), len(cases) - len(failures), failures)


def grade_batch(batch: list[Case]) -> list[str]:
    """Grade some cases together; a line for each that was graded otherwise than it should be."""
    texts = [f"<think><step>x</step></think><answer>\\boxed{{{case.answer}}}</answer>" for case in batch]
    try:
        report = grade_many(texts, [case.gold for case in batch])
    except Exception as error:  # whatever it is, it is what this looks for
        return [f"{type(error).__name__}: {error} in a batch with {shown(case)}" for case in batch]
    return [
        f"graded {'right' if correct else 'wrong'} ({failure or 'read'}): {shown(case)}"
        for case, correct, failure in zip(batch, report.correct, report.failures, strict=True)
        if correct is not case.is_right
    ]


def shown(case: Case) -> str:
    return f"{case.answer[:100]!r} for {case.gold!r}"


def ordinary(rng: random.Random, is_right: bool) -> Case:
    """An answer that the math library reads, as models write them; a wrong one is off by one."""
    n, d, off = rng.randrange(2, 90), rng.choice([3, 7, 11, 13]), 0 if is_right else 1
    form = rng.randrange(6)
    if form == 0:
        return Case(rf"\dfrac{{{2 * n}}}{{{2 * d}}}", rf"\frac{{{n + off}}}{{{d}}}", is_right)
    if form == 1:
        return Case(rf"x = {n}\text{{ cm}}", f"{n + off}", is_right)
    if form == 2:
        return Case(rf"{d} \text{{ and }} {n + 90}", f"{n + 90 + off}, {d}", is_right)
    if form == 3:
        return Case(rf"{n}x^2 + {d}x", f"x({n}x+{d + off})", is_right)
    if form == 4:
        return Case(rf"\left( {n}, \sqrt{{{d * d * 5}}} \right)", rf"({n + off}, {d}\sqrt{{5}})", is_right)
    return Case(rf"{n / 10} \times 10^{{4}}", f"{(n + off) * 1000}", is_right)


def _nested(rng: random.Random) -> str:
    pairs = [("{", "}"), ("(", ")"), (r"\frac{", "}{1}"), (r"\sqrt{", "}"), ("[", "]"), (r"\{", r"\}")]
    opening, closing = rng.choice(pairs)
    depth = rng.choice([10, 49, 51, 500, 20_000])
    return opening * depth + "8" + closing * depth


def _endless(rng: random.Random) -> str:
    n = rng.randrange(5, 10)
    return rng.choice([
        f"{n}^{{{n}^{{{n}^{{{n}}}}}}}", f"{n}^{n}^{n}^{n}", f"(10^{n})!", f"{n}00000!!", "((((1000!)!)!)!)!",
        rf"\binom{{10^{n}}}{{5 \cdot 10^{n - 1}}}", rf"\sqrt{{2^{{3^{{2{n}}}}}}}", rf"\sin(10^{{10^{{{n}}}}})",
        rf"\frac{{{n}^{{{n}^{{10}}}}}}{{{n}^{{{n}^{{10}}}} + 1}}",
    ])


def _unevaluated(rng: random.Random) -> str:
    n = rng.randrange(2, 9)
    return rng.choice([
        rf"\sum_{{k=1}}^{{\infty}} \frac{{{n}}}{{k^{{{n}}}}}", r"\sum_{k=1}^{7} 1", r"\int_0^7 1 \, dx",
        rf"\prod_{{k=1}}^{{10^{{{n}}}}} k", r"\lim_{x \to 7} x", r"\frac{d}{dx} 7x", r"\gcd(7, 14)", r"\max(7, 6)",
        r"\det \begin{pmatrix} 7 \end{pmatrix}", r"15 \bmod 8", r"\int_{-\infty}^{\infty} e^{-x^{2^{20}}} dx",
    ])


def _catastrophic(rng: random.Random) -> str:
    """Repetitions that patterns with two ways to match them need ages for."""
    piece = rng.choice([
        r"\text{a ", "a", " ", "8,", "8, ", r"\ ", "{,}", r",\!", r"\,", "(8", "|", r"\boxed{", "'", "{'", '"', "$",
        "$8$, ", r"\frac", "-", "!", "^", "_", "=", r"\text{a a} ", "~", r"\quad ", "0,000", "\t\n",
    ])
    return piece * (rng.choice([300, 990, 50_000]) // len(piece))


def _strange(rng: random.Random) -> str:
    """Control characters, lone surrogates, digits of other scripts, and what turns the writing direction round."""
    codes = [0, 1, 8, 27, 127, 0x661, 0x202E, 0xD800, 0xDFFF, 0xFEFF, 0xFF17, 0xFFFF, 0x1F642, 0x10FFFF]
    characters = [chr(code) for code in codes]
    return "".join(rng.choices(["8", "7", " ", *characters], k=rng.randrange(2, 30))) + rng.choice(characters)


def _huge(rng: random.Random) -> str:
    return rng.choice(["8", "7+", "x", "{", "8 ", "\x00", "é"]) * rng.choice([400_000, 1_000_000])


def _broken(rng: random.Random) -> str:
    """Tokens of LaTeX in any order, seldom an expression."""
    tokens = [
        r"\frac", "{", "}", r"\sqrt", "^", "_", "(", ")", r"\left(", r"\right)", "&", r"\\", r"\begin{cases}", "8",
        r"\end{cases}", "x", "=", r"\text{", r"\cup", r"\int", r"\infty", "%", "#", r"\pm", r"\in", r"\lim", ",",
        r"\mathbb{R}",
    ]
    return "8 " + "".join(rng.choices(tokens, k=rng.randrange(2, 25)))


# A stands for another number than 7.
EXPLOITS = (
    "x=A=7", "[7,7]", r"\{7,7,7\}", "7,7", r"7 \text{ apples and A pears}", "A=7", "7 or A", "7, A", r"\pm 7",
    r"7 \pm 0", r"7\text{ a} A \text{ b}", r"7\text{A}", r"A \fbox{7}", r"7 \approx A", "Ax=7", "x+A=7", "7 @ A",
    r"\{7\} \cup \{7\}", r"x \in [7,7]", r"7 \text{ (or A)}", "garbage( $7$", r"\phantom{A}7", "7_A", "7;A", "7α",
    r"7 \quad A", r"\min(7,1A)", r"7 \text{ or eight}", "7 and 7", r"A \Rightarrow 7", r"7 \\ A", r"7 \ldots A",
    r"\begin{cases} 7 \\ A \end{cases}", r"7 \le x \le 7", r"\frac{7}{3}, 7", "(2,5), 7",
    r"\frac{7}{3} \text{ or } 7", r"x = \frac{7}{3} = A", r"(2,5) \cup (5,2)", r"\frac{7}{3} = A", "-x=7",
    r"A \neq 7", r"7 \text{ not } A", "7 A", r"\text{A or } 7", r"x=7 \text{ or } x=A", "7 % A", r"7 \tag{A}",
)


def _exploit(rng: random.Random) -> str:
    """Forms that the math library alone equates with 7, and others that might be tried."""
    return rng.choice(EXPLOITS).replace("A", str(rng.choice([3, 5, 6, 8, 9])))


HOSTILE: tuple[tuple[Callable[[random.Random], str], int], ...] = (
    (_exploit, 8), (_broken, 4), (_nested, 2), (_endless, 2), (_unevaluated, 3), (_catastrophic, 4), (_strange, 3),
    (_huge, 1),
)

