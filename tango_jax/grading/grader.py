"""Grading of responses. The process has one worker pool and one cache, created for the first answer that needs them."""
import atexit
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tango_jax.grading import answer as compare
from tango_jax.grading.free_text import matches_text
from tango_jax.grading.pool import WorkerPool
from tango_jax.grading.steps import last_boxed, parse_solution

MAX_CACHED = 1 << 16
FAILURES = ("errors", "timeouts", "overlong")  # counts in a GradeReport: answers graded wrong without being compared
TEXT_FORMATS = ("tagged", "boxed")  # where the answer is: see `answer_of`


@dataclass(frozen=True)
class GradeReport:
    """Grades of a batch, with counts of the texts (all graded wrong) on which the grader failed, not the model."""

    correct: tuple[bool, ...]
    errors: int  # the math library raised, or its worker died twice
    timeouts: int  # over the time limit of one answer, twice
    overlong: int  # over 1,000 characters or nested deeper than 50
    failures: tuple[str, ...] = field(default=(), compare=False)  # one per text: empty, error, timeout or overlong


def grade(text: str, gold: str, kind: str = "math") -> bool:
    """Whether the boxed answer of a response equals the gold answer.

    Kinds: "math" (equal expressions), "string" (characters), "python" (literals), "choice" (option), "text" (words or
    numbers, see `free_text.py`). ValueError: an unknown kind, or a gold answer that is no number or non-empty string.
    RuntimeError: workers cannot start.
    """
    return grade_many([text], [gold], kind).correct[0]


def grade_many(
    texts: Sequence[str], golds: Sequence[str], kind: str = "math", text_format: str = "tagged"
) -> GradeReport:
    """Grade a batch; equal (gold, answer) pairs are compared once. See `grade` for kinds and errors."""
    if len(texts) != len(golds):
        raise ValueError(f"grading: {len(texts)} texts but {len(golds)} gold answers; pass one gold answer per text")
    if kind not in compare.KINDS:
        raise ValueError(f"grading: unknown kind {kind!r}; use one of {', '.join(compare.KINDS)}")
    pairs = [_pair(text, gold, text_format) for text, gold in zip(texts, golds, strict=True)]
    if kind == "math":
        statuses = _shared_grader().statuses([pair for pair in pairs if pair is not None])
    else:
        is_match = {"string": compare.matches_exactly, "python": compare.matches_python,
                    "choice": compare.matches_choice, "text": matches_text}[kind]
        statuses = ["correct" if is_match(*pair) else "wrong" for pair in pairs if pair is not None]
    found = iter(statuses)
    per_text = ["wrong" if pair is None else next(found) for pair in pairs]
    counts = Counter(per_text)
    return GradeReport(
        correct=tuple(status == "correct" for status in per_text),
        errors=counts["error"],
        timeouts=counts["timeout"],
        overlong=counts["overlong"],
        failures=tuple(status if status in ("error", "timeout", "overlong") else "" for status in per_text),
    )


def check_grader(kind: str) -> None:
    """ValueError: this machine cannot grade this kind. For "math", a worker loads the library: a few seconds."""
    if kind != "math":
        return
    try:
        report = grade_many([r"<answer>\boxed{0.5}</answer>"], [r"\frac{1}{2}"])
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if not report.correct[0]:
        raise ValueError(
            "the math grader does not work: it did not find 0.5 equal to 1/2; pip install 'math-verify[antlr4_13_2]'"
        )


def close_pool() -> None:
    """Stops the workers and clears the cache. The next math answer starts new workers."""
    global _shared
    with _shared_lock:
        grader, _shared = _shared, None
    # A forked child inherits this object but not the processes, which only the parent may end.
    if grader is not None and grader.owner == os.getpid():
        grader.pool.close()


class MathGrader:
    """Grades pairs from their text if that decides, else with the pool. Final results are cached."""

    def __init__(self, pool: WorkerPool):
        self.pool = pool
        self.owner = os.getpid()
        self._cache: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._lock = threading.Lock()

    def statuses(self, pairs: Sequence[tuple[str, str]]) -> list[str]:
        """correct, wrong, error, timeout or overlong for each (gold, answer) pair."""
        known: dict[tuple[str, str], str] = {}
        asked: dict[tuple[str, str], tuple[str, str]] = {}  # the pair as written -> the pair as tidied for the library
        for pair in dict.fromkeys(pairs):
            status = self._recall(pair) or _quick_status(*pair)
            if status is None:
                asked[pair] = (compare.tidy_math(pair[0]), compare.tidy_math(pair[1]))
            else:
                known[pair] = status
        questions = list(dict.fromkeys(asked.values()))
        replies = dict(zip(questions, self.pool.run(questions), strict=True)) if questions else {}
        for pair, question in asked.items():
            known[pair] = replies[question].status
            if replies[question].is_final:
                self._remember(pair, known[pair])
        return [known[pair] for pair in pairs]

    def _recall(self, pair: tuple[str, str]) -> str | None:
        with self._lock:
            if pair in self._cache:
                self._cache.move_to_end(pair)
            return self._cache.get(pair)

    def _remember(self, pair: tuple[str, str], status: str) -> None:
        with self._lock:
            self._cache[pair] = status
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)


def answer_of(text: str, text_format: str = "tagged") -> str | None:
    """The last box of the first <answer> block ("tagged", as in training) or of the whole text ("boxed"), or None.
    ValueError: an unknown format."""
    if text_format not in TEXT_FORMATS:
        raise ValueError(f"grading: unknown text format {text_format!r}; use one of {', '.join(TEXT_FORMATS)}")
    return last_boxed(text) if text_format == "boxed" else parse_solution(text).answer


def _pair(text: str, gold: str, text_format: str) -> tuple[str, str] | None:
    if isinstance(gold, (bool, int, float)):  # JSON numbers, and True or False
        gold = compare.number_text(gold)
    if not isinstance(gold, str) or not gold.strip():
        raise ValueError(f"grading: the gold answer is {gold!r}; it must be a non-empty string or a number")
    answer = answer_of(text, text_format)
    return None if answer is None else (gold, answer)


def _quick_status(gold: str, answer: str) -> str | None:
    """None if the text alone does not decide. An exact match counts at any length."""
    if compare.matches_exactly(gold, answer):
        return "correct"
    if compare.is_too_big(gold) or compare.is_too_big(answer):
        return "overlong"
    is_match = compare.quick_math_match(compare.tidy_math(gold), compare.tidy_math(answer))
    return None if is_match is None else "correct" if is_match else "wrong"


_shared: MathGrader | None = None
_shared_lock = threading.Lock()


def _shared_grader() -> MathGrader:
    global _shared
    with _shared_lock:
        if _shared is None or _shared.owner != os.getpid():
            _shared = MathGrader(WorkerPool())
            atexit.register(close_pool)
        return _shared
