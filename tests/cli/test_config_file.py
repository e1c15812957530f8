"""Whatever is wrong in a config file, or with the folder to write into, ends in one line that names the place."""

import copy
import os
import re

import pytest

from support.paths import ROOT
from tango_jax.cli import config_file
from tango_jax.cli.command_line import load_config, parse_command_line
from tango_jax.defaults import default_config
from tango_jax.method import tango
from tango_jax.rl import rewards
from tango_jax.tasks import registry

HEAD = "from ml_collections import ConfigDict, config_dict\nfrom tango_jax.config import default_config\n"


def changed(line: str) -> str:
    """A file with one line between the defaults and their return: line 4."""
    return f"{HEAD}def get_config(a):\n    config = default_config(); config.unlock(); {line}\n    return config\n"


FILES = {
    "syntax error": ("def get_config(a):\n    return (\n", r"mistaken\.py, line 2: SyntaxError: '\(' was never closed"),
    "name": ("def get_config(a):\n    return default_confg()\n", r"mistaken\.py, line 2: NameError: .*default_confg"),
    "name at the top": ("x = 1\ny = z\n", r"mistaken\.py, line 2: NameError: name 'z' is not defined"),
    "import": ("import nothing_of_that_name\n", r"mistaken\.py, line 1: ModuleNotFoundError: .*nothing_of_that_name"),
    "arithmetic": ("def get_config(a):\n    return 1 / 0\n", r"mistaken\.py, line 2: ZeroDivisionError"),
    "recursion": ("def get_config(a):\n    return get_config(a)\n", r"mistaken\.py, line 2: RecursionError"),
    "leaves": ("import sys\nsys.exit(0)\n", r"mistaken\.py, line 2: SystemExit: 0"),
    "silent": ("assert False\n", r"mistaken\.py, line 1: AssertionError: no message"),
    "several lines": ("raise KeyError('a\\nb\\x1b[31m')\n", r"mistaken\.py, line 1: KeyError: a b\\x1b\[31m"),
    "a nested file": (f"{HEAD}from tango_jax.cli.config_file import load_shipped\ndef get_config(a):\n"
                      f"    return load_shipped('qwen2_5_math_7b', 'x')\n",
                      r"mistaken\.py, line 5: .*math_7b\.py, line \d+: no published setting for 'x': write"),
    "no function": ("get_config = 3\n", r"mistaken\.py has no function get_config\(\)"),
    "nothing": ("", r"mistaken\.py has no function get_config\(\)"),
    "no return": (f"{HEAD}def get_config(a):\n    default_config()\n", r"returned None, not a .* end it with return"),
    "a number": ("def get_config(a):\n    return 3\n", r"mistaken\.py: get_config returned 3, not a ConfigDict"),
    "empty": (f"{HEAD}def get_config(a):\n    return ConfigDict()\n", r"lacks ablation\.arms, .*: start from default"),
    "no key": (changed("del config.seed"), r"mistaken\.py: the config lacks seed: start from default_config\(\)"),
    "no group": (changed("config.rl = {}"), r"mistaken\.py: the config lacks rl\.alpha_final, "),
    "None for a group": (changed("config.rl = None"), r"mistaken\.py: the config lacks rl\.alpha_final, "),
    "another key": (changed("config.rl.gama = 1"), r"unknown config key 'rl\.gama'; did you mean rl\.gamma\?"),
    "a locked key": (changed("config.lock(); config.sed = 1"), r"line 4: AttributeError: .*\"sed\".*mean \"seed\"\?$"),
    "a numbered key": (changed("config[3] = 1"), r"mistaken\.py: TypeError"),
    "a text": (changed("config.rl.gamma = '0.8'"), r"mistaken\.py, line 4: TypeError: .*'gamma'.*<class 'str'>"),
    "a function": (changed("config.generator.rewards = len"), r"line 4: rewards=len: a setting takes the name of a "
                   r"function, FILE\.py:name or package\.module:name, not the function itself$"),
    "None": (changed("config.rl.gamma = None"), r"mistaken\.py: rl\.gamma=None must be of type float, like .* 0\.8"),
    "True": (changed("config.seed = True"), r"mistaken\.py: seed=True must be of type int, like its default 0"),
    "elements": (changed("config.generator.row_buckets = (8.0,)"), r"row_buckets=\(8\.0,\) must be of type tuple"),
    "no value": (changed("config.seed = config_dict.required_placeholder(int)"), r"mistaken\.py: RequiredValueError"),
    "an arm changed in place": ("from tango_jax.method.arms import ARMS\nARMS['tango'].turns['generator'] = None\n",
                                r"mistaken\.py, line 2: TypeError: 'mappingproxy' object does not support item assign"),
    "another arm": ("from tango_jax.method.arms import ARMS\ndef get_config(a):\n    ARMS['mine'] = ARMS['grpo']\n",
                    r"mistaken\.py, line 3: TypeError: 'mappingproxy' object does not support item assignment"),
    "an algorithm less": ("from tango_jax.rl.algorithms import ALGORITHMS\ndel ALGORITHMS['grpo']\n",
                          r"mistaken\.py, line 2: TypeError: 'mappingproxy' object does not support item deletion"),
    "too large": (changed("config.rl.gamma = 10**400"), r"mistaken\.py, line 4: OverflowError"),
}


