"""What a process says of itself: the commit of the package, or none, and the command line that started it."""

import subprocess
import sys

import pytest

from tango_jax.runtime import process as facts


@pytest.fixture(autouse=True)
def anew():
    facts._code.cache_clear()
    yield
    facts._code.cache_clear()


def checkout(folder, content: str = "x = 1\n", is_tracked: bool = True):
    """A git repository with the package in it."""
    package = folder / "site" / "tango_jax"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(content)
    (folder / "notes.md").write_text("notes")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "site" if is_tracked else "notes.md"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    return package


def test_the_commit_and_whether_the_package_differs_from_it(tmp_path, monkeypatch):
    package = checkout(tmp_path)
    monkeypatch.setattr(facts, "_PACKAGE", package)
    clean = facts._code()
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "notes.md").write_text("changed, beside the package")
    facts._code.cache_clear()
    assert facts._code() == clean
    (package / "__init__.py").write_text("x = 2\n")
    facts._code.cache_clear()
    dirty = facts._code()
    assert (dirty["commit"], dirty["dirty"]) == (clean["commit"], True) and dirty["source"] != clean["source"]


def test_the_commit_of_another_project_is_not_the_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "_PACKAGE", checkout(tmp_path, is_tracked=False))
    assert (facts._code()["commit"], facts._code()["dirty"]) == (None, None)


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 5)])
def test_a_git_that_is_missing_or_slow_does_not_matter(monkeypatch, error):
    def run(*arguments, **options):
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    found = facts.process_facts()
    assert (found["commit"], found["dirty"]) == (None, None)
    assert found["tango_jax"] == "0.1.0" and len(found["source"]) == 12 and found["jax"].count(".") == 2
    assert found["devices"] == {"cpu": 8} and found["processes"] == 1 and len(found["hosts"]) == 1 and found["cpu"]


@pytest.mark.parametrize("arguments, command", [
    ([str(facts._PACKAGE / "train.py"), "--config=my file.py"], "python -m tango_jax.train '--config=my file.py'"),
    (["/opt/bin/tango-train", "--config=tiny"], "tango-train --config=tiny"),
    (["/opt/notebook.py", "--token=secret"], "python"), ([], "python"),
])
def test_the_command_line(monkeypatch, arguments, command):
    monkeypatch.setattr(sys, "argv", arguments)
    assert facts.process_facts()["command"] == command
