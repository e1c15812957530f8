"""An arm, an algorithm and a loss term of a user's own, in whole runs: by file and by object, resumed, and edited."""

import dataclasses
import inspect
import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from tango_jax.loop import run as loop_run
from tango_jax.method.arms import ARMS, Arm, Look
from tango_jax.method.own_arm import read_arm
from tango_jax.method.rewards import graded, step_rewards
from tango_jax.records import Lesson
from tango_jax.rl import algorithms
from tango_jax.rl.schedule import alpha_of
from tango_jax.runtime.console import Console
from tango_jax.runtime.user_code import given
from tango_jax.tracking.loggers import RunLog
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.provenance import begin, read_provenance
from tango_jax.train import load_config, train
from torture.runs import ROLES, SMALL

SILENT = Console(enabled=False)


def halved_outcome(reward_B, is_action_BT, group_size, loss):
    return np.float32(0.5) * reward_B[:, None] * is_action_BT


def every_step_alone(t):
    solutions, reward = graded(t, t.sample("generator", t.problems(), t.rl.samples_per_prompt))
    steps = step_rewards(t, solutions, [(True,) * len(one.steps) or None for one in solutions])
    alpha = alpha_of(t.generator_step, t.rl, 0.0)
    terms = {"outcome": (1 - alpha, t.algorithm.outcome(reward, solutions)),
             "steps": (alpha, t.algorithm.step(steps, solutions))}
    return Lesson(solutions, reward, terms, {"generator/alpha": alpha, "generator/mine": 7.0}, step_rewards=[steps])


def less_entropy(tokens):
    return 0.01 * tokens.entropy_BT


GRPO = ARMS["grpo"]
MINE = dataclasses.replace(GRPO, label="mine", look=Look("#123456", ":", "x"), turns={"generator": every_step_alone})
HALVED = algorithms.Algorithm(halved_outcome, algorithms.ALGORITHMS["grpo"].step_fn, formula="half of the reward")
# The same as a file that a setting can name.
METHOD = "\n".join([
    "import dataclasses", "import numpy as np", "from tango_jax.method.arms import ARMS, Look",
    "from tango_jax.method.rewards import graded, step_rewards", "from tango_jax.records import Lesson",
    "from tango_jax.rl import algorithms", "from tango_jax.rl.schedule import alpha_of", "",
    *(inspect.getsource(function) for function in (halved_outcome, every_step_alone, less_entropy)),
    'mine = dataclasses.replace(ARMS["grpo"], label="mine", look=Look("#123456", ":", "x"),',
    '    turns={"generator": every_step_alone})',
    'halved = algorithms.Algorithm(halved_outcome, algorithms.ALGORITHMS["grpo"].step_fn)',
])


def settings(*overrides: str):
    same_shapes = ("mesh.fsdp=1", "sft.steps=0", "max_prompt=64", "max_response=48")  # fewer programs to compile
    small = [*SMALL, *(f"{role}.{setting}" for role in ROLES for setting in same_shapes)]
    return load_config("tiny", [*small, "rl.generator_steps=1", "rl.warmup_steps=0", "compile_cache=", *overrides])


def of_file(folder: Path, *overrides: str):
    place = folder / "method.py"
    return settings(f"arm={place}:mine", f"generator.loss.algorithm={place}:halved",
                    f"generator.loss.term={place}:less_entropy", *overrides)


def numbers(workdir: Path) -> list[dict]:
    return [{name: value for name, value in row.items() if not name.startswith(("time/", "throughput/", "memory/"))}
            for row in read_metrics(workdir / "metrics.jsonl")]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A finished run of the file's method."""
    folder = tmp_path_factory.mktemp("method")
    (folder / "method.py").write_text(METHOD)
    with open(folder / "log", "w") as log:
        train(of_file(folder), folder / "run", Console(stream=log))
    return folder


@pytest.mark.long
def test_a_run_by_file_learns_by_its_method_and_stores_it(made):
    summary = json.loads((made / "run/summary.json").read_text())
    assert summary["arm"] == "mine"
    assert "\narm mine (mine): " in (made / "log").read_text()  # its name and label, without the path
    [turn] = [row for row in numbers(made / "run") if row["phase"] == "generator"]
    assert turn["generator/mine"] == 7.0 and turn["generator/alpha"] > 0  # it blends in steps
    stored = read_provenance(made / "run")
    assert {"arm", "generator.loss.algorithm", "generator.loss.term"} <= set(stored["files"])
    assert (made / "run" / stored["files"]["arm"]["copy"]).read_text() == METHOD
    assert stored["arm"]["name"] == "mine" and stored["arm"]["look"]["colour"] == "#123456"
    again = read_arm(stored["arm"])
    assert (again.label, again.look, set(again.turns)) == ("mine", MINE.look, {"generator"})
    with pytest.raises(ValueError, match="the turns of a stored arm cannot be run: name the file that defines it"):
        again.turns["generator"](None)
    [row] = [json.loads(line) for path in (made / "run/rollouts").glob("turn_*") for line in path.open()][:1]
    assert [term["name"] for term in row["advantage"]["terms"]] == ["outcome", "steps"]


