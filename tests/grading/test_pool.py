"""The grader's worker processes: lost, stopped, endless and missing workers, threads, and scripts without a guard."""
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import tango_jax
from support.processes import HANG_S, wait_for
from tango_jax.grading import check_grader, close_pool, grade_many
from tango_jax.grading.pool import Reply, WorkerPool
from tango_jax.grading.rules import Library
from tango_jax.grading.worker import _on_alarm, grade_pair

HALF = (r"\frac{1}{2}", "0.5")  # equal only to a reader of mathematics
TOWER = r"9^{9^{9^{9}}}"  # never ends
pytestmark = pytest.mark.usefixtures("closed_pool")


@pytest.fixture
def make_pool():
    pools = []

    def make(**settings) -> WorkerPool:
        pools.append(WorkerPool(**settings))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def pids_of(pool: WorkerPool) -> list[int]:
    """The running workers' process ids."""
    return [worker.process.pid for worker in pool._workers]


def run_in_thread(pool: WorkerPool, pairs: list) -> tuple[threading.Thread, list]:
    replies: list = []
    thread = threading.Thread(target=lambda: replies.extend(pool.run(pairs)))
    thread.start()
    return thread, replies


def test_a_worker_killed_between_batches_is_replaced(make_pool):
    pool = make_pool(size=2)
    assert [reply.status for reply in pool.run([HALF, ("1", "2")])] == ["correct", "wrong"]
    before = pids_of(pool)
    assert len(before) == 2
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert [reply.status for reply in pool.run([HALF, ("1", "2")])] == ["correct", "wrong"]
    assert not set(before) & set(pids_of(pool))


def test_a_pair_whose_worker_is_killed_is_tried_again(make_pool):
    pool = make_pool(size=1, limit_s=50, deadline_s=60.0)
    pool.run([HALF])
    pid = pids_of(pool)[0]
    os.kill(pid, signal.SIGSTOP)  # it takes the pair and does not answer
    thread, replies = run_in_thread(pool, [HALF, ("1", "2")])
    wait_for(lambda: [worker.pair for worker in pool._workers] == [0], "it has the pair")
    os.kill(pid, signal.SIGKILL)
    thread.join()
    assert [reply.status for reply in replies] == ["correct", "wrong"]
    assert pids_of(pool) != [pid]


@pytest.mark.parametrize("number, reply", [
    (signal.SIGKILL, Reply("error", "worker died with exit code -9", is_final=False)),
    (signal.SIGVTALRM, Reply("timeout", "over 60.0 s", is_final=False)),  # what the system sends at the deadline
])
def test_a_pair_that_loses_two_workers_is_a_failure_of_the_grader(make_pool, number, reply):
    pool = make_pool(size=1, limit_s=50, deadline_s=60.0)
    pool.run([HALF])
    thread, replies = run_in_thread(pool, [(TOWER, "7"), HALF])
    killed = set()
    while thread.is_alive():  # a kill before the worker has read the pair does not count as a try
        for worker in list(pool._workers):
            if worker.pair == 0 and worker.process.pid not in killed:
                os.kill(worker.process.pid, number)
                killed.add(worker.process.pid)
        time.sleep(0.02)
    thread.join()
    assert replies == [reply, Reply("correct")]


def test_a_worker_that_does_not_run_is_killed_and_its_pair_is_not_held_against_the_answer(make_pool, monkeypatch):
    pool = make_pool(size=1)
    pool.run([("1", "2")])
    pid = pids_of(pool)[0]
    os.kill(pid, signal.SIGSTOP)
    start = pool._start_process

    def start_patiently() -> subprocess.Popen:
        pool._stall_s = HANG_S  # the new worker may be as slow as the machine
        return start()

    monkeypatch.setattr(pool, "_stall_s", 0.1)
    monkeypatch.setattr(pool, "_start_process", start_patiently)
    assert [reply.status for reply in pool.run([HALF, HALF])] == ["correct", "correct"]
    assert pids_of(pool) != [pid]


def test_an_endless_pair_is_tried_again_after_the_others_and_the_clock_is_no_limit(make_pool, monkeypatch):
    begun, accept = [], WorkerPool._accept
    monkeypatch.setattr(
        WorkerPool, "_accept", lambda pool, worker, message, batch:
        (begun.append(message["begun"]) if "begun" in message else None, accept(pool, worker, message, batch)),
    )
    pool = make_pool(size=1, limit_s=1, deadline_s=1.5)
    replies = pool.run([(r"\frac{7}{3}", TOWER), HALF])
    assert replies == [Reply("timeout", "over 1 s", is_final=False), Reply("correct")]
    assert begun == [0, 1, 0]


