"""Downloads by the real client from a hub on this machine: what is asked for, read and said, and how they fail."""

import errno
import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from support.hf_loading import assert_equal_trees
from support.paths import ROOT
from support.processes import finish
from support.small_hub import LARGE, TOKEN
from support.tiny_checkpoints import tiny_params, write_tiny_folder
from tango_jax.cli.command_line import load_config
from tango_jax.cli.validation import validate
from tango_jax.data.rows import PARQUET_BRANCH, read_rows
from tango_jax.runtime.hub import HubId, parse_hub_id
from tango_jax.weights.from_hf import resolve_folder
from tango_jax.weights.source import kind_of, open_source

COMMIT, NEWER = "0123456789abcdef0123456789abcdef01234567", "f" * 40


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def warned(caplog):
    """What this module alone has said so far."""

    def messages() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "tango_jax.runtime.hub"]

    caplog.set_level(logging.WARNING, "tango_jax.runtime.hub")
    return messages


@pytest.mark.parametrize("name, parts", [
    ("Qwen/Qwen3-8B", ("Qwen/Qwen3-8B", None)), ("gpt2", ("gpt2", None)), (f"a/b@{COMMIT}", ("a/b", COMMIT)),
    ("a/b@v1.0", ("a/b", "v1.0")), ("a/b@refs/pr/3", ("a/b", "refs/pr/3")), ("gpt2@main", ("gpt2", "main")),
    ("a/b/c", None), ("a b", None), ("", None),
])
def test_ids(name, parts):
    assert parse_hub_id(name) == (None if parts is None else HubId(*parts))


@pytest.mark.parametrize("revision", ["", "a b", "../x", "a..b", "-x", ".x", "feature/x", "a@b", "x\n", "\x1b[31m"])
def test_what_is_no_revision_is_refused_with_the_settings(revision, hub):
    config = load_config(str(ROOT / "configs/tiny.py"))
    config.generator.checkpoint = f"a/b@{revision}"
    with pytest.raises(ValueError, match=r"generator\.checkpoint: 'a/b@.* is not a revision; write a/b@ and a commit"):
        validate(config)
    with pytest.raises(ValueError, match=r"is not a hub id; write hub:owner/name"):
        read_rows(f"hub:a/b@{revision}:c/d")
    assert hub.requests == []


def test_a_pinned_checkpoint_is_of_its_commit_in_every_part(hub, warned, tiny):
    """Weights, config, tokenizer and generation config all come from the files of the commit, each fetched once."""
    hub.add("team/tiny", COMMIT, tiny)
    hub.add("team/tiny", NEWER, {"config.json": b"{}"}, "main")
    name = f"team/tiny@{COMMIT}"
    assert kind_of(name) == "hub"
    source = open_source(name)
    assert_equal_trees(source.load_params(), tiny_params())
    assert source.tokenizer.decode(source.tokenizer.encode_fn("3 + 4")) == "3 + 4"
    assert [source.generation["eos_token_id"]] == list(source.tokenizer.stop_ids) and "temperature" in source.generation
    assert (source.name, source.base_model) == (name, "team/tiny")
    assert hub.fetched() == sorted(path.name for path in tiny.iterdir())
    open_source(name)
    assert hub.requests == [] and warned() == []


@pytest.mark.parametrize("name, commit", [("team/tiny", NEWER), ("team/tiny@main", NEWER), ("team/tiny@v1", COMMIT)])
def test_a_checkpoint_that_can_move_is_named_with_its_commit(hub, warned, name, commit):
    hub.add("team/tiny", COMMIT, {"config.json": b"old"}, "main", "v1")
    hub.add("team/tiny", NEWER, {"config.json": b"new"}, "main")
    folder = resolve_folder(name)
    assert (folder / "config.json").read_bytes() == (b"new" if commit == NEWER else b"old")
    assert warned() == [f"warning: {name} is not pinned to a commit: it is now at commit {commit}; write "
                               f"team/tiny@{commit} for the same files every time"]
    assert hub.fetched() == ["config.json"]
    hub.is_down = True
    assert resolve_folder(name) == folder  # the commit that the revision was at the last time


def test_a_folder_of_such_a_name_is_a_folder(hub, tmp_path, monkeypatch, warned):
    monkeypatch.chdir(tmp_path)
    Path("runs@1").mkdir()
    assert resolve_folder("runs@1") == Path("runs@1") and hub.requests == [] and warned() == []


