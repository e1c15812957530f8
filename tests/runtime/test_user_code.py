"""Functions that users name in settings: found, run as they are on disk, and every error in one line."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from support.paths import ROOT
from support.processes import HANG_S
from tango_jax.runtime.user_code import load_function, run_file, source_digest


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def own(tmp_path, text: str, name: str = "f", parameters: tuple[str, ...] = ("x",)):
    (tmp_path / "own.py").write_text(text)
    return load_function("a.key", f"own.py:{name}", parameters)


def refused(call, *args, **kwargs) -> str:
    with pytest.raises(ValueError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_function_of_a_file_and_of_a_module(tmp_path):
    assert own(tmp_path, "def f(x):\n    return x + 1\n").call(2) == 3
    (tmp_path / "own_module_of_the_test.py").write_text("def f(x):\n    return x + 2\n")
    assert load_function("a.key", "own_module_of_the_test:f", ("x",)).call(2) == 4
    assert load_function("a.key", "math:sqrt", ("x",)).call(4) == 2.0
    with pytest.raises(ValueError, match=r"^a\.key=math:sqrt: math: math domain error$"):
        load_function("a.key", "math:sqrt", ("x",)).call(-1)


MISTAKES = {
    "no colon": ("own", "must be FILE.py:name or package.module:name"),
    "no function named": ("own.py:", "must be FILE.py:name or package.module:name"),
    "no file": ("none.py:f", "there is no file none.py; write FILE.py:function"),
    "a folder": ("folder.py:f", "there is no file folder.py"),
    "no module": ("nothing_of_that_name:f", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
    "no such function": ("own.py:g", "own.py has no function 'g'"),
    "not a function": ("own.py:number", "own.py has no function 'number'"),
    "other parameters": ("own.py:two", "own.py, line 4: missing a required argument: 'y'; it is called as two(x)"),
    "syntax": ("syntax.py:f", "syntax.py, line 2: SyntaxError: '(' was never closed"),
    "an error at the top": ("top.py:f", "top.py, line 2: ZeroDivisionError: division by zero"),
    "a mistake in a file that it imports": ("above.py:f", "above.py, line 1: SyntaxError: '(' was never closed"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_what_cannot_be_loaded_is_named(tmp_path, what):
    (tmp_path / "own.py").write_text("number = 3\ndef f(x):\n    return x\ndef two(x, y):\n    return x\n")
    (tmp_path / "syntax.py").write_text("def f(x):\n    return (\n")
    (tmp_path / "top.py").write_text("y = 0\nx = 1 / y\n")
    (tmp_path / "above.py").write_text("import below_of_the_test\n")
    (tmp_path / "below_of_the_test.py").write_text("\n\nx = (\n")
    (tmp_path / "folder.py").mkdir()
    text, message = MISTAKES[what]
    error = refused(load_function, "a.key", text, ("x",))
    assert error.startswith(f"a.key={text}") and message in error


def test_an_error_names_setting_file_and_line(tmp_path):
    function = own(tmp_path, "def f(x):\n    y = 0\n    return x / y\n")
    assert refused(function.call, 1, about="for the first") == (
        "a.key=own.py:f: own.py, line 3: ZeroDivisionError: division by zero (for the first)"
    )
    leaves = own(tmp_path, "import sys\ndef f(x):\n    sys.exit('so\\nlong')\n")
    assert refused(leaves.call, 1) == "a.key=own.py:f: own.py, line 3: SystemExit: so long"
    deep = own(tmp_path, "import json\ndef f(x):\n    return json.loads(x)\n")  # the line of the user's file
    assert refused(deep.call, "{").startswith("a.key=own.py:f: own.py, line 3: Expecting property name")
    missing = own(tmp_path, "def f(x):\n    return open('nothing.txt')\n")
    assert "own.py, line 2: FileNotFoundError: [Errno 2] No such file" in refused(missing.call, 1)
    assert refused(function.refuse, "it returned 3") == "a.key=own.py:f: own.py, line 1: it returned 3"


def test_a_callable_object_is_a_function(tmp_path):
    text = "class Scale:\n    def __call__(self, x):\n        return {}[x]\nf = Scale()\n"
    assert refused(own(tmp_path, text).call, 1) == "a.key=own.py:f: own.py, line 3: KeyError: 1"
    text = "import functools\ndef two(x, y):\n    return x[y]\nf = functools.partial(two, y=9)\n"
    assert refused(own(tmp_path, text).call, "a").startswith("a.key=own.py:f: own.py, line 3: IndexError: ")


def test_a_file_runs_once_for_all_its_functions_and_again_when_it_has_changed(tmp_path):
    text = "calls = []\ndef f(x):\n    calls.append(x)\n    return len(calls)\ndef g(x):\n    return len(calls)\n"
    assert own(tmp_path, text).call(0) == 1
    assert own(tmp_path, text, "g").call(0) == 1
    assert own(tmp_path, text.replace("len(calls)", "-len(calls)"), "g").call(0) == 0


def test_a_file_imports_what_lies_beside_it_and_defines_dataclasses(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "helper_of_the_test.py").write_text("VALUE = 5\n")
    (tmp_path / "sub" / "own.py").write_text(
        "from __future__ import annotations\nimport dataclasses\nfrom helper_of_the_test import VALUE\n"
        "@dataclasses.dataclass\nclass Point:\n    x: int = VALUE\n"
    )
    assert run_file("sub/own.py").Point().x == 5


def test_the_digest_is_of_the_file_that_defines_the_function(tmp_path):
    text = "def f(x):\n    return x\ndef g(x):\n    return x\n"
    (tmp_path / "own.py").write_text(text)
    wanted = hashlib.sha256(text.encode()).hexdigest()
    assert source_digest("own.py:f") == source_digest("own.py:g") == source_digest(f"{tmp_path}/own.py:f") == wanted
    arm = "tango_jax.method.arms:Arm"
    assert source_digest("math:sqrt") != source_digest(arm) == source_digest(arm)
    (tmp_path / "own.py").write_text(f"{text}# edited\n")
    assert source_digest("own.py:f") == hashlib.sha256(f"{text}# edited\n".encode()).hexdigest()
    # A file that only passes a function on counts together with the file that defines it.
    (tmp_path / "passed_on_in_the_test.py").write_text(text)
    (tmp_path / "own.py").write_text("from passed_on_in_the_test import f\n")
    before = source_digest("own.py:f")
    (tmp_path / "passed_on_in_the_test.py").write_text(f"{text}# edited\n")
    edited = source_digest("own.py:f")
    (tmp_path / "own.py").write_text("from passed_on_in_the_test import f  # edited\n")
    assert len({before, edited, source_digest("own.py:f")}) == 3
    assert refused(source_digest, "none.py:f").startswith("function=none.py:f: there is no file none.py")


@pytest.mark.parametrize("body", ["while True: pass", "time.sleep(10**6)", "re.match('(a*)*b', 'a' * 80)"])
def test_a_call_that_takes_too_long_is_stopped(tmp_path, body):
    function = own(tmp_path, f"import re, time\ndef f(x):\n    {body}\n")
    before = signal.getsignal(signal.SIGALRM)
    error = refused(function.call, 1, about="for 1", limit_s=1)
    assert error.startswith("a.key=own.py:f: own.py, line 3: TimeoutError: not done after 1 seconds, ")
    assert error.endswith("the limit of a call (for 1)")
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_call_in_time_leaves_no_alarm_behind(tmp_path):
    function = own(tmp_path, "def f(x):\n    return x\n")
    before = signal.getsignal(signal.SIGALRM)
    assert function.call(3, limit_s=1000) == 3
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_outside_the_main_thread_there_is_no_limit(tmp_path):
    function, values = own(tmp_path, "import time\ndef f(x):\n    time.sleep(x)\n    return x\n"), []
    thread = threading.Thread(target=lambda: values.append(function.call(1.5, limit_s=1)))
    began = time.monotonic()
    thread.start()
    thread.join()
    assert values == [1.5] and time.monotonic() - began >= 1.5


LOADS = """from tango_jax.runtime.user_code import load_function
def load():
    return load_function("a.key", f"{__file__}:f", ("x",))
