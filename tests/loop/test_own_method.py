"""Runs whose method is in a user's files: what they store of it, and that they go on under no other one unnoticed."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from tango_jax.ablation.experiment import run_experiment
from tango_jax.ablation.planned_runs import make_plan
from tango_jax.cli.validation import validate
from tango_jax.report import main as report
from tango_jax.runtime.console import Console
from tango_jax.tracking.provenance import method_digests, read_provenance
from tango_jax.train import load_config, train
from tango_jax.viewer.lines import lines_of
from tango_jax.viewer.runs import find_runs
from torture.runs import ROLES, SMALL

SILENT = Console(enabled=False)
REWARD = "def reward(solution):\n    return -0.001 * len(solution.text)\n"
METHOD = """
import dataclasses
from tango_jax.method.arms import ARMS
from tango_jax.cli.config_file import load_shipped
from tango_jax.method import baselines
def my_solve(t):
    return baselines.solve_alone(t)
mine = dataclasses.replace(ARMS["grpo"], label="my own arm", turns={"generator": my_solve})
def get_config():
    config = load_shipped("tiny")
    config.arm = f"{__file__}:mine"
    return config
"""


class Place:
    """A folder with a config file and a reward, in which runs of an arm of its own are made."""

    def __init__(self, folder: Path):
        self.folder, self.workdir = folder, folder / "run"
        self.config, self.reward = folder / "method.py", folder / "reward.py"
        self.write()

    def write(self) -> None:
        self.config.write_text(METHOD)
        self.reward.write_text(REWARD)

    def load(self, file: Path | None = None, *overrides: str):
        same_shapes = ("mesh.fsdp=1", "sft.steps=0", "max_prompt=64", "max_response=48")  # fewer programs to compile
        settings = [*SMALL, *(f"{role}.{setting}" for role in ROLES for setting in same_shapes),
                    "rl.generator_steps=1", "compile_cache=", f"generator.rewards={self.reward}:reward"]
        return load_config(str(file or self.config), [*settings, *overrides])

    def start(self, workdir: Path | None = None, console: Console = SILENT, config=None) -> dict:
        return train(config or self.load(), workdir or self.workdir, console)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Place:
    place = Place(tmp_path_factory.mktemp("own"))
    place.start()
    return place


@pytest.fixture
def place(made):
    """The finished run, whose files and provenance a test may change."""
    stored = (made.workdir / "provenance.json").read_bytes()
    yield made
    made.write()
    (made.workdir / "provenance.json").write_bytes(stored)
    (made.workdir / "provenance.before.json").unlink(missing_ok=True)


def refused(start_fn, *args) -> str:
    with pytest.raises(ValueError) as error:
        start_fn(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_workdir_says_what_the_run_was_made_with(made):
    stored = json.loads((made.workdir / "provenance.json").read_text())
    [attempt] = stored["attempts"]
    assert attempt["processes"] == 1 and sum(attempt["devices"].values()) == 8 and attempt["platform"] == "cpu"
    assert set(stored["files"]) == {"arm", "generator.rewards (reward)"}
    for key, path in (("arm", made.config), ("generator.rewards (reward)", made.reward)):
        entry = stored["files"][key]
        assert entry["path"] == str(path) and (made.workdir / entry["copy"]).read_bytes() == path.read_bytes()
        assert attempt["files"][key] == entry["sha256"]
    summary = json.loads((made.workdir / "summary.json").read_text())["provenance"]
    assert summary["jax"] == attempt["jax"] and summary["files"] == attempt["files"] == method_digests(stored)


def test_an_edited_reward_is_refused_until_it_is_accepted(place, capsys):
    place.reward.write_text(REWARD.replace("0.001", "0.002"))
    message = refused(place.start)
    assert message.startswith(f"{place.workdir} holds a run that was begun with another method (generator.rewards "
                              f"(reward): {place.reward} has changed; {place.workdir}/user_files/")
    accept = message.rpartition("accept the change with `")[2].partition("`")[0]
    assert accept == shlex.join(["mv", f"{place.workdir}/provenance.json", f"{place.workdir}/provenance.before.json"])
    subprocess.run(shlex.split(accept), check=True)
    place.start(console=Console())
    assert "holds a finished run" in capsys.readouterr().out


def test_the_report_keeps_two_methods_apart_and_shows_each(place, tmp_path):
    """Two seeds of one arm and the same settings, whose turn was edited in between."""
    runs = find_runs([place.workdir])
    other = json.loads(json.dumps(runs[0].provenance))
    assert len(lines_of([runs[0], runs[0]._replace(name="again", provenance=other)])) == 1
    other["files"]["arm"]["sha256"] = "0" * 64
    labels = [line.label for line in lines_of([runs[0], runs[0]._replace(name="other", provenance=other)])]
    assert len(labels) == 2 and all(label.startswith("arm file=") for label in labels)
    report([str(place.workdir), f"--out={tmp_path / 'report.html'}"])
    assert (tmp_path / "report.html").stat().st_size > 1000


def test_an_own_arm_in_an_ablation(place, tmp_path):
    config = place.load(None, f"ablation.arms=('{place.config}:mine', 'grpo')", "ablation.seeds=(0,)")
    validate(config)
    outcome = run_experiment(make_plan(config, tmp_path / "runs"), SILENT)
    assert {row.arm for row in outcome.rows} == {"mine", "grpo"}
    keys = {arm: set(method_digests(read_provenance(tmp_path / "runs" / arm / "seed_0"))) for arm in ("mine", "grpo")}
    assert keys == {"mine": {"arm", "generator.rewards (reward)"}, "grpo": {"generator.rewards (reward)"}}
