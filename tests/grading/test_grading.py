"""The grader: equality of answers by kind, its counters and its cache."""
import json
import os
import resource
import signal
import threading

import pytest

from support.paths import FIXTURES
from tango_jax.grading import GradeReport, grade, grade_many, grader
from tango_jax.grading.answer import is_too_big, matches_choice, matches_python, quick_math_match, tidy_math
from tango_jax.grading.pool import MAX_TRIES, Reply, WorkerPool

CASES = [json.loads(line) for line in (FIXTURES / "grading.jsonl").open(encoding="utf-8")]
HALF = (r"\frac{1}{2}", "0.5")  # equal only to a reader of mathematics
TOWER = r"9^{9^{9^{9}}}"  # never ends
START_ALLOWANCE_S = 20.0  # of processor time, for the workers that replace killed ones


def worker_seconds() -> float:
    """Processor time of all worker processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def response(answer: str) -> str:
    return rf"<think><step>We compute.</step></think><answer>\boxed{{{answer}}}</answer>"


pytestmark = pytest.mark.usefixtures("closed_pool")


# ------------------------------------------------------------------------------------------------------ equality


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['category']}: {case['answer']} = {case['gold']}")
def test_math(case):
    assert grade(response(case["answer"]), case["gold"]) is case["correct"]


def test_the_cases_grade_alike_in_one_batch_and_without_failures():
    report = grade_many([response(case["answer"]) for case in CASES], [case["gold"] for case in CASES])
    assert report == GradeReport(tuple(case["correct"] for case in CASES), errors=0, timeouts=0, overlong=0)


def test_only_the_last_box_of_the_first_answer_block_counts():
    assert not grade(r"<step>So \boxed{3}.</step><answer>\boxed{4}</answer>", "3")
    assert grade(r"<answer>\boxed{3} or rather \boxed{4}</answer><answer>\boxed{3}</answer>", "4")
    assert not grade(r"\boxed{3}", "3")
    assert not grade(r"<answer>3</answer>", "3")


@pytest.mark.parametrize("answer, gold, correct", [
    (r"1-\frac{1}{2005!}", r"1-\frac{1}{2006!}", False), (r"\frac{1}{3^{100}}", r"\frac{1}{2^{100}}", False),
    ("10^{-18}", "10^{-17}", False), ("-e^{-60}", "e^{-40}", False), ("(0,10^{-30})", "(0,10^{-20})", False),
    (r"2^{-100}", r"\frac{1}{2^{100}}", True), (r"\frac{1}{e^{40}}", "e^{-40}", True),
    (r"1+\sqrt{2}", r"\sqrt{3+2\sqrt{2}}", True), (r"\frac{2006!-1}{2006!}", r"1-\frac{1}{2006!}", True),
])
def test_exact_numbers_are_compared_in_proportion(answer, gold, correct):
    """Not to fifteen decimal places, to which all small numbers are equal."""
    assert grade(response(answer), gold, "math") is correct


@pytest.mark.parametrize("answer, gold, correct", [
    ("abc", "abc", True), (" abc ", "abc", True), ("ABC", "abc", False), ("cba", "abc", False),
    (r"\text{abc}", "abc", False), ("0.5", "0.50", False), ("", "abc", False),
])
def test_string_is_exact(answer, gold, correct):
    assert grade(response(answer), gold, "string") is correct


@pytest.mark.parametrize("answer, gold, correct", [
    ("B", "B", True), ("b", "B", True), ("(B)", "B", True), ("B.", "B", True), ("B) 12 apples", "B", True),
    (r"\text{B}", "B", True), (r"\textbf{(B)}", "(B)", True), ("C", "B", False), ("A or B", "B", False),
    ("true", "True", True), (r"\text{True}.", "True", True), ("False", "True", False), ("uncertain", "Uncertain", True),
    ("A dog", "A", False), ("", "A", False), ("()", "A", False), ("Yes", "True", True), (r"\text{no.}", "False", True),
    ("yes", "False", False), ("（Ｂ）", "B", True), ("Ｃ", "B", False),
])
def test_choice(answer, gold, correct):
    assert matches_choice(gold, answer) is correct
    assert grade(response(answer), gold, "choice") is correct


@pytest.mark.parametrize("answer, gold, correct", [
    ("[(4, 1), (2,3)]", "[(4,1),(2,3)]", True), ("{1: None, 2: 'a'}", "{2: 'a', 1: None}", True),
    ('"ab"', "'ab'", True), ("{2, 1}", "{1, 2}", True), ("-1", "- 1", True), ("1", "1.0", True),
    ("[1, [2]]", "[1, [2.0]]", True), ("b'a'", "'a'", False),
    ("True", "1", False), ("[0, 1]", "[0, True]", False), ("{1: 'a'}", "{True: 'a'}", False), ("{0}", "{False}", False),
    ("(1, 2)", "[1, 2]", False), ("[1, 2]", "[2, 1]", False), ("[1]", "[1, 1]", False), ("'1'", "1", False),
    ("ab", "ab", True), ("ab", "'ab'", False), ("[1,", "[1]", False), ("__import__('os')", "1", False),
    (r"\{1: None\}", "{1: None}", True), (r"\texttt{[1, {2}]}", "[1,{2}]", True), (r"\text{True}", "True", True),
    (r"\text{True}", "1", False), ("`'a'`", "'a'", True), (r"'a\_b'", "'a_b'", False),
    (r"\{1: None", "{1: None}", False),
    ("'Ａ'", "'A'", False), ("{[]}", "1", False), ("'a\x00'", "1", False), (r"'\d'", r"'\\d'", True), ("", "''", False),
])
def test_python_literals(answer, gold, correct):
    assert matches_python(gold, answer) is correct


@pytest.mark.parametrize("answer, gold, correct", [
    ("the Netherlands", "Netherlands", True), (r"\text{New York}.", "new  york", True), ('"Ada"', "Ada", True),
    ("1200", "1,200.0", True), ("12%", "12.0", True), (r"12\%", "12 %", True), (r"\$5", "5", True), ("−3", "-3", True),
    ("Ada, Bly", "ada,bly", True), ("[Ada; Bly]", "Ada, Bly", True), ("1, 200", "1,200", False),
    ("1,200, 5", "1200,5", True),
    ("Bly, Ada", "Ada, Bly", False), ("Ada", "Ada, Bly", False), ("12", "13", False), ("12 km", "12", False),
    ("York", "New York", False), ("", "a", False), (",", ",", False), ("1.5e3", "1500", False), ("2²", "22", False),
    ("１２％", "12", True), ("Ａｄａ，Ｂｌｙ", "Ada, Bly", True), ("Ａｄａ　Ｂｌｙ", "Ada Bly", True),
])
def test_free_text(answer, gold, correct):
    assert grade(response(answer), gold, "text") is correct


def test_python_answers_with_braces_pass_the_box():
    assert grade(response("{1: {2: 3}}"), "{1:{2:3}}", "python")
    assert not grade(response("[" * 60 + "]" * 60), "[]", "python")


@pytest.mark.parametrize("text, tidy", [
    ("$5$", "5"), ("$$5$$", "5"), ("$1$ and $2$", "$1$ and $2$"), ("5.", "5"), ("1{,}234{,}567", "1234567"),
    (r"1\,000", "1000"), ("1, 200", "1, 200"), ("x²³", "x^{23}"), ("√12", r"\sqrt{12}"), ("2π", r"2\pi"), ("", ""),
    ("$", "$"), ("＄１２．５＄", "12.5"), ("x²＋１", "x^{2}+1"), ("3～5", "3～5"),
])
def test_tidy_math(text, tidy):
    assert tidy_math(text) == tidy


@pytest.mark.parametrize("answer, gold, match", [
    (r"\left( 1 , \dfrac{1}{2} \right)", r"(1,\frac{1}{2})", True), ("x^2 + 1", "x^2+1", True), ("", "", False),
    ("1, 200", "1,200", None), (r"\pi x", r"\pix", None), ("1 2", "12", None), (r"\leftarrow", "arrow", None),
    ("034", "34", True), ("1,000", "1000", True), ("33", "34", False), ("evil", "live", False), ("x", "5", None),
])
def test_what_text_alone_decides(answer, gold, match):
    assert quick_math_match(gold, answer) is match


# ------------------------------------------------------------------------------------------------------ counters


def test_overlong_answers_are_wrong_and_counted_but_exact_ones_are_right():
    long_gold = "+".join(["x"] * 600)
    texts = [response("1" * 1001), response("{" * 51 + "5" + "}" * 51), response(long_gold), response("5")]
    report = grade_many(texts, ["5", "5", long_gold, "5"])
    assert report == GradeReport((False, False, True, True), errors=0, timeouts=0, overlong=2)
    assert not is_too_big("{" * 50 + "}" * 50)
    assert not is_too_big("()" * 500)


def test_a_library_error_is_counted_each_time_it_occurs():
    golds = [r"\frac{1}{0}", r"\frac{1}{0}", "1"]  # the library refuses to compare an infinity
    report = grade_many([response("1")] * 3, golds)
    assert report == GradeReport((False, False, True), errors=2, timeouts=0, overlong=0)


def test_an_endless_answer_is_a_timeout_and_the_rest_is_graded(monkeypatch):
    pool = WorkerPool(size=1, limit_s=1, deadline_s=3.0)
    monkeypatch.setattr(grader, "_shared", grader.MathGrader(pool))
    texts = [response(TOWER), response("0.5"), response("0.5"), response("{" * 10_000 + "}" * 10_000)]
    golds = [r"\frac{7}{3}", HALF[0], r"\frac{1}{3}", "5"]
    expected = GradeReport((False, True, False, False), errors=0, timeouts=1, overlong=1)
    assert grade_many(texts, golds) == expected
    assert grade_many(texts, golds).failures == ("timeout", "", "", "overlong")
    pool.close()
    asked = []
    monkeypatch.setattr(pool, "run", lambda pairs: asked.extend(pairs) or [Reply("wrong")] * len(pairs))
    assert grade_many(texts, golds).timeouts == 0
    assert asked == [(golds[0], TOWER)]  # all but the timeout is remembered


@pytest.mark.long
def test_ten_hostile_answers_delay_a_batch_by_their_deadlines_only(monkeypatch):
    """Endless, huge and deeply nested answers, and one whose workers are killed from outside, among forty good ones."""
    limit_s, deadline_s, size = 1, 3.0, 2
    pool = WorkerPool(size, limit_s, deadline_s)
    monkeypatch.setattr(grader, "_shared", grader.MathGrader(pool))
    assert grade_many([response("0.5")], [HALF[0]]).correct == (True,)
    endless = [TOWER, r"10^{10^{10^{10}}}", r"\binom{10^9}{5 \cdot 10^8}", "100000!!"]
    nested = ["{" * depth + "5" + "}" * depth for depth in (51, 100, 1000, 10_000)]
    hostile = [*endless, *nested, "9^9^9^9", TOWER + "+1"]  # the last one's workers are killed
    answers = [f"{k}/7" for k in range(40)] + hostile
    golds = [rf"\frac{{{k}}}{{7}}" for k in range(40)] + [r"\frac{7}{3}"] * 10
    asked, killed, is_over, run = [], set(), threading.Event(), pool.run
    monkeypatch.setattr(pool, "run", lambda pairs: asked.extend(pairs) or run(pairs))

    def kill_workers() -> None:
        while not is_over.wait(0.01):
            for worker in list(pool._workers):
                pair, pid = worker.pair, worker.process.pid
                if pair is not None and asked[pair][1] == hostile[-1] and pid not in killed:
                    killed.add(pid)
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_workers)
    killer.start()
    used = worker_seconds()
    report = grade_many([response(answer) for answer in answers], golds)
    is_over.set()
    killer.join()
    pool.close()
    assert report.correct == (True,) * 40 + (False,) * 10
    assert (report.errors, report.timeouts, report.overlong) == (1, len(endless), len(nested))
    assert len(killed) >= MAX_TRIES
    assert worker_seconds() - used < len(hostile) * MAX_TRIES * deadline_s + START_ALLOWANCE_S


def test_equal_pairs_are_asked_once(monkeypatch):
    asked = []

    class CountingPool:
        def run(self, pairs):
            asked.extend(pairs)
            return [Reply("correct")] * len(pairs)

    monkeypatch.setattr(grader, "_shared", grader.MathGrader(CountingPool()))
    report = grade_many([response("x+1"), response("x+1"), response(" x+1. "), response("x+2")], ["1+x"] * 4)
    assert report.correct == (True, True, True, True)
    assert asked == [("1+x", "x+1"), ("1+x", "x+2")]


def test_a_lost_worker_is_not_remembered_against_the_answer(monkeypatch):
    replies = [Reply("error", "worker died", is_final=False), Reply("correct")]

    class LossyPool:
        def run(self, pairs):
            return [replies.pop(0)]

    monkeypatch.setattr(grader, "_shared", grader.MathGrader(LossyPool()))
    assert grade_many([response("x+1")], ["1+x"]) == GradeReport((False,), errors=1, timeouts=0, overlong=0)
    assert grade_many([response("x+1")], ["1+x"]) == GradeReport((True,), errors=0, timeouts=0, overlong=0)


@pytest.mark.parametrize("kind", ["string", "python", "choice", "text"])
def test_other_kinds_never_touch_the_pool(monkeypatch, kind):
    monkeypatch.setattr(grader, "_shared_grader", None)
    assert grade_many([response("a"), response("b"), "none"], ["a"] * 3, kind).correct == (True, False, False)


def test_wrong_calls_say_what_to_change():
    with pytest.raises(ValueError, match="2 texts but 1 gold"):
        grade_many(["a", "b"], ["a"])
    with pytest.raises(ValueError, match="unknown kind 'maths'; use one of math, string, python, choice, text"):
        grade("a", "a", "maths")
    with pytest.raises(ValueError, match="the gold answer is ' '"):
        grade("a", " ")
    with pytest.raises(ValueError, match="limit_s=5, deadline_s=5"):
        WorkerPool(limit_s=5, deadline_s=5)
    with pytest.raises(ValueError, match="limit_s=0.5"):
        WorkerPool(limit_s=0.5)


def test_gold_numbers_are_accepted():
    assert grade(response("27"), 27.0)
    assert grade(response("0.00001"), 1e-05) and grade(response("10000000000000000"), 1e16)
    assert grade(response("0.00001"), 1e-05, "string") and not grade(response("0.00002"), 1e-05)
    assert grade(response("True"), True, "choice")