"""


def run_script(path, text: str) -> str:
    """What a script prints last: its result, or the last line of its traceback."""
    path.write_text(LOADS + text)
    done = subprocess.run([sys.executable, path.name], cwd=path.parent, env=os.environ | {"PYTHONPATH": str(ROOT)},
                          timeout=HANG_S, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).splitlines()[-1]


def test_a_script_may_name_a_function_of_its_own(tmp_path):
    """It is not run a second time, which would load it again, and so on."""
    path = tmp_path / "script.py"
    assert run_script(path, "seen = []\ndef f(x):\n    return seen\nprint(load().call(1) is seen)\n") == "True"
    assert run_script(path, "load()\ndef f(x):\n    return x\n") == (
        f"ValueError: a.key={path}:f: {path} has no function 'f' so far: define it above what loads it, or put that "
        'under `if __name__ == "__main__":`'
    )


@pytest.mark.parametrize("call", ["load()", "try:\n    load()\nexcept Exception:\n    pass"])
def test_a_file_that_loads_itself_is_one_line_and_not_a_recursion(tmp_path, call):
    """As a process does that does not run it as its script: a worker, or a command that it is a config file of."""
    path = tmp_path / "unguarded.py"
    path.write_text(f"{LOADS}def f(x):\n    return x\n{call}\n")
    for _ in range(2):
        assert refused(load_function, "a.key", f"{path}:f", ("x",)) == (
            f"a.key={path}:f: {path}: it starts a command that loads this file again: put the start under "
            '`if __name__ == "__main__":`'
        )
    path.write_text(f"{LOADS}def f(x):\n    return x\nif __name__ == '__main__':\n    load()\n")
    assert load_function("a.key", f"{path}:f", ("x",)).call(3) == 3


def test_paths_are_shortened_in_messages(tmp_path):
    error = refused(load_function, "a.key", "x" * 5000 + ":f", ("x",))
    assert len(error) < 1200 and re.match(r"a\.key=x+\.\.\.: x+\.\.\.: ModuleNotFoundError", error)
