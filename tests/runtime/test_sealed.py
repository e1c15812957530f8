"""Sealed folders: any changed byte is seen, and a kill at any moment leaves either the old folder or the new one."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from tango_jax.runtime import sealed
from tango_jax.runtime.sealed import (
    ALL_DAMAGED,
    MANIFEST,
    NO_STEP,
    clean_up,
    commit,
    digests_of,
    find_damage,
    remove,
    seal,
)


def make_step(directory: Path, name: str, content: bytes = b"weights") -> Path:
    folder = directory / name
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "w").write_bytes(content)
    (folder / "meta.json").write_text("{}")
    seal(folder, int("".join(filter(str.isdigit, name)) or 0), digests_of(folder))
    return folder


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_manifest_is_what_sha256sum_prints(tmp_path):
    folder = make_step(tmp_path, "1")
    contents = {"meta.json": b"{}", "seal.json": b'{"step": 1, "files": 3}\n', "state/w": b"weights"}
    assert (folder / MANIFEST).read_text() == "".join(
        f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in contents.items())
    assert names(folder) == [MANIFEST, "meta.json", "seal.json", "state"]
    assert find_damage(folder) is None


def test_damage_is_named(tmp_path):
    changed, gone = make_step(tmp_path, "1"), make_step(tmp_path, "2")
    (changed / "state" / "w").write_bytes(b"weighty")
    (gone / "meta.json").unlink()
    assert find_damage(changed) == "state/w has changed since it was written"
    assert find_damage(gone) == "meta.json cannot be read (No such file or directory)"


def test_any_flipped_byte_of_a_manifest_is_seen(tmp_path):
    path = make_step(tmp_path, "1") / MANIFEST
    data = path.read_bytes()
    for position, byte in enumerate(data):
        for bit in (1, 0x20, 0x80):  # also what only changes the case of a letter, or is no text
            path.write_bytes(data[:position] + bytes([byte ^ bit]) + data[position + 1:])
            assert find_damage(path.parent) is not None, position


def test_a_manifest_without_any_of_its_lines_is_damage(tmp_path):
    folder = make_step(tmp_path, "1")
    lines = (folder / MANIFEST).read_text().splitlines(keepends=True)
    for number, line in enumerate(lines):
        (folder / MANIFEST).write_text("".join(lines[:number] + lines[number + 1:]))
        assert find_damage(folder) == f"{line.split()[1]} is not in {MANIFEST}"
    for text in ("", lines[0], lines[0] * 2, "".join(reversed(lines)), "".join(lines).replace("\n", "\r\n")):
        (folder / MANIFEST).write_text(text)
        assert find_damage(folder) is not None, text


def test_a_file_too_many_is_damage(tmp_path):
    folder = make_step(tmp_path, "1")
    (folder / "state" / "x").write_bytes(b"")
    assert find_damage(folder) == f"state/x is not in {MANIFEST}"


def test_a_seal_says_which_step_it_is_and_how_many_files_there_are(tmp_path):
    folder = make_step(tmp_path, "10")
    assert find_damage(folder) is None
    shutil.copytree(folder, tmp_path / "20")
    assert find_damage(tmp_path / "20") == "it holds step 10"
    (folder / "state" / "w").unlink()  # with its line: what is left is as it was written
    lines = (folder / MANIFEST).read_text().splitlines(keepends=True)
    (folder / MANIFEST).write_text("".join(line for line in lines if "state/w" not in line))
    assert find_damage(folder) == f"{MANIFEST} lists 2 of 3 files"
    (folder / "seal.json").unlink()
    (folder / MANIFEST).write_text("".join(line for line in lines if "meta.json" in line))
    assert find_damage(folder) == "seal.json is missing"


def test_the_newest_intact_step_is_found(tmp_path):
    assert sealed.newest_verified(tmp_path / "nowhere") == NO_STEP
    for name in ("9", "10", "007", "11.saving", "notes"):
        make_step(tmp_path, name)
    (tmp_path / "12").mkdir()  # a number is given to sealed folders only: this one has lost its manifest
    assert sealed.complete_steps(tmp_path) == [9, 10, 12]
    assert sealed.newest_verified(tmp_path) == 10
    (tmp_path / "10" / "state" / "w").unlink()
    assert sealed.newest_verified(tmp_path) == 9
    (tmp_path / "9" / "state" / "w").unlink()
    assert sealed.newest_verified(tmp_path) == ALL_DAMAGED


def test_a_commit_replaces_a_folder_of_the_same_name(tmp_path):
    make_step(tmp_path, "5", b"old")
    commit(make_step(tmp_path, "5.saving", b"new"), tmp_path / "5")
    assert names(tmp_path) == ["5"]
    assert (tmp_path / "5" / "state" / "w").read_bytes() == b"new"


@pytest.mark.parametrize(("renames_done", "kept"), [(0, b"old"), (1, b"old"), (2, b"new")])
def test_a_kill_inside_a_commit_loses_nothing(tmp_path, monkeypatch, renames_done, kept):
    make_step(tmp_path, "5", b"old")
    saving = make_step(tmp_path, "5.saving", b"new")
    left, replace = [renames_done], os.replace

    def dying_replace(source, target):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        replace(source, target)

    def dying_delete(path, ignore_errors=False):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(sealed.os, "replace", dying_replace)
        patched.setattr(sealed.shutil, "rmtree", dying_delete)
        with pytest.raises(KeyboardInterrupt):
            commit(saving, tmp_path / "5")
    clean_up(tmp_path)
    assert names(tmp_path) == ["5"]
    assert (tmp_path / "5" / "state" / "w").read_bytes() == kept


def test_clean_up_touches_leftovers_only(tmp_path):
    for name in ("30.saving", "30.saving.orbax-checkpoint-tmp", "5.removed", "20", "my.saving"):
        (tmp_path / name / "state").mkdir(parents=True)
    clean_up(tmp_path)
    assert names(tmp_path) == ["20", "my.saving"]
    remove(tmp_path / "20")
    assert names(tmp_path) == ["my.saving"]
