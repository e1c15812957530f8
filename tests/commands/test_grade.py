"""`python -m tango_jax.grade`: rows in, the same rows with "correct" out, and one clear line for a bad file."""
import json
from pathlib import Path

import pytest

from tango_jax import grade as command
from tango_jax.grading import close_pool


@pytest.fixture(scope="module", autouse=True)
def _close_shared_pool():
    yield
    close_pool()


def response(answer: str) -> str:
    return rf"<think><step>We compute.</step></think><answer>\boxed{{{answer}}}</answer>"


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_command_adds_correct_to_each_row(tmp_path, capsys):
    rows = [
        {"text": response("0.5"), "gold": r"\frac{1}{2}", "id": 7},
        {"text": response("B"), "gold": "b", "kind": "choice"},
        {"text": response("ab"), "gold": "ba", "kind": "string"},
        {"text": response("27"), "gold": 27.0},
    ]
    source = write_rows(tmp_path / "rows.jsonl", *rows[:2], "", *rows[2:])
    expected = [{**row, "correct": correct} for row, correct in zip(rows, [True, True, False, True], strict=True)]

    assert command.main(["--file", str(source)]) == 0
    printed = capsys.readouterr()
    assert [json.loads(line) for line in printed.out.splitlines()] == expected
    assert printed.err == "3 of 4 correct; counted as wrong because grading failed: 0 errors, 0 timeouts, 0 overlong\n"

    out = tmp_path / "graded.jsonl"
    assert command.main(["--file", str(source), "--out", str(out)]) == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graded.jsonl", "rows.jsonl"]


def test_rows_keep_their_order_over_chunks_and_kinds(monkeypatch):
    monkeypatch.setattr(command, "CHUNK", 2)
    kinds = ["string", "choice", "text", "string", "string", "choice", "string"]
    rows = [{"text": response("abcdefg"[k]), "gold": "aXcXeXg"[k], "kind": kind} for k, kind in enumerate(kinds)]
    graded, summary = command.grade_rows(rows)
    assert [row["correct"] for row in graded] == [True, False, True, False, True, False, True]
    assert summary.startswith("4 of 7 correct")


@pytest.mark.parametrize("row, message", [
    ("{", "line 2: "),
    ("[1]", "a row must be an object"),
    ("null", "a row must be an object"),
    ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
    ('{"text": "a", "gold": "5", "more": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    ('{"a": ' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
    ({"text": ["a" * 1000], "gold": "5"}, "aaa...; it must be the text"),
    ('{"text": "a", "gold": ' + "7" * 5000 + "}", "digits"),
    ({"text": "a"}, "no 'gold' among the keys ['text']"),
    ({"text": 5, "gold": "5"}, "'text' is 5"),
    ({"text": "a", "gold": ""}, "'gold' is ''"),
    ({"text": "a", "gold": None}, "'gold' is None"),
    ({"text": "a", "gold": float("nan")}, "'gold' is nan"),
    ({"text": "a", "gold": "5", "kind": "maths"}, "'kind' is 'maths'; use one of math, string, python, choice, text"),
])  # fmt: skip
def test_command_names_the_bad_line_and_keeps_the_old_output(tmp_path, capsys, row, message):
    source = write_rows(tmp_path / "rows.jsonl", {"text": response("5"), "gold": "5"}, row)
    out = write_rows(tmp_path / "graded.jsonl", "kept")
    assert command.main(["--file", str(source), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {source}, line 2: ") and message in error and error.count("\n") == 1
    assert out.read_text() == "kept"


def test_command_checks_paths_first(tmp_path, capsys):
    assert command.main(["--file", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    source = write_rows(tmp_path / "rows.jsonl", {"text": response("5"), "gold": "5"})
    assert command.main(["--file", str(source), "--out", str(tmp_path / "no" / "graded.jsonl")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert command.main(["--file", str(source), "--out", str(tmp_path)]) == 2
    assert "is a folder; name a file in it" in capsys.readouterr().err