@pytest.mark.parametrize("form, file, default", [
    ("hub:team/sums{}:easy/test", "easy/test/0000.parquet", PARQUET_BRANCH),
    ("hub:team/sums{}/a/b.jsonl", "a/b.jsonl", "main"),
])
def test_data_of_a_revision(hub, warned, caplog, form, file, default):
    for commit, revision in ((COMMIT, "refs/pr/1"), (NEWER, default)):
        content = io.BytesIO()
        if file.endswith(".jsonl"):
            content.write(f'{{"commit": "{commit}"}}\n'.encode())
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"commit": commit}]), content)
        hub.add("datasets/team/sums", commit, {file: content.getvalue(), "other/train/0000.parquet": b""}, revision)
    for revision, commit in ((f"@{COMMIT}", COMMIT), ("@refs/pr/1", COMMIT), ("", NEWER)):
        caplog.clear()
        (row,) = read_rows(form.format(revision))
        assert row.fields == {"commit": commit}
        assert hub.fetched() == ([] if revision == "@refs/pr/1" else [file])  # that commit is in the cache already
        assert row.id == ("sums-b/1" if default == "main" else "sums-test/1")  # whatever the revision
        is_pinned = revision == f"@{COMMIT}"
        assert warned() == [] if is_pinned else [
            f"warning: {form.format(revision)} is not pinned to a commit: it is now at commit {commit}; write "
            f"{form.format(f'@{commit}')} for the same files every time"]


def test_a_split_that_is_pinned_to_another_branch_says_which_one_it_needs(hub):
    hub.add("datasets/team/sums", COMMIT, {"README.md": b""})
    with pytest.raises(ValueError, match=r"splits are on the branch refs/convert/parquet: pin a commit of it"):
        read_rows(f"hub:team/sums@{COMMIT}/test")


# --------------------------------------------------------------------------------------------------- large files

WEIGHTS = bytes(range(256)) * 200  # any bytes: they are not opened here


