"""Files that are written whole or not at all."""

import json
import os

import numpy as np
import pytest

from tango_jax.runtime.atomic import write_atomically, write_json_atomic


def test_content_arrives_in_a_folder_that_is_made(tmp_path):
    path = tmp_path / "new" / "notes.md"
    write_atomically(path, "zwölf\n")
    assert path.read_bytes() == "zwölf\n".encode()
    write_atomically(path, b"\0\xff")
    assert path.read_bytes() == b"\0\xff"
    assert [file.name for file in path.parent.iterdir()] == ["notes.md"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_atomically(path, "old")

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_json_file_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "out" / "summary.json"
    write_json_atomic(path, {"arm": "tango", "f1": np.float32(0.25), "rows": (1, float("inf"))})
    assert json.loads(path.read_text()) == {"arm": "tango", "f1": 0.25, "rows": [1, None]}
    with pytest.raises(TypeError):
        write_json_atomic(path, {"arm": object()})
    assert json.loads(path.read_text())["arm"] == "tango"
