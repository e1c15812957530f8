"""Arms are data: an arm of one's own needs nothing but its entry, and no other file knows an arm by its name."""

import ast
import base64
import dataclasses
import gzip
import json
import re
from pathlib import Path

import pytest

import tango_jax
from support.paths import CONFIGS
from tango_jax.arms import ARMS, JUDGE, SOLVE_WITH_GOLD_STEPS, Arm, Look
from tango_jax.cli.command_line import load_config
from tango_jax.cli.validation import validate
from tango_jax.loop.run import run_or_resume
from tango_jax.planning.run_plan import PlanOptions, make_plan
from tango_jax.planning.targets import TARGETS
from tango_jax.runtime.console import Console
from tango_jax.tracking.metrics import read_metrics
from tango_jax.tracking.plots import plot_ablation, save_figure
from tango_jax.viewer import comparison
from tango_jax.viewer.build import build_page
from tango_jax.viewer.lines import lines_of
from tango_jax.viewer.runs import find_runs
from torture.runs import ROLES, SMALL

PACKAGE = Path(tango_jax.__file__).parent
SILENT = Console(enabled=False)


@pytest.fixture
def own_arm(monkeypatch) -> Arm:
    """The verifier is trained in the warm-up only; the generator then learns from the labels of the task."""
    look = Look("#123456", "--", "cross")
    arm = Arm(help="an arm of one's own", label="own label", look=look, is_interleaved=False, needs_gold_steps=True,
              turns={"generator": SOLVE_WITH_GOLD_STEPS, "verifier": JUDGE})  # fmt: skip
    monkeypatch.setitem(ARMS, "own", arm)
    return arm


@pytest.fixture
def config(own_arm):
    # The roles are of one shape, and start as they are: fewer programs.
    settings = ("mesh.fsdp=1", "sft.steps=0", "max_prompt=64", "max_response=48")
    overrides = [*SMALL, *(f"{role}.{setting}" for role in ROLES for setting in settings)]
    config = load_config(str(CONFIGS / "tiny.py"), [*overrides, "arm=own", "compile_cache="])
    validate(config)
    return config


def test_an_arm_of_ones_own_is_trained_drawn_and_reported(config, own_arm, tmp_path):
    workdir = tmp_path / "runs" / "own"
    assert run_or_resume(config, workdir, SILENT)["arm"] == "own"
    rows = read_metrics(workdir / "metrics.jsonl")
    assert [row["phase"] for row in rows if row["phase"] != "eval"] == ["warmup", "generator", "generator"]
    for row in rows:
        if row["phase"] == "generator":  # step labels, and no verifier to ask for them
            assert row["generator/alpha"] > 0 and "generator/reward/step" in row
            assert not any(name.startswith("verifier/") for name in row)
    assert (workdir / "curves.png").read_bytes().startswith(b"\x89PNG")
    save_figure(plot_ablation({"own": {0: rows}}), tmp_path / "ablation.png")
    assert (tmp_path / "ablation.png").read_bytes().startswith(b"\x89PNG")

    runs = find_runs([workdir])
    drawn = comparison.comparison(lines_of(runs))
    assert own_arm.label in json.dumps(drawn) and own_arm.look.colour in json.dumps(drawn)
    assert drawn["table"]["rows"][0][0] == own_arm.label
    build_page(runs, tmp_path / "report.html")
    payload = re.search(r'id="data-facts">(.*?)</script>', (tmp_path / "report.html").read_text("utf-8"))[1]
    [facts] = json.loads(gzip.decompress(base64.b64decode(payload)))["runs"]
    assert (facts["arm"], facts["is_default_arm"]) == ("own", False)


def test_an_arm_of_ones_own_is_planned(config):
    target = dataclasses.replace(TARGETS["a100-80gb"], compilers=("a_package_that_is_not_there", "json"))
    plan = make_plan(PlanOptions(config, target, devices=1, per_process=1, filled=0.5, is_json=False), SILENT)
    assert plan.counts == {"verifier": 1, "generator": 2}
    assert {role: set(turn.sampled) for role, turn in plan.likely.turns.items()} == {
        "verifier": {"generator", "verifier"}, "generator": {"generator"},
    }  # fmt: skip


# Words that mean something else where they stand: a loss algorithm, a field of a record.
OTHER_MEANINGS = {
    "grpo": {"rl/algorithms.py", "role_defaults.py"},
    "gold_steps": {
        "evaluation/output.py", "tasks/user_task.py", "tracking/rollout_rows.py", "viewer/pack.py", "viewer/quality.py"
    },  # fmt: skip
}


def test_no_other_file_spells_the_name_of_an_arm():
    spelled = [(path.relative_to(PACKAGE).as_posix(), name) for path in PACKAGE.rglob("*.py")
               for text in strings_of(path) for name in ARMS if text == name]  # fmt: skip
    found = {(file, name) for file, name in spelled if file not in OTHER_MEANINGS.get(name, set()) | {"arms.py"}}
    assert found == set()
    assert {name for file, name in spelled if file == "arms.py"} == set(ARMS)  # the search would find them


def strings_of(path: Path) -> list[str]:
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node.value for node in tree if isinstance(node, ast.Constant) and isinstance(node.value, str)]
