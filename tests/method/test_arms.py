"""Arms are a table of functions: an arm of one's own needs nothing but its record."""

import base64
import dataclasses
import gzip
import json
import re

import pytest

from support.paths import CONFIGS
from tango_jax.cli.command_line import load_config
from tango_jax.cli.validation import validate
from tango_jax.loop.run import run_or_resume
from tango_jax.method import baselines, tango
from tango_jax.method.arms import ARMS, Arm, Look
from tango_jax.planning.assumed_lengths import Even
from tango_jax.planning.run_plan import PlanOptions, make_plan
from tango_jax.planning.targets import TARGETS
from tango_jax.runtime.console import Console
from tango_jax.runtime.user_code import given
from tango_jax.tracking.known_arms import arms_of_runs, known
from tango_jax.tracking.metrics import read_metrics
from tango_jax.viewer import comparison
from tango_jax.viewer.build import build_page
from tango_jax.viewer.lines import lines_of
from tango_jax.viewer.runs import find_runs
from torture.runs import ROLES, SMALL

SILENT = Console(enabled=False)


# The verifier is trained in the warm-up only; the generator then learns from the labels of the task.
OWN = Arm(
    help="an arm of one's own", label="own label", look=Look("#123456", "--", "cross"), is_interleaved=False,
    needs_gold_steps=True, turns={"generator": baselines.solve_with_gold_steps, "verifier": tango.judge},
)


@pytest.fixture
def config():
    # The roles are of one shape, and start as they are: fewer programs.
    settings = ("mesh.fsdp=1", "sft.steps=0", "max_prompt=64", "max_response=48")
    overrides = [*SMALL, *(f"{role}.{setting}" for role in ROLES for setting in settings)]
    with given({"arm": OWN}) as named:
        config = load_config(str(CONFIGS / "tiny.py"), [*overrides, f"arm={named['arm']}", "compile_cache="])
        validate(config)
        yield config


def test_the_table_cannot_be_changed_in_place():
    """Runs of one process share it: what one changed would be trained by the next, unnoticed."""
    for change in (lambda: ARMS.update(own=OWN), lambda: ARMS["tango"].turns.update(generator=baselines.solve_alone)):
        with pytest.raises(AttributeError):
            change()
    with pytest.raises(TypeError):
        ARMS["tango"] = OWN
    with pytest.raises(TypeError):
        ARMS["tango"].turns["generator"] = baselines.solve_alone


@pytest.mark.long
def test_an_arm_of_ones_own_is_trained_drawn_and_reported(config, tmp_path):
    workdir = tmp_path / "runs" / "own"
    assert run_or_resume(config, workdir, SILENT)["arm"] == "own_label"
    rows = read_metrics(workdir / "metrics.jsonl")
    assert [row["phase"] for row in rows if row["phase"] != "eval"] == ["warmup", "generator", "generator"]
    for row in rows:
        if row["phase"] == "generator":  # step labels, and no verifier to ask for them
            assert row["generator/alpha"] > 0 and "generator/reward/step" in row
            assert not any(name.startswith("verifier/") for name in row)
    assert (workdir / "curves.png").read_bytes().startswith(b"\x89PNG")

    runs = find_runs([workdir])
    with known(arms_of_runs([workdir])):
        drawn = comparison.comparison(lines_of(runs))
    assert OWN.label in json.dumps(drawn) and OWN.look.colour in json.dumps(drawn)
    assert drawn["table"]["rows"][0][0] == OWN.label
    build_page(runs, tmp_path / "report.html")
    payload = re.search(r'id="data-facts">(.*?)</script>', (tmp_path / "report.html").read_text("utf-8"))[1]
    [facts] = json.loads(gzip.decompress(base64.b64decode(payload)))["runs"]
    assert (facts["arm"], facts["is_default_arm"]) == ("own_label", False)


@pytest.mark.long
def test_an_arm_of_ones_own_is_planned(config):
    target = dataclasses.replace(TARGETS["a100-80gb"], compilers=("a_package_that_is_not_there", "json"))
    plan = make_plan(PlanOptions(config, target, devices=1, per_process=1, lengths=Even(0.5), is_json=False), SILENT)
    assert plan.counts == {"verifier": 1, "generator": 2}
    assert {role: set(turn.sampled) for role, turn in plan.likely.turns.items()} == {
        "verifier": {"generator", "verifier"}, "generator": {"generator"},
    }
