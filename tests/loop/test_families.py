"""A run of one's own problems with a checkpoint of each family whose layers are not Llama's."""

import dataclasses
import json

import pytest

from support.families import FAMILIES
from support.own_problems import ROOMY_CPU, write_problems
from support.tiny_checkpoints import MODEL, write_tiny_folder
from tango_jax.cli.command_line import load_config
from tango_jax.cli.validation import validate
from tango_jax.config import ROLES
from tango_jax.loop import run
from tango_jax.planning import own_problems
from tango_jax.runtime.console import Console
from tango_jax.tracking.metrics import read_metrics

# A turn of either role, of two problems.
SMALL = [
    "rl.prompts_per_step=2", "rl.samples_per_prompt=2", "rl.generator_steps=1", "rl.warmup_steps=1",
    "task.validation=2", "eval.problems=2", "task.stage_one=",
    *(f"{role}.{setting}" for role in ROLES for setting in ("max_response=24", "row_buckets=(4,)", "mesh.fsdp=1")),
]


@pytest.mark.long
@pytest.mark.parametrize("name", [name if name == "gemma3_text" else pytest.param(name, marks=pytest.mark.release)
                                  for name in FAMILIES])
def test_a_folder_and_a_file_of_problems_make_a_run(name, tmp_path, monkeypatch):
    monkeypatch.setattr(own_problems, "this_machine", lambda config: ROOMY_CPU)
    # A layer of each kind; tests/models/test_families.py has patterns that repeat.
    model = dataclasses.replace(MODEL, num_layers=2 if "pattern" in FAMILIES[name] else 1, **FAMILIES[name])
    folder = write_tiny_folder(tmp_path / "model", model, name)
    problems = write_problems(tmp_path / "problems.jsonl", 8)
    config = load_config("own_problems", SMALL, model=str(folder), problems=str(problems))
    validate(config)
    run.run_or_resume(config, tmp_path / "run", Console(enabled=False))
    rows = read_metrics(tmp_path / "run")
    for role in ROLES:
        gaps = [row[f"{role}/logprob_gap_max"] for row in rows if f"{role}/logprob_gap_max" in row]
        assert gaps and max(gaps) < 1e-4
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["compiles_after_warmup"] == 0
