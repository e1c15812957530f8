"""A grading process: reads (gold, answer) pairs, writes correct, wrong, timeout or error.

The time limit is a signal, so the work stays in the main thread. It counts processor time, because a busy machine slows
ordinary answers by seconds.
"""
import logging
import os
import signal
import sys
from functools import lru_cache
from typing import Any, BinaryIO

from tango_jax.grading import wire
from tango_jax.grading.rules import Library, is_equal

MEMORY_LIMIT_BYTES = 4 << 30
RELATIVE = 1e-9  # irrational numbers that differ by no more than this share of the larger one are equal
# What sympy and the LaTeX grammar raise on unusual text. Any other exception ends the worker: an error, too.
LIBRARY_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NameError, RuntimeError, SyntaxError,
    TypeError, ValueError,
)


class TimeLimit(BaseException):
    """Not an Exception, because the math library swallows those."""


def grade_pair(library: Library, gold: str, answer: str, limit_s: int) -> dict[str, str]:
    """`limit_s` is processor time. A failure becomes a status, never a crash."""
    try:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            status = "correct" if is_equal(gold, answer, library) else "wrong"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except TimeLimit:
        return {"status": "timeout", "detail": f"over {limit_s} s"}
    except LIBRARY_ERRORS as error:
        return {"status": "error", "detail": f"{type(error).__name__}: {error}"[:300]}
    return {"status": status, "detail": ""}


def _claim_stdout() -> BinaryIO:
    """Keep stdout for answers; what libraries print is discarded."""
    replies = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return replies


def _send(replies: BinaryIO, message: dict[str, Any]) -> None:
    replies.write(wire.pack(message))
    replies.flush()


def _limit_memory() -> None:
    """A hostile power tower raises MemoryError here; it cannot kill the training."""
    import resource

    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    except (ValueError, OSError):
        return  # macOS rejects this limit; the deadline of the pool still applies


def _load_library() -> Library:
    """The first call builds the grammar. RuntimeError: the library loads but does not work."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its own time limits are off
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, verify
    from math_verify import parse as parse_text
    from sympy import Expr, Float, Interval, Tuple

    # Removal of units is off, because it would drop the variable of `6m`; `forms.py` has already removed the units.
    spelling = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    targets = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=spelling)]

    @lru_cache(maxsize=512)  # the same gold answer comes with every sample of its group
    def parse(latex: str) -> list:
        return parse_text(f"\\boxed{{{latex}}}", targets, parsing_timeout=None, raise_on_error=True)

    def is_same(gold: str, answer: str) -> bool:
        # The library's time limits are off: their alarm would cancel ours, which covers parsing and comparison.
        one, other = parse(gold), parse(answer)
        same = verify(one, other, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True)
        return same and ("%" in gold + answer or not (one and other and differ(one[0], other[0])))

    def differ(one: Any, other: Any) -> bool:
        """The library compares to 15 decimals, where small numbers are equal."""
        if isinstance(one, (Tuple, Interval)) and type(one) is type(other) and len(one.args) == len(other.args):
            return any(map(differ, one.args, other.args))
        both = (one, other)
        if not all(isinstance(each, Expr) and each.is_number and each.is_finite for each in both) or one == other:
            return False
        if any(each.has(Float) for each in both):
            return False
        difference = (one - other).doit()
        if difference.is_Rational:
            return difference != 0
        return bool(abs(difference.evalf()) > RELATIVE * max(abs(each.evalf()) for each in both))

    def is_near(exact: str, decimal: str, tolerance: float) -> bool:
        value = next(iter(parse(exact)), None)
        if not isinstance(value, Expr) or not value.is_number:
            return False
        value = value.evalf()
        # As Python floats, a huge value would be infinite, and near to everything.
        return bool(value.is_real) and bool(abs(value - Float(decimal)) <= tolerance * abs(value))

    if not is_same(r"\frac{1}{2}", "0.5"):
        raise RuntimeError("the math library does not find 1/2 equal to 0.5")
    return Library(is_same, is_near)


def _on_alarm(signum: int, frame: Any) -> None:
    raise TimeLimit


def main(limit_s: int, deadline_s: float) -> int:
    """Serves requests until standard input ends. Processor time: `limit_s` for a pair, and `deadline_s` until SIGVTALRM
    ends a worker stuck in C."""
    replies = _claim_stdout()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent, which then closes the pool
    signal.signal(signal.SIGPROF, _on_alarm)
    # The parent reports in one line why the library does not load.
    sys.excepthook = lambda kind, error, _: _send(replies, {"fatal": f"{kind.__name__}: {error}"[:300]})
    library = _load_library()
    sys.excepthook = sys.__excepthook__
    _limit_memory()
    _send(replies, {"ready": os.getpid()})
    while (message := wire.read_message(sys.stdin.buffer)) is not None:
        _send(replies, {"begun": message["id"]})
        signal.setitimer(signal.ITIMER_VIRTUAL, deadline_s)
        reply = grade_pair(library, message["gold"], message["answer"], limit_s)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        _send(replies, {"id": message["id"], **reply})
    return 0
