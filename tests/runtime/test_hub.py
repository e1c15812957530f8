"""Hub ids with a revision, against a hub that is a folder: what is asked for, what is said, what is read."""

import logging
from pathlib import Path

import huggingface_hub
import pytest

from support.hf_loading import assert_equal_trees
from support.paths import ROOT
from support.tiny_checkpoints import tiny_params, write_tiny_folder
from tango_jax.cli.command_line import load_config
from tango_jax.cli.validation import validate
from tango_jax.data.rows import PARQUET_BRANCH, read_rows
from tango_jax.runtime.hub import HubId, parse_hub_id
from tango_jax.weights.from_hf import resolve_folder
from tango_jax.weights.source import kind_of, open_source

COMMIT, NEWER = "0123456789abcdef0123456789abcdef01234567", "f" * 40


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Every revision is at COMMIT but the default ones, which have moved on to NEWER; the calls that were made."""
    calls = []

    def snapshot_download(repo_id, *, repo_type="model", revision=None, allow_patterns=None):
        calls.append((repo_id, repo_type, revision))
        commit = NEWER if revision in (None, PARQUET_BRANCH) else COMMIT
        return str(tmp_path / "snapshots" / commit)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr("tango_jax.runtime.hub._told", set())
    return calls


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
])  # fmt: skip
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
    assert hub == []


def test_a_pinned_checkpoint_is_of_its_commit_in_every_part(hub, warned, tmp_path):
    """Weights, config, tokenizer and generation config all come from the folder of the revision."""
    write_tiny_folder(tmp_path / "snapshots" / COMMIT)
    name = f"team/tiny@{COMMIT}"
    assert kind_of(name) == "hub"
    source = open_source(name)
    assert hub == [("team/tiny", "model", COMMIT)]
    assert_equal_trees(source.load_params(), tiny_params())
    assert source.tokenizer.decode(source.tokenizer.encode_fn("3 + 4")) == "3 + 4"
    assert source.generation["eos_token_id"] == list(source.tokenizer.stop_ids) and "temperature" in source.generation
    assert (source.name, source.base_model) == (name, "team/tiny")
    assert len(hub) == 1 and warned() == []


@pytest.mark.parametrize("name, revision, commit", [("team/tiny", None, NEWER), ("team/tiny@main", "main", COMMIT)])
def test_a_checkpoint_that_can_move_is_named_with_its_commit(hub, warned, tmp_path, name, revision, commit):
    assert resolve_folder(name) == tmp_path / "snapshots" / commit
    assert hub == [("team/tiny", "model", revision)]
    assert warned() == [f"warning: {name} is not pinned to a commit: it is now at commit {commit}; write "
                               f"team/tiny@{commit} for the same files every time"]  # fmt: skip


def test_a_folder_of_such_a_name_is_a_folder(hub, tmp_path, monkeypatch, warned):
    monkeypatch.chdir(tmp_path)
    Path("runs@1").mkdir()
    assert resolve_folder("runs@1") == Path("runs@1") and hub == [] and warned() == []


@pytest.mark.parametrize("form, file, default", [
    ("hub:team/sums{}:easy/test", "easy/test/0000.jsonl", PARQUET_BRANCH),
    ("hub:team/sums{}/a/b.jsonl", "a/b.jsonl", None),
])  # fmt: skip
def test_data_of_a_revision(hub, warned, caplog, tmp_path, form, file, default):
    import pyarrow
    import pyarrow.parquet

    for commit in (COMMIT, NEWER):
        path = tmp_path / "snapshots" / commit / file
        path.parent.mkdir(parents=True)
        path.write_text(f'{{"commit": "{commit}"}}\n')
        if default:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"commit": commit}]), path.with_suffix(".parquet"))
    for revision, asked, commit in ((f"@{COMMIT}", COMMIT, COMMIT), ("@refs/pr/1", "refs/pr/1", COMMIT),
                                    ("", default, NEWER)):  # fmt: skip
        caplog.clear()
        (row,) = read_rows(form.format(revision))
        assert row.fields == {"commit": commit} and hub.pop() == ("team/sums", "dataset", asked)
        assert row.id == ("sums-test/1" if default else "sums-b/1")  # whatever the revision
        is_pinned = revision == f"@{COMMIT}"
        assert warned() == [] if is_pinned else [
            f"warning: {form.format(revision)} is not pinned to a commit: it is now at commit {commit}; write "
            f"{form.format(f'@{commit}')} for the same files every time"]  # fmt: skip


def test_a_split_that_is_pinned_to_another_branch_says_which_one_it_needs(hub, tmp_path):
    (tmp_path / "snapshots" / COMMIT).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"splits are on the branch refs/convert/parquet: pin a commit of it"):
        read_rows(f"hub:team/sums@{COMMIT}/test")


def test_a_warning_that_no_commit_is_known_for(monkeypatch, warned, tmp_path):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *names, **settings: str(tmp_path))
    assert resolve_folder("team/tiny") == tmp_path
    assert warned() == ["warning: team/tiny is not pinned to a commit: it may point to another commit next time; write "
                               "team/tiny@COMMIT for the same files every time"]  # fmt: skip


def test_half_a_character_in_a_data_file_ends_in_one_line(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text('{"question": "\\ud83d\\ude00", "answer": "1"}\n{"question": "a\\uD800", "answer": "1"}\n')
    with pytest.raises(ValueError, match=r"set.jsonl, line 2: '\\ud800' is half of a surrogate pair"):
        read_rows(path)
