"""Shipped configs by their name, from any folder; and a config file of one's own that starts from one of them."""

from pathlib import Path

import pytest

import tango_jax
from tango_jax import export, plan
from tango_jax.cli.command_line import load_config, parse_command_line
from tango_jax.cli.config_file import load_shipped, shipped_configs
from tango_jax.config import flatten

ROOT = Path(tango_jax.__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Not the folder of the checkout, in which configs/tiny.py would be found by its path."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_gives_what_the_path_gives(name):
    assert list(shipped_configs()) == NAMES
    assert flatten(load_config(name)) == flatten(load_config(f"{ROOT}/configs/{name}.py"))


def test_a_name_takes_an_argument_and_overrides():
    config = load_config("qwen2_5_math_7b:rloo", ["seed=3"])
    assert (config.generator.loss.algorithm, config.seed) == ("rloo", 3)
    with pytest.raises(ValueError, match=r"qwen2_5_math_7b\.py, line \d+: no published setting for 'x'"):
        load_config("qwen2_5_math_7b:x")


def test_every_command_takes_a_name(tmp_path, capsys):
    config, _ = parse_command_line("train", "doc", ["--config=tiny"], "runs/x")
    assert config == load_config("tiny") == plan.parse_options(["--config=tiny"]).config
    config, _ = parse_command_line("train", "doc", [], "runs/x")
    assert config == load_config("last_letter") == plan.parse_options([]).config
    with pytest.raises(SystemExit):
        export.main([f"--workdir={tmp_path}", "--out=out", "--config=tinny"])
    assert "config 'tinny' is not a Python file" in capsys.readouterr().err


@pytest.mark.parametrize("text, meant", [
    ("tinny", " (did you mean tiny?)"),
    ("configs/tiny", " (did you mean tiny?)"),
    ("configs/tiny.py", " (did you mean tiny?)"),  # of a checkout
    ("zzz", ""),
    ("", ""),
])  # fmt: skip
def test_an_unknown_config_is_answered_with_the_shipped_ones(text, meant):
    with pytest.raises(SystemExit) as stopped:
        parse_command_line("train", "doc", [f"--config={text}:rloo"], "runs/x")
    assert stopped.value.code == 2 and str(stopped.value) == (
        f"error: config {text!r} is not a Python file that exists, nor a shipped config{meant}; "
        f"the shipped ones are {', '.join(NAMES)}"
    )


def test_a_config_of_ones_own_starts_from_a_shipped_one(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from tango_jax.cli.config_file import load_shipped\n\n\n"
        "def get_config(argument=''):\n"
        "    config = load_shipped('qwen2_5_math_7b', argument)\n"
        "    config.rl.generator_steps = 7\n"
        "    return config\n"
    )
    config = load_config("mine.py:rloo")
    assert (config.rl.generator_steps, config.generator.loss.algorithm) == (7, "rloo")
    assert load_shipped("qwen2_5_math_7b").rl.generator_steps != 7
