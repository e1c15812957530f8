"""Mistakes in settings, collected so that all of them are reported at once."""

import pytest

from tango_jax.runtime import failures
from tango_jax.runtime.checks import Mistakes, SettingsError, differences, read_json_object


def test_all_that_is_wrong_is_raised_at_once_and_nothing_twice():
    mistakes = Mistakes()
    assert mistakes.require(True, "not this") is True and mistakes.require(False, "a=1 must be 2") is False
    assert mistakes.one_of("b", "x", ("x", "y")) is True and mistakes.one_of("b", "z", ("x", "y")) is False
    with mistakes.collected("file: "):
        raise ValueError("c is missing")
    with mistakes.collected("cell 2: "):
        raise SettingsError(["d=0", "e=0"])
    mistakes.add("a=1 must be 2")
    with pytest.raises(SettingsError) as error:
        mistakes.raise_all()
    assert error.value.messages == (
        "a=1 must be 2", "b='z' is not one of x, y", "file: c is missing", "cell 2: d=0", "cell 2: e=0",
    )
    assert str(error.value).splitlines() == list(error.value.messages) and isinstance(error.value, ValueError)
    assert mistakes.is_about("a=") and mistakes.is_about("zzz", "b") and not mistakes.is_about("missing")


def test_without_mistakes_nothing_is_raised_and_other_errors_pass():
    mistakes = Mistakes()
    mistakes.raise_all()
    with pytest.raises(TypeError), mistakes.collected():
        raise TypeError("a bug")


def test_a_command_prints_a_line_for_each_with_its_own_exit_code(capsys):
    with pytest.raises(SystemExit) as stopped, failures.ends_in_one_line():
        raise SettingsError(["a=\x1b[31m1", "two\nlines"])
    assert stopped.value.code == failures.MISTAKE == 2
    assert capsys.readouterr().err == "error: a=\\x1b[31m1\nerror: two lines\n"


@pytest.mark.parametrize("error, code, line", [
    (ValueError("seed=-1"), 2, "error: seed=-1"),
    (FloatingPointError("a loss of nan"), 1, "error: a loss of nan"),
    (FileNotFoundError(2, "No such file or directory", "x"), 1, "error: x: No such file or directory (was it removed"),
    (KeyboardInterrupt(), 130, "interrupted; what was asked before is answered"),
])
def test_exit_codes_tell_mistakes_failures_and_interruptions_apart(error, code, line, capsys):
    with pytest.raises(SystemExit) as stopped, failures.ends_in_one_line("what was asked before is answered"):
        raise error
    assert stopped.value.code == code and str(stopped.value).startswith(line)
    assert capsys.readouterr().err == f"{stopped.value}\n"


@pytest.mark.parametrize("text, message", [
    (None, r"cannot be read \(No such file or directory\)"),
    ("{", r"is not JSON \(.*\)"), (b"\xff", r"is not JSON \(.*\)"),
    ("[1]", "holds a list, not an object"), ("null", "holds a NoneType, not an object"),
])
def test_a_file_without_a_json_object_is_named_with_its_remedy(tmp_path, text, message):
    path = tmp_path / "settings.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"settings.json {message}: put it back$"):
        read_json_object(path, "put it back")


def test_an_object_is_read_and_compared_entry_by_entry(tmp_path):
    (tmp_path / "settings.json").write_text('{"b": 1, "a": [1], "c": null}')
    saved = read_json_object(tmp_path / "settings.json", "put it back")
    assert saved == {"b": 1, "a": [1], "c": None}
    assert differences(saved, {"b": 2, "a": [1], "d": "x"}) == ["b: 1 -> 2", "d: None -> x"]