def test_modules_of_the_working_folder_do_not_reach_the_workers(tmp_path):
    (tmp_path / "other").mkdir()  # as an entry of PYTHONPATH
    for name in ("random", "json", "logging", "signal", "sitecustomize", "other/random"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a file of the user shadows a module')")
    code = (
        "import sys\n"
        f"sys.path[:0] = ['', {str(tmp_path)!r}, {str(tmp_path / 'other')!r}]\n"
        "from tango_jax.grading.pool import WorkerPool\n"
        "pool = WorkerPool(size=1)\n"
        f"print(pool.run([{HALF}])[0].status)\n"
        "pool.close()"
    )
    # The program itself loads its modules first, from a safe path; only its workers start later.
    code = "import json, logging, random, signal, subprocess, selectors\n" + code
    env = {**os.environ, "PYTHONPATH": str(Path(tango_jax.__file__).parents[1]), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("correct\n", "")


def test_time_in_which_a_worker_does_not_run_does_not_count():
    previous = signal.signal(signal.SIGPROF, _on_alarm)
    try:
        replies = {
            name: grade_pair(Library(is_same, is_near=None), r"\sqrt{2}", r"\sqrt{3}", limit_s=1)["status"]
            for name, is_same in (
                ("slow", lambda gold, answer: time.sleep(1.3) is None),
                ("endless", lambda gold, answer: all(True for _ in iter(int, 1))),
            )
        }
    finally:
        signal.signal(signal.SIGPROF, previous)
    assert replies == {"slow": "correct", "endless": "timeout"}


def test_close_ends_the_workers_and_a_later_batch_starts_new_ones(make_pool):
    pool = make_pool(size=1)
    pool.run([HALF])
    pid = pids_of(pool)[0]
    pool.close()
    assert pids_of(pool) == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert pool.run([HALF])[0].status == "correct"


@pytest.mark.parametrize("module, code, message", [
    ("math_verify", "raise ImportError('no grammar')", "ImportError: no grammar; pip install 'math-verify"),
    ("math_verify", "raise Exception('Could not\\ndeserialize')", "Exception: Could not deserialize; pip install"),
    ("antlr4", "VERSION = '4.9'", "ImportError: .*antlr4.*; pip install"),
    ("math_verify", "raise SystemExit(3)", "3 workers in a row .* exit code 3"),
])
def test_workers_that_cannot_start_are_one_clear_line(monkeypatch, tmp_path, capfd, module, code, message):
    close_pool()
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=f"the math grader cannot start: .*{message}") as caught:
        check_grader("math")
    assert "\n" not in str(caught.value) and capfd.readouterr().err == ""
    check_grader("string")
    close_pool()


def test_a_library_that_is_wrong_about_one_half_is_found(monkeypatch, tmp_path):
    close_pool()
    (tmp_path / "math_verify.py").write_text(
        "class LatexExtractionConfig:\n    def __init__(self, **settings): pass\n"
        "def parse(*args, **settings): return []\ndef verify(*args, **settings): return False\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="does not find 1/2 equal to 0.5"):
        check_grader("math")
    monkeypatch.undo()
    check_grader("math")
    close_pool()


def test_threads_share_the_pool():
    results = {}

    def work(number: int) -> None:
        texts = [rf"<answer>\boxed{{\frac{{{number}}}{{{k}}}}}</answer>" for k in range(1, 9)]
        results[number] = grade_many(texts, [f"{number}/4"] * 8).correct

    threads = [threading.Thread(target=work, args=(number,)) for number in (3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    only_the_fourth = tuple(k == 4 for k in range(1, 9))
    assert results == {3: only_the_fourth, 5: only_the_fourth, 7: only_the_fourth}


def test_imports_stay_light():
    code = (
        "import sys, tango_jax.grading, tango_jax.grading.worker\n"
        "loaded = {'jax', 'sympy', 'math_verify', 'numpy'} & set(sys.modules)\n"
        "print(sorted(loaded))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_a_script_without_main_guard_can_grade(tmp_path):
    (tmp_path / "random.py").write_text("raise RuntimeError('a file of the user shadows a module')")
    script = "from tango_jax.grading import grade\nprint(grade(r'<answer>\\boxed{\\frac12}</answer>', '0.5'))\n"
    # From standard input and from another folder: nothing a fresh interpreter could import again.
    env = {**os.environ, "PYTHONPATH": str(Path(tango_jax.__file__).parents[1]), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-"], input=script, cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
