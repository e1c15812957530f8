"""Messages name other commands as the user typed this one."""

import ast
import sys

import pytest

from support.paths import ROOT
from tango_jax.cli.arguments import Parser
from tango_jax.runtime.failures import describe, typed_command

PACKAGE = ROOT / "tango_jax"


@pytest.mark.parametrize("argv, expected", [
    (["/opt/bin/tango-train", "--config=tiny"], "tango-report"),
    (["/home/me/tango_jax/train.py"], "python -m tango_jax.report"),  # as -m leaves it
    ([], "python -m tango_jax.report"),  # Python inside another program
])
def test_commands_are_named_as_this_one_was_started(monkeypatch, argv, expected):
    monkeypatch.setattr(sys, "argv", argv)
    assert typed_command("report") == expected
    assert Parser("report", "").prog == expected
    assert expected.replace("report", "plan") in describe(MemoryError())


def test_no_message_names_a_command_by_itself():
    """Text that is neither a docstring nor typed_command's own."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docstrings = {id(node.body[0].value) for node in ast.walk(tree)
                      if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)}
        texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
        found += [f"{path.relative_to(ROOT)}:{node.lineno}" for node in texts
                  if "python -m tango_jax." in node.value and id(node) not in docstrings]
    assert [place.split(":")[0] for place in found] == ["tango_jax/runtime/failures.py"]
