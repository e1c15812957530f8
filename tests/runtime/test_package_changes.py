"""What a config file changes in the package is noticed, whenever it does so, and named where it was defined."""

import pytest

import tango_jax.loop.turn  # noqa: F401  as training has it; it imports the tables of the method
from tango_jax.cli.config_file import load_shipped, open_config
from tango_jax.method import tango
from tango_jax.rl import losses, rewards
from tango_jax.runtime.package_changes import executed_configs
from tango_jax.text import prompts

HEAD = """
import dataclasses
from tango_jax.cli.config_file import load_shipped
from tango_jax.method import tango
from tango_jax.method.arms import ARMS
from tango_jax.rl import losses, rewards
from tango_jax.text import prompts
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
def _table_put_back():
    """As it was before the test, in the same order."""
    before = dict(prompts.PROMPTS)
    yield
    prompts.PROMPTS.clear()
    prompts.PROMPTS.update(before)


@pytest.mark.usefixtures("_table_put_back")
def test_entries_functions_and_constants_are_noticed_in_every_part_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(rewards, "VERDICTS", rewards.VERDICTS)
    monkeypatch.setattr(tango, "solve", tango.solve)
    monkeypatch.setattr(losses, "token_logps", getattr(losses, "token_logps", None), raising=False)
    found = changes_of(tmp_path / "own.py", """
def mine(t):
    return None
prompts.PROMPTS["mine"] = dataclasses.replace(prompts.SOLVE, stream="mine")
tango.solve = mine
def get_config():
    prompts.PROMPTS["or so"] = prompts.SOLVE
    losses.token_logps = mine
    return load_shipped("tiny")
def complete(config, given):
    rewards.VERDICTS = ("CORRECT",)
    del prompts.PROMPTS["informed"]
""")
    assert set(found) == {
        "tango_jax.text.prompts.PROMPTS['mine']", "tango_jax.text.prompts.PROMPTS['informed']",
        "tango_jax.text.prompts.PROMPTS['or so']", "tango_jax.method.tango.solve", "tango_jax.rl.losses.token_logps",
        "tango_jax.rl.rewards.VERDICTS",
    }  # fmt: skip
    assert found["tango_jax.method.tango.solve"] == "<function mine>"
    assert found["tango_jax.text.prompts.PROMPTS['informed']"] == "removed"
    assert "stream='mine'" in found["tango_jax.text.prompts.PROMPTS['mine']"]


def test_a_change_that_another_file_has_replaced_is_that_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tango, "solve", tango.solve)
    change = "tango.solve = lambda t: None"
    text = f'{change}\ndef get_config():\n    return load_shipped("tiny")\n'
    name = "tango_jax.method.tango.solve"
    assert set(changes_of(tmp_path / "first.py", text)) == {name}
    assert set(changes_of(tmp_path / "second.py", text)) == {name}
    in_force = {source.path: [change.name for change in source.changes] for source in executed_configs()}
    assert in_force[str(tmp_path / "first.py")] == [] and in_force[str(tmp_path / "second.py")] == [name]
    load_shipped("tiny")
    assert executed_configs()[-1].is_shipped


def test_a_function_is_traced_to_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tango, "solve", tango.solve)
    (tmp_path / "turn_of_the_test.py").write_text("def mine(t):\n    return None\n")
    changes_of(tmp_path / "own.py", """
import functools
from turn_of_the_test import mine
tango.solve = functools.partial(mine)
def get_config():
    return load_shipped("tiny")
""")
    [change] = executed_configs()[-1].changes
    assert change.file == str(tmp_path / "turn_of_the_test.py")