@pytest.mark.long
def test_by_object_it_is_the_same_and_resumes_only_from_the_same_source(made, tmp_path):
    def run(arm: Arm) -> dict:
        return train(settings(), tmp_path / "run", SILENT, arm=arm, algorithms={"generator": HALVED},
                     loss_terms={"generator": less_entropy})

    summary = run(MINE)
    assert numbers(tmp_path / "run") == numbers(made / "run") and summary["arm"] == "mine"
    assert json.loads((tmp_path / "run/config.json").read_text())["arm"] == "python:mine"
    assert run(MINE) == summary  # finished

    def every_step_alone(t):  # another source of the same name
        return GRPO.turns["generator"](t)

    with pytest.raises(ValueError, match=r"another method \(arm: the text of the object mine differs from") as error:
        run(dataclasses.replace(MINE, turns={"generator": every_step_alone}))
    [stored] = re.findall(r"the one stored in (\S+)\)", str(error.value))
    assert Path(stored).parent == tmp_path / "run/user_files" and "generator/mine" in Path(stored).read_text()
    assert str(Path.cwd()) not in str(error.value)
    with pytest.raises(ValueError, match="arm=python:mine was handed over by a Python program: call .*train with it"):
        train(load_config(str(tmp_path / "run/config.json")), tmp_path / "run", SILENT)


def test_an_edited_turn_is_no_resumption(made):
    (made / "method.py").write_text(METHOD.replace("7.0", "8.0"))
    try:
        with pytest.raises(ValueError, match=r"was begun with another method \(arm: .*method\.py has changed"):
            train(of_file(made), made / "run", SILENT)
    finally:
        (made / "method.py").write_text(METHOD)


@pytest.mark.long
def test_an_edited_file_does_not_change_a_run_that_goes_on(made, tmp_path, monkeypatch):
    """What it learns by was loaded when it began: a turn after the edit is as it would have been without."""
    (tmp_path / "method.py").write_text(METHOD)
    train(of_file(tmp_path, "rl.generator_steps=2"), tmp_path / "left", SILENT)
    run_turn = loop_run.run_turn

    def edited_after(*args):
        result = run_turn(*args)
        (tmp_path / "method.py").write_text(METHOD.replace("np.float32(0.5)", "np.float32(7)").replace("7.0", "8.0"))
        return result

    monkeypatch.setattr(loop_run, "run_turn", edited_after)
    train(of_file(tmp_path, "rl.generator_steps=2"), tmp_path / "edited", SILENT)
    assert numbers(tmp_path / "edited") == numbers(tmp_path / "left")
    assert [row["generator/mine"] for row in numbers(tmp_path / "left") if row["phase"] == "generator"] == [7.0, 7.0]


def brevity(solution):
    return -0.01 * len(solution.text)


def few_steps(solution):
    return -len(solution.steps)


@pytest.mark.long
def test_several_rewards_by_object(tmp_path):
    config = settings()
    config = config.copy_and_resolve_references()
    config.generator.reward_weights = (1.0, 0.5)
    train(config, tmp_path / "run", SILENT, rewards={"generator": [brevity, few_steps]})
    stored = json.loads((tmp_path / "run/config.json").read_text())
    assert stored["generator.rewards"] == ["python:brevity", "python:few_steps"]
    [turn] = [row for row in numbers(tmp_path / "run") if row["phase"] == "generator"]
    rows = [json.loads(line) for path in (tmp_path / "run/rollouts").glob("turn_*") for line in path.open()]
    terms = [row["reward"]["terms"][2:] for row in rows if row["role"] == "generator"]
    assert {(one["name"], one["weight"]) for row in terms for one in row} == {
        ("own reward (python:brevity)", 1.0), ("own reward (python:few_steps)", 0.5)}
    for index, name in enumerate(("brevity", "few_steps")):
        assert turn[f"generator/reward/own/{name}"] == pytest.approx(np.mean([row[index]["value"] for row in terms]))
    assert {"generator.rewards (brevity)", "generator.rewards (few_steps)"} <= set(
        read_provenance(tmp_path / "run")["files"])
    with pytest.raises(ValueError, match=r"generator\.reward_weights: \[1\.0, 0\.5\] -> \[0\.5, 1\.0\]"):
        config.generator.reward_weights = (0.5, 1.0)
        train(config, tmp_path / "run", SILENT, rewards={"generator": [brevity, few_steps]})


def test_a_reward_of_no_role_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'judge' is no role: choose from generator and verifier"):
        train(settings(), tmp_path / "other", SILENT, rewards={"judge": len})


def scaled(scale):
    def solve_scaled(t):
        lesson = GRPO.turns["generator"](t)
        return dataclasses.replace(lesson, metrics=lesson.metrics | {"generator/scale": float(str(scale)[:3] == "0.5")})

    return solve_scaled


def test_what_a_closure_holds_is_part_of_the_method(tmp_path):
    def started(scale):
        with given({"arm": dataclasses.replace(MINE, turns={"generator": scaled(scale)})}) as named:
            config = settings(f"arm={named['arm']}")
            with RunLog(tmp_path, config, SILENT, resume_at=0, provenance=begin(config, tmp_path, SILENT)) as log:
                log.write(0, "eval", {})

    started(0.5)
    started(0.5)
    with pytest.raises(ValueError, match="another method .arm: the text of the object mine differs from the one"):
        started(0.9)
    with pytest.raises(ValueError, match=r"arm=python:mine: mine holds a value that cannot be compared when the run is "
                       r"resumed \(cannot pickle '_thread.lock' object\): hand over numbers, texts and functions"):
        started(threading.Lock())
