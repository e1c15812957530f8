"""SIGTERM and Ctrl-C: at once where nothing is to be saved, and once it is saved where something is."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import tango_jax
from support.paths import ROOT
from support.processes import HANG_S, finish, wait_for
from tango_jax.runtime.termination import PARENT_VARIABLE
from torture.terms import is_watching


def run_python(code: str) -> subprocess.CompletedProcess:
    """A process of its own that sends itself the signal; it loads no jax."""
    code = "import os, signal\nfrom tango_jax.runtime import termination\ntermination.watch()\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False,
                          timeout=HANG_S)


def test_nothing_here_imports_jax():
    done = run_python("import sys; print('jax' in sys.modules or 'numpy' in sys.modules)")
    assert done.stdout == "False\n"


def test_the_signal_ends_a_process_that_has_nothing_to_save():
    done = run_python("os.kill(os.getpid(), signal.SIGTERM)\nprint('goes on', flush=True)")
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr == "told to stop (SIGTERM), nothing was lost; run the same command again to resume\n"


def test_the_signal_is_held_back_until_all_is_saved():
    done = run_python("""
        termination.hold()
        os.kill(os.getpid(), signal.SIGTERM)
        print(termination.is_requested(), "saving", flush=True)
        termination.release()
        print("goes on", flush=True)
    """)
    assert (done.returncode, done.stdout) == (75, "True saving\n")
    assert done.stderr.splitlines() == [
        "told to stop (SIGTERM): will save and stop, at the latest after this step",
        "told to stop (SIGTERM), nothing was lost; run the same command again to resume",
    ]


def test_a_signal_that_is_held_back_says_once_when_it_will_end():
    done = run_python("""
        termination.hold()
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(0)
    """)
    assert done.stderr.splitlines() == [
        "told to stop (SIGTERM): will save and stop, at the latest after this step",
        "interrupted: will save and stop, at the latest after this step; press Ctrl-C again to stop without saving",
    ]


def test_one_process_of_several_speaks():
    done = run_python("""
        termination.watch(is_silent=True)
        termination.hold()
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        print(termination.is_requested())
        os._exit(0)
    """)
    assert done.stderr == ""


def test_ctrl_c_is_an_exception_where_nothing_is_to_be_saved():
    done = run_python("""
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            print("interrupted", termination.is_requested())
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted False\n", "")


def test_ctrl_c_waits_until_all_is_saved():
    done = run_python("""
        termination.hold()
        os.kill(os.getpid(), signal.SIGINT)
        print(termination.is_requested(), termination.is_interrupted(), flush=True)
        try:
            termination.release()
        except KeyboardInterrupt:
            print("saved")
    """)
    assert (done.returncode, done.stdout) == (0, "True True\nsaved\n")
    assert done.stderr == (
        "interrupted: will save and stop, at the latest after this step; press Ctrl-C again to stop without saving\n")


def test_a_second_ctrl_c_waits_for_nothing():
    done = run_python("""
        termination.hold()
        os.kill(os.getpid(), signal.SIGINT)
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            print("at once")
    """)
    assert (done.returncode, done.stdout) == (0, "at once\n")


def test_sigterm_after_ctrl_c_counts():
    done = run_python("""
        termination.hold()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        print(termination.is_interrupted(), flush=True)
        termination.release()
    """)
    assert (done.returncode, done.stdout) == (75, "False\n")


def test_ctrl_c_during_the_imports_ends_with_one_line():
    done = run_python("termination.watch(is_starting=True)\nos.kill(os.getpid(), signal.SIGINT)\nprint(1, flush=True)")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "interrupted before anything was done; run the same command again\n"


def test_ctrl_c_is_left_to_whoever_has_it():
    done = run_python("""
        handler = signal.getsignal(signal.SIGINT)
        termination.leave_interrupts()
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, end=" ")
        for other in (signal.SIG_IGN, print):
            signal.signal(signal.SIGINT, other)
            termination.watch()
            termination.leave_interrupts()
            print(signal.getsignal(signal.SIGINT) is other, end=" ")
    """)
    assert done.stdout == "True True True "


