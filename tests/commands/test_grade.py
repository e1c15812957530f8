"""`python -m tango_jax.grade`: rows in, the same rows with "correct" out, and one clear line for a bad file."""
import json
import re
from pathlib import Path

import pytest

from tango_jax import grade as command
from tango_jax.grading import grade_many, parse_solution

pytestmark = pytest.mark.usefixtures("closed_pool")


def response(answer: str) -> str:
    return rf"<think><step>We compute.</step></think><answer>\boxed{{{answer}}}</answer>"


def refused(*arguments: str) -> int:
    """The exit code of a command line that is refused."""
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    return stopped.value.code


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
    reasons = ["the answer 0.5 equals the gold answer", "the answer B equals the gold answer",
               "the answer ab differs from the gold answer", "the answer 27 equals the gold answer"]
    expected = [{**row, "correct": correct, "reason": reason}
                for row, correct, reason in zip(rows, [True, True, False, True], reasons, strict=True)]

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
])
def test_command_names_the_bad_line_and_keeps_the_old_output(tmp_path, capsys, row, message):
    source = write_rows(tmp_path / "rows.jsonl", {"text": response("5"), "gold": "5"}, row)
    out = write_rows(tmp_path / "graded.jsonl", "kept")
    assert refused("--file", str(source), "--out", str(out)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {source}, line 2: ") and message in error and error.count("\n") == 1
    assert out.read_text() == "kept"


def test_command_checks_paths_first(tmp_path, capsys):
    assert refused("--file", str(tmp_path / "none.jsonl")) == 2
    assert "none.jsonl" in capsys.readouterr().err
    source = write_rows(tmp_path / "rows.jsonl", {"text": response("5"), "gold": "5"})
    assert refused("--file", str(source), "--out", str(tmp_path / "no" / "graded.jsonl")) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert refused("--file", str(source), "--out", str(tmp_path)) == 2
    assert "is a folder; name a file in it" in capsys.readouterr().err


BOXED = r"3 + 4 is \boxed{8}, no: \boxed{7}"


def test_each_row_says_why():
    texts = {
        response("7"): "the answer 7 equals the gold answer",
        response("8"): "the answer 8 differs from the gold answer",
        BOXED: "no <answer>...</answer> block",
        r"<answer>7</answer> \boxed{7}": r"no \boxed{...} in the <answer> block",
        "</answer> <answer>7": "no <answer>...</answer> block",
        response("1" * 1001): f"the answer is {'1' * 77}..., and it is too long or too deeply nested to compare",
    }
    graded, _ = command.grade_rows([{"text": text, "gold": "7"} for text in texts])
    assert [row["reason"] for row in graded] == list(texts.values())
    assert [row["correct"] for row in graded] == [True, False, False, False, False, False]


def test_boxed_text_needs_no_tags(tmp_path, capsys):
    rows = [{"text": text, "gold": "7"} for text in (BOXED, response("7"), "7", r"\boxed{8}")]
    source = write_rows(tmp_path / "rows.jsonl", *rows)
    assert command.main(["--file", str(source), "--format=boxed"]) == 0
    printed = capsys.readouterr()
    assert [json.loads(line)["correct"] for line in printed.out.splitlines()] == [True, True, False, False]
    assert json.loads(printed.out.splitlines()[2])["reason"] == r"no \boxed{...}"
    assert grade_many([BOXED, BOXED], ["7", "8"], text_format="boxed").correct == (True, False)
    with pytest.raises(ValueError, match="unknown text format 'plain'; use one of tagged, boxed"):
        grade_many(["7"], ["7"], text_format="plain")


def test_boxed_is_named_where_no_text_has_an_answer_block():
    hint = r"; no text has an <answer> block: --format=boxed grades the last \boxed{...} anywhere in a text"
    rows = [{"text": text, "gold": "7"} for text in (BOXED, "7")]
    assert command.grade_rows(rows)[1].endswith(hint)
    assert "--format" not in command.grade_rows([*rows, {"text": response("7"), "gold": "7"}])[1]
    assert "--format" not in command.grade_rows(rows, "boxed")[1] + command.grade_rows([])[1]


@pytest.mark.parametrize("encoding, message", [
    ("utf-16", "line 1: not UTF-8 text but UTF-16: save the file as UTF-8"),
    ("latin-1", "line 2: not UTF-8 text ('utf-8' codec can't decode byte 0xe9 in position 13: unexpected end of data), "
     "but perhaps Latin-1: save the file as UTF-8"),
])
def test_a_file_in_another_encoding_is_told_so(tmp_path, capsys, encoding, message):
    source = tmp_path / "rows.jsonl"
    source.write_bytes('{"text": "7", "gold": "7"}\n{"text": "caf\u00e9'.encode(encoding))
    assert refused("--file", str(source)) == 2
    assert capsys.readouterr().err == f"error: {source}, {message}; --skip_bad_rows leaves such rows out\n"
    source.write_text("text,gold\n7,7\n")
    assert refused("--file", str(source)) == 2
    assert "line 1: not JSON but other text, perhaps CSV: write every row as an object" in capsys.readouterr().err


def test_bad_rows_are_skipped_and_counted_on_request(tmp_path, capsys):
    good = {"text": response("7"), "gold": "7"}
    source = write_rows(tmp_path / "rows.jsonl", {"text": "a"}, good, "{", good)
    assert refused("--file", str(source)) == 2
    assert "line 1: no 'gold' among the keys ['text']" in capsys.readouterr().err
    assert command.main(["--file", str(source), "--skip-bad-rows"]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 2 and printed.err.startswith("2 of 2 correct; ")
    assert f"; 2 bad rows skipped, the first: {source}, line 1: no 'gold' among" in printed.err
    assert printed.err.count("\n") == 1


def test_the_help_has_the_contract_of_the_tags(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    text = capsys.readouterr().out
    assert r"<answer>\boxed{14}</answer>" in text and "--format=boxed" in text
    [example] = re.findall(r"<think>.*?</answer>", text, re.DOTALL)
    assert parse_solution(example).answer == "14" and len(parse_solution(example).steps) == 2
