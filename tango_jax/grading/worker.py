r"""One grading process: (gold, answer) pairs in on standard input, correct/wrong/timeout/error out on standard output.

Stage of the loop: grading, behind `pool.py`, which starts it through `worker_start.py`. It is a fresh interpreter that
never loads jax. The time limit is a signal, so the work stays in the main thread. It counts the worker's own processor
time: on a busy machine an ordinary answer takes seconds on the clock, and must not be lost.
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
# What sympy and the LaTeX grammar raise on strange text. Anything else ends the worker, which the pool counts too.
LIBRARY_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NameError, RuntimeError, SyntaxError,
    TypeError, ValueError,
)  # fmt: skip


class TimeLimit(BaseException):
    """The time limit of one pair passed. Not an Exception: the math library swallows those."""


def grade_pair(library: Library, gold: str, answer: str, limit_s: int) -> dict[str, str]:
    """The reply for one pair. A failure of the library or the interpreter is a status, never a crash."""
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
    """The real standard output for replies alone. What libraries print, about model text for the most part, is lost."""
    replies = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return replies


def _send(replies: BinaryIO, message: dict[str, Any]) -> None:
    replies.write(wire.pack(message))
    replies.flush()


def _limit_memory() -> None:
    """A hostile power tower ends in MemoryError here, not in the death of the training process next door."""
    import resource

    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    except (ValueError, OSError):
        return  # macOS refuses this limit; the deadline of the pool still holds


def _load_library() -> Library:
    """The math library, warmed up: the first call builds the grammar. It raises whatever a broken installation raises,
    and RuntimeError where it loads and does not work."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, verify
    from math_verify import parse as parse_text

    # Units are off: it would drop the variable of `6m`. Those that may be dropped are gone by then.
    spelling = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    targets = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=spelling)]

    @lru_cache(maxsize=512)  # the gold answer comes back with every sample of its group
    def parse(latex: str) -> list:
        return parse_text(f"\\boxed{{{latex}}}", targets, parsing_timeout=None, raise_on_error=True)

    def is_same(gold: str, answer: str) -> bool:
        # Limits of its own are off: their alarm would cancel ours, which covers both parses and the comparison.
        return verify(
            parse(gold), parse(answer), allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True
        )

    def is_near(exact: str, decimal: str, tolerance: float) -> bool:
        value = parse(exact)[0].evalf()
        return bool(value.is_real) and abs(float(value) - float(decimal)) <= tolerance * abs(float(value))

    if not is_same(r"\frac{1}{2}", "0.5"):
        raise RuntimeError("it does not find 1/2 equal to 0.5")
    return Library(is_same, is_near)


def _on_alarm(signum: int, frame: Any) -> None:
    raise TimeLimit


def main(limit_s: int, deadline_s: float) -> int:
    """Serve until standard input ends. `limit_s`, `deadline_s`: seconds of processor time of one pair; at the first the
    worker gives the pair up, at the second, stuck in C code, it is ended by the system with SIGVTALRM."""
    replies = _claim_stdout()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the pool
    signal.signal(signal.SIGPROF, _on_alarm)
    # The parent says in one line why the library does not load, be it missing or the antlr of another release.
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