def test_a_library_that_takes_the_signal_loses_it_again():
    done = run_python("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        termination.watch()
        os.kill(os.getpid(), signal.SIGTERM)
    """)
    assert done.returncode == 75


@pytest.mark.parametrize("first, arguments, expected", [
    ("-m", ["python", "-m", "tango_jax.train", "--config=x"], True),
    ("-m", ["python", "-mtango_jax.evaluate"], True),
    ("-m", ["python", "-m", "tango_jax.sample"], False),  # nothing to go on with: the signal ends it as any program
    ("-m", ["python", "-m", "tango_jax.grading.worker"], False),
    ("pytest", ["python", "-m", "pytest", "tango_jax.train"], False),
    ("/opt/bin/tango-train", ["python", "/opt/bin/tango-train", "--config=tiny"], True),
    ("/opt/bin/tango-sample", ["python", "/opt/bin/tango-sample"], False),
    # A worker that multiprocessing spawned from tango-train.
    ("/opt/bin/tango-train", ["python", "-c", "spawn_main(3)", "--multiprocessing-fork"], False),
])
def test_commands_are_watched_from_the_first_line(monkeypatch, first, arguments, expected):
    monkeypatch.setattr(sys, "argv", [first])
    monkeypatch.setattr(sys, "orig_argv", arguments)
    assert tango_jax.is_resumable_command() == expected


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_command_that_is_still_importing_ends_at_once(tmp_path, command):
    flags = {"train": ["--config=configs/tiny.py"], "evaluate": ["--checkpoint=x", "--sets=gsm8k"]}[command]
    process = subprocess.Popen([sys.executable, "-m", f"tango_jax.{command}", *flags, f"--workdir={tmp_path / 'run'}"],
                               cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: is_watching(process.pid), "SIGTERM is caught", process)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.code == 75 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_run_that_compiles_ends_at_once(tiny_train, tmp_path):
    """Nothing has been done since the last save, so nothing is waited for."""
    start = [f"{role}.{setting}" for role in ("generator", "verifier") for setting in (
        "sft.steps=0", "row_buckets=(4,8)", "cache_buckets=(16,)")]
    # Without a cache the warm-up takes many times as long as the wait, on any machine.
    process = tiny_train.start(tmp_path / "run", *start, "compile_cache=")
    for line in process.stdout:
        if line.startswith("a verifier prompt"):  # the last line before the warm-up
            break
    time.sleep(0.5)  # into it; had it come less far, nothing would be left to save either
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.code == 75, done.stderr
    assert "Traceback" not in done.stderr and "Stage 2" not in done.stdout
    assert not (tmp_path / "run/metrics.jsonl").exists()


# ------------------------------------------------------------------------------------------ a command's workers


CHILD = """
import os, time
from tango_jax.runtime import termination
termination.watch()
termination.end_with_parent()
assert termination.PARENT_VARIABLE not in os.environ
print(os.getpid(), flush=True)
time.sleep(1000)
"""
PARENT = """
import os, subprocess, sys, time
environment = os.environ | {%r: str(os.getpid())}
subprocess.Popen([sys.executable, "-c", %r], env=environment, stderr=open(sys.argv[1], "w"))
time.sleep(1000)
"""


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_ends_when_its_parent_is_killed(tmp_path):
    program = PARENT % (PARENT_VARIABLE, CHILD)
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "stderr")], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    assert is_alive(child)
    parent.kill()
    parent.wait()
    wait_for(lambda: not is_alive(child), "the end of the child")
    assert (tmp_path / "stderr").read_text().startswith("told to stop (SIGTERM)")


def test_a_process_that_nobody_else_started_goes_on():
    """Without the variable there is nothing to end with."""
    environment = {name: value for name, value in os.environ.items() if name != PARENT_VARIABLE}
    process = subprocess.Popen([sys.executable, "-c", CHILD], env=environment, stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        time.sleep(1.5)  # longer than it would take to notice
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 75
    finally:
        process.kill()