def test_large_files_come_from_another_host_which_is_not_shown_the_token(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.add("team/tiny", COMMIT, {"model.safetensors": WEIGHTS, "config.json": b"{}"})
    folder = resolve_folder(f"team/tiny@{COMMIT}")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS and len(WEIGHTS) > LARGE
    assert {(request.is_large, request.has_token) for request in hub.requests} == {(False, True), (True, False)}
    assert hub.fetched() == ["config.json", "model.safetensors"]


def no_file_is_broken(folder: Path) -> bool:
    """Whether the cache holds the weights in whole or not at all."""
    contents = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return all(content == WEIGHTS or len(content) < LARGE for content in contents)


def test_a_transfer_that_breaks_off_goes_on_where_it_was(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)  # in place of 10 MB, which it keeps
    hub.add("team/tiny", COMMIT, {"model.safetensors": WEIGHTS})
    hub.breaks["model.safetensors"] = [30_000, 10_000]
    folder = resolve_folder(f"team/tiny@{COMMIT}")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert [request.start for request in hub.requests if request.is_large] == [0, 30_000, 40_000]


@pytest.mark.parametrize("is_resetting, name", [(False, "RemoteProtocolError"), (True, "ReadError")])
def test_a_transfer_that_keeps_breaking_off_is_begun_again_by_the_next_call(hub, tmp_path_factory, is_resetting, name):
    hub.add("team/tiny", COMMIT, {"model.safetensors": WEIGHTS, "config.json": b"{}"})
    hub.breaks["model.safetensors"], hub.is_resetting = [30_000] + 9 * [0], is_resetting
    message = rf"^team/tiny@{COMMIT}: could not be fetched from the hub \({name}: .*\): check the network and repeat "
    with pytest.raises(ValueError, match=message) as error:
        resolve_folder(f"team/tiny@{COMMIT}")
    assert "\n" not in str(error.value)
    assert no_file_is_broken(hub.cache) and not list(hub.cache.rglob("model.safetensors"))
    hub.breaks.clear()
    hub.fetched()
    assert (resolve_folder(f"team/tiny@{COMMIT}") / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.fetched() == ["model.safetensors"]  # the other file was whole


def test_without_the_hub_a_part_of_a_checkpoint_is_not_taken_for_it(hub):
    hub.add("team/tiny", COMMIT, {"model.safetensors": WEIGHTS, "config.json": b"{}"}, "main")
    hub.breaks["model.safetensors"] = [30_000] + 9 * [0]
    for _ in range(2):  # the second time with config.json in the cache
        with pytest.raises(ValueError, match="^team/tiny: could not be fetched from the hub .*: check the network and"):
            resolve_folder("team/tiny")
        hub.is_down = True


# ------------------------------------------------------------------------------------------------------- refusals


FIX = ("check the name, ask for access at HUB/{}, and log in (hf auth login) or set HF_TOKEN, or download it elsewhere "
       "and give its path")
NO_MODEL = "(no folder of that name is here, and the hub has no such model, or you may not read it): "


@pytest.mark.parametrize("name, token, message", [
    ("team/none", None, NO_MODEL + FIX.format("team/none")),
    ("team/none", TOKEN, NO_MODEL + FIX.format("team/none")),
    ("team/gated", None, NO_MODEL + FIX.format("team/gated")),
    ("team/gated", "hf_wrong", NO_MODEL + FIX.format("team/gated")),
    ("team/tiny@v9", None, "(it has no revision v9): name a commit, tag or branch that it has"),
    (f"team/tiny@{NEWER}", None, f"(it has no revision {NEWER}): name a commit, tag or branch that it has"),
    ("team/ti--ny", None, "(Cannot have -- or .. in repo_id: 'team/ti--ny'.): check the name"),
])
def test_what_the_hub_refuses_is_one_line_with_the_fix(hub, monkeypatch, name, token, message):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.add("team/tiny", COMMIT, {"config.json": b"{}"}, "main")
    hub.add("team/gated", COMMIT, {"config.json": b"{}"}, "main")
    hub.gated.add("team/gated")
    with pytest.raises(ValueError) as error:
        resolve_folder(name)
    assert str(error.value) == f"{name}: could not be fetched from the hub {message.replace('HUB', hub.endpoint)}"
    assert not list(hub.cache.rglob("config.json"))


def test_a_reader_of_a_gated_repository_gets_it(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.add("team/gated", COMMIT, {"model.safetensors": WEIGHTS})
    hub.gated.add("team/gated")
    assert (resolve_folder(f"team/gated@{COMMIT}") / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("name, message", [
    ("none", "(the hub has no such data set, or you may not read it): " + FIX.format("datasets/team/none")),
    ("sums", "(it has no revision refs/convert/parquet): "
     "name a commit, tag or branch that it has, or name one of its files"),
])
def test_data_that_the_hub_does_not_have_is_one_line(hub, name, message):
    hub.add("datasets/team/sums", COMMIT, {"sums.jsonl": b"{}"}, "main")
    with pytest.raises(ValueError) as error:
        read_rows(f"hub:team/{name}/test")
    expected = f"hub:team/{name}/test: could not be fetched from the hub {message}"
    assert str(error.value) == expected.replace("HUB", hub.endpoint)


@pytest.mark.parametrize("error, message", [
    (errno.ENOSPC, r"\(\[Errno 28\] No space left on device\): free space at {cache}, or set HF_HOME to another fold"),
    (errno.EACCES, r"\(\[Errno 13\] Permission denied: .*\): free space at {cache}, or set HF_HOME to another folder"),
])
def test_a_disk_that_takes_no_file_is_one_line(hub, monkeypatch, error, message):
    def refuse(path, *_):
        raise OSError(error, os.strerror(error), None if error == errno.ENOSPC else str(path))

    hub.add("team/tiny", COMMIT, {"config.json": b"{}"})
    monkeypatch.setattr("huggingface_hub.file_download._chmod_and_move", refuse)
    with pytest.raises(ValueError, match=f"^team/tiny@{COMMIT}: could .* {message.format(cache=hub.cache)}"):
        resolve_folder(f"team/tiny@{COMMIT}")


@pytest.mark.parametrize("is_full, message", [
    (False, "team/gated: could not be fetched from the hub (no folder of that name is here, and the hub has no such "),
    (True, "team/gated: could not be fetched from the hub ([Errno 27] File too large): free space at "),
], ids=["gated", "full disk"])
def test_a_command_that_cannot_download_ends_in_one_line(hub, monkeypatch, is_full, message):
    """In a process of its own: the variables reach the client, and a file larger than a limit ends like a full disk."""
    if is_full:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.add("team/gated", COMMIT, {"model.safetensors": WEIGHTS, "config.json": b"{}"}, "main")
    hub.gated.add("team/gated")
    limit = f"ulimit -f {len(WEIGHTS) // 2048}" if is_full else "true"
    command = f"{limit} && exec {sys.executable} -m tango_jax.sample --checkpoint=team/gated --question='3 + 4?'"
    done = finish(subprocess.Popen(
        ["bash", "-c", command], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ))
    assert done.code == 2 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "could not be fetched" in line]
    assert message in line
    assert no_file_is_broken(hub.cache)


def test_half_a_character_in_a_data_file_ends_in_one_line(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text('{"question": "\\ud83d\\ude00", "answer": "1"}\n{"question": "a\\uD800", "answer": "1"}\n')
    with pytest.raises(ValueError, match=r"set.jsonl, line 2: '\\ud800' is half of a surrogate pair"):
        read_rows(path)
