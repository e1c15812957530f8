"""Shipped configs by their name, from any folder; and a config file of one's own that starts from one of them."""

import re
from pathlib import Path

import pytest

import tango_jax
from support.policies import policies_of
from tango_jax import ablate, export, generate, plan, sft, train
from tango_jax.cli.command_line import load_config, parse_command_line
from tango_jax.cli.config_file import load_shipped, shipped_configs
from tango_jax.config import ROLES, flatten
from tango_jax.loop.imitation import sft_pairs
from tango_jax.method.own_arm import make_schedule
from tango_jax.tasks.registry import make_task
from tango_jax.tracking.evaluations import method_of, setup_of
from tango_jax.tracking.stored_runs import stored_curves

ROOT = Path(tango_jax.__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Not the folder of the checkout, in which configs/tiny.py would be found by its path."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "own_problems"])  # it needs arguments
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
    assert config == load_config("tiny") == plan.parse_options(["--config=tiny"])[0].config
    with pytest.raises(SystemExit):
        export.main([f"--workdir={tmp_path}", "--out=out", "--config=tinny"])
    assert "config 'tinny' is not a Python file" in capsys.readouterr().err


@pytest.mark.parametrize("command", [train, sft, ablate, plan, generate])
def test_without_a_config_every_command_says_how_to_choose_one(command, tmp_path, capsys):
    for arguments in ([], ["--config.seed=1", "--model=M", "--problems=F"]):
        with pytest.raises(SystemExit) as stopped:
            command.main(arguments)
        said = str(stopped.value)
        assert stopped.value.code == 2 and "\n" not in said
        assert said.startswith("error: no --config is given: --config=")
        assert all(name.rstrip(",;") in NAMES for name in re.findall(r"--config=(\S+)", said))
    with pytest.raises(SystemExit, match=r"^error: no --config .*\nerror: unknown argument .--tiny.; did you mean"):
        command.main(["--tiny"])
    assert capsys.readouterr().out == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text, meant", [
    ("tinny", " (did you mean tiny?)"),
    ("configs/tiny", " (did you mean tiny?)"),
    ("configs/tiny.py", " (did you mean tiny?)"),  # of a checkout
    ("zzz", ""),
    ("", ""),
])
def test_an_unknown_config_is_answered_with_the_shipped_ones(text, meant):
    with pytest.raises(SystemExit) as stopped:
        parse_command_line("train", "doc", [f"--config={text}:rloo"], "runs/x")
    assert stopped.value.code == 2 and str(stopped.value) == (
        f"error: config {text!r} is not a Python file that exists, nor a shipped config{meant}; "
        f"choose one of the shipped ones: {', '.join(NAMES)}"
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


TAKES_ARGUMENTS = """
from tango_jax.config import default_config
def get_config(argument="", *, size, name="none"):
    config = default_config()
    config.notes = f"{argument},{size},{name}"
    return config
def complete(config, given):
    if "seed" not in given:
        config.seed = config.rl.prompts_per_step
    if config.arm == "grpo":
        raise ValueError("no grpo here: choose another")
    config.task.min_steps = 1 // config.task.data_seed if config.task.data_seed else 5
"""


@pytest.fixture
def arguments(tmp_path) -> list[str]:
    (tmp_path / "taking.py").write_text(TAKES_ARGUMENTS)
    return ["--config=taking.py:x", "--size=3"]


def parsed(arguments: list[str]):
    return parse_command_line("train", "doc", arguments, "runs/x")[0]


def test_a_config_file_takes_arguments_by_name_and_completes_what_follows(arguments):
    config = parsed([*arguments, "--config.rl.prompts_per_step=64"])
    assert (config.notes, config.seed, config.task.min_steps) == ("x,3,none", 64, 5)
    assert parsed([*arguments, "--name", "a b", "--config.seed=7"]).seed == 7
    assert parsed([*arguments, "--name", "a b"]).notes == "x,3,a b"
    assert load_config("taking.py:x", ["seed=7"], size="3") == parsed([*arguments, "--config.seed=7"])


@pytest.mark.parametrize("more, messages", [
    (["--sise=3"], ["unknown argument '--sise=3'; did you mean --size? --help shows the usage"]),
    (["--size="], ["--size has no value: write --size=VALUE"]),
    (["--name"], ["--name has no value: write --name=VALUE"]),
    (["--config.arm=grpo"], ["no grpo here: choose another"]),
    (["--config.rl.gamma=-1"], ["rl.gamma=-1.0 must lie between 0.0 and 100.0"]),
    (["--config.task.data_seed=2", "--config.rl.gama=1", "--worksir=x"], [
        "unknown argument '--worksir=x'; did you mean --workdir? --help shows the usage",
        "unknown config key 'rl.gama'; did you mean rl.gamma?"]),
])
def test_mistakes_in_such_arguments(arguments, more, messages, capsys):
    with pytest.raises(SystemExit) as stopped:
        parsed([*arguments, *more])
    assert stopped.value.code == 2 and capsys.readouterr().err.splitlines() == [f"error: {line}" for line in messages]


def test_what_a_config_file_needs_or_does_not_take_is_named(arguments, tmp_path):
    with pytest.raises(ValueError, match=r"^taking\.py needs --size=VALUE: give it$"):
        load_config("taking.py")
    with pytest.raises(ValueError, match=r"^taking\.py takes no argument --model; it takes --size and --name$"):
        load_config("taking.py", size="3", model="x")
    with pytest.raises(ValueError, match=r"tiny\.py takes no argument --model, nor any other by name$"):
        load_shipped("tiny", model="x")
    text = TAKES_ARGUMENTS.replace("1 //", "config.nothing //")
    (tmp_path / "taking.py").write_text(text)
    with pytest.raises(ValueError, match=r"^taking\.py, line 12: AttributeError: "):
        load_config("taking.py", ["task.data_seed=1"], size="3")


@pytest.mark.parametrize("seed", range(3))
def test_the_quickstart_has_stored_runs_to_stand_beside(seed):
    config = load_config("last_letter", [f"seed={seed}", f"compare_with={ROOT / 'configs/results/last_letter.csv'}"])
    stored = stored_curves(config)
    assert set(stored) >= {"grpo", "gold_steps"}
    found = {(row.setup, row.method) for curve in stored.values() for row in curve.evaluations}
    assert found == {(setup_of(config), method_of(config))}


def test_the_two_minutes_config_fills_its_batches_and_cuts_no_text():
    config = load_config("last_letter_mini", [f"{role}.mesh.fsdp=1" for role in ROLES])
    rows = config.rl.prompts_per_step * config.rl.samples_per_prompt
    assert rows == 48 and config.eval.problems % rows == config.eval.pool % rows == 0
    assert config.generator.row_buckets == (config.rl.prompts_per_step, rows)
    assert config.verifier.row_buckets == (rows,)
    policies = policies_of(config)
    task = make_task(config, {role: policy.tokenizer for role, policy in policies.items()})
    for policy in policies.values():
        assert len(sft_pairs(policy, task, "train", 0, 300)) == 300  # those that do not fit are left out
    assert {task.test_problem(index).size for index in range(50)} == {4, 5}
    assert {task.train_problem(index).size for index in range(50)} == {4, 5}
    assert {task.verifier_problem(index).size for index in range(50)} == {2, 3}


def test_the_two_minutes_config_does_less_than_the_quickstart():
    """Its time is given by comparison with the quickstart's: responses sampled in RL, tokens of stage 1."""
    mini, quickstart = load_config("last_letter_mini"), load_config("last_letter")

    def sampled(config):
        return make_schedule(config).num_turns * config.rl.prompts_per_step * config.rl.samples_per_prompt

    def imitated(config):
        return sum(role.sft.steps * role.sft.batch_size * role.sft.pack_length
                   for role in (config.generator, config.verifier))

    assert make_schedule(mini).num_turns == 6 + 24 + 8
    assert sampled(mini) < sampled(quickstart) / 3 and imitated(mini) < imitated(quickstart)
