"""Reading data files and hub ids: what comes out as rows, and the one line that a damaged file ends in."""
import gzip
import json

import pytest

from tango_jax.data.rows import PARQUET_BRANCH, read_rows

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": 4.0}]
LINES = [json.dumps(row) for row in ROWS]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def write_parquet(path, rows):
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("content", [
    "\n".join(LINES), "\n".join(LINES) + "\n", f"\ufeff{LINES[0]}\r\n\n{LINES[1]}\r\n", json.dumps(ROWS),
    "\ufeff " + json.dumps(ROWS, indent=2) + "\n",
], ids=["no last newline", "last newline", "mark, blank line, CRLF", "list", "indented list"])
def test_json_files(tmp_path, content):
    rows = read_rows(write(tmp_path / "set.json", content))
    assert [row.fields for row in rows] == ROWS
    assert [row.id for row in rows] == ["set/1", "set/2"]


def test_the_line_of_a_row_counts_blank_lines(tmp_path):
    path = write(tmp_path / "set.jsonl", f"{LINES[0]}\n\n{LINES[1]}")
    assert [row.where for row in read_rows(path)] == [f"{path}, line 1", f"{path}, line 3"]


def test_parquet(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}}]
    path = write_parquet(tmp_path / "set.parquet", rows)
    assert read_rows(path) == [(f"{path}, row 1", "set/1", rows[0])]
    with pytest.raises(ValueError, match=r"set.parquet: damaged parquet file after row 0 .*fetch it again"):
        read_rows(write(path, path.read_bytes()[:-20]))


@pytest.mark.parametrize("content, message", [
    ("", "no rows found"),
    ("[]", "no rows found"),
    (" \n\n", "no rows found"),
    (f"{LINES[0]}\n{LINES[1][:-5]}\n", r"line 2: not JSON"),
    (f"{LINES[0]}\n3\n", r"line 2: a row must be an object with named fields, not int"),
    (b'{"question": "\xff"}', r"line 1: not UTF-8 text \('utf-8' .* position 14.*\), but perhaps Latin-1: save the f"),
    ("\n".join(LINES).encode("utf-16"), "line 1: not UTF-8 text but UTF-16: save the file as UTF-8; give JSONL"),
    ("\n".join(LINES).encode("utf-16-le"), "line 1: not UTF-8 text but UTF-16: save the file as UTF-8"),
    (json.dumps(ROWS).encode("utf-16-be"), "line 1: not UTF-8 text but UTF-16: save the file as UTF-8"),
    ('[{"question": "caf\u00e9"}]'.encode("latin-1"), ": not UTF-8 text .*: save the file as UTF-8"),
    ('[{"question": "1"}, "2"]', r"row 2: a row must be an object with named fields, not str"),
    ('{"a": ' + "[" * 100_000, "line 1: not JSON"),
    ("question,answer\n1,2\n", "line 1: not JSON but other text, perhaps CSV: write every row as an object with named "
     "fields; give JSONL with one object a line, a JSON list of objects, or p"),
    (gzip.compress(LINES[0].encode(), mtime=0),  # without the time, so that its id is the same in all processes
     "line 1: not JSON but a compressed file: unpack it; give JSONL with one object a line, a JSON list of obj"),
    (json.dumps({"data": ROWS}, indent=1), ": the file is one JSON object with the keys data, not a list of rows: w"),
    (json.dumps(ROWS[0], indent=1), r"the file is one JSON object with the keys question, answer, .*: write \[\{"),
    (json.dumps(ROWS[0], indent=1) * 2, "line 1: not JSON"),
    (f'{LINES[0]}\n{{"question": "1", "answer": 1, "answer": 2}}', "line 2: not JSON .*the key 'answer' appears twice"),
    ('[{"a": {"b": 1, "b": 1}}]', "not JSON .*the key 'b' appears twice in one object"),
    ('{"question": "\\ud83d", "answer": "1"}', "line 1: .*half of a surrogate pair"),
])
def test_a_damaged_file_is_one_clear_error(tmp_path, content, message):
    with pytest.raises(ValueError, match=f"set.jsonl.*{message}"):
        read_rows(write(tmp_path / "set.jsonl", content))


def test_a_missing_file_says_what_may_be_given(tmp_path):
    with pytest.raises(ValueError, match="none.jsonl does not exist; give a .jsonl, .json, .parquet file or hub"):
        read_rows(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="is a folder"):
        read_rows(tmp_path)


# ------------------------------------------------------------------------------------------------------------ hub


def parquet(tmp_path, rows) -> bytes:
    return write_parquet(tmp_path / "rows.parquet", rows).read_bytes()


def test_a_split_is_read_from_the_converted_branch_in_order(hub, tmp_path):
    parts = {f"easy/test/000{number}.parquet": parquet(tmp_path, [ROWS[number]]) for number in (1, 0)}
    others = {"easy/train/0000.parquet": b"not asked for", "README.md": b"not asked for"}
    hub.add("datasets/team/sums", "c" * 40, parts | others, PARQUET_BRANCH)
    hub.add("datasets/team/sums", "d" * 40, others, "main")
    for source in ("hub:team/sums/test", "hub:team/sums:easy/test"):
        rows = read_rows(source)
        assert [row.fields["question"] for row in rows] == ["1+1?", "2+2?"]
        assert [row.id for row in rows] == ["sums-test/1", "sums-test/2"]
        assert rows[1].where == f"{source} (0001.parquet), row 1"
    assert hub.fetched() == sorted(parts)


def test_a_file_of_the_hub_is_read_as_it_is(hub):
    hub.add("datasets/team/sums", "c" * 40, {"Sums.jsonl": "\n".join(LINES).encode(), "more.jsonl": b""}, "main")
    assert [row.id for row in read_rows("hub:team/sums/Sums.jsonl")] == ["sums-Sums/1", "sums-Sums/2"]
    assert hub.fetched() == ["Sums.jsonl"]


def test_several_configs_or_none_are_errors(hub, tmp_path):
    hub.add("datasets/team/sums", "c" * 40, {"README.md": b""}, PARQUET_BRANCH)
    with pytest.raises(ValueError, match=r"dataset team/sums has no files \*/test/\*.parquet; check the split"):
        read_rows("hub:team/sums/test")
    files = dict.fromkeys(("easy/test/0000.parquet", "hard/test/0000.parquet"), parquet(tmp_path, ROWS[:1]))
    hub.add("datasets/team/sums", "d" * 40, files, PARQUET_BRANCH)
    with pytest.raises(ValueError, match="team/sums has the configs easy, hard; write hub:team/sums:CONFIG/test"):
        read_rows("hub:team/sums/test")


@pytest.mark.parametrize("source", ["hub:sums", "hub:team/sums", "hub:team/sums/a/b", "hub:team/sums:easy/a.jsonl"])
def test_a_wrong_hub_id_shows_the_form(hub, source):
    with pytest.raises(ValueError, match=r"is not a hub id; write hub:owner/name\[:config\]/split"):
        read_rows(source)
    assert hub.requests == []


def test_without_a_network_the_error_says_what_to_do():
    with pytest.raises(ValueError, match=r"hub:team/sums/test: could not be fetched .* give its path") as error:
        read_rows("hub:team/sums/test")
    assert "\n" not in str(error.value)
