"""What a config file changes in the package is noticed, whenever it does so, and named where it was defined."""

import pytest

import tango_jax.loop.turn  # noqa: F401  as training has it; it imports the tables of the method
from tango_jax.cli.config_file import load_shipped, open_config
from tango_jax.method.arms import ARMS
from tango_jax.rl import credit, losses
from tango_jax.runtime.package_changes import executed_configs

HEAD = """
import dataclasses
from tango_jax.method.arms import ARMS
from tango_jax.cli.config_file import load_shipped
from tango_jax.rl import credit, losses
"""


def changes_of(path, text: str) -> dict[str, str]:
    path.write_text(HEAD + text)
    opened = open_config(str(path))
    opened.completed(opened.make())
    [source] = [source for source in executed_configs() if source.path == str(path)]
    assert source.content == path.read_bytes() and executed_configs()[-1] is not None
    return {change.name: change.text for change in source.changes}


def test_a_plain_file_changes_nothing(tmp_path):
    text = 'from tango_jax.rl import own_reward\ndef get_config():\n    return load_shipped("last_letter_long")\n'
    assert changes_of(tmp_path / "plain.py", text) == {}


@pytest.fixture
def _tables_put_back():
    """As they were before the test, in the same order."""
    before = [(table, dict(table)) for table in (ARMS, credit.CREDITS)]
    yield
    for table, entries in before:
        table.clear()
        table.update(entries)


@pytest.mark.usefixtures("_tables_put_back")
def test_entries_functions_and_constants_are_noticed_in_every_part_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(credit, "VERDICTS", credit.VERDICTS)
    monkeypatch.setattr(losses, "token_logps", getattr(losses, "token_logps", None), raising=False)
    found = changes_of(tmp_path / "own.py", """
def mine(so_far):
    return credit.outcome_credit(so_far)
ARMS["mine"] = dataclasses.replace(ARMS["grpo"], label="mine")
credit.CREDITS["outcome_credit"] = mine
def get_config():
    credit.CREDITS["verdict_or_so"] = mine
    losses.token_logps = mine
    return load_shipped("tiny")
def complete(config, given):
    credit.VERDICTS = ("CORRECT",)
    del ARMS["grpo"]
""")
    assert set(found) == {
        "tango_jax.arms.ARMS['mine']", "tango_jax.arms.ARMS['grpo']", "tango_jax.rl.credit.CREDITS['outcome_credit']",
        "tango_jax.rl.credit.CREDITS['verdict_or_so']", "tango_jax.rl.losses.token_logps",
        "tango_jax.rl.credit.VERDICTS",
    }  # fmt: skip
    assert found["tango_jax.rl.credit.CREDITS['outcome_credit']"] == "<function mine>"
    assert found["tango_jax.arms.ARMS['grpo']"] == "removed"
    assert "label='mine'" in found["tango_jax.arms.ARMS['mine']"]


def test_a_change_that_another_file_has_replaced_is_that_files(tmp_path, monkeypatch):
    monkeypatch.setitem(credit.CREDITS, "outcome_credit", credit.CREDITS["outcome_credit"])
    change = 'credit.CREDITS["outcome_credit"] = lambda so_far: None'
    text = f'{change}\ndef get_config():\n    return load_shipped("tiny")\n'
    name = "tango_jax.rl.credit.CREDITS['outcome_credit']"
    assert set(changes_of(tmp_path / "first.py", text)) == {name}
    assert set(changes_of(tmp_path / "second.py", text)) == {name}
    in_force = {source.path: [change.name for change in source.changes] for source in executed_configs()}
    assert in_force[str(tmp_path / "first.py")] == [] and in_force[str(tmp_path / "second.py")] == [name]
    load_shipped("tiny")
    assert executed_configs()[-1].is_shipped


def test_a_function_is_traced_to_its_file(tmp_path, monkeypatch):
    monkeypatch.setitem(credit.CREDITS, "outcome_credit", credit.CREDITS["outcome_credit"])
    (tmp_path / "credit_of_the_test.py").write_text("def mine(so_far):\n    return None\n")
    changes_of(tmp_path / "own.py", """
import functools
from credit_of_the_test import mine
credit.CREDITS["outcome_credit"] = functools.partial(mine)
def get_config():
    return load_shipped("tiny")
""")
    [change] = executed_configs()[-1].changes
    assert change.file == str(tmp_path / "credit_of_the_test.py")