@pytest.mark.parametrize("top, made, completed", [
    ("{}", "0", "0"), ("0", "{}", "0"), ("0", "0", "{}"),
], ids=["the file", "get_config", "complete"])
@pytest.mark.parametrize("module, name, change", [
    (tango, "solve", "setattr(tango, 'solve', len)"),
    (rewards, "VERDICTS", "setattr(rewards, 'VERDICTS', ())"),
    (registry, "SYNTHETIC['last_letter']", "registry.SYNTHETIC.update(last_letter=len)"),
])
def test_a_config_file_replaces_nothing_in_the_package(
    tmp_path, monkeypatch, top, made, completed, module, name, change
):
    monkeypatch.setattr(module, name.partition("[")[0], copy.copy(getattr(module, name.partition("[")[0])))
    file = tmp_path / "own.py"
    file.write_text(f"""{HEAD}from tango_jax.method import tango
from tango_jax.rl import rewards
from tango_jax.tasks import registry
{top.format(change)}
def get_config():
    {made.format(change)}
    return default_config()
def complete(config, given):
    {completed.format(change)}
""")
    shown = re.escape(f"{module.__name__}.{name}".replace("['", ".").replace("']", ""))
    with pytest.raises(ValueError, match=rf"^{file} replaces .*{shown}.* in the package, .*; a setting takes the name"):
        load_config(str(file))


@pytest.mark.parametrize("what", FILES)
def test_a_mistake_in_a_config_file_is_one_line(tmp_path, what):
    text, message = FILES[what]
    path = tmp_path / "mistaken.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_config(str(path))
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    with pytest.raises(SystemExit) as stopped:
        parse_command_line("train", "doc", [f"--config={path}", f"--workdir={tmp_path / 'run'}"], "runs/x")
    assert stopped.value.code == 2 and str(stopped.value) == f"error: {error.value}"
    assert sorted(tmp_path.iterdir()) == [path]  # no compiled copy beside it either


def test_a_config_file_that_loads_itself_is_one_line(tmp_path):
    path = tmp_path / "mistaken.py"
    path.write_text("from tango_jax.train import load_config\ndef get_config():\n    return load_config('tiny')\n"
                    "load_config(__file__)\n")
    with pytest.raises(ValueError, match=r"^.*mistaken\.py: it starts a command that loads this file again: put the "):
        load_config(str(path))


@pytest.mark.parametrize("content", [b"# \xfc\n", "x = 1\n".encode("utf-16"), b"x = 1\0\n"])
def test_a_file_that_is_no_text_is_named(tmp_path, content):
    path = tmp_path / "mistaken.py"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"mistaken\.py.*(encoding|null byte)"):
        load_config(str(path))


def test_a_folder_is_no_config_file(tmp_path):
    (tmp_path / "mistaken.py").mkdir()
    with pytest.raises(ValueError, match=r"mistaken\.py' is not a Python file that exists"):
        load_config(str(tmp_path / "mistaken.py"))


def test_a_file_that_changes_at_once_is_read_anew(tmp_path):
    path = tmp_path / "quick.py"
    for seed in (1, 2, 3):  # of one length, within a second
        path.write_text(changed(f"config.seed = {seed}"))
        assert load_config(str(path)).seed == seed


def test_the_defaults_have_their_own_keys_and_no_others():
    config = default_config()
    assert config_file.check_keys(config) is None
    with config.unlocked():
        del config.rl.gamma
    with pytest.raises(ValueError, match="rl.gamma"):
        config_file.check_keys(config)


@pytest.mark.parametrize("folder, message", [
    ("", r"--workdir is empty: give a path"),
    ("{file}", r"--workdir=.*/file is a file; name a folder"),
    ("{file}/run", r"--workdir=.*/file/run cannot be created: .*/file is not a folder"),
    ("{file}/a/b", r"--workdir=.*/file/a/b cannot be created: .*/file is not a folder"),
    ("{link}", r"--workdir=.*/link is a file; name a folder"),
    ("~nobody_of_that_name/x", r"--workdir='~nobody_of_that_name/x' is not a valid path \(Could not determine home"),
    ("x" * 300, r"--workdir='x+\.\.\. is not a valid path \(File name too long\)"),
    ("a\0b", r"--workdir='a\\x00b' is not a valid path"),
    ("{closed}/run", r"--workdir=.*/closed/run: this user may not write into .*/closed; name another folder"),
])
def test_a_workdir_that_cannot_be_is_refused(tmp_path, monkeypatch, folder, message):
    places = {name: tmp_path / name for name in ("file", "link", "closed")}
    places["file"].write_text("")
    places["link"].symlink_to(tmp_path / "nothing")
    places["closed"].mkdir()
    # Whoever runs the tests may be root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: os.fspath(path) != os.fspath(places["closed"]))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit, match=message):
        argument = f"--workdir={folder.format(**places)}"
        parse_command_line("train", "doc", [f"--config={ROOT / 'configs/tiny.py'}", argument], "runs/x")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("key", ["generator.checkpoint", "verifier.init_from", "generator.template"])
@pytest.mark.parametrize("path", ["~nobody_of_that_name/x", "x" * 300])
def test_paths_in_the_config_that_cannot_be_are_refused(key, path):
    with pytest.raises(SystemExit, match=r"error: .*(init_from|checkpoint|template).* is not a valid path"):
        arguments = [f"--config={ROOT / 'configs/tiny.py'}", f"--config.{key}={path}"]
        parse_command_line("train", "doc", arguments, "runs/x")


def test_a_config_that_takes_no_argument(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text(f"{HEAD}def get_config():\n    return default_config()\n")
    assert load_config(str(path)).seed == default_config().seed
    for given in (f"{path}:rloo", "last_letter:rloo"):
        with pytest.raises(ValueError, match=r"\.py takes no argument, and was given :'rloo': leave it out, and set"):
            load_config(given)
